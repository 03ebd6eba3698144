"""What the doctor found of all nodes of a job together."""

from collections.abc import Iterator, Sequence

from rltrain.doctor.clocks import LARGEST_SKEW_S
from rltrain.doctor.finding import FINE, WRONG, Finding
from rltrain.doctor.links import Link, slow_links
from rltrain.doctor.storage import Storage
from rltrain.runtime.nodes import Compared

MOST_LINKS = 28
"""That are listed one by one: all of 8 nodes. Of more, so many of the slowest."""


def merged(by_node: Sequence[Sequence[Finding]], nodes: Compared) -> Iterator[Finding]:
    """What nodes have found of themselves: once where they agree, else once for each answer, with the nodes it is of.

    A fault where they do not agree on what has to be the same.
    """
    everyone = range(len(by_node))
    for what in dict.fromkeys(finding.what for findings in by_node for finding in findings):
        answers: dict[Finding, list[int]] = {}
        for node, findings in enumerate(by_node):
            for finding in findings:
                if finding.what == what:
                    answers.setdefault(finding, []).append(node)
        for finding, where in answers.items():
            if where == [*everyone]:
                yield finding
                continue
            state = WRONG if finding.compared else finding.state
            differs = "; differs between nodes" if finding.compared else ""
            yield Finding(what, state, f"{finding.detail}, on {nodes.name(where)}{differs}")


def of_links(links: Sequence[Link], nodes: Compared) -> Iterator[Finding]:
    """Failed ones, and those much slower than most, are faults. The slowest between nodes is named."""
    slow = slow_links(links)
    between = [link for link in links if len(link.nodes) == 2 and not link.failure]
    for link in _listed(links):
        name = f"within {nodes.name(link.nodes)}" if len(link.nodes) == 1 else f"between {nodes.name(link.nodes)}"
        if link.failure:
            yield Finding(name, WRONG, link.failure)
            continue
        told = f"all-reduce {link.all_reduce_gb_s:.3g} GB/s, all-to-all {link.all_to_all_gb_s:.3g} GB/s per rank"
        yield Finding(name, WRONG if link in slow else FINE, told + (", slower than most" if link in slow else ""))
    if between:
        slowest = min(between, key=lambda link: link.all_to_all_gb_s)
        told = f"{nodes.name(slowest.nodes)}, all-to-all {slowest.all_to_all_gb_s:.3g} GB/s"
        yield Finding("slowest link", WRONG if slow else FINE, told)


def of_clocks(skews_s: Sequence[float], nodes: Compared) -> Iterator[Finding]:
    """`skews_s` is by node, against the first one's clock."""
    if len(skews_s) == 1:
        return
    furthest = max(range(len(skews_s)), key=lambda node: abs(skews_s[node]))
    far = abs(skews_s[furthest])
    told = f"at most {far:.3g} s apart from node 0's, that of {nodes.name([furthest])}"
    yield Finding("clocks", WRONG if far > LARGEST_SKEW_S else FINE, told)


def of_storage(folder: str, by_node: Sequence[Storage], nodes: Compared) -> Iterator[Finding]:
    what = f"storage, {folder}"
    faulty = False
    for node, storage in enumerate(by_node):
        if storage.failure:
            yield Finding(what, WRONG, f"{storage.failure}, on {nodes.name([node])}")
        if storage.unseen:
            told = f"{nodes.name([node])} does not see what is written on {nodes.name(storage.unseen)}"
            yield Finding(what, WRONG, told)
        faulty = faulty or bool(storage.failure or storage.unseen)
    if not faulty:
        write, read = (
            min(speeds) for speeds in zip(*((one.write_gb_s, one.read_gb_s) for one in by_node), strict=True)
        )
        seen = f"shared by all {len(by_node)} nodes, " if len(by_node) > 1 else ""
        yield Finding(what, FINE, f"{seen}written at {write:.3g} GB/s and read at {read:.3g} GB/s by the slowest node")


def _listed(links: Sequence[Link]) -> Sequence[Link]:
    if len(links) <= MOST_LINKS:
        return links
    return sorted(links, key=lambda link: (not link.failure, link.all_to_all_gb_s))[:MOST_LINKS]
