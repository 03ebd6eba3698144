"""Which layers every stage of a pipeline holds, as Megatron's config says it."""

from collections.abc import Sequence

from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

from rltrain.reshard.model_layout import Chunk


class StageLayout(PipelineParallelLayerLayout):
    """Of `chunks` [stages][chunks of a stage], for the rank at `stage`.

    Megatron's own asks the global parallel state which stage and how many chunks are this rank's.
    """

    def __init__(self, chunks: Sequence[Sequence[Chunk]], stage: int) -> None:
        by_depth = [chunk for interleaved in zip(*chunks, strict=True) for chunk in interleaved]
        super().__init__([_layer_types(chunk) for chunk in by_depth], len(chunks))
        self.stage = stage

    def get_layer_offset(
        self, layer_type: LayerType = LayerType.decoder, vp_stage: int | None = None, pp_rank: int | None = None
    ) -> int:
        """Layers before those of this rank's chunk `vp_stage` (None: it has one)."""
        before = (vp_stage or 0) * self.pipeline_model_parallel_size + self.stage
        by_depth = [chunk for interleaved in zip(*self.layout, strict=True) for chunk in interleaved]
        return sum(types.count(layer_type) for types in by_depth[:before])

    def get_num_layers_to_build(
        self, layer_type: LayerType = LayerType.decoder, vp_stage: int | None = None, pp_rank: int | None = None
    ) -> int:
        """In this rank's chunk `vp_stage`."""
        types: list[LayerType] = self.layout[self.stage][vp_stage or 0]
        return types.count(layer_type)


def _layer_types(chunk: Chunk) -> list[LayerType]:
    ends = [LayerType.embedding] * chunk.embedding, [LayerType.loss] * chunk.head
    return [*ends[0], *[LayerType.decoder] * len(chunk.layers), *ends[1]]
