"""Who keeps a second copy of whose files, and which checkpoints the memory of several nodes makes whole again."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple


class Key(NamedTuple):
    """A checkpoint in memory. Two of one step are the same where their manifests are: `digest` is of its bytes."""

    step: int
    digest: str


def origins(hosting: Iterable[int], ranks_per_node: int) -> dict[int, list[int]]:
    """By rank, those of whose files it keeps the copy: of the node before, of which the last one's follows the first.

    `hosting`: the ranks that have something to save. No rank of another node: nobody has a copy.
    """
    nodes: dict[int, list[int]] = {}
    for rank in sorted(hosting):
        nodes.setdefault(rank // ranks_per_node, []).append(rank)
    ranks = [*nodes.values()]
    found: dict[int, list[int]] = {rank: [] for of_node in ranks for rank in of_node}
    if len(ranks) > 1:
        for here, after in zip(ranks, [*ranks[1:], ranks[0]], strict=True):
            for index, rank in enumerate(here):
                found[after[index % len(after)]].append(rank)
    return found


def sources(names: Iterable[str], held: Sequence[Iterable[str]]) -> tuple[dict[str, int], list[str]]:
    """(the first node that has each of the files `names`, those that no node has); `held` is by node."""
    by_node = [frozenset(of_node) for of_node in held]
    found: dict[str, int] = {}
    missing: list[str] = []
    for name in sorted(names):
        node = next((node for node, has in enumerate(by_node) if name in has), None)
        if node is None:
            missing.append(name)
        else:
            found[name] = node
    return found, missing


def offered(by_node: Iterable[Iterable[Key]]) -> list[Key]:
    """All that any node says to hold, newest first; those of one step in an order that all ranks agree on."""
    return sorted({key for of_node in by_node for key in of_node}, key=lambda key: (-key.step, key.digest))
