"""Says where Megatron's modules keep a checkpoint's tensors, for every rank of a grid."""

from functools import cache
from itertools import accumulate

from rltrain.models import Architecture, Row, Split, canonical_tensors, element_types
from rltrain.reshard.layout import Layout, RankLayout, Segment, window
from rltrain.reshard.model_layout import Chunk, ModelCutter, Side, TensorShare, even_share, expert_share, round_up
from rltrain.runtime.grid import Grid

VOCAB_ROWS_MULTIPLE = 16
"""A rank's rows of the vocabulary are a multiple of this: what tensor cores want for any dtype."""


def padded_vocab_size(vocab_size: int, tp: int) -> int:
    """Rows of the vocabulary over all tensor-parallel ranks."""
    return round_up(vocab_size, VOCAB_ROWS_MULTIPLE * tp)


def megatron_layout(
    architecture: Architecture,
    grid: Grid,
    *,
    dtype: str = "float32",
    transformer_engine: bool = False,
) -> Layout:
    """`dtype` is that of the parameters; `transformer_engine` takes the names of its fused layers and grouped experts.

    With `grid.vpp` above 1 a rank holds that many chunks of the model, whose names it prefixes with their numbers
    ("0.decoder...").

    `grid.tp` must divide the query heads, and divide the KV heads or be a multiple of them; `grid.ep` the experts.
    ValueError where something does not divide.
    """
    parts = _Parts(architecture, grid, transformer_engine, chunks_of(architecture, grid))
    return Layout(
        ranks=grid.ranks,
        parts=tuple(map(parts.number, grid.ranks)),
        tensors=canonical_tensors(architecture),
        types=element_types(architecture, dtype),
        build=parts.build,
    )


def chunks_of(architecture: Architecture, grid: Grid) -> tuple[tuple[Chunk, ...], ...]:
    """[grid.pp][grid.vpp]: the chunks of every stage, as in megatron_layout."""
    pp, num_chunks = grid.pp, grid.pp * grid.vpp
    if grid.vpp > 1 and pp == 1:
        raise ValueError(f"vpp is {grid.vpp} with pp 1; expected 1: there is no pipeline to interleave")
    counts = grid.layers_of_chunks(architecture.num_layers)
    ends = list(accumulate(counts))
    chunks = [
        Chunk(
            range(end - count, end),
            embedding=number == 0,
            head=number == num_chunks - 1,
            prefix=f"{number // pp}." if grid.vpp > 1 else "",
            prediction=number == num_chunks - 1 and bool(architecture.predicts),
        )
        for number, (count, end) in enumerate(zip(counts, ends, strict=True))
    ]
    return tuple(tuple(chunks[stage::pp]) for stage in range(pp))


class _Parts:
    """Numbers the distinct shares of a grid's ranks and makes their contents.

    A share is determined by the pipeline stage and the place in tensor parallelism, and where the stage has experts by
    the places in expert parallelism and in its tensor parallelism too.
    """

    def __init__(
        self, architecture: Architecture, grid: Grid, transformer_engine: bool, chunks: tuple[tuple[Chunk, ...], ...]
    ) -> None:
        even_share(architecture.num_heads, 0, grid.tp, "attention heads")
        self.architecture, self.grid, self.chunks = architecture, grid, chunks
        self.tp, self.ep, self.etp = grid.tp, grid.ep, grid.etp or grid.tp
        self.share = cache(self._share)
        self.cutter = ModelCutter(architecture, TRANSFORMER_ENGINE if transformer_engine else LOCAL)

    def number(self, rank: int) -> int:
        at = self.grid.coordinates(rank)
        number = at.pp * self.tp + at.tp
        if not self.architecture.moe:
            return number
        if not self._has_experts(at.pp):
            return number * self.ep * self.etp
        expert = self.grid.expert_coordinates(rank)
        return (number * self.ep + expert.ep) * self.etp + expert.etp

    def build(self, part: int) -> RankLayout:
        experts = None
        if self.architecture.moe:
            part, etp = divmod(part, self.etp)
            part, ep = divmod(part, self.ep)
            experts = expert_share(self.architecture, (ep, self.ep), (etp, self.etp))
        stage, tp = divmod(part, self.tp)
        return self.cutter.cut(self.chunks[stage], self.share(tp), experts)

    def _has_experts(self, stage: int) -> bool:
        sparse = self.architecture.sparse_layers
        chunks = self.chunks[stage]
        return any(sparse[layer] for chunk in chunks for layer in chunk.layers) or any(
            chunk.prediction and self.architecture.predicting_kind.sparse for chunk in chunks
        )

    def _share(self, index: int) -> TensorShare:
        rows = () if self.architecture.mla else _fused_rows(self.architecture, index, self.tp)
        return TensorShare(index, self.tp, rows, padded_vocab_size(self.architecture.vocab_size, self.tp))


def _local_split(row: Row) -> Split:
    return row.split_local or row.split


def _te_name(row: Row) -> str:
    return row.megatron_te or row.megatron


LOCAL = Side(name=lambda row: row.megatron, split=_local_split)
TRANSFORMER_ENGINE = Side(name=_te_name, split=lambda row: row.split)


def _fused_rows(architecture: Architecture, index: int, tp: int) -> list[Segment]:
    """Rows of linear_qkv: per KV group its query heads, with `gated_attention` their gates, its key head, its value
    head, then cut into `tp` equal parts.

    Cuts fall inside a group where `tp` exceeds the KV heads.
    """
    head = architecture.head_dim
    group = architecture.query_size // architecture.num_kv_heads
    widths = [group, group, head, head] if architecture.gated_attention else [group, head, head]
    fused = [
        Segment(section, kv * width, width)
        for kv in range(architecture.num_kv_heads)
        for section, width in enumerate(widths)
    ]
    first, count = even_share(sum(segment.count for segment in fused), index, tp, "rows of linear_qkv")
    return window(fused, first, first + count)
