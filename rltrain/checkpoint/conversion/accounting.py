"""Every element of the source is read exactly once: here they are counted."""

from collections.abc import Iterator

import numpy as np
from torch import Tensor

from rltrain.checkpoint.conversion.processes import Processes
from rltrain.checkpoint.conversion.sources import Source
from rltrain.checkpoint.hf_reader import Box
from rltrain.errors import CheckpointError, listed
from rltrain.system.file_pages import populate

BLOCK_BYTES = 8 * 2**20
"""What is read at a time, in whole rows of a tensor: so little that what is made of it lies in the same memory over and
over. Being given new memory takes longer than copying."""


class CountedSource:
    """Reads a source and counts by tensor the elements that were read. What is written, the writers count themselves:
    they refuse what is not due, and files that lack something."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.num_read = np.zeros(len(source.tensors.names), dtype=np.int64)

    def read(self, box: Box) -> Tensor:
        """[rows, cols] of one tensor, in the source's type."""
        self.num_read[box.tensor] += box.rows * box.cols
        values = self.source.read(box)
        populate(values.data_ptr(), (values.stride(0) * (values.shape[0] - 1) + values.shape[1]) * values.itemsize)
        return values

    def refuse_other_than_once(self, processes: Processes) -> None:
        """CheckpointError that lists tensors of which not every element was read once, by any process.

        Collective over: all processes.
        """
        shares = [np.frombuffer(share, dtype=np.int64) for share in processes.gather(self.num_read.tobytes())]
        total, expected = np.sum(shares, axis=0), self.source.tensors.matrix_shapes.prod(axis=1)
        wrong = [
            f"{self.source.tensors.names[tensor]} ({total[tensor]} of {expected[tensor]} elements)"
            for tensor in np.flatnonzero(total != expected)
        ]
        if wrong:
            raise CheckpointError(
                f"{self.source.path}: {len(wrong)} tensors were not taken exactly once: {listed(wrong, 8)}. Nothing "
                "was written; this is a mistake of the converter, which its authors want to know"
            )


def row_blocks(source: Source, tensor: int) -> Iterator[Box]:
    """A tensor in boxes of whole rows, about BLOCK_BYTES large. A vector is one row."""
    rows, cols = (int(size) for size in source.tensors.matrix_shapes[tensor])
    step = max(1, BLOCK_BYTES // (cols * source.dtypes[tensor].itemsize))
    for first in range(0, rows, step):
        yield Box(tensor, first, 0, min(step, rows - first), cols)
