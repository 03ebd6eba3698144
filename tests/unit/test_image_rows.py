"""Rows with images: their forms, their tokens, their checks, and what becomes of them in training."""

import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pytest
import torch
import torch.distributed as dist
from PIL import Image
from pyarrow import parquet

from rltrain.config import schema
from rltrain.data.columns import read_columns
from rltrain.data.demonstrations import Demonstrations, Preferences
from rltrain.data.image_parts import images_of, with_references
from rltrain.data.images import ImageRules, ImageSource
from rltrain.data.prompts import PromptDataset, load_prompts
from rltrain.data.row_index import IndexedRows, IndexFolder
from rltrain.data.rows import read_rows, rows_of_table
from rltrain.data.tokenizer import ModelLimits
from rltrain.errors import DataError
from rltrain.models.rope_positions import rope_positions
from rltrain.roles.inputs import identity
from rltrain.runtime.job_store import JobStore
from rltrain.runtime.world import World
from tests.support.image_rows import (
    FILES,
    SIZES,
    URLS,
    Load,
    Processor,
    checkpoint,
    encoder_of,
    expected_ids,
    folder,
    image,
    jsonl,
    load,
    picture,
    processor,
    said,
    spans,
    table,
    text,
    user,
)
from tests.support.vision_checkpoints import MERGE

# Forms of rows.

TWO = (user(image("wide"), text("or"), image("tall"), text("?")),)
"""A prompt with two images, as transformers takes it."""
FORMS: dict[str, Callable[[], dict[str, Any]]] = {
    "OpenAI": lambda: {
        "prompt": [
            user(
                {"type": "image_url", "image_url": {"url": URLS["wide"], "detail": "high"}},
                text("or"),
                {"type": "image_url", "image_url": {"url": URLS["tall"]}},
                text("?"),
            )
        ]
    },
    "OpenAI responses": lambda: {
        "prompt": [
            user(
                {"type": "input_image", "image_url": URLS["wide"]},
                {"type": "input_text", "text": "or"},
                {"type": "input_image", "image_url": URLS["tall"]},
                {"type": "input_text", "text": "?"},
            )
        ]
    },
    "transformers": lambda: {
        "prompt": [
            user(
                {"type": "image", "path": "wide.png"},
                text("or"),
                {"type": "image", "base64": URLS["tall"].partition(",")[2]},
                text("?"),
            )
        ]
    },
    "Qwen": lambda: {"prompt": [user({"image": "wide.png"}, {"text": "or"}, {"image": URLS["tall"]}, {"text": "?"})]},
    "TRL": lambda: {
        "prompt": [user({"type": "image"}, text("or"), {"type": "image"}, text("?"))],
        "images": ["wide.png", "tall.png"],
    },
    "verl": lambda: {
        "prompt": [{"role": "user", "content": "<image>or<image>?"}],
        "images": [{"image": "wide.png"}, {"path": "tall.png", "bytes": None}],
    },
    "a text": lambda: {"prompt": "<image>or<image>?", "images": ["wide.png", URLS["tall"]]},
}

__all__ = ["checkpoint", "folder", "load", "processor"]


@pytest.mark.parametrize("form", FORMS)
def test_every_form_has_the_tokens_of_transformers(load: Load, processor: Processor, folder: Path, form: str) -> None:
    dataset = load(jsonl(folder, FORMS[form]()))
    ids, images, sources = dataset.context(0)
    assert ids == dataset.prompt_tokens(0) == expected_ids(processor, *TWO)
    assert [(one.begin, one.num_tokens(MERGE)) for one in images] == spans(ids)
    assert [source.read() for source in sources] == [FILES["wide"], FILES["tall"]]
    assert dataset.image_sources(0) == sources
    rules = dataset.encoder.images
    assert rules is not None
    assert [*images] == [rules.placed(source, one.begin) for source, one in zip(sources, images, strict=True)]
    assert dataset.prompt_text(0) == "<image>or<image>?"


def test_bytes_of_parquet_files(load: Load, processor: Processor, folder: Path) -> None:
    given = [{"bytes": FILES["wide"], "path": "w.png"}, {"bytes": FILES["tall"], "path": None}]
    markers = load(table(folder, {"prompt": [{"role": "user", "content": "<image>or<image>?"}], "images": given}))
    assert markers.prompt_tokens(0) == expected_ids(processor, *TWO)
    empty = {"type": None, "text": None, "image": None}
    parts = [empty | {"type": "image", "image": one} for one in given]
    content = [parts[0], empty | text("or"), parts[1], empty | text("?")]
    inside = load(table(folder, {"prompt": [{"role": "user", "content": content}]}))
    assert inside.context(0) == markers.context(0)
    places = [empty | {"type": "image"}, empty | text("or"), empty | {"type": "image"}, empty | text("?")]
    placed = load(table(folder, {"prompt": [{"role": "user", "content": places}], "images": given}))
    assert placed.context(0) == markers.context(0)
    raw = load(table(folder, {"prompt": "<image>or<image>?", "images": [FILES["wide"], FILES["tall"]]}))
    assert raw.context(0) == markers.context(0)


def test_images_inside_of_another_column(load: Load, processor: Processor, folder: Path) -> None:
    rows = {"prompt": "<image>", "more": {"images": ["square.png"]}}, {"prompt": "none", "more": {}}
    dataset = load(jsonl(folder, *rows), columns={"images_key": "more.images"})
    assert dataset.prompt_tokens(0) == expected_ids(processor, user(image("square")))
    assert dataset.image_sources(1) == ()
    path = table(folder, {"images": ["square.png"]})
    with pytest.raises(DataError, match="none of the columns prompt; its columns are images"):
        load(path)


@pytest.mark.parametrize("given", ["square.png", ["square.png"], {"path": "square.png"}])
def test_images_without_a_place_come_first(load: Load, processor: Processor, folder: Path, given: Any) -> None:
    expected = expected_ids(processor, user(image("square"), text("What?")))
    chat = [{"role": "system", "content": "Look."}, {"role": "user", "content": "What?"}]
    dataset = load(jsonl(folder, {"prompt": "What?", "pic": given}, {"prompt": chat, "pic": given}), columns=PIC)
    assert dataset.prompt_tokens(0) == expected
    with_system = expected_ids(processor, user(image("square"), text("What?")))
    assert dataset.prompt_tokens(1)[-len(with_system) :] == with_system
    assert dataset.prompt_text(1) == "Look.\n\n<image>What?"


PIC = {"images_key": "pic"}


def test_rows_with_and_without_images(load: Load, processor: Processor, folder: Path) -> None:
    rows = ({"prompt": "One"}, {"prompt": "Two", "images": []}, {"prompt": "Three", "images": None})
    dataset = load(jsonl(folder, *rows, {"prompt": "Four<image>", "images": ["square.png"]}))
    for row, prompt in enumerate(("One", "Two", "Three")):
        assert dataset.context(row) == (expected_ids(processor, {"role": "user", "content": prompt}), (), ())
    assert dataset.prompt_tokens(3) == expected_ids(processor, user(text("Four"), image("square")))


def test_a_mark_is_text_if_no_row_has_images(load: Load, processor: Processor, folder: Path) -> None:
    rows = {"prompt": "Write <image>."}, {"prompt": "Write <image>.", "images": ["square.png"]}
    assert load(jsonl(folder, rows[0])).prompt_text(0) == "Write <image>."
    ignored = load(jsonl(folder, rows[1]), columns={"images_key": None})
    assert ignored.prompt_tokens(0) == expected_ids(processor, {"role": "user", "content": "Write <image>."})


def test_frames_are_images(load: Load, processor: Processor, folder: Path) -> None:
    names = ("square", "square", "wide")
    dataset = load(jsonl(folder, {"prompt": "<image><image><image>Go", "images": [f"{name}.png" for name in names]}))
    assert dataset.prompt_tokens(0) == expected_ids(processor, user(*map(image, names), text("Go")))
    first, second, third = dataset.context(0).images
    assert first.key == second.key != third.key
    assert second.begin > first.begin + first.num_tokens(MERGE), "the template has marks between images"


def test_limits_of_pixels_change_the_tokens(load: Load, folder: Path) -> None:
    path = jsonl(folder, {"prompt": "<image>", "images": ["square.png"]})
    whole, half = load(path), load(path, images=schema.Images(max_pixels=28 * 28))
    assert [one.num_tokens(MERGE) for one in (*whole.context(0).images, *half.context(0).images)] == [16, 4]
    assert whole.context(0).images[0].key != half.context(0).images[0].key
    assert whole.encoder.fingerprint() != half.encoder.fingerprint()


# Runs that do not see.


def test_runs_that_do_not_see_refuse_images(load: Load, folder: Path) -> None:
    for part in ({"type": "image", "image": "square.png"}, {"type": "image_url", "image_url": {"url": URLS["wide"]}}):
        told = f"a part of type '{part['type']}'; expected text or parts of type 'text' .for images: set model.vision."
        with pytest.raises(DataError, match=f"rows.jsonl:1: the row has a message's content has {told}"):
            load(jsonl(folder, {"prompt": [user(part, text("?"))]}), sees=False)
    row = {"prompt": "<image>?"}
    images = ["none.png", [URLS["wide"]], [{"path": "none.JPG", "bytes": None}]]
    for path in (*(jsonl(folder, row | {"images": one}) for one in images), table(folder, row | {"images": [b"x"]})):
        told = "has images under 'images'; expected model.vision, which shows them, or images_key null"
        with pytest.raises(DataError, match=f"rows.* ?1: the row {told}"):
            load(path, sees=False)
    for others in ([], None, "three", [1, 2], {"path": None}):
        dataset = load(jsonl(folder, row | {"images": others}), sees=False)
        assert dataset.prompt_text(0) == "<image>?" and dataset.context(0).images == ()
    assert len(load(jsonl(folder, row | {"images": ["none.png"]}), columns={"images_key": None}, sees=False)) == 1


def test_images_need_a_chat_template(load: Load, folder: Path) -> None:
    told = r"rows.jsonl:1: the row has images under 'images', but data.chat_template is never; expected none"
    with pytest.raises(DataError, match=told):
        load(jsonl(folder, {"prompt": "?", "images": ["square.png"]}), chat_template="never")
    assert load(jsonl(folder, {"prompt": "hi"}), chat_template="never").context(0).images == ()


# Unusable rows.

FEW, MANY, NONE = ["square.png"], ["square.png"] * 3, list[str]()
MISMATCHES: dict[str, tuple[dict[str, Any], str]] = {
    "fewer images than marks": ({"prompt": "<image><image>", "images": FEW}, "1 images, but 2 places"),
    "more images than marks": ({"prompt": "<image>", "images": MANY}, "3 images, but 1 places"),
    "no images for a mark": ({"prompt": "<image>", "images": NONE}, "0 images, but 1 places"),
    "fewer images than parts": (
        {"prompt": [user({"type": "image"}, {"type": "image"})], "images": FEW},
        "1 images, but 2 places",
    ),
    "no images for a part": ({"prompt": [user({"type": "image"}, text("?"))]}, "a part of type 'image' has no image"),
    "images twice": (
        {"prompt": [user({"type": "image", "path": "square.png"})], "images": FEW},
        "1 images, but 0 place",
    ),
    "the template's placeholder as text": (
        {"prompt": "<image><|image_pad|>", "images": FEW},
        r"cannot be shown: a text has '<|image_pad|>', which the chat template writes for images".replace("|", r"\|"),
    ),
}


@pytest.mark.parametrize("case", MISMATCHES)
def test_another_number_of_images_than_places_is_refused_with_its_row(load: Load, folder: Path, case: str) -> None:
    row, said = MISMATCHES[case]
    path = jsonl(folder, {"prompt": "fine"}, row)
    with pytest.raises(DataError, match=rf"rows\.jsonl:2: the row .*{said}.*data\.on_bad_row=skip"):
        load(path)
    skipping = load(path, on_bad_row="skip")
    assert (len(skipping), skipping.dropped.num_bad) == (1, 1)


def cut(name: str) -> bytes:
    return FILES[name][: len(FILES[name]) // 2]


BROKEN: dict[str, tuple[Any, str]] = {
    "missing file": ("none.png", r"none\.png cannot be used as an image: No such file"),
    "no image": ("rows.jsonl", r"rows\.jsonl cannot be used as an image: cannot identify"),
    "cut off": ("cut.png", r"cut\.png cannot be used as an image: "),
    "URL": ("https://host/i.png", "nothing is downloaded"),
    "video file": ("clip.mp4", "'clip.mp4' is a video; expected the frames of a video as images"),
    "video in a URL": ("data:video/mp4;base64,AAAA", "is a video; expected the frames"),
    "null": ([None], "an image is of type NoneType"),
    "half a letter": ("\ud83d.png", "half of a surrogate pair"),
    "too narrow": ("narrow.png", "aspect ratio"),
    "own size": ({"path": "square.png", "max_pixels": 784}, "max_pixels 784 of its own; .* data.images"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_an_unusable_image_is_refused_with_its_row(load: Load, folder: Path, case: str) -> None:
    (folder / "cut.png").write_bytes(cut("square"))
    Image.new("RGB", (1, 300)).save(folder / "narrow.png")
    given, said = BROKEN[case]
    path = jsonl(folder, {"prompt": "fine"}, {"prompt": "?", "images": given})
    with pytest.raises(DataError, match=rf"rows\.jsonl:2: the row .*{said}.*data\.on_bad_row=skip"):
        load(path)
    skipping = load(path, on_bad_row="skip")
    assert [skipping[row].number for row in range(len(skipping))] == [1]
    assert skipping.dropped.bad == {"unusable value" if case == "half a letter" else "unusable images": 1}
    assert "rows.jsonl:2" in skipping.dropped.problems[0]


@pytest.mark.parametrize("part", [{"type": "video", "video": "clip.mp4"}, {"type": "video_url", "video_url": "x"}])
def test_videos_are_refused_with_the_cure(load: Load, folder: Path, part: dict[str, Any]) -> None:
    with pytest.raises(DataError, match=r"part of type 'video'; expected the frames of a video as images"):
        load(jsonl(folder, {"prompt": [user(part, text("?"))]}))
    of_verl = {"prompt": [{"role": "user", "content": "<video>?"}], "videos": ["clip.mp4"], "images": []}
    with pytest.raises(DataError, match=r"videos under 'videos'; expected the frames of a video as images"):
        load(jsonl(folder, of_verl))


@pytest.mark.parametrize("kind", ["jpg", "png", "webp", "gif", "bmp", "tiff"])
def test_files_that_were_cut_off_are_found(load: Load, folder: Path, kind: str) -> None:
    file = folder / f"i.{kind}"
    picture(120, 120).save(file)
    path = jsonl(folder, {"prompt": "?", "images": [file.name]})
    assert len(load(path)) == 1
    file.write_bytes(file.read_bytes()[: file.stat().st_size * 3 // 4])
    with pytest.raises(DataError, match=rf"i\.{kind} cannot be used as an image"):
        load(path)


def test_the_full_check_decodes_images(load: Load, folder: Path) -> None:
    damaged = bytearray(FILES["square"])
    damaged[len(damaged) // 2] ^= 255
    (folder / "damaged.png").write_bytes(damaged)
    path = jsonl(folder, {"prompt": "?", "images": ["damaged.png"]})
    assert len(load(path)) == 1
    with pytest.raises(DataError, match=r"damaged\.png cannot be used as an image"):
        load(path, images=schema.Images(check="full"))


# Lengths.


def test_prompts_with_too_many_tokens_of_images_are_left_out(load: Load, processor: Processor, folder: Path) -> None:
    row = {"prompt": "<image>or<image>?", "images": ["wide.png", "tall.png"]}
    num_tokens = len(expected_ids(processor, *TWO))
    for limit, kept in ((num_tokens - 1, 1), (num_tokens, 2)):
        dataset = load(jsonl(folder, {"prompt": "?"}, row), max_prompt_tokens=limit)
        assert (len(dataset), dataset.dropped.num_too_long) == (kept, 2 - kept)


@pytest.mark.parametrize("form", FORMS)
def test_the_bound_on_lengths_is_one(load: Load, folder: Path, form: str) -> None:
    dataset = load(jsonl(folder, FORMS[form]()))
    prompt, encoder = dataset[0].prompt, dataset.encoder
    assert len(dataset.context(0).ids) == encoder.num_tokens(prompt) <= encoder.length_bound(prompt) < 200


def test_rows_are_checked_by_the_ends_of_their_files(load: Load, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand rows take a second. Decoding their photos takes half a minute."""

    def refuse(*_: Any) -> None:
        raise AssertionError("an image was decoded, or its whole file read")

    picture(300, 400).save(folder / "photo.jpg")
    path = jsonl(folder, *({"prompt": f"<image>{number}", "images": ["photo.jpg"]} for number in range(10)))
    for name in ("decoded", "placed"):
        monkeypatch.setattr(ImageRules, name, refuse)
    dataset = load(path)
    assert len(dataset) == 10
    num_tokens = dataset.encoder.num_tokens(dataset[0].prompt)
    assert num_tokens < dataset.encoder.length_bound(dataset[0].prompt)
    assert len(load(path, max_prompt_tokens=num_tokens)) == 10


# Demonstrations and pairs.


def config(checkpoint: Path, path: Path, algorithm: str = "sft", **data: Any) -> schema.Config:
    columns = {"label_key": None, "response_key": data.pop("response_key", "response")}
    return schema.Config(
        algorithm=algorithm,
        model=schema.Model(path=str(checkpoint), vision=schema.VisionSettings()),
        data=schema.Data(train=schema.PromptFile(path=str(path), **columns), shuffle=False, **data),
        batch=schema.Batch(prompts_per_step=2),
        placement={"actor": 0} | ({"reference": 0} if algorithm == "dpo" else {}),
        steps=1,
    )


def test_demonstrations_have_keys_and_positions_of_images(checkpoint: Path, processor: Processor, folder: Path) -> None:
    conversation = [*(user({"type": "image", "path": "wide.png"}, text("a")), said("b"))]
    conversation += [user(text("c"), {"type": "image", "path": "tall.png"}), said("d")]
    path = jsonl(folder, {"prompt": conversation}, {"prompt": [user(text("e")), said("f")]})
    demonstrations = Demonstrations(config(checkpoint, path, response_key=None))
    experience = demonstrations.for_step(0)
    ids = expected_ids(
        processor,
        *(user(image("wide"), text("a")), said("b"), user(text("c"), image("tall")), said("d")),
        generation_prompt=False,
    )[:-1]
    first, last = experience.lengths.tolist()
    assert tuple(experience.tokens[:first].tolist()) == ids
    trained = experience.tokens[:first][experience.response_mask[:first]].tolist()
    assert str(demonstrations.train.encoder.tokenizer.decode(trained)) == "b<|im_end|>d<|im_end|>"
    rules = demonstrations.train.encoder.images
    assert rules is not None
    placed = [
        rules.placed(ImageSource(None, FILES[name]), begin)
        for name, (begin, _) in zip(("wide", "tall"), spans(ids), strict=True)
    ]
    expected = torch.zeros(first + last, dtype=torch.int64)
    for one in placed:
        expected[one.begin : one.begin + one.num_tokens(MERGE)] = one.key
    assert experience.image_keys.tolist() == expected.tolist()
    assert experience.rope_positions.dtype == torch.int32
    assert experience.rope_positions[:first].T.tolist() == rope_positions(first, placed, MERGE).tolist()
    assert experience.rope_positions[first:].tolist() == [[place] * 3 for place in range(last)]
    assert [source.read() for source in demonstrations.train.image_sources(0)] == [FILES["wide"], FILES["tall"]]


def test_runs_that_do_not_see_have_no_fields_of_images(checkpoint: Path, folder: Path) -> None:
    path = jsonl(folder, {"prompt": "a", "response": "b"}, {"prompt": "c", "response": "d"})
    blind = config(checkpoint, path)
    blind = blind.model_copy(update={"model": blind.model.model_copy(update={"vision": None})})
    experience = Demonstrations(blind).for_step(0)
    assert not experience.has("image_keys") and not experience.has("rope_positions")
    seeing = Demonstrations(config(checkpoint, path)).for_step(0)
    assert seeing.image_keys.tolist() == [0] * seeing.num_tokens
    assert seeing.tokens.tolist() == experience.tokens.tolist()


@pytest.mark.parametrize(("positions", "has_second"), [(200, True), (60, False)])
def test_cut_samples_have_whole_images(load: Load, folder: Path, positions: int, has_second: bool) -> None:
    conversation = [*(user({"type": "image", "path": "wide.png"}, text("a")), said("b"))]
    conversation += [user(text("c"), {"type": "image", "path": "tall.png"}), said("d")]
    dataset = load(
        jsonl(folder, {"prompt": conversation}),
        "response",
        ModelLimits(max_positions=positions),
        columns={"response_key": None},
        on_long_row="cut",
    )
    ((ids, learnt, images),) = dataset.samples(0)
    begin, end = images[1].begin, images[1].begin + images[1].num_tokens(MERGE)
    assert begin < 60 < end
    assert dataset.limit.kept(learnt, images) == (len(ids) if has_second else begin)
    assert dataset.dropped.num_cut == (not has_second)


def test_both_samples_of_a_pair_have_its_images(checkpoint: Path, folder: Path) -> None:
    apart = {"prompt": "<image>?", "images": ["square.png"], "chosen": "x", "rejected": "y"}
    question = {"role": "user", "content": "<image>?"}
    whole = {"chosen": [question, said("x")], "rejected": [question, said("y")], "images": ["square.png"]}
    pairs = Preferences(config(checkpoint, jsonl(folder, apart, whole), "dpo"))
    experience = pairs.for_step(0)
    assert experience.num_samples == 4 and len({*experience.lengths.tolist()}) == 1
    counts = [int((keys != 0).sum()) for keys in experience.image_keys.split(experience.lengths.tolist())]
    assert counts == [16] * 4
    assert len({*experience.image_keys.tolist()}) == 2, "text and one image"
    assert [len(pairs.train.image_sources(row)) for row in range(2)] == [1, 1]


def test_an_image_of_the_assistant_is_refused(load: Load, folder: Path) -> None:
    shows = {"role": "assistant", "content": [{"type": "image", "path": "square.png"}]}
    with pytest.raises(DataError, match="a message of the assistant has an image"):
        load(jsonl(folder, {"prompt": [user(text("draw")), shows]}), "response", columns={"response_key": None})


def test_a_placeholder_in_a_response_is_refused(load: Load, folder: Path) -> None:
    path = jsonl(folder, {"prompt": "a", "response": "<|image_pad|>"})
    with pytest.raises(DataError, match=r"rows\.jsonl:1: the row cannot be shown: a text has '<.image_pad.>'"):
        load(path, "response")


# The identity of a run's rows.


def test_the_content_of_images_decides_and_not_their_place(checkpoint: Path, load: Load, folder: Path) -> None:
    settings = config(checkpoint, folder / "rows.jsonl")

    def rows_of(given: str, prompt: str = "?") -> object:
        return identity(settings, load(jsonl(folder, {"prompt": prompt, "images": [given]})))["rows"]

    (folder / "moved").mkdir()
    (folder / "moved" / "other.png").write_bytes(FILES["square"])
    assert rows_of("square.png") == rows_of("moved/other.png") == rows_of(URLS["square"])
    assert rows_of("square.png") != rows_of("wide.png")
    assert rows_of("square.png") != rows_of("square.png", "!")


def test_images_of_a_row_are_paths_or_data_urls_and_none_without_a_tower(folder: Path, load: Load) -> None:
    row = {
        "images": [{"path": str(folder / "square.png"), "bytes": None}, {"path": None, "bytes": FILES["wide"]}],
        "prompt": [user({"type": "image"}, text("?"), {"type": "image"})],
    }
    first, second = (source.reference for source in load(table(folder, row)).image_sources(0))
    assert first == str(folder / "square.png") and base64.b64decode(second.partition(",")[2]) == FILES["wide"]
    assert load(jsonl(folder, {"prompt": [user(text("?"))]}), sees=False).image_sources(0) == ()


# Large files, and columns for reward functions.


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_rows_of_large_files_are_those_of_held_ones(
    checkpoint: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    names = [*SIZES, "square", "tall"]
    rows = [{"prompt": f"{number}<image>", "images": [f"{name}.png"]} for number, name in enumerate(names)]
    embedded = [row | {"images": [{"bytes": FILES[name], "path": None}]} for row, name in zip(rows, names, strict=True)]
    path = jsonl(folder, *rows, {"prompt": "<image>"}, {"prompt": "?", "images": ["none.png"]})
    path = table(folder, *embedded, {"prompt": "<image>", "images": []}) if kind == "parquet" else path
    monkeypatch.setattr("rltrain.data.prompts.INDEXED_BYTES", 0)
    store = JobStore(World(0, 1, 0, 1, torch.device("cpu"), dist.HashStore(), timeout_s=10))

    def read(indexes: IndexFolder | None, **data: Any) -> PromptDataset:
        file = schema.PromptFile(path=str(path), label_key=None)
        section = schema.Data(train=file, on_bad_row="skip", **data)
        return load_prompts(
            file, section, encoder_of(checkpoint, section), needs="label", config_key="data.train", indexes=indexes
        )

    indexed, held = read(IndexFolder(folder / "index", store)), read(None)
    assert isinstance(indexed.rows_of_sources[0], IndexedRows) and not isinstance(held.rows_of_sources[0], IndexedRows)
    assert [*indexed.rows] == [*held.rows] and indexed.dropped == held.dropped
    assert [indexed.context(row) for row in range(len(names))] == [held.context(row) for row in range(len(names))]
    read(IndexFolder(folder / "index", store), images=schema.Images(check="full"))
    read(IndexFolder(folder / "index", store), images=schema.Images(max_pixels=784))
    assert len([*(folder / "index").glob("*.index")]) == 3


def test_reward_functions_get_paths_and_data_urls(load: Load, folder: Path) -> None:
    def columns_of(path: Path) -> dict[str, Any]:
        file = schema.PromptFile(path=str(path), label_key=None)
        return read_columns(load(path), file, config_key="data.train", required={}, every=True)[0]

    square, reference = str(folder / "square.png"), ImageSource(None, FILES["wide"]).reference
    row = {"prompt": "<image><image>", "images": ["square.png", URLS["wide"]], "label": "7"}
    assert columns_of(jsonl(folder, row)) == row | {"images": [square, reference]}
    one = jsonl(folder, {"prompt": "?", "images": "square.png"}, {"prompt": "?", "images": None})
    assert columns_of(one)["images"] == [square]
    inside = {"type": "image", "text": None, "image": {"bytes": FILES["wide"], "path": None}}
    content = [inside, inside | text("?") | {"image": None}]
    columns = columns_of(table(folder, {"prompt": [user(*content)], "images": [FILES["square"]] * 0, "n": 1}))
    assert columns == {"prompt": [user(inside | {"image": reference}, content[1])], "images": [], "n": 1}
    asked = load(jsonl(folder, row))
    messages = json.loads(json.dumps(with_references(asked[0].prompt)))
    assert messages == [user({"type": "image", "image": square}, {"type": "image", "image": reference})]
    assert [source.read() for source in images_of(messages)] == [FILES["square"], FILES["wide"]]


def test_large_rows_of_tables_are_read_a_few_at_a_time(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"prompt": str(number), "images": [FILES["tall"]]} for number in range(20)]
    path = table(folder, *rows)
    sizes = list[int]()

    def counted(batch: Any) -> list[Any]:
        sizes.append(batch.num_rows)
        return rows_of_table(batch)

    monkeypatch.setattr("rltrain.data.rows.rows_of_table", counted)
    monkeypatch.setattr("rltrain.data.rows.BATCH_BYTES", 5 * len(FILES["tall"]))
    arrow = folder / "rows.arrow"
    with pyarrow.OSFile(str(arrow), "wb") as file, pyarrow.ipc.new_file(file, parquet.read_schema(path)) as writer:
        writer.write_table(parquet.read_table(path))
    for one in (path, arrow):
        sizes.clear()
        assert [values for _, values in read_rows(one, None, "data.train.path")] == rows
        assert sum(sizes) == 20 and max(sizes) < 6
