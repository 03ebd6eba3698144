"""A user's program as an environment: it is told where to speak to, and what it did is the episode."""

import asyncio
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rltrain.endpoint.opening import RecordedSession
from rltrain.environments.agent import SESSION, AgentEnvironment, AgentFailed, printed_reward
from rltrain.environments.interface import Row, StepResult
from rltrain.errors import ConfigError
from rltrain.rewards.locating import found_command
from rltrain.rollout.sample import Status
from rltrain.sandbox.means import means
from tests.talking_engine import Endpoint, endpoint

AGENT = """
import json, os, sys, urllib.request

def post(url, body):
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    return json.load(urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)))

row = json.load(open(os.environ["RLTRAIN_ROW"]))
messages = [{"role": "user", "content": row["question"]}]
for turn in range(2):
    answer = post(os.environ["OPENAI_BASE_URL"] + "/chat/completions", {"messages": messages})
    messages += [answer["choices"][0]["message"], {"role": "user", "content": "and?"}]
if row["how"] == "posts":
    post(os.environ["RLTRAIN_SESSION_URL"] + "/reward", {"reward": 0.5})
elif row["how"] == "prints":
    print(json.dumps({"reward": len(messages)}))
elif row["how"] == "fails":
    sys.exit("no such answer")
elif row["how"] == "hangs":
    import time
    time.sleep(1000)
"""
AVAILABLE = [name for name, finding in means().items() if finding.works]


def say(context: str) -> str:
    return f"I heard {len(re.findall('user', context))}"


@pytest.fixture(scope="module")
def served() -> Iterator[Endpoint]:
    with endpoint(say) as running:
        yield running


def run(served: Endpoint, how: str, **settings: Any) -> tuple[StepResult | AgentFailed, RecordedSession]:
    """What an agent's episode came to, and what was recorded of it."""
    opened = served.server.open_session({"row": how}, seed=3)
    row = {
        "question": "Why?",
        "how": how,
        SESSION: {"url": f"{served.url}/sessions/{opened.id}", "token": opened.token},
    }
    try:
        result: Any = asyncio.run(AgentEnvironment(**settings).reset([row], [0]))[0]
    except AgentFailed as failed:
        result = failed
    served.server.end_session(opened.id, "its agent ended")
    return result, next(session for session in served.ended if session.id == opened.id)


def program(sandbox: str, wall_s: float = 60.0) -> dict[str, Any]:
    return {"command": [sys.executable, "-c", AGENT], "sandbox": sandbox, "limits": {"wall_s": wall_s}}


@pytest.mark.parametrize("sandbox", ["none", *AVAILABLE[:1]])
def test_a_program_speaks_to_its_session_and_gives_its_reward(served: Endpoint, sandbox: str) -> None:
    result, session = run(served, "posts", **program(sandbox))
    assert isinstance(result, StepResult) and result.done, result
    (trajectory,) = session.trajectories
    assert (session.reward, session.metadata) == (0.5, {"row": "posts"})
    assert len(trajectory.sample.turns) == 2 and trajectory.sample.status is Status.STOPPED


def test_what_a_program_prints_last_may_be_its_reward(served: Endpoint) -> None:
    result, _ = run(served, "prints", **program("none"))
    assert isinstance(result, StepResult) and (result.reward, result.info["rewarded"]) == (5.0, 1.0)
    assert printed_reward(b'thinking\n{"reward": 1}\n') == 1.0
    for output in (b"", b"1", b'{"reward": true}', b'{"reward": NaN}', b'{"reward": 1}\nmore', b"\xff"):
        assert printed_reward(output) is None


def test_a_program_that_fails_or_hangs_costs_its_episode(served: Endpoint) -> None:
    failed, _ = run(served, "fails", **program("none"))
    assert isinstance(failed, AgentFailed) and "no such answer" in str(failed) and "status 1" in str(failed)
    hung, _ = run(served, "hangs", **program("none", wall_s=1.5))
    assert isinstance(hung, AgentFailed) and "limit: time" in str(hung)


async def asks_once(row: Row, base_url: str, api_key: str) -> float:
    import openai

    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
        answer = await client.chat.completions.create(
            model="any", messages=[{"role": "user", "content": row["question"]}]
        )
    return float(answer.choices[0].message.content == "I heard 1")


def says_nothing(row: Row) -> None:
    """No reward of its own."""


def test_a_function_is_awaited(served: Endpoint) -> None:
    result, session = run(served, "", function=f"{__name__}:asks_once")
    assert isinstance(result, StepResult) and result.reward == 1.0
    assert len(session.trajectories) == 1
    result, _ = run(served, "", function=f"{__name__}:says_nothing")
    assert isinstance(result, StepResult) and result.info["rewarded"] == 0.0


@pytest.mark.parametrize("sandbox", ["none", *AVAILABLE[:1]])
def test_a_program_is_found_where_the_job_was_started_and_may_import_from_there(
    served: Endpoint, sandbox: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It runs in another folder, to which it may write."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "agent.py").write_text(
        "import json, os, sys, beside\n"
        "assert json.load(open(os.environ['RLTRAIN_ROW']))['question'] == 'Why?'\n"
        "open('written', 'w').close()\n"
        "print(json.dumps({'reward': float(os.getcwd() != os.path.dirname(sys.argv[1]))}))\n"
    )
    (tmp_path / "beside.py").write_text("")
    for command in ([sys.executable, "agent.py", "agent.py"], [sys.executable, "-m", "agent", "./agent.py"]):
        result, _ = run(served, "", command=command, sandbox=sandbox)
        assert isinstance(result, StepResult) and result.reward == 1.0, result
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != "__pycache__") == ["agent.py", "beside.py"]


def test_words_of_a_command_that_name_no_file_stay_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "math").mkdir()
    (tmp_path / "python3").touch()
    command = ["python3", "-c", "pass", "math", "--task", "-", "no/such", ""]
    assert found_command(command, "env.agent.command") == command
    assert found_command(["./python3", "./math"], "")[1] == str(tmp_path / "math")


def test_a_script_that_is_not_there_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    expected = re.escape(f"there is no file 'agent.py' (relative paths start at {tmp_path})")
    for command in (["python3", "-u", "agent.py"], ["/usr/bin/python3.11", "agent.py", "x"], ["bash", "agent.py"]):
        with pytest.raises(ConfigError, match=r"env\.agent\.command: .*" + expected):
            AgentEnvironment(command=command)
