"""Pixels of the images of experience, on their way to another node and in checkpoints."""

from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from rltrain.data.experience import Experience
from rltrain.errors import ExchangeError
from rltrain.runtime.image_files import ImageMissing, ImageStore, Pixels

ROW = 4
"""Numbers per image in an answer: its key and shape. The first number of an answer is the number of images. Pixels
follow."""
NUMBER_BYTES = 8


def keys_of(experience: Experience) -> list[int]:
    """Returns the keys of the images of all samples, each once. There are none without the field `image_keys`."""
    if not experience.has("image_keys"):
        return []
    keys: list[int] = experience.image_keys.unique().tolist()
    return [key for key in keys if key]


# A request for missing images, and the answer.


def asked(message: Tensor) -> list[int]:
    """Returns the keys in a request, the bytes of an int64 tensor."""
    keys: list[int] = message.numpy().view(np.int64).tolist()
    return keys


def encode_images(store: ImageStore, keys: Sequence[int]) -> list[Tensor]:
    """Returns the parts of an answer. Pixels stay in their files. Raises ExchangeError if the store lacks an image."""
    try:
        images = [store.pixels(key) for key in keys]
    except ImageMissing as error:
        raise ExchangeError(
            f"another node needs the images {error.keys}, but this one has removed them. Please report this bug of "
            "rltrain"
        ) from None
    rows = [number for key, pixels in zip(keys, images, strict=True) for number in (key, *pixels.shape[:3])]
    return [torch.tensor([len(keys), *rows]), *map(torch.from_numpy, images)]


def decode_images(message: Tensor) -> Iterator[tuple[int, Pixels]]:
    """Yields the keys and pixels of an answer. Raises ExchangeError if it is damaged."""
    content: np.ndarray = message.numpy()
    numbers = content[: len(content) // NUMBER_BYTES * NUMBER_BYTES].view(np.int64)
    num_images = int(numbers[0]) if len(numbers) else -1
    rows = numbers[1 : 1 + ROW * num_images].reshape(-1, ROW).tolist() if 0 <= num_images <= len(numbers) // ROW else []
    sizes = [3 * frames * height * width for _, frames, height, width in rows]
    begin = NUMBER_BYTES * (1 + ROW * num_images)
    if len(rows) != num_images or len(content) != begin + sum(sizes):
        raise ExchangeError(
            f"{len(content)} bytes with {num_images} images arrived; expected {begin + sum(sizes)} bytes. They were "
            "damaged in transit, or ranks run different versions of rltrain"
        )
    for (key, *shape), size in zip(rows, sizes, strict=True):
        pixels: Pixels = content[begin : begin + size].reshape(*shape, 3)
        begin += size
        yield key, pixels


# Pixels in checkpoints, for images that are not those of rows.

PIXELS = "image/"
"""The beginning of the names of tensors. The key follows."""


def image_tensors(store: ImageStore, keys: Iterable[int]) -> dict[str, Tensor]:
    """Returns the pixels of images by name, uint8 of shape [frames, height, width, 3]."""
    return {f"{PIXELS}{key}": torch.from_numpy(store.pixels(key)) for key in keys}


def put_images(store: ImageStore | None, tensors: Mapping[str, Tensor], step: int) -> dict[str, Tensor]:
    """Puts the images among `tensors` into the store, for a task of `step`. Returns the other tensors."""
    for name in tensors:
        if store is not None and name.startswith(PIXELS):
            store.put(int(name.removeprefix(PIXELS)), tensors[name].numpy(), step)
    return {name: tensor for name, tensor in tensors.items() if not name.startswith(PIXELS)}
