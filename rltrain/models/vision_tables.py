"""Tables of vision towers, and the reading of their shapes from config.json.

Training and the embedded engine use transformers' names of a tower's parameters, after "vision.". In files they follow
another prefix.
"""

from collections.abc import Iterator, Mapping
from math import isqrt
from typing import Any, NamedTuple

from rltrain.models.config_file import ConfigReader
from rltrain.models.table import TOWER_PREFIX, Part, Row, VisionTable
from rltrain.models.vision import Tower, Vision

VISION = "vision."
"""The beginning of the names of a tower's parameters."""


def _row(name: str, *dimensions: str, adaptable: bool = False, sglang: str | None = None) -> Row:
    """Returns the row of a parameter. No tower is split. `sglang` is the name inside SGLang's tower, if it differs."""
    whole = VISION + name
    return Row(
        (Part(whole, dimensions),),
        megatron=whole,
        engine=whole,
        adaptable=adaptable,
        sglang=TOWER_PREFIX + (sglang or name),
    )


def _linear(name: str, outputs: str, inputs: str, sglang: str | None = None) -> tuple[Row, Row]:
    in_sglang = sglang or name
    return (
        _row(f"{name}.weight", outputs, inputs, adaptable=True, sglang=f"{in_sglang}.weight"),
        _row(f"{name}.bias", outputs, sglang=f"{in_sglang}.bias"),
    )


def _gate_and_up(mlp: str) -> tuple[Row, ...]:
    """Returns the rows in the order of SGLang's fused parameters."""
    gate, up = (
        _linear(f"{mlp}{name}_proj", "vision_ffn", "vision_hidden", f"{mlp}gate_up_proj") for name in ("gate", "up")
    )
    return tuple(row for pair in zip(gate, up, strict=True) for row in pair)


def _layer_norm(name: str, size: str) -> tuple[Row, Row]:
    return _row(f"{name}.weight", size), _row(f"{name}.bias", size)


def _attention(block: str) -> tuple[Row, ...]:
    return (
        *_linear(f"{block}attn.qkv", "vision_qkv", "vision_hidden", f"{block}attn.qkv_proj"),
        *_linear(f"{block}attn.proj", "vision_hidden", "vision_hidden"),
    )


BLOCK = "blocks.{layer}."
DEEPSTACK = "deepstack_merger_list.{layer}."
PATCHES = _row("patch_embed.proj.weight", "vision_hidden", "colours", "vision_frames", "vision_patch", "vision_patch")
"""A convolution over patches that do not overlap."""


def _merger(name: str, normalised: str) -> tuple[Row, ...]:
    """Returns a merger of Qwen3-VL. Its norm sees patches, or all patches of a token together."""
    return (
        *_layer_norm(f"{name}norm", normalised),
        *_linear(f"{name}linear_fc1", "vision_merged", "vision_merged"),
        *_linear(f"{name}linear_fc2", "vision_out", "vision_merged"),
    )


QWEN2_5_VL_TOWER = VisionTable(
    first=(PATCHES,),
    block=(
        _row(f"{BLOCK}norm1.weight", "vision_hidden"),
        _row(f"{BLOCK}norm2.weight", "vision_hidden"),
        *_attention(BLOCK),
        *_gate_and_up(f"{BLOCK}mlp."),
        *_linear(f"{BLOCK}mlp.down_proj", "vision_hidden", "vision_ffn"),
    ),
    last=(
        _row("merger.ln_q.weight", "vision_hidden"),
        *_linear("merger.mlp.0", "vision_merged", "vision_merged"),
        *_linear("merger.mlp.2", "vision_out", "vision_merged"),
    ),
    deepstack=(),
)
QWEN3_VL_TOWER = VisionTable(
    first=(
        PATCHES,
        _row("patch_embed.proj.bias", "vision_hidden"),
        _row("pos_embed.weight", "vision_positions", "vision_hidden"),
    ),
    block=(
        *_layer_norm(f"{BLOCK}norm1", "vision_hidden"),
        *_layer_norm(f"{BLOCK}norm2", "vision_hidden"),
        *_attention(BLOCK),
        *_linear(f"{BLOCK}mlp.linear_fc1", "vision_ffn", "vision_hidden"),
        *_linear(f"{BLOCK}mlp.linear_fc2", "vision_hidden", "vision_ffn"),
    ),
    last=_merger("merger.", "vision_hidden"),
    deepstack=_merger(DEEPSTACK, "vision_merged"),
)
"""The tower of Qwen3-VL and, without deepstack, of Qwen3.5."""


class VisionRows(NamedTuple):
    """Rows of a tower, and the number of the block in their names. Other names have none."""

    rows: tuple[Row, ...]
    block: int


def vision_rows(table: VisionTable, vision: Vision) -> Iterator[VisionRows]:
    """Yields the rows of a tower in the order of its tensors."""
    yield VisionRows(table.first, 0)
    for block in range(vision.depth):
        yield VisionRows(table.block, block)
    yield VisionRows(table.last, 0)
    for block in range(len(vision.deepstack)):
        yield VisionRows(table.deepstack, block)


def vision_sizes(vision: Vision) -> dict[str, int]:
    """Returns the sizes of the named dimensions in the tables."""
    return {
        "colours": 3,
        "vision_frames": vision.temporal_patch,
        "vision_patch": vision.patch,
        "vision_hidden": vision.hidden,
        "vision_qkv": 3 * vision.hidden,
        "vision_ffn": vision.ffn,
        "vision_merged": vision.hidden * vision.merge**2,
        "vision_out": vision.out_hidden,
        "vision_positions": vision.num_positions or 0,
    }


# The shape of a tower in config.json.

IMAGE_TOKEN = "image_token_id"
SECTION = "vision_config"
OF_QWEN2_5: Mapping[str, Any] = {
    "hidden_size": 3584,
    "intermediate_size": 3420,
    "patch_size": 14,
    "window_size": 112,
    "fullatt_block_indexes": [7, 15, 23, 31],
    "depth": 32,
}
OF_QWEN3: Mapping[str, Any] = {
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "patch_size": 16,
    "num_position_embeddings": 2304,
    "depth": 27,
}
DEEPSTACKED: Mapping[str, Any] = {**OF_QWEN3, "deepstack_visual_indexes": [8, 16, 24]}
DEFAULTS: Mapping[Tower, Mapping[str, Any]] = {
    "qwen2_5_vl": OF_QWEN2_5,
    "qwen3_vl": DEEPSTACKED,
    "qwen3_vl_moe": DEEPSTACKED,
    "qwen3_5": OF_QWEN3,
    "qwen3_5_moe": OF_QWEN3,
}
"""The defaults of transformers. A kind without a key ignores it in config.json."""
COMMON: Mapping[str, Any] = {
    "num_heads": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 3584,
    "in_channels": 3,
}


def read_vision(whole: ConfigReader, kind: Tower, prefix: str, hidden_size: int, vocab_size: int) -> Vision:
    """Returns the shape of the tower. `whole` reads all of config.json, and the language model has `hidden_size`.

    `prefix` begins the names of the tower's tensors in the files. Raises CheckpointError if a value is invalid or the
    file describes no tower.
    """
    section = whole.values.get(SECTION)
    if not isinstance(section, dict):
        raise whole.error(SECTION, "an object with the vision tower, since model.vision is set")
    defaults = {**COMMON, **DEFAULTS[kind]}
    reader = whole.inside(SECTION, {**defaults, **section})
    for key, expected in (("in_channels", 3), ("out_hidden_size", hidden_size)):
        if reader.count(key) != expected:
            raise reader.error(key, f"{expected}, as nothing else fits the images and the language model")
    depth, hidden, heads = reader.count("depth"), reader.count("hidden_size"), reader.count("num_heads")
    if hidden % heads:
        raise reader.error("num_heads", f"a divisor of hidden_size = {hidden}")
    return Vision(
        kind=kind,
        depth=depth,
        hidden=hidden,
        heads=heads,
        ffn=reader.count("intermediate_size"),
        patch=reader.count("patch_size"),
        temporal_patch=reader.count("temporal_patch_size"),
        merge=reader.count("spatial_merge_size"),
        out_hidden=hidden_size,
        window=reader.count("window_size") if "window_size" in defaults else None,
        full_attention=_blocks(reader, "fullatt_block_indexes", depth) if "window_size" in defaults else (),
        num_positions=_square(reader, "num_position_embeddings") if "num_position_embeddings" in defaults else None,
        deepstack=_blocks(reader, "deepstack_visual_indexes", depth) if kind in ("qwen3_vl", "qwen3_vl_moe") else (),
        image_token=whole.token(IMAGE_TOKEN, whole.values.get(IMAGE_TOKEN), vocab_size),
        prefix=prefix,
    )


def _blocks(reader: ConfigReader, key: str, depth: int) -> tuple[int, ...]:
    if not reader.are_all(key, range(depth)):
        raise reader.error(key, f"a list of blocks from 0 to {depth - 1}")
    return tuple(reader.values[key])


def _square(reader: ConfigReader, key: str) -> int:
    count = reader.count(key)
    if isqrt(count) ** 2 != count:
        raise reader.error(key, "a square number, as the positions form a square")
    return count
