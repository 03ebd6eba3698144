"""Models with gated delta nets instead of attention in most layers: their shape, config.json, and tables.

The other layers have attention with gates on its output. Norms multiply by 1 + weight, except for the norm of the delta
nets' heads.
"""

from dataclasses import dataclass, replace

from rltrain.errors import listed
from rltrain.models.config_file import ConfigReader
from rltrain.models.families import ATTENTION_OUTPUT, INPUT_NORM, LLAMA, QKV, QWEN2_MOE
from rltrain.models.table import Layer, Part, Row, Table, in_layer

LAYER_TYPES = {"full_attention": False, "linear_attention": True}
"""Layer types of config.json. True for a gated delta net."""
ATTENTION_INTERVAL = 4
"""The default interval of layers with attention. Each is the last of so many layers."""
CHUNK_TOKENS = 64
"""Tokens of a sample to compute in parallel. Chunks are computed one after the other."""


@dataclass(frozen=True)
class DeltaNet:
    """The gated delta nets of a model. `layers` [layers] is True for each of them. Each key head and its query serve
    `num_heads` / `num_key_heads` consecutive value heads. The convolution reads `kernel` tokens."""

    layers: tuple[bool, ...]
    num_key_heads: int
    num_heads: int
    key_dim: int
    value_dim: int
    kernel: int

    @property
    def keys(self) -> int:
        """Elements of a token's keys. Queries have as many."""
        return self.num_key_heads * self.key_dim

    @property
    def values(self) -> int:
        """Elements of a token's values over all value heads of this object: the whole model, or one rank's share after
        `shared_by`. The output gates of a token have as many. The decays have one element per value head."""
        return self.num_heads * self.value_dim

    @property
    def channels(self) -> int:
        """Channels of the convolution: queries, keys and values."""
        return 2 * self.keys + self.values

    @property
    def num_layers(self) -> int:
        return sum(self.layers)

    def shared_by(self, num_ranks: int) -> "DeltaNet":
        """Returns the share of one of `num_ranks` tensor-parallel ranks."""
        return replace(self, num_key_heads=self.num_key_heads // num_ranks, num_heads=self.num_heads // num_ranks)

    def sizes(self) -> dict[str, int]:
        """Returns the sizes of the named dimensions in the tables below."""
        shared = self.num_heads // self.num_key_heads
        return {
            "delta_key_heads": self.num_key_heads,
            "delta_heads": self.num_heads,
            "delta_key": self.key_dim,
            "delta_value": self.value_dim,
            "delta_keys": self.keys,
            "delta_values": self.values,
            "delta_shared": shared,
            "delta_shared_values": shared * self.value_dim,
            "delta_kernel": self.kernel,
        }


def read_delta_net(config: ConfigReader, num_layers: int) -> DeltaNet:
    num_key_heads, num_heads = (
        config.count(key, default=default)
        for key, default in (("linear_num_key_heads", 16), ("linear_num_value_heads", 32))
    )
    if num_heads % num_key_heads:
        raise config.error("linear_num_value_heads", f"a multiple of linear_num_key_heads = {num_key_heads}")
    return DeltaNet(
        layers=_read_layers(config, num_layers),
        num_key_heads=num_key_heads,
        num_heads=num_heads,
        key_dim=config.count("linear_key_head_dim", default=128),
        value_dim=config.count("linear_value_head_dim", default=128),
        kernel=config.count("linear_conv_kernel_dim", default=4),
    )


def _read_layers(config: ConfigReader, num_layers: int) -> tuple[bool, ...]:
    kinds = config.values.get("layer_types")
    if kinds is None:
        interval = config.count("full_attention_interval", default=ATTENTION_INTERVAL)
        if interval > num_layers:
            raise config.error("full_attention_interval", f"at most num_hidden_layers = {num_layers}")
        return tuple((layer + 1) % interval != 0 for layer in range(num_layers))
    if not config.are_all("layer_types", LAYER_TYPES, num_layers):
        raise config.error("layer_types", f"one of {listed(LAYER_TYPES)} for each of {num_layers} layers")
    if set(kinds) == {"linear_attention"}:
        raise config.error("layer_types", "at least one layer of full_attention")
    return tuple(LAYER_TYPES[kind] for kind in kinds)


IN_PROJECTION = "self_attention.in_proj.weight"
NORM = "self_attention.gated_norm.weight"
"""The norm of the heads. Megatron-core's out_norm multiplies by 1 + weight, so this norm has another name."""

DELTA_INPUT_NORM = replace(
    INPUT_NORM,
    megatron_te=INPUT_NORM.megatron_te and INPUT_NORM.megatron_te.replace("linear_qkv", "in_proj"),
)


def _projections(*parts: tuple[str, ...]) -> Row:
    """Returns the row of input projections. Except in files, their order is queries, keys, values, gates of the output,
    weights, decays."""
    return in_layer(
        *((f"linear_attn.{name}.weight", rows, "hidden") for name, rows in parts),
        megatron=IN_PROJECTION,
        engine="linear_attn.in_proj.weight",
        split="rows",
        adaptable=True,
    )


QWEN3_NEXT_PROJECTIONS = _projections(
    ("in_proj_qkvz", "delta_key_heads*(delta_key+delta_key+delta_shared_values+delta_shared_values)"),
    ("in_proj_ba", "delta_key_heads*(delta_shared+delta_shared)"),
)
QWEN3_5_PROJECTIONS = _projections(
    ("in_proj_qkv", "delta_keys+delta_keys+delta_values"),
    ("in_proj_z", "delta_values"),
    ("in_proj_b", "delta_heads"),
    ("in_proj_a", "delta_heads"),
)
DELTA_REST = (
    in_layer(
        ("linear_attn.conv1d.weight", "delta_keys+delta_keys+delta_values", "one", "delta_kernel"),
        megatron="self_attention.conv1d.weight",
        split="rows",
    ),
    in_layer(("linear_attn.A_log", "delta_heads"), megatron="self_attention.A_log", split="rows"),
    in_layer(("linear_attn.dt_bias", "delta_heads"), megatron="self_attention.dt_bias", split="rows"),
    in_layer(("linear_attn.norm.weight", "delta_value"), megatron=NORM),
    in_layer(
        ("linear_attn.out_proj.weight", "hidden", "delta_values"),
        megatron="self_attention.out_proj.weight",
        split="columns",
        quantizable=True,
    ),
)

GATED_QKV = replace(
    QKV,
    parts=(Part(QKV.parts[0].name, ("heads*(head+head)", "hidden")), *QKV.parts[1:]),
)
"""In files, the gate of a head follows its query."""


def _gated(layer: Layer) -> Layer:
    return replace(layer, rows=tuple(GATED_QKV if row == QKV else row for row in layer.rows))


def _delta(layer: Layer, projections: Row) -> Layer:
    """Returns the layer with a delta net instead of attention."""
    rest = tuple(row for row in layer.rows if row not in (INPUT_NORM, QKV, ATTENTION_OUTPUT))
    return replace(layer, rows=(DELTA_INPUT_NORM, projections, *DELTA_REST, *rest))


def _table(projections: Row) -> Table:
    """Returns the table. Dense models have Llama's MLP, sparse ones the experts of Qwen2-MoE."""
    dense, sparse = LLAMA.dense, QWEN2_MOE.sparse
    assert sparse is not None
    return replace(
        LLAMA,
        dense=_gated(dense),
        sparse=_gated(sparse),
        delta=_delta(dense, projections),
        sparse_delta=_delta(sparse, projections),
    )


QWEN3_NEXT, QWEN3_5 = _table(QWEN3_NEXT_PROJECTIONS), _table(QWEN3_5_PROJECTIONS)
