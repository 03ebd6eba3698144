"""FSDP's vision-language models on one rank have transformers' log-probs and gradients."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from rltrain.cli.parity import world_of_one
from rltrain.config import schema
from rltrain.config.models import Lora
from rltrain.models import read_architecture
from rltrain.models.vision import Tower as Kind
from rltrain.runtime.grid import Grid
from rltrain.runtime.image_files import ImageStore
from rltrain.runtime.process_groups import ProcessGroups
from rltrain.training.fsdp_backend import ShardedTrainableModel
from tests.support.marks import slow_but
from tests.support.packed_experience import plain_experience
from tests.support.sharded_models import reading_in_training, seeing_in_training, shard_differences
from tests.support.trained_models import CPU, groups_on, in_training, write_state
from tests.support.vision_checkpoints import load_model, model_inputs, write_checkpoint
from tests.support.vision_samples import (
    SAMPLES,
    Reference,
    experience_of,
    for_transformers,
    open_store,
    seeing_model,
    summed_logprobs,
)

GRID, GRID_OF_MEGATRON = Grid((0,), copies=1), Grid((0,))
ALONE, TOGETHER = 1, 10_000
"""Tokens of a micro-batch: one sample each, or all of them."""
TOLERANCE, RELATIVE = 1e-4, 1e-5
TEXTS = [number for number, sample in enumerate(SAMPLES) if not any(isinstance(part, str) for part in sample)]


@pytest.fixture(scope="module", autouse=True)
def groups() -> Iterator[ProcessGroups]:
    with world_of_one(CPU):
        yield groups_on([GRID, GRID_OF_MEGATRON])


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
    def made(folder: Path, max_tokens: int = TOGETHER, **settings: Any) -> ShardedTrainableModel:
        return seeing_in_training(folder, GRID, groups, store, max_tokens=max_tokens, **settings)

    return made


def assert_like_transformers(reference: Reference, trained: ShardedTrainableModel, max_tokens: int) -> None:
    samples = experience_of(SAMPLES)
    logprobs = trained.evaluate(samples, max_tokens=max_tokens)
    assert logprobs == pytest.approx(torch.cat(reference.logprobs), abs=TOLERANCE)
    found = shard_differences(trained, reference.gradients, samples, summed_logprobs)
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
        {"vision": schema.VisionSettings(recompute=False, max_patches=100)},
        {"vision": schema.VisionSettings(max_patches=100)},
        {"recompute": "full"},
        {"keep_gathered": True},
    ],
    ids=["graph kept", "in pieces", "layers recomputed", "weights kept"],
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
    assert {name for name in changed(before, trained) if name in towers_of(trained)} == set()
    assert len(changed(before, trained)) > 10


@pytest.mark.parametrize("trains", [True, False])
def test_an_optimizer_step_changes_the_tower_only_if_it_is_trained(
    qwen3_vl: Reference, train: Any, trains: bool
) -> None:
    trained = train(qwen3_vl.folder, vision=schema.VisionSettings(train=trains))
    before, towers = copied(trained), towers_of(trained)
    trained.train_batch(experience_of(SAMPLES), summed_logprobs)
    assert changed(before, trained) == before.keys() - (set() if trains else towers)
    saved = {name.partition("/")[2] or name for name in trained.save_state().tensors}
    assert any("patch_embed" in name for name in saved) == trains
    assert towers <= dict(trained.served).keys(), "engines get a frozen tower too"


@pytest.mark.parametrize("trains", [True, False])
def test_a_state_goes_on_and_moves_to_megatron(
    qwen3_vl: Reference, train: Any, groups: ProcessGroups, store: ImageStore, tmp_path: Path, trains: bool
) -> None:
    vision, samples = schema.VisionSettings(train=trains), experience_of(SAMPLES)
    trained, resumed = (train(qwen3_vl.folder, vision=vision) for _ in range(2))
    trained.train_batch(samples, summed_logprobs)
    write_state(trained, tmp_path / "state.safetensors")
    resumed.load_state([tmp_path / "state.safetensors"])
    model = seeing_model(qwen3_vl.folder, GRID_OF_MEGATRON, groups, store, vision=vision)
    moved = in_training(model, updates=1, max_tokens=TOGETHER, optimizer={"lr": 1e-2, "weight_decay": 0})
    moved.load_state([tmp_path / "state.safetensors"])
    for goes_on, tolerance in ((resumed, 0), (moved, RELATIVE)):
        expected = trained.evaluate(samples, max_tokens=TOGETHER)
        assert goes_on.evaluate(samples, max_tokens=TOGETHER) == pytest.approx(expected, abs=tolerance)
    reports = [one.train_batch(samples, summed_logprobs) for one in (trained, resumed, moved)]
    assert reports[1] == reports[0]
    assert reports[2] == pytest.approx(reports[0], rel=RELATIVE)


def test_values_of_a_critic_are_scores_of_the_states_of_transformers(qwen3_vl: Reference, train: Any) -> None:
    architecture = read_architecture(qwen3_vl.folder, sees=True).value_model()
    critic = train(qwen3_vl.folder, architecture=architecture, role="critic")
    critic.model.weights["score.weight"].copy_(torch.linspace(-1, 1, architecture.hidden_size))
    model = load_model(qwen3_vl.folder)
    with torch.no_grad():
        states = [
            model.model(**model_inputs(qwen3_vl.folder, *sample)).last_hidden_state[0]
            for sample in for_transformers(SAMPLES)
        ]
    expected = torch.cat(states) @ torch.linspace(-1, 1, architecture.hidden_size)
    assert expected.abs().max() > 1
    assert critic.evaluate(experience_of(SAMPLES), max_tokens=TOGETHER) == pytest.approx(expected, abs=TOLERANCE)


@pytest.mark.parametrize("kind", slow_but(get_args(Kind), "qwen3_vl_moe"))
def test_without_model_vision_the_language_model_is_trained(kind: Kind, tmp_path: Path, groups: ProcessGroups) -> None:
    write_checkpoint(tmp_path, kind)
    texts = [sample for sample in for_transformers(SAMPLES) if not sample[1]]
    model, expected = load_model(tmp_path), []
    for ids, _ in texts:
        logprobs = model(**model_inputs(tmp_path, ids, [])).logits[0, :-1].log_softmax(-1)
        expected += [torch.zeros(1), logprobs.gather(1, torch.tensor(ids)[1:, None])[:, 0].detach()]
    trained = reading_in_training(tmp_path, GRID, groups)
    samples = plain_experience(
        [len(ids) for ids, _ in texts], torch.tensor([token for ids, _ in texts for token in ids])
    )
    assert trained.evaluate(samples, max_tokens=TOGETHER) == pytest.approx(torch.cat(expected), abs=TOLERANCE)


def test_adapters_of_the_tower_drop_the_same_elements_in_backward(qwen3_vl: Reference, train: Any) -> None:
    reports = []
    for recompute in (True, False):
        vision = schema.VisionSettings(recompute=recompute, max_patches=100)
        trained = train(qwen3_vl.folder, vision=vision, lora=Lora(rank=2, vision=True, dropout=0.5, targets=("qkv",)))
        for name, weight in trained.model.learned.items():
            weight.fill_(0.1 if "lora_B" in name else 0.3)
        reports.append(trained.train_batch(experience_of(SAMPLES), summed_logprobs))
    assert reports[0] == pytest.approx(reports[1], rel=RELATIVE)


@pytest.mark.parametrize("vision", [False, True])
def test_adapters_of_the_tower_are_trained_if_asked_for(qwen3_vl: Reference, train: Any, vision: bool) -> None:
    trained = train(qwen3_vl.folder, lora=Lora(rank=2, vision=vision))
    before = {name: tensor.clone() for name, tensor in trained.model.learned.items()}
    trained.train_batch(experience_of(SAMPLES), summed_logprobs)
    moved = {name for name, tensor in trained.model.learned.items() if not torch.equal(before[name], tensor)}
    assert moved == {name for name in before if "lora_B" in name}, "B is zero at first, so only B has gradients"
    assert any("model.visual." in name for name in moved) == vision
    assert any("model.language_model." in name for name in moved)
    merged = train(qwen3_vl.folder)
    for name, weight in merged.model.weights.items():
        weight.copy_(trained.published[name])
    beside, inside = (one.evaluate(experience_of(SAMPLES), max_tokens=TOGETHER) for one in (trained, merged))
    assert inside == pytest.approx(beside, abs=TOLERANCE)


def towers_of(trained: ShardedTrainableModel) -> set[str]:
    return {name for name in trained.published if name.startswith("model.visual.")}


def copied(trained: ShardedTrainableModel) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in trained.published.items()}


def changed(before: dict[str, Tensor], trained: ShardedTrainableModel) -> set[str]:
    return {name for name, tensor in trained.published.items() if not torch.equal(before[name], tensor)}
