"""A user's agent as an environment: it draws its turns by HTTP at the job's endpoint, one run of it per episode.

The agent is told where by what its own client reads: OPENAI_BASE_URL and OPENAI_API_KEY, ANTHROPIC_BASE_URL and
ANTHROPIC_API_KEY. RLTRAIN_SESSION_URL is where rewards go, RLTRAIN_ROW names a file with the row of the data as JSON.
"""

import asyncio
import inspect
import json
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

from rltrain.environments.encoding import BadAnswer
from rltrain.environments.interface import Action, Opening, Row, StepResult
from rltrain.rewards.answers import is_reward
from rltrain.rewards.locating import found_command, locate
from rltrain.runtime.json_text import parse_json
from rltrain.sandbox.limits import Limits, Outcome
from rltrain.sandbox.means import require
from rltrain.sandbox.sandbox import Sandbox

SESSION = "rltrain_session"
"""The column that an agent's row has besides: its session's url and token."""
ROW_FILE = "row.json"
MAX_EPISODES = 256
"""Of one process at a time."""
LAST_OUTPUT_CHARS = 2000
"""Of what a program that failed has printed."""


class AgentFailed(BadAnswer):
    """It ended otherwise than it should."""


class AgentEnvironment:
    """An `Environment` whose episodes are over when they begin: `reset` awaits the agent's whole run.

    Either `command` is started for every episode, in a sandbox that reaches nothing but the endpoint (`sandbox` none:
    as a plain process), or `function` is awaited in this process with the row and, by keyword, what it names of
    base_url, api_key and session_url. The reward is a function's result, or the last line that a program prints, if it
    is a JSON object with a number under "reward"; what was sent to the session's own place counts besides.

    A program runs in a folder of its own. It finds the files that the command names, and may import the modules that
    lie in the folder in which the job was started.
    """

    def __init__(
        self,
        *,
        command: Sequence[str] = (),
        function: str | None = None,
        sandbox: str = "auto",
        readable: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        limits: Mapping[str, Any] | None = None,
    ) -> None:
        self.command = found_command(command, "env.agent.command") if command else []
        self.environment = {"PYTHONPATH": os.getcwd(), **(environment or {})}
        self.limits = Limits(**(limits or {}))
        self.function = locate(function, "env.agent.function") if function else None
        self.sandbox = None
        if self.function is None:
            self.sandbox = Sandbox(
                require(sandbox, "env.agent.sandbox"), readable=[os.getcwd(), *readable], installed_packages=True
            )
            self.threads = ThreadPoolExecutor(MAX_EPISODES, thread_name_prefix="agent")

    async def reset(self, rows: Sequence[Row], seeds: Sequence[int]) -> Sequence[Opening]:
        return await asyncio.gather(*(self._run(dict(row)) for row in rows))

    async def step(self, actions: Sequence[Action | None]) -> Sequence[StepResult | None]:
        raise AssertionError("an agent's episode is over when it begins")

    async def _run(self, row: dict[str, Any]) -> StepResult:
        session = row.pop(SESSION)
        if self.function is not None:
            reward = await self._call(row, session)
        else:
            outcome = await asyncio.wrap_future(self.threads.submit(self._run_program, row, session))
            _expect_success(outcome)
            reward = printed_reward(outcome.stdout)
        return StepResult(done=True, reward=reward or 0.0, info={"rewarded": float(reward is not None)})

    async def _call(self, row: Row, session: Mapping[str, str]) -> float | None:
        assert self.function is not None
        offered = {
            "base_url": f"{session['url']}/v1",
            "api_key": session["token"],
            "session_url": session["url"],
        }
        parameters = inspect.signature(self.function).parameters
        takes_all = any(parameter.kind == parameter.VAR_KEYWORD for parameter in parameters.values())
        result = self.function(
            row, **{name: value for name, value in offered.items() if takes_all or name in parameters}
        )
        if inspect.isawaitable(result):
            result = await result
        return None if result is None else float(result)

    def _run_program(self, row: Row, session: Mapping[str, str]) -> Outcome:
        assert self.sandbox is not None
        return self.sandbox.run(
            self.command,
            files={ROW_FILE: json.dumps(row, default=str).encode()},
            environment={**self.environment, **client_environment(session)},
            limits=self.limits,
            host_port=urlsplit(session["url"]).port,
        )


def client_environment(session: Mapping[str, str]) -> dict[str, str]:
    """What clients of OpenAI's and Anthropic's APIs read, and the session's own place."""
    url, token = session["url"], session["token"]
    return {
        "OPENAI_BASE_URL": f"{url}/v1",
        "OPENAI_API_BASE": f"{url}/v1",
        "OPENAI_API_KEY": token,
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_API_KEY": token,
        "RLTRAIN_SESSION_URL": url,
        "RLTRAIN_ROW": ROW_FILE,
    }


def printed_reward(output: bytes) -> float | None:
    """Of a program whose last line is a JSON object with a number under "reward"."""
    lines = output.decode(errors="replace").strip().splitlines()
    try:
        last = parse_json(lines[-1]) if lines else None
    except ValueError:
        return None
    reward = last.get("reward") if isinstance(last, dict) else None
    is_number = isinstance(reward, int | float) and not isinstance(reward, bool) and is_reward(reward)
    return float(reward) if is_number and reward is not None else None


def _expect_success(outcome: Outcome) -> None:
    if outcome.succeeded:
        return
    said = outcome.stderr.decode(errors="replace").strip()[-LAST_OUTPUT_CHARS:]
    how = f"reached its limit: {outcome.ended_by}" if outcome.ended_by else f"ended with status {outcome.status}"
    raise AgentFailed(f"the agent's program {how}. {said}")
