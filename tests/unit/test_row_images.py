"""Images of rows: decoded ahead, held while samples need them, and part of experience and checkpoints."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from PIL import Image

from rltrain.data.images import Context, ImageRules, ImageSource, png_of
from rltrain.data.prompt_order import PromptOrder
from rltrain.errors import CheckpointError, DataError
from rltrain.exchange.exchange import Shipment, as_tensors
from rltrain.exchange.image_requests import image_tensors, keys_of, put_images
from rltrain.models.vision import PlacedImage
from rltrain.roles import rollout as rollout_module
from rltrain.roles.prompt_images import ImageDecoder, PromptImages
from rltrain.roles.rollout import RolloutRole
from rltrain.roles.transfers import Transfers
from rltrain.rollout.rollout_state import RolloutState
from rltrain.rollout.sample import Sample, SampleGroup, pack_groups
from rltrain.runtime.grid import Grid
from rltrain.runtime.image_files import ImageStore
from rltrain.schedule.order import Entries, Order
from rltrain.schedule.shape import RunShape
from tests.support.schedule_configs import make_config
from tests.support.scripted_engine import ScriptedEngine
from tests.support.shared_store import ShortPatience, open_store

IMAGE_TOKEN, MERGE = 50, 2
RULES = ImageRules(7, 2, MERGE, 28 * 28, 112 * 112, 3, (0.5,) * 3, (0.5,) * 3, IMAGE_TOKEN)


def source(colour: int, width: int = 56) -> ImageSource:
    return ImageSource(None, png_of(Image.new("RGB", (width, 56), (colour, 0, 0))))


@dataclass
class Rows:
    """Row r has the text [r], then `images[r]`, then the text [1]."""

    images: Sequence[Sequence[ImageSource]]

    def __getitem__(self, row: int) -> SimpleNamespace:
        return SimpleNamespace(origin=f"rows.jsonl line {row + 1}")

    def __len__(self) -> int:
        return len(self.images)

    def image_sources(self, row: int) -> tuple[ImageSource, ...]:
        return tuple(self.images[row])

    def context(self, row: int) -> Context:
        return RULES.place([row, *[IMAGE_TOKEN] * len(self.images[row]), 1], self.images[row])


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ImageStore]:
    opened = ImageStore.open("job", 0, folder=str(tmp_path), keep_steps=2, cache_bytes=0)
    yield opened
    opened.close()


@pytest.fixture
def decoder(store: ImageStore) -> ImageDecoder:
    return ImageDecoder(store, RULES)


def keys_of_row(rows: Rows, row: int) -> list[int]:
    return [image.key for image in rows.context(row).images]


# Decoding.


def test_images_are_decoded_once_and_held(decoder: ImageDecoder, store: ImageStore) -> None:
    rows = Rows([[source(9), source(10)], [source(9)]])
    images = PromptImages(decoder, rows, lambda position: position)  # type: ignore[arg-type]
    images.begin(3, ())
    images.prepare([0, 1])
    assert decoder.num_decoded == 2
    assert sorted(path.name for path in store.own.iterdir()) == sorted(map(str, keys_of_row(rows, 0)))
    assert store.pixels(keys_of_row(rows, 1)[0])[0, 0, 0].tolist() == [9, 0, 0]
    store.release_before(9)
    assert store.missing(keys_of_row(rows, 0)) == keys_of_row(rows, 0), "they end with their steps"


def test_images_of_following_prompts_are_decoded_ahead(decoder: ImageDecoder, store: ImageStore) -> None:
    rows = Rows([[source(colour)] for colour in range(6)])
    following = lambda positions: range(max(positions) + 1, min(max(positions) + 3, 6))  # noqa: E731
    images = PromptImages(decoder, rows, lambda position: position, following)  # type: ignore[arg-type]
    images.prepare([0, 1])
    for future in [*decoder._pending.values()]:
        future.result(timeout=30)
    assert not store.missing([*keys_of_row(rows, 2), *keys_of_row(rows, 3)])
    assert store.missing(keys_of_row(rows, 4)) == keys_of_row(rows, 4)
    with mock.patch.object(decoder, "request", side_effect=AssertionError("decoded again")):
        decoder.hold(keys_of_row(rows, 2), dict, step=0)


def test_rows_without_images_need_no_thread(decoder: ImageDecoder) -> None:
    images = PromptImages(decoder, Rows([[], []]), lambda position: position)  # type: ignore[arg-type]
    images.prepare([0, 1])
    assert images.context(0) == Context((0, 1)) and not decoder._threads


def test_an_image_that_cannot_be_decoded_is_named_with_its_row(decoder: ImageDecoder, tmp_path: Path) -> None:
    path = tmp_path / "cut.png"
    path.write_bytes((source(7).data or b"")[:60])
    good = source(8)
    with pytest.raises(DataError, match=r"rows.jsonl line 2: .*cut.png cannot be used as an image"):
        decoder.hold([1], lambda: {good: "rows.jsonl line 1", ImageSource(str(path), None): "rows.jsonl line 2"}, 0)


def test_an_image_changed_in_its_file_is_refused(decoder: ImageDecoder) -> None:
    with pytest.raises(DataError, match=r"the images of rows.jsonl line 1 are not those of its samples \(keys \[77\]"):
        decoder.hold([77], lambda: {source(7): "rows.jsonl line 1"}, 0)


# Samples in experience and checkpoints.


def test_experience_has_the_keys_and_positions_of_images() -> None:
    rows = Rows([[source(7)], [], [source(7), source(8, width=84)]])
    contexts = [rows.context(row) for row in range(3)]
    samples = [Sample(n, context.ids, n, images=context.images) for n, context in enumerate(contexts)]
    groups = [SampleGroup(n, n, (sample.drawn((3,), (-0.5,), (0,)),)) for n, sample in enumerate(samples)]
    found = pack_groups(groups, range(3), merge=MERGE)
    first, second = (image.key for image in contexts[2].images)
    expected = [[0, *[first] * 16, 0, 0], [0, 0, 0], [0, *[first] * 16, *[second] * 24, 0, 0]]
    assert found.image_keys.tolist() == sum(expected, [])
    assert found.rope_positions.shape == (found.num_tokens, 3)
    assert found.rope_positions[17].tolist() == [5, 5, 5], "text goes on after the 4 rows and columns of an image"
    assert sorted(keys_of(found)) == sorted([first, second])
    assert keys_of(pack_groups(groups, range(3))) == []


def test_a_checkpoint_keeps_the_images_of_samples() -> None:
    images = (PlacedImage(1, 2**62 + 5, (1, 8, 12)), PlacedImage(99, 7, (2, 4, 4)))
    seeing = Sample(4, (5,) * 200, 0, images=images)
    state = RolloutState(begun=(SampleGroup(2, 9, (seeing, replace(seeing, id=5, images=()))),))
    assert RolloutState.from_contents(state.contents()) == state


# The rollout.

STEPS, PER_STEP, NUM_ROWS = 3, 4, 10


@pytest.fixture(scope="module")
def job_store() -> Iterator[Any]:
    with open_store() as opened:
        yield opened


def rollout_of(decoder: ImageDecoder, rows: Rows, job_store: Any, schedule: dict[str, Any]) -> RolloutRole:
    batch = {"prompts_per_step": PER_STEP, "samples_per_prompt": 2}
    config = make_config(steps=STEPS, batch=batch, schedule=schedule, model={"path": "m", "vision": {}})
    order = PromptOrder(NUM_ROWS, seed=0, shuffle=True)
    prompts = SimpleNamespace(
        train=rows,
        order=order,
        training=(rows, order),
        report_rows=lambda prompts_per_step: None,
        encoder=SimpleNamespace(end_tokens=frozenset({1})),
    )
    job: Any = SimpleNamespace(
        config=config,
        shape=RunShape.of(config),
        world=SimpleNamespace(rank=0, store=job_store),
        placement=SimpleNamespace(roles=("rollout",)),
        grids={"rollout": Grid((0,))},
        leader_of=lambda role: 0,
        rows=SimpleNamespace(prompts=prompts, first_step=0),
        waiter=ShortPatience(),
        heartbeat=SimpleNamespace(advance=lambda: None),
        architecture=SimpleNamespace(eos_token_ids=(1,), vision=SimpleNamespace(merge=MERGE)),
        decoder=decoder,
        images=decoder.store,
        operations=SimpleNamespace(add=lambda *counted, backward: None),
        resumed=None,
        first_step=0,
    )

    class Engine(ScriptedEngine):
        """An engine that looks at all images of its samples."""

        def submit(self, samples: Sequence[Sample], sampling: Any) -> None:
            for sample in samples:
                for image in sample.images:
                    assert decoder.store.shape(image.key) == (1, 56, 56)
            super().submit(samples, sampling)

    engine = Engine(lambda number: 1 + number * 7 % 20)
    build = lambda *_: SimpleNamespace(engine=engine, parts={}, metrics=dict)  # noqa: E731
    with (
        mock.patch.object(rollout_module, "build_engine", build),
        mock.patch.object(RolloutRole, "site", lambda self: None),
    ):
        return RolloutRole(job)


@pytest.mark.parametrize("schedule", [{}, {"partial_rollouts": True, "on_stale": "mask"}], ids=["whole", "partial"])
def test_an_engine_has_the_pixels_of_its_samples_as_long_as_it_needs_them(
    decoder: ImageDecoder, store: ImageStore, job_store: Any, schedule: dict[str, Any]
) -> None:
    rows = Rows([[source(row)] if row % 3 else [] for row in range(NUM_ROWS)])
    rollout = rollout_of(decoder, rows, job_store, schedule)
    for step in range(STEPS):
        store.release_before(step - 1)
        rollout.generate(step, 0)
        experience = rollout.shipments.pop(("samples", step, 0)).experience
        seen = {int(key) for row in experience.prompt_ids.tolist() for key in keys_of_row(rows, row)}
        assert {*keys_of(experience)} == seen and seen
        for group in rollout.training.unshipped:
            assert not store.missing([image.key for sample in group.samples for image in sample.images])
        store.hold(keys_of(experience), step)


# Transfers.


def transfers_of(hold: Any = lambda transfer, step, chunk, experience: None, **shape: bool) -> Transfers:
    order = Entries()
    for name, source_role, role in (
        ("samples", "rollout", "reward"),
        ("samples", "rollout", "reward_model"),
        ("scored", "reward", "actor"),
        ("scored", "reward", "teacher"),
        ("evaluation_samples", "rollout", "reward"),
    ):
        order.post(name, source_role, role, 0)
    for name, source_role, role in (("samples", "rollout", "reward"), ("scored", "reward", "actor")):
        order.wait(name, source_role, role, 0)
    shapes: Any = SimpleNamespace(selects_groups=False, replays_rollout=False, **shape)
    grids = dict.fromkeys(("rollout", "reward", "reward_model", "actor", "teacher"))
    roles = {"rollout": SimpleNamespace(shipments={}, dp=0, grid=SimpleNamespace(dp=1))}
    return Transfers(shapes, grids, Order.of(order), None, roles, None, hold)  # type: ignore[arg-type]


def test_images_go_to_the_roles_that_see() -> None:
    transfers = transfers_of(sees=True)
    seen = {"image_keys", "rope_positions"}
    for transfer, role, expected in [
        ("samples", "reward", seen),
        ("samples", "reward_model", set()),
        ("scored", "actor", seen),
        ("scored", "teacher", set()),
        ("evaluation_samples", "reward", {"image_keys"}),
    ]:
        assert seen.intersection(transfers._fields(transfer, role)) == expected
    assert "image_keys" not in transfers_of(sees=False)._fields("scored", "actor")


def crossing(rows: Rows, *, sees: bool) -> list[dict[str, torch.Tensor]]:
    """Returns a saved shipment from the rollout to role reward."""
    context = rows.context(0)
    group = SampleGroup(0, 0, (Sample(0, context.ids, 0, images=context.images).drawn((3,), (-0.5,), (0,)),))
    experience = pack_groups([group], [0], merge=MERGE if sees else None)
    shipment = Shipment(experience, experience.lengths, torch.zeros(1, dtype=torch.int64))
    return [as_tensors({("rollout", "samples", 4, 0): shipment})]


def crossing_transfers(hold: Any = lambda transfer, step, chunk, experience: None, *, sees: bool) -> Transfers:
    transfers = transfers_of(hold, sees=sees)
    order = Entries()
    order.post("samples", "rollout", "reward", 4)
    order.task("generate", "rollout", step=5)
    order.wait("samples", "rollout", "reward", 4)
    transfers.order = Order.of(order)
    return transfers


def test_images_of_experience_in_a_checkpoint_are_held_again() -> None:
    held = []
    rows = Rows([[source(7)]])

    def hold(transfer: str, step: int, chunk: int, experience: Any) -> None:
        held.append((keys_of(experience), step))

    crossing_transfers(hold, sees=True).restore(crossing(rows, sees=True))
    assert held == [(keys_of_row(rows, 0), 4)]


@pytest.mark.parametrize("sees", [True, False])
def test_experience_of_a_run_with_another_sight_is_refused(sees: bool) -> None:
    with pytest.raises(CheckpointError, match="Resume with model.vision of the saved run"):
        crossing_transfers(sees=sees).restore(crossing(Rows([[source(7)]]), sees=not sees))


# Pixels in checkpoints of runs with environments, whose images are not those of rows.


def test_a_checkpoint_with_environments_keeps_pixels(
    decoder: ImageDecoder, store: ImageStore, job_store: Any, tmp_path: Path
) -> None:
    rows = Rows([[source(row)] for row in range(NUM_ROWS)])
    rollout = rollout_of(decoder, rows, job_store, {"partial_rollouts": True, "on_stale": "mask"})
    rollout.job.placement.roles = ("rollout", "env")  # type: ignore[attr-defined]
    rollout.generate(0, 0)
    started = {image.key for group in rollout.training.unshipped for s in group.samples for image in s.images}
    ((_, contents),) = rollout.save_state().items()
    assert started and RolloutState.from_contents(contents).begun
    other = ImageStore.open("other job", 0, folder=str(tmp_path), keep_steps=2, cache_bytes=0)
    rest = put_images(other, contents.tensors, step=1)
    assert not other.missing(started) and not any(name.startswith("image/") for name in rest)
    other.close()


def test_unreceived_experience_keeps_pixels_with_environments(store: ImageStore) -> None:
    rows = Rows([[source(7)]])
    (key,) = keys_of_row(rows, 0)
    store.put(key, RULES.decoded(source(7)), step=4)
    (saved,) = crossing(rows, sees=True)
    saved = {**saved, **image_tensors(store, [key])}
    store.release_before(99)
    assert store.missing([key])
    transfers = crossing_transfers(sees=True)
    transfers.exchange = SimpleNamespace(images=store)  # type: ignore[assignment]
    transfers.restore([saved])
    assert store.pixels(key)[0, 0, 0].tolist() == [7, 0, 0]
