"""A sharded model together with its gradients and optimizer."""

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch.distributed as dist
from torch import Tensor

from rltrain.algorithms.losses import LossFunction
from rltrain.checkpoint.run_files import AnyFile, Contents
from rltrain.config import schema
from rltrain.data.experience import Experience
from rltrain.offload.memory_parts import MemoryPart, WholePartOnHost
from rltrain.training.adapter_mode import MadeWeights
from rltrain.training.backend import SKIPPED
from rltrain.training.fake_quantization import rounded_weights
from rltrain.training.fsdp.evaluable import BaseModel, EvaluableModel
from rltrain.training.fsdp.model import ShardedModel
from rltrain.training.fsdp.optimizer import ShardedAdam
from rltrain.training.fsdp.passes import make_micro_batches, run
from rltrain.training.fsdp.state import load_state, save_state
from rltrain.training.learning_rate import learning_rate
from rltrain.training.mini_batch import DIVISOR, NUM_SAMPLES, Pending, SkippedSteps
from rltrain.training.trainable import Trainable


class TrainableModel(EvaluableModel, Trainable):
    """As training.backend.TrainedModel describes it, around a model whose weights are loaded, unless `load_state`
    follows. `role` is for messages. Gradients are reduced to shards after every micro-batch."""

    def __init__(
        self, model: ShardedModel, settings: schema.Trained, *, total_updates: int, max_skipped: int, role: str
    ) -> None:
        super().__init__(model)
        self.settings, self.total_updates = settings, total_updates
        self.num_updates = 0
        self.role, self.skipped = role, SkippedSteps(role, max_skipped)
        self.optimizer = ShardedAdam(model, settings.optimizer)
        self.published: Mapping[str, Tensor] = self.parameters
        self.parts = {**self.parts, **self._training_parts()}
        self.served = rounded_weights(self.published, model.fake_quantization, model.dtype)
        self.copy_late()
        self._copies: dict[str, Tensor] = {}
        self._pending: Pending | None = None

    def _training_parts(self) -> dict[str, MemoryPart]:
        states, gradients = self.optimizer.states, self.optimizer.gradients
        if not self.model.on_host:
            return {
                "master_weights": MemoryPart(tuple),
                "optimizer": MemoryPart(states),
                "gradients": MemoryPart(lambda: gradients().values(), forget=self.optimizer.forget_gradients),
            }
        self.published = MadeWeights(self.parameters, lambda _, weight: weight.to(self.device, non_blocking=True))
        return {
            "weights": WholePartOnHost(self.parameters.values),
            "master_weights": MemoryPart(tuple),
            "optimizer": WholePartOnHost(states),
            "gradients": WholePartOnHost(lambda: gradients().values()),
        }

    def train_batches(
        self, mini_batches: Iterable[Experience], loss_function: LossFunction, *, temperature: float = 1.0
    ) -> list[dict[str, float]]:
        metrics = []
        for experience in mini_batches:
            self.accumulate(experience, loss_function, temperature=temperature)
            metrics.append(self.step())
        return metrics

    def accumulate(self, experience: Experience, loss_function: LossFunction, *, temperature: float = 1.0) -> None:
        """Collective over: the role's ranks."""
        if self._pending is None:
            self.optimizer.forget_gradients()
            self._pending = Pending()
        self._pending.count(experience)
        loss = self.loss_of(loss_function, temperature)
        micro_batches = make_micro_batches(self.model, experience, self.settings.micro_batch_tokens)
        with self._drawing(self._pending.num_parts):
            self._pending.outputs += run(self.model, micro_batches, loss, backward=True)
        self._pending.num_parts += 1
        if not experience.num_samples:
            # Other replicas have metrics, whose names and number this one needs to take part in reducing them.
            self._pending.outputs.append(loss_function(experience, *self.objective.of_nothing(experience)))

    def _drawing(self, part: int) -> AbstractContextManager[None]:
        """Around a part of a mini-batch, in which adapters may draw what they drop."""
        adapters = self.model.adapters
        return adapters.drawing(self.num_updates, part, dist.get_rank()) if adapters else nullcontext()

    def step(self) -> dict[str, float]:
        if self._pending is None:
            raise RuntimeError("step() needs accumulate() before it, on every rank; a share may be empty")
        pending, self._pending = self._pending, None
        groups, update = self.model.pg_collection, self.num_updates + 1
        metrics = pending.reduced(groups.dp, self.device)
        self.skipped.require_samples(metrics.pop(NUM_SAMPLES), update, dist.get_world_size(groups.dp))
        divisor = metrics.pop(DIVISOR)
        rate = learning_rate(self.settings.optimizer, self.num_updates, self.total_updates)
        is_skipped, norm = self.skipped.is_to_skip("loss", metrics["loss"], update), math.nan
        if not is_skipped:
            self.late.settle()
            norm = self._update(divisor, rate) if divisor else 0.0
            is_skipped = not math.isfinite(norm)
        self.optimizer.forget_gradients()
        self.num_updates += 1
        self.skipped.count(is_skipped=is_skipped)
        return {**metrics, "grad_norm": norm, "lr": rate, SKIPPED: float(is_skipped)}

    def save_state(self) -> Contents:
        if self._pending is not None:
            raise RuntimeError("gradients wait for their optimizer step; a training state is saved before or after it")
        return save_state(self.model, self.optimizer, self.parts, self.num_updates, self._copies, self.late)

    def load_state(self, files: Sequence[AnyFile]) -> None:
        """Go on from what `save_state` left on all ranks. Before the first step; raises as state.load_state."""
        self.num_updates = load_state(self.model, self.optimizer, files, self.role).num_updates

    def _update(self, divisor: float, rate: float) -> float:
        """Divide, clip and apply the gradients unless their norm, which is returned, is not finite. Collective over:
        the role's ranks."""
        self.optimizer.scale_gradients(1 / divisor)
        norm = self.optimizer.gradient_norm()
        if not self.skipped.is_to_skip("gradient norm", norm, self.num_updates + 1):
            self.optimizer.step(rate, norm)
        return norm


class AdaptedModel(TrainableModel):
    """As training.backend.AdaptedModel describes it: of `model` its adapters alone are trained."""

    def __init__(
        self, model: ShardedModel, settings: schema.Trained, *, total_updates: int, max_skipped: int, role: str
    ) -> None:
        """Collective over: the role's ranks."""
        super().__init__(model, settings, total_updates=total_updates, max_skipped=max_skipped, role=role)
        assert model.adapters is not None, "a model without adapters is a TrainableModel"
        self.adapters_layout, self.adapters = model.learned_layout, model.learned
        merged = partial(model.adapters.merged, self.adapters)
        self.published = MadeWeights(self.parameters, merged)
        self.served = MadeWeights(rounded_weights(self.parameters, model.fake_quantization, model.dtype), merged)
        self.base = BaseModel(model)
        self._gather()

    def load_state(self, files: Sequence[AnyFile]) -> None:
        """As TrainableModel's. Collective over: the role's ranks."""
        super().load_state(files)
        self._gather()

    def _update(self, divisor: float, rate: float) -> float:
        norm = super()._update(divisor, rate)
        self._gather()
        return norm

    def _gather(self) -> None:
        assert self.model.adapters is not None
        self.model.adapters.gather(self.model.named_learned())
