"""Runs several jobs one after the other in the same processes, to load the libraries once. Products of matrices are
uneven here, so results that are equal bit for bit are so on any processor.

    torchrun tests/support/consecutive_jobs.py CONFIG JOBS

The file JOBS has a JSON list with the overrides of each job.
"""

import dataclasses
import json
import sys
from pathlib import Path

import torch.distributed as dist

from rltrain import trainer
from rltrain.runtime.world import World, join_world
from tests.support.uneven_products import uneven_products


def run_apart(name: str, config: Path, overrides: list[str]) -> None:
    """Runs one job with its own prefix of the shared store."""

    def join(timeout_s: float) -> World:
        world = join_world(timeout_s)
        return dataclasses.replace(world, store=dist.PrefixStore(name, world.store), restarted=False)

    trainer.join_within = join
    trainer.run_job(config, overrides)


if __name__ == "__main__":
    with uneven_products():
        for number, overrides in enumerate(json.loads(Path(sys.argv[2]).read_text())):
            run_apart(f"job{number}", Path(sys.argv[1]), overrides)
