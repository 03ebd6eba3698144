"""Images of prompts and observations: their sources, sizes, pixels, and places among token ids."""

import base64
import binascii
import hashlib
import io
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import ExifTags, Image

from rltrain.config import schema
from rltrain.errors import CheckpointError, ConfigError, DataError, named_by
from rltrain.models.vision import PlacedImage
from rltrain.runtime.image_files import FORMATS
from rltrain.runtime.json_text import read_json

# The source of an image: a file, or its bytes.

FILE_URL, DATA_URL = "file://", "data:"
IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".ppm")
VIDEO_SUFFIXES = (".mp4", ".m4v", ".mov", ".mkv", ".webm", ".avi", ".mpg", ".mpeg", ".wmv", ".flv")
VIDEO_CURE = "expected the frames of a video as images"
HOLDERS = ("bytes", "path", "image", "image_url", "url", "base64")
"""The keys of an object that may have its image, the preferred one first."""
OWN_SIZES = ("min_pixels", "max_pixels", "resized_height", "resized_width")
"""Keys of an object for a size that other libraries give to this one image."""
SHOWN_CHARS = 80


class ImageSource(NamedTuple):
    """An encoded image, as the path of a file or as bytes. Exactly one of them is set."""

    path: str | None
    data: bytes | None

    def read(self) -> bytes:
        """Returns the bytes of the encoded image. Raises DataError if the file cannot be read."""
        if self.data is not None:
            return self.data
        with _explained(self):
            return Path(self.path or "").read_bytes()

    @property
    def reference(self) -> str:
        """Returns the path of the file, or the bytes as a data URL."""
        if self.path is not None:
            return self.path
        return f"{DATA_URL}image/*;base64,{base64.b64encode(self.data or b'').decode()}"

    def __str__(self) -> str:
        return self.path if self.path is not None else f"an image of {len(self.data or b'')} bytes"


def source_of(value: Any, folder: Path = Path()) -> ImageSource:
    """Returns the source of an image in a row, a message or an observation.

    `value` is a path, a data URL, bytes, an object with one of them under a key of HOLDERS, a PIL image, or an array
    uint8 of shape [height, width] or [height, width, 3]. Relative paths are below `folder`. Raises DataError for other
    values, for URLs of the network and for videos.
    """
    if isinstance(value, Mapping):
        return _source_in(value, folder)
    if isinstance(value, ImageSource):
        return value
    if isinstance(value, str):
        return _source_of_text(value, folder)
    if isinstance(value, bytes | bytearray | memoryview):
        return ImageSource(None, bytes(value))
    if isinstance(value, np.ndarray):
        value = _image_of(value)
    if isinstance(value, Image.Image):
        return ImageSource(None, png_of(value))
    raise DataError(
        f"an image is of type {type(value).__name__}; expected a path, a data URL, bytes, an object with bytes or "
        "path, a PIL image or an array"
    )


def _source_in(value: Mapping[str, Any], folder: Path) -> ImageSource:
    if size := next((name for name in OWN_SIZES if value.get(name) is not None), None):
        raise DataError(
            f"an image has {size} {value[size]!r} of its own; expected none, as all images have the limits of "
            "data.images"
        )
    for name in HOLDERS:
        if is_given(held := value.get(name)):
            is_base64 = name == "base64" and isinstance(held, str) and not held.startswith(DATA_URL)
            return source_of(f"{DATA_URL}image/png;base64,{held}" if is_base64 else held, folder)
    raise DataError(
        f"an image is an object with the keys {', '.join(map(repr, value)) or 'none'}; expected bytes or path"
    )


def is_given(value: Any) -> bool:
    """Returns whether a value is more than null. Objects of Parquet files may have null in all of their fields."""
    return any(part is not None for part in value.values()) if isinstance(value, Mapping) else value is not None


def looks_like_an_image(value: Any) -> bool:
    """Returns whether a value of a row is an image by its form alone. Nothing is read."""
    if isinstance(value, Mapping):
        return any(looks_like_an_image(value.get(name)) for name in HOLDERS)
    if isinstance(value, str):
        return value.startswith(f"{DATA_URL}image/") or value.lower().endswith(IMAGE_SUFFIXES)
    return isinstance(value, bytes)


def _source_of_text(text: str, folder: Path) -> ImageSource:
    if text.startswith(f"{DATA_URL}video/") or text.lower().endswith(VIDEO_SUFFIXES):
        raise DataError(f"{text[:SHOWN_CHARS]!r} is a video; {VIDEO_CURE}")
    if text.startswith(DATA_URL):
        return ImageSource(None, _decoded_url(text))
    path = text.removeprefix(FILE_URL)
    if "://" in path or not path:
        raise DataError(
            f"an image is at {path[:SHOWN_CHARS]!r}; expected a path or a data URL, as nothing is downloaded"
        )
    return ImageSource(str(folder / path), None)


def _decoded_url(url: str) -> bytes:
    head, comma, text = url.partition(",")
    try:
        if comma and head.endswith(";base64"):
            return base64.b64decode(text, validate=True)
    except binascii.Error:
        pass
    raise DataError(f"an image is the URL {url[:SHOWN_CHARS]!r}; expected data:image/...;base64, and base64 text")


def _image_of(array: NDArray[Any]) -> Image.Image:
    if array.dtype != np.uint8 or array.ndim not in (2, 3) or (array.ndim == 3 and array.shape[2] != 3):
        raise DataError(
            f"an image is an array of {array.dtype} with shape {[*array.shape]}; expected uint8 of [height, width] or "
            "[height, width, 3]"
        )
    return Image.fromarray(np.ascontiguousarray(array))


def png_of(image: Image.Image) -> bytes:
    """Returns the image as a PNG file, with the least compression."""
    file = io.BytesIO()
    image.save(file, "PNG", compress_level=1)
    return file.getvalue()


# Decoding, as in transformers: turned by the EXIF orientation, the first frame, RGB.

TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""The operation for each value of the EXIF orientation."""
SWAPPED = (5, 6, 7, 8)
"""Orientations with height and width exchanged."""


@contextmanager
def _opened(source: ImageSource) -> Iterator[Image.Image]:
    """Opens the image without decoding it. Raises DataError, also for errors of Pillow in the block."""
    with _explained(source):
        file = Path(source.path) if source.path is not None else io.BytesIO(source.data or b"")
        with Image.open(file, formats=FORMATS) as image:
            yield image


@contextmanager
def _explained(source: ImageSource) -> Iterator[None]:
    try:
        yield
    except DataError:
        raise
    except Exception as error:  # Pillow's decoders raise errors of many kinds for damaged files
        what = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise DataError(f"{source} cannot be used as an image: {what}") from None


def _orientation(image: Image.Image) -> int:
    """Returns the EXIF orientation in the header. Pillow's own method for PNG decodes the whole image."""
    return int(Image.Image.getexif(image).get(ExifTags.Base.Orientation, 1))


def _size(image: Image.Image) -> tuple[int, int]:
    height, width = image.height, image.width
    return (width, height) if _orientation(image) in SWAPPED else (height, width)


# Small copies for users.

THUMBNAIL_PIXELS = 96
"""The largest height and width of a small copy."""


def thumbnail(source: ImageSource) -> str:
    """Returns a small copy of the image as a data URL of a JPEG file. Raises DataError."""
    with _opened(source) as image:
        return _small_copy(image)


def thumbnail_of_pixels(pixels: NDArray[np.uint8]) -> str:
    """Returns a small copy of the first frame of pixels [frames, height, width, 3], like `thumbnail`."""
    return _small_copy(Image.fromarray(pixels[0]))


def _small_copy(image: Image.Image) -> str:
    file = io.BytesIO()
    small = image.convert("RGB")
    small.thumbnail((THUMBNAIL_PIXELS, THUMBNAIL_PIXELS))
    small.save(file, "JPEG", quality=70)
    return f"{DATA_URL}image/jpeg;base64,{base64.b64encode(file.getvalue()).decode()}"


# The ends of files, which show most files that were cut off.

TAIL_BYTES = 4096
ENDS = {b"\x89PNG": b"IEND", b"\xff\xd8": b"\xff\xd9"}
"""By the beginning of a file: what its last bytes contain."""


def _has_its_end(source: ImageSource) -> bool:
    """Returns whether the file has the end mark of its format. Formats without such a mark have none."""
    with _explained(source), Path(source.path).open("rb") if source.path else io.BytesIO(source.read()) as file:
        head = file.read(16)
        num_bytes = file.seek(0, io.SEEK_END)
        file.seek(max(0, num_bytes - TAIL_BYTES))
        tail = file.read()
    if head[:4] == b"RIFF":
        return int.from_bytes(head[4:8], "little") + 8 <= num_bytes
    return any(head.startswith(begin) and end in tail for begin, end in ENDS.items())


# Places of images among token ids.


class Context(NamedTuple):
    """Token ids with the images at their placeholders. `images` and `sources` have the same order."""

    ids: tuple[int, ...]
    images: tuple[PlacedImage, ...] = ()
    sources: tuple[ImageSource, ...] = ()

    def images_from(self, begin: int) -> tuple[PlacedImage, ...]:
        """Returns the images with places in a sequence that has these ids from `begin` on."""
        return tuple(image._replace(begin=begin + image.begin) for image in self.images)

    def shortened(self, merge: int) -> list[int]:
        """Returns the ids with one placeholder for each image. `merge` is the height and width of a token in
        patches."""
        ids, begin = list[int](), 0
        for image in self.images:
            ids += self.ids[begin : image.begin + 1]
            begin = image.begin + image.num_tokens(merge)
        return [*ids, *self.ids[begin:]]


@dataclass(frozen=True)
class ImageRules:
    """The conversion of images to pixels and tokens, by the checkpoint's image processor and section data.images.

    `patch` and `temporal_patch` are the sizes of a patch in pixels and frames. `merge` is the height and width of a
    token in patches. `resample` is Pillow's number of the method of resizing. `mean` and `std` normalise the colours
    red, green and blue. `image_token` is the id of the placeholder for a token of an image.
    """

    patch: int
    temporal_patch: int
    merge: int
    min_pixels: int
    max_pixels: int
    resample: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    image_token: int

    @classmethod
    def read(cls, folder: Path, settings: schema.Images, config_key: str = "model.path") -> "ImageRules":
        """Returns the rules of a checkpoint. Raises CheckpointError if it has no image processor of a supported kind,
        and ConfigError if the limits of `settings` contradict each other."""
        processor = _processor(folder, config_key)
        smallest, largest = processor.size["shortest_edge"], processor.size["longest_edge"]
        found = cls(
            patch=processor.patch_size,
            temporal_patch=processor.temporal_patch_size,
            merge=processor.merge_size,
            min_pixels=smallest if settings.min_pixels is None else settings.min_pixels,
            max_pixels=largest if settings.max_pixels is None else settings.max_pixels,
            resample=int(processor.resample),
            mean=tuple(processor.image_mean),
            std=tuple(processor.image_std),
            image_token=_image_token(folder / "config.json", config_key),
        )
        if found.min_pixels > found.max_pixels:
            raise ConfigError(
                f"data.images: min_pixels is {found.min_pixels} and max_pixels {found.max_pixels}; expected max_pixels "
                "to be at least min_pixels. A missing one is that of the checkpoint"
            )
        return found

    @classmethod
    def of(cls, config: schema.Config) -> "ImageRules | None":
        """Returns the rules of a run, or None without model.vision. Raises errors like `read`."""
        return None if config.model.vision is None else cls.read(Path(config.model.path), config.data.images)

    def check(self, source: ImageSource, *, fully: bool) -> None:
        """Raises DataError if the image cannot be used.

        The whole image is decoded if `fully` is True, or if its file lacks the end mark of its format. Otherwise only
        the beginning and the end of the file are read.
        """
        if fully or not _has_its_end(source):
            self.decoded(source)
        self.size(source)

    def size(self, source: ImageSource) -> tuple[int, int]:
        """Returns (height, width) in pixels after resizing. It reads the header alone. Raises DataError."""
        with _opened(source) as image:
            return self._resized(image)

    def num_tokens(self, source: ImageSource) -> int:
        """Returns the number of tokens of the image. It reads the header alone. Raises DataError."""
        height, width = self.size(source)
        return height * width // (self.patch * self.merge) ** 2

    def placed(self, source: ImageSource, begin: int) -> PlacedImage:
        """Returns the image at token `begin`, with its key and its grid in patches. Raises DataError.

        The key has 63 bits, from the encoded image and its size after resizing.
        """
        source = ImageSource(None, source.read()) if source.data is None else source
        height, width = self.size(source)
        digest = hashlib.blake2b(struct.pack("<qq", height, width), digest_size=8)
        digest.update(source.data or b"")
        key = int.from_bytes(digest.digest(), "little") >> 1
        return PlacedImage(begin, key or 1, (1, height // self.patch, width // self.patch))

    def decoded(self, source: ImageSource) -> NDArray[np.uint8]:
        """Returns the pixels after resizing, in RGB, shape [1, height, width, 3]. Raises DataError."""
        with _opened(source) as image:
            height, width = self._resized(image)
            turn = TURNS.get(_orientation(image))
            whole = (image if turn is None else image.transpose(turn)).convert("RGB")
            return np.asarray(whole.resize((width, height), Image.Resampling(self.resample)))[None]

    def place(self, ids: Sequence[int], images: Sequence[ImageSource]) -> Context:
        """Returns the ids with each placeholder repeated for the tokens of its image, in order.

        Raises DataError if an image cannot be read, if the numbers of placeholders and images differ, or if a
        placeholder is the last id.
        """
        self._require_places(ids, images)
        expanded, placed, remaining = list[int](), list[PlacedImage](), iter(images)
        for token in ids:
            if token != self.image_token:
                expanded.append(token)
                continue
            image = self.placed(next(remaining), len(expanded))
            placed.append(image)
            expanded += [token] * image.num_tokens(self.merge)
        return Context(tuple(expanded), tuple(placed), tuple(images))

    def num_placed(self, ids: Sequence[int], images: Sequence[ImageSource]) -> int:
        """Returns the number of ids of `place`. It reads headers alone. Raises DataError like `place`."""
        self._require_places(ids, images)
        return len(ids) + sum(self.num_tokens(image) - 1 for image in images)

    def _require_places(self, ids: Sequence[int], images: Sequence[ImageSource]) -> None:
        num_places = sum(token == self.image_token for token in ids)
        if num_places != len(images):
            raise DataError(
                f"{len(images)} images, but {num_places} places for images; expected as many of both: a chat template "
                "that writes one place for each image, and no such placeholder in texts"
            )
        if num_places and ids[-1] == self.image_token:
            raise DataError("the text ends inside an image; expected a chat template with an end mark after images")

    def _resized(self, image: Image.Image) -> tuple[int, int]:
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

        height, width = _size(image)
        resized = smart_resize(
            height, width, factor=self.patch * self.merge, min_pixels=self.min_pixels, max_pixels=self.max_pixels
        )
        return int(resized[0]), int(resized[1])


SUPPORTED = "Qwen2VLImageProcessor"
"""The beginning of the names of supported image processors. Their ends name a library for resizing."""
STEPS = ("do_resize", "do_rescale", "do_normalize", "do_convert_rgb")
"""Settings of an image processor."""


def _processor(folder: Path, config_key: str) -> Any:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    kind: Any = Qwen2VLImageProcessorPil
    try:
        values, _ = kind.get_image_processor_dict(folder, local_files_only=True)
        if not str(name := values.get("image_processor_type")).startswith(SUPPORTED):
            raise ValueError(f"its type is {name}, not {SUPPORTED}")
        processor = kind.from_dict(values)
        if lacking := [step for step in STEPS if not getattr(processor, step)]:
            raise ValueError(f"{lacking[0]} is false")
    except (OSError, ValueError, KeyError, TypeError) as error:
        problem = str(error).strip().partition("\n")[0]
        raise CheckpointError(
            f"{folder} has no usable image processor: {problem}; expected the preprocessor_config.json of a Qwen "
            f"vision-language model ({named_by(config_key)})"
        ) from None
    return processor


def _image_token(file: Path, config_key: str) -> int:
    try:
        token = read_json(file)["image_token_id"]
    except (OSError, ValueError, LookupError, TypeError):
        token = None
    if type(token) is not int:
        raise CheckpointError(f"{file} has no image_token_id; expected the id of a token ({named_by(config_key)})")
    return token
