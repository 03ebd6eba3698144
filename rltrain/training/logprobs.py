"""The base of models for packed samples, and the outputs of their heads per token."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from rltrain.algorithms.kl import asked_tokens
from rltrain.config import schema
from rltrain.data.experience import Experience
from rltrain.models.architecture import Architecture, Head
from rltrain.reshard.layout import Layout
from rltrain.runtime.grid import Grid
from rltrain.runtime.placement import model_group_lists
from rltrain.runtime.process_groups import ProcessGroups
from rltrain.training.adapters import AdapterMode
from rltrain.training.packing import (
    ContextShare,
    MicroBatch,
    Packing,
    make_micro_batches,
    of_all_tokens,
    of_drawn_tokens,
)
from rltrain.training.vocabulary import (
    LabelledRows,
    Logits,
    vocab_parallel_logprobs,
    vocab_parallel_squares,
    vocab_parallel_top,
)

# The outputs of a model per token, by its head. They are the arguments of its loss function.


def groups_of_rank(grid: Grid, groups: ProcessGroups) -> dict[str, dist.ProcessGroup | None]:
    """Returns this rank's process groups in `grid`, by the names of model_group_lists. None: the rank is in no such
    group.

    It only looks them up in `groups` and creates none.
    """
    rank, found = dist.get_rank(), dict[str, dist.ProcessGroup | None]()
    for name, rank_lists in model_group_lists(grid).items():
        mine = next((ranks for ranks in rank_lists if rank in ranks), None)
        found[name] = None if mine is None else groups[mine]
    return found


OnMicroBatch = Callable[[Sequence[int], Sequence[int], bool], None]
"""Takes the lengths of a micro-batch's sequences, the lengths of beginnings of them that are not computed again, and
whether gradients are computed."""


class PackedModel(ABC):
    """This rank's part of a model for packed samples. Each backend supplies the modules."""

    def __init__(
        self,
        architecture: Architecture,
        grid: Grid,
        groups: Any,
        layout: Layout,
        device: torch.device,
        settings: schema.Model,
    ) -> None:
        """Takes `groups` with `tp` for the columns of the logits, `cp` for shared sequences, and `dp`."""
        self.architecture, self.grid, self.pg_collection = architecture, grid, groups
        self.share = ContextShare(groups.cp.rank(), groups.cp.size())
        self.layout, self.device = layout, device
        self.trained_layout = layout
        """The layout of the weights without those of a frozen vision tower."""
        self.dtype: torch.dtype = getattr(torch, settings.dtype)
        """The dtype of the computation."""
        self.fake_quantization = settings.fake_quantization
        self.adapters: AdapterMode | None = None
        self.share_prefixes: Literal["auto"] | bool = False
        """Whether prefixes that samples share are computed once."""
        self.on_micro_batch: OnMicroBatch = lambda lengths, before, backward: None
        """Called at the start of every micro-batch."""

    @property
    @abstractmethod
    def weights(self) -> Mapping[str, Tensor]:
        """This rank's parameters by name, as in layout.on(rank), without adapters."""

    @property
    @abstractmethod
    def packing(self) -> Packing:
        """The packing requirements of the model."""

    @abstractmethod
    def logits_of(self, outputs: Tensor) -> Logits:
        """Returns the model's outputs for some rows, [rows, ...], as logits."""

    def distribution(self, temperature: float) -> dict[str, Any]:
        """Returns the keyword arguments of the vocab_parallel functions."""
        vocab_size, group = self.architecture.vocab_size, self.pg_collection.tp
        return {"vocab_size": vocab_size, "temperature": temperature, "group": group}

    def micro_batches(self, experience: Experience, max_tokens: int, *, looks_ahead: bool = False) -> list[MicroBatch]:
        """Splits `experience` into micro-batches of at most `max_tokens` on each rank of context parallelism.

        `looks_ahead` is that of Packing. Collective over: the ranks of `packing.together`.
        """
        return make_micro_batches(experience, max_tokens, replace(self.packing, looks_ahead=looks_ahead))

    @property
    def learned_layout(self) -> Layout:
        """The layout of the trained parameters: the adapters if there are any, else the weights."""
        return self.adapters.layout if self.adapters else self.trained_layout

    @property
    def learned(self) -> Mapping[str, Tensor]:
        """This rank's trained parameters, as in learned_layout.on(rank)."""
        if self.adapters:
            return self.adapters.parameters
        weights = self.weights
        if self.trained_layout is self.layout:
            return weights
        return {name: weights[name] for name, _ in self.trained_layout.on(dist.get_rank()).parameters}


@dataclass(frozen=True)
class Objective:
    """The outputs of a model head per token.

    `token_outputs` takes (model, micro-batch, output of the last stage for its rows, temperature) and returns the
    differentiable arguments of the loss function, [tokens, ...]. An evaluation returns the first of them. It may be
    collective over the tensor- and context-parallel groups. `of_nothing` returns them for experience without samples.
    """

    token_outputs: Callable[[PackedModel, MicroBatch, Tensor, float], tuple[Tensor, ...]]
    of_nothing: Callable[[Experience], tuple[Tensor, ...]]


def token_logprobs(model: PackedModel, batch: MicroBatch, outputs: Tensor, temperature: float) -> tuple[Tensor, ...]:
    """Returns the log-prob of every token given its prefix, and the entropy of its distribution, fp32 [tokens] each.

    Both are 0 at a sample's first token. If the experience has candidate tokens, their log-probs follow, [tokens, n].
    Collective over: the tensor- and context-parallel groups.
    """
    labels, asked = batch.experience.tokens, asked_tokens(batch.experience)
    if asked is not None:
        labels = torch.cat([labels[:, None], asked], dim=1)
    logits, distribution = model.logits_of(outputs), model.distribution(temperature)
    if batch.slices is None or batch.tree is None:
        following = batch.rows_of(labels.roll(-1, dims=0))
        logprobs, entropy = vocab_parallel_logprobs(logits, following, **distribution)
        logprobs, entropy = at_drawn(model, batch, logprobs, entropy)
    else:
        drawn = batch.slices.drawn[0]
        labelled = LabelledRows(drawn.rows, drawn.starts)
        logprobs, entropy = vocab_parallel_logprobs(logits, labels[drawn.tokens], labelled=labelled, **distribution)
        logprobs = of_drawn_tokens(batch, drawn, logprobs, model.pg_collection.cp)
        (entropy,) = at_drawn(model, batch, entropy)
    return (logprobs, entropy) if asked is None else (logprobs[:, 0], entropy, logprobs[:, 1:])


def likeliest_tokens(
    model: PackedModel, batch: MicroBatch, outputs: Tensor, temperature: float, count: int
) -> tuple[Tensor, Tensor]:
    """Returns the `count` likeliest tokens at each token's position, and their log-probs, [tokens, count] each.

    Both are 0 at a sample's first token. Collective over: the tensor- and context-parallel groups.
    """
    ids, logprobs = vocab_parallel_top(model.logits_of(outputs), count, **model.distribution(temperature))
    ids, logprobs = at_drawn(model, batch, ids, logprobs)
    return ids, logprobs


def squared_probabilities(model: PackedModel, batch: MicroBatch, outputs: Tensor, temperature: float) -> Tensor:
    """Returns the sum of squared probabilities over the vocabulary at each token's position, [tokens].

    It is 0 at a sample's first token. Collective over: the tensor- and context-parallel groups.
    """
    squares = vocab_parallel_squares(model.logits_of(outputs), **model.distribution(temperature))
    return at_drawn(model, batch, squares)[0]


def at_drawn(model: PackedModel, batch: MicroBatch, *of_rows: Tensor) -> list[Tensor]:
    """Moves model outputs from each token to the following token of the same sample, [tokens, ...] each.

    The output at a token depends on the sample's tokens up to it. The result is 0 at a sample's first token. Gradients
    flow. Collective over: the context-parallel group.
    """
    drawn = torch.ones(batch.num_tokens, dtype=torch.bool, device=of_rows[0].device)
    drawn[batch.experience.offsets()[:-1]] = False
    moved = [of_all_tokens(batch, one, model.pg_collection.cp).roll(1, dims=0) for one in of_rows]
    return [one * drawn.view(-1, *[1] * (one.dim() - 1)) for one in moved]


def _scores(model: PackedModel, batch: MicroBatch, outputs: Tensor, temperature: float) -> tuple[Tensor]:
    return (of_all_tokens(batch, outputs, model.pg_collection.cp),)


def _no_logprobs(experience: Experience) -> tuple[Tensor, ...]:
    asked = asked_tokens(experience)
    return torch.zeros(0), torch.zeros(0), *([] if asked is None else [torch.zeros(asked.shape)])


def _no_scores(experience: Experience) -> tuple[Tensor]:
    return (torch.zeros(0),)


POLICY = Objective(token_logprobs, _no_logprobs)
"""Loss functions get the log-prob of every token and the entropy of its distribution. Log-probs of candidate tokens
follow if the experience has some."""

SCORE = Objective(_scores, _no_scores)
"""Loss functions get the score of the sample at every token, for its prefix up to there. Temperature is ignored."""

OBJECTIVES: dict[Head, Objective] = {"vocabulary": POLICY, "value": SCORE}
