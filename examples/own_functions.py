"""Sums with an environment and a reward of one's own, given as objects. After bash launch/quickstart.sh:

python examples/own_functions.py          # what the job would do
torchrun --standalone --nproc-per-node 2 examples/own_functions.py [key=value ...]
"""

import os
import sys

from rltrain import Config, Placement, dry_run, run
from rltrain.environments.interface import Action, Row, StepResult


class SecondTry:
    """A sum; who gets it wrong is asked once more."""

    def reset(self, row: Row, seed: int) -> str:
        self.question, self.answer, self.tries = str(row["prompt"]), str(row["label"]), 0
        return self.question

    def step(self, action: Action) -> StepResult:
        self.tries += 1
        right = action.text.rpartition(",")[2] == self.answer
        done = right or self.tries == 2
        return StepResult("" if done else self.question, right / self.tries, done)


def digits(prompt: str, response: str, label: str) -> float:
    """The share of digits in what the model said."""
    return sum(letter.isdigit() for letter in response) / max(1, len(response))


def make_config() -> Config:
    own = {
        "placement": {"actor, reference": 0, "rollout, reward, env": 1},
        "actor.parallel.tp": 1,
        "env": {"function": SecondTry, "num_workers": 1, "max_turns": 2, "max_turn_tokens": 40},
        "reward": {"functions": [{"function": "environment"}, {"function": digits, "weight": 0.1}]},
        "rollout.sampling.max_response_tokens": 96,
        "rollout.max_context_tokens": 112,
        "output_dir": "runs/own_functions",
    }
    return Config.from_file("configs/quickstart.yaml", own, *sys.argv[1:])


if __name__ == "__main__":  # workers load this file to find SecondTry and digits
    if "RANK" in os.environ:
        run(make_config)
    else:
        config = make_config()
        placement = Placement.of(config, world_size=2)
        print(f"the actor is on ranks {placement.ranks('actor')}, rank 1 hosts {', '.join(placement.hosts(1))}")
        print(dry_run(config, world_size=2))
