"""What every training backend understands: the models of roles, evaluated and trained on experience."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from rltrain.algorithms.losses import LossFunction
from rltrain.checkpoint.hf_reader import load_parameters
from rltrain.checkpoint.run_files import AnyFile, Contents
from rltrain.config.schema import Config, Trained
from rltrain.data.experience import Experience
from rltrain.models import Architecture
from rltrain.offload.memory_parts import MemoryPart
from rltrain.reshard.layout import Layout
from rltrain.runtime.grid import Grid
from rltrain.runtime.process_groups import ProcessGroups
from rltrain.runtime.world import World

SKIPPED = "skipped_updates"
"""The metric of an optimizer step that is 1 where it changed nothing because its loss or gradient norm was not finite,
else 0."""
LOSS_SCALE, OVERFLOWED = "loss_scale", "overflowed_updates"
"""Metrics of an optimizer step of a model in fp16: its loss scale afterwards, and 1 where the step is among the SKIPPED
because gradients overflowed that a smaller scale may save, else 0."""


@dataclass(frozen=True)
class ModelSite:
    """This rank's place for the model of a role, which lives on the ranks of `grid`.

    The head of `architecture` says what the model tells of a token, and what its loss functions get: a vocabulary's its
    log-prob, and the entropy of the distribution that it was drawn from; a value head's the score of its sample up to
    and with it, as transformers' models for sequence classification have it, of which no temperature changes anything.
    """

    config: Config
    role: str
    world: World
    grid: Grid
    groups: ProcessGroups
    architecture: Architecture
    on_micro_batch: Callable[[Sequence[int], bool], None]
    """To be called with every micro-batch that begins: with the lengths of its samples, and whether gradients are made.
    So others see the model getting on, and what it computes is counted."""

    checkpoint: str | None = None
    """The folder that the model starts from, where that is not the role's."""

    def load_weights(self, layout: Layout, parameters: Mapping[str, Tensor]) -> None:
        """Fill `parameters`, this rank's in `layout`, from the checkpoint that the model starts from."""
        path, key = self.config.checkpoint_of(self.role)
        path = self.checkpoint or path
        load_parameters(Path(path), layout, self.world.rank, parameters, config_key=key)


class RoleModel(Protocol):
    """This rank's share of a model that can be evaluated."""

    layout: Layout
    """Where its parameters lie, on all ranks that have a share."""
    parameters: Mapping[str, Tensor]
    """By name and shape as in `layout.on(rank)`: what they hold is there while part "weights" is on the device."""
    parts: Mapping[str, MemoryPart]
    """What it has on the device, by the names of tasks.roles: "weights", and of a model in training also
    "master_weights", "optimizer" and "gradients". None shares memory with another."""

    def evaluate(self, experience: Experience, *, max_tokens: int, temperature: float = 1.0) -> Tensor:
        """[tokens] fp32 in host memory: each token's log-prob, 0 at a sample's first one, or score. No gradients.

        Every rank of the replica passes the same samples, perhaps none, and gets the same result. Micro-batches have
        at most `max_tokens`, but for longer samples. Collective over: this replica, and where replicas hold experts
        for each other all of them; so it is of all that follow.
        """
        ...

    def evaluate_routing(
        self, experience: Experience, *, max_tokens: int, temperature: float = 1.0
    ) -> tuple[Tensor, Tensor]:
        """What `evaluate` gives, and as `Experience.routed_experts` the experts that tokens visited in the layers of
        this rank. Of a model with experts. Collective over: this replica.
        """
        ...

    def evaluate_squares(
        self, experience: Experience, *, max_tokens: int, temperature: float = 1.0
    ) -> tuple[Tensor, Tensor]:
        """What `evaluate` gives, and [tokens] in the place of each token the sum of the squares of all tokens'
        probabilities. Of a model with a vocabulary's head. Collective over: this replica.
        """
        ...

    def distributions(
        self, experience: Experience, *, count: int, max_tokens: int, temperature: float = 1.0
    ) -> tuple[Tensor, Tensor, Tensor]:
        """In the place of each token: its own log-prob [tokens], the `count` likeliest tokens and their log-probs, both
        [tokens, count]. As `evaluate`. Collective over: this replica.
        """
        ...


def log_probs(
    model: RoleModel, experience: Experience, *, count: int, max_tokens: int, temperature: float
) -> tuple[Tensor, Tensor, Tensor]:
    """What `RoleModel.distributions` gives; with a `count` of 0 what `RoleModel.evaluate` does, and no other tokens."""
    if count:
        return model.distributions(experience, count=count, max_tokens=max_tokens, temperature=temperature)
    logprobs = model.evaluate(experience, max_tokens=max_tokens, temperature=temperature)
    nothing = torch.empty(experience.num_tokens, 0)
    return logprobs, nothing.long(), nothing


class TrainedModel(RoleModel, Protocol):
    """With gradients and an optimizer.

    An optimizer step is any number of calls of `accumulate`, at least one on every rank, and one of `step`. What is
    accumulated are sums: `step` alone reduces them over data parallelism and divides them, once.
    """

    def accumulate(self, experience: Experience, loss_function: LossFunction, *, temperature: float = 1.0) -> None:
        """Add the gradients of `experience`, this replica's share of a part of the mini-batch. It may be empty.

        Every rank of the replica passes the same samples; all parts of a mini-batch have the same fields and loss
        function. Collective over: this replica.
        """
        ...

    def step(self) -> dict[str, float]:
        """The optimizer step on what was accumulated. Collective over: the role's ranks.

        Returns loss, grad_norm (before clipping), lr, SKIPPED, with fp16 LOSS_SCALE and OVERFLOWED, and the metrics of
        the loss function over the whole mini-batch, equal on all ranks. A mini-batch of samples without response tokens
        counts as a step and leaves the weights as they are; so does, with the state of the optimizer, one whose loss or
        gradient norm is not finite, which is skipped. Raises on all ranks, before any weight changes, DivergenceError
        where more in a row would be skipped than `on_divergence` has, and ConfigError when no rank had a sample. What
        was accumulated is used up in any case.
        """
        ...

    def train_batches(
        self, mini_batches: Iterable[Experience], loss_function: LossFunction, *, temperature: float = 1.0
    ) -> list[dict[str, float]]:
        """`accumulate` and `step` for one after the other, of each of which every rank passes its replica's share.

        A backend may communicate between replicas while it computes; all of it is over when this returns.
        Collective over: the role's ranks.
        """
        ...

    def train_batch(
        self, experience: Experience, loss_function: LossFunction, *, temperature: float = 1.0
    ) -> dict[str, float]:
        """`train_batches` with one. Collective over: the role's ranks."""
        ...

    def save_state(self) -> Contents:
        """This rank's share of weights and optimizer, wherever `parts` lie, in memory that the next call writes over.

        It is copied when somebody takes it, at the latest before the next optimizer step or before a part moves.
        Between optimizer steps: RuntimeError where gradients wait for one. Not collective.
        """
        ...

    def take_copying_s(self) -> float:
        """Seconds since the last call that training waited for what `save_state` left to be copied."""
        ...


@runtime_checkable
class PublishingModel(Protocol):
    """What a model has besides whose parameters are not what others get."""

    published: Mapping[str, Tensor]
    """These by the names of `parameters`: each is made when it is asked for, and not kept."""


@runtime_checkable
class ServedModel(Protocol):
    """What a model has besides that engines may get rounded (config.model.fake_quantization)."""

    served: Mapping[str, Tensor]
    """As `published`, of what the model computes with. Others round for themselves, and files have what is trained."""


@runtime_checkable
class AdaptedModel(Protocol):
    """What a trained model with low-rank adapters (config.lora) has besides. Its `parameters` are the base, frozen."""

    published: Mapping[str, Tensor]
    """`parameters` with what the adapters add, for others: each is made when it is asked for, and not kept. While part
    "weights" is on the device."""
    base: RoleModel
    """The model without what the adapters add, in the same memory."""
    adapters_layout: Layout
    adapters: Mapping[str, Tensor]
    """By name and shape as in `adapters_layout.on(rank)`."""


def published_weights(model: RoleModel) -> Mapping[str, Tensor]:
    """What other models in training and checkpoints get of it, by the names of its layout."""
    return model.published if isinstance(model, PublishingModel) else model.parameters


def served_weights(model: RoleModel) -> Mapping[str, Tensor]:
    """What engines get of it, by the names of its layout."""
    return model.served if isinstance(model, ServedModel) else published_weights(model)


class TrainingBackend(Protocol):
    """A module of four functions."""

    def layout(self, site: ModelSite) -> Layout:
        """That of the site's model: any rank of the job can tell, also one that has no share of it."""
        ...

    def adapters_layout(self, site: ModelSite) -> Layout:
        """That of the low-rank adapters of the site's model, as `layout`. Of a role that learns such."""
        ...

    def frozen_model(self, site: ModelSite) -> RoleModel:
        """With the weights of the role's checkpoint. Collective over: the role's ranks."""
        ...

    def trained_model(
        self, site: ModelSite, settings: Trained, *, total_updates: int, state: Sequence[AnyFile] | None = None
    ) -> TrainedModel:
        """With the weights of the role's checkpoint, or as `save_state` of all its ranks left it in the files `state`,
        whatever their layout was. The learning rate decays over `total_updates`.

        CheckpointError where a file is missing or damaged, or of another model. Collective over: the role's ranks.
        """
        ...
