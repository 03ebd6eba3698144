"""Rows with images for tests: pictures, files of rows, and the ids that transformers gives them."""

import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
from PIL import Image
from pyarrow import parquet
from transformers import Qwen2_5_VLProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from rltrain.config import schema
from rltrain.data.images import ImageRules, png_of
from rltrain.data.prompts import Needs, PromptDataset, load_prompts
from rltrain.data.tokenizer import UNKNOWN_MODEL, ModelLimits, PromptEncoder, load_tokenizer
from tests.support.vision_checkpoints import IMAGE_TOKEN, VISION_END, VISION_START, write_checkpoint


class Processor(Qwen2_5_VLProcessor):
    """transformers' processor without its video processor, which needs torchvision."""

    def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> None:
        pass


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    write_checkpoint(folder, "qwen2_5_vl")
    return folder


@pytest.fixture(scope="module")
def processor(checkpoint: Path) -> Processor:
    tokenizer = load_tokenizer(checkpoint)
    images = Qwen2VLImageProcessorPil.from_pretrained(checkpoint)
    return Processor(images, tokenizer, None, chat_template=tokenizer.chat_template)


def encoder_of(checkpoint: Path, data: schema.Data, *, sees: bool = True) -> PromptEncoder:
    images = ImageRules.read(checkpoint, data.images) if sees else None
    return PromptEncoder(load_tokenizer(checkpoint), data, images=images)


Load = Callable[..., PromptDataset]


@pytest.fixture
def load(checkpoint: Path) -> Load:
    def loaded(
        path: Path,
        needs: Needs = "label",
        model: ModelLimits = UNKNOWN_MODEL,
        columns: dict[str, Any] | None = None,
        sees: bool = True,
        **keys: Any,
    ) -> PromptDataset:
        file = schema.PromptFile(path=str(path), **{"label_key": None, **(columns or {})})
        data = schema.Data(train=file, **keys)
        encoder = encoder_of(checkpoint, data, sees=sees)
        return load_prompts(file, data, encoder, needs=needs, config_key="data.train", model=model)

    return loaded


def picture(height: int, width: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(height * 1000 + width).integers(0, 256, (height, width, 3), np.uint8))


SIZES = {"square": (56, 56), "wide": (30, 100), "tall": (90, 60)}
PICTURES = {name: picture(*size) for name, size in SIZES.items()}
FILES = {name: png_of(image) for name, image in PICTURES.items()}
URLS = {name: f"data:image/png;base64,{base64.b64encode(data).decode()}" for name, data in FILES.items()}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Returns a folder with the pictures as files."""
    for name, data in FILES.items():
        (tmp_path / f"{name}.png").write_bytes(data)
    return tmp_path


def jsonl(folder: Path, *rows: object) -> Path:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def table(folder: Path, *rows: dict[str, Any]) -> Path:
    path = folder / "rows.parquet"
    parquet.write_table(pyarrow.Table.from_pylist([*rows]), path)
    return path


def user(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "content": [*parts]}


def said(content: str) -> dict[str, Any]:
    return {"role": "assistant", "content": content}


def text(said: str) -> dict[str, Any]:
    return {"type": "text", "text": said}


def expected_ids(processor: Processor, *messages: dict[str, Any], generation_prompt: bool = True) -> tuple[int, ...]:
    """Returns transformers' ids of messages. Parts of type image name one of PICTURES."""
    shown = [
        {**message, "content": [{**part, **_picture(part)} for part in message["content"]]}
        if isinstance(message["content"], list)
        else message
        for message in messages
    ]
    found = processor.apply_chat_template(
        shown, tokenize=True, add_generation_prompt=generation_prompt, return_dict=True
    )
    return tuple(found["input_ids"][0])


def _picture(part: dict[str, Any]) -> dict[str, Any]:
    return {"image": PICTURES[part["image"]]} if part["type"] == "image" else {}


def image(name: str) -> dict[str, Any]:
    return {"type": "image", "image": name}


def spans(ids: tuple[int, ...]) -> list[tuple[int, int]]:
    """Returns begin and number of tokens of each image in ids. The template has marks around images."""
    begins = [place + 1 for place, token in enumerate(ids) if token == VISION_START]
    ends = [place for place, token in enumerate(ids) if token == VISION_END]
    assert all(set(ids[begin:end]) == {IMAGE_TOKEN} for begin, end in zip(begins, ends, strict=True))
    return [(begin, end - begin) for begin, end in zip(begins, ends, strict=True)]
