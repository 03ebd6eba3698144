"""Layouts of engines: SGLang's parameters for every rank of a grid."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Literal

import numpy as np

from rltrain.config.schema import Config, Served
from rltrain.models import Architecture, canonical_tensors, element_types, quantizable_tensors, tower_names
from rltrain.models.registry import BY_NAMES_IN_SGLANG
from rltrain.models.table import ITEM_BYTES, ElementType
from rltrain.reshard.fp8_blocks import BoolArray, QuantizedLayouts, quantized
from rltrain.reshard.layout import Layout, RankLayout, Segment, hf_layout, holding, parameter_types, split
from rltrain.reshard.megatron_layout import Chunk, ModelCutter, Side, TensorShare, even_share, expert_share, round_up
from rltrain.runtime.grid import Grid

VOCAB_MULTIPLE = 64
"""SGLang pads the vocabulary to a multiple of this before splitting it."""

ARRIVING_BYTES = 512 * 2**20
"""Bytes of weights that arrive at once on engines of role evaluation while an evaluation is running."""

ENGINE = Side(name=lambda row: row.engine, split=lambda row: row.split)
SGLANG = Side(name=lambda row: row.sglang or row.engine, split=lambda row: row.split)
"""Vision towers have other names in SGLang than in the embedded engine."""


def padded_vocab_size(vocab_size: int, tp: int) -> int:
    """Returns the number of vocabulary rows over all tensor-parallel ranks."""
    return round_up(round_up(vocab_size, VOCAB_MULTIPLE), tp)


def engine_layout(architecture: Architecture, grid: Grid, *, dtype: str = "float32", sglang: bool = False) -> Layout:
    """Returns the layout of engines of `dtype`, with the names of SGLang or of the embedded engine. Each data-parallel
    replica of `grid` is one tensor-parallel engine. All ranks of an engine have the whole vision tower.

    The ranks of an engine form `grid.ep` runs of consecutive ranks. Each run has whole experts, cut between its ranks.

    `grid.tp` must divide the query heads. It must divide the KV heads or be a multiple of them, and the KV heads are
    then repeated. `grid.ep` must divide `grid.tp` and the experts. Raises ValueError if any of these does not divide,
    or if pp or cp is not 1.
    """
    if grid.pp != 1 or grid.cp != 1:
        raise ValueError(f"engines split by tensor parallelism alone; got pp = {grid.pp}, cp = {grid.cp}")
    even_share(grid.tp, 0, grid.ep, "ranks of an engine")
    return Layout(
        ranks=grid.ranks,
        parts=tuple(grid.coordinates(rank).tp for rank in grid.ranks),
        tensors=canonical_tensors(architecture),
        types=element_types(architecture, dtype),
        build=partial(_build, ModelCutter(architecture, SGLANG if sglang else ENGINE), grid.tp, grid.ep),
    )


def by_names(architecture: Architecture) -> bool:
    """Returns whether SGLang's own loader puts the weights of a model in place, by the names of the checkpoint."""
    return architecture.family in BY_NAMES_IN_SGLANG


@dataclass(frozen=True, eq=False)
class EnginePart:
    """Some parameters of a role's engines. `quantized` [tensors] marks the tensors of `plain` held in FP8."""

    plain: Layout
    quantized: BoolArray
    content: Literal["weights", "base", "adapters"] = "weights"
    """The content of an update: the actor's weights with any adapters merged, its base weights (sent once), or its
    adapters."""
    is_frozen: bool = False
    """Whether training changes none of the parameters."""

    @cached_property
    def layout(self) -> Layout:
        """Layout of the parameters as held by engines, with the scales of FP8 blocks."""
        return self.filled_from(self.plain).destination

    def filled_from(self, source: Layout) -> QuantizedLayouts:
        """Returns both layouts of a reshard from `source`."""
        return quantized(source, self.plain, self.quantized)

    def held_bytes(self, rank: int) -> int:
        """Returns the bytes of these parameters on a rank."""
        return sum(self._parameter_bytes(rank))

    def largest_bytes(self, rank: int) -> int:
        """Returns the bytes of the largest of these parameters on a rank."""
        return max(self._parameter_bytes(rank), default=0)

    def _parameter_bytes(self, rank: int) -> Iterator[int]:
        layout = self.layout
        types = parameter_types(layout, layout.parts[layout.ranks.index(rank)])
        for (_, shape), kind in zip(layout.on(rank).parameters, types, strict=True):
            yield math.prod(shape) * int(ITEM_BYTES[kind])


def whole_engine(config: Config, architecture: Architecture, grid: Grid, role: str = "rollout") -> EnginePart:
    """Returns everything held by a role's engines. For servers at URLs, returns everything passed to its ranks."""
    served = config.served(role)
    if served.engine == "http":
        if served.http.weights == "folder":
            plain = hf_layout(architecture, grid.ranks, dtype=config.model.dtype)
        else:
            plain = _whole_on_every_rank(architecture, grid, config.model.dtype)
        return EnginePart(plain, np.zeros(len(plain.types), dtype=bool))
    is_sglang = served.engine == "sglang"
    if is_sglang and by_names(architecture):
        return engine_by_names(architecture, grid, dtype=config.model.dtype, fp8=served.dtype == "fp8")
    return engine_of(architecture, grid, dtype=config.model.dtype, fp8=served.dtype == "fp8", sglang=is_sglang)


def _whole_on_every_rank(architecture: Architecture, grid: Grid, dtype: str) -> Layout:
    return replace(hf_layout(architecture, grid.ranks[:1], dtype=dtype), ranks=grid.ranks, parts=(0,) * len(grid.ranks))


def engine_of(architecture: Architecture, grid: Grid, *, dtype: str, fp8: bool, sglang: bool = False) -> EnginePart:
    """Returns everything held by engines of `dtype`. With `fp8`, all tensors with FP8 support are quantized."""
    in_fp8 = quantizable_tensors(architecture)
    plain = engine_layout(architecture, grid, dtype=dtype, sglang=sglang)
    return EnginePart(plain, in_fp8 if fp8 else np.zeros_like(in_fp8))


def engine_by_names(architecture: Architecture, grid: Grid, *, dtype: str, fp8: bool) -> EnginePart:
    """Returns the weights for SGLang's own loader: whole tensors of a checkpoint, with `fp8` of one in FP8 with scales.

    Each is on one rank of every engine. The server's ranks exchange them.
    """
    layout, in_fp8 = hf_layout(architecture, tuple(range(grid.tp)), dtype=dtype), quantizable_tensors(architecture)
    plain = replace(layout, ranks=grid.ranks, parts=tuple(grid.coordinates(rank).tp for rank in grid.ranks))
    return EnginePart(plain, in_fp8 if fp8 else np.zeros_like(in_fp8))


def adapters_of_engine(config: Config, architecture: Architecture, grid: Grid, role: str = "rollout") -> EnginePart:
    """Returns the separate low-rank adapters held by a role's engines. `architecture` is the architecture of the
    model."""
    lora = config.model.lora
    assert lora is not None, "only a model with adapters can keep them separate"
    adapted = architecture.adapted(lora.rank, lora.targets, vision=lora.vision)
    engine, dtype = config.served(role).engine, config.model.dtype
    if engine == "http":
        plain = _whole_on_every_rank(adapted, grid, dtype)
    else:
        plain = engine_layout(adapted, grid, dtype=dtype, sglang=engine == "sglang")
    return EnginePart(plain, np.zeros(len(plain.types), dtype=bool), "adapters")


def engine_parts(config: Config, architecture: Architecture, grid: Grid, role: str = "rollout") -> list[EnginePart]:
    """Returns `whole_engine` cut into parts of a size that an engine can receive. Equal on all ranks."""
    wholes, served = [whole_engine(config, architecture, grid, role)], config.served(role)
    if config.keeps_adapters_apart(role):
        wholes = [replace(wholes[0], content="base"), adapters_of_engine(config, architecture, grid, role)]
    elif role == "rollout" and served.engine != "http" and config.freezes_tower:
        wholes = [*_tower_and_rest(wholes[0], architecture)]
    if served.engine == "embedded":
        return wholes  # in this process, without staging memory to bound
    return [part for whole in wholes for part in in_parts(whole, staging_bytes(served))]


def staging_bytes(served: Served) -> int:
    """Returns the bytes of weights in transfer to a server at once."""
    of_kind = served.http if served.engine == "http" else served.sglang
    return int(of_kind.staging_mb * 2**20)


def in_parts(whole: EnginePart, max_bytes: int) -> list[EnginePart]:
    """Cuts an engine's parameters into parts of whole parameters with at most `max_bytes` each. A larger parameter is a
    part of its own. Equal on all ranks."""
    as_held = np.where(whole.quantized, ElementType.FLOAT8_E4M3, whole.plain.types).astype(np.uint8)
    parts = split(replace(whole.plain, types=as_held), max_bytes)
    return [
        replace(whole, plain=replace(part, types=whole.plain.types), quantized=whole.quantized & _holds(part))
        for part in parts
    ]


def _tower_and_rest(whole: EnginePart, architecture: Architecture) -> Iterator[EnginePart]:
    """Yields an engine's frozen vision tower, then its other parameters."""
    is_tower = np.isin(whole.plain.tensors.names, sorted(tower_names(architecture)))
    for held, is_frozen in ((is_tower, True), (~is_tower, False)):
        yield EnginePart(holding(whole.plain, held), whole.quantized & held, whole.content, is_frozen)


def _holds(layout: Layout) -> BoolArray:
    """Returns for each tensor whether any rank holds some of it, shape [tensors]."""
    held = np.zeros(len(layout.types), dtype=bool)
    for share in set(layout.parts):
        held[layout.part(share).pieces["tensor"]] = True
    return held


def _build(cutter: ModelCutter, tp: int, ep: int, index: int) -> RankLayout:
    architecture = cutter.architecture
    rows = _fused_rows(architecture, index, tp)
    share = TensorShare(index, tp, rows, padded_vocab_size(architecture.vocab_size, tp))
    whole = Chunk(range(architecture.num_layers), embedding=True, head=True)
    experts = None
    if architecture.moe:
        ranks_per_expert = tp // ep
        ep_index, tp_index = divmod(index, ranks_per_expert)
        experts = expert_share(architecture, (ep_index, ep), (tp_index, ranks_per_expert))
    return cutter.cut([whole], share, experts)


def _fused_rows(architecture: Architecture, index: int, tp: int) -> list[Segment]:
    """Returns this rank's rows of qkv_proj: its query heads, key heads, then value heads. Empty with latent attention.

    With `gated_attention` each query head is followed by its gate.
    """
    head, num_kv_heads = architecture.head_dim, architecture.num_kv_heads
    first_query, num_queries = even_share(architecture.num_heads, index, tp, "attention heads")
    if architecture.mla:
        return []
    if tp <= num_kv_heads:
        first_kv, num_kv = even_share(num_kv_heads, index, tp, "KV heads")
    else:
        repeats = even_share(tp, 0, num_kv_heads, "engine ranks over KV heads")[1]
        first_kv, num_kv = index // repeats, 1
    queries, keys = [Segment(0, first_query * head, num_queries * head)], 1
    if architecture.gated_attention:
        heads = range(first_query, first_query + num_queries)
        queries, keys = [Segment(section, of * head, head) for of in heads for section in (0, 1)], 2
    return [*queries, *(Segment(section, first_kv * head, num_kv * head) for section in (keys, keys + 1))]
