"""The run of one process: it checks the config, joins the other ranks, builds its roles and executes the order."""

import hashlib
import logging
import os
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from rltrain.algorithms.registry import algorithm_of
from rltrain.checkpoint.node_memory import NodeMemory
from rltrain.checkpoint.run_folder import CheckpointFolder, Resumed, way_on
from rltrain.config.loader import load_config
from rltrain.config.schema import Config
from rltrain.data.hub import checkpoint_paths, with_local_copies
from rltrain.errors import DivergenceError, ParityError
from rltrain.exchange.exchange import Exchange
from rltrain.exchange.transport import Transport
from rltrain.models import Architecture
from rltrain.observability.evaluations import EvaluationTable
from rltrain.observability.progress import Progress, checkpoints_of
from rltrain.observability.reporter import Reporter, RoleWork, Sink, of_whole_job
from rltrain.observability.run_logs import write_job
from rltrain.observability.sinks import Sinks
from rltrain.observability.trace import Trace, start_trace
from rltrain.offload.device_memory import device_memory
from rltrain.offload.memory_parts import memory_saver
from rltrain.offload.offload import CommunicatorPlan, Communicators, Offloader
from rltrain.planning.doubts import doubts, doubts_about_models, doubts_about_variables
from rltrain.planning.hardware import DEFAULT_GPU, GB, GPUS, known_gpu
from rltrain.planning.memory import memory_checkpoint_bytes
from rltrain.planning.options import roles_with_auto, sizes_of_micro_batches, with_keys
from rltrain.planning.planned import plan_job
from rltrain.planning.validation import check_config
from rltrain.planning.validation_schedule import PlacedConfig, place_config
from rltrain.reshard import native
from rltrain.roles.actor import ActorRole
from rltrain.roles.checkpointing import Checkpointing, RunControl
from rltrain.roles.critic import CriticRole
from rltrain.roles.env import EnvRole
from rltrain.roles.evaluation import EvaluationRole
from rltrain.roles.inputs import Inputs, JobRows, agreed_inputs
from rltrain.roles.joint_tasks import EndOfTraining, InFlightSyncs
from rltrain.roles.prompt_images import ImageCounts
from rltrain.roles.reference import InferenceRole, ReferenceRole, TeacherRole, is_actors_base, uses_actor_modules
from rltrain.roles.resuming import (
    HeldCheckpoints,
    check_resumed,
    claim_folders,
    find_checkpoint,
    open_history,
    remaining_order,
    restore,
    with_present_inputs,
)
from rltrain.roles.reward import RewardRole
from rltrain.roles.role import Job, Metrics, Role
from rltrain.roles.rollout import RolloutRole
from rltrain.roles.scoring_models import JudgeRole, RewardModelRole
from rltrain.roles.transfers import Transfers
from rltrain.roles.weight_sync import weight_syncs
from rltrain.runtime.ending import Ending, end_quietly
from rltrain.runtime.grid import job_leader
from rltrain.runtime.image_files import ImageStore
from rltrain.runtime.job_store import JobStore, Waiter
from rltrain.runtime.machine import end_job_by_threads, keep_freed_memory
from rltrain.runtime.nodes import refuse_folders_apart, refuse_machines, refuse_other_programs
from rltrain.runtime.placement import Placement, group_lists
from rltrain.runtime.process_groups import ProcessGroups
from rltrain.runtime.stopping import StopRequest, await_signal_of_launcher, leave_store
from rltrain.runtime.watchdog import Watchdog, join_within
from rltrain.runtime.world import TRANSPORT_TIMEOUT_S, World, start_process_groups
from rltrain.schedule.iterations import build_order
from rltrain.schedule.order import CHECKPOINT, WEIGHT_SYNC, Entry, Order
from rltrain.schedule.shape import RunShape
from rltrain.tasks.roles import DECLARED, device_roles

# The roles of a rank. They are built one after another, so roles on the same device need not fit on it together.

ROLES: dict[str, type[Role]] = {
    role.name: role
    for role in (
        *(ActorRole, CriticRole, ReferenceRole, TeacherRole, InferenceRole, RewardModelRole, JudgeRole),
        *(EvaluationRole, EnvRole, RolloutRole, RewardRole),
    )
}


def host_roles(job: Job, order: Order, trace: Trace) -> tuple[dict[str, Role], Offloader]:
    """Builds the roles of this rank, and the offloader for their memory. Collective over: all ranks."""
    offloader = _offloader(job, order, trace)
    roles: dict[str, Role] = {}
    for name in job.placement.hosts(job.world.rank):
        roles[name] = ROLES[name].beside(job, roles)
        if name in job.offloads:
            offloader.admit(name, roles[name].parts)
    return roles, offloader


def _offloader(job: Job, order: Order, trace: Trace) -> Offloader:
    def span(name: str, category: str) -> AbstractContextManager[object]:
        return trace.span(name, category)

    settings = job.config.residency
    return Offloader(
        order,
        job.offloads,
        device_memory(job.world.device),
        guests=("reference",) if uses_actor_modules(job) or is_actors_base(job) else (),
        sharing=("reference",) if is_actors_base(job) else (),
        prefetch=settings.prefetch,
        communicators=_communicators(job, order) if settings.communicators == "release" else None,
        memory_saver=memory_saver() if settings.allocator == "torch_memory_saver" else None,
        span=span,
    )


def _communicators(job: Job, order: Order) -> Communicators:
    staying = {name for name in job.placement.roles if name not in device_roles() or not _may_leave(job, name)}
    plan = CommunicatorPlan(order, job.placement, job.grids, job.world.rank, lists=job.groups.reopenable, kept=staying)
    return Communicators(plan, job.groups)


def _may_leave(job: Job, role: str) -> bool:
    return job.offload_of(role) is not False


# The trainer: executes the order of tasks with the roles of this rank.


def reporting_rank(job: Job, entry: Entry) -> int | None:
    """Returns the rank that reports a task's metrics for the whole role.

    Returns None for checkpoints and early stops of role evaluation. It works outside the steps and reports only
    evaluations.
    """
    beside = DECLARED[entry.roles[0]].beside_steps and entry.name in (CHECKPOINT, "stop_if_reached")
    return None if beside else job.leader_of(entry.roles[0])


def build_reporter(job: Job, order: Order, at_publish: Callable[[], Metrics]) -> Reporter:
    def expected(step: int) -> Counter[int]:
        ranks = (reporting_rank(job, entry) for _, entry in order.of_step(step) if entry.kind == "task")
        return Counter(rank for rank in ranks if rank is not None)

    logging_rank = job.leader
    is_logging = job.world.rank == logging_rank
    sinks: list[Sink] = []
    if is_logging:
        write_job(job.config, job.world.size, job.world.ranks_per_node)
        goes_on = job.resumed is not None
        shown: Sink = EvaluationTable(job.config)
        if algorithm_of(job.config).trains:
            shown = progress = Progress(job.config)
            progress.say(checkpoints_of(job.config))
        sinks = [Sinks(job.config, goes_on=goes_on, first_step=job.first_step), shown]
    found = (reporting_rank(job, entry) for entry in order.distinct() if entry.kind == "task")
    ranks = {rank for rank in found if rank is not None}
    late = [job.leader_of(role) for role in job.placement.roles if DECLARED[role].beside_steps]
    steps = range(job.first_step, job.config.steps + 1)

    def of_whole_step(merged: Metrics) -> Metrics:
        found = of_whole_job(merged, job.world.size, peak_flops(job))
        if merged.keys() >= {"train/tokens", "perf/step_time_s"}:
            found["perf/tokens_per_gpu_s"] = merged["train/tokens"] / merged["perf/step_time_s"] / job.world.size
        return found

    return Reporter(
        job.job_store, expected, steps, ranks, logging_rank, sinks, at_publish, job.shape.lead, of_whole_step, late
    )


def peak_flops(job: Job) -> float | None:
    """Returns the device's peak FLOP/s in `model.dtype`, or None on a CPU or an unknown GPU."""
    if job.world.device.type != "cuda":
        return None
    gpu = known_gpu(torch.cuda.get_device_name(job.world.device))
    return gpu.flops(job.config.model.dtype) if gpu else None


IMAGE_COUNTS = ("decoded", "cache_hits", "bytes_sent")
"""Names of metrics after images/, added up over all ranks."""


class Trainer:
    """One rank's part of the run."""

    def __init__(self, job: Job, order: Order, control: RunControl) -> None:
        self.job, self.order = job, order
        self.rank = job.world.rank
        self._agree_on_order()
        job.heartbeat.begin("building its roles")
        self.hosted = set(job.placement.hosts(self.rank))
        self.trace = start_trace(job.config, self.rank, job.placement.hosts(self.rank))
        job.heartbeat.task_clock.span = self.trace.span
        self.roles, self.offloader = host_roles(job, order, self.trace)
        syncs = weight_syncs(job, order, self.roles)
        self.in_flight = InFlightSyncs(job, order, self.roles, self._join_sync, self._may_join)
        transport = Transport(self.rank, job.world.address, job.world.store, job.world.background)
        exchange = Exchange(
            self.rank, transport, job.waiter, job.world.ranks_per_node, self.in_flight.serve, job.images
        )
        for role in self.roles.values():
            role.serve = self.in_flight.serve
        self.transfers = Transfers(
            job.shape,
            job.grids,
            order,
            exchange,
            self.roles,
            self.trace,
            job.hold_received_images,
            saves_images="env" in job.placement.roles,
        )
        self.newest_step = 0
        """The last step with an entry executed by this rank."""
        self.image_counts = ImageCounts(job.world.store)
        self.reporter = build_reporter(job, order, self._metrics_of_rank)
        restore(job, self.transfers, self.reporter)
        self.checkpointing = Checkpointing(job, order, self.roles, self.transfers, self.reporter, control)
        self.end = EndOfTraining(job, order, self.hosted)
        self.joint_tasks = {**syncs, CHECKPOINT: self.checkpointing.at_boundary, **self.end.tasks}
        self.work = RoleWork(peak_flops(job))

    def run(self) -> bool:
        """Executes this rank's entries of the order.

        Returns False if a signal or a pause stopped the run before its end.
        """
        try:
            for position, entry in self.order.items():
                if self.checkpointing.stopped_by:
                    self.end.position = position
                    break
                if self.hosted.isdisjoint(entry.actors) or self.end.skips(position, entry):
                    continue
                self.checkpointing.look()
                if not self.in_flight.come_to(position, entry):
                    self._execute(position)
            self._come_to_the_end()
        except BaseException as error:
            error.add_note(f"on rank {self.rank}, which {self.job.job_store.activity(self.rank)}")
            self.reporter.abandon()
            self.trace.close()
            raise
        self.reporter.close()
        if "evaluation" in self.job.placement.roles:
            self.reporter.await_end(self.job.leader_of("evaluation"))
        self.checkpointing.close()
        self.job.heartbeat.finish()
        for role in self.roles.values():
            role.close()
        self.transfers.close()
        if self.job.images is not None:
            self.job.images.close()
        self.trace.close()
        return self.checkpointing.stopped_by is None

    def _come_to_the_end(self) -> None:
        self.transfers.finish(end=self.end.position)
        self.checkpointing.finish()
        if self.end.ranks and not self.checkpointing.stopped_by:
            with self.trace.span("the end of the others", "wait"):
                self.end.meet()
        if not self.hosted:
            with self.trace.span("the end of the run", "wait"):
                self.reporter.await_end()

    def _execute(self, position: int) -> None:
        entry = self.order[position]
        self._release_images(entry.step)
        role = "+".join(role for role in entry.actors if role in self.hosted)
        self.job.heartbeat.begin(
            entry.name if entry.kind == "task" else f"{entry.kind} {entry.name}",
            role,
            entry.step,
            entry.chunk,
            position=None if self.in_flight.has(entry) else position,
        )
        with self.trace.span(entry.name, entry.kind, role=role, step=entry.step, chunk=entry.chunk):
            {"task": self._task, "post": self.transfers.post, "wait": self.transfers.wait}[entry.kind](position)
        self._publish_image_counts()

    def _release_images(self, step: int) -> None:
        """Ends the holding of images for steps that all of this rank's roles have completed, at the first entry of
        `step`."""
        if self.job.images is not None and step > self.newest_step:
            self.job.images.release_before(step - self.job.shape.lead - 1)
            self.newest_step = step

    def _publish_image_counts(self) -> None:
        decoder = self.job.decoder
        if decoder is not None:
            counts = (decoder.num_decoded, decoder.num_found, self.transfers.exchange.image_bytes_sent)
            self.image_counts.publish(dict(zip(IMAGE_COUNTS, counts, strict=True)))

    def _image_metrics(self) -> Metrics:
        """Returns the counts of all ranks since the last report. Ranks add theirs after every entry of the order."""
        if self.job.images is None:
            return {}
        return {f"images/{name}": count for name, count in self.image_counts.take(IMAGE_COUNTS).items()}

    def _join_sync(self, position: int) -> None:
        """Executes a weight sync in the middle of another task, once the actor has reached it."""
        with self.job.heartbeat.meanwhile():
            self._execute(position)
        if self.order[position].name == WEIGHT_SYNC:
            self.offloader.changed("rollout", "weights")

    def _task(self, position: int) -> None:
        entry = self.order[position]
        if not self.in_flight.is_joined(entry):
            self.offloader.enter(position)
        self.in_flight.announce(entry)
        task = self.joint_tasks.get(entry.name) or getattr(self._first_of(entry), entry.name)
        with self.job.heartbeat.task_clock.task(entry.name) as spent:
            metrics: Metrics = task(entry.step, entry.chunk) or {}
            if self.job.world.device.type == "cuda":
                # The next task's communication must not begin before this task's is over.
                torch.cuda.synchronize()
        self.work.add(self.hosted & set(entry.actors), spent.work_s, *self.job.operations.take())
        if entry.name != CHECKPOINT or self.checkpointing.last_saved == entry.step:
            metrics |= {f"perf/{entry.name}_s": spent.work_s, f"perf/{entry.name}_wait_s": spent.wait_s}
        if self.rank == reporting_rank(self.job, entry):
            self.reporter.add(entry.step, metrics)

    def _first_of(self, entry: Entry) -> Role:
        """Returns this rank's role that executes the task of `entry`. If several of the task's roles share the rank,
        the first one does."""
        return next(self.roles[name] for name in entry.roles if name in self.roles)

    def _metrics_of_rank(self) -> Metrics:
        """Returns the metrics of the roles led by this rank. The job's leader adds the metrics of the whole rank."""
        leads = {name for name in self.hosted if self.job.leader_of(name) == self.rank}
        of_rank = {"host", "offload", "onload", "peak", "reserved"} if self.rank == self.job.leader else set()
        memory = self.offloader.metrics()
        metrics = {name: memory[name] for name in memory if re.split("[/_]", name)[1] in leads | of_rank}
        of_device = {name: memory[f"memory/{name}"] for name in ("peak_bytes", "reserved_bytes")}
        metrics |= {f"memory/{role}_{name}": size for role in leads for name, size in of_device.items()}
        metrics |= self.work.metrics({role: len(self.job.placement.ranks(role)) for role in sorted(leads)})
        if self.rank != self.job.leader:
            return metrics
        self._publish_image_counts()
        return metrics | self.checkpointing.metrics() | self._image_metrics()

    def _may_join(self, position: int, sync: int) -> bool:
        """Returns whether an engine at `position` may join the weight sync at position `sync` early.

        A method, because `checkpointing` does not exist yet when the syncs are built.
        """
        return self.checkpointing.may_join(position, sync)

    def _agree_on_order(self) -> None:
        """Compares this rank's order with rank 0's before anything else. Ranks with different orders would wait for
        each other forever."""
        self.job.job_store.put(f"order/{self.rank}", self.order.digest())
        first = self.job.job_store.get("order/0", waiting_for="the order of tasks of rank 0")
        if first != self.order.digest():
            raise DivergenceError(
                f"Rank {self.rank} has another order of tasks than rank 0. "
                "Start every rank with the same code, config file and overrides."
            )


# The process: checks everything, joins the others, trains, and reports a failure with one message for the job.

logger = logging.getLogger(__name__)

RENDEZVOUS_TIMEOUT_S = 300.0

KEPT_STEPS = 2
"""Steps for which an unused image stays, in addition to the lead of generation."""


def run_job(config_path: Path, overrides: Sequence[str]) -> int:
    """Loads a config file with overrides and runs it. Returns the exit status."""
    return run_config(lambda: load_config(config_path, overrides))


def run_config(make_config: Callable[[], Config]) -> int:
    """Runs this process's part of the job and returns its exit status.

    A failed process ends at once. It does not tear down process groups still in use by other ranks.
    """
    world = join_within(RENDEZVOUS_TIMEOUT_S)
    if world.device.type == "cpu":
        keep_freed_memory()
    ending = Ending(world.background, world.rank, world.size)
    end_job_by_threads(lambda name, error: ending.by(error, thread=name))
    logging.basicConfig(level=logging.WARNING, format=f"[rank {world.rank}] %(message)s")
    if world.local_rank:
        native.logger.setLevel(logging.ERROR)  # one warning per machine is enough
    try:
        job, order, control, watchdog = prepare(make_config, world)
        ending.doing, ending.way_on = watchdog.doing, watchdog.ending.way_on
        trainer = Trainer(job, order, control)
        came_to_its_end = trainer.run()
        await_signal_of_launcher(control.stop, world, trainer.checkpointing.stopped_by)
        watchdog.stop()
        control.stop.close()
    except Exception as error:
        ending.by(error)
    if not came_to_its_end:
        if reason := trainer.checkpointing.paused_by:
            ending.by(ParityError(reason))
        if job.world.rank == job.leader:
            logger.warning("%s", trainer.checkpointing.told_stop)
        leave_store(job.job_store, ending)
        end_quietly()  # a teardown would wait for messages without a receiver
    dist.destroy_process_group()
    leave_store(job.job_store, ending)
    return 0


def prepare(make_config: Callable[[], Config], world: World) -> tuple[Job, Order, RunControl, Watchdog]:
    """Makes every check that can refuse the job, and then creates the process groups. Collective over: all ranks."""
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
    config = with_micro_batches(config, placed, job_store)
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
    waiter = Waiter(job_store)
    stop = listen_for_stop(job_store, config)
    rows.first_step = resumed.data_from if resumed else 0
    known = config, world, placement, grids, groups, architectures, job_store, waiter, rows, stop.pause
    job = Job(*known, resumed, open_images(config, world))
    return job, order, RunControl(inputs, stop, memory), watchdog


MICRO_BATCHES = "micro_batch_tokens"
"""The key of the chosen sizes in the job's store."""


def with_micro_batches(config: Config, placed: PlacedConfig, job_store: JobStore) -> Config:
    """Returns the config with numbers in place of micro_batch_tokens: auto, chosen by rank 0 for its GPU.

    On a CPU nothing is replaced. Collective over: all ranks.
    """
    world = job_store.world
    if world.device.type != "cuda" or not roles_with_auto(config, placed.grids):
        return config
    if world.rank == 0:
        gpu = known_gpu(torch.cuda.get_device_name(world.device)) or GPUS[DEFAULT_GPU]
        memory_gb = torch.cuda.get_device_properties(world.device).total_memory / GB
        job = plan_job(config, placed.placement, placed.architectures, world.ranks_per_node)
        chosen = sizes_of_micro_batches(job, gpu.model_copy(update={"memory_gb": memory_gb}))
        logger.warning("%s", ", ".join(f"{key}: auto is {tokens}" for key, tokens in chosen.items()))
        job_store.put(MICRO_BATCHES, chosen)
    return with_keys(config, job_store.get(MICRO_BATCHES, waiting_for="the sizes of micro-batches from rank 0"))


def open_images(config: Config, world: World) -> ImageStore | None:
    """Opens the store of decoded images on this node, with model.vision."""
    if config.model.vision is None:
        return None
    output_dir, images = Path(config.output_dir).resolve(), config.data.images
    place = hashlib.blake2b(str(output_dir).encode(), digest_size=8).hexdigest()
    return ImageStore.open(
        f"{output_dir.name} {place} {world.node}",
        world.rank,
        folder=images.folder,
        keep_steps=RunShape.of(config).lead + KEPT_STEPS,
        cache_bytes=images.cache_gb * 1e9 / world.ranks_per_node,
    )


def where_to_begin(
    config: Config,
    placement: Placement,
    architectures: Mapping[str, Architecture],
    inputs: Inputs,
    leader: int,
    job_store: JobStore,
) -> tuple[Order, Resumed | None, NodeMemory | None]:
    """Returns the order to execute, the checkpoint to resume from, and the node memory for checkpoints.

    The checkpoint is None if the run begins at its first step. The node memory is None unless `checkpoint.memory` is
    set. Collective over: all ranks.
    """
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
        logger.warning("the run was finished, or its schedule, roles or rows changed: later steps are generated again")
    return order, replace(checkpoint, continues=continues, logs=logs), memory


def listen_for_stop(job_store: JobStore, config: Config) -> StopRequest:
    """Starts to handle stop signals. If the job saves checkpoints, it then saves one before it ends."""
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
    """Starts the heartbeat and the watchdog of this rank. From here on every wait has a time limit."""
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
