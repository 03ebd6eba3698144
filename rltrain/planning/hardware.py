"""What a device can hold and do, and how much of that a job is taken to reach.

Figures of `GPUS` are from NVIDIA's data sheets, without sparsity, per GPU and per direction: A100 80GB SXM, H100 SXM,
H200 SXM, HGX B200, GB200 NVL72. Memory is what the driver reports, which is more than the name says: an H100 of 80 GB
has 79.1 x 2^30 bytes. Network is what DGX systems of that generation give every GPU.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import yaml
from pydantic import Field, ValidationError

from rltrain.config.section import Fraction, NonNegative, Positive, Section
from rltrain.errors import ConfigError, one_of
from rltrain.runtime.grid import Grid

GB = 1e9


class Efficiency(Section):
    """What of a device's figures is reached, and what work costs beside them. Assumed, not measured: --calibrate
    replaces them by what a run of one's own took."""

    matmul: Fraction = 0.5
    """Of the dense peak, by the matrix products of training, evaluation and prefill."""
    experts: Fraction = 0.3
    """Of the same, by the products of experts, which are smaller and come with tokens being sorted."""
    attention: Fraction = 0.4
    """Of the same, by attention over long sequences."""
    memory: Fraction = 0.7
    """Of the memory's bandwidth, by decode steps, optimizer steps and local copies."""
    node: Fraction = 0.75
    network: Fraction = 0.8
    host: Fraction = 0.8
    host_adam: Positive = 1.5e9
    """Elements per second that a rank's share of the host makes steps of, with optimizer.cpu_offload: 30 bytes each of
    its memory's bandwidth, of which one core of an AMD EPYC reaches a third to a half."""
    layer_s: NonNegative = 2e-4
    """Launching the kernels of a layer in a forward pass that is not recorded; twice as long backward."""
    micro_batch_s: NonNegative = 2e-3
    """A micro-batch besides, in a pass forward: packing it, log-probs and the loss; as long again backward."""
    update_s: NonNegative = 2e-3
    """An optimizer step besides: clipping, and what the host waits for."""
    decode_layer_s: NonNegative = 1.5e-5
    """A layer of a recorded decode step, beyond what it reads and multiplies."""
    decode_step_s: NonNegative = 1e-3
    """A decode step besides: sampling, and choosing what to run next."""
    collective_s: NonNegative = 1.5e-5
    """The latency of one collective within a node."""
    network_collective_s: NonNegative = 4e-5
    """The same, of ranks on several nodes."""
    dispatch_s: NonNegative = 1e-4
    """Sending tokens to their experts, in each direction, beside what it moves: the counts of tokens are gathered, and
    the host waits for them before it launches what follows."""
    expert_imbalance: Positive = 1.2
    """Tokens of the rank whose experts get most over the mean, in a layer: the others wait for it. 1: an even load."""
    crowding: Positive = 1.0
    """By how much computing takes longer where several ranks of a role are on one node: 1 for GPUs, which share no
    memory; cores of a CPU do."""
    task_s: NonNegative = 0.02
    """Beginning and ending a task: experience packed and sent."""
    reward_s: NonNegative = 1e-3
    """The reward function, for one sample."""
    usable_memory: Fraction = 0.95
    """Of the device's memory: the rest is lost between blocks of the allocator."""
    context_mb: NonNegative = 700.0
    """The driver's own, with kernels loaded and cuBLAS's workspace, for each process on the device."""
    communicator_mb: NonNegative = 60.0
    """Buffers of one NCCL communicator of several ranks."""


class Gpu(Section):
    """One device. Bandwidths in 1e9 bytes per second and direction."""

    memory_gb: Positive
    """1e9 bytes."""
    tflops: dict[str, Positive]
    """Dense, by dtype: bfloat16, float32, float8; float16 counts as bfloat16 where it is not given."""
    memory_gb_per_s: Positive
    node_gb_per_s: Positive
    """To the other devices of its node."""
    network_gb_per_s: Positive
    """To other nodes."""
    host_gb_per_s: Positive
    """To the memory of its host."""
    host_memory_gb: Positive
    """Of its host, its share."""
    efficiency: Efficiency = Field(default_factory=Efficiency)

    def flops(self, dtype: str) -> float:
        """Operations per second at the peak. ConfigError for a dtype that it has no figure for."""
        dtype = "bfloat16" if dtype == "float16" and dtype not in self.tflops else dtype
        if dtype not in self.tflops:
            raise ConfigError(f"model.dtype: {dtype}: the --gpu has no figure for it in tflops: {sorted(self.tflops)}")
        return self.tflops[dtype] * 1e12

    @property
    def usable_bytes(self) -> float:
        return self.memory_gb * GB * self.efficiency.usable_memory

    @property
    def memory(self) -> float:
        """Bytes per second that are reached, as of the following."""
        return self.memory_gb_per_s * GB * self.efficiency.memory

    @property
    def node(self) -> float:
        return self.node_gb_per_s * GB * self.efficiency.node

    @property
    def network(self) -> float:
        return self.network_gb_per_s * GB * self.efficiency.network

    @property
    def host(self) -> float:
        return self.host_gb_per_s * GB * self.efficiency.host


def _gpu(memory: float, bf16: float, fp8: float, fp32: float, hbm: float, node: float, network: float, host: float,
         host_memory: float) -> Gpu:  # fmt: skip
    tflops = {"bfloat16": bf16, "float32": fp32} | ({"float8": fp8} if fp8 else {})
    return Gpu(
        memory_gb=memory,
        tflops=tflops,
        memory_gb_per_s=hbm,
        node_gb_per_s=node,
        network_gb_per_s=network,
        host_gb_per_s=host,
        host_memory_gb=host_memory,
    )


GPUS: Mapping[str, Gpu] = {
    #             GB   bf16  fp8  fp32   HBM  NVLink net  host  host GB
    "a100": _gpu(85.0, 312.0, 0.0, 19.5, 2039.0, 300.0, 25.0, 32.0, 250.0),
    "h100": _gpu(84.9, 989.0, 1979.0, 67.0, 3350.0, 450.0, 50.0, 64.0, 250.0),
    "h200": _gpu(150.0, 989.0, 1979.0, 67.0, 4800.0, 450.0, 50.0, 64.0, 250.0),
    "b200": _gpu(191.0, 2250.0, 4500.0, 75.0, 7700.0, 900.0, 50.0, 64.0, 250.0),
    "gb200": _gpu(198.0, 2500.0, 5000.0, 80.0, 8000.0, 900.0, 50.0, 225.0, 240.0),
}
DEFAULT_GPU = "h100"


def known_gpu(device_name: str) -> Gpu | None:
    """That of `GPUS` which torch calls so, as "NVIDIA H100 80GB HBM3"; None for others, PCIe and NVL forms among them,
    whose figures are lower."""
    words = re.split(r"[^a-z0-9]+", device_name.lower())
    if {"pcie", "nvl"} & set(words):
        return None
    return next((gpu for name, gpu in GPUS.items() if name in words), None)


def gpu_named(name: str) -> Gpu:
    """One of `GPUS`, or that of a YAML file with the keys of `Gpu`. ConfigError says what a file lacks."""
    if name in GPUS:
        return GPUS[name]
    path = Path(name)
    expected = f"expected {one_of(name, GPUS)}, or a YAML file with the keys {', '.join(Gpu.model_fields)}"
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"option --gpu: {name}: {error.strerror}; {expected}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"option --gpu: {name} is no YAML: {error}; {expected}") from error
    try:
        return Gpu.model_validate(values)
    except ValidationError as error:
        wrong = "; ".join(f"{'.'.join(map(str, e['loc'])) or 'the file'}: {e['msg']}" for e in error.errors())
        raise ConfigError(f"option --gpu: {name}: {wrong}; {expected}") from error


# Seconds that collectives and copies take between the ranks of a grid.


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
