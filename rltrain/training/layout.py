"""Where Megatron's GPTModel keeps a checkpoint's tensors, for every rank of a grid."""

from functools import partial

from rltrain.cluster.grid import Grid
from rltrain.reshard.families import Architecture, Row, canonical_tensors
from rltrain.reshard.layout import Layout, RankLayout, Segment, window
from rltrain.reshard.model_layout import Stage, TensorShare, build_rank, even_share, round_up

VOCAB_ROWS_MULTIPLE = 16
"""A rank's rows of the vocabulary are a multiple of this: what tensor cores want for any dtype."""


def padded_vocab_size(vocab_size: int, tp: int) -> int:
    """Rows of the vocabulary over all tensor-parallel ranks."""
    return round_up(vocab_size, VOCAB_ROWS_MULTIPLE * tp)


def megatron_layout(architecture: Architecture, grid: Grid, *, transformer_engine: bool = False) -> Layout:
    """`transformer_engine` takes the names of its fused layers.

    Every stage holds the same number of layers, so `grid.pp` must divide them; `grid.tp` must divide the query heads,
    and divide the KV heads or be a multiple of them.
    """
    stage_and_share = [(place.pp, place.tp) for place in map(grid.coordinates, grid.ranks)]
    return Layout(
        ranks=grid.ranks,
        parts=tuple(pp * grid.tp + tp for pp, tp in stage_and_share),
        tensors=canonical_tensors(architecture),
        build=partial(_build, architecture, grid.tp, grid.pp, transformer_engine),
    )


def _build(architecture: Architecture, tp: int, pp: int, transformer_engine: bool, part: int) -> RankLayout:
    stage, index = divmod(part, tp)
    first, count = even_share(architecture.num_layers, stage, pp, "layers")
    share = TensorShare(index, tp, _fused_rows(architecture, index, tp), padded_vocab_size(architecture.vocab_size, tp))
    return build_rank(
        architecture,
        Stage(range(first, first + count), embedding=stage == 0, head=stage == pp - 1),
        share,
        partial(_name, transformer_engine),
    )


def _name(transformer_engine: bool, row: Row) -> str:
    return row.megatron_te if transformer_engine and row.megatron_te else row.megatron


def _fused_rows(architecture: Architecture, index: int, tp: int) -> list[Segment]:
    """Rows of linear_qkv: per KV group its query heads, its key head, its value head, then cut into `tp` equal parts.

    Cuts fall inside a group where `tp` exceeds the KV heads.
    """
    head = architecture.head_dim
    group = architecture.query_size // architecture.num_kv_heads
    fused = []
    for kv in range(architecture.num_kv_heads):
        fused += [Segment(0, kv * group, group), Segment(1, kv * head, head), Segment(2, kv * head, head)]
    first, count = even_share(sum(segment.count for segment in fused), index, tp, "rows of linear_qkv")
    return window(fused, first, first + count)
