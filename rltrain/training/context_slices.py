"""Which tokens of packed sequences each rank of context parallelism computes.

Every sequence is padded and cut into twice as many equal slices as there are ranks, of which rank r has slice r and the
r-th from behind. A token attends to all before it: so every rank has as much to do as the others, in every sequence
(Llama 3, arXiv:2407.21783, section 3.3.2). Transformer Engine cuts packed sequences the same way.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class ContextShare:
    """What rank `rank` of `size` computes of every sequence: of one rank all."""

    rank: int = 0
    size: int = 1

    @property
    def multiple(self) -> int:
        """Of which a sequence's padded length is one."""
        return 2 * self.size if self.size > 1 else 1

    def slices(self) -> tuple[int, int]:
        """The two that the rank has of 2 * size."""
        return self.rank, 2 * self.size - 1 - self.rank


WHOLE = ContextShare()


def places_of(lengths: Sequence[int], share: ContextShare) -> Tensor:
    """[rows] int64: where the tokens that a rank computes lie in sequences of `lengths` tokens, laid end to end.

    A sequence's two slices follow each other, sequence by sequence. Lengths are multiples of `share.multiple`.
    """
    sizes = torch.tensor(lengths, dtype=torch.int64)
    each, starts = sizes // (2 * share.size), sizes.cumsum(0) - sizes
    first = torch.stack([starts + number * each for number in share.slices()], dim=1)
    return ranges(first.flatten(), each.repeat_interleave(2))


def places_of_all(lengths: Sequence[int], size: int) -> Tensor:
    """[tokens] as `places_of`, of all ranks, one after the other: the order in which their rows are gathered."""
    return torch.cat([places_of(lengths, ContextShare(rank, size)) for rank in range(size)])


def inverse(order: Tensor) -> Tensor:
    """Of a permutation."""
    result = torch.empty_like(order)
    result[order] = torch.arange(len(order))
    return result


def ranges(starts: Tensor, lengths: Tensor) -> Tensor:
    """The integers from each start on, as many as its length, one range after the other."""
    begin = lengths.cumsum(0) - lengths
    return torch.repeat_interleave(starts - begin, lengths) + torch.arange(int(lengths.sum()))
