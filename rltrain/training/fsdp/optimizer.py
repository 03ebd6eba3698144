"""AdamW over the shards of a model, with the norm of its whole gradient."""

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from rltrain.config import schema
from rltrain.training.fsdp.model import ShardedModel, local_shard

MOMENTS = ("exp_avg", "exp_avg_sq")
NORM_EPSILON = 1e-6
"""Megatron's, in the factor that clips."""


class ShardedAdam:
    """Works on this rank's shards, which are fp32, as tensors of their own: what a step does to an element depends on
    no other."""

    def __init__(self, model: ShardedModel, settings: schema.Optimizer) -> None:
        self.model, self.settings = model, settings
        self.named = model.named_learned()
        shards = {name: torch.nn.Parameter(shard) for name, shard in model.learned.items()}
        self.shards: dict[str, torch.nn.Parameter] = shards
        matrices = [shard for name, shard in shards.items() if self.named[name].dim() > 1]
        vectors = [shard for name, shard in shards.items() if self.named[name].dim() <= 1]
        groups = [
            {"params": matrices, "weight_decay": settings.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]
        self.adam = torch.optim.AdamW(
            [group for group in groups if group["params"]] or [{"params": [torch.zeros(0)]}],
            lr=settings.lr,
            betas=(settings.beta1, settings.beta2),
            eps=settings.eps,
            fused=True,
        )
        self.num_steps = 0
        """That changed weights."""

    def gradients(self) -> dict[str, Tensor]:
        """Of shards that have any, by name."""
        held = ((name, self.named[name].grad) for name in self.shards)
        return {name: local_shard(gradient) for name, gradient in held if gradient is not None}

    def forget_gradients(self) -> None:
        for parameter in self.named.values():
            parameter.grad = None

    def scale_gradients(self, factor: float) -> None:
        if found := [*self.gradients().values()]:
            torch._foreach_mul_(found, factor)

    def gradient_norm(self) -> float:
        """Of all shards together. Collective over: the ranks that share one copy of the model."""
        found = [*self.gradients().values()]
        squares = torch.zeros((), dtype=torch.float32, device=self.model.device)
        if found:
            squares = torch.stack(torch._foreach_norm(found)).float().square().sum().to(self.model.device)
        dist.all_reduce(squares, group=self.model.pg_collection.shard)
        return float(squares.sqrt())

    def step(self, rate: float, norm: float) -> None:
        """At learning rate `rate`, with gradients clipped whose norm is `norm`."""
        limit = self.settings.clip_grad
        if limit and limit / (norm + NORM_EPSILON) < 1:
            self.scale_gradients(limit / (norm + NORM_EPSILON))
        gradients = self.gradients()
        for name, shard in self.shards.items():
            shard.grad = gradients.get(name)
        for group in self.adam.param_groups:
            group["lr"] = rate
        self.adam.step()
        self.adam.zero_grad(set_to_none=True)
        self.num_steps += 1

    def moments(self, name: str) -> dict[str, Tensor]:
        """Of a shard; none before the first step."""
        state = self.adam.state.get(self.shards[name], {})
        return {moment: state[moment] for moment in MOMENTS if moment in state}

    def states(self) -> Iterator[Tensor]:
        """All tensors that it keeps."""
        for state in self.adam.state.values():
            yield from (value for value in state.values() if isinstance(value, Tensor))

    def make_states(self, num_steps: int) -> None:
        """Zero moments, counted as after `num_steps`."""
        self.num_steps = num_steps
        for shard in self.shards.values():
            state = {moment: torch.zeros_like(shard) for moment in MOMENTS}
            step = torch.tensor(float(num_steps), device=shard.device)
            self.adam.state[shard] = {"step": step, **state}
