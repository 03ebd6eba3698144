"""FSDP2 as a training.backend.TrainingBackend."""

from collections.abc import Sequence
from pathlib import Path

from rltrain.checkpoint.run_files import AnyFile
from rltrain.config.models import Lora
from rltrain.config.schema import Trained
from rltrain.reshard.fsdp_layout import fsdp_layout
from rltrain.reshard.layout import Layout
from rltrain.tasks.roles import trained_roles
from rltrain.training.adapters import begin_adapters
from rltrain.training.backend import ModelSite
from rltrain.training.fsdp.evaluable import EvaluableModel
from rltrain.training.fsdp.model import ShardedModel, layout_of_model
from rltrain.training.fsdp.trainable import AdaptedModel, TrainableModel


def layout(site: ModelSite) -> Layout:
    trains = site.role in trained_roles() and site.config.lora_of(site.role) is None
    return layout_of_model(site.architecture, site.grid, dtype=site.config.model.dtype, trains=trains)


def adapters_layout(site: ModelSite) -> Layout:
    lora = site.config.lora_of(site.role)
    assert lora is not None, "of a role that learns adapters"
    return fsdp_layout(site.architecture.adapted(lora.rank, lora.targets), site.grid)


def frozen_model(site: ModelSite) -> EvaluableModel:
    return EvaluableModel(_sharded_model(site, trains=False, with_weights=True))


def trained_model(
    site: ModelSite, settings: Trained, *, total_updates: int, state: Sequence[AnyFile] | None = None
) -> TrainableModel:
    lora = site.config.lora_of(site.role)
    model = _sharded_model(site, trains=lora is None, with_weights=state is None or lora is not None, lora=lora)
    if lora and state is None:
        begin_adapters(model.learned_layout, site.world.rank, model.learned, lora, site.config.seed)
    trained = (AdaptedModel if lora else TrainableModel)(
        model,
        settings,
        total_updates=total_updates,
        max_skipped=site.config.on_divergence.max_skipped,
        role=site.role,
    )
    if state is not None:
        trained.load_state(state)
    return trained


def _sharded_model(site: ModelSite, *, trains: bool, with_weights: bool, lora: Lora | None = None) -> ShardedModel:
    model = ShardedModel(
        site.architecture,
        site.grid,
        site.groups,
        folder=Path(site.checkpoint or site.config.checkpoint_of(site.role)[0]),
        model=site.config.model_of(site.role),
        fsdp=site.config.fsdp_of(site.role),
        device=site.world.device,
        trains=trains,
        on_host=trains and site.config.keeps_shards_on_host(site.role),
        lora=lora,
        seed=site.config.seed,
    )
    model.on_micro_batch = site.on_micro_batch
    if with_weights:
        site.load_weights(model.layout, model.parameters)
    return model
