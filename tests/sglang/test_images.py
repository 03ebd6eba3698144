"""Images with token ids on a real SGLang server: tokens and log-probs are those of transformers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from rltrain.models.vision import PlacedImage, Tower
from rltrain.rollout.sample import Sample
from rltrain.rollout.servers.server_images import ServerImages
from rltrain.rollout.servers.sglang_process import Server
from rltrain.runtime.image_files import ImageStore
from tests.sglang.servers import FROM_DISK, call
from tests.support.vision_checkpoints import (
    IMAGE_TOKEN,
    VISION_END,
    VISION_START,
    load_model,
    model_inputs,
    tiny_vision,
    write_checkpoint,
)

TOLERANCE = 1e-4
NUM_TOKENS = 8
SEED = 2
"""The seed of the checkpoints. Their greedy tokens are no placeholders, so transformers takes them."""
PATCH = 14
"""Height and width of a patch in pixels. SGLang supports no other for this family."""


class Shown(NamedTuple):
    """An image in a sequence, by its key."""

    key: int


def image(seed: int, height: int, width: int) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, (1, height, width, 3), np.uint8)


def continued(folder: Path, sample: Sample, images: list[NDArray[np.uint8]]) -> tuple[list[int], list[float]]:
    """Returns the greedy tokens of transformers and their log-probs."""
    model, ids, logprobs = load_model(folder), [*sample.context], list[float]()
    for _ in range(NUM_TOKENS):
        with torch.no_grad():
            last = model(**model_inputs(folder, ids, images)).logits[0, -1].log_softmax(-1)
        ids.append(int(last.argmax()))
        logprobs.append(float(last.max()))
    return ids[-NUM_TOKENS:], logprobs


@pytest.mark.parametrize("kind", ["qwen2_5_vl"])
def test_tokens_and_logprobs_are_those_of_transformers(
    kind: Tower, start_server: Callable[..., Server], tmp_path: Path
) -> None:
    """One sample has an image twice, and one has no image."""
    write_checkpoint(tmp_path, kind, seed=SEED, patch=PATCH)
    merge, store = tiny_vision(kind).merge, ImageStore(tmp_path, 0, keep_steps=1, cache_bytes=1e9)
    pixels = {7: image(7, 56, 56), 8: image(8, 84, 56)}
    for key, values in pixels.items():
        store.put(key, values, 0)

    def sample(number: int, *parts: int | Shown) -> tuple[Sample, list[NDArray[np.uint8]]]:
        """Returns a sample with the tokens and images of `parts`, and the pixels of its images."""
        ids, placed = list[int](), list[PlacedImage]()
        for part in parts:
            if isinstance(part, int):
                ids.append(part)
                continue
            _, height, width, _ = pixels[part.key].shape
            placed.append(PlacedImage(len(ids) + 1, part.key, (1, height // PATCH, width // PATCH)))
            ids += [VISION_START, *[IMAGE_TOKEN] * placed[-1].num_tokens(merge), VISION_END]
        return Sample(number, tuple(ids), seed=0, images=tuple(placed)), [pixels[one.key] for one in placed]

    small, tall = Shown(7), Shown(8)
    samples = [sample(0, 40, small, 41, 42), sample(1, 43, tall, small, 44, tall, 45), sample(2, 47, 48)]
    server = start_server(tmp_path, needs_tokenizer=True, args=FROM_DISK)
    body: dict[str, Any] = {
        **ServerImages(store, merge).fields([one for one, _ in samples]),
        "sampling_params": {"temperature": 0.0, "max_new_tokens": NUM_TOKENS, "ignore_eos": True},
        "return_logprob": True,
    }
    answers = call(server, "/generate", body)
    for (one, images), answer in zip(samples, answers, strict=True):
        tokens, logprobs = continued(tmp_path, one, images)
        assert answer["meta_info"]["prompt_tokens"] == len(one.context)
        found = [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]]
        assert answer["output_ids"] == tokens
        assert found == pytest.approx(logprobs, abs=TOLERANCE)
