"""Images of rows: sources, sizes, pixels and places, compared with transformers' image processors."""

import base64
import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image
from transformers.image_utils import load_image
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from rltrain.config import schema
from rltrain.data.images import ImageRules, ImageSource, png_of, source_of
from rltrain.errors import CheckpointError, ConfigError, DataError

IMAGE_TOKEN = 9
PROCESSORS = {
    "qwen2_5_vl": Qwen2VLImageProcessorPil(min_pixels=3136, max_pixels=200_000),
    "qwen3_vl": Qwen2VLImageProcessorPil(
        patch_size=16, image_mean=[0.5] * 3, image_std=[0.5] * 3, size={"shortest_edge": 4096, "longest_edge": 65536}
    ),
}


def picture(height: int = 40, width: int = 61, mode: str = "RGB") -> Image.Image:
    values = np.random.default_rng(0).integers(0, 256, (height, width, 3), np.uint8)
    return Image.fromarray(values).convert(mode)


def checkpoint(folder: Path, processor: Any, config: object) -> Path:
    processor.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module", params=PROCESSORS)
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[ImageRules, Any]:
    """Returns the rules of a checkpoint, and its image processor."""
    processor = PROCESSORS[request.param]
    folder = checkpoint(tmp_path_factory.mktemp(request.param), processor, {"image_token_id": IMAGE_TOKEN})
    return ImageRules.read(folder, schema.Images()), processor


@pytest.fixture(scope="module")
def rules() -> ImageRules:
    return ImageRules(14, 2, 2, 28 * 28, 56 * 84, 3, (0.5,) * 3, (0.5,) * 3, IMAGE_TOKEN)


# Sizes and pixels.


@given(height=st.integers(1, 700), width=st.integers(1, 700))
def test_the_number_of_patches_is_that_of_the_processor(found: tuple[ImageRules, Any], height: int, width: int) -> None:
    rules, processor = found
    if max(height, width) > 200 * min(height, width):
        return
    source = source_of(Image.new("RGB", (width, height)))
    frames, rows, columns = rules.placed(source, 0).grid
    assert frames * rows * columns == processor.get_number_of_image_patches(height, width)
    assert rules.size(source) == (rows * rules.patch, columns * rules.patch)


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        *(("i.png", mode) for mode in ("RGB", "RGBA", "L", "LA", "P", "1")),
        *(("i.jpg", mode) for mode in ("RGB", "L", "CMYK")),
        *((name, "RGB") for name in ("i.webp", "i.bmp", "i.tiff", "i.gif", "i.ppm")),
    ],
)
def test_pixels_are_those_of_the_processor(found: tuple[ImageRules, Any], tmp_path: Path, name: str, mode: str) -> None:
    rules, processor = found
    picture(mode=mode).save(tmp_path / name)
    assert_equal_pixels(rules, processor, tmp_path / name)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("name", ["i.jpg", "i.png"])
def test_images_are_turned_by_their_orientation(
    found: tuple[ImageRules, Any], tmp_path: Path, name: str, orientation: int
) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    picture(40, 120).save(tmp_path / name, exif=exif)
    assert_equal_pixels(*found, tmp_path / name)


def assert_equal_pixels(rules: ImageRules, processor: Any, path: Path) -> None:
    source = source_of(str(path))
    pixels = rules.decoded(source)
    assert pixels.shape == (1, *rules.size(source), 3) and pixels.dtype == np.uint8
    expected = processor(load_image(str(path)), return_tensors="np")
    given = processor(Image.fromarray(pixels[0]), do_resize=False, return_tensors="np")
    assert np.array_equal(given["pixel_values"], expected["pixel_values"])
    assert tuple(expected["image_grid_thw"][0]) == rules.placed(source, 0).grid


def test_the_first_picture_of_an_animation_counts(rules: ImageRules, tmp_path: Path) -> None:
    first, second = Image.new("L", (28, 28), 0), Image.new("L", (28, 28), 255)
    first.save(tmp_path / "i.gif", save_all=True, append_images=[second])
    assert rules.decoded(source_of(str(tmp_path / "i.gif"))).max() == 0


def test_sizes_come_from_the_header_alone(rules: ImageRules, tmp_path: Path) -> None:
    data = png_of(picture())
    (tmp_path / "cut.png").write_bytes(data[: len(data) // 2])
    source = source_of("cut.png", tmp_path)
    assert rules.size(source) == rules.size(ImageSource(None, data))
    with pytest.raises(DataError, match=r"cut\.png cannot be used as an image: "):
        rules.decoded(source)


# Sources.


def forms(folder: Path) -> dict[str, Any]:
    image = picture()
    (folder / "i.png").write_bytes(data := png_of(image))
    return {
        "path": "i.png",
        "absolute path": str(folder / "i.png"),
        "URL of a file": f"file://{folder / 'i.png'}",
        "data URL": f"data:image/png;base64,{base64.b64encode(data).decode()}",
        "bytes": data,
        "buffer": memoryview(data),
        "object with bytes": {"bytes": data, "path": "elsewhere.png"},
        "object with a path": {"bytes": None, "path": "i.png"},
        "PIL image": image,
        "array": np.asarray(image),
    }


def test_every_form_of_an_image_has_the_same_pixels_and_key(rules: ImageRules, tmp_path: Path) -> None:
    found = {name: source_of(value, tmp_path) for name, value in forms(tmp_path).items()}
    pixels = {name: rules.decoded(source).tobytes() for name, source in found.items()}
    assert len({*pixels.values()}) == 1
    assert len({rules.placed(source, 0).key for source in found.values()}) == 1


def test_a_gray_array_is_an_image(rules: ImageRules) -> None:
    gray: NDArray[np.uint8] = np.full((28, 28), 7, np.uint8)
    assert np.array_equal(rules.decoded(source_of(gray)), np.full((1, 28, 28, 3), 7))


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("https://host/i.png", "nothing is downloaded"),
        ("", "expected a path"),
        ("data:image/png;base64,?", "expected data:image"),
        ("data:image/png,abc", "expected data:image"),
        (None, "is of type NoneType"),
        ({"bytes": None, "path": None}, "an object with the keys .bytes., .path."),
        (7, "is of type int"),
        (np.zeros((2, 2, 4), np.uint8), "expected uint8 of"),
        (np.zeros((2, 2, 3), np.float32), "an array of float32"),
    ],
)
def test_what_is_no_source_is_refused(value: Any, said: str) -> None:
    with pytest.raises(DataError, match=said):
        source_of(value)


@pytest.mark.parametrize("data", [b"", b"no image", b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n"])
def test_what_is_no_image_is_refused(rules: ImageRules, data: bytes) -> None:
    with pytest.raises(DataError, match="an image of .* bytes cannot be used"):
        rules.size(source_of(data))


def test_a_missing_file_is_named(rules: ImageRules, tmp_path: Path) -> None:
    for use in (rules.size, rules.decoded, lambda source: rules.placed(source, 0)):
        with pytest.raises(DataError, match=r"none\.png cannot be used as an image: No such file"):
            use(source_of("none.png", tmp_path))


def test_too_narrow_an_image_is_refused(rules: ImageRules) -> None:
    with pytest.raises(DataError, match="aspect ratio"):
        rules.size(source_of(Image.new("RGB", (1, 300))))


# Keys and places.


def test_keys_tell_images_and_sizes_apart(rules: ImageRules) -> None:
    one, other = source_of(picture()), source_of(picture(width=62))
    smaller = replace(rules, max_pixels=28 * 28)
    keys = {rules.placed(one, 0).key, rules.placed(other, 0).key, smaller.placed(one, 0).key}
    assert len(keys) == 3 and all(0 < key < 2**63 for key in keys)
    assert rules.placed(one, 0).key == rules.placed(one, 5).key


def test_placeholders_become_the_tokens_of_their_images(rules: ImageRules) -> None:
    small, wide = (source_of(Image.new("RGB", size)) for size in ((28, 28), (84, 28)))
    context = rules.place([1, IMAGE_TOKEN, 2, IMAGE_TOKEN, 3], [wide, small])
    assert context.ids == (1, IMAGE_TOKEN, IMAGE_TOKEN, IMAGE_TOKEN, 2, IMAGE_TOKEN, 3)
    assert [(image.begin, image.grid) for image in context.images] == [(1, (1, 2, 6)), (5, (1, 2, 2))]
    assert context.sources == (wide, small)
    assert rules.place([1, 2], []) == ((1, 2), (), ())


@pytest.mark.parametrize(
    ("ids", "num_images", "said"),
    [
        ([1, IMAGE_TOKEN, 2], 0, "0 images, but 1 places"),
        ([1, 2], 1, "1 images, but 0 places"),
        ([1, IMAGE_TOKEN], 1, "ends inside an image"),
    ],
)
def test_images_without_a_place_are_refused(rules: ImageRules, ids: list[int], num_images: int, said: str) -> None:
    with pytest.raises(DataError, match=said):
        rules.place(ids, [source_of(picture())] * num_images)


# The rules of a checkpoint.


def test_limits_of_the_config_replace_those_of_the_checkpoint(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, PROCESSORS["qwen3_vl"], {"image_token_id": IMAGE_TOKEN})
    rules = ImageRules.read(folder, schema.Images(max_pixels=8192))
    assert (rules.min_pixels, rules.max_pixels, rules.patch, rules.mean) == (4096, 8192, 16, (0.5,) * 3)
    with pytest.raises(ConfigError, match=r"data\.images: min_pixels is 4096 and max_pixels 1024"):
        ImageRules.read(folder, schema.Images(max_pixels=1024))


PUBLISHED = {
    "Qwen2.5-VL": {
        "min_pixels": 3136,
        "max_pixels": 12845056,
        "patch_size": 14,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": [0.48145466, 0.4578275, 0.40821073],
        "image_std": [0.26862954, 0.26130258, 0.27577711],
        "image_processor_type": "Qwen2VLImageProcessor",
        "processor_class": "Qwen2_5_VLProcessor",
    },
    "Qwen3-VL": {
        "size": {"longest_edge": 16777216, "shortest_edge": 65536},
        "patch_size": 16,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "processor_class": "Qwen3VLProcessor",
        "image_processor_type": "Qwen2VLImageProcessorFast",
    },
}
"""preprocessor_config.json of published checkpoints."""
LIMITS = {"Qwen2.5-VL": (3136, 12845056), "Qwen3-VL": (65536, 16777216)}


@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.parametrize("is_nested", [False, True], ids=["preprocessor_config.json", "processor_config.json"])
def test_files_of_published_checkpoints_are_read(tmp_path: Path, name: str, is_nested: bool) -> None:
    values: dict[str, Any] = PUBLISHED[name]
    text = json.dumps({"image_processor": values} if is_nested else values)
    (tmp_path / ("processor_config.json" if is_nested else "preprocessor_config.json")).write_text(text)
    (tmp_path / "config.json").write_text('{"image_token_id": 151655}')
    rules = ImageRules.read(tmp_path, schema.Images())
    assert (rules.patch, rules.temporal_patch, rules.merge) == (values["patch_size"], 2, 2)
    assert (rules.min_pixels, rules.max_pixels) == LIMITS[name]
    assert (rules.mean, rules.std) == (tuple(values["image_mean"]), tuple(values["image_std"]))
    assert (rules.resample, rules.image_token) == (Image.Resampling.BICUBIC, 151655)


def test_a_checkpoint_without_a_usable_processor_is_refused(tmp_path: Path) -> None:
    (tmp_path / "none").mkdir()
    (tmp_path / "none" / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="has no usable image processor"):
        ImageRules.read(tmp_path / "none", schema.Images())
    clip = checkpoint(tmp_path / "clip", CLIPImageProcessorPil(), {"image_token_id": IMAGE_TOKEN})
    with pytest.raises(CheckpointError, match="usable image processor: its type is CLIPImageProcessor"):
        ImageRules.read(clip, schema.Images())
    raw = checkpoint(tmp_path / "raw", Qwen2VLImageProcessorPil(do_normalize=False), {"image_token_id": IMAGE_TOKEN})
    with pytest.raises(CheckpointError, match="do_normalize is false"):
        ImageRules.read(raw, schema.Images())
    text = checkpoint(tmp_path / "text", PROCESSORS["qwen3_vl"], {"image_token_id": None})
    with pytest.raises(CheckpointError, match="has no image_token_id"):
        ImageRules.read(text, schema.Images())


def test_png_files_hold_the_pixels() -> None:
    image = picture()
    assert np.array_equal(np.asarray(Image.open(io.BytesIO(png_of(image)))), np.asarray(image))
