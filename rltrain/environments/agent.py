"""A user's agent as an environment. It samples its turns over HTTP at the job's endpoint, with one run per episode.

Environment variables of common clients have the address: OPENAI_BASE_URL and OPENAI_API_KEY, ANTHROPIC_BASE_URL and
ANTHROPIC_API_KEY. RLTRAIN_SESSION_URL is the address for rewards. RLTRAIN_ROW names a JSON file with the row.
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
"""The additional column of an agent's row, with the url and token of its session."""
ROW_FILE = "row.json"
MAX_EPISODES = 256
"""Maximal number of simultaneous episodes in a process."""
LAST_OUTPUT_CHARS = 2000
"""Number of output characters in the error of a failed program."""


class AgentFailed(BadAnswer):
    """The agent's program failed."""


class AgentEnvironment:
    """An `Environment` whose episodes end in `reset`, after the agent's whole run.

    It starts `command` for every episode, in a sandbox with access to the endpoint only (`sandbox` none: as a plain
    process). Or it awaits `function` in this process with the row. The function can have the keyword arguments
    base_url, api_key and session_url. The reward is the function's result. A program can print it in its last line, as
    a JSON object with a number under "reward". Rewards posted to the session are added.

    A program runs in a separate folder. The files named in the command are available, and so are modules in the job's
    working directory.
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
    """Returns the environment variables for clients of OpenAI's and Anthropic's APIs, and those of the session."""
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
    """Returns the reward printed by a program, or None. Its last line must be a JSON object with a number under
    "reward"."""
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
