"""Where an engine keeps a checkpoint's tensors: SGLang's parameters, for every rank of a grid."""

from functools import partial

from rltrain.cluster.grid import Grid
from rltrain.reshard.families import Architecture, Row, canonical_tensors
from rltrain.reshard.layout import Layout, RankLayout, Segment
from rltrain.reshard.model_layout import Stage, TensorShare, build_rank, even_share, round_up

VOCAB_MULTIPLE = 64
"""SGLang pads the vocabulary to a multiple of this before it splits it."""


def padded_vocab_size(vocab_size: int, tp: int) -> int:
    """Rows of the vocabulary over all tensor-parallel ranks."""
    return round_up(round_up(vocab_size, VOCAB_MULTIPLE), tp)


def engine_layout(architecture: Architecture, grid: Grid) -> Layout:
    """Every data-parallel replica of `grid` is one engine, split by tensor parallelism alone.

    `grid.tp` must divide the query heads, and divide the KV heads or be a multiple of them: they are then repeated.
    """
    if grid.pp != 1 or grid.cp != 1:
        raise ValueError(f"engines split by tensor parallelism alone; got pp = {grid.pp}, cp = {grid.cp}")
    return Layout(
        ranks=grid.ranks,
        parts=tuple(grid.coordinates(rank).tp for rank in grid.ranks),
        tensors=canonical_tensors(architecture),
        build=partial(_build, architecture, grid.tp),
    )


def _build(architecture: Architecture, tp: int, index: int) -> RankLayout:
    share = TensorShare(index, tp, _fused_rows(architecture, index, tp), padded_vocab_size(architecture.vocab_size, tp))
    whole = Stage(range(architecture.num_layers), embedding=True, head=True)
    return build_rank(architecture, whole, share, _name)


def _name(row: Row) -> str:
    return row.engine


def _fused_rows(architecture: Architecture, index: int, tp: int) -> list[Segment]:
    """Rows of qkv_proj: this rank's query heads, key heads, value heads."""
    head, num_kv_heads = architecture.head_dim, architecture.num_kv_heads
    first_query, num_queries = even_share(architecture.num_heads, index, tp, "attention heads")
    if tp <= num_kv_heads:
        first_kv, num_kv = even_share(num_kv_heads, index, tp, "KV heads")
    else:
        repeats = even_share(tp, 0, num_kv_heads, "engine ranks over KV heads")[1]
        first_kv, num_kv = index // repeats, 1
    return [
        Segment(0, first_query * head, num_queries * head),
        Segment(1, first_kv * head, num_kv * head),
        Segment(2, first_kv * head, num_kv * head),
    ]
