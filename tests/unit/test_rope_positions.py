"""Positions of tokens in sequences with images, compared with transformers and with written numbers."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLModel
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5Model
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLModel

from rltrain.models.rope_positions import rope_delta, rope_positions
from rltrain.models.vision import PlacedImage

SIDES = st.integers(1, 5)
PARTS = st.lists(st.tuples(st.integers(1, 6), SIDES, SIDES), max_size=4)
"""Images, each with the number of text tokens before it and its height and width in tokens."""


def of_transformers(model: type[Any], image_tokens: list[int], images: list[PlacedImage], merge: int) -> Any:
    """Returns the positions and the delta of a sequence. `image_tokens` has a 1 for every token of an image."""
    sizes = SimpleNamespace(spatial_merge_size=merge, tokens_per_second=4)
    holder = SimpleNamespace(config=SimpleNamespace(vision_config=sizes))
    holder.get_vision_position_ids = partial(model.get_vision_position_ids, holder)
    kinds = torch.tensor([image_tokens], dtype=torch.int)
    grids = torch.tensor([image.grid for image in images]) if images else None
    positions, delta = model.get_rope_index(holder, torch.zeros_like(kinds, dtype=torch.long), kinds, grids)
    return positions[:, 0].numpy(), int(delta[0, 0])


@pytest.mark.parametrize("model", [Qwen2_5_VLModel, Qwen3VLModel, Qwen3_5Model])
@given(parts=PARTS, num_last=st.integers(0, 5), merge=st.integers(1, 3))
def test_positions_are_those_of_transformers(
    model: type[Any], parts: list[tuple[int, int, int]], num_last: int, merge: int
) -> None:
    images, kinds = [], []
    for num_text, height, width in parts:
        kinds += [0] * num_text
        image = PlacedImage(len(kinds), key=1, grid=(1, height * merge, width * merge))
        images.append(image)
        kinds += [1] * image.num_tokens(merge)
    kinds += [0] * num_last
    if not kinds:
        return
    expected, delta = of_transformers(model, kinds, images, merge)
    assert np.array_equal(rope_positions(len(kinds), images, merge), expected)
    assert rope_delta(images, merge) == delta


def test_touching_images_stay_separate() -> None:
    images = [PlacedImage(1, 5, (1, 4, 4)), PlacedImage(5, 5, (1, 2, 4))]
    assert rope_positions(8, images, 2).tolist() == [
        [0, 1, 1, 1, 1, 3, 3, 5],
        [0, 1, 1, 2, 2, 3, 3, 5],
        [0, 1, 2, 1, 2, 3, 4, 5],
    ]
    assert rope_delta(images, 2) == -2


def test_frames_have_positions_in_time() -> None:
    film = PlacedImage(0, 5, (2, 2, 2))
    assert rope_positions(3, [film], 2).tolist() == [[0, 1, 1], [0, 0, 1], [0, 0, 1]]


def test_text_alone_counts_its_tokens() -> None:
    assert rope_positions(3, [], 2).tolist() == [[0, 1, 2]] * 3
    assert rope_positions(0, [], 2).shape == (3, 0)
    assert rope_delta([], 2) == 0


@pytest.mark.parametrize("begins", [(0, 3), (2, 0), (0, 6)])
def test_images_in_wrong_places_are_refused(begins: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="expected a place from"):
        rope_positions(8, [PlacedImage(begin, 1, (1, 4, 4)) for begin in begins], 2)
