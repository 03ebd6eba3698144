"""The doctor under torchrun: checks links, clocks, storage and implementations on all nodes."""

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
    WRONG,
    Finding,
    has_fault,
    lines_of,
    of_this_node,
)
from rltrain.config.schema import Config, Model
from rltrain.reshard import native
from rltrain.runtime import shared_memory
from rltrain.runtime.ending import Ending
from rltrain.runtime.nodes import VISIBLE_WITHIN_S, Compared, NodeBoard, Spoken, comes_to_be, compare_nodes
from rltrain.runtime.process_groups import ProcessGroups
from rltrain.runtime.world import World, join_world, start_process_groups

# The bandwidth of links within every node and between every two nodes.

NUM_REPETITIONS = 3
SLOW_SHARE = 0.5
"""Share of the median bandwidth of links between nodes. A slower link is a fault."""


@dataclass(frozen=True)
class Link:
    """The bandwidths of a link in GB/s per rank. They are the fewest bytes a rank has to send, over the time of the
    slowest rank.

    `nodes` has one number for links within a node. `failure` is empty if the ranks reach each other.
    """

    nodes: tuple[int, ...]
    all_reduce_gb_s: float = 0.0
    all_to_all_gb_s: float = 0.0
    failure: str = ""


def rounds_of_pairs(count: int) -> Iterator[list[tuple[int, int]]]:
    """Yields rounds with all pairs of `count` nodes, each pair once. No node is in two pairs of a round (round-robin
    tournament)."""
    places: list[int | None] = [*range(count), *([None] if count % 2 else [])]
    for _ in range(len(places) - 1):
        half = len(places) // 2
        pairs = zip(places[:half], reversed(places[half:]), strict=True)
        yield [(min(a, b), max(a, b)) for a, b in pairs if a is not None and b is not None]
        places.insert(1, places.pop())


def measure_links(world: World, num_bytes: int, timeout_s: float) -> list[Link] | None:
    """Measures all links with `num_bytes` per rank to reduce or to send. Returns them on rank 0, and None on all other
    ranks. Collective over: all ranks.

    The communicators of a round are closed before the next round.
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
    """Returns the links between nodes much slower than the median."""
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
    """Yields the link of this rank, if the round has one."""
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
    """Returns the time of the fastest of a few runs, on the slowest rank. A first run makes the connections."""
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


# Visibility and speed of files in a shared folder.

BLOCK_BYTES = 1 << 20


@dataclass(frozen=True)
class Storage:
    """The results of a folder on one node."""

    write_gb_s: float = 0.0
    """Bandwidth of writing until the file is durable."""
    read_gb_s: float = 0.0
    """Bandwidth of reading the next node's file. At most the file server has it in memory."""
    unseen: tuple[int, ...] = ()
    """Nodes with files invisible to this node."""
    failure: str = ""


def try_storage(world: World, folder: Path, num_bytes: int) -> list[Storage] | None:
    """Tests a folder: every node writes a file and reads the next node's file. All files are removed. Returns the
    results by node on rank 0, and None on all other ranks.

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
    """Returns (GB/s, reason of a failure). The reason is empty after success."""
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


# The differences between the clocks of nodes.

NUM_QUESTIONS = 8
LARGEST_SKEW_S = 1.0
"""Largest tolerated difference. Ranks compare times of work by the clock, and users compare logs of nodes."""


def skew_s(world: World) -> float | None:
    """Returns the seconds by which rank 0's clock is ahead of this node's.

    The error is at most half of the fastest of a few round trips. Returns 0 on rank 0, and None on ranks that are not
    the first of their node. Collective over: the first ranks of all nodes.
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


# The report about all nodes.

MOST_LINKS = 28
"""Most links in the report: all links of 8 nodes. With more nodes only the slowest are listed."""


def merged(by_node: Sequence[Sequence[Finding]], nodes: Compared) -> Iterator[Finding]:
    """Yields the findings of all nodes. Equal findings are merged into one. Different ones have the names of their
    nodes.

    A difference is a fault if the finding has to be equal on all nodes.
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
    """Yields findings about links. Failed links and links much slower than most are faults. The last one names the
    slowest link between nodes."""
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
    """Yields the finding about clocks. `skews_s` has the difference to the first node's clock for each node."""
    if len(skews_s) == 1:
        return
    furthest = max(range(len(skews_s)), key=lambda node: abs(skews_s[node]))
    far = abs(skews_s[furthest])
    told = f"at most {far:.3g} s from the clock of node 0, on {nodes.name([furthest])}"
    yield Finding("clocks", WRONG if far > LARGEST_SKEW_S else FINE, told)


def of_storage(folder: str, by_node: Sequence[Storage], nodes: Compared) -> Iterator[Finding]:
    """Yields the findings about a folder: faults of nodes, or else the speed of the slowest node."""
    what = f"storage, {folder}"
    faulty = False
    for node, storage in enumerate(by_node):
        if storage.failure:
            yield Finding(what, WRONG, f"{storage.failure}, on {nodes.name([node])}")
        if storage.unseen:
            told = f"{nodes.name([node])} does not see files written on {nodes.name(storage.unseen)}"
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


# The implementations used by a job on this machine.


def paths_taken() -> Iterator[Finding]:
    """Yields the implementations used by a model with default settings, with reasons."""
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu")
    yield Finding("collectives", FINE, "NCCL on GPUs, gloo on the host" if on_gpu else "gloo: no GPU")
    yield _layers(device)
    yield from (_copies(device_type) for device_type in ("cpu", "cuda"))
    yield _between_ranks(on_gpu)


def _layers(device: torch.device) -> Finding:
    from rltrain.training.megatron.model_config import obstacle_to_transformer_engine

    obstacle = obstacle_to_transformer_engine(Model(path="-"), device)
    if obstacle is None:
        return Finding("layers", FINE, "Transformer Engine's, except in float32", True)
    problem, remedy = obstacle
    return Finding("layers", LACKING, f"Megatron's own: {problem} ({remedy})", True)


def _copies(device_type: str) -> Finding:
    """Returns the implementation for packing and unpacking weights in a sync."""
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
        return Finding(what, FINE, "shared memory")
    return Finding(what, LACKING, "gloo: this system lacks memfd_create")


# The doctor in a job of ranks. Rank 0 prints the report of all nodes.

WAIT_S = 60.0
"""Seconds for ranks to start, and for any answer of another node."""


def examine_job(config: Config | None, sglang_python: Path | None, shared: list[Path], num_bytes: int) -> int:
    """Checks all nodes and prints the report on rank 0. Returns the exit status on all ranks: 1 if there is a fault.
    Collective over: all ranks."""
    world = join_world(WAIT_S)
    logging.basicConfig(level=logging.ERROR)
    try:
        start_process_groups(world, WAIT_S)
        mine = [*of_this_node(config, sglang_python, shared)] if world.local_rank == 0 else []
        findings = _examine(world, mine, shared, num_bytes)
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


def _examine(world: World, mine: list[Finding], shared: list[Path], num_bytes: int) -> list[Finding] | None:
    """Returns the findings on rank 0, and None on all other ranks. `mine` has those about this node alone.

    Collective over: all ranks.
    """
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
