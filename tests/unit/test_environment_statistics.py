"""Sums over episodes add up over ranks, however episodes are shared out among them."""

from hypothesis import given
from hypothesis import strategies as st

from rltrain.environments.batch import FAILURE_KINDS, EpisodeEvent, EpisodeFailure
from rltrain.environments.interface import Action, ToolCall
from rltrain.environments.statistics import EpisodeStatistics, added, metrics

CALL = Action("", (ToolCall("f", {}), ToolCall("g", {})))


def test_what_is_reported_of_a_game_with_tools() -> None:
    statistics = EpisodeStatistics()
    statistics.happened(EpisodeEvent(1, "p", seconds=1.0))
    statistics.acted(1, CALL)
    statistics.happened(EpisodeEvent(1, "o", seconds=3.0))
    statistics.acted(1, Action("a"))
    statistics.happened(EpisodeEvent(1, None, done=True, seconds=1.0, info={"won": 1.0, "level": 4, "name": "x"}))
    statistics.acted(2, Action("a"))
    statistics.happened(EpisodeEvent(2, "o", done=True, truncated=True, info={"won": 0.0}))
    statistics.acted(3, CALL)
    statistics.happened(
        EpisodeEvent(3, None, done=True, failure=EpisodeFailure("step_time", "took too long", "at line 3"))
    )
    statistics.acted(4, Action("a"))
    statistics.abandoned(4)
    statistics.began_anew(2)
    assert statistics.first_failure == "at line 3"
    assert metrics(added([statistics.take(), {}])) == {
        "won": 0.5,
        "level": 4.0,
        "episodes": 3,
        "turns_mean": 4 / 3,
        "truncated_ratio": 1 / 3,
        "seconds_mean": 5 / 3,
        "tool_calls": 4,
        "tool_call_s": 0.75,
        "failed": 1,
        **{f"failed_{kind}": float(kind == "step_time") for kind in FAILURE_KINDS},
        "observed_tokens": 0.0,
        "wait_s_mean": 0.0,
        "began_anew": 2,
    }
    assert metrics(statistics.take()) == {} and statistics.first_failure is None


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(0, 2), st.booleans()), min_size=1, max_size=12))
def test_ranks_add_up(episodes: list[tuple[int, int, bool]]) -> None:
    alone, ranks = EpisodeStatistics(), [EpisodeStatistics(), EpisodeStatistics()]
    for number, (num_turns, rank, fails) in enumerate(episodes):
        for statistics in (alone, ranks[rank % 2]):
            for turn in range(num_turns):
                statistics.acted(number, CALL)
                failure = EpisodeFailure("error", "it failed") if fails and turn == num_turns - 1 else None
                done = turn == num_turns - 1
                statistics.happened(
                    EpisodeEvent(number, "o", done=done, seconds=0.25, info={"n": turn}, failure=failure)
                )
    assert metrics(added(statistics.take() for statistics in ranks)) == metrics(alone.take())
