"""What models that are evaluated and trained have in common on every backend."""

import math
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rltrain.algorithms.losses import LossFunction, LossOutput
from rltrain.config import schema
from rltrain.data.experience import Experience
from rltrain.errors import ConfigError, DivergenceError
from rltrain.offload.memory_parts import MemoryPart
from rltrain.reshard.layout import Layout
from rltrain.training.logprobs import OBJECTIVES, PackedModel, likeliest_tokens, squared_probabilities
from rltrain.training.packing import MicroBatch

# A model that says of every token its log-prob, or the score of its sample up to there.

Outputs = Callable[[MicroBatch, Tensor], tuple[Tensor, Any]]
"""(micro-batch, what a model makes of its rows on this rank [rows, ...]) -> (loss scalar, anything to keep)."""
Forward = Callable[[Sequence[MicroBatch], Outputs], list[Any]]
"""As Evaluable.forward."""


class Evaluable(ABC):
    """As training.backend.Model describes it, of what a backend says of its model."""

    def __init__(
        self, model: PackedModel, layout: Layout, parameters: Mapping[str, Tensor], device: torch.device
    ) -> None:
        self.model, self.device = model, device
        self.objective = OBJECTIVES[model.architecture.head]
        self.layout = layout
        self.parameters = parameters
        self.parts: Mapping[str, MemoryPart] = {"weights": MemoryPart(parameters.values)}

    @abstractmethod
    def micro_batches(self, experience: Experience, max_tokens: int) -> list[MicroBatch]:
        """`experience` in micro-batches that the model can take."""

    @abstractmethod
    def forward(self, micro_batches: Sequence[MicroBatch], outputs: Outputs) -> list[Any]:
        """What `outputs` keeps of each micro-batch with samples, on ranks where the model ends; without gradients."""

    @abstractmethod
    def share_results(self, results: Sequence[Tensor]) -> None:
        """Give those of ranks where the model ends to the others of the replica."""

    def evaluate(self, experience: Experience, *, max_tokens: int, temperature: float = 1.0) -> Tensor:
        """Collective over: this replica."""
        return self._evaluate_tokens(experience, max_tokens, temperature, self.forward)

    def distributions(
        self, experience: Experience, *, count: int, max_tokens: int, temperature: float = 1.0
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Collective over: this replica."""

        def outputs(batch: MicroBatch, of_tokens: Tensor) -> tuple[Tensor, ...]:
            logprobs = self.objective.token_outputs(self.model, batch, of_tokens, temperature)[0]
            return logprobs, *likeliest_tokens(self.model, batch, of_tokens, temperature, count)

        num_tokens = experience.num_tokens
        ids = torch.zeros(num_tokens, count, dtype=torch.int64)
        empty = [torch.zeros(num_tokens), ids, torch.zeros(num_tokens, count)]
        logprobs, top_ids, top_logprobs = self._evaluate(experience, max_tokens, outputs, empty, self.forward)
        return logprobs, top_ids, top_logprobs

    def evaluate_squares(
        self, experience: Experience, *, max_tokens: int, temperature: float = 1.0
    ) -> tuple[Tensor, Tensor]:
        """Collective over: this replica."""

        def outputs(batch: MicroBatch, of_tokens: Tensor) -> tuple[Tensor, ...]:
            logprobs = self.objective.token_outputs(self.model, batch, of_tokens, temperature)[0]
            return logprobs, squared_probabilities(self.model, batch, of_tokens, temperature)

        empty = [torch.zeros(experience.num_tokens), torch.zeros(experience.num_tokens)]
        logprobs, squares = self._evaluate(experience, max_tokens, outputs, empty, self.forward)
        return logprobs, squares

    def evaluate_routing(
        self, experience: Experience, *, max_tokens: int, temperature: float = 1.0
    ) -> tuple[Tensor, Tensor]:
        """Of a backend whose routers tell what they choose; others are refused with it."""
        raise NotImplementedError(f"{type(self).__name__} does not tell which experts its routers choose")

    def _evaluate_tokens(self, experience: Experience, max_tokens: int, temperature: float, forward: Forward) -> Tensor:
        """[tokens] on the host, the objective's first output."""

        def outputs(batch: MicroBatch, of_tokens: Tensor) -> tuple[Tensor]:
            return (self.objective.token_outputs(self.model, batch, of_tokens, temperature)[0],)

        return self._evaluate(experience, max_tokens, outputs, [torch.zeros(experience.num_tokens)], forward)[0]

    @torch.no_grad()
    def _evaluate(
        self,
        experience: Experience,
        max_tokens: int,
        outputs: Callable[[MicroBatch, Tensor], Sequence[Tensor]],
        empty: Sequence[Tensor],
        forward: Forward,
    ) -> list[Tensor]:
        """`empty`, filled with what `outputs` gives of each micro-batch, on every rank of the replica, on the host."""
        results = [tensor.to(self.device) for tensor in empty]

        def without_loss(batch: MicroBatch, of_tokens: Tensor) -> tuple[Tensor, Sequence[Tensor]]:
            return torch.zeros((), device=self.device), outputs(batch, of_tokens)

        micro_batches = self.micro_batches(experience, max_tokens)
        if not micro_batches:
            return [*empty]
        kept = forward(micro_batches, without_loss)
        for batch, values in zip(micro_batches, kept, strict=False):
            for result, value in zip(results, values, strict=True):
                result[batch.token_index.to(result.device)] = value
        self.share_results(results)
        return [result.cpu() for result in results]


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


# What models that are trained have in common on every backend.


class Trainable(Evaluable):
    """As training.backend.TrainedModel describes it, of what a backend says of its model."""

    late: LateCopies
    """Of the state that was saved last."""

    def take_copying_s(self) -> float:
        """As training.backend.TrainedModel has it."""
        return self.late.take_waited_s()

    def copy_late(self) -> None:
        """Once `parts` are known: `late` has made its copies before one of them moves."""
        self.late = LateCopies(self.device)
        for part in self.parts.values():
            part.settle = self.late.settle

    @abstractmethod
    def train_batches(
        self, mini_batches: Iterable[Experience], loss_function: LossFunction, *, temperature: float = 1.0
    ) -> list[dict[str, float]]:
        """As training.backend.TrainedModel has it."""

    def train_batch(
        self, experience: Experience, loss_function: LossFunction, *, temperature: float = 1.0
    ) -> dict[str, float]:
        """That of one mini-batch. Collective over: the role's ranks."""
        (metrics,) = self.train_batches([experience], loss_function, temperature=temperature)
        return metrics

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
