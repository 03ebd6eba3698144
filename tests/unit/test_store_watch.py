"""A rank whose store answers no more ends itself, with one message per host."""

import threading

import pytest

from rltrain.runtime.watchdog import StoreWatch


@pytest.mark.parametrize("local_rank", ["0", "1"])
def test_a_silent_store_ends_the_rank(
    local_rank: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LOCAL_RANK", local_rank)
    monkeypatch.setenv("MASTER_ADDR", "n1")
    ended = threading.Event()
    watch = StoreWatch(
        3, 0.3, "timeouts.lost_s", lambda: "is at update[4] (actor)", end=lambda status: ended.set(), look_s=0.02
    )
    watch.start()
    for _ in range(10):
        assert not ended.wait(0.05), "it answers"
        watch.answered()
    assert ended.wait(10)
    told = capsys.readouterr().err
    if local_rank == "0":
        assert (
            "rltrain: rank 3 on " in told
            and "is at update[4] (actor): the job's store on n1 has not answered" in told
            and "for timeouts.lost_s = 0.3 s" in told
        )
    else:
        assert not told


def test_a_watch_that_is_over_ends_nothing() -> None:
    ended = threading.Event()
    watch = StoreWatch(0, 0.05, "timeouts.lost_s", str, end=lambda status: ended.set(), look_s=0.02)
    watch.start()
    watch.stop()
    assert not ended.wait(0.3)
