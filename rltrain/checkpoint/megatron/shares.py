"""Which writer of a Megatron checkpoint writes what: as a model's ranks would hold it, each element once."""

from collections.abc import Iterator

from rltrain.checkpoint.megatron.keys import EMBEDDING, Chunk, GlobalTensors, Matrix
from rltrain.runtime.grid import Grid


def chunks_of_writer(tensors: GlobalTensors, writers: Grid, rank: int) -> Iterator[Chunk]:
    """The chunks that `rank` of `writers` writes, in the order of the model.

    Pipeline stages take consecutive layers, expert-parallel ranks consecutive experts, replicas turns. Numbers that do
    not divide give shares that differ by one. ValueError where the grid cannot hold its expert parallelism.
    """
    at = writers.coordinates(rank)
    expert_at = writers.expert_coordinates(rank)
    _, num_expert_replicas, ep, etp = writers.expert_array.shape
    num_layers, num_experts = tensors.architecture.num_layers, tensors.architecture.num_experts
    for matrix in tensors.matrices:
        if at.pp != _stage(matrix, num_layers, writers.pp) or at.cp != 0:
            continue
        if matrix.expert is None:
            if at.dp == (matrix.layer or 0) % writers.dp:
                yield from _cut(tensors, matrix, at.tp, writers.tp)
        elif (expert_at.ep, expert_at.dp) == (matrix.expert * ep // num_experts, matrix.expert % num_expert_replicas):
            yield from _cut(tensors, matrix, expert_at.etp, etp)


def _stage(matrix: Matrix, num_layers: int, num_stages: int) -> int:
    if matrix.layer is not None:
        return matrix.layer * num_stages // num_layers
    return 0 if matrix.key == EMBEDDING else num_stages - 1


def _cut(tensors: GlobalTensors, matrix: Matrix, index: int, size: int) -> Iterator[Chunk]:
    """Share `index` of `size` of a matrix, cut as tensor parallelism cuts its row of the table; whole where it does
    not."""
    axis = len(matrix.shape) - 1 if matrix.row.split == "columns" else 0
    if matrix.row.split == "replicated":
        if index == 0:
            yield tensors.chunk(matrix, (0,) * len(matrix.shape), matrix.shape)
        return
    num_blocks = len(matrix.row.parts) if matrix.row.split == "rows" else 1
    block = matrix.shape[axis] // num_blocks
    first, stop = block * index // size, block * (index + 1) // size
    if first == stop:
        return
    for number in range(num_blocks):
        offsets = tuple(number * block + first if i == axis else 0 for i in range(len(matrix.shape)))
        shape = tuple(stop - first if i == axis else length for i, length in enumerate(matrix.shape))
        yield tensors.chunk(matrix, offsets, shape)
