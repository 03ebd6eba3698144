"""How far the clocks of nodes are apart."""

import time

import torch
import torch.distributed as dist

from rltrain.runtime.world import World

NUM_QUESTIONS = 8
LARGEST_SKEW_S = 1.0
"""Ranks tell how long others have been at work by the clock, and logs of nodes are read side by side."""


def skew_s(world: World) -> float | None:
    """Seconds by which rank 0's clock is ahead of this node's, as far as the network tells: half of the fastest of a
    few round trips. 0 on rank 0; None on ranks that are not the first of their node. Collective over: the first ranks.
    """
    if world.local_rank:
        return None
    if world.rank:
        return _ask()
    for node in range(1, world.num_nodes):
        _answer(node * world.ranks_per_node)
    return 0.0


def _ask() -> float:
    best_s, skew = float("inf"), 0.0
    answer = torch.zeros(1, dtype=torch.float64)
    for _ in range(NUM_QUESTIONS):
        asked = time.time()
        dist.send(answer, 0)
        dist.recv(answer, 0)
        answered = time.time()
        if answered - asked < best_s:
            best_s = answered - asked
            skew = answer.item() - (asked + answered) / 2
    return skew


def _answer(rank: int) -> None:
    now = torch.zeros(1, dtype=torch.float64)
    for _ in range(NUM_QUESTIONS):
        dist.recv(now, rank)
        now.fill_(time.time())
        dist.send(now, rank)
