"""Runs launch/train.py under NCCL's rules (tests/support/nccl_rules.py), as on GPUs except for the device.

    torchrun tests/support/nccl_rules_train.py --config CONFIG [key=value ...]

Groups are of backend "nccl" and weights go through NcclWire. Engines record their decode steps, and these hold the
engine's communicator from then on.
"""

import sys
from collections.abc import Callable

import torch
import torch.distributed as dist

from rltrain.cli.main import run_script
from rltrain.reshard import execute
from rltrain.rollout.embedded import engine
from rltrain.rollout.embedded.decoder import Record
from rltrain.runtime.process_groups import plain_group
from rltrain.runtime.world import World
from tests.support import nccl_rules


def holding(_: torch.device, group: dist.ProcessGroup | None) -> Record | None:
    """Returns a recorder that executes the steps unchanged but counts them as recorded."""

    def record(step: Callable[[], None]) -> Callable[[], None]:
        def replay() -> None:
            step()

        nccl_rules.COMMUNICATORS[plain_group(group)].holders.add(replay)
        return replay

    return record if group is not None else None


nccl_rules.install()
World.backend = property(lambda _: "nccl")  # type: ignore[assignment]
execute.LARGE_BYTES = None  # type: ignore[assignment]
execute.Resharding.__init__.__kwdefaults__["share_memory"] = False
engine.recorder = holding

if __name__ == "__main__":
    sys.exit(run_script("train"))
