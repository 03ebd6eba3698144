"""Seconds that collectives and copies take between the ranks of a grid."""

from dataclasses import dataclass

import numpy as np

from rltrain.estimate.hardware import Gpu
from rltrain.runtime.grid import Grid


@dataclass(frozen=True)
class GroupLink:
    """`size` ranks that exchange data, and the bytes per second at which each sends and receives in a ring.

    What a rank sends to each of the others apart goes at `node` to those of its own node, of which there are
    `on_node`, itself among them, and at `network` to the others.
    """

    size: int
    bandwidth: float
    latency_s: float
    on_node: int
    node: float
    network: float

    def all_reduce(self, num_bytes: float) -> float:
        """Of `num_bytes` on each rank, by a ring: each sends twice what it does not keep."""
        return 2 * self.gather(num_bytes)

    def gather(self, num_bytes: float) -> float:
        """An all-gather or reduce-scatter whose whole is `num_bytes`."""
        if self.size == 1:
            return 0.0
        return num_bytes * (self.size - 1) / self.size / self.bandwidth + self.latency_s

    def scattered(self, num_bytes: float) -> float:
        """An all-to-all of `num_bytes` on each rank, an equal share for every rank, without its latency: what leaves a
        node does so by the sender's own link."""
        within = num_bytes * (self.on_node - 1) / self.size / self.node
        return max(within, num_bytes * (self.size - self.on_node) / self.size / self.network)


def group_link(ranks: np.ndarray, ranks_per_node: int, gpu: Gpu) -> GroupLink:
    """Between `ranks`. Where they are on several nodes, rings leave a node by the network links of all its members."""
    nodes, members = np.unique(ranks // ranks_per_node, return_counts=True)
    on_node, is_within = int(members.min()), len(nodes) == 1
    bandwidth = gpu.node if is_within else min(gpu.node, gpu.network * on_node)
    latency_s = gpu.efficiency.collective_s if is_within else gpu.efficiency.network_collective_s
    return GroupLink(len(ranks), bandwidth, latency_s, on_node, gpu.node, gpu.network)


@dataclass(frozen=True)
class GridLinks:
    """Of the groups that hold a grid's first ranks, which stand for all."""

    tp: GroupLink
    cp: GroupLink
    dp: GroupLink
    ep: GroupLink
    expert_dp: GroupLink
    pp: float
    """Bytes per second from one stage to the next."""
    shard: GroupLink
    copies: GroupLink
    """Of a model that is sharded over all ranks of its role: those that share a copy, and those with equal shards."""

    @classmethod
    def of(cls, grid: Grid, ranks_per_node: int, gpu: Gpu) -> "GridLinks":
        array, experts = grid.array, grid.expert_array
        stages = array[:2, 0, 0, 0] // ranks_per_node
        replicas = array[0, :, :, 0].reshape(-1)
        return cls(
            tp=group_link(array[0, 0, 0], ranks_per_node, gpu),
            cp=group_link(array[0, 0, :, 0], ranks_per_node, gpu),
            dp=group_link(replicas, ranks_per_node, gpu),
            ep=group_link(experts[0, 0, :, 0], ranks_per_node, gpu),
            expert_dp=group_link(experts[0, :, 0, 0], ranks_per_node, gpu),
            pp=gpu.node if len(set(stages.tolist())) == 1 else gpu.network,
            shard=group_link(grid.sharded_array[0], ranks_per_node, gpu),
            copies=group_link(grid.sharded_array[:, 0], ranks_per_node, gpu),
        )
