"""One process of the job: checks everything, joins the others, trains, and fails with one message for all."""

import logging
import os
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch.distributed as dist

from rltrain.cluster.placement import resolve_placement, role_grids
from rltrain.cluster.process_groups import ProcessGroups, group_lists
from rltrain.cluster.world import World, join_world, start_process_groups
from rltrain.config.checks import check_against_architecture, check_config
from rltrain.config.loader import load_config
from rltrain.errors import UserError
from rltrain.reshard.families import read_architecture
from rltrain.reshard.kernels import native
from rltrain.roles.role import Job
from rltrain.schedule import Order, build_order, check
from rltrain.trainer import Trainer

RENDEZVOUS_TIMEOUT_S = 300.0
MESSAGE_GRACE_S = 5.0


def run_job(config_path: Path, overrides: Sequence[str]) -> int:
    """Exit status. A failed process ends at once, without tearing down process groups that others may still use."""
    world = join_world(RENDEZVOUS_TIMEOUT_S)
    logging.basicConfig(level=logging.WARNING, format=f"[rank {world.rank}] %(message)s")
    if world.local_rank:
        native.logger.setLevel(logging.ERROR)  # what a machine lacks is said once per machine
    try:
        job, order = prepare(config_path, overrides, world)
        Trainer(job, order).run()
    except UserError as error:
        _fail(world, "rltrain: " + "\n  ".join([str(error), *getattr(error, "__notes__", ())]), status=2)
    except Exception:
        _fail(world, f"rltrain: rank {world.rank} failed:\n{traceback.format_exc()}", status=1)
    dist.destroy_process_group()
    return 0


def prepare(config_path: Path, overrides: Sequence[str], world: World) -> tuple[Job, Order]:
    """Everything that can be refused is refused before the first process group exists. Collective over: all ranks."""
    config = load_config(config_path, overrides)
    check_config(config)
    world = replace(world, timeout_s=config.cluster.timeout_s)
    placement = resolve_placement(config.placement, world.size, world.ranks_per_node)
    grids = role_grids(config, placement)
    architecture = read_architecture(Path(config.model.path))
    check_against_architecture(config, grids, architecture)
    order = build_order(config, placement.roles)
    check(order, placement)
    native.backend(world.device.type)
    start_process_groups(world)
    lists = group_lists(grids, world.size)
    groups = ProcessGroups(lists, backend=world.backend, timeout_s=world.timeout_s)
    return Job(config, world, placement, grids, groups, architecture), order


def _fail(world: World, message: str, status: int) -> None:
    """Print `message` if no other rank has printed one yet, and end this process."""
    if world.store.add("failures", 1) == 1:
        print(f"\n{message}", file=sys.stderr, flush=True)
        world.store.set("failure_printed", "1")
    else:
        deadline = time.monotonic() + MESSAGE_GRACE_S
        while not world.store.check(["failure_printed"]) and time.monotonic() < deadline:
            time.sleep(0.05)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
