"""Megatron as a training.backend.TrainingBackend."""

from collections.abc import Callable, Sequence
from functools import partial

from rltrain.checkpoint.run_files import AnyFile
from rltrain.config.schema import Trained
from rltrain.reshard.layout import Layout
from rltrain.training.adapters import begin_adapters
from rltrain.training.backend import ModelSite
from rltrain.training.megatron.evaluable import EvaluableModel
from rltrain.training.megatron.model import (
    LanguageModel,
    adapters_layout_of_model,
    add_adapters,
    build_model,
    layout_of_model,
    local_parameters,
)
from rltrain.training.megatron.trainable import AdaptedModel, TrainableModel


def layout(site: ModelSite) -> Layout:
    return layout_of_model(site.architecture, site.grid, model=site.config.model, device=site.world.device)


def adapters_layout(site: ModelSite) -> Layout:
    lora = site.config.lora_of(site.role)
    assert lora is not None, "of a role that learns adapters"
    return adapters_layout_of_model(
        site.architecture, site.grid, lora, model=site.config.model, device=site.world.device
    )


def frozen_model(site: ModelSite) -> EvaluableModel:
    return EvaluableModel(_language_model(site, with_weights=True).eval())


def trained_model(
    site: ModelSite, settings: Trained, *, total_updates: int, state: Sequence[AnyFile] | None = None
) -> TrainableModel:
    lora = site.config.lora_of(site.role)
    model = _language_model(site, with_weights=state is None or lora is not None)
    make: Callable[..., TrainableModel] = partial(TrainableModel, model)
    if lora:
        adapters = add_adapters(model, lora, site.config.seed)
        if state is None:
            begin_adapters(adapters.layout, site.world.rank, adapters.parameters, lora, site.config.seed)
        make = partial(AdaptedModel, model, adapters)
    trained = make(
        settings, total_updates=total_updates, max_skipped=site.config.on_divergence.max_skipped, role=site.role
    )
    if state is not None:
        trained.load_state(state)
    return trained


def _language_model(site: ModelSite, *, with_weights: bool) -> LanguageModel:
    model = build_model(
        site.architecture,
        site.grid,
        site.groups,
        model=site.config.model_of(site.role),
        parallel=site.config.parallel_of(site.role)[0],
        device=site.world.device,
    )
    model.on_micro_batch = site.on_micro_batch
    if with_weights:
        site.load_weights(model.layout, local_parameters(model))
    return model
