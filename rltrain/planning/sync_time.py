"""Bytes and seconds of a weight sync, by its real plan or by the least any plan could take."""

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

# How long a planned reshard takes at given link bandwidths, beside the least that any plan could take.


@dataclass(frozen=True)
class Links:
    """Bytes per second in each direction of one rank: to other nodes, and to other ranks of its node."""

    network: float
    node: float


@dataclass(frozen=True)
class SyncPrediction:
    """Seconds. `network_bound` is that of the ideal split of the same bytes over all senders and all receivers.

    `network` is that of the busiest sender or receiver between nodes; `node` that of the busiest within its node.
    """

    network: float
    network_bound: float
    node: float
    busiest_sender_bytes: int
    busiest_receiver_bytes: int


def predict(planner: Planner, links: Links) -> SyncPrediction:
    """Network and node transfers counted apart: they use different links."""
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
    """Each receiver sends its share on to all others and gets theirs."""
    for number, ranks in zip(block.classes, block.receivers, strict=True):
        share = int(block.node.needs.class_weights[number]) // len(ranks)
        for rank in ranks.tolist():
            sent[rank] += share * (len(ranks) - 1)
            received[rank] += share * (len(ranks) - 1)


# Bytes and seconds of a weight sync: by the real plan, or by the least that any plan could take.

BYTES_PER_COPY = 2
"""A byte that is copied is read and written."""


@dataclass(frozen=True)
class PlannedSync:
    """From the actor's layout to that of another role."""

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
            adapted = architecture.adapted(lora.rank, lora.targets)
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
        """Transfers within and between nodes beside each other, and copies at both ends."""
        predicted = self.prediction(gpu)
        share = sent_share(self.job) if self.role == "rollout" else 1.0
        return share * max(predicted.network, predicted.node) + copying_s(self.job, self.role, gpu)


def least_sync_s(job: PlannedJob, role: str, gpu: Gpu) -> float:
    """Without a plan: what every node lacks enters it once, shared out evenly over the links of senders and of
    receivers; what is on the rank's own node comes from there."""
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
    """On the rank of the role that has most; of what passes through it to servers of others, its share or all."""
    if job.runs_elsewhere(role):
        is_shared = job.config.served(role).http.weights == "folder"
        return job.served_bytes_of(role) // (len(job.grids[role].ranks) if is_shared else 1)
    return max(resident_bytes(job, role, stage)["weights"] for stage in range(job.grids[role].pp))


def copying_s(job: PlannedJob, role: str, gpu: Gpu) -> float:
    """Every byte is read and written where it is packed and where it arrives, and once more for a server's process; or
    where it is packed, and compared with what was sent last."""
    received = received_bytes(job, role)
    copies = 2 + (role in drawing_roles() and job.config.served(role).engine != "embedded")
    return BYTES_PER_COPY * copies * received / gpu.memory + gpu.efficiency.task_s
