"""Data-parallel communication while the model computes: gradients during backward, weights during the next forward.

Megatron has both for replicas that run the same forward and backward. Here some replicas have no samples of a
mini-batch and run neither, so when a collective begins is decided here, such that all replicas begin the same ones in
the same order; buckets, collectives and the waits of modules for their weights are Megatron's.
"""

from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

from rltrain.config import schema

FP32_BYTES = 4

BucketGroup = Any
"""Megatron's, of buckets that are reduced, and gathered, by one call."""


def data_parallel_config(
    settings: schema.Trained, replicas: int, device: torch.device
) -> DistributedDataParallelConfig:
    """What Megatron's wrapper of the model is to do, with this many `replicas` of a parameter."""
    wanted = device.type == "cuda" if settings.overlap == "auto" else settings.overlap
    overlap, sharded = wanted and replicas > 1, settings.distributed_optimizer and replicas > 1
    bucket_mb = settings.gradient_bucket_mb
    return DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=sharded,
        overlap_grad_reduce=overlap,
        overlap_param_gather=overlap and sharded,
        align_param_gather=True,  # a module that waits for its weights begins no other gather
        bucket_size=None if bucket_mb is None else max(1, int(bucket_mb * 2**20 / FP32_BYTES)),
    )


class GradientReduction:
    """Begins to reduce a bucket's gradients once the last backward has added to all of them, and all before it began.

    The order of buckets is that in which backward completes them: the last layers' first.
    """

    def __init__(self, chunks: Sequence[DistributedDataParallel]) -> None:
        self._groups = _last_layers_first(chunks) if chunks[0].ddp_config.overlap_grad_reduce else []
        for group in self._groups:
            # Megatron's own count would begin buckets in the order of this replica's backward.
            group.register_grad_ready = partial(self._added, group)
        self._backwards = 0
        """In which every parameter gets its last gradients of the mini-batch; 0: others follow."""
        self._times: Counter[torch.nn.Parameter] = Counter()
        self._missing: Counter[BucketGroup] = Counter()
        self._begun = 0

    def expect(self, num_backwards: int) -> None:
        """The next backwards of this replica are as many, and the last of the mini-batch."""
        self._backwards = num_backwards
        self._missing = Counter({group: len(group.params) for group in self._groups})

    def begin_rest(self) -> None:
        """What backward has not begun. To be called by every replica, before any other collective of theirs."""
        while self._begun < len(self._groups):
            self._begin_next()

    def finish(self) -> None:
        """Have the device wait for what was begun. The next mini-batch may follow."""
        for group in self._groups:
            if group.grad_reduce_handle is not None:
                group.grad_reduce_handle.wait()
                group.grad_reduce_handle = None
        self._backwards, self._begun = 0, 0
        self._times.clear()

    def _added(self, group: BucketGroup, parameter: torch.nn.Parameter, *_: bool) -> None:
        """A backward has added to the gradient of a parameter."""
        if not self._backwards:
            return
        self._times[parameter] += 1
        if self._times[parameter] > self._backwards:
            raise RuntimeError(
                f"a parameter of shape {tuple(parameter.shape)} gets gradients {self._times[parameter]} times in "
                f"{self._backwards} backward passes: its bucket may have been reduced before. Set overlap: false"
            )
        self._missing[group] -= self._times[parameter] == self._backwards
        while self._begun < len(self._groups) and not self._missing[self._groups[self._begun]]:
            self._begin_next()

    def _begin_next(self) -> None:
        self._groups[self._begun].start_grad_sync()
        self._begun += 1


class ParameterGather:
    """Gathers the weights that the optimizer's shards make, while the next mini-batch's forward already runs.

    Every replica begins all gathers after the optimizer's step, the first layers' first. In forward a module waits for
    its own weights; who reads them otherwise calls `finish` before.
    """

    def __init__(self, chunks: Sequence[DistributedDataParallel]) -> None:
        self._groups = _last_layers_first(chunks)[::-1] if chunks[0].ddp_config.overlap_param_gather else []
        self.finish()

    def begin(self) -> None:
        """Collective over: the ranks with the same parameters."""
        for group in self._groups:
            group.start_param_sync()

    def finish(self) -> None:
        """Have the device wait for all weights; no forward gathers what is there."""
        for group in self._groups:
            if group.param_gather_handle is not None:
                group.param_gather_handle.wait()
                group.param_gather_handle = None
            group.param_gather_dispatched = True


def _last_layers_first(chunks: Sequence[DistributedDataParallel]) -> list[BucketGroup]:
    """The order in which backward completes them, and the same on all replicas."""
    parameters = (parameter for chunk in chunks for parameter in chunk.module.parameters())
    depth = {parameter: index for index, parameter in enumerate(parameters)}
    groups = [group for chunk in chunks for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups)]
    return sorted(groups, key=lambda group: -min(depth[parameter] for parameter in group.params))
