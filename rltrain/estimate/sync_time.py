"""Bytes and seconds of a weight sync: by the real plan, or by the least that any plan could take."""

from dataclasses import dataclass
from functools import cached_property

from rltrain.estimate.hardware import Gpu
from rltrain.estimate.planned import PlannedJob
from rltrain.estimate.shares import stage_layers
from rltrain.reshard.megatron_layout import megatron_layout
from rltrain.reshard.plan.planner import Planner
from rltrain.reshard.plan.prediction import Links, Prediction, predict
from rltrain.rollout.layout import whole_engine

BYTES_PER_COPY = 2
"""A byte that is copied is read and written."""


@dataclass(frozen=True)
class PlannedSync:
    """From the actor's layout to the rollout's."""

    job: PlannedJob

    @cached_property
    def planner(self) -> Planner:
        job = self.job
        architecture, grid = job.architectures["actor"], job.grids["actor"]
        source = megatron_layout(
            architecture,
            grid,
            dtype=job.config.model.dtype,
            transformer_engine=job.config.model.transformer_impl != "local",
            layers_per_stage=stage_layers(architecture.num_layers, grid.pp),
        )
        layouts = whole_engine(job.config, architecture, job.grids["rollout"]).filled_from(source)
        return Planner(layouts.source, layouts.destination, job.ranks_per_node)

    def prediction(self, gpu: Gpu) -> Prediction:
        return predict(self.planner, Links(network=gpu.network, node=gpu.node))

    def seconds(self, gpu: Gpu) -> float:
        """Transfers within and between nodes beside each other, and copies at both ends."""
        predicted = self.prediction(gpu)
        return max(predicted.network, predicted.node) + copying_s(self.job, gpu)


def least_sync_s(job: PlannedJob, gpu: Gpu) -> float:
    """Without a plan: what every node lacks enters it once, shared out evenly over the links of senders and of
    receivers; what is on the rank's own node comes from there."""
    rollout, actor = job.grids["rollout"], job.grids["actor"]
    received = job.served_bytes
    nodes = {rank // job.ranks_per_node for rank in rollout.ranks}
    sources = {rank // job.ranks_per_node for rank in actor.ranks}
    model = received * rollout.tp
    per_node = min(received * rollout.dp * rollout.tp / len(nodes), model)
    entering = per_node * len(nodes - sources)
    network = entering / min(len(actor.ranks), len(rollout.ranks)) / gpu.network
    return max(network, received / gpu.node) + copying_s(job, gpu)


def copying_s(job: PlannedJob, gpu: Gpu) -> float:
    """Every byte is read and written where it is packed and where it arrives, and once more for a server's process."""
    received = job.served_bytes
    copies = 2 + (job.config.rollout.engine == "sglang")
    return BYTES_PER_COPY * copies * received / gpu.memory + gpu.efficiency.task_s
