"""Reward functions: how they are found, called in workers, timed and summed."""

import json
import logging
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rltrain.config import schema
from rltrain.errors import ConfigError, RewardError
from rltrain.planning.validation import check_config
from rltrain.rewards import worker
from rltrain.rewards.answers import Scorable
from rltrain.rewards.exact_match import exact_match
from rltrain.rewards.functions import RewardFunction, load_reward
from rltrain.rewards.scorer import Scorer, Scores, combined
from tests.support.one_function import OneFunction
from tests.support.schedule_configs import make_config

MODULE = "tests.support.user_rewards"
USER_FILE = Path(__file__).resolve().parents[1] / "support/user_rewards.py"
REPOSITORY = Path(__file__).resolve().parents[2]


def reward(function: str, **options: Any) -> RewardFunction:
    return load_reward(schema.Reward(function=function, options=options))


def samples(*responses: str) -> list[Scorable]:
    return [Scorable(prompt="p", response=response, label="l") for response in responses]


@pytest.fixture(scope="module")
def misbehaving() -> Iterator[OneFunction]:
    with OneFunction(reward(f"{MODULE}:misbehave"), timeout_s=1.0, num_workers=1) as scorer:
        yield scorer


@pytest.fixture(scope="module")
def patient() -> Iterator[OneFunction]:
    with OneFunction(reward(f"{MODULE}:misbehave"), timeout_s=20, num_workers=1) as scorer:
        yield scorer


@pytest.mark.parametrize(
    ("response", "label", "options", "expected"),
    [
        ("632", "632", {}, 1.0),
        (" 632\n", "632", {}, 1.0),
        (" 632", "632", {"strip": False}, 0.0),
        ("7+5=12,632", "632", {"after": ","}, 1.0),
        ("632,", "632", {"after": ","}, 0.0),
        ("632", "632", {"after": ","}, 0.0),
        ("a,632,b", "b", {"after": ","}, 1.0),
        ("63", "632", {}, 0.0),
    ],
)
def test_exact_match(response: str, label: str, options: dict[str, Any], expected: float) -> None:
    assert exact_match("p", response, label, **options) == expected


def test_exact_match_runs_in_this_process() -> None:
    scorer = OneFunction(reward("exact_match", after=","), timeout_s=1)
    scores = scorer.score([Scorable("p", f"x,{n}", str(n % 2)) for n in range(2000)])
    assert scores == Scores([1.0, 1.0] + [0.0] * 1998, num_errors=0, num_timeouts=0)
    assert all(worker.process is None for worker in scorer._workers[0].processes)


@pytest.mark.parametrize(
    ("response", "value"), [("true", 1.0), ("int", 3.0), ("half", 0.5), ("numpy", 0.25), ("numpy_bool", 1.0)]
)
def test_numbers_of_any_kind_are_rewards(misbehaving: OneFunction, response: str, value: float) -> None:
    assert misbehaving.score(samples(response)) == Scores([value], num_errors=0, num_timeouts=0)


@pytest.mark.parametrize(
    ("response", "reason"),
    [
        ("raise", "KeyError: 'no such answer'"),
        ("exit", "SystemExit: gone"),
        ("die", "ended its process"),
        ("nan", "returned nan; expected a finite number"),
        ("inf", "returned inf; expected a finite number"),
        ("beyond float32", "returned -1e+39; expected a finite number from -3.4e+38 to 3.4e+38, which float32 can"),
        ("sum beyond float32", "returned 6e+38 as the sum of 'score' and turns; expected a finite number"),
        ("none", "returned NoneType None; expected a number"),
        ("text", "returned str '1.0'; expected a number"),
        ("list", "returned a list of 2 rewards; expected one for each of 1 turns, or a number"),
        (
            "dict",
            "returned a dict without 'score', its keys are 'points'; expected a number, or a dict whose 'score' is",
        ),
        ("complex", "returned complex 1j; expected a number"),
        ("huge", "returned int 1000"),
    ],
)
def test_an_error_costs_its_sample(
    patient: OneFunction, response: str, reason: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patient._failures[0], "num_failures", 0)  # it logs only ten failures
    with caplog.at_level(logging.WARNING):
        assert patient.score(samples("half", response, "int")) == Scores([0.5, 0.0, 3.0], num_errors=1, num_timeouts=0)
    assert reason in caplog.text and repr(response) in caplog.text


def line_of(text: str) -> int:
    """Returns the line of a text in the user's file."""
    return 1 + USER_FILE.read_text()[: USER_FILE.read_text().index(text)].count("\n")


def test_an_exception_is_told_with_its_place_and_traceback(caplog: pytest.LogCaptureFixture) -> None:
    """The traceback shows the user's code, and none of rltrain's."""
    with OneFunction(reward(f"{MODULE}:from_json"), timeout_s=20, num_workers=1) as scorer:
        scores = scorer.score(samples('{"answer": 1}', "{}", "no JSON", '"text"'))
    assert scores == Scores([1.0, 0.0, 0.0, 0.0], num_errors=3, num_timeouts=0)
    place = f"{USER_FILE}, line {line_of('return float(record')}"
    assert f"KeyError: 'answer' ({place})" in caplog.messages[0]
    assert f"({USER_FILE}, line {line_of('record = json.loads')})" in caplog.messages[1], (
        "expected a line of the user's file, not of json"
    )
    assert scores.first_failure == (
        "on the response '{}':\nTraceback (most recent call last):\n"
        f'  File "{place.replace(", line", chr(34) + ", line")}, in from_json\n'
        "    return float(record[\"answer\"])\n                 ~~~~~~^^^^^^^^^^\nKeyError: 'answer'"
    )


def test_what_an_exception_says_of_itself_may_be_long_or_fail() -> None:
    with OneFunction(reward(f"{MODULE}:raise_unprintable"), timeout_s=20, num_workers=1) as scorer:
        scores = scorer.score(samples("long", "broken", "deep"))
    assert scores == Scores([0.0] * 3, num_errors=3, num_timeouts=0)
    assert scores.first_failure is not None and len(scores.first_failure) < 10_000


def test_tensors_of_one_element_are_numbers() -> None:
    with OneFunction(reward(f"{MODULE}:tensor_of_size"), timeout_s=60, num_workers=1) as scorer:
        assert scorer.score(samples("1", "2")) == Scores([0.75, 0.0], num_errors=1, num_timeouts=0)


@pytest.mark.parametrize("response", ["loop", "sleep", "regex"])
def test_a_hang_costs_its_sample_and_the_time_limit(
    misbehaving: OneFunction, response: str, caplog: pytest.LogCaptureFixture
) -> None:
    misbehaving.score(samples("half"))
    start = time.monotonic()
    assert misbehaving.score(samples(response, "half")) == Scores([0.0, 0.5], num_errors=0, num_timeouts=1)
    assert time.monotonic() - start >= 1
    assert caplog.messages[-1].endswith("took longer than reward.timeout_s = 1")


def test_a_hang_is_said_once_with_what_is_awaited_and_until_when(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with OneFunction(reward(f"{MODULE}:misbehave"), timeout_s=0.5, num_workers=1) as scorer:
        scorer.score(samples("half"))
        monkeypatch.setattr(worker, "SAY_AFTER_S", 0.1)
        for awaited in ("1 sample, at most 0.5 s (reward.timeout_s = 0.5)", "its process to start, at most 120 s"):
            caplog.clear()
            scorer.score(samples("sleep", "sleep"))
            (said,) = [message for message in caplog.messages if "has not answered for 0.1 s" in message]
            assert f"{MODULE}:misbehave" in said and f"waiting for {awaited}" in said


def test_workers_run_beside_each_other() -> None:
    with OneFunction(reward(f"{MODULE}:process_id_after_a_while"), timeout_s=20, num_workers=2) as scorer:
        process_ids = set(scorer.score(samples(*"abcdefgh")).rewards)
    assert len(process_ids) == 2
    assert os.getpid() not in process_ids


def test_the_log_does_not_grow_with_failures(caplog: pytest.LogCaptureFixture) -> None:
    function = RewardFunction("exact_match", lambda prompt, response, label: 1 / 0)
    with caplog.at_level(logging.WARNING):
        scores = OneFunction(function, timeout_s=1).score(samples(*"x" * 200))
    assert scores == Scores([0.0] * 200, num_errors=200, num_timeouts=0)
    assert len(caplog.records) == 10
    assert "further failures are only counted" in caplog.records[-1].getMessage()


def test_what_a_function_prints_or_reads_does_not_disturb_the_answers(capfd: pytest.CaptureFixture[str]) -> None:
    with OneFunction(reward(f"{MODULE}:chatty"), timeout_s=20, num_workers=1) as scorer:
        assert scorer.score(samples("a", "b")) == Scores([1.0, 1.0], num_errors=0, num_timeouts=0)
    captured = capfd.readouterr()
    assert captured.out == ""
    assert captured.err.count("scoring p") == 2 and captured.err.count("from a child") == 2


def test_texts_arrive_unchanged() -> None:
    text = 'line\nnext\r\n\t"quoted" \\ é 🥚 \x00\u2028 \ud800' + "x" * 200_000
    with OneFunction(reward(f"{MODULE}:whole", separator="\n"), timeout_s=20, num_workers=1) as scorer:
        scores = scorer.score([Scorable(text, f"{text}\n{text}", text), Scorable(text, text, text)])
    assert scores == Scores([1.0, 0.0], num_errors=0, num_timeouts=0)


def test_a_worker_serves_many_samples_and_ends_with_the_scorer() -> None:
    scorer = OneFunction(reward(f"{MODULE}:process_id_after_a_while"), timeout_s=20, num_workers=1)
    first, second = scorer.score(samples("a", "b")).rewards
    assert first == second
    os.kill(int(first), 0)
    scorer.close()
    with pytest.raises(ProcessLookupError):
        os.kill(int(first), 0)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux can end a hanging child with its parent")
def test_a_hanging_worker_ends_when_its_parent_is_killed() -> None:
    script = (
        "from rltrain.config import schema\n"
        "from rltrain.rewards.functions import load_reward\n"
        "from rltrain.rewards.answers import Scorable\n"
        "from tests.support.one_function import OneFunction\n"
        f"load = lambda name: load_reward(schema.Reward(function='{MODULE}:' + name))\n"
        "scorer = OneFunction(load('misbehave'), timeout_s=600, num_workers=1)\n"
        "scorer.score([Scorable('p', 'half', 'l')])\n"
        "print(scorer._workers[0].processes[0].process.pid, flush=True)\n"
        "scorer.score([Scorable('p', 'regex', 'l')])\n"
    )
    with subprocess.Popen([sys.executable, "-c", script], cwd=REPOSITORY, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        time.sleep(0.5)
        os.kill(child, 0)
        parent.send_signal(signal.SIGKILL)
        parent.wait()
    deadline = time.monotonic() + 20
    while _is_running(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _is_running(child)


def _is_running(process_id: int) -> bool:
    try:
        return Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_user_s_module_is_found_in_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "length_reward.py").write_text(
        "def score(prompt, response, label, scale=1.0):\n    return scale * len(response)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path] + [str(REPOSITORY)])
    with OneFunction(reward("length_reward:score", scale=0.5), timeout_s=20, num_workers=1) as scorer:
        assert scorer.score(samples("abc")) == Scores([1.5], num_errors=0, num_timeouts=0)


@pytest.mark.parametrize(
    ("function", "options", "message"),
    [
        (
            "exakt_match",
            {},
            "reward.function: 'exakt_match' is unknown; expected exact_match, math, code, environment, an URL, "
            '"file.py:function", "module:function" or "module.function"',
        ),
        ("module:", {}, "'module:' is unknown"),
        ("no_such_module:f", {}, "cannot import no_such_module (ModuleNotFoundError"),
        (f"{MODULE}:missing", {}, f"{MODULE} has no function 'missing'"),
        (f"{MODULE}:HANG", {}, "has no function 'HANG'"),
        ("exact_match", {"afterwards": ","}, "unexpected keyword argument 'afterwards'"),
        (f"{MODULE}:whole", {"label": "x"}, "cannot be called with (prompt, response, label)"),
        ("os:getcwd", {}, "cannot be called with (prompt, response, label)"),
        (f"{MODULE}:as_for_nobody", {}, "takes (data_source, text, gold) and would get the prompt as 'data_source'"),
        (f"{MODULE}:as_for_nobody", {}, "expected (prompt, response, label) with optional row, messages, turns"),
        (
            f"{MODULE}:verl_with_a_tokenizer",
            {},
            "it has verl's form, but no value for 'tokenizer'",
        ),
        (f"{MODULE}:trl_with_environments", {}, "it has TRL's form, but no value for 'environments'"),
        (f"{MODULE}:slime_with_more", {}, "it has slime's form, but no value for 'evaluator'"),
        ("nowhere.py:score", {}, "there is no file '"),
        ("http://127.0.0.1:1/score", {"header": "x"}, "expected token_env (the name of an environment variable)"),
        ("http://127.0.0.1:1/score", {"token_env": "NO_SUCH_TOKEN"}, "no environment variable 'NO_SUCH_TOKEN'"),
    ],
)
def test_what_cannot_be_a_reward_is_refused(function: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        reward(function, **options)
    assert message in str(refusal.value)
    assert "reward." in str(refusal.value)


@pytest.mark.parametrize(
    ("text", "error"),
    [("LIMIT = 1 / 0\n", "ZeroDivisionError: division by zero"), ("import sys\nsys.exit(0)\n", "SystemExit: 0")],
)
def test_a_module_that_fails_or_exits_on_import_is_refused(
    text: str, error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"reward_of_{len(text)}"
    (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=re.escape(f"cannot import {name} ({error})")):
        reward(f"{name}:score")


@pytest.mark.parametrize("name", ["with_names_of_its_own", "in_another_order"])
def test_parameters_may_have_other_names_or_another_order(name: str) -> None:
    function = reward(f"{MODULE}:{name}")
    call = function.call([Scorable("a", "b", "c")])
    assert function.function(*call.positional, **call.named) == "abc"


REQUEST = {"calls": [[samples("half")[0].message(())]], "limit_s": 20}


def start_worker() -> "subprocess.Popen[bytes]":
    """Starts a worker like a scorer, and waits until it is ready."""
    command = [sys.executable, "-m", "rltrain.rewards.worker"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    worker = subprocess.Popen(command, cwd=REPOSITORY, bufsize=0, **pipes)  # type: ignore[call-overload]
    assert worker.stdin and worker.stdout
    worker.stdin.write(json.dumps({"function": f"{MODULE}:misbehave", "options": {}}).encode() + b"\n")
    assert json.loads(worker.stdout.readline()) == {"ready": True}
    return worker


def test_a_worker_ends_quietly_when_its_reader_is_gone() -> None:
    with start_worker() as worker:
        worker.stdout.close()
        worker.stdin.write(json.dumps(REQUEST).encode() + b"\n")
        assert worker.stderr.read() == b""
        assert worker.wait() == 0


def test_a_worker_ends_quietly_when_its_writer_ends_in_the_middle_of_a_line() -> None:
    with start_worker() as worker:
        worker.stdin.write(json.dumps(REQUEST).encode()[:20])
        worker.stdin.close()
        assert worker.stderr.read() == worker.stdout.read() == b""
        assert worker.wait() == 0


def test_a_worker_that_cannot_start_is_the_user_s_error() -> None:
    with (
        OneFunction(RewardFunction(f"{MODULE}:vanished", print), timeout_s=20, num_workers=1) as scorer,
        pytest.raises(ConfigError, match="the worker process of .*vanished' did not start"),
    ):
        scorer.score(samples("a", "b", "c"))


def test_every_sample_is_reported_when_it_is_done() -> None:
    """Other ranks wait for the rewards. They must see the progress of this rank, even if it is slow."""
    done: list[float] = []
    start = time.perf_counter()
    with OneFunction(
        reward(f"{MODULE}:misbehave"), timeout_s=0.5, num_workers=1, on_scored=lambda: done.append(time.perf_counter())
    ) as scorer:
        scores = scorer.score(samples("true", "sleep", "raise", "sleep"))
    assert scores == Scores([1.0, 0.0, 0.0, 0.0], num_errors=1, num_timeouts=2)
    assert len(done) == 4
    assert start < done[0] < done[1] - 0.4 < done[3] - 0.8


def section(*parts: dict[str, Any], **reward: Any) -> schema.Reward:
    return schema.Reward(functions=tuple(schema.RewardPart(**part) for part in parts), **reward)


def test_the_reward_is_the_weighted_sum_and_each_function_has_its_scores() -> None:
    parts = (
        {"function": "exact_match", "weight": 2.0},
        {"function": f"{MODULE}:misbehave", "name": "own", "weight": -0.5},
        {"function": f"{MODULE}.whole", "weight": 0.0, "options": {"separator": ""}},
    )
    scored: list[None] = []
    with Scorer.of(section(*parts, timeout_s=60, num_workers=1), lambda: scored.append(None)) as scorer:
        scores = scorer.score([Scorable("", text, text) for text in ("half", "raise", "int")])
    assert scores.rewards == [1.75, 2.0, 0.5]
    assert list(scores.by_function) == ["exact_match", "own", "whole"]
    assert scores.by_function["own"] == Scores([0.5, 0.0, 3.0], num_errors=1, num_timeouts=0)
    assert scores.by_function["exact_match"] == scores.by_function["whole"] == Scores([1.0] * 3, 0, 0)
    assert len(scored) == 6


def test_several_numbers_of_one_function_are_rewards() -> None:
    of_answer = {"function": f"{MODULE}:graded"}
    parts = ({**of_answer, "score_key": "right", "name": "right"}, {**of_answer, "score_key": "short", "name": "short"})
    with Scorer.of(section(*parts, timeout_s=60, num_workers=1)) as scorer:
        scores = scorer.score([Scorable("", text, "ab") for text in ("ab", "abc")])
    assert scores.rewards == [1.0 - 0.2, 0.0 - 0.3]
    with Scorer.of(schema.Reward(**of_answer, score_key="short", timeout_s=60, num_workers=1)) as scorer:
        assert scorer.score([Scorable("", "ab", "ab")]).rewards == [-0.2]


def test_one_function_alone_has_no_name() -> None:
    with Scorer.of(schema.Reward()) as scorer:
        scores = scorer.score([Scorable("", "a", "a")])
    assert scores.rewards == [1.0] and list(scores.by_function) == [""]


def test_a_function_that_cannot_be_loaded_is_named_by_its_place() -> None:
    with pytest.raises(ConfigError, match=r"reward.functions.1.function: 'nothing' is unknown"):
        Scorer.of(section({"function": "exact_match"}, {"function": "nothing"}))
    with pytest.raises(ConfigError, match=r"reward.functions.0.options \{'x': 1\}: got an unexpected keyword"):
        Scorer.of(section({"function": "exact_match", "options": {"x": 1}}))


def function(title: str, weight: float) -> RewardFunction:
    return RewardFunction("exact_match", print, title=title, weight=weight)


@settings(max_examples=25)
@given(st.data(), st.integers(1, 4), st.integers(1, 3))
def test_turns_add_up_to_the_whole_reward(data: st.DataObject, num_turns: int, num_functions: int) -> None:
    finite = st.floats(-100, 100)
    weights = data.draw(st.lists(finite, min_size=num_functions, max_size=num_functions))
    scores = []
    for _ in weights:
        turns = data.draw(st.none() | st.lists(finite, min_size=num_turns, max_size=num_turns))
        reward = data.draw(finite) if turns is None else sum(turns)
        scores.append(Scores([reward], 0, 0, turn_rewards={} if turns is None else {0: turns}))
    whole = combined([function(str(n), weight) for n, weight in enumerate(weights)], scores)
    assert len(whole.turn_rewards) == any(of.turn_rewards for of in scores)
    for turns in whole.turn_rewards.values():
        assert len(turns) == num_turns
        assert sum(turns) == pytest.approx(whole.rewards[0], abs=1e-6)


def test_a_sum_that_float32_cannot_hold_ends_the_job_with_its_reason() -> None:
    with pytest.raises(RewardError, match=r"the weighted sum of its parts is 3e\+39 for a response; expected a finite"):
        combined([function("a", 10.0)], [Scores([3e38], 0, 0)])


def test_a_sample_that_no_function_is_for_is_unscored() -> None:
    first, second = (Scores([0.0] * 3, 0, 0, skipped=frozenset(skipped)) for skipped in ({0, 1}, {1, 2}))
    assert combined([function("a", 1.0), function("b", 1.0)], [first, second]).skipped == {1}


@pytest.mark.parametrize(
    ("part", "title"),
    [
        ({"function": "math"}, "math"),
        ({"function": "a.b:score"}, "score"),
        ({"function": "rewards/own.py:score"}, "score"),
        ({"function": "a.b.score"}, "score"),
        ({"function": "https://judge.example.org:8000/v1/score"}, "judge_example_org"),
        ({"function": "math", "name": "x"}, "x"),
    ],
)
def test_a_function_without_a_name_has_its_own(part: dict[str, Any], title: str) -> None:
    assert schema.RewardPart(**part).title == title


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        (
            {"function": "exact_match", "functions": ({"function": "math"},)},
            "reward.function: got 'exact_match' together with reward.functions; expected one of the two",
        ),
        ({"options": {"a": 1}, "functions": ({"function": "math"},)}, "reward.options: got {'a': 1} together with"),
        ({"functions": ({"function": "m.f"}, {"function": "n.f"})}, "reward.functions: 2 are called 'f'"),
        ({"functions": ({"function": "m.mean"},)}, "reward.functions.0.name: got 'mean'; expected letters, digits"),
        ({"functions": ({"function": "math", "name": "a b"},)}, "reward.functions.0.name: got 'a b'"),
        ({"functions": ({"function": "math", "name": "a_errors"},)}, "no ending _errors or _timeouts"),
        ({"functions": ({"function": "math", "weight": 0.0},)}, "reward.functions: every weight is 0"),
        ({"function": "http:///score"}, "got 'http:///score'; expected a URL with a host"),
    ],
)
def test_what_cannot_be_meant_is_refused(reward: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        check_config(make_config(reward=reward))
    assert message in str(refusal.value)


def test_rewards_that_compare_need_labels() -> None:
    data = {"train": {"path": "train.jsonl", "label_key": None}}
    with pytest.raises(ConfigError, match="data.train.label_key: got null, but reward exact_match needs labels"):
        check_config(make_config(data=data))
    check_config(make_config(data=data, reward={"function": "environment"}))


class Answering:
    """A stand-in for worker processes. It records the sample, the process and the result of each call of `_ask`.

    `outcome(sample, calls so far in this process)` returns the seconds of the call, or raises.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, outcome: Callable[[str, int], float]) -> None:
        self.outcome = outcome
        self.asked: list[tuple[int, str, float]] = []
        """Process, response and limit of each call."""
        self.num_processes = self.num_calls = 0
        monkeypatch.setattr(worker, "start_worker", self.start)
        monkeypatch.setattr(worker, "kill_worker", lambda process: None)
        monkeypatch.setattr(worker, "_ask", self.ask)

    def start(self, *_: Any, **__: Any) -> SimpleNamespace:
        self.num_processes, self.num_calls = self.num_processes + 1, 0
        return SimpleNamespace(poll=lambda: None)

    def ask(self, process: Any, message: dict[str, Any], limit_s: float, _: Any) -> dict[str, Any]:
        if "function" in message:
            return {"ready": True}
        ((sample,),) = message["calls"]
        self.asked.append((self.num_processes, sample["response"], limit_s))
        seconds = self.outcome(sample["response"], self.num_calls)
        self.num_calls += 1
        if seconds > limit_s:
            raise TimeoutError
        return {"answers": [[{"score": 1.0}]], "seconds": seconds}

    def score(self, *responses: str) -> list[float]:
        function = RewardFunction("user:function", print)
        return OneFunction(function, timeout_s=5, num_workers=1).score(samples(*responses)).rewards


def test_imports_of_the_first_call_are_not_on_a_sample_s_time(monkeypatch: pytest.MonkeyPatch) -> None:
    answering = Answering(monkeypatch, lambda response, calls: 0.1 if calls else 60)
    assert answering.score("a", "b", "c") == [1.0, 1.0, 1.0]
    assert answering.asked == [(1, "a", 120), (1, "a", 5), (1, "b", 5), (1, "c", 5)]


def test_what_a_process_loads_in_its_first_call_costs_no_sample() -> None:
    with OneFunction(reward(f"{MODULE}:loading_at_first"), timeout_s=2, num_workers=1) as scorer:
        assert scorer.score(samples("a", "b")) == Scores([1.0, 1.0], num_errors=0, num_timeouts=0)


def test_a_first_call_within_a_sample_s_time_is_the_sample_s(monkeypatch: pytest.MonkeyPatch) -> None:
    answering = Answering(monkeypatch, lambda response, calls: 4.9)
    assert answering.score("a", "b") == [1.0, 1.0]
    assert answering.asked == [(1, "a", 120), (1, "b", 5)]


def test_a_sample_has_no_more_time_in_a_first_call_than_in_others(monkeypatch: pytest.MonkeyPatch) -> None:
    answering = Answering(monkeypatch, lambda response, calls: 60 if response == "slow" else 0.1)
    assert answering.score("slow", "a", "slow", "b") == [0.0, 1.0, 0.0, 1.0]
    assert [response for _, response, limit_s in answering.asked if limit_s > 5] == ["slow", "a", "a"]


def test_a_worker_started_anew_is_warmed_up_with_a_sample_that_was_scored(monkeypatch: pytest.MonkeyPatch) -> None:
    """The warm-up sample is the slowest one, since it ran the imports. Hanging samples get only their own time."""
    seconds = {"early": 0.1, "imports": 3.0, "hangs": 1e9, "late": 0.2}
    answering = Answering(monkeypatch, lambda response, calls: seconds[response])
    assert answering.score("early", "imports", "hangs", "hangs", "late") == [1.0, 1.0, 0.0, 0.0, 1.0]
    assert answering.asked[2:] == [
        (1, "hangs", 5),
        *((2, "imports", 120), (2, "hangs", 5)),
        *((3, "imports", 120), (3, "late", 5)),
    ]


def test_a_function_that_always_hangs_costs_little_more_than_its_samples_time(monkeypatch: pytest.MonkeyPatch) -> None:
    answering = Answering(monkeypatch, lambda response, calls: 1e9)
    assert answering.score(*"x" * 100) == [0.0] * 100
    assert [limit_s for *_, limit_s in answering.asked[:6]] == [120, 15, 5, 5, 5, 5]
    assert sum(limit_s for *_, limit_s in answering.asked) < 100 * 5 + 135


def test_a_function_that_hangs_from_some_time_on_costs_little_more_either(monkeypatch: pytest.MonkeyPatch) -> None:
    answering = Answering(monkeypatch, lambda response, calls: 0.1 if len(answering.asked) < 9 else 1e9)
    assert sum(answering.score(*"x" * 100)) == 8
    assert sum(limit_s for *_, limit_s in answering.asked[8:]) < 102 * 5 + 135


SOURCE = """\
from dataclasses import dataclass
import beside_the_reward

@dataclass
class Weight:
    value: float = beside_the_reward.WEIGHT

def score(prompt, response, label):
    return Weight().value * len(response)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Returns a folder with a file math.py and a module imported by it. Other packages have a module math, too."""
    (tmp_path / "math.py").write_text(SOURCE)
    (tmp_path / "beside_the_reward.py").write_text("WEIGHT = 2.0\n")
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tmp_path


def test_a_file_is_found_by_its_path_with_the_modules_beside_it(folder: Path) -> None:
    function = reward(f"{folder}/math.py:score")
    assert function.place == f"'{folder}/math.py:score' ({folder}/math.py, line 8)"
    with OneFunction(function, timeout_s=60, num_workers=1) as scorer:
        assert scorer.score([Scorable("p", "abc", "l")]).rewards == [6.0]


def test_a_file_may_be_named_from_the_working_directory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    assert reward("math.py:score").function("p", "abc", "l") == 6.0
    assert reward("./math.py:score").function("p", "a", "l") == 2.0


@pytest.mark.parametrize("name", [f"{MODULE}:whole", f"{MODULE}.whole"])
def test_a_function_of_a_module(name: str) -> None:
    assert reward(name).function("a", "a|b", "b") == 1.0


@pytest.mark.parametrize(
    ("source", "function", "message"),
    [
        ("def score(prompt, response, label): ...", "missing", "reward.py has no function 'missing'"),
        ("1 / 0", "score", "reward.py (ZeroDivisionError: division by zero)"),
        ("import sys; sys.exit(3)", "score", "reward.py (SystemExit: 3)"),
    ],
)
def test_what_is_wrong_with_a_file_is_told(tmp_path: Path, source: str, function: str, message: str) -> None:
    (tmp_path / "reward.py").write_text(source)
    with pytest.raises(ConfigError) as refusal:
        reward(f"{tmp_path}/reward.py:{function}")
    assert message in str(refusal.value) and str(refusal.value).startswith("reward.function: ")
