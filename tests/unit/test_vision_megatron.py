"""Megatron's vision-language models on one rank have transformers' log-probs and gradients."""

import rltrain.training.megatron  # noqa: F401  # isort: skip  # first: it loads Megatron without torch's compiler

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLRotaryEmbedding
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextRotaryEmbedding

from rltrain.algorithms.losses import LossOutput
from rltrain.cli.parity import world_of_one
from rltrain.config import schema
from rltrain.config.models import Lora
from rltrain.errors import ConfigError
from rltrain.models import read_architecture
from rltrain.models.attention import axis_of_frequency, inverse_frequencies
from rltrain.models.vision import Tower as Kind
from rltrain.runtime.grid import Grid
from rltrain.runtime.image_files import ImageStore
from rltrain.runtime.process_groups import ProcessGroups
from rltrain.runtime.world import World
from rltrain.training.adapters import begin_adapters
from rltrain.training.backend import ModelSite
from rltrain.training.megatron.attention import PositionRotaryEmbedding
from rltrain.training.megatron.backend import MegatronBackend
from rltrain.training.megatron.model import add_adapters
from rltrain.training.megatron.tower import add_deepstack
from rltrain.training.packing import pack
from rltrain.training.tower_pass import KeptFeatures, Sight, Tower, TowerPass, pieces_of
from rltrain.training.trainable import TrainedModel
from tests.support.marks import slow_but
from tests.support.packed_experience import plain_experience
from tests.support.trained_models import (
    CPU,
    gradient_differences,
    groups_on,
    in_training,
    megatron_model,
    summed_gradients,
    write_state,
)
from tests.support.vision_checkpoints import (
    load_model,
    model_inputs,
    tiny_config,
    tiny_vision,
    write_checkpoint,
)
from tests.support.vision_samples import (
    KEYS,
    MEAN,
    SAMPLES,
    STD,
    Reference,
    experience_of,
    for_transformers,
    open_store,
    seeing_model,
    summed_logprobs,
)

GRID = Grid((0,))
ALONE, TOGETHER = 1, 10_000
"""Tokens of a micro-batch: one sample each, or all of them."""
TOLERANCE = 1e-4
TEXTS = [number for number, sample in enumerate(SAMPLES) if not any(isinstance(part, str) for part in sample)]
NUM_PATCHES = {"square": 64, "wide": 96, "tall": 48, "small": 16}


@pytest.fixture(scope="module", autouse=True)
def groups() -> Iterator[ProcessGroups]:
    with world_of_one(CPU):
        yield groups_on([GRID])


@pytest.fixture(scope="module")
def qwen3_vl(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return Reference.of("qwen3_vl", tmp_path_factory.mktemp("qwen3_vl"))


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ImageStore]:
    opened = open_store(tmp_path)
    yield opened
    opened.close()


@pytest.fixture
def train(groups: ProcessGroups, store: ImageStore) -> Any:
    def made(
        folder: Path, max_tokens: int = TOGETHER, vision: schema.VisionSettings | None = None, **settings: Any
    ) -> TrainedModel:
        model = seeing_model(folder, GRID, groups, store, vision=vision, **settings)
        return in_training(model, updates=1, max_tokens=max_tokens, optimizer={"lr": 1e-2, "weight_decay": 0})

    return made


def assert_like_transformers(reference: Reference, trained: TrainedModel, max_tokens: int) -> None:
    samples = experience_of(SAMPLES)
    logprobs = trained.evaluate(samples, max_tokens=max_tokens)
    assert logprobs == pytest.approx(torch.cat(reference.logprobs), abs=TOLERANCE)
    found = gradient_differences(trained, reference.gradients, samples, summed_logprobs, 1)
    assert found.keys() == dict(trained.layout.on(0).parameters).keys()
    assert max(found.values()) < TOLERANCE, max(found, key=lambda name: found[name])


@pytest.mark.parametrize("kind", slow_but(get_args(Kind), "qwen2_5_vl", "qwen3_vl"))
def test_log_probs_and_gradients_are_those_of_transformers(kind: Kind, tmp_path: Path, train: Any) -> None:
    reference = Reference.of(kind, tmp_path)
    for max_tokens in (ALONE, TOGETHER):
        assert_like_transformers(reference, train(reference.folder, max_tokens), max_tokens)


@pytest.mark.parametrize(
    "settings",
    [
        {"vision": schema.VisionSettings(recompute=False)},
        {"vision": schema.VisionSettings(max_patches=100)},
        {"recompute": "none"},
        {"recompute": "selective"},
        {"activation_offload": True},
    ],
    ids=["graph kept", "in pieces", "layers kept", "attention recomputed", "activations on the host"],
)
def test_gradients_are_the_same_however_memory_is_saved(
    qwen3_vl: Reference, train: Any, settings: dict[str, Any]
) -> None:
    assert_like_transformers(qwen3_vl, train(qwen3_vl.folder, ALONE, **settings), ALONE)


def test_samples_without_images_need_no_fields_of_images(qwen3_vl: Reference, train: Any) -> None:
    trained = train(qwen3_vl.folder)
    samples = experience_of([SAMPLES[number] for number in TEXTS])
    without = plain_experience(samples.lengths.tolist(), samples.tokens)
    expected = torch.cat([qwen3_vl.logprobs[number] for number in TEXTS])
    for texts in (samples, without):
        assert trained.evaluate(texts, max_tokens=TOGETHER) == pytest.approx(expected, abs=TOLERANCE)
    before = copied(trained)
    trained.train_batches([samples, without], summed_logprobs)
    assert {name for name in changed(before, trained) if name.startswith("vision.")} == set()
    assert len(changed(before, trained)) > 10


@pytest.mark.parametrize("trains", [True, False])
def test_an_optimizer_step_changes_the_tower_only_if_it_is_trained(
    qwen3_vl: Reference, train: Any, trains: bool
) -> None:
    trained = train(qwen3_vl.folder, vision=schema.VisionSettings(train=trains))
    before = copied(trained)
    trained.train_batch(experience_of(SAMPLES), summed_logprobs)
    towers = {name for name in before if name.startswith("vision.")}
    assert changed(before, trained) == before.keys() - (set() if trains else towers)
    saved = {name.partition("/")[2] or name for name in trained.save_state().tensors}
    assert any("patch_embed" in name for name in saved) == trains
    assert towers <= dict(trained.served).keys(), "engines get a frozen tower too"


def test_a_critic_scores_samples_with_images(qwen3_vl: Reference, groups: ProcessGroups, store: ImageStore) -> None:
    architecture = read_architecture(qwen3_vl.folder, sees=True).value_model()
    sight = Sight(qwen3_vl.folder, MEAN, STD, schema.VisionSettings(), store)
    model = megatron_model(qwen3_vl.folder, GRID, groups, architecture=architecture, sight=sight)
    weight = torch.randn(1, architecture.hidden_size, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        model.weights["output_layer.weight"].copy_(weight)
    decoder, expected = load_model(qwen3_vl.folder).model, []
    for ids, images in for_transformers(SAMPLES):
        with torch.no_grad():
            states = decoder(**model_inputs(qwen3_vl.folder, ids, images)).last_hidden_state[0]
        expected.append(states @ weight[0])
    trained = in_training(model, updates=1, max_tokens=TOGETHER, optimizer={"lr": 1e-2}, role="critic")
    scores = trained.evaluate(experience_of(SAMPLES), max_tokens=TOGETHER)
    assert scores == pytest.approx(torch.cat(expected), abs=TOLERANCE)
    before = copied(trained)
    trained.train_batch(experience_of(SAMPLES), lambda samples, values: LossOutput(values.sum(), values.new_ones(())))
    assert changed(before, trained) == before.keys()


def test_a_run_with_a_frozen_tower_resumes_with_the_tower_of_the_checkpoint(
    qwen3_vl: Reference, groups: ProcessGroups, store: ImageStore, tmp_path: Path
) -> None:
    site = site_of(qwen3_vl.folder, groups, store, train=False)
    first = built(site)
    first.train_batch(experience_of(SAMPLES), summed_logprobs)
    write_state(first, tmp_path / "state.safetensors")
    resumed = built(site, [tmp_path / "state.safetensors"])
    assert changed(copied(first), resumed) == set()
    assert resumed.num_updates == 1
    frozen = MegatronBackend().frozen_model(site)
    logprobs = frozen.evaluate(experience_of(SAMPLES), max_tokens=TOGETHER)
    assert logprobs == pytest.approx(torch.cat(qwen3_vl.logprobs), abs=TOLERANCE)


def site_of(folder: Path, groups: ProcessGroups, store: ImageStore, *, train: bool) -> ModelSite:
    """Returns the site of an actor on one rank. The image processor of the checkpoint normalises the colours."""
    config = schema.Config.model_validate(
        {
            "steps": 1,
            "placement": {"actor": "all"},
            "model": {"path": str(folder), "dtype": "float32", "vision": {"train": train}},
            "data": {"train": {"path": "none"}},
        }
    )
    world = World(0, 1, 0, 1, CPU, dist.HashStore(), 60.0)
    architecture = read_architecture(folder, sees=True)
    return ModelSite(config, "actor", world, GRID, groups, architecture, lambda *_: None, images=store)


def built(site: ModelSite, state: list[Path] | None = None) -> TrainedModel:
    return MegatronBackend().trained_model(site, site.config.actor, total_updates=2, state=state)


def copied(trained: TrainedModel) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in trained.published.items()}


def changed(before: dict[str, Tensor], trained: TrainedModel) -> set[str]:
    return {name for name, tensor in trained.published.items() if not torch.equal(before[name], tensor)}


def test_adapters_of_a_tower_drop_the_same_inputs_when_it_encodes_again(
    qwen3_vl: Reference, groups: ProcessGroups, store: ImageStore
) -> None:
    def gradients(*, recompute: bool) -> dict[str, Tensor]:
        vision, lora = schema.VisionSettings(recompute=recompute, max_patches=64), Lora(dropout=0.5, vision=True)
        model = seeing_model(qwen3_vl.folder, GRID, groups, store, vision=vision)
        adapters = add_adapters(model, lora)
        begin_adapters(adapters.layout, 0, adapters.parameters, lora, seed=1)
        trained = in_training(model, updates=1, max_tokens=TOGETHER, optimizer={})
        return {n: g.clone() for n, g in summed_gradients(trained, experience_of(SAMPLES), summed_logprobs).items()}

    again, kept = gradients(recompute=True), gradients(recompute=False)
    of_tower = [name for name in again if name.startswith("vision.")]
    assert max(float(again[name].abs().max()) for name in of_tower) > 0
    assert all(torch.allclose(again[name], kept[name], atol=1e-5) for name in again)


@pytest.mark.parametrize(
    "settings", [{"residual_dtype": "float32"}, {}], ids=["wide residual stream", "half precision"]
)
def test_half_precision_is_close(qwen3_vl: Reference, train: Any, settings: dict[str, Any]) -> None:
    trained = train(qwen3_vl.folder, dtype="bfloat16", **settings)
    logprobs = trained.evaluate(experience_of(SAMPLES), max_tokens=TOGETHER)
    assert float((logprobs - torch.cat(qwen3_vl.logprobs)).abs().mean()) < 0.05
    before = copied(trained)
    trained.train_batch(experience_of(SAMPLES), summed_logprobs)
    assert {name for name in before if name.startswith("vision.")} <= changed(before, trained)


@pytest.mark.parametrize("optimizer", [{"name": "muon"}, {"cpu_offload": True}, {"moments_dtype": "bfloat16"}])
def test_every_optimizer_trains_a_tower(
    qwen3_vl: Reference, groups: ProcessGroups, store: ImageStore, optimizer: dict[str, Any]
) -> None:
    model = seeing_model(qwen3_vl.folder, GRID, groups, store)
    trained = in_training(model, updates=1, max_tokens=TOGETHER, optimizer={"lr": 1e-2, **optimizer})
    before = copied(trained)
    trained.train_batch(experience_of(SAMPLES), summed_logprobs)
    assert changed(before, trained) == before.keys()


def test_images_are_encoded_once_in_pieces(store: ImageStore) -> None:
    encoded: list[list[int]] = []

    def encode(patches: Tensor, grids: Tensor) -> tuple[Tensor, list[Tensor]]:
        encoded.append(grids.prod(1).tolist())
        return patches[::4, :8].clone(), []

    shown: list[tuple[int, int, int]] = []
    tower = Tower(
        *(tiny_vision("qwen3_vl"), encode, torch.zeros(3), torch.ones(3)),
        max_patches=112,
        recompute=True,
        on_images=lambda grids, backward: shown.extend(grids),
    )
    batches = pack(experience_of(SAMPLES), ALONE, device=CPU)
    TowerPass(tower, batches, store, trains=False)
    assert encoded == [[NUM_PATCHES["square"]], [NUM_PATCHES["wide"], NUM_PATCHES["small"]], [NUM_PATCHES["tall"]]]
    assert shown == [(1, 8, 8), (1, 8, 12), (1, 4, 4), (1, 12, 4)], "the work is counted once an image"
    small = Tower(tower.vision, encode, tower.mean, tower.std, max_patches=1, recompute=True)
    assert pieces_of(small, batches, store) == [[KEYS[name]] for name in ("square", "wide", "small", "tall")]
    encoded.clear()
    TowerPass(tower, batches[1:2], store, trains=False, num_pieces=2)
    assert encoded == [[4], [4]], "a blank image keeps ranks in step"


def test_images_of_a_frozen_tower_are_not_encoded_again(
    qwen3_vl: Reference, groups: ProcessGroups, store: ImageStore
) -> None:
    """Log-probs and updates of a step, and the passes of the next, need each image once."""
    images: list[int] = []
    vision = schema.VisionSettings(train=False)
    log_probs: list[Tensor] = []
    for keeps in (False, True):
        sight = Sight(
            qwen3_vl.folder, MEAN, STD, vision, store, lambda grids, backward: images.append(len(grids)), keeps
        )
        model = megatron_model(
            qwen3_vl.folder, GRID, groups, architecture=read_architecture(qwen3_vl.folder, sees=True), sight=sight
        )
        trained = in_training(model, updates=1, max_tokens=ALONE, optimizer={"lr": 1e-2})
        images.clear()
        log_probs.append(trained.evaluate(experience_of(SAMPLES), max_tokens=TOGETHER))
        trained.train_batch(experience_of(SAMPLES), summed_logprobs)
        log_probs.append(trained.evaluate(experience_of(SAMPLES), max_tokens=TOGETHER))
        num_images = len(NUM_PATCHES)
        assert images == ([num_images, 0, 0] if keeps else [num_images] * 3)
    for without, kept in zip(log_probs[:2], log_probs[2:], strict=True):
        assert kept == pytest.approx(without, abs=TOLERANCE)


def test_features_are_kept_of_a_tower_that_has_the_same_weights_in_all_passes(
    qwen3_vl: Reference, groups: ProcessGroups, store: ImageStore
) -> None:
    def keeps(train: bool, role: str = "actor", reference: str | None = None, **lora: Any) -> bool:
        site = site_of(qwen3_vl.folder, groups, store, train=train)
        given = site.config.model_dump(exclude_unset=True)
        given["model"] |= {"lora": {"rank": 2, "alpha": 4, **lora}} if lora else {}
        given |= {"reference": {"path": reference}} if reference else {}
        sight = replace(site, config=schema.Config.model_validate(given), role=role).sight()
        assert sight is not None
        return sight.is_constant

    assert keeps(train=False) and not keeps(train=True)
    assert keeps(train=True, vision=False) and not keeps(train=False, vision=True), "adapters decide"
    assert not keeps(train=False, reference="other"), "its weights may replace the actor's"
    assert not keeps(train=False, role="reference"), "it needs an image once a step"


def test_the_features_used_last_are_kept() -> None:
    kept = KeptFeatures(max_bytes=2 * 16)
    for key in (1, 2):
        kept.keep(key, [torch.full((2,), float(key)), torch.zeros(2)])
    assert kept.of(1, CPU)[0].tolist() == [1, 1]
    kept.keep(3, [torch.zeros(2), torch.zeros(2)])
    assert [key in kept for key in (1, 2, 3)] == [True, False, True]
    kept.keep(4, [torch.zeros(9)])
    assert 4 not in kept and 3 in kept, "it is too large"


def test_touching_copies_of_an_image_have_its_features_each(store: ImageStore) -> None:
    def encode(patches: Tensor, grids: Tensor) -> tuple[Tensor, list[Tensor]]:
        return torch.arange(len(patches) // 4).float()[:, None], []

    tower = Tower(tiny_vision("qwen3_vl"), encode, torch.zeros(3), torch.ones(3), max_patches=100, recompute=True)
    (batch,) = pack(experience_of([(2, "small", "small", "small", 1)]), TOGETHER, device=CPU)
    shown = TowerPass(tower, [batch], store, trains=False).shown(0, lambda tokens: tokens)
    assert shown is not None
    assert shown.rows.tolist() == [*range(2, 14)]
    assert shown.features[:, 0].tolist() == [0, 1, 2, 3] * 3
    cut = batch.experience.with_fields(image_keys=batch.experience.image_keys.index_fill(0, torch.tensor([13]), 0))
    (batch,) = pack(cut, TOGETHER, device=CPU)
    with pytest.raises(RuntimeError, match=f"11 tokens in a row belong to image {KEYS['small']} of 4 tokens"):
        TowerPass(tower, [batch], store, trains=False)


@pytest.mark.parametrize(
    ("kind", "rotary"), [("qwen2_5_vl", Qwen2_5_VLRotaryEmbedding), ("qwen3_vl", Qwen3VLTextRotaryEmbedding)]
)
def test_frequencies_rotate_by_the_positions_of_transformers(kind: Kind, rotary: Any, tmp_path: Path) -> None:
    config = tiny_config(kind)
    write_checkpoint(tmp_path, kind)
    architecture = read_architecture(tmp_path, sees=True)
    positions = torch.from_numpy(np.random.default_rng(0).integers(500, size=(3, 40)))
    cos, sin = rotary(config.text_config)(torch.zeros(1), positions[:, None])
    ours = PositionRotaryEmbedding(inverse_frequencies(architecture), axes=axis_of_frequency(architecture))
    angles = ours(positions)[:, 0, 0]
    assert torch.allclose(angles.cos(), cos[0], atol=1e-4) and torch.allclose(angles.sin(), sin[0], atol=1e-4)
    of_text = positions[:1]
    assert torch.equal(ours(of_text.expand(3, -1)), ours(of_text[0])), "text rotates as without images"


def test_deepstack_needs_its_layers_on_the_first_stage() -> None:
    layers = torch.nn.ModuleList([torch.nn.Identity(), torch.nn.Identity()])
    with pytest.raises(ConfigError, match="features for the first 3 layers, but the first pipeline stage has 2"):
        add_deepstack(layers, 3)
