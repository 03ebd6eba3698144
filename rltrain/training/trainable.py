"""The models of roles on every backend: evaluation, training, and saved training states."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
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
from rltrain.models.table import Array
from rltrain.offload.memory_parts import LateCopies, LateTensors, MemoryPart
from rltrain.reshard.layout import Layout
from rltrain.training.adapters import MadeWeights
from rltrain.training.fake_quantization import rounded_weights
from rltrain.training.logprobs import OBJECTIVES, PackedModel, likeliest_tokens, squared_probabilities
from rltrain.training.optimizers import ADAM_STATES, MUON_STATES, learning_rate
from rltrain.training.packing import MicroBatch
from rltrain.training.shards import Range, limits, within

# Models that return a log-prob per token, or a score per prefix of a sample.

Outputs = Callable[[MicroBatch, Tensor], tuple[Tensor, Any]]
"""(micro-batch, model outputs of this rank's rows [rows, ...]) -> (scalar loss, a result to keep)."""
Forward = Callable[[Sequence[MicroBatch], Outputs], list[Any]]
"""The signature of RoleModel.forward."""


@dataclass(frozen=True, eq=False)
class Adapted:
    """The additional parts of a trained model with low-rank adapters (config.lora). Its `parameters` are the frozen
    base."""

    base: "RoleModel"
    """The model with its adapters off, in the same memory."""
    layout: Layout
    parameters: Mapping[str, Tensor]
    """The adapters, with the names and shapes of `layout.on(rank)`."""


class RoleModel(ABC):
    """This rank's part of a model for evaluation.

    Every rank of a replica passes the same samples, perhaps none, and gets the same result. Micro-batches have at most
    `max_tokens` tokens, except for a longer single sample. Collective over: the replica. If ranks hold shards or
    experts of other replicas, collective over all replicas.
    """

    def __init__(self, model: PackedModel, *, is_base: bool = False) -> None:
        """Wraps `model`. With `is_base` its adapters are off during evaluation: it is the model before training."""
        self.model, self.device, self._is_base = model, model.device, is_base
        self.objective = OBJECTIVES[model.architecture.head]
        self.layout = model.layout
        """Location of the parameters on all ranks of the model."""
        self.parameters = model.weights
        """This rank's parameters, with the names and shapes of `layout.on(rank)`. Valid while part "weights" is on the
        device."""
        self.published = self.parameters
        """Weights for other models in training and for checkpoints, by the names of `parameters`. Tensors other than
        parameters are computed on access, while part "weights" is on the device, and are not kept."""
        self.served = self.parameters
        """Weights for engines: `published`, with rounding if the model computes with rounded weights
        (config.model.fake_quantization)."""
        self.adapted: Adapted | None = None
        """The adapters of a trained model, if it has any."""
        self.parts: Mapping[str, MemoryPart] = {"weights": MemoryPart(self._weights)}
        """Memory parts on the device, by the names of tasks.roles. Every model has "weights". A trained model also has
        "master_weights", "optimizer" and "gradients". Parts share no memory."""

    @abstractmethod
    def forward(self, micro_batches: Sequence[MicroBatch], outputs: Outputs) -> list[Any]:
        """Returns the results kept by `outputs` for each micro-batch with samples, without gradients. They are on the
        ranks of the last pipeline stage."""

    def shared(self, results: Sequence[Tensor]) -> Sequence[Tensor]:
        """Sends the results of the last pipeline stage to every rank of the replica, and returns them."""
        return results

    def evaluate(self, experience: Experience, *, max_tokens: int, temperature: float = 1.0) -> Tensor:
        """Returns each token's log-prob or score, fp32 [tokens] in host memory, without gradients. A sample's first
        token has log-prob 0."""
        return self._evaluate(experience, max_tokens, temperature)[0]

    def distributions(
        self, experience: Experience, *, count: int, max_tokens: int, temperature: float = 1.0
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns each token's log-prob, fp32 [tokens], and the `count` likeliest tokens at its position with their
        log-probs, int64 and fp32 [tokens, count]. Logits are divided by `temperature`.

        All tokens of prompts and responses are included. Values of a sample's first token are 0. The results are in
        host memory, without gradients.
        """
        shape = experience.num_tokens, count

        def likeliest(batch: MicroBatch, of_tokens: Tensor) -> Sequence[Tensor]:
            return likeliest_tokens(self.model, batch, of_tokens, temperature, count)

        empty = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape)
        logprobs, top_ids, top_logprobs = self._evaluate(experience, max_tokens, temperature, likeliest, empty)
        return logprobs, top_ids, top_logprobs

    def log_probs(
        self, experience: Experience, *, count: int, max_tokens: int, temperature: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the results of `distributions`. With a `count` of 0 it only calls `evaluate`."""
        if count:
            return self.distributions(experience, count=count, max_tokens=max_tokens, temperature=temperature)
        logprobs = self.evaluate(experience, max_tokens=max_tokens, temperature=temperature)
        nothing = torch.empty(experience.num_tokens, 0)
        return logprobs, nothing.long(), nothing

    def evaluate_squares(
        self, experience: Experience, *, max_tokens: int, temperature: float = 1.0
    ) -> tuple[Tensor, Tensor]:
        """Returns the result of `evaluate`, and the sum of squared probabilities over the vocabulary at each position,
        [tokens]. The model must have a vocabulary head."""

        def squares_of(batch: MicroBatch, of_tokens: Tensor) -> Sequence[Tensor]:
            return (squared_probabilities(self.model, batch, of_tokens, temperature),)

        empty = (torch.zeros(experience.num_tokens),)
        logprobs, squares = self._evaluate(experience, max_tokens, temperature, squares_of, empty)
        return logprobs, squares

    def evaluate_routing(
        self, experience: Experience, *, max_tokens: int, temperature: float = 1.0
    ) -> tuple[Tensor, Tensor]:
        """Returns the result of `evaluate`, and the chosen experts in the layers of this rank.

        The experts have the form of `Experience.routed_experts`. Raises NotImplementedError if the backend cannot
        record routing.
        """
        raise NotImplementedError(f"{type(self).__name__} does not report the experts chosen by its routers")

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
        """Returns the objective's first output, followed by `empty` filled with the results of `further` per
        micro-batch. Every rank of the replica gets them, in host memory."""
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


# Metrics of an optimizer step in addition to those of the loss.

SKIPPED = "skipped_updates"
"""Metric of an optimizer step: 1 if the step was skipped because its loss or gradient norm was not finite, else 0."""
SHARED_TOKENS = "shared_tokens_ratio"
"""Metric of an optimizer step: the share of tokens that were computed with another sample's."""
RATIO, TOO_FAR = "ratio", "far_updates"
"""Metrics of a policy's optimizer step: the mean ratio of present to old probability, and 1 if the step was skipped
because of it, else 0. Such a step is also among SKIPPED."""
LOSS_SCALE, OVERFLOWED = "loss_scale", "overflowed_updates"
"""Metrics of an fp16 model's optimizer step: the loss scale after it, and 1 or 0 for an overflow of the gradients. An
overflow is also among SKIPPED. A smaller loss scale may avoid it."""

# The pending mini-batch of an optimizer step, and the rules for skipped steps.

# Keys next to the metrics of a mini-batch during the reduction.
NUM_SAMPLES, DIVISOR = "num_samples", "divisor"


class Pending:
    """Counts and loss outputs accumulated since the last optimizer step."""

    def __init__(self) -> None:
        self.num_samples = self.num_tokens = self.num_rows = 0
        self.response_tokens = 0
        self.num_parts = 0
        self.outputs: list[LossOutput] = []

    def count(self, experience: Experience) -> None:
        """Counts the samples and tokens of the next part."""
        self.num_samples += experience.num_samples
        self.num_tokens += experience.num_tokens
        self.response_tokens += int(experience.response_mask.sum())

    def reduced(self, replicas: dist.ProcessGroup, device: torch.device) -> dict[str, float]:
        """Returns the mini-batch's metrics with NUM_SAMPLES and DIVISOR. Collective over: the data-parallel group."""
        first = self.outputs[0]
        counts = torch.tensor(
            [self.num_samples, self.response_tokens, self.num_tokens, self.num_rows], dtype=torch.float64, device=device
        )
        rows = [(o.divisor, o.loss, *o.sums.values(), *o.token_sums.values()) for o in self.outputs]
        totals = torch.cat([counts, _scalars(rows, device).sum(0)])
        dist.all_reduce(totals, group=replicas)
        num_samples, response_tokens, num_tokens, num_rows, divisor, *sums = totals.tolist()
        divisors = [divisor] * (1 + len(first.sums)) + [response_tokens] * len(first.token_sums)
        means = [total / (by or 1) for total, by in zip(sums, divisors, strict=True)]
        metrics = dict(zip(["loss", *first.sums, *first.token_sums], means, strict=True))
        if first.maxima:
            maxima = _scalars([tuple(o.maxima.values()) for o in self.outputs], device).amax(0)
            dist.all_reduce(maxima, dist.ReduceOp.MAX, group=replicas)
            metrics |= dict(zip(first.maxima, maxima.tolist(), strict=True))
        shared = 1 - num_rows / num_tokens if num_tokens else 0.0
        return metrics | {NUM_SAMPLES: num_samples, DIVISOR: divisor, SHARED_TOKENS: shared}


class SkippedSteps:
    """Counts consecutive skipped optimizer steps. `role` is for messages."""

    def __init__(self, role: str, max_skipped: int) -> None:
        self.role, self.max_skipped, self.num_skipped = role, max_skipped, 0

    def require_samples(self, num_samples: float, update: int, num_replicas: int) -> None:
        """Raises ConfigError if optimizer step `update` has no sample on any replica."""
        if not num_samples:
            raise ConfigError(
                f"optimizer step {update} of the {self.role} has no sample on any of its {num_replicas} data-parallel "
                "ranks; raise batch.prompts_per_step or lower batch.mini_batches"
            )

    def is_to_skip(self, what: str, value: float, update: int) -> bool:
        """Returns whether the optimizer step must be skipped because `value` is not finite. Raises DivergenceError if
        too many steps in a row were skipped."""
        if math.isfinite(value):
            return False
        if self.num_skipped < self.max_skipped:
            return True
        before = ""
        if self.num_skipped:
            before = f", after {self.num_skipped} skipped steps in a row (on_divergence.max_skipped)"
        raise DivergenceError(
            f"the {self.role}'s {what} is {value} at optimizer step {update}{before}; its weights were left "
            f"as they were. Lower {self.role}.optimizer.lr, or look at this step's rewards and log-probs."
        )

    def count(self, *, is_skipped: bool) -> None:
        self.num_skipped = self.num_skipped + 1 if is_skipped else 0


def _scalars(rows: list[tuple[Tensor, ...]], device: torch.device) -> Tensor:
    """Returns the rows as one tensor, fp64 [rows, columns]."""
    values = [value.detach().to(device, torch.float64) for row in rows for value in row]
    return torch.stack(values).view(len(rows), -1)


# The tensors of an optimizer, and their location.

MOMENTS = (*ADAM_STATES, *MUON_STATES)
"""Moments kept by optimizers per parameter: first AdamW's, then Muon's."""


@dataclass(frozen=True)
class Optimized:
    """The optimizer's state of one parameter, for its flattened elements from `first` on.

    `master` is fp32: the weights themselves or a copy. `part` names its memory part. With `is_shard` the elements
    belong to this rank alone. Otherwise all ranks of the parameter hold the same elements. `moments` are named as in
    MOMENTS. There are none before the first step.
    """

    master: Tensor
    first: int
    is_shard: bool
    part: str
    moments: Mapping[str, Tensor]

    @property
    def range(self) -> Range:
        """The covered elements of the parameter."""
        return self.first, self.first + self.master.numel()


# A model with gradients and an optimizer.


class TrainedModel(RoleModel):
    """A role model with gradients and an optimizer. Load the model's weights first, or call `load_state` afterwards.

    An optimizer step consists of calls of `accumulate`, at least one on every rank, and one call of `step`. Accumulated
    values are sums. Only `step` reduces them over data parallelism and divides them, once.
    """

    def __init__(
        self,
        model: PackedModel,
        settings: schema.Trained,
        *,
        total_updates: int,
        max_skipped: int = 0,
        max_ratio: float | None = None,
        role: str = "actor",
    ) -> None:
        """Builds the optimizer. The learning rate decays over `total_updates`. Steps with a mean ratio above
        `max_ratio` are skipped. `role` is for messages. Collective over: the role's ranks."""
        super().__init__(model)
        self.settings, self.role, self.skipped = settings, role, SkippedSteps(role, max_skipped)
        self.max_ratio = max_ratio
        self.total_updates, self.num_updates = total_updates, 0
        self.groups = model.pg_collection
        self.parts = {**self.parts, **self.make_optimizer()}
        self.late = LateCopies(self.device)
        """Pending copies of the last saved state. They are made before one of the parts moves."""
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
        """Makes the gradient memory and the optimizer, and returns their parts by the names of `parts`. Collective
        over: the role's ranks."""

    @abstractmethod
    def without_adapters(self) -> RoleModel:
        """Returns the same model for evaluation, with its adapters off."""

    def readable_weights(self) -> Mapping[str, Tensor]:
        """Returns the `parameters` on the model's device."""
        return self.parameters

    def train_batches(
        self, mini_batches: Iterable[Experience], loss_function: LossFunction, *, temperature: float = 1.0
    ) -> list[dict[str, float]]:
        """Calls `accumulate` and `step` for each mini-batch. Every rank passes its replica's share.

        A backend may overlap communication between replicas with computation. All of it is finished on return.
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
        """Calls `train_batches` with one mini-batch. Collective over: the role's ranks."""
        (metrics,) = self.train_batches([experience], loss_function, temperature=temperature)
        return metrics

    def accumulate(self, experience: Experience, loss_function: LossFunction, *, temperature: float = 1.0) -> None:
        """Adds the gradients of `experience`, this replica's share of a part of the mini-batch. It may be empty.

        Every rank of the replica passes the same samples. All parts of a mini-batch have the same fields and loss
        function. Collective over: the ranks of an evaluation (see RoleModel).
        """
        # Before the next part, other roles may use the device and the gradients may leave it.
        self._accumulate(experience, loss_function, temperature, is_whole=False)

    def step(self) -> dict[str, float]:
        """Makes the optimizer step on the accumulated gradients.

        Returns loss, grad_norm (before clipping), lr, SKIPPED, and the loss function's metrics over the whole
        mini-batch, equal on all ranks. With fp16 also LOSS_SCALE and OVERFLOWED.

        A mini-batch without response tokens counts as a step but changes no weights. If the loss or the gradient norm
        is not finite, or the mean ratio too large, the step is skipped. It counts too, but changes neither weights nor
        optimizer state.

        Raises before any weight changes, on all ranks: DivergenceError if more steps in a row would be skipped than
        `on_divergence` allows, ConfigError if no rank had a sample. The accumulated gradients are consumed in every
        case.

        Collective over: the role's ranks.
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
        max_tokens = self.settings.micro_batch_limit
        micro_batches = self.model.micro_batches(experience, max_tokens, looks_ahead=self.looks_ahead)
        pending.num_rows += sum(batch.num_computed_tokens for batch in micro_batches)
        with self._drawing(pending.num_parts):
            pending.outputs += self.backward(micro_batches, loss_function, temperature, is_whole=is_whole)
        pending.num_parts += 1
        if not experience.num_samples and self.ends_here:
            # Other replicas have metrics. This one needs their names and number for the reduction.
            pending.outputs.append(self.output_of_nothing(experience, loss_function))

    def _drawing(self, part: int) -> AbstractContextManager[None]:
        """Seeds the adapters' dropout for a part of a mini-batch. Ranks with the same tokens drop the same elements."""
        adapters = self.model.adapters
        return adapters.drawing(self.num_updates, part, *self.place_in_replicas()) if adapters else nullcontext()

    def _step(self) -> dict[str, float]:
        """Makes the step. The new weights may still be in transfer on return."""
        if self._pending is None:
            raise RuntimeError("step() was called without accumulate(). Every rank must call it, even without samples")
        pending, self._pending = self._pending, None
        with self.reducing():
            return self._apply(pending)

    def _apply(self, pending: "Pending") -> dict[str, float]:
        metrics, update = self.reduced(pending), self.num_updates + 1
        self.skipped.require_samples(metrics.pop(NUM_SAMPLES), update, self.groups.dp.size())
        divisor = metrics.pop(DIVISOR)
        rate = learning_rate(self.settings.optimizer, self.num_updates, self.total_updates)
        is_skipped, norm, overflowed = self.skipped.is_to_skip("loss", metrics["loss"], update), math.nan, False
        is_too_far = not is_skipped and self.max_ratio is not None and metrics.get(RATIO, 0.0) > self.max_ratio
        if is_too_far:
            is_skipped = True
        elif not is_skipped:
            self.late.settle()
            norm, overflowed = self.update(divisor, rate) if divisor else (0.0, False)
            is_skipped = not math.isfinite(norm)
        self.num_updates += 1
        if not (overflowed or is_too_far):
            self.skipped.count(is_skipped=is_skipped)
        told = {"grad_norm": norm, "lr": rate, SKIPPED: float(is_skipped)}
        told |= {} if self.max_ratio is None else {TOO_FAR: float(is_too_far)}
        return {**metrics, **told, **self.scale_metrics(overflowed=overflowed)}

    @abstractmethod
    def forget_gradients(self) -> None:
        """Clears the gradients at the beginning of a mini-batch."""

    @abstractmethod
    def backward(
        self, micro_batches: Sequence[MicroBatch], loss_function: LossFunction, temperature: float, *, is_whole: bool
    ) -> list[LossOutput]:
        """Adds the gradients of micro-batches of a whole mini-batch or a part of it. Returns the outputs kept by
        `loss_of` for each micro-batch with samples, on the ranks of the last pipeline stage. Collective over: the ranks
        of `accumulate`."""

    @property
    def looks_ahead(self) -> bool:
        """Whether a row also gets the token after its own in training."""
        return False

    @property
    def ends_here(self) -> bool:
        """Whether this rank has the last pipeline stage."""
        return True

    def output_of_nothing(self, experience: Experience, loss_function: LossFunction) -> LossOutput:
        """Returns the output of `backward` for `experience` without samples."""
        return loss_function(experience, *self.objective.of_nothing(experience))

    @abstractmethod
    def place_in_replicas(self) -> tuple[int, ...]:
        """Returns numbers unique to this rank's tokens and layers. Ranks with other tokens or layers have other
        numbers."""

    def reducing(self) -> AbstractContextManager[None]:
        """Returns a context manager around every optimizer step."""
        return nullcontext()

    def reduced(self, pending: "Pending") -> dict[str, float]:
        """Returns the mini-batch's metrics with NUM_SAMPLES and DIVISOR. Collective over: the role's ranks."""
        return pending.reduced(self.groups.dp, self.device)

    @abstractmethod
    def update(self, divisor: float, rate: float) -> tuple[float, bool]:
        """Divides and clips the gradients, and applies them if their norm is finite. Returns the norm, and whether it
        overflowed because of the loss scale. Collective over: the role's ranks."""

    def scale_metrics(self, *, overflowed: bool) -> dict[str, float]:
        """Returns LOSS_SCALE and OVERFLOWED of an fp16 model."""
        return {}

    def finish_steps(self) -> None:
        """Waits until all weights have arrived."""

    def loss_of(self, loss_function: LossFunction, temperature: float) -> Outputs:
        """Returns a function from a micro-batch and its outputs to the loss and the loss output to keep."""

        def loss(batch: MicroBatch, outputs: Tensor) -> tuple[Tensor, LossOutput]:
            token_outputs = self.objective.token_outputs(self.model, batch, outputs, temperature)
            output = loss_function(batch.experience, *token_outputs)
            # A copy: pipeline schedules free the storage of a stage's outputs.
            kept = LossOutput(
                output.loss.detach().clone(), output.divisor, output.sums, output.token_sums, output.maxima
            )
            return output.loss, kept

        return loss

    # The training state: master weights, the optimizer's moments and its step count, saved and loaded through layouts.
    # With adapters it is the state of the adapters, since the base is in its checkpoint. Every element is saved by one
    # rank, so any layout and backend can load it.

    def save_state(self) -> Contents:
        """Returns this rank's share of weights and optimizer, wherever `parts` are. The next call overwrites the
        memory.

        It is copied on access, at the latest before the next optimizer step or before a part moves. Raises RuntimeError
        if a part was dropped, or if gradients wait for an optimizer step. Not collective.
        """
        if self._pending is not None:
            raise RuntimeError("gradients wait for their optimizer step; save a training state before or after it")
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
        """Restores a state saved by `save_state` on all ranks of any backend and layout. Call it before the first step.

        It fills weights, master weights and moments of a model on the device. Each rank reads only its own part of the
        files.

        Raises CheckpointError if a file is missing, damaged or incomplete, or if the files do not belong together, to a
        model with these tensors or to this optimizer. Collective over: the role's ranks.
        """
        saved = SavedState(files, self.model.learned_layout.tensors)
        saved.require_optimizer(self.counts().optimizer, self.role)
        if saved.counts.optimizer_steps:
            self.make_states(saved.counts.optimizer_steps)
        saved.read(list(self._destinations(MOMENTS if saved.counts.optimizer_steps else ())))
        self.num_updates = saved.counts.num_updates
        self.go_on(saved.counts)

    def take_copying_s(self) -> float:
        """Returns the seconds since the last call that training waited for copies of `save_state`."""
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
        """Returns the optimizer's state on this rank, by the names of `model.learned`."""

    def kept(self) -> dict[str, Optimized]:
        """Returns the state to save: `optimized`, and other values changed by training."""
        return self.optimized()

    @abstractmethod
    def answered_for(self, kept: Mapping[str, Optimized]) -> tuple[list[str], Array, Mapping[str, Range]]:
        """Returns this rank's parameter names, its pieces to save, and the saved range of each parameter. Offsets of
        pieces count from the start of the range."""

    @abstractmethod
    def counts(self) -> Counts:
        """Returns the counts of the present state."""

    @abstractmethod
    def make_states(self, num_steps: int) -> None:
        """Makes zero moments as in the optimizer's first step, and counts `num_steps`."""

    def go_on(self, counts: Counts) -> None:
        """Adopts the counts of a loaded state. Collective over: the role's ranks."""
