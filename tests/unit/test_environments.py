"""Tests of environments on their ranks: hosts, workers, statistics, the Python tool."""

import logging
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rltrain.environments.batch import FAILURE_KINDS, EnvironmentFactory, EpisodeEvent, EpisodeFailure, EpisodeLimits
from rltrain.environments.host import EnvironmentHost
from rltrain.environments.interface import Action, TokenIds, ToolCall, Trajectory
from rltrain.environments.python_tool import PythonTool
from rltrain.environments.statistics import EpisodeStatistics, added, metrics
from rltrain.errors import ConfigError
from rltrain.roles.env import EnvRole
from rltrain.runtime.machine import has_ended, process_here
from tests.support.schedule_configs import make_config

MODULE = "tests.support.user_environments"
LONG_S = 60.0
"""Seconds until a test counts as hung."""

Start = Callable[..., EnvironmentHost]


@pytest.fixture
def start() -> Iterator[Start]:
    """Yields a function that starts a host of an environment. The hosts end with the test."""
    hosts: list[EnvironmentHost] = []

    def started(name: str, *, num_workers: int = 1, batch_size: int = 1, **limits: Any) -> EnvironmentHost:
        factory = EnvironmentFactory(f"{MODULE}:{name}", limits.pop("options", {}))
        host = EnvironmentHost(factory, num_workers=num_workers, batch_size=batch_size, limits=EpisodeLimits(**limits))
        hosts.append(host)
        return host

    yield started
    for host in hosts:
        live = Counter(batch.place for batch in {*host._batches.values()} for _ in batch.live)
        assert host._loads == [live[place] for place in range(len(host._loads))]
        host.close()


def next_events(host: EnvironmentHost, count: int) -> list[EpisodeEvent]:
    """Waits for `count` events and returns them sorted by episode."""
    events: list[EpisodeEvent] = []
    while len(events) < count:
        assert host.wait(LONG_S), "nothing happens"
        events += host.events()
    assert len(events) == count
    return sorted(events, key=lambda event: event.episode)


def begin(host: EnvironmentHost, *episodes: int, **row: Any) -> list[EpisodeEvent]:
    for episode in episodes:
        host.begin(episode, {"name": f"n{episode}", **row}, seed=episode)
    return next_events(host, len(episodes))


def act(host: EnvironmentHost, **texts: str) -> list[EpisodeEvent]:
    """Acts by name. Episode 3 is e3."""
    for name, text in texts.items():
        host.act(int(name[1:]), Action(text))
    return next_events(host, len(texts))


def test_episodes_of_a_batch_step_together(start: Start) -> None:
    host = start("Counting", batch_size=2, options={"greeting": "hi"})
    assert [event.observation for event in begin(host, 1, 2)] == ["hi n1 1 of 2", "hi n2 2 of 2"]
    host.act(1, Action("abc"))
    assert not host.wait(0.2)
    host.act(2, Action("stop"))
    first, second = next_events(host, 2)
    assert (first.observation, first.reward, first.done, first.info) == ("abc 1", 3.0, False, {"turns": 1})
    assert (second.observation, second.reward, second.done) == (None, 4.0, True)
    assert first.seconds == second.seconds > 0
    (alone,) = act(host, e1="stop")
    assert alone.done and alone.info == {"turns": 2}


def test_no_batch_waits_for_episodes_that_nobody_begins(start: Start) -> None:
    host = start("Counting", batch_size=4)
    events = begin(host, *range(6))
    assert [str(event.observation)[-1] for event in events] == ["4", "4", "4", "4", "2", "2"]


def test_episodes_begun_one_after_the_other_share_a_batch(start: Start) -> None:
    host = start("Counting", batch_size=4)
    for episode in range(3):
        host.begin(episode, {"name": "x"}, seed=episode)
        assert host.events() == []
    assert [str(event.observation)[-4:] for event in next_events(host, 3)] == ["of 3"] * 3


def test_abandoned_episodes_hold_up_nobody_and_say_nothing(start: Start) -> None:
    host = start("Counting", batch_size=3)
    begin(host, 1, 2, 3)
    host.act(1, Action("a"))
    host.abandon(2)
    host.act(3, Action("c"))
    assert [event.observation for event in next_events(host, 2)] == ["a 1", "c 1"]
    host.act(1, Action("a"))
    host.act(3, Action("stop"))
    host.wait(LONG_S)
    host.abandon(3)
    assert [event.episode for event in host.events()] == [1]
    host.begin(4, {"name": "x"}, 0)
    host.abandon(4)
    host.abandon(1)
    assert not host.wait(0.0)
    assert len(begin(host, 1, 2, 3)) == 3, "the numbers of abandoned episodes are free"


def test_environments_are_used_again(start: Start) -> None:
    host = start("Counting")
    for episode in range(3):
        begin(host, episode)
        act(host, **{f"e{episode}": "stop"})
    assert host._workers[0]._num_environments == 1


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        ("raises", "KeyError: 'no such thing' ("),
        ("exits", "SystemExit: gone ("),
        ("returns nan", "returned the reward nan; expected a finite number"),
        ("returns half a character", "returned an observation with '\\ud83d', half of a surrogate pair"),
        ("returns 1e39", "returned the reward 1e+39; expected a finite number from -3.4e+38 to 3.4e+38"),
        ("returns nothing", "step returned NoneType None for an unfinished episode; expected a StepResult"),
        ("returns an odd observation", "returned the observation int 5; expected a text, chat messages or TokenIds"),
    ],
)
def test_an_error_costs_the_episode(misbehaving: EnvironmentHost, order: str, expected: str) -> None:
    begin(misbehaving, 1, 2)
    (event,) = act(misbehaving, e1=order)
    assert event.done and event.failure is not None and event.failure.kind == "error"
    assert event.failure.description.startswith(expected)
    (other,) = act(misbehaving, e2="stop")
    assert other.failure is None and other.reward == 1.0


@pytest.fixture(scope="module")
def misbehaving() -> Iterator[EnvironmentHost]:
    factory = EnvironmentFactory(f"{MODULE}:Misbehaving")
    with EnvironmentHost(factory, num_workers=1, limits=EpisodeLimits(step_s=LONG_S)) as host:
        yield host
        assert host._workers[0].calls == {}
        assert host._loads == [sum(len(batch.live) for batch in host._batches.values())]


def test_what_it_prints_is_no_answer(misbehaving: EnvironmentHost) -> None:
    begin(misbehaving, 1)
    (event,) = act(misbehaving, e1="prints")
    assert event.done and event.failure is None


def test_a_traceback_tells_where(misbehaving: EnvironmentHost) -> None:
    begin(misbehaving, 1)
    (event,) = act(misbehaving, e1="raises")
    assert "user_environments.py" in event.failure.traceback and "worker.py" not in event.failure.traceback


def test_equal_failures_are_said_once(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    host = start("Misbehaving")
    with caplog.at_level(logging.WARNING):
        for episode in range(12):
            begin(host, episode)
            act(host, **{f"e{episode}": "raises"})
        begin(host, 20)
        act(host, e20="returns nothing")
    assert [message.count("Traceback") for message in caplog.messages] == [1, 0]
    assert caplog.messages[0].endswith("(further ones like it are only counted)")
    other = EpisodeFailure("error", "the program ended with status 2. can't open '/tmp/sandbox-8f3/a.py'")
    assert other.alike == EpisodeFailure("error", other.description.replace("8f3", "77a")).alike
    assert other.alike != EpisodeFailure("error", other.description.replace("open", "read")).alike


def wait_for_end(process: str) -> None:
    deadline = time.monotonic() + LONG_S
    while not has_ended(process):
        assert time.monotonic() < deadline


def test_a_hang_is_killed_with_what_it_started_and_costs_its_neighbours_too(start: Start) -> None:
    host = start("Misbehaving", step_s=0.5, start_s=30.0)
    begin(host, 1, 2)
    (spawned,) = act(host, e2="spawns")
    hanging = host._workers[0].process
    host.act(1, Action("hangs"))
    host.act(2, Action("stop"))
    host.begin(3, {}, 0)
    events = next_events(host, 3)
    assert [event.failure and event.failure.kind for event in events] == ["step_time", "neighbour", None]
    assert "step took longer than 0.5 s (env.step_timeout_s)" in str(events[0].failure)
    assert events[2].observation == "what now", "the episode had not begun, so it begins in the new process"
    wait_for_end(process_here(int(str(spawned.observation))))
    assert hanging.poll() is not None
    (last,) = act(host, e3="stop")
    assert last.done and last.failure is None


def test_a_first_call_that_hangs_has_less_time_the_next_time(start: Start, tmp_path: Path) -> None:
    host = start("Misbehaving", step_s=0.2, start_s=3.0)
    (failed,) = begin(host, 1, reset="hangs once", mark=str(tmp_path / "mark"))
    assert failed.failure is not None and "reset took longer than 3 s, in one of the first calls" in str(failed.failure)
    assert host._workers[0].patience.seconds == 1.5
    begin(host, 2, reset="hangs once", mark=str(tmp_path / "mark"))
    act(host, e2="do")
    assert host._workers[0].patience.seconds == 3.0


def test_a_process_that_ends_costs_its_episodes(start: Start) -> None:
    host = start("Misbehaving", num_workers=2)
    begin(host, 1, 2, 3)
    host.act(1, Action("dies"))
    ended, lost = next_events(host, 2)
    assert [event.failure and event.failure.kind for event in (ended, lost)] == ["process", "neighbour"]
    assert (ended.episode, lost.episode) == (1, 3)
    assert act(host, e2="stop")[0].failure is None
    process = host._workers[1].process
    begin(host, 4)
    assert [batch.place for batch in host._batches.values()] == [0]
    begin(host, 5)
    os.kill(process.pid, 9)
    (killed,) = next_events(host, 1)
    assert (killed.episode, killed.failure and killed.failure.kind) == (5, "process")


def test_limits_of_turns_and_of_an_episodes_time(start: Start) -> None:
    host = start("Misbehaving", turns=2)
    begin(host, 1)
    assert not act(host, e1="a")[0].done
    (event,) = act(host, e1="b")
    assert event.done and event.truncated and event.failure is None and event.observation == "did b"
    host = start("Misbehaving", episode_s=0.5)
    begin(host, 1)
    (event,) = act(host, e1="sleeps")
    assert event.failure is not None and event.failure.kind == "episode_time"


def test_the_config_limits_an_episodes_time() -> None:
    role = EnvRole.__new__(EnvRole)
    role.config = make_config(env={"function": f"{MODULE}:Misbehaving", "episode_timeout_s": 0.5})
    world = SimpleNamespace(rank=0, visible_gpus=lambda ranks: ())
    role.job = SimpleNamespace(heartbeat=SimpleNamespace(advance=lambda: None), world=world)  # type: ignore[assignment]
    with role._host() as host:
        begin(host, 1)
        (event,) = act(host, e1="sleeps")
        assert event.failure is not None and event.failure.kind == "episode_time"


def test_coroutines_are_awaited_beside_each_other(start: Start) -> None:
    host = start("Awaiting", step_s=LONG_S)
    (first, _) = begin(host, 1, 2)
    assert first.observation == TokenIds((1, 2, 1), {"max_new_tokens": 3})
    host.act(1, Action("first"))
    host.act(2, Action("second", ids=(4, 5), logprobs=(-0.5, -0.25)))
    assert [(event.done, event.reward) for event in next_events(host, 2)] == [(True, 0.0), (True, 8.25)]


def test_coroutines_have_limits_and_errors_of_their_own(start: Start) -> None:
    host = start("Awaiting", step_s=1.0)
    begin(host, 0)
    act(host, e0="warm")
    begin(host, 1, 2, 3)
    events = act(host, e1="hang", e2="raise", e3="fine")
    assert [event.failure and event.failure.kind for event in events] == ["step_time", "error", None]
    assert host._workers[0]._num_environments == 3, "the process is still the first"


def test_an_episode_may_be_over_at_once(start: Start) -> None:
    host = start("Awaiting")
    (event,) = begin(host, 1, over=True)
    assert event.done and event.reward == 0.5
    assert event.trajectories == (Trajectory((1, 2, 3), 2, 0.5, logprobs=(-0.1, -0.2), info={"from": "elsewhere"}),)


def test_saved_episodes_go_on_elsewhere(start: Start) -> None:
    host = start("Remembering", num_workers=2, batch_size=2)
    begin(host, 1, 2, 3)
    act(host, e1="a", e2="b")
    host.act(1, Action("kept", (ToolCall("f", {"x": 1}),)))
    saved = host.save()
    assert not host.events()
    again = start("Remembering", num_workers=1, batch_size=2)
    assert again.resume(saved) == []
    again.act(2, Action("bb"))
    again.act(3, Action("c"))
    assert [event.observation for event in next_events(again, 3)] == ["kept 2", "bb 2", "c 1"]
    host.act(2, Action("stop"))
    assert [event.done for event in next_events(host, 2)] == [False, True], "saving changes nothing"


def test_episodes_that_cannot_go_on_are_told(start: Start) -> None:
    host = start("Remembering")
    begin(host, 1, 2)
    saved = host.save()
    broken = [{**batch, "state": [-1]} if batch["episodes"] == [2] else batch for batch in saved]
    again = start("Remembering")
    assert again.resume(broken) == [2]
    assert again.events() == []
    assert [event.observation for event in begin(again, 2)] == ["hello n2 2 of 1"]
    without = start("Counting")
    begin(without, 5)
    assert without.save() == []
    assert without.resume(saved) == [1, 2]


def test_a_long_message_comes_through(start: Start) -> None:
    host = start("Counting", num_workers=1)
    begin(host, 1, 2)
    text = "x" * 3_000_000
    first, second = act(host, e1=text, e2=text)
    assert first.observation == f"{text} 1" and second.reward == len(text)


def test_what_the_host_says_of_its_environments(start: Start) -> None:
    description = start("Remembering").describe()
    assert (description.saved, description.concurrent, description.offloaded) == (True, False, False)


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("Missing", {}, "tests.support.user_environments has no function 'Missing'"),
        ("Fails", {}, "cannot be built with env.options {}: OSError: no simulator here"),
        ("Counting", {"color": 1}, "unexpected keyword argument 'color'"),
        ("returns_a_text", {}, "returned str, which has neither reset nor step; expected a class, or a function"),
        ("HasNoStep", {}, "has reset(self, row: "),
        ("NUMBER", {}, "has no function 'NUMBER'"),
    ],
)
def test_what_cannot_be_played_is_refused(start: Start, name: str, options: dict[str, Any], expected: str) -> None:
    host = start(name, options=options)
    with pytest.raises(ConfigError, match=r"^env\.function: 'tests\.support\.user_environments:") as error:
        host.describe()
    assert expected in str(error.value)


def test_simulators_leave_the_device_and_come_back(start: Start) -> None:
    host = start("Heavy", num_workers=2)
    assert host.describe().offloaded
    begin(host, 1, 2)
    host.tell_all("offload")
    assert [event.observation for event in act(host, e1="a", e2="a")] == ["host", "host"]
    host.tell_all("onload")
    assert [event.observation for event in act(host, e1="a", e2="a")] == ["device", "device"]
    host.tell_all("offload")
    with pytest.raises(ConfigError, match=r"env\.offload: offload\(\) of .*Heavy' failed: (.|\n)*it is away already"):
        host.tell_all("offload")


def test_processes_end_with_the_rank_that_owns_them() -> None:
    program = (
        "from rltrain.environments.batch import EnvironmentFactory\n"
        "from rltrain.environments.host import EnvironmentHost\n"
        "from rltrain.environments.interface import Action\n"
        f"host = EnvironmentHost(EnvironmentFactory('{MODULE}:Misbehaving'), num_workers=1)\n"
        "host.begin(0, {}, 0)\n"
        "host.wait(60)\n"
        "host.events()\n"
        "host.act(0, Action('hangs'))\n"
        "print(host._workers[0].process.pid, flush=True)\n"
        "host.wait(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as rank:
        worker = process_here(int(rank.stdout.readline()))
        assert not has_ended(worker)
        rank.kill()
    wait_for_end(worker)


def test_a_function_may_build_it(start: Start) -> None:
    host = start("counting_of", options={"word": "good day"})
    assert begin(host, 7)[0].observation == "good day n7 7 of 1"


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


def test_programs_of_both_forms() -> None:
    tool = PythonTool(limits={"wall_s": 60.0}, max_output_chars=40)
    tool.reset({"label": "45"}, 0)
    calls = (ToolCall("python", {"code": "print(sum(range(10)))"}), ToolCall("python", {"code": "1/0"}))
    result = tool.step(Action("", calls))
    first, second = (message["content"] for message in result.observation if not isinstance(message, str))
    assert first == "45"
    assert second.startswith("error: the program ended with status 1\n")
    marked = tool.step(Action("```python\nprint('x' * 1000)\n```"))
    assert marked.observation == f"\n```output\n{'x' * 20}\n...\n{'x' * 20}\n```\n"
    end = tool.step(Action("The answer is 45."))
    assert (end.reward, end.done, end.info) == (1.0, True, {"calls": 3, "call_errors": 1})


def test_a_program_that_does_not_end_is_ended() -> None:
    tool = PythonTool(limits={"wall_s": 0.5})
    tool.reset({"label": "45"}, 0)
    answer = tool.step(Action("", (ToolCall("python", {"code": "while True: pass"}),)))
    (message,) = answer.observation
    assert not isinstance(message, str)
    assert message["content"] == "error: the program was ended: it reached its limit of time"
