"""Who judges where the ranks that would be first to do it do not run, and what the verdict says."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from rltrain.config.schema import Timeouts
from rltrain.runtime.heartbeat import Beat, Board
from rltrain.runtime.job_store import JobStore
from rltrain.runtime.watchdog import Watchdog
from rltrain.runtime.world import World
from tests.unit.shared_store import open_store

NUM_RANKS = 9
NO_PROGRESS_S = 16


class Node:
    """The watchdogs of a job's ranks, on a clock of their own; those that are `frozen` say nothing more, and the others
    get no further without them."""

    def __init__(self, store: dist.Store, folder: Path) -> None:
        self.second = self.still_s = 0
        self.board = Board(store)
        limits = Timeouts(no_progress_s=NO_PROGRESS_S)
        self.watchdogs = {}
        for rank in range(NUM_RANKS):
            world = World(rank, NUM_RANKS, rank, NUM_RANKS, torch.device("cpu"), store, timeout_s=10, timeouts=limits)
            job_store = JobStore(world, guarded=True)
            watchdog = Watchdog(job_store.heartbeat, job_store.observer, store, folder)
            watchdog.observer.clock = lambda: float(self.second)
            self.watchdogs[rank] = watchdog

    def pass_a_second(self, frozen: range) -> dict[int, str | None]:
        """Rank -> the stall that it sees, of those that judge."""
        self.second += 1
        self.still_s = self.still_s + 1 if frozen else 0
        beat = Beat(0, "update", "actor", 3, position=7, still_s=self.still_s, alive=self.second, process="elsewhere 1")
        running = [rank for rank in range(NUM_RANKS) if rank not in frozen]
        for rank in running:
            self.board.put(replace(beat, rank=rank))
        judging = [rank for rank in running if self.watchdogs[rank]._judges()]
        return {rank: str(self.watchdogs[rank].observer.verdict() or "") for rank in judging}


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    with open_store() as store:
        yield Node(store, tmp_path)


def test_the_lowest_rank_judges(node: Node) -> None:
    assert [node.pass_a_second(frozen=range(0)) for _ in range(5)] == [{0: ""}] * 5


@pytest.mark.parametrize("frozen", [range(1), range(NUM_RANKS - 1)], ids=["rank 0", "all but the last rank"])
def test_where_it_does_not_run_the_next_one_finds_it_hardly_later(node: Node, frozen: range) -> None:
    node.pass_a_second(frozen=range(0))
    verdicts = [node.pass_a_second(frozen) for _ in range(NO_PROGRESS_S + 3)]
    found = next(second for second, judged in enumerate(verdicts) if any(judged.values()))
    assert found <= NO_PROGRESS_S + 2, "in seconds from the last beat on"
    (verdict,) = verdicts[found].values()
    assert verdict is not None and f"rank 0 was last known to be at update[3] (actor), {found + 1} s ago" in verdict
