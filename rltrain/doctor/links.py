"""How fast ranks reach each other: within every node, and between every two of them."""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass

import torch
import torch.distributed as dist

from rltrain.runtime.nodes import NodeBoard
from rltrain.runtime.process_groups import ProcessGroups
from rltrain.runtime.world import World

NUM_REPETITIONS = 3
SLOW_SHARE = 0.5
"""Of the median of all links between nodes: a slower one is a fault."""


@dataclass(frozen=True)
class Link:
    """Bandwidths per rank: bytes that it must send, by the algorithm that sends fewest, over the slowest rank's time.

    `nodes` has one number for the ranks of a node among themselves. `failure` is empty where they reach each other.
    """

    nodes: tuple[int, ...]
    all_reduce_gb_s: float = 0.0
    all_to_all_gb_s: float = 0.0
    failure: str = ""


def rounds_of_pairs(count: int) -> Iterator[list[tuple[int, int]]]:
    """All pairs of `count` nodes, once each, in rounds in which no node is in two: a round-robin tournament."""
    places: list[int | None] = [*range(count), *([None] if count % 2 else [])]
    for _ in range(len(places) - 1):
        half = len(places) // 2
        pairs = zip(places[:half], reversed(places[half:]), strict=True)
        yield [(min(a, b), max(a, b)) for a, b in pairs if a is not None and b is not None]
        places.insert(1, places.pop())


def measure_links(world: World, num_bytes: int, timeout_s: float) -> list[Link] | None:
    """On rank 0; None on the others. `num_bytes` is what a rank has to reduce, or to send. Collective over: all ranks.

    Communicators of a round are gone before those of the next one are made.
    """
    rounds: list[list[tuple[int, ...]]] = [
        [(node,) for node in range(world.num_nodes)] if world.ranks_per_node > 1 else []
    ]
    rounds += [[*pairs] for pairs in rounds_of_pairs(world.num_nodes)]
    found: list[Link] = []
    for number, links in enumerate(filter(None, rounds)):
        ranks = {nodes: _ranks_of(nodes, world.ranks_per_node) for nodes in links}
        board = NodeBoard(world, f"links/{number}")
        for link in _measure_round(world, ranks, num_bytes, timeout_s):
            if world.rank == ranks[link.nodes][0]:
                board.say(asdict(link))
        if world.rank == 0:
            told = [board.heard(nodes[0]) for nodes in links]
            found += [Link(**{**one, "nodes": tuple(one["nodes"])}) for one in told]
            board.settle(True)
        board.settled()
    return found if world.rank == 0 else None


def slow_links(links: Sequence[Link]) -> list[Link]:
    """Those between nodes that are much slower than most."""
    between = [link for link in links if len(link.nodes) == 2 and not link.failure]
    if not between:
        return []
    usual = statistics.median(link.all_to_all_gb_s for link in between)
    return [link for link in between if link.all_to_all_gb_s < SLOW_SHARE * usual]


def _ranks_of(nodes: Sequence[int], ranks_per_node: int) -> tuple[int, ...]:
    return tuple(rank for node in nodes for rank in range(node * ranks_per_node, (node + 1) * ranks_per_node))


def _measure_round(
    world: World, links: dict[tuple[int, ...], tuple[int, ...]], num_bytes: int, timeout_s: float
) -> Iterator[Link]:
    """This rank's, if it is on one."""
    mine = next((nodes for nodes, ranks in links.items() if world.rank in ranks), None)
    lists = [*links.values()]
    try:
        groups = ProcessGroups(lists, backend=world.backend, timeout_s=timeout_s, reopenable=lists)
        if mine is not None:
            ranks = links[mine]
            link = _measure(mine, groups[ranks], groups.cpu[ranks], len(ranks), world.device, num_bytes)
            groups.close([ranks])
            yield link
    except (RuntimeError, dist.DistError) as error:
        if mine is not None:
            yield Link(mine, failure=str(error).splitlines()[0])


def _measure(
    nodes: tuple[int, ...],
    group: dist.ProcessGroup,
    cpu: dist.ProcessGroup,
    num_ranks: int,
    device: torch.device,
    num_bytes: int,
) -> Link:
    share = (num_ranks - 1) / num_ranks
    count = num_bytes // 4 // num_ranks * num_ranks
    sent, received = torch.ones(count, device=device), torch.empty(count, device=device)
    reduce_s = _seconds(lambda: dist.all_reduce(sent, group=group), cpu, device)
    exchange_s = _seconds(lambda: dist.all_to_all_single(received, sent, group=group), cpu, device)
    return Link(nodes, 2 * share * 4 * count / reduce_s / 1e9, share * 4 * count / exchange_s / 1e9)


def _seconds(run: Callable[[], object], cpu: dist.ProcessGroup, device: torch.device) -> float:
    """Of the fastest of a few, by the slowest rank; connections are made before."""
    taken = []
    for _ in range(1 + NUM_REPETITIONS):
        dist.barrier(group=cpu)
        start = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
        dist.all_reduce(seconds, dist.ReduceOp.MAX, group=cpu)
        taken.append(seconds.item())
    return min(taken[1:])
