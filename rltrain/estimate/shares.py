"""What of a model lies on a rank: layers of its pipeline stage, and elements of its parameters."""

from dataclasses import dataclass, replace
from functools import lru_cache
from math import lcm, prod

from rltrain.models import Architecture
from rltrain.models.experts import is_expert
from rltrain.reshard.megatron_layout import chunks_of, megatron_layout
from rltrain.rollout.layout import engine_layout, engine_of
from rltrain.runtime.grid import Grid

PARAMETER_ALIGNMENT = 64
"""Elements: where Megatron's distributed optimizer lets a parameter begin in its buffers."""
BUFFER_ALIGNMENT = 128


@dataclass(frozen=True)
class Elements:
    """Sizes of a rank's parameters, those of experts apart, which other ranks share."""

    dense: tuple[int, ...]
    experts: tuple[int, ...] = ()

    @property
    def total(self) -> int:
        return sum(self.dense) + sum(self.experts)


def layers_of_chunks(architecture: Architecture, grid: Grid, stage: int) -> tuple[tuple[bool, ...], ...]:
    """[chunks of the stage][layers of the chunk]: which have experts."""
    sparse = architecture.sparse_layers
    return tuple(tuple(sparse[layer] for layer in chunk.layers) for chunk in chunks_of(architecture, grid)[stage])


def layers_of_stage(architecture: Architecture, grid: Grid, stage: int) -> tuple[bool, ...]:
    """[layers of the stage]: which have experts."""
    return tuple(sparse for chunk in layers_of_chunks(architecture, grid, stage) for sparse in chunk)


def trained_elements(architecture: Architecture, grid: Grid, stage: int) -> Elements:
    """Parameters on a rank of a pipeline stage, by the layout that training has."""
    return _trained(architecture, one_replica(grid), stage)


def one_replica(grid: Grid) -> Grid:
    """The smallest grid whose ranks hold what this one's do, with every expert once."""
    stage_ranks = lcm(grid.tp, grid.ep * (grid.etp or grid.tp))
    return replace(grid, ranks=tuple(range(grid.pp * stage_ranks)), cp=1)


@lru_cache(maxsize=4096)
def _trained(architecture: Architecture, grid: Grid, stage: int) -> Elements:
    layout = megatron_layout(architecture, grid, transformer_engine=True)
    parameters = layout.on(int(grid.array[stage].flat[0])).parameters
    return Elements(
        tuple(prod(shape) for name, shape in parameters if not is_expert(name)),
        tuple(prod(shape) for name, shape in parameters if is_expert(name)),
    )


@lru_cache(maxsize=1024)
def served_elements(architecture: Architecture, tp: int, ep: int = 1) -> int:
    """Of the parameters on a rank of an engine."""
    parameters = engine_layout(architecture, Grid(tuple(range(tp)), tp=tp, ep=ep)).on(0).parameters
    return sum(prod(shape) for _, shape in parameters)


@lru_cache(maxsize=1024)
def served_bytes(architecture: Architecture, tp: int, dtype: str, fp8: bool, ep: int = 1) -> int:
    """Of the same parameters in engines of `dtype`."""
    return engine_of(architecture, Grid(tuple(range(tp)), tp=tp, ep=ep), dtype=dtype, fp8=fp8).held_bytes(0)


def expert_data_parallel(grid: Grid) -> int:
    """Ranks that hold the same experts."""
    return len(grid.ranks) // (grid.pp * grid.ep * (grid.etp or grid.tp))


def in_buffers(sizes: tuple[int, ...], replicas: int) -> int:
    """Elements of the flat buffer that Megatron's distributed optimizer keeps parameters in, to be cut among
    `replicas`."""
    if not sizes:
        return 0
    end = 0
    for size in sizes:
        end = -(-end // PARAMETER_ALIGNMENT) * PARAMETER_ALIGNMENT + size
    multiple = lcm(replicas, BUFFER_ALIGNMENT)
    return -(-end // multiple) * multiple
