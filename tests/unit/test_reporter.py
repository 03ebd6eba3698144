"""Metrics of all roles come together per step, in order, without holding anybody up."""

import json
from collections import Counter
from types import SimpleNamespace

import pytest

from rltrain.observability.reporter import Reporter


class FakeBulletin:
    """One process's view of a dictionary that all ranks share."""

    def __init__(self, shared: dict[str, str], rank: int):
        self.shared, self.world = shared, SimpleNamespace(rank=rank)

    def put(self, key, value):
        self.shared[key] = json.dumps(value)

    def has(self, *keys):
        return all(key in self.shared for key in keys)

    def get(self, key, waiting_for):
        assert key in self.shared, f"would wait for {waiting_for}"
        return json.loads(self.shared[key])

    def forget(self, key):
        del self.shared[key]


class FakeSink:
    def __init__(self, written: list):
        self.written = written

    def write(self, step, metrics):
        self.written.append((step, metrics))

    def close(self):
        self.written.append("closed")


@pytest.fixture
def reporters():
    """Rank 0 logs and adds two tasks a step, rank 1 one task a step; what was written."""
    shared: dict[str, str] = {}
    counts = Counter({0: 2, 1: 1})
    written: list[tuple[int, dict]] = []
    sinks = [[FakeSink(written)], []]
    ranks = [
        Reporter(FakeBulletin(shared, rank), lambda step: counts, range(3), [0, 1], 0, sinks[rank]) for rank in range(2)
    ]
    return ranks, written, shared


def test_a_step_is_written_once_all_ranks_have_published_it(reporters):
    (first, second), written, _ = reporters
    second.add(0, {"reward": 0.5})
    first.add(0, {"loss": 1.0})
    assert written == []
    first.add(0, {"lr": 0.1})
    assert [step for step, _ in written] == [0]
    assert written[0][1].keys() == {"reward", "loss", "lr", "perf/step_time_s"}


def test_a_slow_rank_delays_the_record_and_not_the_run(reporters):
    (first, second), written, _ = reporters
    for step in range(2):
        first.add(step, {"loss": 1.0})
        first.add(step, {"lr": 0.1})
    assert written == []
    second.add(0, {"reward": 0.0})
    second.add(1, {"reward": 1.0})
    first.add(2, {"loss": 2.0})
    assert [(step, metrics["reward"]) for step, metrics in written] == [(0, 0.0), (1, 1.0)]


def test_no_step_waits_for_a_late_rank_whose_metrics_come_by_themselves():
    """With the others' where they are there in time."""
    shared: dict[str, str] = {}
    counts = {0: Counter({0: 1, 1: 1}), 1: Counter({0: 1}), 2: Counter({0: 1, 1: 1})}
    written: list[tuple[int, dict]] = []
    first, late = (
        Reporter(FakeBulletin(shared, rank), counts.__getitem__, range(3), [0, 1], 0, [FakeSink(written)], late=[1])
        for rank in range(2)
    )
    for step in range(2):
        first.add(step, {"loss": 1.0})
    assert [(step, "score" in metrics) for step, metrics in written] == [(0, False), (1, False)]
    late.add(0, {"score": 0.25})
    late.add(2, {"score": 0.5})
    first.add(2, {"loss": 1.0})
    assert [(step, metrics.get("score"), "loss" in metrics) for step, metrics in written[2:]] == [
        (2, 0.5, True),
        (0, 0.25, False),
    ]
    late.close()
    first.close()
    assert not [key for key in shared if "closed" not in key], "nothing is left behind"


def test_closing_writes_steps_that_ended_early_and_leaves_nothing_behind(reporters):
    (first, second), written, shared = reporters
    first.add(0, {"loss": 1.0})
    second.add(0, {"reward": 0.5})
    second.close()
    first.close()
    assert written[0][0] == 0
    assert written[1:] == ["closed"]
    assert not [key for key in shared if "closed" not in key]


def test_seconds_of_a_task_that_comes_in_parts_add_up_and_the_rest_is_the_last_one(reporters):
    (first, second), written, _ = reporters
    second.add(0, {"reward": 0.5})
    first.add(0, {"perf/score_s": 1.5, "perf/score_wait_s": 4.0, "perf/train_tokens_per_s": 100.0, "loss": 3.0})
    first.add(0, {"perf/score_s": 0.25, "perf/score_wait_s": 3.0, "perf/train_tokens_per_s": 50.0, "loss": 2.0})
    metrics = written[0][1]
    assert (metrics["perf/score_s"], metrics["perf/score_wait_s"]) == (1.75, 7.0)
    assert (metrics["perf/train_tokens_per_s"], metrics["loss"]) == (50.0, 2.0)


def test_what_is_asked_for_at_publishing_is_asked_once_a_step():
    calls: list[int] = []

    def at_publish() -> dict[str, float]:
        calls.append(1)
        return {"memory/host_bytes": len(calls)}

    written: list = []
    counts = Counter({0: 2})
    reporter = Reporter(FakeBulletin({}, 0), lambda step: counts, range(2), [0], 0, [FakeSink(written)], at_publish)
    for step in (0, 0, 1, 1):
        reporter.add(step, {"loss": 1.0})
    assert [metrics["memory/host_bytes"] for _, metrics in written] == [1, 2]


def test_a_rank_without_a_role_waits_for_the_logging_rank_to_close(reporters):
    (first, second), _, _ = reporters
    with pytest.raises(AssertionError, match="would wait for the end of the run"):
        second.await_end()
    second.close()
    first.close()
    second.await_end()


def test_of_a_task_that_several_ranks_time_the_longest_counts(reporters):
    (first, second), written, _ = reporters
    second.add(0, {"perf/checkpoint_s": 0.0, "reward": 1.0})
    first.add(0, {"perf/checkpoint_s": 7.0, "reward": 2.0})
    first.add(0, {})
    assert written[0][1]["perf/checkpoint_s"] == 7.0
    second.add(1, {"perf/checkpoint_s": 8.0, "reward": 1.0})
    first.add(1, {"perf/checkpoint_s": 0.0, "reward": 2.0})
    first.add(1, {})
    assert (written[1][1]["perf/checkpoint_s"], written[1][1]["reward"]) == (8.0, 1.0)


def test_of_a_step_in_which_no_task_had_anything_to_tell_there_is_no_record():
    """Such as the boundary after the last step of a run that saves nothing there."""
    shared: dict[str, str] = {}
    written: list[tuple[int, dict]] = []
    tells, is_empty = [{"loss": 1.0}, {}], Counter({0: 1})
    reporter = Reporter(
        FakeBulletin(shared, 0), lambda step: is_empty, range(2), [0], 0, [FakeSink(written)], lambda: {"memory": 1.0}
    )
    for step, metrics in enumerate(tells):
        reporter.add(step, metrics)
    reporter.close()
    assert [record[0] for record in written[:-1]] == [0] and written[-1] == "closed"
