"""Positions of tokens for rotary embeddings of sequences with images (Wang et al. 2024, "Qwen2-VL", section 2.1).

transformers finds images by runs of placeholder ids, and so joins images without a token between them. Here every image
has a place, and placeholder ids elsewhere are text.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from rltrain.models.vision import PlacedImage


def rope_positions(num_tokens: int, images: Sequence[PlacedImage], merge: int) -> NDArray[np.int32]:
    """Returns frame, row and column of each token, shape [3, num_tokens].

    Text advances all three by one a token. An image at position s has frames from s, rows from s and columns from s.
    The text after it continues at s plus the larger of its height and width in tokens. `images` are in order, and
    `merge` is the height and width of a token in patches. Raises ValueError if images overlap or reach beyond the end.
    """
    positions = np.empty((3, num_tokens), np.int32)
    place = position = 0
    for image in images:
        end = image.begin + image.num_tokens(merge)
        if image.begin < place or end > num_tokens:
            raise ValueError(
                f"an image is at tokens {image.begin} to {end - 1}; expected a place from {place} to {num_tokens - 1}"
            )
        num_text = image.begin - place
        positions[:, place : image.begin] = position + np.arange(num_text)
        positions[:, image.begin : end] = position + num_text + np.indices(_in_tokens(image, merge)).reshape(3, -1)
        position += num_text + _advance(image, merge)
        place = end
    positions[:, place:] = position + np.arange(num_tokens - place)
    return positions


def image_fields(
    num_tokens: int, images: Sequence[PlacedImage], merge: int
) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """Returns the fields `image_keys` [num_tokens] and `rope_positions` [num_tokens, 3] of an Experience.

    Raises ValueError as `rope_positions` does.
    """
    keys = np.zeros(num_tokens, np.int64)
    for image in images:
        keys[image.begin : image.begin + image.num_tokens(merge)] = image.key
    return keys, rope_positions(num_tokens, images, merge).T


def rope_delta(images: Sequence[PlacedImage], merge: int) -> int:
    """Returns the difference between position and place for the text after the last image. It is at most 0 for still
    images."""
    return sum(_advance(image, merge) - image.num_tokens(merge) for image in images)


def _in_tokens(image: PlacedImage, merge: int) -> tuple[int, int, int]:
    frames, height, width = image.grid
    return frames, height // merge, width // merge


def _advance(image: PlacedImage, merge: int) -> int:
    return max(_in_tokens(image, merge)[1:])
