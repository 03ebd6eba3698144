"""A model together with its gradients and optimizer."""

import json
import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from torch import Tensor

from rltrain.algorithms.losses import GlobalCounts, LossFunction, LossOutput, count
from rltrain.config import schema
from rltrain.data.experience import Experience
from rltrain.errors import ConfigError, DivergenceError
from rltrain.training.forward import make_micro_batches, run_schedule, token_logprobs
from rltrain.training.learning_rate import learning_rate
from rltrain.training.model import LanguageModel
from rltrain.training.optimizer import build_optimizer
from rltrain.training.packing import MicroBatch


class TrainableModel:
    """Data-parallel gradients, optimizer and learning-rate schedule around a model whose weights are loaded.

    `total_updates` calls of train_batch are what the learning rate decays over.
    Collective over: the role's ranks, construction and every method.
    """

    def __init__(self, model: LanguageModel, settings: schema.Actor, *, total_updates: int) -> None:
        self.model = model
        self.settings = settings
        self.total_updates = total_updates
        self.num_updates = 0
        self.groups = model.pg_collection
        self.ddp = DistributedDataParallel(
            model.config,
            DistributedDataParallelConfig(
                grad_reduce_in_fp32=True,
                use_distributed_optimizer=settings.distributed_optimizer and self.groups.dp_cp.size() > 1,
            ),
            model,
            pg_collection=self.groups,
        )
        self.optimizer = build_optimizer(self.ddp, settings.optimizer, self.groups)
        model.config.finalize_model_grads_func = _finalize_gradients

    def train_batch(
        self, experience: Experience, loss_function: LossFunction, *, temperature: float = 1.0
    ) -> dict[str, float]:
        """One optimizer step on the mini-batch of which `experience` is this data-parallel rank's share.

        Returns loss, grad_norm (before clipping), lr, and the loss function's sums and maxima over the whole
        mini-batch, equal on all ranks. Raises DivergenceError on all ranks, before any weight changes, when the loss
        or the gradient norm is not finite; ConfigError on all ranks when one of them has no samples.
        """
        counts = self._global_counts(experience)
        micro_batches = make_micro_batches(self.model, experience, self.settings.micro_batch_tokens)
        self.ddp.zero_grad_buffer()
        self.optimizer.zero_grad()
        outputs = run_schedule(
            self.ddp, micro_batches, partial(self._loss, loss_function, counts, temperature), backward=True
        )
        metrics = self._reduce_metrics(outputs)
        self._require_finite("loss", metrics["loss"])
        self.optimizer.prepare_grads()
        clip_grad = self.settings.optimizer.clip_grad
        grad_norm = self.optimizer.clip_grad_norm(clip_grad or math.inf)
        self._require_finite("gradient norm", grad_norm)
        rate = learning_rate(self.settings.optimizer, self.num_updates, self.total_updates)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step_with_ready_grads()
        self.num_updates += 1
        return {**metrics, "grad_norm": grad_norm, "lr": rate}

    def _loss(
        self, loss_function: LossFunction, counts: GlobalCounts, temperature: float, batch: MicroBatch, logits: Tensor
    ) -> tuple[Tensor, LossOutput]:
        logprobs, entropy = token_logprobs(self.model, batch, logits, temperature)
        output = loss_function(batch.experience, logprobs, entropy, counts)
        # A copy: the pipeline schedule frees the storage of what a stage returns.
        return output.loss, LossOutput(output.loss.detach().clone(), output.sums, output.maxima)

    def _global_counts(self, experience: Experience) -> GlobalCounts:
        local = count(experience)
        values = torch.tensor(
            [local.response_tokens, local.sequences, experience.num_samples == 0], device=self.model.device
        )
        dist.all_reduce(values, group=self.groups.dp_cp)
        response_tokens, sequences, num_empty = values.tolist()
        if num_empty:
            raise ConfigError(
                f"a mini-batch of {sequences} samples leaves {num_empty} of {self.groups.dp_cp.size()} data-parallel "
                "ranks of the actor without one; raise batch.prompts_per_step or lower batch.mini_batches"
            )
        return GlobalCounts(response_tokens=response_tokens, sequences=sequences)

    def _reduce_metrics(self, outputs: Sequence[LossOutput]) -> dict[str, float]:
        """The mini-batch's loss, sums and maxima, from the last stage's micro-batches, on every rank of the role."""
        sums: dict[str, float] = {}
        maxima: dict[str, float] = {}
        if outputs:
            sums = self._across_data_parallel([{"loss": o.loss, **o.sums} for o in outputs], "sum")
            maxima = self._across_data_parallel([o.maxima for o in outputs], "max")
        return _from_last_stage({**sums, **maxima}, self.groups.pp, self.model.device)

    def _across_data_parallel(self, values: list[dict[str, Tensor]], how: str) -> dict[str, float]:
        if not values[0]:
            return {}
        stacked = torch.stack([torch.stack([v[name].detach().double() for name in values[0]]) for v in values])
        local = stacked.sum(0) if how == "sum" else stacked.amax(0)
        dist.all_reduce(local, dist.ReduceOp.SUM if how == "sum" else dist.ReduceOp.MAX, group=self.groups.dp_cp)
        return dict(zip(values[0], local.tolist(), strict=True))

    def _require_finite(self, what: str, value: float) -> None:
        if not math.isfinite(value):
            raise DivergenceError(
                f"the actor's {what} is {value} at optimizer step {self.num_updates + 1}; its weights were left as "
                "they were. Lower actor.optimizer.lr, or look at this step's rewards and log-probs."
            )


def _finalize_gradients(models: list[Any], num_tokens: Tensor | None, **arguments: Any) -> None:
    """Megatron's reduction of gradients without its division by the token count: losses come normalised."""
    finalize_model_grads(models, None, **arguments)


def _from_last_stage(metrics: dict[str, float], pipeline: dist.ProcessGroup, device: torch.device) -> dict[str, float]:
    """The last pipeline stage's metrics, on every stage. Collective over: the pipeline-parallel group."""
    if pipeline.size() == 1:
        return metrics
    source = pipeline.size() - 1
    names = torch.tensor(list(json.dumps(list(metrics)).encode()), dtype=torch.uint8, device=device)
    size = torch.tensor([len(names)], device=device)
    dist.broadcast(size, group=pipeline, group_src=source)
    if pipeline.rank() != source:
        names = torch.empty(int(size), dtype=torch.uint8, device=device)
    dist.broadcast(names, group=pipeline, group_src=source)
    keys = json.loads(bytes(names.tolist()))
    values = torch.tensor([metrics.get(key, 0.0) for key in keys], dtype=torch.float64, device=device)
    dist.broadcast(values, group=pipeline, group_src=source)
    return dict(zip(keys, values.tolist(), strict=True))
