"""The models of roles on every backend: what is evaluated and trained, and the state that is saved of it."""

import math
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from rltrain.algorithms.losses import LossFunction, LossOutput
from rltrain.checkpoint.run_files import AnyFile, Contents
from rltrain.checkpoint.saved_state import MASTER, Counts, Destination, SavedState, contents, flat_name
from rltrain.config import schema
from rltrain.data.experience import Experience
from rltrain.errors import ConfigError, DivergenceError
from rltrain.models.table import Array, IntArray
from rltrain.offload.memory_parts import MemoryPart
from rltrain.reshard.layout import Layout
from rltrain.training.adapters import MadeWeights
from rltrain.training.fake_quantization import rounded_weights
from rltrain.training.logprobs import OBJECTIVES, PackedModel, likeliest_tokens, squared_probabilities
from rltrain.training.optimizers import ADAM_STATES, MUON_STATES
from rltrain.training.packing import MicroBatch
from rltrain.training.shards import within

# A model that says of every token its log-prob, or the score of its sample up to there.

Outputs = Callable[[MicroBatch, Tensor], tuple[Tensor, Any]]
"""(micro-batch, what a model makes of its rows on this rank [rows, ...]) -> (loss scalar, anything to keep)."""
Forward = Callable[[Sequence[MicroBatch], Outputs], list[Any]]
"""As RoleModel.forward."""


@dataclass(frozen=True, eq=False)
class Adapted:
    """What a trained model with low-rank adapters (config.lora) has besides. Its `parameters` are the base, frozen."""

    base: "RoleModel"
    """The model without what the adapters add, in the same memory."""
    layout: Layout
    parameters: Mapping[str, Tensor]
    """The adapters, by name and shape as in `layout.on(rank)`."""


class RoleModel(ABC):
    """This rank's share of a model that can be evaluated.

    Every rank of a replica passes the same samples, perhaps none, and gets the same result. Micro-batches have at most
    `max_tokens`, but for longer samples. Evaluating is collective over the replica, and where ranks hold shards or
    experts for other replicas over all of them.
    """

    def __init__(self, model: PackedModel, *, is_base: bool = False) -> None:
        """With `is_base` the model's adapters are off while it is evaluated: it is what it was before they learned."""
        self.model, self.device, self._is_base = model, model.device, is_base
        self.objective = OBJECTIVES[model.architecture.head]
        self.layout = model.layout
        """Where its parameters lie, on all ranks that have a share."""
        self.parameters = model.weights
        """By name and shape as in `layout.on(rank)`: what they hold is there while part "weights" is on the device."""
        self.published = self.parameters
        """What other models in training and checkpoints get, by the names of `parameters`. What is not a parameter is
        made when it is asked for, while part "weights" is on the device, and is not kept."""
        self.served = self.parameters
        """What engines get: the same, with the weights rounded that the model computes with rounded
        (config.model.fake_quantization)."""
        self.adapted: Adapted | None = None
        """Of a model in training that has adapters."""
        self.parts: Mapping[str, MemoryPart] = {"weights": MemoryPart(self._weights)}
        """What it has on the device, by the names of tasks.roles: "weights", and of a model in training also
        "master_weights", "optimizer" and "gradients". None shares memory with another."""

    @abstractmethod
    def forward(self, micro_batches: Sequence[MicroBatch], outputs: Outputs) -> list[Any]:
        """What `outputs` keeps of each micro-batch with samples, on ranks where the model ends; without gradients."""

    def shared(self, results: Sequence[Tensor]) -> Sequence[Tensor]:
        """Returns the results of the ranks where the model ends, on every rank of the replica."""
        return results

    def evaluate(self, experience: Experience, *, max_tokens: int, temperature: float = 1.0) -> Tensor:
        """[tokens] fp32 in host memory: each token's log-prob, 0 at a sample's first one, or score. No gradients."""
        return self._evaluate(experience, max_tokens, temperature)[0]

    def distributions(
        self, experience: Experience, *, count: int, max_tokens: int, temperature: float = 1.0
    ) -> tuple[Tensor, Tensor, Tensor]:
        """In the place of each token: its own log-prob [tokens], the `count` likeliest tokens and their log-probs, both
        [tokens, count]. As `evaluate`."""
        shape = experience.num_tokens, count

        def likeliest(batch: MicroBatch, of_tokens: Tensor) -> Sequence[Tensor]:
            return likeliest_tokens(self.model, batch, of_tokens, temperature, count)

        empty = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape)
        logprobs, top_ids, top_logprobs = self._evaluate(experience, max_tokens, temperature, likeliest, empty)
        return logprobs, top_ids, top_logprobs

    def log_probs(
        self, experience: Experience, *, count: int, max_tokens: int, temperature: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """What `distributions` gives; with a `count` of 0 what `evaluate` does, and no other tokens."""
        if count:
            return self.distributions(experience, count=count, max_tokens=max_tokens, temperature=temperature)
        logprobs = self.evaluate(experience, max_tokens=max_tokens, temperature=temperature)
        nothing = torch.empty(experience.num_tokens, 0)
        return logprobs, nothing.long(), nothing

    def evaluate_squares(
        self, experience: Experience, *, max_tokens: int, temperature: float = 1.0
    ) -> tuple[Tensor, Tensor]:
        """What `evaluate` gives, and [tokens] in the place of each token the sum of the squares of all tokens'
        probabilities. Of a model with a vocabulary's head."""

        def squares_of(batch: MicroBatch, of_tokens: Tensor) -> Sequence[Tensor]:
            return (squared_probabilities(self.model, batch, of_tokens, temperature),)

        empty = (torch.zeros(experience.num_tokens),)
        logprobs, squares = self._evaluate(experience, max_tokens, temperature, squares_of, empty)
        return logprobs, squares

    def evaluate_routing(
        self, experience: Experience, *, max_tokens: int, temperature: float = 1.0
    ) -> tuple[Tensor, Tensor]:
        """What `evaluate` gives, and as `Experience.routed_experts` the experts that tokens visited in the layers of
        this rank. Of a backend whose routers tell what they choose; others are refused with it."""
        raise NotImplementedError(f"{type(self).__name__} does not tell which experts its routers choose")

    @torch.no_grad()
    def _evaluate(
        self,
        experience: Experience,
        max_tokens: int,
        temperature: float,
        further: Callable[[MicroBatch, Tensor], Sequence[Tensor]] = lambda batch, of_tokens: (),
        empty: Sequence[Tensor] = (),
        forward: Forward | None = None,
    ) -> list[Tensor]:
        """Returns the objective's first output, then `empty` filled with what `further` gives of each micro-batch.

        Every rank of the replica has them, in host memory.
        """
        empty = [torch.zeros(experience.num_tokens), *empty]
        results = [tensor.to(self.device) for tensor in empty]

        def without_loss(batch: MicroBatch, of_tokens: Tensor) -> tuple[Tensor, Sequence[Tensor]]:
            found = self.objective.token_outputs(self.model, batch, of_tokens, temperature)[0]
            return torch.zeros((), device=self.device), (found, *further(batch, of_tokens))

        micro_batches = self.model.micro_batches(experience, max_tokens)
        if not micro_batches:
            return empty
        adapters = self.model.adapters
        with adapters.off() if adapters and self._is_base else nullcontext():
            kept = (forward or self.forward)(micro_batches, without_loss)
        for batch, values in zip(micro_batches, kept, strict=False):
            for result, value in zip(results, values, strict=True):
                result[batch.token_index.to(result.device)] = value
        return [result.cpu() for result in self.shared(results)]

    def _weights(self) -> list[Tensor]:
        adapters = self.model.adapters
        return [*self.parameters.values(), *(adapters.held() if adapters else ())]


# What an optimizer step tells beside its metrics of a loss.

SKIPPED = "skipped_updates"
"""The metric of an optimizer step that is 1 where it changed nothing because its loss or gradient norm was not finite,
else 0."""
LOSS_SCALE, OVERFLOWED = "loss_scale", "overflowed_updates"
"""Metrics of an optimizer step of a model in fp16: its loss scale afterwards, and 1 where the step is among the SKIPPED
because gradients overflowed that a smaller scale may save, else 0."""

# What an optimizer step knows of its mini-batch beside the gradients, and when a step is left out.

# Beside the metrics of a mini-batch while they are reduced.
NUM_SAMPLES, DIVISOR = "num_samples", "divisor"


class Pending:
    """What was accumulated since the last optimizer step."""

    def __init__(self) -> None:
        self.num_samples = 0
        self.response_tokens = 0
        self.num_parts = 0
        self.outputs: list[LossOutput] = []

    def count(self, experience: Experience) -> None:
        """A part with these samples begins."""
        self.num_samples += experience.num_samples
        self.response_tokens += int(experience.response_mask.sum())

    def reduced(self, replicas: dist.ProcessGroup, device: torch.device) -> dict[str, float]:
        """The mini-batch's metrics with NUM_SAMPLES and DIVISOR. Collective over: the data-parallel group."""
        first = self.outputs[0]
        counts = torch.tensor([self.num_samples, self.response_tokens], dtype=torch.float64, device=device)
        rows = [(o.divisor, o.loss, *o.sums.values(), *o.token_sums.values()) for o in self.outputs]
        totals = torch.cat([counts, _scalars(rows, device).sum(0)])
        dist.all_reduce(totals, group=replicas)
        num_samples, response_tokens, divisor, *sums = totals.tolist()
        divisors = [divisor] * (1 + len(first.sums)) + [response_tokens] * len(first.token_sums)
        means = [total / (by or 1) for total, by in zip(sums, divisors, strict=True)]
        metrics = dict(zip(["loss", *first.sums, *first.token_sums], means, strict=True))
        if first.maxima:
            maxima = _scalars([tuple(o.maxima.values()) for o in self.outputs], device).amax(0)
            dist.all_reduce(maxima, dist.ReduceOp.MAX, group=replicas)
            metrics |= dict(zip(first.maxima, maxima.tolist(), strict=True))
        return metrics | {NUM_SAMPLES: num_samples, DIVISOR: divisor}


class SkippedSteps:
    """Counts optimizer steps in a row that were left out. `role` is for messages."""

    def __init__(self, role: str, max_skipped: int) -> None:
        self.role, self.max_skipped, self.num_skipped = role, max_skipped, 0

    def require_samples(self, num_samples: float, update: int, num_replicas: int) -> None:
        """ConfigError where optimizer step `update` has no sample on any replica."""
        if not num_samples:
            raise ConfigError(
                f"optimizer step {update} of the {self.role} has no sample on any of its {num_replicas} data-parallel "
                "ranks; raise batch.prompts_per_step or lower batch.mini_batches"
            )

    def is_to_skip(self, what: str, value: float, update: int) -> bool:
        """Whether the optimizer step is to be left out because of this. DivergenceError where too many were."""
        if math.isfinite(value):
            return False
        if self.num_skipped < self.max_skipped:
            return True
        before = ""
        if self.num_skipped:
            before = f", after {self.num_skipped} in a row that were skipped (on_divergence.max_skipped)"
        raise DivergenceError(
            f"the {self.role}'s {what} is {value} at optimizer step {update}{before}; its weights were left "
            f"as they were. Lower {self.role}.optimizer.lr, or look at this step's rewards and log-probs."
        )

    def count(self, *, is_skipped: bool) -> None:
        self.num_skipped = self.num_skipped + 1 if is_skipped else 0


def _scalars(rows: list[tuple[Tensor, ...]], device: torch.device) -> Tensor:
    """[rows, columns] fp64."""
    values = [value.detach().to(device, torch.float64) for row in rows for value in row]
    return torch.stack(values).view(len(rows), -1)


# The learning rate as a function of the optimizer step.


def learning_rate(settings: schema.Optimizer, update: int, total_updates: int) -> float:
    """Rate for optimizer step number `update` (from 0) of `total_updates`.

    Rises linearly to `settings.lr`, reached with the last warm-up step; then constant, or falling towards
    `settings.min_lr`, which would be reached one step after the last.
    """
    if update < settings.warmup_steps:
        return settings.lr * (update + 1) / settings.warmup_steps
    if settings.decay == "constant":
        return settings.lr
    progress = min(1.0, (update - settings.warmup_steps) / max(1, total_updates - settings.warmup_steps))
    remaining = 1 - progress if settings.decay == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return settings.min_lr + (settings.lr - settings.min_lr) * remaining


# Copies of a training state that are made while training goes on, until something is about to change the state.


class LateCopies:
    """What is to be copied still, of a model on `device`. Whoever needs the copies, or is about to change or move what
    they are of, calls `settle`, from any thread: it makes those that are left, or waits for who makes them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._owner = threading.get_ident()
        self._lock = threading.Lock()
        self._left: deque[Callable[[], object]] = deque()
        self._waited_s = 0.0
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._written: torch.cuda.Event | None = None

    def begin(self) -> None:
        """What is issued on the device so far has written the state that is to be copied."""
        self.settle()
        if self._stream is not None:
            self._written = torch.cuda.current_stream(self._device).record_event()

    def add(self, part: MemoryPart, values: Tensor, first: int, count: int, into: Tensor | None) -> Tensor:
        """What will be a copy of `count` elements from `first` of `values`, a tensor of `part`; `into` where that is
        given. RuntimeError where the part was dropped."""
        part.require_kept()
        copy = torch.empty(count, dtype=values.dtype) if into is None else into
        self._left.append(partial(part.read, values, first, count, into=copy))
        return copy

    def settle(self) -> None:
        if not self._left:
            return
        begin = time.perf_counter()
        while self._make_one():
            pass
        if threading.get_ident() == self._owner:
            self._waited_s += time.perf_counter() - begin

    def take_waited_s(self) -> float:
        """Seconds since the last call that the thread which trains was in `settle`."""
        waited_s, self._waited_s = self._waited_s, 0.0
        return waited_s

    def _make_one(self) -> bool:
        with self._lock:  # kept while it copies: who finds nothing left finds all copies made
            if not self._left:
                return False
            with self._beside():
                self._left[0]()
            self._left.popleft()
            return True

    def _beside(self) -> AbstractContextManager[None]:
        """On a stream of their own copies wait for nothing that is issued later."""
        if self._stream is None or self._written is None:
            return nullcontext()
        self._stream.wait_event(self._written)
        return torch.cuda.stream(self._stream)


class LateTensors(Mapping[str, Tensor]):
    """`tensors`, of which some are copies that `late` has yet to make: whoever takes one finds them made."""

    def __init__(self, tensors: Mapping[str, Tensor], late: LateCopies) -> None:
        self._tensors, self._late = tensors, late

    def __getitem__(self, name: str) -> Tensor:
        self._late.settle()
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


# What an optimizer works on, and where it lies.

MOMENTS = (*ADAM_STATES, *MUON_STATES)
"""What optimizers keep of every parameter: AdamW's, then Muon's."""

Range = tuple[int, int]
"""(start, stop) in a flattened parameter."""


@dataclass(frozen=True)
class Optimized:
    """What the optimizer works on of one parameter: its elements from `first`, flattened.

    `master` is fp32: the weights themselves or a copy; `part` is the one of the model's parts that it lies in. A shard
    is this rank's alone among those with the same parameter; else all have the same. `moments` by their names, some of
    MOMENTS, none before the first step.
    """

    master: Tensor
    first: int
    is_shard: bool
    part: str
    moments: Mapping[str, Tensor]

    @property
    def range(self) -> Range:
        """The elements of the parameter that it has."""
        return self.first, self.first + self.master.numel()


def limits(names: Sequence[str], ranges: Mapping[str, Range]) -> tuple[IntArray, IntArray]:
    """(starts, stops) by parameter: nothing of those that have no range."""
    found = np.array([ranges.get(name, (0, 0)) for name in names], dtype=np.int64).reshape(-1, 2)
    return found[:, 0], found[:, 1]


# A model together with its gradients and optimizer.


class TrainedModel(RoleModel):
    """With gradients and an optimizer, around a model whose weights are loaded, unless `load_state` follows.

    An optimizer step is any number of calls of `accumulate`, at least one on every rank, and one of `step`. What is
    accumulated are sums: `step` alone reduces them over data parallelism and divides them, once.
    """

    def __init__(
        self,
        model: PackedModel,
        settings: schema.Trained,
        *,
        total_updates: int,
        max_skipped: int = 0,
        role: str = "actor",
    ) -> None:
        """The learning rate decays over `total_updates`. `role` is for messages. Collective over: the role's ranks."""
        super().__init__(model)
        self.settings, self.role, self.skipped = settings, role, SkippedSteps(role, max_skipped)
        self.total_updates, self.num_updates = total_updates, 0
        self.groups = model.pg_collection
        self.parts = {**self.parts, **self.make_optimizer()}
        self.late = LateCopies(self.device)
        """Of the state that was saved last: made before one of the parts moves."""
        for part in self.parts.values():
            part.settle = self.late.settle
        self.published = self.readable_weights()
        self.served = rounded_weights(self.published, model.fake_quantization, model.dtype)
        if (adapters := model.adapters) is not None:
            self.adapted = Adapted(self.without_adapters(), adapters.layout, adapters.parameters)
            self.published = MadeWeights(self.published, adapters.merged)
            self.served = MadeWeights(self.served, adapters.merged)
        self._copies: dict[str, Tensor] = {}
        self._pending: Pending | None = None

    @abstractmethod
    def make_optimizer(self) -> Mapping[str, MemoryPart]:
        """Makes the gradients' memory and the optimizer, and returns their parts by the names of `parts`.

        Collective over: the role's ranks.
        """

    @abstractmethod
    def without_adapters(self) -> RoleModel:
        """Returns the same model for evaluation with its adapters off."""

    def readable_weights(self) -> Mapping[str, Tensor]:
        """Returns the `parameters` on the model's device."""
        return self.parameters

    def train_batches(
        self, mini_batches: Iterable[Experience], loss_function: LossFunction, *, temperature: float = 1.0
    ) -> list[dict[str, float]]:
        """`accumulate` and `step` for one after the other, of each of which every rank passes its replica's share.

        A backend may communicate between replicas while it computes; all of it is over when this returns.
        Collective over: the role's ranks.
        """
        metrics = []
        try:
            for experience in mini_batches:
                self._accumulate(experience, loss_function, temperature, is_whole=True)
                metrics.append(self._step())
        finally:
            self.finish_steps()
        return metrics

    def train_batch(
        self, experience: Experience, loss_function: LossFunction, *, temperature: float = 1.0
    ) -> dict[str, float]:
        """`train_batches` with one. Collective over: the role's ranks."""
        (metrics,) = self.train_batches([experience], loss_function, temperature=temperature)
        return metrics

    def accumulate(self, experience: Experience, loss_function: LossFunction, *, temperature: float = 1.0) -> None:
        """Add the gradients of `experience`, this replica's share of a part of the mini-batch. It may be empty.

        Every rank of the replica passes the same samples; all parts of a mini-batch have the same fields and loss
        function. Collective over: this replica, or as evaluating is.
        """
        # Other roles may have the device, and the gradients may leave it, before the next part or the step follows.
        self._accumulate(experience, loss_function, temperature, is_whole=False)

    def step(self) -> dict[str, float]:
        """The optimizer step on what was accumulated. Collective over: the role's ranks.

        Returns loss, grad_norm (before clipping), lr, SKIPPED, with fp16 LOSS_SCALE and OVERFLOWED, and the metrics of
        the loss function over the whole mini-batch, equal on all ranks. A mini-batch of samples without response tokens
        counts as a step and leaves the weights as they are; so does, with the state of the optimizer, one whose loss or
        gradient norm is not finite, which is skipped. Raises on all ranks, before any weight changes, DivergenceError
        where more in a row would be skipped than `on_divergence` has, and ConfigError when no rank had a sample. What
        was accumulated is used up in any case.
        """
        metrics = self._step()
        self.finish_steps()
        return metrics

    def _accumulate(
        self, experience: Experience, loss_function: LossFunction, temperature: float, *, is_whole: bool
    ) -> None:
        if self._pending is None:
            self.forget_gradients()
            self._pending = Pending()
        pending = self._pending
        pending.count(experience)
        micro_batches = self.model.micro_batches(experience, self.settings.micro_batch_tokens)
        with self._drawing(pending.num_parts):
            pending.outputs += self.backward(micro_batches, loss_function, temperature, is_whole=is_whole)
        pending.num_parts += 1
        if not experience.num_samples and self.ends_here:
            # Other replicas have metrics, whose names and number this one needs to take part in reducing them.
            pending.outputs.append(self.output_of_nothing(experience, loss_function))

    def _drawing(self, part: int) -> AbstractContextManager[None]:
        """Around a part of a mini-batch, in which adapters draw what they drop: equal on ranks with equal tokens."""
        adapters = self.model.adapters
        return adapters.drawing(self.num_updates, part, *self.place_in_replicas()) if adapters else nullcontext()

    def _step(self) -> dict[str, float]:
        """As `step`; the new weights may still be on their way."""
        if self._pending is None:
            raise RuntimeError("step() needs accumulate() before it, on every rank; a share may be empty")
        pending, self._pending = self._pending, None
        with self.reducing():
            return self._apply(pending)

    def _apply(self, pending: "Pending") -> dict[str, float]:
        metrics, update = self.reduced(pending), self.num_updates + 1
        self.skipped.require_samples(metrics.pop(NUM_SAMPLES), update, self.groups.dp.size())
        divisor = metrics.pop(DIVISOR)
        rate = learning_rate(self.settings.optimizer, self.num_updates, self.total_updates)
        is_skipped, norm, overflowed = self.skipped.is_to_skip("loss", metrics["loss"], update), math.nan, False
        if not is_skipped:
            self.late.settle()
            norm, overflowed = self.update(divisor, rate) if divisor else (0.0, False)
            is_skipped = not math.isfinite(norm)
        self.num_updates += 1
        if not overflowed:
            self.skipped.count(is_skipped=is_skipped)
        told = {"grad_norm": norm, "lr": rate, SKIPPED: float(is_skipped)}
        return {**metrics, **told, **self.scale_metrics(overflowed=overflowed)}

    @abstractmethod
    def forget_gradients(self) -> None:
        """Clears the gradients, because a mini-batch begins."""

    @abstractmethod
    def backward(
        self, micro_batches: Sequence[MicroBatch], loss_function: LossFunction, temperature: float, *, is_whole: bool
    ) -> list[LossOutput]:
        """Adds the gradients of the micro-batches, which are a whole mini-batch or a part of one.

        Returns what `loss_of` keeps of each with samples, on ranks where the model ends. Collective as `accumulate` is.
        """

    @property
    def ends_here(self) -> bool:
        """Whether the model ends on this rank."""
        return True

    def output_of_nothing(self, experience: Experience, loss_function: LossFunction) -> LossOutput:
        """Returns what `backward` would keep of `experience`, which has no samples."""
        return loss_function(experience, *self.objective.of_nothing(experience))

    @abstractmethod
    def place_in_replicas(self) -> tuple[int, ...]:
        """Returns numbers that differ between ranks which hold different tokens or layers."""

    def reducing(self) -> AbstractContextManager[None]:
        """Is entered around every optimizer step."""
        return nullcontext()

    def reduced(self, pending: "Pending") -> dict[str, float]:
        """Returns the mini-batch's metrics with NUM_SAMPLES and DIVISOR. Collective over: the role's ranks."""
        return pending.reduced(self.groups.dp, self.device)

    @abstractmethod
    def update(self, divisor: float, rate: float) -> tuple[float, bool]:
        """Divides and clips the gradients, and applies them unless their norm is not finite.

        Returns the norm, and whether a loss scale has made it overflow. Collective over: the role's ranks.
        """

    def scale_metrics(self, *, overflowed: bool) -> dict[str, float]:
        """Returns LOSS_SCALE and OVERFLOWED of a model in fp16."""
        return {}

    def finish_steps(self) -> None:
        """Waits until all weights have arrived."""

    def loss_of(self, loss_function: LossFunction, temperature: float) -> Outputs:
        """What a pass makes of a micro-batch: its loss, and that with its sums to keep."""

        def loss(batch: MicroBatch, outputs: Tensor) -> tuple[Tensor, LossOutput]:
            token_outputs = self.objective.token_outputs(self.model, batch, outputs, temperature)
            output = loss_function(batch.experience, *token_outputs)
            # A copy: pipeline schedules free the storage of what a stage returns.
            kept = LossOutput(
                output.loss.detach().clone(), output.divisor, output.sums, output.token_sums, output.maxima
            )
            return output.loss, kept

        return loss

    # The training state, saved and loaded through layouts: master weights, the optimizer's moments, its steps. Of a
    # model with adapters it is theirs: the base is in its checkpoint. Every element is saved by one rank, so a state
    # can be loaded in any other layout, by either backend.

    def save_state(self) -> Contents:
        """This rank's share of weights and optimizer, wherever `parts` lie, in memory that the next call writes over.

        It is copied when somebody takes it, at the latest before the next optimizer step or before a part moves.
        RuntimeError where a part was dropped, and where gradients wait for an optimizer step. Not collective.
        """
        if self._pending is not None:
            raise RuntimeError("gradients wait for their optimizer step; a training state is saved before or after it")
        kept, flats = self.kept(), dict[str, Tensor]()
        names, pieces, shares = self.answered_for(kept)

        def copy(kind: str, name: str, part: str, values: Tensor) -> None:
            flat, (start, stop) = flat_name(kind, name), shares[name]
            first, count = start - kept[name].first, stop - start
            flats[flat] = self.late.add(self.parts[part], values, first, count, self._copies.get(flat))

        self.late.begin()
        for name in (names[number] for number in np.unique(pieces["parameter"])):
            copy(MASTER, name, kept[name].part, kept[name].master)
            for moment, values in kept[name].moments.items():
                copy(moment, name, "optimizer", values)
        self._copies.update(flats)
        saved = contents(self.model.learned_layout.tensors, names, pieces, flats, self.counts())
        return Contents(LateTensors(saved.tensors, self.late), saved.metadata)

    def load_state(self, files: Sequence[AnyFile]) -> None:
        """Go on from what `save_state` left on all ranks, whatever their backend and layout. Before the first step.

        Fills weights, master weights and moments of a model that is on the device; of the files only what this rank
        needs is read. CheckpointError where one is missing or damaged, where they do not belong together or to a model
        of these tensors or to another optimizer, and where they lack a part of one. Collective over: the role's ranks.
        """
        saved = SavedState(files, self.model.learned_layout.tensors)
        saved.require_optimizer(self.counts().optimizer, self.role)
        if saved.counts.optimizer_steps:
            self.make_states(saved.counts.optimizer_steps)
        saved.read(list(self._destinations(MOMENTS if saved.counts.optimizer_steps else ())))
        self.num_updates = saved.counts.num_updates
        self.go_on(saved.counts)

    def take_copying_s(self) -> float:
        """Seconds since the last call that training waited for what `save_state` left to be copied."""
        return self.late.take_waited_s()

    def _destinations(self, moments: Sequence[str]) -> Iterator[Destination]:
        mine, weights = self.model.learned_layout.on(dist.get_rank()), self.model.learned
        names = [name for name, _ in mine.parameters]
        yield Destination(MASTER, mine.pieces, [weights[name].detach().view(-1) for name in names])
        optimized = self.optimized()
        kinds = [(MASTER, {name: one.master for name, one in optimized.items() if one.part != "weights"})]
        for moment in moments:
            kinds.append((moment, {n: one.moments[moment] for n, one in optimized.items() if moment in one.moments}))
        for kind, tensors in kinds:
            if tensors:
                cut = within(mine.pieces, *limits(names, {name: optimized[name].range for name in tensors}))
                flats = [tensors[name].detach().view(-1) if name in tensors else None for name in names]
                yield Destination(kind, cut, flats)

    @abstractmethod
    def optimized(self) -> dict[str, Optimized]:
        """Returns what the optimizer has on this rank, by the names of `model.learned`."""

    def kept(self) -> dict[str, Optimized]:
        """Returns what is saved: `optimized`, and what else training changes."""
        return self.optimized()

    @abstractmethod
    def answered_for(self, kept: Mapping[str, Optimized]) -> tuple[list[str], Array, Mapping[str, Range]]:
        """Returns the names of this rank's parameters, the pieces that it saves, and each parameter's saved range.

        Offsets of pieces count from the start of the range.
        """

    @abstractmethod
    def counts(self) -> Counts:
        """Returns the counts of the present state."""

    @abstractmethod
    def make_states(self, num_steps: int) -> None:
        """Makes zero moments as the optimizer does in its first step, and counts `num_steps`."""

    def go_on(self, counts: Counts) -> None:
        """Is called after a state with these counts was loaded. Collective over: the role's ranks."""
