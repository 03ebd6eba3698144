"""OpenEnv's environments: a class in this process, or a server at a URL over HTTP or a WebSocket."""

import inspect
import json
import typing
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from typing import Any, Protocol

from rltrain.environments.batch import EnvironmentFactory
from rltrain.environments.convention import Build, parameters_of, refuse_unknown_options, with_shown
from rltrain.environments.interface import Action, Environment, Opening, Row, StepResult
from rltrain.environments.one_by_one import one_by_one
from rltrain.errors import ConfigError
from rltrain.rewards.locating import locate
from rltrain.runtime.json_text import parse_json

HTTP, WEB_SOCKET = ("http://", "https://"), ("ws://", "wss://")
SCHEMES = (*HTTP, *WEB_SOCKET)
OPTIONS = ("make", "action", "action_key", "observation_key", "timeout_s", "reset_columns", "headers")
TIMEOUT_S = 60.0
PACKAGES = ("openenv", "openenv_core")

Result = Mapping[str, Any]
"""An answer of OpenEnv's servers: {"observation", "reward", "done"}."""


class OpenEnvSession(Protocol):
    """A connection of one episode to its environment."""

    def reset(self, arguments: Mapping[str, Any]) -> Result: ...

    def step(self, action: Mapping[str, Any]) -> Result: ...

    def close(self) -> None: ...


def recognises(thing: Any) -> bool:
    """Recognises subclasses of OpenEnv's classes, and objects with the reset of OpenEnv's base class."""
    bases = (thing if inspect.isclass(thing) else type(thing)).__mro__
    is_of_package = any(base.__module__.partition(".")[0] in PACKAGES for base in bases)
    return hasattr(thing, "step") and (is_of_package or "episode_id" in (parameters_of(thing, "reset") or ()))


def adapt(build: Build, factory: EnvironmentFactory) -> Environment:
    """Returns an environment for a server-side class. `env.options.make` are its arguments."""
    make = factory.options.get("make") or {}
    return _environment(lambda: InProcess(build(**make), factory), factory)


def served(factory: EnvironmentFactory) -> Callable[[], Environment]:
    """Returns a function that builds environments for the server at the URL env.function."""
    url = factory.function.rstrip("/")
    options = factory.options
    timeout_s, headers = float(options.get("timeout_s", TIMEOUT_S)), dict(options.get("headers") or {})
    if url.startswith(HTTP):
        return lambda: _environment(lambda: OverHttp(url, timeout_s, headers), factory)
    return lambda: _environment(lambda: OverWebSocket(url, timeout_s, headers), factory)


def _environment(open_session: Callable[[], OpenEnvSession], factory: EnvironmentFactory) -> Environment:
    return one_by_one(lambda: OpenEnvEpisode(open_session(), factory))


class OpenEnvEpisode:
    """One episode. Its env.options are:

    - action: the name of a function from the model's text to the fields of the action. By default the fields are the
      text's JSON object. If there is none, the text becomes the field `action_key` ("message"). Arguments of a tool
      call take precedence.
    - observation_key: the field of the observation to show. By default all of it is shown as JSON.
    - reset_columns: columns of the row passed to the reset in addition to the seed. By default none.
    """

    def __init__(self, session: OpenEnvSession, factory: EnvironmentFactory) -> None:
        options = factory.options
        refuse_unknown_options(options, OPTIONS)
        self.session = session
        self.prompt_key = factory.prompt_key
        self.action_key = options.get("action_key", "message")
        self.observation_key = options.get("observation_key")
        self.reset_columns = tuple(options.get("reset_columns") or ())
        named = options.get("action")
        self.action_of = locate(named, "env.options.action") if named else self._fields

    def reset(self, row: Row, seed: int) -> Opening:
        result = self.session.reset({"seed": seed, **{name: row[name] for name in self.reset_columns}})
        shown, prompt = self._shown(result), row.get(self.prompt_key)
        if not prompt:
            return shown
        return with_shown(prompt, shown) if shown else None

    def step(self, action: Action) -> StepResult:
        fields = dict(action.tool_calls[-1].arguments) if action.tool_calls else self.action_of(action.text)
        result = self.session.step(fields)
        metadata = result.get("metadata") or {}
        return StepResult(self._shown(result), float(result.get("reward") or 0.0), bool(result.get("done")), metadata)

    def _fields(self, text: str) -> Mapping[str, Any]:
        try:
            fields = parse_json(text)
        except ValueError:
            fields = None
        return fields if isinstance(fields, dict) else {self.action_key: text}

    def _shown(self, result: Result) -> str:
        observation = result["observation"]
        if self.observation_key is not None:
            observation = observation[self.observation_key]
        return observation if isinstance(observation, str) else json.dumps(observation) if observation else ""

    def close(self) -> None:
        self.session.close()


class InProcess:
    """An instance of a server-side class. If the type of its step's action is known, actions become instances of this
    type."""

    def __init__(self, environment: Any, factory: EnvironmentFactory) -> None:
        self.environment = environment
        hint = typing.get_type_hints(type(environment).step).get("action")
        self.action_class = hint if isinstance(hint, type) else None
        self.begun_with = inspect.signature(environment.reset).parameters

    def reset(self, arguments: Mapping[str, Any]) -> Result:
        """Resets the environment with the arguments that it accepts, as a server does."""
        takes_any = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in self.begun_with.values())
        taken = {name: value for name, value in arguments.items() if takes_any or name in self.begun_with}
        return _as_result(self.environment.reset(**taken))

    def step(self, action: Mapping[str, Any]) -> Result:
        return _as_result(self.environment.step(self.action_class(**action) if self.action_class else action))

    def close(self) -> None:
        if hasattr(self.environment, "close"):
            self.environment.close()


def _as_result(observation: Any) -> Result:
    """Converts an observation to a result. OpenEnv's observations contain reward and end."""
    fields = dict(observation.model_dump()) if hasattr(observation, "model_dump") else dict(vars(observation))
    reward, done, metadata = fields.pop("reward", None), fields.pop("done", False), fields.pop("metadata", None)
    return {"observation": fields, "reward": reward, "done": done, "metadata": metadata}


class OverHttp:
    """A connection by POST /reset and /step. The server has a single episode for all clients. Use one server per
    worker, or a WebSocket."""

    def __init__(self, url: str, timeout_s: float, headers: Mapping[str, str]) -> None:
        import httpx

        self.client = httpx.Client(base_url=url, timeout=timeout_s, headers=headers)

    def reset(self, arguments: Mapping[str, Any]) -> Result:
        return self._post("/reset", arguments)

    def step(self, action: Mapping[str, Any]) -> Result:
        return self._post("/step", {"action": action})

    def _post(self, path: str, body: Mapping[str, Any]) -> Result:
        response = self.client.post(path, json=body)
        if response.is_error:
            raise ConnectionError(f"POST {response.url}: {response.status_code} {response.text:.500}")
        result: Result = parse_json(response.content)
        return result

    def close(self) -> None:
        self.client.close()


class OverWebSocket:
    """A connection to the server's /ws. Every connection has a separate episode."""

    def __init__(self, url: str, timeout_s: float, headers: Mapping[str, str]) -> None:
        try:
            from websockets.sync.client import connect
        except ImportError as error:
            raise ConfigError(f"env.function: {url!r} needs the package websockets, which is not installed") from error
        self.timeout_s = timeout_s
        address = url if url.endswith("/ws") else f"{url}/ws"
        opened = connect(address, open_timeout=timeout_s, additional_headers=headers, max_size=None, proxy=None)
        self.closing = ExitStack()
        self.connection = self.closing.enter_context(opened)

    def reset(self, arguments: Mapping[str, Any]) -> Result:
        return self._ask({"type": "reset", "data": arguments})

    def step(self, action: Mapping[str, Any]) -> Result:
        return self._ask({"type": "step", "data": action})

    def _ask(self, message: Mapping[str, Any]) -> Result:
        self.connection.send(json.dumps(message))
        answer = parse_json(self.connection.recv(self.timeout_s))
        if answer["type"] != "observation":
            raise ConnectionError(f"the environment's server answered {json.dumps(answer):.500}")
        result: Result = answer["data"]
        return result

    def close(self) -> None:
        from websockets.exceptions import ConnectionClosed

        with self.closing, suppress(ConnectionClosed):
            self.connection.send(json.dumps({"type": "close"}))
