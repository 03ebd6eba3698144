"""Images of observations, as data URLs of PNG files.

numpy and Pillow are imported on demand, so that workers of other environments start sooner.
"""

import base64
import io
from collections.abc import Mapping
from typing import Any

from rltrain.errors import DataError

COMPRESSION = 1
"""Pillow's level with the least work that still compresses."""


def is_image(value: Any) -> bool:
    """Returns whether the value is an array, a tensor or an image of Pillow."""
    is_array = hasattr(value, "dtype") and hasattr(value, "shape")
    return is_array or (hasattr(value, "getbands") and hasattr(value, "convert"))


def image_url(value: Any) -> str:
    """Returns a data URL of the image. Raises DataError unless `value` is an image of Pillow, or a uint8 array of shape
    [height, width] or [height, width, 3]."""
    file = io.BytesIO()
    image = value if hasattr(value, "getbands") else _image_of(value)
    image.convert("RGB").save(file, "PNG", compress_level=COMPRESSION)
    return url_of_bytes(file.getvalue(), "png")


def url_of_bytes(encoded: bytes, kind: str = "*") -> str:
    """Returns a data URL of an encoded image."""
    return f"data:image/{kind};base64,{base64.b64encode(encoded).decode()}"


def _image_of(array: Any) -> Any:
    import numpy as np
    from PIL import Image

    pixels = np.asarray(array.cpu() if hasattr(array, "cpu") else array)  # simulators on a GPU return tensors
    if pixels.dtype != np.uint8 or pixels.ndim not in (2, 3) or pixels.shape[2:] not in ((), (3,)) or not pixels.size:
        raise DataError(
            f"an image is an array of {pixels.dtype} with shape {[*pixels.shape]}; expected uint8 of [height, width] "
            "or [height, width, 3], with at least one pixel"
        )
    return Image.fromarray(np.ascontiguousarray(pixels))


def with_urls(message: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the message with data URLs for the images and bytes in its parts. Raises DataError like `image_url`."""
    content = message.get("content")
    return {**message, "content": _encoded(content)} if isinstance(content, list | tuple) else dict(message)


def _encoded(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _encoded(held) for name, held in value.items()}
    if isinstance(value, list | tuple):
        return [_encoded(held) for held in value]
    if isinstance(value, bytes | bytearray):
        return url_of_bytes(bytes(value))
    return image_url(value) if is_image(value) else value
