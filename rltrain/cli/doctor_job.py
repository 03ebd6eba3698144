"""The doctor's part in a job of ranks: links, clocks, storage and implementations of all nodes."""

import logging
import os
import statistics
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from rltrain.cli.doctor import (
    FINE,
    LACKING,
    MISSING,
    WRONG,
    Finding,
    has_fault,
    lines_of,
    what_is_allowed,
    what_is_installed,
)
from rltrain.config.schema import Model
from rltrain.reshard import native
from rltrain.runtime import shared_memory
from rltrain.runtime.ending import Ending
from rltrain.runtime.nodes import VISIBLE_WITHIN_S, Compared, NodeBoard, Spoken, comes_to_be, compare_nodes
from rltrain.runtime.process_groups import ProcessGroups
from rltrain.runtime.world import World, join_world, start_process_groups

# How fast ranks reach each other: within every node, and between every two of them.

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


# Whether nodes see what others write to a folder, and how fast it is.

BLOCK_BYTES = 1 << 20


@dataclass(frozen=True)
class Storage:
    """A folder as one node has it."""

    write_gb_s: float = 0.0
    """Until the file is durable."""
    read_gb_s: float = 0.0
    """Of the next node's file, which only the file system's own server may have in memory."""
    unseen: tuple[int, ...] = ()
    """Nodes whose files do not come to be seen here."""
    failure: str = ""


def try_storage(world: World, folder: Path, num_bytes: int) -> list[Storage] | None:
    """By node, on rank 0; None on the others. Every node writes a file and reads the others'; all are removed.

    Collective over: the first ranks of all nodes.
    """
    if world.local_rank:
        return None
    board = NodeBoard(world, f"storage{folder}")
    if world.rank == 0:
        board.say(uuid.uuid4().hex, "job")
    job, nodes = board.heard(0, "job"), range(world.num_nodes)
    files = [folder / f".rltrain-doctor-{job}-{node}" for node in nodes]
    write_gb_s, failure = _write(files[world.node], num_bytes)
    board.say(not failure, "written")
    written = board.of_all("written")
    deadline = time.monotonic() + VISIBLE_WITHIN_S
    expected = [node for node in nodes if node != world.node and written[node]]
    unseen = tuple(node for node in expected if not comes_to_be(partial(_holds, files[node], num_bytes), deadline))
    next_node = (world.node + 1) % world.num_nodes
    read_gb_s = _read(files[next_node], num_bytes) if written[next_node] and next_node not in unseen else 0.0
    board.say([write_gb_s, read_gb_s, unseen, failure])
    said = board.of_all()  # before the files are removed: all have looked
    files[world.node].unlink(missing_ok=True)
    if world.rank != 0:
        return None
    return [Storage(write, read, tuple(missed), failed) for write, read, missed, failed in said]


def _write(path: Path, num_bytes: int) -> tuple[float, str]:
    """(GB/s, why it failed)."""
    block, start = os.urandom(BLOCK_BYTES), time.perf_counter()
    try:
        with path.open("wb") as file:
            for _ in range(num_bytes // BLOCK_BYTES):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return 0.0, f"cannot be written: {error.strerror}"
    return num_bytes / (time.perf_counter() - start) / 1e9, ""


def _holds(path: Path, num_bytes: int) -> bool:
    return path.exists() and path.stat().st_size >= num_bytes // BLOCK_BYTES * BLOCK_BYTES


def _read(path: Path, num_bytes: int) -> float:
    start = time.perf_counter()
    with path.open("rb") as file:
        while file.read(BLOCK_BYTES):
            pass
    return num_bytes / (time.perf_counter() - start) / 1e9


# How far the clocks of nodes are apart.

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


# What the doctor found of all nodes of a job together.

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


# Which of several implementations a job would take here, and why.


def paths_taken() -> Iterator[Finding]:
    """Of a model with the default settings."""
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu")
    yield Finding("collectives", FINE, "NCCL, and gloo for what lies on the host" if on_gpu else "gloo: no GPU")
    yield _layers(device)
    yield from (_copies(device_type) for device_type in ("cpu", "cuda"))
    yield _between_ranks(on_gpu)


def _layers(device: torch.device) -> Finding:
    from rltrain.training.megatron.model import obstacle_to_transformer_engine

    obstacle = obstacle_to_transformer_engine(Model(path="-"), device)
    if obstacle is None:
        return Finding("layers", FINE, "Transformer Engine's, except in float32", True)
    problem, remedy = obstacle
    return Finding("layers", LACKING, f"Megatron's own: {problem} ({remedy})", True)


def _copies(device_type: str) -> Finding:
    """What packs and unpacks weights in a sync."""
    what = f"copies of weights, {device_type}"
    if native.mode() == "off":
        return Finding(what, LACKING, f"torch operations: {native.VARIABLE} is off", True)
    try:
        native.cpu_library() if device_type == "cpu" else native.cuda_library()
    except native.LibraryError as error:
        return Finding(what, LACKING, f"torch operations, slower: {error}. To change that, {native.REBUILD}", True)
    return Finding(what, FINE, "the native library", True)


def _between_ranks(on_gpu: bool) -> Finding:
    what = "weights between ranks of a node"
    if on_gpu:
        return Finding(what, FINE, "NCCL")
    if shared_memory.AVAILABLE:
        return Finding(what, FINE, "memory that they share")
    return Finding(what, LACKING, "gloo: this system has no memory without a name (memfd_create)")


# The doctor's part in a job of ranks: every node says what it has, links are measured, rank 0 prints one report.

WAIT_S = 60.0
"""For ranks to start, and for any answer of another node."""


def examine_job(sglang_python: Path | None, shared: list[Path], num_bytes: int) -> int:
    """Exit status, the same on all ranks: 1 where there is a fault. Collective over: all ranks."""
    world = join_world(WAIT_S)
    logging.basicConfig(level=logging.ERROR)
    try:
        start_process_groups(world, WAIT_S)
        findings = _examine(world, sglang_python, shared, num_bytes)
    except Exception as error:
        Ending(world.store, world.rank, world.size).by(error)
    if findings is not None:
        print("\n".join(lines_of(findings)), flush=True)
    verdict = NodeBoard(world, "verdict")
    if findings is not None:
        verdict.settle(has_fault(findings))
    status = int(verdict.settled())
    dist.destroy_process_group()
    return status


def _examine(world: World, sglang_python: Path | None, shared: list[Path], num_bytes: int) -> list[Finding] | None:
    """On rank 0; None on the others."""
    mine = _of_this_node(sglang_python, shared) if world.local_rank == 0 else []
    board = NodeBoard(world, "findings")
    if board.speaks:
        board.say([asdict(finding) for finding in mine])
    nodes = compare_nodes(NodeBoard(world, "hosts"), Spoken({}) if board.speaks else None)
    links = measure_links(world, num_bytes, WAIT_S)
    clocks = NodeBoard(world, "clocks")
    if (skew := skew_s(world)) is not None:
        clocks.say(skew)
    storages = {folder: try_storage(world, folder, num_bytes) for folder in shared}
    if nodes is None or links is None:
        return None
    findings = [*merged([[Finding(**one) for one in told] for told in board.of_all()], nodes)]
    findings += of_clocks(clocks.of_all(), nodes)
    for folder, by_node in storages.items():
        findings += of_storage(str(folder), by_node or [], nodes)
    return [*findings, *of_links(links, nodes)]


def _of_this_node(sglang_python: Path | None, shared: list[Path]) -> list[Finding]:
    found = [*what_is_installed(sglang_python), *what_is_allowed(shared)]
    if not any(finding.state == MISSING for finding in found):
        found += paths_taken()
    return found
