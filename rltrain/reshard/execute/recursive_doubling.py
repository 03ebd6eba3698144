"""Sums and maxima of a few numbers over all ranks of a gloo group, in as many rounds as the number of ranks has bits.

Gloo's own all-reduce is a ring: its last rank is reached after twice as many messages as there are ranks, one after the
other, which thousands of ranks wait for. In recursive doubling (Thakur, Rabenseifner and Gropp 2005) every rank
exchanges what it knows with the one whose number differs in one bit, bit by bit.
"""

from collections.abc import Callable, Iterator
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

Round = tuple[Literal["exchange", "give", "take"], int]
"""What a rank does in it, and with whom. Who gives before it takes gets the result, else a part of it."""
Combine = Callable[[Tensor, Tensor], Tensor]

TAG = 2**30
"""Of no other message over the group: reshards count theirs from 0."""


def rounds(rank: int, num_ranks: int) -> Iterator[Round]:
    """Ranks from the largest power of two on have one below it speak for them."""
    power = 1 << (num_ranks.bit_length() - 1)
    if rank >= power:
        yield "give", rank - power
        yield "take", rank - power
        return
    represented = rank + power if rank + power < num_ranks else None
    if represented is not None:
        yield "take", represented
    for bit in range(power.bit_length() - 1):
        yield "exchange", rank ^ 1 << bit
    if represented is not None:
        yield "give", represented


def all_reduce(numbers: Tensor, combine: Combine, group: dist.ProcessGroup) -> Tensor:
    """`combine` of the `numbers` of all ranks, in an order of its own on each: for whole numbers. RuntimeError where
    another rank is lost. Collective over: `group`."""
    result, theirs = numbers.clone(), torch.empty_like(numbers)
    has_given = False
    for what, peer in rounds(group.rank(), group.size()):
        sending = group.send([result], peer, TAG) if what != "take" else None
        if what != "give":
            group.recv([theirs], peer, TAG).wait()
        if sending is not None:
            sending.wait()
        if what == "exchange" or (what == "take" and not has_given):
            result = combine(result, theirs)
        elif what == "take":
            result = theirs
        has_given = has_given or what == "give"
    return result
