"""A text game about guessing a number. The answer to a guess is the direction of the number.

With other words it fits the characters of the quickstart's tiny model (see tools/make_text_game.py).
"""

import re
from typing import Any

from rltrain.environments.interface import Action, Row, StepResult

LAST_NUMBER = re.compile(r"\d+")


class GuessNumber:
    """One game. The row's `secret_key` is the number, and its prompt has the rules. The guess of a turn is its last
    number. The reward is 1 for the right guess within `max_guesses`."""

    def __init__(
        self,
        *,
        max_guesses: int = 4,
        higher: str = "higher",
        lower: str = "lower",
        no_number: str = "that is no number",
        secret_key: str = "label",
    ) -> None:
        self.max_guesses = max_guesses
        self.higher = higher
        self.lower = lower
        self.no_number = no_number
        self.secret_key = secret_key
        self.secret = self.num_guesses = 0

    def reset(self, row: Row, seed: int) -> None:
        """Begins a game. The first observation is the row's prompt."""
        self.secret = int(row[self.secret_key])
        self.num_guesses = 0

    def step(self, action: Action) -> StepResult:
        self.num_guesses += 1
        numbers = LAST_NUMBER.findall(action.text)
        guess = int(numbers[-1]) if numbers else None
        found = guess == self.secret
        return StepResult(
            self._answer(guess),
            reward=float(found),
            done=found or self.num_guesses == self.max_guesses,
            info={"found": float(found), "guesses": self.num_guesses},
        )

    def _answer(self, guess: int | None) -> str:
        if guess is None:
            return self.no_number
        return self.higher if guess < self.secret else self.lower

    def get_state(self) -> Any:
        return {"secret": self.secret, "num_guesses": self.num_guesses}

    def load_state(self, state: Any) -> None:
        self.secret, self.num_guesses = state["secret"], state["num_guesses"]
