"""The capacity and speed of devices, and the assumed share that a job reaches.

Figures of `GPUS` are from NVIDIA's data sheets, without sparsity, per GPU and per direction: A100 80GB SXM, H100 SXM,
H200 SXM, HGX B200, GB200 NVL72. Memory is the figure of the driver. It exceeds the name: an H100 of 80 GB has 79.1 x
2^30 bytes. Network is the share of one GPU in DGX systems of that generation.
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
    """The reached shares of a device's figures, and fixed costs of work.

    Those of one GPU follow a run on an H100, which docs/estimates.md describes. Those of links, experts and memory are
    assumed. --calibrate replaces them by measurements of a run.
    """

    matmul: Fraction = 0.65
    """Share of the dense peak in matrix products of training, evaluation and prefill."""
    experts: Fraction = 0.3
    """Share of the dense peak in products of experts. They are smaller, and tokens must be sorted."""
    attention: Fraction = 0.4
    """Share of the dense peak in attention over long sequences."""
    memory: Fraction = 0.7
    """Share of the memory bandwidth in decode steps, optimizer steps and local copies."""
    moved: NonNegative = 1.0
    """Bytes moved by norms, rotations, activations and log-probs in training, relative to fused kernels. Without them
    torch's operators move 3.5 to 5 times as many."""
    node: Fraction = 0.75
    network: Fraction = 0.8
    host: Fraction = 0.8
    host_adam: Positive = 1.5e9
    """Elements per second of optimizer steps on a rank's share of the host, with optimizer.cpu_offload.

    Each element takes 30 bytes of memory bandwidth. One core of an AMD EPYC reaches a third to a half of this rate.
    """
    launches_ahead: bool = True
    """Whether the host launches kernels while earlier ones run, so that only the longer of both counts. False on
    CPUs."""
    layer_s: NonNegative = 1e-3
    """Seconds in which the host launches the kernels of a layer in a forward pass. Backward takes twice as long."""
    micro_batch_s: NonNegative = 2e-3
    """Further seconds of the host for a micro-batch in a forward pass: packing, log-probs and the loss. Backward takes
    as long again."""
    update_s: NonNegative = 2e-3
    """Further seconds of an optimizer step: clipping, and waits of the host."""
    decode_layer_s: NonNegative = 1.9e-5
    """Seconds of a layer in a decode step with CUDA graph, beyond its reads and products: about 2 microseconds for each
    of nine launches."""
    decode_step_s: NonNegative = 3e-4
    """Further seconds of a decode step: the launches outside of layers, and what is left of the host's work. The host
    schedules while the next step runs."""
    collective_s: NonNegative = 1.5e-5
    """Latency in seconds of one collective within a node."""
    network_collective_s: NonNegative = 4e-5
    """Latency in seconds of one collective over several nodes."""
    dispatch_s: NonNegative = 1e-4
    """Seconds to send tokens to their experts, per direction, beyond the bytes moved. The host waits for the gathered
    token counts before further launches."""
    expert_imbalance: Positive = 1.2
    """Tokens of the rank with the most loaded experts of a layer, over the mean. Other ranks wait for it. 1 is an even
    load."""
    crowding: Positive = 1.0
    """Factor on computing time if several ranks of a role are on one node. 1 for GPUs. CPU cores share their memory."""
    task_s: NonNegative = 0.02
    """Seconds to begin and end a task: packing and sending experience."""
    reward_s: NonNegative = 1e-3
    """Seconds of the reward function per sample."""
    usable_memory: Fraction = 0.95
    """Usable share of the device's memory. The rest is lost between blocks of the allocator."""
    context_mb: NonNegative = 700.0
    """MiB of each process on the device: the driver's context, loaded kernels, and cuBLAS's workspace."""
    communicator_mb: NonNegative = 60.0
    """MiB of buffers per NCCL communicator of several ranks."""


class Gpu(Section):
    """One device. Bandwidths are in 1e9 bytes per second and direction."""

    memory_gb: Positive
    """Memory in 1e9 bytes."""
    tflops: dict[str, Positive]
    """Dense TFLOP/s by dtype: bfloat16, float32, float8. float16 counts as bfloat16 if it is not given."""
    memory_gb_per_s: Positive
    node_gb_per_s: Positive
    """Bandwidth to other devices of its node."""
    network_gb_per_s: Positive
    """Bandwidth to other nodes."""
    host_gb_per_s: Positive
    """Bandwidth to the memory of its host."""
    host_memory_gb: Positive
    """The device's share of its host's memory, in 1e9 bytes."""
    efficiency: Efficiency = Field(default_factory=Efficiency)

    def flops(self, dtype: str) -> float:
        """Returns the peak in FLOP/s. Raises ConfigError for a dtype without a figure."""
        dtype = "bfloat16" if dtype == "float16" and dtype not in self.tflops else dtype
        if dtype not in self.tflops:
            raise ConfigError(f"model.dtype: got {dtype}; expected one with tflops of the --gpu: {sorted(self.tflops)}")
        return self.tflops[dtype] * 1e12

    @property
    def usable_bytes(self) -> float:
        return self.memory_gb * GB * self.efficiency.usable_memory

    @property
    def memory(self) -> float:
        """Reached bytes per second of the memory. The next properties are alike."""
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
    """Returns the entry of `GPUS` for a name used by torch, such as "NVIDIA H100 80GB HBM3".

    Returns None for other devices, and for PCIe and NVL versions, because their figures are lower.
    """
    words = re.split(r"[^a-z0-9]+", device_name.lower())
    if {"pcie", "nvl"} & set(words):
        return None
    return next((gpu for name, gpu in GPUS.items() if name in words), None)


def gpu_named(name: str) -> Gpu:
    """Returns an entry of `GPUS`, or the device of a YAML file with the keys of `Gpu`. Raises ConfigError for a wrong
    file."""
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


# Seconds of collectives and copies between the ranks of a grid.


@dataclass(frozen=True)
class GroupLink:
    """The link between `size` ranks. Each sends and receives `bandwidth` bytes per second in a ring.

    In an all-to-all a rank sends to ranks of its node at `node` bytes per second, and to other ranks at `network`.
    `on_node` is the number of ranks on its node, itself included.
    """

    size: int
    bandwidth: float
    latency_s: float
    on_node: int
    node: float
    network: float

    def all_reduce(self, num_bytes: float) -> float:
        """Returns the seconds of an all-reduce of `num_bytes` per rank by a ring. A ring sends twice the bytes of a
        gather."""
        return 2 * self.gather(num_bytes)

    def gather(self, num_bytes: float) -> float:
        """Returns the seconds of an all-gather or reduce-scatter. `num_bytes` is the size of the whole."""
        if self.size == 1:
            return 0.0
        return num_bytes * (self.size - 1) / self.size / self.bandwidth + self.latency_s

    def scattered(self, num_bytes: float) -> float:
        """Returns the seconds of an all-to-all of `num_bytes` per rank in equal shares, without latency.

        Bytes to other nodes go over the sender's own network link.
        """
        within = num_bytes * (self.on_node - 1) / self.size / self.node
        return max(within, num_bytes * (self.size - self.on_node) / self.size / self.network)


def group_link(ranks: np.ndarray, ranks_per_node: int, gpu: Gpu) -> GroupLink:
    """Returns the link between `ranks`. Rings over several nodes use the network links of all members of a node."""
    nodes, members = np.unique(ranks // ranks_per_node, return_counts=True)
    on_node, is_within = int(members.min()), len(nodes) == 1
    bandwidth = gpu.node if is_within else min(gpu.node, gpu.network * on_node)
    latency_s = gpu.efficiency.collective_s if is_within else gpu.efficiency.network_collective_s
    return GroupLink(len(ranks), bandwidth, latency_s, on_node, gpu.node, gpu.network)


@dataclass(frozen=True)
class GridLinks:
    """The links of the groups of a grid's first ranks. Other groups are alike."""

    tp: GroupLink
    cp: GroupLink
    dp: GroupLink
    ep: GroupLink
    expert_dp: GroupLink
    pp: float
    """Bytes per second from one stage to the next."""
    shard: GroupLink
    copies: GroupLink
    """For a sharded model, `shard` links the ranks of one copy, and `copies` links the ranks with equal shards."""

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
