"""Runs launch/train.py in a job with one more role: an adviser that finds every token equally likely.

    torchrun tests/support/new_role_train.py --config CONFIG [key=value ...]

A new role needs its class, the declaration of its task, and one line each in the lists of classes and fields.
"""

import math
import sys

import torch

from rltrain import trainer
from rltrain.cli.main import run_script
from rltrain.roles.role import Role
from rltrain.tasks.declaration import RoleTasks, Task
from rltrain.tasks.roles import DECLARED, TRANSFERS

TASK = "adviser_logprobs"


class Adviser(Role):
    name = "adviser"

    def adviser_logprobs(self, step: int, chunk: int) -> None:
        """Posts the adviser's log-probs of the generated tokens."""
        scored = self.shipments.pop(("scored", step, chunk))
        uniform = -math.log(self.job.architecture.vocab_size)
        opinion = torch.full_like(scored.experience.rollout_logprobs, uniform)
        self.shipments[TASK, step, chunk] = scored.with_fields(reference_logprobs=opinion)


DECLARED["adviser"] = RoleTasks(
    "adviser", (Task(TASK, takes=("scored",), leaves=(TASK,), informs="actor"),), needed_by_algorithm=False
)
TRANSFERS[TASK] = ("group_ids", "lengths", "reference_logprobs")
trainer.ROLES["adviser"] = Adviser

if __name__ == "__main__":
    sys.exit(run_script("train"))
