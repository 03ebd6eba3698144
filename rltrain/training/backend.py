"""The training backends by name, and their common interface: building the models of roles."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from rltrain.checkpoint.hf_reader import load_parameters
from rltrain.checkpoint.run_files import AnyFile
from rltrain.config.models import Lora
from rltrain.config.schema import Config, Trained
from rltrain.data.images import ImageRules
from rltrain.models import Architecture
from rltrain.reshard.layout import Layout
from rltrain.runtime.grid import Grid
from rltrain.runtime.image_files import ImageStore
from rltrain.runtime.process_groups import ProcessGroups
from rltrain.runtime.world import World
from rltrain.training.adapters import begin_adapters
from rltrain.training.logprobs import OnMicroBatch, PackedModel
from rltrain.training.tower_pass import OnImages, Sight
from rltrain.training.trainable import RoleModel, TrainedModel


@dataclass(frozen=True)
class ModelSite:
    """A rank's inputs for building the model of a role on the ranks of `grid`.

    The head of `architecture` decides the model's outputs per token, and so the arguments of its loss functions. A
    vocabulary head returns the token's log-prob and the entropy of its distribution. A value head returns the score of
    the sample's prefix, as in transformers' models for sequence classification. Temperature does not affect scores.
    """

    config: Config
    role: str
    world: World
    grid: Grid
    groups: ProcessGroups
    architecture: Architecture
    on_micro_batch: OnMicroBatch
    """Called at the start of every micro-batch. It shows the model's progress and counts its work."""

    checkpoint: str | None = None
    """Folder with the initial weights, if it is not the role's checkpoint."""
    images: ImageStore | None = None
    """The decoded images of samples, with model.vision."""
    on_images: OnImages | None = None
    """Called at the start of every pass of a vision tower. It counts the tower's work."""

    def load_weights(self, layout: Layout, parameters: Mapping[str, Tensor]) -> None:
        """Fills `parameters`, this rank's in `layout`, from the initial checkpoint."""
        path, key = self.config.checkpoint_of(self.role)
        path = self.checkpoint or path
        load_parameters(Path(path), layout, self.world.rank, parameters, config_key=key)

    def sight(self) -> Sight | None:
        """Returns the inputs of the model's vision tower, if it has one. Raises CheckpointError without usable settings
        of images."""
        settings = self.config.model.vision
        if self.architecture.vision is None or settings is None:
            return None
        path, key = self.config.checkpoint_of(self.role)
        folder = Path(self.checkpoint or path)
        rules = ImageRules.read(folder, self.config.data.images, key)
        return Sight(
            folder, rules.mean, rules.std, settings, self.images, self.on_images, is_constant=self._is_constant(path)
        )

    def _is_constant(self, path: str) -> bool:
        """Returns whether the tower of a trained model, from the checkpoint in `path`, has the same weights in all
        passes. A reference in the actor's modules may have others."""
        if self.role not in ("actor", "critic") or not self.config.freezes_tower_of(self.role):
            return False
        return self.role == "critic" or self.config.checkpoint_of("reference")[0] == path


class TrainingBackend(ABC):
    """Builds models of a role. Every rank of the job can compute a layout, even without a part of the model."""

    evaluated: type[RoleModel]
    trained: type[TrainedModel]

    @abstractmethod
    def layout(self, site: ModelSite) -> Layout:
        """Returns the layout of the site's model."""

    def adapters_layout(self, site: ModelSite) -> Layout:
        """Returns the layout of the low-rank adapters trained by the site's role."""
        lora = site.config.lora_of(site.role)
        assert lora is not None, "the role must train adapters"
        return self.layout_of_adapters(site, lora)

    @abstractmethod
    def layout_of_adapters(self, site: ModelSite, lora: Lora) -> Layout:
        """Returns the layout of the adapters `lora` of the site's model."""

    @abstractmethod
    def build(self, site: ModelSite, lora: Lora | None, *, trains: bool) -> PackedModel:
        """Returns the site's model with adapters `lora`, without loaded weights or initialized adapters.

        `trains` is whether any part of it is trained. Collective over: the role's ranks.
        """

    def _built(self, site: ModelSite, lora: Lora | None, *, trains: bool) -> PackedModel:
        model = self.build(site, lora, trains=trains)
        model.on_micro_batch = site.on_micro_batch
        model.share_prefixes = site.config.share_prefixes_of(site.role)
        return model

    def frozen_model(self, site: ModelSite) -> RoleModel:
        """Returns a model for evaluation with the weights of the role's checkpoint.

        Collective over: the role's ranks.
        """
        model = self._built(site, None, trains=False)
        site.load_weights(model.layout, model.weights)
        return self.evaluated(model)

    def trained_model(
        self, site: ModelSite, settings: Trained, *, total_updates: int, state: Sequence[AnyFile] | None = None
    ) -> TrainedModel:
        """Returns a model for training with the weights of the role's checkpoint, or with a saved training state.

        `state` are the files written by `save_state` of all its ranks, in any layout. The learning rate decays over
        `total_updates`. Raises CheckpointError if a file is missing or damaged, or of another model. Collective over:
        the role's ranks.
        """
        lora, rank = site.config.lora_of(site.role), site.world.rank
        model = self._built(site, lora, trains=True)
        if state is None or model.learned_layout is not model.layout:
            site.load_weights(model.layout, model.weights)
        if state is None and lora:
            begin_adapters(model.learned_layout, rank, model.learned, lora, site.config.seed)
        limits = site.config.on_divergence
        trained = self.trained(
            *(model, settings),
            total_updates=total_updates,
            max_skipped=limits.max_skipped,
            max_ratio=limits.max_ratio if site.role == "actor" else None,
            role=site.role,
        )
        if state is not None:
            trained.load_state(state)
        return trained


# A process imports only the backends of its roles, after the config was checked. Each import takes seconds.


def _megatron() -> TrainingBackend:
    from rltrain.training.megatron.backend import MegatronBackend

    return MegatronBackend()


def _fsdp() -> TrainingBackend:
    from rltrain.training.fsdp_backend import FsdpBackend

    return FsdpBackend()


BACKENDS: dict[str, Callable[[], TrainingBackend]] = {"megatron": _megatron, "fsdp": _fsdp}


def training_backend(config: Config, role: str) -> TrainingBackend:
    """Returns the backend of a role's model."""
    return BACKENDS[config.backend_of(role)]()
