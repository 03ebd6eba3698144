"""Generation of the embedded engine for prompts with images, compared with transformers."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from rltrain.config.models import VisionSettings
from rltrain.errors import ConfigError, DataError
from rltrain.models.vision import Tower
from rltrain.models.vision_tower import patches_of
from rltrain.reshard.copy_table import allocate_parameters
from rltrain.reshard.megatron_layout import adapter_pairs
from rltrain.rollout.embedded import generation
from rltrain.rollout.embedded.block_tables import GB
from rltrain.rollout.embedded.engine import images_of
from rltrain.rollout.embedded.image_features import keyed
from rltrain.rollout.embedded.parameters import adapted_matrices
from rltrain.rollout.engine import SamplingParams
from rltrain.rollout.layout import engine_layout
from rltrain.rollout.sample import Sample
from rltrain.rollout.workspace import workspace
from rltrain.runtime.grid import Grid
from rltrain.runtime.image_files import ImageStore
from tests.support.live_bytes import LiveBytes
from tests.support.vision_checkpoints import HIDDEN, IMAGE_TOKEN, MERGE, VOCAB_SIZE, load_model, write_checkpoint
from tests.support.vision_engines import (
    MEAN,
    STD,
    Loaded,
    Served,
    filled_store,
    load_shares,
    mixed_samples,
    placed_in,
    sample_of,
    start_engine,
    text,
)

GREEDY = SamplingParams(0.0, 1.0, 0, 12, ())
KINDS: tuple[Tower, ...] = ("qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5")
every_family = pytest.mark.parametrize("model", KINDS, indirect=True)


class Model(NamedTuple):
    """transformers' model, and what our engine needs of it."""

    whole: Any
    ours: Loaded


@pytest.fixture(scope="module", params=KINDS[:1])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    """Returns a model that never chooses the placeholder. transformers refuses one without an image."""
    kind: Tower = request.param
    folder = tmp_path_factory.mktemp(kind)
    write_checkpoint(folder, kind, seed=2)
    whole, ours = load_model(folder), load_shares(folder)
    with torch.no_grad():
        whole.lm_head.weight[IMAGE_TOKEN] = 0.5 * whole.lm_head.weight[IMAGE_TOKEN + 1]
    ours.parameters["lm_head.weight"][:VOCAB_SIZE] = whole.lm_head.weight.detach()
    return Model(whole, ours)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> ImageStore:
    return filled_store(tmp_path_factory.mktemp("store"))


@pytest.fixture(params=["slots", "blocks"])
def serve(request: pytest.FixtureRequest, model: Model, store: ImageStore) -> Callable[..., Served]:
    """Returns a function that starts an engine, with one of the caches."""

    def started(*, kv_tokens: int = 4096, **limits: Any) -> Served:
        return start_engine(model.ours, store, kv_tokens=kv_tokens if request.param == "blocks" else None, **limits)

    return started


# What transformers says of samples.


def shown_to(model: Model, store: ImageStore, done: Sample) -> dict[str, Tensor]:
    """Returns the images of a sample as inputs for transformers."""
    vision = model.ours.architecture.vision
    assert vision is not None
    marks = torch.zeros(1, len(done.context), dtype=torch.int64)
    if not done.images:
        return {"mm_token_type_ids": marks}
    for image in done.images:
        marks[0, image.begin : image.begin + image.num_tokens(MERGE)] = 1
    pixels = [torch.from_numpy(np.asarray(store.pixels(image.key))) for image in done.images]
    patches, grids = patches_of(vision, pixels, torch.tensor(MEAN), torch.tensor(STD))
    return {"pixel_values": patches, "image_grid_thw": grids, "mm_token_type_ids": marks}


def generated(model: Model, store: ImageStore, given: Sample, count: int) -> list[int]:
    """Returns transformers' greedy tokens."""
    ids = torch.tensor([given.context])
    made = model.whole.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=count,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        **shown_to(model, store, given),
    )
    return made[0, ids.shape[1] :].tolist()


def logprobs(model: Model, store: ImageStore, done: Sample) -> Tensor:
    """Returns transformers' log-probs of the response's own tokens, from one pass over the whole context."""
    with torch.no_grad():
        logits = model.whole(torch.tensor([done.context]), **shown_to(model, store, done)).logits
    wanted = torch.tensor(done.tokens)[:, None]
    return logits[0, len(done.prompt) - 1 : -1].log_softmax(-1).gather(1, wanted)[:, 0]


def assert_greedy(model: Model, store: ImageStore, samples: Sequence[Sample], found: Sequence[Sample]) -> None:
    for given, done in zip(samples, found, strict=True):
        new = done.tokens[len(given.tokens) :]
        assert IMAGE_TOKEN not in new, "transformers refuses a placeholder without an image"
        assert list(new) == generated(model, store, given, len(new)), f"sample {given.id}"
        drawn = torch.tensor(done.logprobs)[torch.tensor(done.loss_mask)]
        expected = logprobs(model, store, done)[torch.tensor(done.loss_mask)]
        torch.testing.assert_close(drawn, expected, atol=1e-4, rtol=0)


@every_family
def test_greedy_tokens_equal_transformers(model: Model, store: ImageStore, serve: Callable[..., Served]) -> None:
    engine, _ = serve()
    samples = mixed_samples()
    assert_greedy(model, store, samples, engine.generate(samples, GREEDY))


def test_group_encodes_its_image_once(serve: Callable[..., Served]) -> None:
    engine, images = serve(cache_bytes=0.0)
    first = sample_of(0, text(3, 0), 15, text(40, 1))
    group = [replace(first, id=number, seed=number) for number in range(6)]
    done = engine.generate(group, replace(GREEDY, temperature=1.0))
    assert images.metrics() == {"images/engine_encoded": 1}
    assert len({one.tokens for one in done}) > 1
    assert images.metrics() == {"images/engine_encoded": 0}


def test_equal_ids_with_other_images_share_nothing(
    model: Model, store: ImageStore, serve: Callable[..., Served]
) -> None:
    engine, images = serve()
    samples = [sample_of(0, text(40, 0), 11, text(3, 1)), sample_of(1, text(40, 0), 14, text(3, 1))]
    assert samples[0].prompt == samples[1].prompt
    done = engine.generate(samples, GREEDY)
    assert images.metrics() == {"images/engine_encoded": 2}
    assert_greedy(model, store, samples, done)
    assert done[0].logprobs != done[1].logprobs


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("model", ["qwen3_vl"], indirect=True)
def test_what_comes_before_other_images_or_other_text_is_computed_once(
    model: Model, store: ImageStore, serve: Callable[..., Served]
) -> None:
    engine, images = serve()
    system = text(17, 0)
    samples = [sample_of(number, system, key, text(9, number)) for number, key in enumerate((11, 14, 15, 15))]
    assert_greedy(model, store, samples, engine.generate(samples, GREEDY))
    assert images.metrics() == {"images/engine_encoded": 3}
    metrics = engine.cache_metrics()
    assert (metrics["rollout/context_prefix_tokens"] > 3 * 16) == ("rollout/kv_cache_peak" in metrics)


def test_images_beyond_max_patches_are_encoded_in_pieces(
    model: Model, store: ImageStore, serve: Callable[..., Served]
) -> None:
    engine, images = serve(max_patches=20)
    samples = mixed_samples()
    assert_greedy(model, store, samples, engine.generate(samples, GREEDY))
    assert images.metrics() == {"images/engine_encoded": 5}


@every_family
def test_later_turns_show_further_images(model: Model, store: ImageStore, serve: Callable[..., Served]) -> None:
    engine, images = serve()
    samples = [replace(one, goes_on=True) for one in mixed_samples()]
    for turn, key in enumerate((13, 15)):
        done = engine.generate(samples, replace(GREEDY, max_response_tokens=12 + 40 * turn))
        assert_greedy(model, store, samples, done)
        images.metrics()
        ids, placed = placed_in([text(2, 20 + turn), key, text(3, 30 + turn)])
        samples = [one.observed(ids, placed, turn_limit=len(one.tokens) + len(ids) + 8) for one in done]
    done = engine.generate(samples, replace(GREEDY, max_response_tokens=100))
    assert_greedy(model, store, samples, done)
    assert images.metrics() == {"images/engine_encoded": 0}, "the features of both images were kept"


def test_long_suffixes_are_cut_within_images(
    model: Model, store: ImageStore, serve: Callable[..., Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generation, "PASS_TOKENS", 5)
    engine, _ = serve()
    first = sample_of(0, text(3, 0), 11, text(4, 1))
    (done,) = engine.generate([replace(first, goes_on=True)], GREEDY)
    ids, placed = placed_in([text(2, 2), 15, 12, text(1, 3)])
    shown = done.observed(ids, placed)
    assert_greedy(model, store, [shown], engine.generate([shown], replace(GREEDY, max_response_tokens=80)))


@every_family
def test_preempted_samples_continue(model: Model, store: ImageStore, serve: Callable[..., Served]) -> None:
    engine, _ = serve(kv_tokens=192, max_context_tokens=96)
    samples = [sample_of(number, text(20, number), 15, text(7, 9)) for number in range(3)]
    done = engine.generate(samples, replace(GREEDY, max_response_tokens=24))
    assert_greedy(model, store, samples, done)
    assert engine.cache_metrics().get("rollout/preemptions", 1) > 0, "only blocks are limited"


@every_family
def test_suspended_samples_continue(model: Model, store: ImageStore, serve: Callable[..., Served]) -> None:
    engine, _ = serve()
    samples = mixed_samples()
    engine.submit(samples, GREEDY)
    for _ in range(4):
        engine.step()
    suspended = engine.suspend()
    assert {len(one.tokens) for one in suspended} == {4}
    assert_greedy(model, store, suspended, engine.generate(suspended, GREEDY))


def test_features_are_kept_within_their_space(model: Model, serve: Callable[..., Served]) -> None:
    vision = model.ours.architecture.vision
    assert vision is not None
    engine, images = serve(cache_bytes=24 * 4 * HIDDEN * (1 + len(vision.deepstack)))
    one_image = replace(GREEDY, max_response_tokens=1)

    def encoded(key: int) -> float:
        engine.generate([sample_of(0, text(2, 0), key, text(2, 1))], one_image)
        return images.metrics()["images/engine_encoded"]

    assert [encoded(key) for key in (15, 12, 15, 12)] == [1, 1, 0, 0]
    assert [encoded(key) for key in (13, 12, 15)] == [1, 0, 1], "the image of 16 tokens was used least recently"


def test_new_weights_of_the_tower_change_features(model: Model, serve: Callable[..., Served]) -> None:
    engine, images = serve()
    samples = mixed_samples()
    before = engine.generate(samples, GREEDY)
    tensor = next(values for name, values in model.ours.parameters.items() if name.startswith("vision.merger"))
    kept = tensor.clone()
    engine.begin_update()
    tensor.mul_(-1.0)
    engine.end_update(1)
    after = engine.generate(samples, GREEDY)
    tensor.copy_(kept)
    assert images.metrics() == {"images/engine_encoded": 10}
    are_equal = [one.logprobs == other.logprobs for one, other in zip(before, after, strict=True)]
    assert are_equal == [not one.images for one in samples]


def test_features_of_a_frozen_tower_outlast_updates(serve: Callable[..., Served]) -> None:
    engine, images = serve(trains=False)
    samples = mixed_samples()
    for version in (1, 2):
        engine.generate(samples, GREEDY)
        engine.begin_update()
        engine.end_update(version)
    assert images.metrics() == {"images/engine_encoded": 5}
    engine.release_cache()
    engine.generate(samples, GREEDY)
    assert images.metrics() == {"images/engine_encoded": 5}, "their memory is for others while the engine is away"


def test_context_may_not_end_with_an_image(serve: Callable[..., Served]) -> None:
    engine, _ = serve()
    whole = sample_of(0, text(2, 0), 11)
    with pytest.raises(DataError, match="sample 0 ends with an image"):
        engine.submit([replace(whole, prompt=whole.prompt[:-1])], GREEDY)


def test_keys_differ_by_image_and_row() -> None:
    given = sample_of(0, text(3, 0), 11, text(2, 1))
    first, second = keyed(given, MERGE), keyed(sample_of(0, text(3, 0), 14, text(2, 1)), MERGE)
    assert [token for token in first.prompt if token >= 0] == [token for token in given.prompt if token != IMAGE_TOKEN]
    negative = [token for one in (first, second) for token in one.prompt if token < 0]
    assert len(negative) == len({*negative}) == 8
    plain = sample_of(0, text(3, 0))
    assert keyed(plain, MERGE) is plain


@pytest.mark.parametrize("model", ["qwen2_5_vl", "qwen3_vl"], indirect=True)
def test_no_more_is_live_than_the_workspace(model: Model, tmp_path: Path) -> None:
    """The images fill several pieces of the tower, and some of their features are kept."""
    store, count = filled_store(tmp_path), 48
    for key in range(100, 100 + count):
        store.put(key, np.full((1, 56, 56, 3), key, np.uint8), 0)
    samples = [replace(sample_of(number, text(3, number), 15, text(2, 1)), seed=number) for number in range(count)]
    samples = [replace(one, images=(one.images[0]._replace(key=100 + one.id),)) for one in samples]
    num_tokens = count * (len(samples[0].prompt) - 1)
    settings = VisionSettings(max_patches=1024, engine_cache_gb=2e-5)
    engine, _ = start_engine(
        model.ours,
        store,
        cache_bytes=settings.engine_cache_gb * GB,
        max_patches=settings.max_patches,
        max_running_requests=count,
    )
    sampling = SamplingParams(1.0, 1.0, 0, 2, ())
    engine.generate(samples, sampling)  # allocates its cache
    engine.forget_images()
    with LiveBytes() as live:
        engine.generate([replace(one, id=count + one.id) for one in samples], sampling)
    needed = workspace(
        model.ours.architecture,
        Grid((0,)),
        num_running=count,
        prefill_tokens=num_tokens,
        item_bytes=4,
        vision=settings,
    )
    assert 0.5 * needed.generating < live.most < needed.generating


@pytest.mark.parametrize("model", ["qwen2_5_vl", "qwen3_vl"], indirect=True)
def test_separate_adapters_equal_merged_ones(model: Model, store: ImageStore) -> None:
    folder, architecture, parameters = model.ours
    layout, scale = engine_layout(architecture.adapted(2, None, vision=True), Grid((0,)), dtype="float32"), 0.5
    generator = torch.Generator().manual_seed(0)
    adapters = {
        name: 0.2 * torch.randn(parameter.shape, generator=generator)
        for name, parameter in allocate_parameters(layout, 0, device="cpu").items()
    }
    merged = {name: parameter.clone() for name, parameter in parameters.items()}
    for pair in adapter_pairs(layout, 0):
        a, b = (adapters[name] for name in pair.names)
        halves = zip(a.chunk(len(pair.rows_of_parts)), b.split([*pair.rows_of_parts]), strict=True)
        merged[pair.adapted] += scale * torch.cat([right @ left for left, right in halves])
    beside = adapted_matrices(layout, 0, parameters | adapters, {}, scale)
    assert any(name.startswith("vision.") for name in beside)
    apart, _ = start_engine(Loaded(folder, architecture, parameters | adapters), store, matrices=beside)
    whole, _ = start_engine(Loaded(folder, architecture, merged), store)
    for found, expected in zip(*(engine.generate(mixed_samples(), GREEDY) for engine in (apart, whole)), strict=True):
        assert found.tokens == expected.tokens
        assert found.logprobs == pytest.approx(expected.logprobs, abs=1e-4)


def test_engines_with_images_stay_within_a_node(model: Model) -> None:
    site = SimpleNamespace(num_nodes=2, role="rollout")
    with pytest.raises(ConfigError, match="rollout.parallel.tp: got an engine on 2 nodes with model.vision"):
        images_of(site, model.ours.architecture.vision, model.ours.parameters, {})  # type: ignore[arg-type]
