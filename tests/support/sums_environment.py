"""An environment of tests for a model that adds. It asks for a second sum after the first."""

import time

from rltrain.environments.interface import Action, Row, StepResult


class TwoSums:
    """Asks for the row's sum, then for one given by the seed. Each right answer earns 0.5."""

    def __init__(self, step_s: float = 0.0, fails: bool = False) -> None:
        self.step_s, self.fails = step_s, fails
        self.answers: list[str] = []
        self.num_offloads, self.is_away = 0, False

    def reset(self, row: Row, seed: int) -> str:
        first, second = 100 + seed % 900, 100 + seed // 900 % 900
        self.questions = [str(row["prompt"]), f"{first}+{second}="]
        self.answers = [str(row["label"]), str(first + second)]
        return self.questions.pop(0)

    def step(self, action: Action) -> StepResult:
        time.sleep(self.step_s)
        if self.fails:
            raise KeyError("no such door")
        right = action.text.rpartition(",")[2] == self.answers.pop(0) and not action.truncated
        done = not self.answers
        assert not self.is_away, "the environment acts only with its memory on the device"
        info = {"right": float(right), "offloads": self.num_offloads}
        return StepResult("" if done else self.questions.pop(0), 0.5 * right, done, info)

    def offload(self) -> None:
        self.is_away, self.num_offloads = True, self.num_offloads + 1

    def onload(self) -> None:
        self.is_away = False

    def get_state(self) -> list[list[str]]:
        return [self.questions, self.answers]

    def load_state(self, state: list[list[str]]) -> None:
        self.questions, self.answers = state
