"""Beats that the first rank of a node gathers: what comes to the store, and what the others do where it does not."""

import select
import socket
import threading
import time
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from rltrain.runtime.ending import NEAR
from rltrain.runtime.heartbeat import Beat, Board
from rltrain.runtime.job_store import CONFIRMED_FOR_S, GATHERED_FROM, Gathered, Gatherer, OwnBeats, beats_of
from rltrain.runtime.world import LOOPBACK, World

FIRST, OTHER = 8, 9
NODE = 1
COMES_WITHIN_S = 10.0


class Node:
    """The first rank of a node and one more, on a clock of their own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.store: dist.Store = dist.HashStore()
        self.second = 0.0
        self.asked: list[str] = []
        """What the other rank has asked of the store, or said there, since the last `pass_a_second`."""
        self.gatherer = Gatherer(NODE, self.store, self._clock)
        self.other = Gathered(NODE, self.store, self._clock)
        monkeypatch.setattr(self.other.board, "put", self._noting("put", self.other.board.put))
        own = OwnBeats.job_ends

        def job_ends(one: OwnBeats) -> bool:
            self.asked += ["look"] if one is self.other else []
            return own(one)

        monkeypatch.setattr(OwnBeats, "job_ends", job_ends)

    def pass_a_second(self, *, first_runs: bool = True, first_looks: bool = True) -> list[str]:
        """What the other rank asked of the store in it."""
        self.second += 1
        self.asked.clear()
        self.other.put(Beat(OTHER, "update", alive=int(self.second)))
        self.other.job_ends()
        if first_runs and first_looks:
            self.gatherer.job_ends()
        if first_runs:
            comes(self.gatherer)
            self.gatherer.put(Beat(FIRST, "update", alive=int(self.second)))
            comes(self.other, COMES_WITHIN_S if first_looks else 0.05)
        return [*self.asked]

    def _clock(self) -> float:
        return self.second

    def _noting(self, what, call):
        def noted(beat: Beat) -> None:
            self.asked.append(what)
            call(beat)

        return noted


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    made = Node(monkeypatch)
    yield made
    made.gatherer._socket.close()
    made.other._socket.close()


def comes(one: Gatherer | Gathered, seconds: float = COMES_WITHIN_S) -> None:
    """Wait until a datagram is there."""
    select.select([one._socket], [], [], seconds)


def test_the_first_rank_speaks_and_asks_for_the_others_once_it_has_said_so(node: Node) -> None:
    assert node.pass_a_second() == ["put", "look"]
    for second in range(2, 6):
        assert node.pass_a_second() == []
        assert {rank: beat.alive for rank, beat in Board(node.store).read([FIRST, OTHER]).items()} == {
            FIRST: second,
            OTHER: second,
        }


FAULTS = {"ended": 1.0, "stopped": 1 + CONFIRMED_FOR_S, "its store does not answer": 2 * CONFIRMED_FOR_S}
"""Of the first rank -> seconds after which the others speak for themselves."""


@pytest.mark.parametrize("fault", FAULTS)
def test_the_others_speak_for_themselves_where_it_does_not(node: Node, fault: str) -> None:
    node.pass_a_second()
    assert node.pass_a_second() == []
    if fault == "ended":
        node.gatherer._socket.close()
    first = {"first_runs": fault == "its store does not answer", "first_looks": False}
    asked = [node.pass_a_second(**first) for _ in range(8)]
    alone = asked.index(["put", "look"])
    assert alone <= FAULTS[fault]
    assert all(asked[alone:])
    assert Board(node.store).read([OTHER])[OTHER].alive == node.second


def test_they_leave_it_to_the_first_rank_again_once_it_runs(node: Node) -> None:
    for _ in range(2):
        node.pass_a_second()
    while not node.pass_a_second(first_runs=False):
        pass
    node.pass_a_second()
    assert node.pass_a_second() == []


def test_that_the_job_ends_is_passed_on_at_once(node: Node) -> None:
    for _ in range(2):
        node.pass_a_second()
    node.store.set(NEAR, "1")
    begin = time.monotonic()
    waiting = threading.Thread(target=node.other.wait, args=(threading.Event(), 60.0))
    waiting.start()
    assert node.gatherer.job_ends()
    waiting.join(COMES_WITHIN_S)
    assert not waiting.is_alive() and time.monotonic() - begin < COMES_WITHIN_S
    assert node.other.job_ends()
    assert "look" not in node.pass_a_second(first_runs=False)


def test_a_last_beat_waits_for_nobody(node: Node) -> None:
    for _ in range(2):
        node.pass_a_second()
    node.other.put(Beat(OTHER, "finished", alive=3, finished=True))
    assert Board(node.store).read([OTHER])[OTHER].finished


def test_a_last_beat_is_not_undone_by_an_older_one_on_its_way(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the first rank has read an older one, and puts it after the other rank has put its last."""
    for _ in range(2):
        node.pass_a_second()
    node.other.put(Beat(OTHER, "update", alive=3))
    comes(node.gatherer)
    put_lines = node.gatherer.board.put_lines

    def finish_before(lines: dict[int, str]) -> None:
        monkeypatch.setattr(node.gatherer.board, "put_lines", put_lines)
        node.other.put(Beat(OTHER, "finished", alive=4, finished=True))
        comes(node.gatherer)
        put_lines(lines)

    monkeypatch.setattr(node.gatherer.board, "put_lines", finish_before)
    node.gatherer.put(Beat(FIRST, "finished", alive=3, finished=True))
    assert all(beat.finished for beat in Board(node.store).read([FIRST, OTHER]).values())


def test_strangers_of_the_machine_are_not_heard(node: Node) -> None:
    for _ in range(2):
        node.pass_a_second()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
        stranger.bind((LOOPBACK, 0))
        stranger.sendto(b"x" * 16 + b"10 5 {}", node.gatherer._socket.getsockname())
        comes(node.gatherer)
        node.gatherer.put(Beat(FIRST, alive=9))
    assert not Board(node.store).read([10])[10].alive


def test_a_beat_that_is_too_long_for_a_datagram_comes_to_the_store(node: Node) -> None:
    for _ in range(6):
        node.second += 1
        node.other.put(Beat(OTHER, "x" * 70_000, alive=int(node.second)))
    assert Board(node.store).read([OTHER])[OTHER].alive == 6


@pytest.mark.parametrize("size, ranks_per_node", [(GATHERED_FROM, 8), (GATHERED_FROM - 8, 8), (GATHERED_FROM, 1)])
def test_small_jobs_and_lone_ranks_gather_nothing(size: int, ranks_per_node: int) -> None:
    kinds = [
        type(beats_of(World(rank, size, rank % ranks_per_node, ranks_per_node, torch.device("cpu"), STORE, 10.0)))
        for rank in range(2)
    ]
    gathers = size >= GATHERED_FROM and ranks_per_node > 1
    assert kinds == ([Gatherer, Gathered] if gathers else [OwnBeats, OwnBeats])


class StoreThatClones(dist.HashStore):
    def clone(self) -> dist.Store:
        return self


STORE = StoreThatClones()
