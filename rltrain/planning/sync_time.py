"""Estimates the bytes and seconds of a weight sync, by its real plan or as a lower bound for any plan."""

from collections import Counter
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from rltrain.models import Architecture
from rltrain.planning.hardware import Gpu
from rltrain.planning.memory import resident_bytes, sent_share
from rltrain.planning.planned import PlannedJob
from rltrain.reshard.fsdp_layout import fsdp_layout
from rltrain.reshard.layout import Layout
from rltrain.reshard.megatron_layout import megatron_layout
from rltrain.reshard.plan import Block, Planner
from rltrain.rollout.layout import adapters_of_engine, whole_engine
from rltrain.tasks.roles import drawing_roles, trained_roles

# The time of a planned reshard at given bandwidths, with the lower bound of any plan.


@dataclass(frozen=True)
class Links:
    """Bytes per second of one rank in each direction: to other nodes, and to other ranks of its node."""

    network: float
    node: float


@dataclass(frozen=True)
class SyncPrediction:
    """Seconds of a sync.

    `network` is the time of the busiest sender or receiver between nodes. `network_bound` is the time of an ideal split
    of the same bytes over all senders and receivers. `node` is the time of the busiest rank within its node.
    """

    network: float
    network_bound: float
    node: float
    busiest_sender_bytes: int
    busiest_receiver_bytes: int


def predict(planner: Planner, links: Links) -> SyncPrediction:
    """Returns the prediction for a plan. Transfers between nodes and within nodes use different links and count
    separately."""
    network_out, network_in, node_out, node_in = (Counter[int]() for _ in range(4))
    for line in planner.lines.all.values():
        for block in line.blocks:
            out, into = (network_out, network_in) if block.enters_once else (node_out, node_in)
            _add_sent(block, out)
            _add_received(block, into)
            if block.enters_once:
                _add_fan_out(block, node_out, node_in)
    sent, received = max(network_out.values(), default=0), max(network_in.values(), default=0)
    total = sum(network_in.values())
    senders, receivers = len(planner.source.ranks), len(planner.destination.ranks)
    return SyncPrediction(
        network=max(sent, received) / links.network,
        network_bound=max(total / senders, total / receivers) / links.network,
        node=max([0, *node_out.values(), *node_in.values()]) / links.node,
        busiest_sender_bytes=sent,
        busiest_receiver_bytes=received,
    )


def _add_sent(block: Block, sent: Counter[int]) -> None:
    bounds = np.clip(block.line.bounds, block.start, block.start + block.length)
    for rank, num_bytes in zip(block.line.candidates.tolist(), np.diff(bounds).tolist(), strict=True):
        sent[rank] += num_bytes


def _add_received(block: Block, received: Counter[int]) -> None:
    for number, ranks in zip(block.classes, block.receivers, strict=True):
        weight = int(block.node.needs.class_weights[number])
        for rank in ranks.tolist():
            received[rank] += weight // len(ranks) if block.enters_once else weight


def _add_fan_out(block: Block, sent: Counter[int], received: Counter[int]) -> None:
    """Adds the transfers in which each receiver sends its share to all others."""
    for number, ranks in zip(block.classes, block.receivers, strict=True):
        share = int(block.node.needs.class_weights[number]) // len(ranks)
        for rank in ranks.tolist():
            sent[rank] += share * (len(ranks) - 1)
            received[rank] += share * (len(ranks) - 1)


# Bytes and seconds of a weight sync: by its real plan, or as a lower bound for any plan.

BYTES_PER_COPY = 2
"""A copied byte is read and written."""


@dataclass(frozen=True)
class PlannedSync:
    """The sync from the actor's layout to the layout of another role."""

    job: PlannedJob
    role: str = "rollout"

    @cached_property
    def planner(self) -> Planner:
        job, source = self.job, self._training_layout("actor")
        if self.role not in drawing_roles():
            return Planner(source, self._training_layout(self.role), job.ranks_per_node)
        if (lora := job.config.model.lora) and job.config.keeps_adapters_apart(self.role):
            architecture, grid = job.architectures["actor"], job.grids[self.role]
            beside = adapters_of_engine(job.config, architecture, grid, self.role).layout
            adapted = architecture.adapted(lora.rank, lora.targets, vision=lora.vision)
            return Planner(self._layout_of(adapted, "actor"), beside, job.ranks_per_node)
        whole = whole_engine(job.config, job.architectures["actor"], job.grids[self.role], self.role)
        layouts = whole.filled_from(source)
        return Planner(layouts.source, layouts.destination, job.ranks_per_node)

    def _training_layout(self, role: str) -> Layout:
        return self._layout_of(self.job.architectures[role], role)

    def _layout_of(self, architecture: Architecture, role: str) -> Layout:
        grid = self.job.grids[role]
        if grid.is_sharded:
            trains = role in trained_roles()
            return fsdp_layout(architecture, grid, dtype="float32" if trains else self.job.config.model.dtype)
        return megatron_layout(
            architecture,
            grid,
            dtype=self.job.config.model.dtype,
            transformer_engine=not self.job.has_local_layers(role),
        )

    def prediction(self, gpu: Gpu) -> SyncPrediction:
        return predict(self.planner, Links(network=gpu.network, node=gpu.node))

    def seconds(self, gpu: Gpu) -> float:
        """Returns the seconds of a sync. Transfers within and between nodes overlap. Copies at both ends are added."""
        predicted = self.prediction(gpu)
        share = sent_share(self.job) if self.role == "rollout" else 1.0
        return share * max(predicted.network, predicted.node) + copying_s(self.job, self.role, gpu)


def least_sync_s(job: PlannedJob, role: str, gpu: Gpu) -> float:
    """Returns a lower bound without a plan.

    The bytes missing on a node enter it once, evenly over the links of senders and receivers. Bytes on the rank's own
    node come from there.
    """
    grid, actor = job.grids[role], job.grids["actor"]
    received = received_bytes(job, role)
    nodes = {rank // job.ranks_per_node for rank in grid.ranks}
    sources = {rank // job.ranks_per_node for rank in actor.ranks}
    model = received * grid.tp * grid.pp
    per_node = min(received * len(grid.ranks) / len(nodes), model)
    entering = per_node * len(nodes - sources)
    network = entering / min(len(actor.ranks), len(grid.ranks)) / gpu.network
    share = sent_share(job) if role == "rollout" else 1.0
    return share * max(network, received / gpu.node) + copying_s(job, role, gpu)


def received_bytes(job: PlannedJob, role: str) -> int:
    """Returns the bytes received by the role's rank with the most. For servers at URLs it is the bytes that pass
    through it."""
    if job.runs_elsewhere(role):
        is_shared = job.config.served(role).http.weights == "folder"
        return job.served_bytes_of(role) // (len(job.grids[role].ranks) if is_shared else 1)
    return max(resident_bytes(job, role, stage)["weights"] for stage in range(job.grids[role].pp))


def copying_s(job: PlannedJob, role: str, gpu: Gpu) -> float:
    """Returns the seconds of copies.

    Every byte is read and written at packing and at arrival. Weights of a server's process are copied once more. A
    delta counts the same: its bytes are packed, and compared with the last sent weights.
    """
    received = received_bytes(job, role)
    copies = 2 + (role in drawing_roles() and job.config.served(role).engine != "embedded")
    return BYTES_PER_COPY * copies * received / gpu.memory + gpu.efficiency.task_s
