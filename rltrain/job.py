"""One process of the job: checks everything, joins the others, trains, and fails with one message for all."""

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch.distributed as dist

from rltrain.checkpoint.node_memory import NodeMemory
from rltrain.checkpoint.run_folder import CheckpointFolder, Resumed, way_on
from rltrain.config.loader import load_config
from rltrain.config.schema import Config
from rltrain.data.hub import checkpoint_paths, with_local_copies
from rltrain.errors import ParityError
from rltrain.models import Architecture
from rltrain.planning.doubts import doubts, doubts_about_models, doubts_about_variables
from rltrain.planning.memory import memory_checkpoint_bytes
from rltrain.planning.planned import plan_job
from rltrain.planning.validation import check_config
from rltrain.planning.validation_schedule import place_config
from rltrain.reshard import native
from rltrain.roles.inputs import Inputs, JobRows, agreed_inputs
from rltrain.roles.resuming import (
    HeldCheckpoints,
    check_resumed,
    claim_folders,
    find_checkpoint,
    open_history,
    remaining_order,
    with_present_inputs,
)
from rltrain.roles.role import Job
from rltrain.runtime.ending import Ending, end_quietly
from rltrain.runtime.grid import job_leader
from rltrain.runtime.job_store import JobStore, Waiter
from rltrain.runtime.machine import end_job_by_threads, keep_freed_memory
from rltrain.runtime.nodes import refuse_folders_apart, refuse_machines, refuse_other_programs
from rltrain.runtime.placement import Placement, group_lists
from rltrain.runtime.process_groups import ProcessGroups
from rltrain.runtime.stopping import StopRequest, await_signal_of_launcher, leave_store
from rltrain.runtime.watchdog import Watchdog, join_within
from rltrain.runtime.world import TRANSPORT_TIMEOUT_S, World, start_process_groups
from rltrain.schedule.order import Order
from rltrain.schedule.steps import build_order
from rltrain.trainer import Trainer

logger = logging.getLogger(__name__)

RENDEZVOUS_TIMEOUT_S = 300.0


def run_job(config_path: Path, overrides: Sequence[str]) -> int:
    """`run_config` of a file with overrides."""
    return run_config(lambda: load_config(config_path, overrides))


def run_config(make_config: Callable[[], Config]) -> int:
    """Exit status. A failed process ends at once, without tearing down process groups that others may still use."""
    world = join_within(RENDEZVOUS_TIMEOUT_S)
    if world.device.type == "cpu":
        keep_freed_memory()
    ending = Ending(world.background, world.rank, world.size)
    end_job_by_threads(lambda name, error: ending.by(error, thread=name))
    logging.basicConfig(level=logging.WARNING, format=f"[rank {world.rank}] %(message)s")
    if world.local_rank:
        native.logger.setLevel(logging.ERROR)  # what a machine lacks is said once per machine
    try:
        job, order, watchdog = prepare(make_config, world)
        ending.doing, ending.way_on = watchdog.doing, watchdog.ending.way_on
        trainer = Trainer(job, order)
        came_to_its_end = trainer.run()
        if job.stop:
            await_signal_of_launcher(job.stop, world, trainer.checkpointing.stopped_by)
        watchdog.stop()
        if job.stop:
            job.stop.close()
    except Exception as error:
        ending.by(error)
    if not came_to_its_end:
        if reason := trainer.checkpointing.paused_by:
            ending.by(ParityError(reason))
        if job.world.rank == job.leader:
            logger.warning("%s", trainer.checkpointing.told_stop)
        leave_store(job.job_store, ending)
        end_quietly()  # experience that nobody will receive is on its way, which teardown would wait for
    dist.destroy_process_group()
    leave_store(job.job_store, ending)
    return 0


def prepare(make_config: Callable[[], Config], world: World) -> tuple[Job, Order, Watchdog]:
    """Everything that can be refused is refused before the first process group exists. Collective over: all ranks."""
    config = make_config()
    world = replace(world, timeouts=config.timeouts)
    job_store = JobStore(world, guarded=True)
    watchdog = start_watchdog(job_store, config)
    refuse_other_programs(config, world)
    check_config(config)
    config = with_local_copies(config, world, job_store.heartbeat.advance)
    refuse_machines(config, world, checkpoint_paths(config))
    placed = place_config(config, world.size, world.ranks_per_node)
    placement, grids, architectures = placed.placement, placed.grids, placed.architectures
    native.backend(world.device.type)
    if world.rank == 0:
        of_models = doubts_about_models(config, architectures)
        of_placement = doubts(config, placement, on_gpus=world.device.type == "cuda")
        for doubt in (*of_placement, *of_models, *doubts_about_variables(os.environ)):
            logger.warning(doubt)
    leader = job_leader(grids)
    refuse_folders_apart(world, claim_folders(config, leader, job_store))
    rows = JobRows(config, job_store, architectures["actor"])
    inputs = agreed_inputs(rows, grids)
    order, resumed, memory = where_to_begin(config, placement, architectures, inputs, leader, job_store)
    start_process_groups(world)
    lists = group_lists(grids)
    releasable = set(lists) if config.residency.communicators == "release" else set()
    groups = ProcessGroups(lists, backend=world.backend, timeout_s=TRANSPORT_TIMEOUT_S, reopenable=releasable)
    waiter = Waiter(job_store, config.timeouts.report_s)
    stop = listen_for_stop(job_store, config)
    known = config, world, placement, grids, groups, architectures, job_store, waiter, rows, inputs
    return Job(*known, resumed, stop, memory=memory), order, watchdog


def where_to_begin(
    config: Config,
    placement: Placement,
    architectures: Mapping[str, Architecture],
    inputs: Inputs,
    leader: int,
    job_store: JobStore,
) -> tuple[Order, Resumed | None, NodeMemory | None]:
    """What is to be done, the checkpoint from which it goes on, if any, and where others go to beside the disk.
    Collective over: all ranks."""
    settings = config.checkpoint.memory
    held = HeldCheckpoints(config, settings.folder, job_store) if settings else None
    if held:
        planned = plan_job(config, placement, architectures, job_store.world.ranks_per_node)
        held.refuse_without_room(memory_checkpoint_bytes(planned, held.node))
    checkpoint = find_checkpoint(config, job_store, held)
    if checkpoint is not None:
        check_resumed(config, architectures, checkpoint, restarted=job_store.world.restarted)
        checkpoint = with_present_inputs(config, checkpoint, inputs, says=job_store.world.rank == 0)
    logs = open_history(config, checkpoint) if job_store.world.rank == leader else {}
    memory = held.begin(checkpoint, leader) if held else None
    if checkpoint is None:
        return build_order(config, placement), None, memory
    order, continues = remaining_order(config, placement, checkpoint)
    if not continues and job_store.world.rank == 0:
        logger.warning("the run had ended, or its schedule, roles or rows have changed: the steps ahead are drawn anew")
    return order, replace(checkpoint, continues=continues, logs=logs), memory


def listen_for_stop(job_store: JobStore, config: Config) -> StopRequest:
    """From here on the signals that ask the job to stop make it save first, where it saves anything."""
    world = job_store.world
    stop = StopRequest(
        world.rank,
        world.background,
        job_store.observer,
        saves=config.checkpoint.saves,
        within_s=config.checkpoint.stop_within_s,
        last_resort=CheckpointFolder(Path(config.checkpoint_dir)).last_good,
        looks_at=range(world.size) if world.rank == 0 else {0, *world.ranks_on_node},
    )
    stop.listen()
    return stop


def start_watchdog(job_store: JobStore, config: Config) -> Watchdog:
    """From here on no wait of this rank is without a limit."""
    job_store.heartbeat.start()
    watchdog = Watchdog(
        job_store.heartbeat,
        job_store.observer,
        job_store.world.background,
        Path(config.output_dir),
        beats=job_store.beats,
    )
    watchdog.ending.way_on = partial(way_on, config)
    watchdog.start()
    return watchdog
