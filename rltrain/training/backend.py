"""The training backends by name, and what every one of them makes: the models of roles."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from rltrain.checkpoint.hf_reader import load_parameters
from rltrain.checkpoint.run_files import AnyFile
from rltrain.config.models import Lora
from rltrain.config.schema import Config, Trained
from rltrain.models import Architecture
from rltrain.reshard.layout import Layout
from rltrain.runtime.grid import Grid
from rltrain.runtime.process_groups import ProcessGroups
from rltrain.runtime.world import World
from rltrain.training.adapters import begin_adapters
from rltrain.training.logprobs import PackedModel
from rltrain.training.trainable import RoleModel, TrainedModel


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


class TrainingBackend(ABC):
    """Makes models of a role. Every rank of the job can tell a layout, also one that has no share of the model."""

    evaluated: type[RoleModel]
    trained: type[TrainedModel]

    @abstractmethod
    def layout(self, site: ModelSite) -> Layout:
        """Returns the layout of the site's model."""

    def adapters_layout(self, site: ModelSite) -> Layout:
        """Returns the layout of the low-rank adapters that the site's role learns."""
        lora = site.config.lora_of(site.role)
        assert lora is not None, "of a role that learns adapters"
        return self.layout_of_adapters(site, lora)

    @abstractmethod
    def layout_of_adapters(self, site: ModelSite, lora: Lora) -> Layout:
        """Returns the layout of the adapters `lora` of the site's model."""

    @abstractmethod
    def build(self, site: ModelSite, lora: Lora | None, *, trains: bool) -> PackedModel:
        """Returns the site's model with adapters `lora`, before weights are loaded and adapters begin.

        `trains` says whether anything of it is trained. Collective over: the role's ranks.
        """

    def frozen_model(self, site: ModelSite) -> RoleModel:
        """With the weights of the role's checkpoint. Collective over: the role's ranks."""
        model = self.build(site, None, trains=False)
        model.on_micro_batch = site.on_micro_batch
        site.load_weights(model.layout, model.weights)
        return self.evaluated(model)

    def trained_model(
        self, site: ModelSite, settings: Trained, *, total_updates: int, state: Sequence[AnyFile] | None = None
    ) -> TrainedModel:
        """With the weights of the role's checkpoint, or as `save_state` of all its ranks left it in the files `state`,
        whatever their layout was. The learning rate decays over `total_updates`.

        CheckpointError where a file is missing or damaged, or of another model. Collective over: the role's ranks.
        """
        lora, rank = site.config.lora_of(site.role), site.world.rank
        model = self.build(site, lora, trains=True)
        model.on_micro_batch = site.on_micro_batch
        if state is None or lora:
            site.load_weights(model.layout, model.weights)
        if state is None and lora:
            begin_adapters(model.learned_layout, rank, model.learned, lora, site.config.seed)
        max_skipped = site.config.on_divergence.max_skipped
        trained = self.trained(model, settings, total_updates=total_updates, max_skipped=max_skipped, role=site.role)
        if state is not None:
            trained.load_state(state)
        return trained


# A process imports the backends that its roles name, once the config has been checked: each takes seconds.


def _megatron() -> TrainingBackend:
    from rltrain.training.megatron.backend import MegatronBackend

    return MegatronBackend()


def _fsdp() -> TrainingBackend:
    from rltrain.training.fsdp_backend import FsdpBackend

    return FsdpBackend()


BACKENDS: dict[str, Callable[[], TrainingBackend]] = {"megatron": _megatron, "fsdp": _fsdp}


def training_backend(config: Config, role: str) -> TrainingBackend:
    """The one that trains or evaluates the model of a role."""
    return BACKENDS[config.backend_of(role)]()
