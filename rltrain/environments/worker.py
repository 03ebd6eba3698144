"""The process of a rank's environments: `python -m rltrain.environments.worker`, started by the rank's host.

It reads JSON lines from standard input. The first line is EnvironmentFactory.as_message. Every further line is a call:
{"call": a number, "do": a Kind, "limit_s", "environment": its number} and the arguments of that kind. Each call gets
one line as its answer: {"call", "result" or "error" or "timeout", "seconds", "finished"}. `finished` is the machine's
monotonic clock. The answer to the first line has a "description", or the reason in "refused". The process ends when its
pipes close.
"""

import asyncio
import inspect
import io
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import IO, Any

from rltrain.environments import gymnasium_adapter, one_by_one, openenv, own, slime
from rltrain.environments.batch import EnvironmentFactory
from rltrain.environments.convention import EnvironmentConvention
from rltrain.environments.encoding import BadAnswer, Json, decode_action, encode_openings, encode_results, to_line
from rltrain.environments.interface import Environment
from rltrain.environments.other_frameworks import NemoRl, SkyRLGym, TrlEnvironment
from rltrain.errors import ConfigError, UserError
from rltrain.rewards.locating import locate
from rltrain.runtime.machine import become_worker, describe_raised

# Environments and conventions for env.function.

BUILT_IN = {
    "agent": "rltrain.environments.agent:AgentEnvironment",
    "calculator": "rltrain.environments.calculator:Calculator",
    "guess_number": "rltrain.environments.guess_number:GuessNumber",
    "python": "rltrain.environments.python_tool:PythonTool",
}
CONVENTIONS: Sequence[EnvironmentConvention] = (
    slime,
    own,
    NemoRl,
    openenv,
    gymnasium_adapter,
    SkyRLGym,
    one_by_one,
    TrlEnvironment,
)
"""The first convention that recognises the object is used."""
EXPECTED = (
    "a class, or a function that returns an environment, with reset(rows, seeds) and step(actions) for a batch of "
    "episodes or reset(row, seed) and step(action) for one, or another form of docs/environments.md"
)


def load_environment(factory: EnvironmentFactory) -> Callable[[], Environment]:
    """Returns a function that builds an environment per call. Raises ConfigError if env.function cannot be found, has
    no known form, or does not accept env.options."""
    function = factory.function
    if function.startswith(gymnasium_adapter.PREFIX):
        return gymnasium_adapter.registered(factory)
    if function.startswith(openenv.SCHEMES):
        return openenv.served(factory)
    slime.provide()
    named = locate(BUILT_IN.get(function, function), "env.function", shown=function, known=[*BUILT_IN])
    convention = _convention_of(named, factory)
    return lambda: convention.adapt(named, factory)


def _convention_of(named: Callable[..., Any], factory: EnvironmentFactory) -> EnvironmentConvention:
    for convention in CONVENTIONS:
        if convention.recognises(named):
            return convention
    if inspect.isclass(named):
        raise ConfigError(f"env.function: {factory.function!r} has {_methods_of(named)}; expected {EXPECTED}")
    built = named(**factory.options)
    for convention in CONVENTIONS:
        if convention.recognises(built):
            return convention
    raise ConfigError(
        f"env.function: {factory.function!r} returned {type(built).__name__}, which has {_methods_of(built)}; expected "
        f"{EXPECTED}"
    )


def _methods_of(thing: Any) -> str:
    signatures = []
    for name in ("reset", "init", "step"):
        method = getattr(thing, name, None)
        if callable(method):
            signatures.append(f"{name}{inspect.signature(method)}")
    return ", ".join(signatures) or "neither reset nor step"


OWN_FILES = {__file__, *(inspect.getfile(convention.adapt) for convention in CONVENTIONS)}


class WorkerEnvironments:
    """The environments of this process, by the host's numbers. The first is built at once."""

    def __init__(self, build: Callable[[], Any]) -> None:
        self.build = build
        self.built: dict[int, Any] = {0: build()}

    @property
    def is_concurrent(self) -> bool:
        return inspect.iscoroutinefunction(self.built[0].step)

    def describe(self) -> Json:
        first = self.built[0]
        return {
            "concurrent": self.is_concurrent,
            "saved": hasattr(first, "get_state") and hasattr(first, "load_state"),
            "offloaded": hasattr(first, "offload") and hasattr(first, "onload"),
            "tools": [dict(tool) for tool in getattr(first, "tools", ())],
        }

    def call(self, message: Json) -> Any:
        """Calls the environment's method and returns its result, which can be an awaitable. Raises the method's
        exception."""
        match message["do"]:
            case "offload" | "onload" as kind:
                return [getattr(environment, kind)() for environment in self.built.values()]
            case "close":
                return self.close()
        environment = self._environment(message["environment"])
        match message["do"]:
            case "reset":
                return environment.reset(message["rows"], message["seeds"])
            case "step":
                return environment.step([decode_action(action) for action in message["actions"]])
            case "get_state":
                return environment.get_state()
            case "load_state":
                return environment.load_state(message["state"])
        raise ValueError(f"unknown call {message['do']!r}")

    def _environment(self, number: int) -> Any:
        if number not in self.built:
            self.built[number] = self.build()
        return self.built[number]

    def give_up(self, number: int) -> None:
        """Discards an environment after an error. The next call with its number builds a new one."""
        environment = self.built.pop(number, None)
        with suppress(Exception):
            _close(environment)

    def close(self) -> None:
        """Closes and removes all environments."""
        while self.built:
            _close(self.built.popitem()[1])


def _close(environment: Any) -> None:
    closed = environment.close() if hasattr(environment, "close") else None
    if inspect.iscoroutine(closed):
        closed.close()


def result_of(message: Json, returned: Any) -> Json:
    """Returns the result as JSON. Raises BadAnswer if the environment returned a wrong value."""
    match message["do"]:
        case "reset":
            return encode_openings(returned, len(message["rows"]))
        case "step":
            return encode_results(returned, [action is not None for action in message["actions"]])
        case "get_state":
            return returned
    return None


def failure_of(error: BaseException) -> Json:
    if isinstance(error, BadAnswer):
        return {"error": str(error), "traceback": ""}
    what, traceback = describe_raised(error, OWN_FILES)
    return {"error": what, "traceback": traceback}


class CallServer:
    """Answers calls: one at a time, or concurrently if the environments are coroutines."""

    def __init__(self, environments: WorkerEnvironments, write: Callable[[bytes], None]) -> None:
        self.environments = environments
        self.write = write

    def serve(self, requests: Iterable[bytes]) -> None:
        """Answers all requests. Ends after the last complete line."""
        for line in requests:
            if not line.endswith(b"\n"):
                return
            message, start = json.loads(line), time.monotonic()
            try:
                answer = self.answer(message, start, self.environments.call(message))
            except BaseException as error:  # a user's sys.exit() costs an episode, not the process
                answer = self.failure(message, start, failure_of(error))
            self.write(answer)

    async def serve_concurrently(self, requests: IO[bytes]) -> None:
        reader = asyncio.StreamReader(limit=sys.maxsize)
        await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), requests)
        tasks: set[asyncio.Task[None]] = set()
        while (line := await reader.readline()).endswith(b"\n"):
            task = asyncio.create_task(self._serve_one(json.loads(line)))
            tasks.add(task)
            task.add_done_callback(tasks.discard)

    async def _serve_one(self, message: Json) -> None:
        start = time.monotonic()
        try:
            async with asyncio.timeout(message["limit_s"]) as limit:
                returned = self.environments.call(message)
                answer = self.answer(message, start, await returned if inspect.isawaitable(returned) else returned)
        except BaseException as error:
            is_over = isinstance(error, TimeoutError) and limit.expired()
            answer = self.failure(message, start, {"timeout": True} if is_over else failure_of(error))
        self.write(answer)

    def answer(self, message: Json, start: float, returned: Any) -> bytes:
        """Returns the answer as a line. Raises an exception if JSON cannot represent it."""
        is_state = message["do"] == "get_state"
        return to_line(_timed(message, start) | {"result": result_of(message, returned)}, exactly=is_state)

    def failure(self, message: Json, start: float, failure: Json) -> bytes:
        """Discards the environment and returns the failure as a line."""
        if "environment" in message:
            self.environments.give_up(message["environment"])
        return to_line(_timed(message, start) | failure)


def _timed(message: Json, start: float) -> Json:
    now = time.monotonic()
    return {"call": message["call"], "seconds": now - start, "finished": now}


def main() -> None:
    requests, answers = become_worker()

    def write(line: bytes) -> None:
        try:
            while line:
                line = line[answers.write(line) or 0 :]
        except BrokenPipeError:
            os._exit(0)

    first = requests.readline()
    if not first.endswith(b"\n"):
        return
    factory = EnvironmentFactory(**json.loads(first))
    if factory.gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(factory.gpus)
    try:
        environments = WorkerEnvironments(load_environment(factory))
        description = environments.describe()
    except UserError as error:
        return write(to_line({"refused": str(error), "finished": time.monotonic()}))
    except BaseException as error:
        what, traceback = describe_raised(error, OWN_FILES)
        refused = f"env.function: {factory.function!r} cannot be built with env.options {factory.options}: {what}"
        return write(to_line({"refused": f"{refused}\n{traceback}".strip(), "finished": time.monotonic()}))
    write(to_line({"description": description, "finished": time.monotonic()}))
    server = CallServer(environments, write)
    if environments.is_concurrent:
        asyncio.run(server.serve_concurrently(requests))
    else:
        server.serve(io.BufferedReader(requests))


if __name__ == "__main__":
    main()
