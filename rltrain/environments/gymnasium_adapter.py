"""Gymnasium's environments, single or vectorised, with observations and actions as text."""

import re
from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

from rltrain.environments.batch import EnvironmentFactory
from rltrain.environments.convention import Build, parameters_of, refuse_unknown_options, with_shown
from rltrain.environments.interface import Action, Environment, Opening, Row, StepResult
from rltrain.environments.one_by_one import one_by_one
from rltrain.errors import ConfigError
from rltrain.rewards.locating import locate

# Observations as text, and texts as actions. Spaces are recognised by their attributes.
#
# numpy is imported on demand, so that workers of other environments start sooner.

HIGHLIGHTED = re.compile(r"\x1b\[[0-9;]+m(.*?)\x1b\[0m")
"""Colour codes around a marked place in text drawings."""
NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?")
SIGNIFICANT_DIGITS = 4

Parse = Callable[[str], Any]
"""Converts the model's text to an action. Returns None if it has none."""


def without_colours(drawing: str) -> str:
    """Returns the drawing with brackets around coloured parts."""
    return HIGHLIGHTED.sub(r"[\1]", drawing).strip("\n")


def observation_text(observation: Any) -> str:
    """Returns the observation as text. Numbers have 4 digits, arrays become lists, and entries of a mapping have
    separate lines."""
    if isinstance(observation, str):
        return observation
    if isinstance(observation, Mapping):
        return "\n".join(f"{name}: {observation_text(value)}" for name, value in observation.items())
    if isinstance(observation, tuple):
        return ", ".join(map(observation_text, observation))
    return _numbers_text(observation.tolist() if hasattr(observation, "tolist") else observation)


def _numbers_text(value: Any) -> str:
    """Returns a number or nested lists of numbers as text."""
    if isinstance(value, list):
        is_nested = any(isinstance(item, list) for item in value)
        return ("\n" if is_nested else ", ").join(map(_numbers_text, value))
    return f"{value:.{SIGNIFICANT_DIGITS}g}" if isinstance(value, float) else str(value)


def default_parse(space: Any, names: Sequence[str] = ()) -> Parse:
    """Returns the default parser for an action space. For finitely many actions it takes the last number or name in the
    text. Otherwise it takes as many of the last numbers as the space needs."""
    if hasattr(space, "n"):
        return lambda text: _last_choice(text, int(space.n), int(getattr(space, "start", 0)), names)
    if getattr(space, "shape", None) is not None:
        return lambda text: _last_numbers(text, space)
    raise TypeError(f"actions of {space} cannot be read from texts; set env.options.parse to a function that can")


def _last_choice(text: str, num_actions: int, start: int, names: Sequence[str]) -> int | None:
    if names:
        found = re.findall("|".join(rf"\b{re.escape(name)}\b" for name in names), text, re.IGNORECASE)
        lowered = [name.lower() for name in names]
        return start + lowered.index(found[-1].lower()) if found else None
    numbers = NUMBER.findall(text)
    if not numbers or not numbers[-1].lstrip("-").isdigit():
        return None
    number = int(numbers[-1])
    return number if start <= number < start + num_actions else None


def _last_numbers(text: str, space: Any) -> Any:
    import numpy as np

    count = prod(space.shape)
    numbers = NUMBER.findall(text)[-count:] if count else []
    if len(numbers) < count:
        return None
    action = np.array([float(number) for number in numbers]).reshape(space.shape).astype(space.dtype)
    return action if space.contains(action) else None


def action_help(space: Any, names: Sequence[str] = ()) -> str:
    """Returns the text that describes the possible answers to the model."""
    if names:
        return f"Answer with one of: {', '.join(names)}."
    if hasattr(space, "n"):
        start = int(getattr(space, "start", 0))
        return f"Answer with a number from {start} to {start + int(space.n) - 1}."
    return f"Answer with {prod(space.shape)} numbers."


# Registered environments ("gymnasium:FrozenLake-v1") and classes of the user.

PREFIX = "gymnasium:"
SEEDS_EACH = ("sync", "async")
"""Vectorisations with a seed per episode. A custom vector environment takes one seed for all."""
OPTIONS = ("make", "vectorization", "render", "parse", "action_names", "on_invalid")


def recognises(thing: Any) -> bool:
    parameters = parameters_of(thing, "reset") or ()
    return {"seed", "options"} <= {*parameters} and len(parameters_of(thing, "step") or ()) == 1


def adapt(build: Build, factory: EnvironmentFactory) -> Environment:
    """Returns an environment for a user's class. `env.options.make` are its arguments."""
    return one_by_one(lambda: GymnasiumEpisode(build, Texts(factory)))


def registered(factory: EnvironmentFactory) -> Callable[[], Environment]:
    """Returns a function that builds the environment registered under the name after PREFIX."""
    try:
        import gymnasium
    except ImportError as error:
        raise ConfigError(
            f"env.function: {factory.function!r} needs the package gymnasium, which is not installed"
        ) from error
    name = factory.function.removeprefix(PREFIX)
    try:
        gymnasium.spec(name)
    except gymnasium.error.Error as error:
        raise ConfigError(f"env.function: {factory.function!r}: {error}") from error
    vectorization = factory.options.get("vectorization")

    def make(**arguments: Any) -> Any:
        return gymnasium.make(name, **arguments)

    if vectorization is None:
        return lambda: adapt(make, factory)

    def make_vector(num_envs: int) -> Any:
        arguments = factory.options.get("make") or {}
        return gymnasium.make_vec(name, num_envs, vectorization_mode=vectorization, **arguments)

    return lambda: VectorGymnasium(make_vector, Texts(factory), seeds_each=vectorization in SEEDS_EACH)


class Texts:
    """The options about observations and actions as texts:

    - render: the name of a function (observation) -> text. By default an environment's text drawing is shown, else the
      numbers of its observation.
    - parse: the name of a function (text) -> action, or None if there is no action.
    - action_names: names of finitely many actions, in order.
    - on_invalid: "ask" (default) describes the possible actions and costs a turn. "end" ends the episode. Vectorised
      environments always end it.
    """

    def __init__(self, factory: EnvironmentFactory) -> None:
        options = dict(factory.options)
        refuse_unknown_options(options, OPTIONS)
        self.make: Mapping[str, Any] = options.get("make") or {}
        self.names: Sequence[str] = options.get("action_names") or ()
        self.render = _function(options, "render")
        self.parse = _function(options, "parse")
        self.asks = options.get("on_invalid", "ask") == "ask"
        self.prompt_key = factory.prompt_key

    def first(self, row: Row, shown: str, action_space: Any) -> Opening:
        """Returns the row's prompt with the observation. Without a prompt, a description of the actions follows the
        observation."""
        prompt = row.get(self.prompt_key)
        if not prompt:
            return f"{shown}\n{action_help(action_space, self.names)}"
        return with_shown(prompt, shown)

    def parser(self, action_space: Any) -> Callable[[str], Any]:
        return self.parse or default_parse(action_space, self.names)


def _function(options: Mapping[str, Any], key: str) -> Callable[[Any], Any] | None:
    return None if options.get(key) is None else locate(options[key], f"env.options.{key}")


def seed_of(row: Row, seed: int) -> int:
    """Returns the row's seed, or else `seed`."""
    return int(row.get("seed", seed))


class GymnasiumEpisode:
    """One episode. The row's column `reset_options` is passed to the reset."""

    def __init__(self, build: Build, texts: Texts) -> None:
        self.texts = texts
        self.environment = build(**texts.make)
        draws_text = "ansi" in self.environment.metadata.get("render_modes", ())
        if draws_text and texts.render is None and "render_mode" not in texts.make:
            self.environment.close()
            self.environment = build(**texts.make, render_mode="ansi")
        self.parse = texts.parser(self.environment.action_space)

    def reset(self, row: Row, seed: int) -> Opening:
        observation, _ = self.environment.reset(seed=seed_of(row, seed), options=row.get("reset_options"))
        return self.texts.first(row, self._shown(observation), self.environment.action_space)

    def step(self, action: Action) -> StepResult:
        chosen = self.parse(action.text)
        if chosen is None:
            expected = action_help(self.environment.action_space, self.texts.names)
            return StepResult(expected, done=not self.texts.asks, info={"invalid_actions": 1})
        observation, reward, terminated, truncated, info = self.environment.step(chosen)
        return StepResult(self._shown(observation), float(reward), bool(terminated or truncated), _numbers_of(info))

    def _shown(self, observation: Any) -> str:
        if self.texts.render is not None:
            return str(self.texts.render(observation))
        if getattr(self.environment, "render_mode", None) == "ansi":
            return without_colours(self.environment.render())
        return observation_text(observation)

    def close(self) -> None:
        self.environment.close()


class VectorGymnasium:
    """A batch in a vector environment of the same size. Finished episodes are stepped with any action, as Gymnasium
    requires, and their results are ignored. Unless `seeds_each`, the first seed is used for all."""

    def __init__(self, make: Callable[[int], Any], texts: Texts, *, seeds_each: bool) -> None:
        self.make = make
        self.texts = texts
        self.seeds_each = seeds_each
        self.environment = make(1)
        self.parse = texts.parser(self.environment.single_action_space)

    def reset(self, rows: Sequence[Row], seeds: Sequence[int]) -> Sequence[Opening]:
        if self.environment.num_envs != len(rows):
            self.environment.close()
            self.environment = self.make(len(rows))
        own_seeds = [seed_of(row, seed) for row, seed in zip(rows, seeds, strict=True)]
        observations, _ = self.environment.reset(seed=own_seeds if self.seeds_each else own_seeds[0])
        space = self.environment.single_action_space
        shown = [self._shown(observations, index) for index in range(len(rows))]
        return [self.texts.first(row, text, space) for row, text in zip(rows, shown, strict=True)]

    def step(self, actions: Sequence[Action | None]) -> Sequence[StepResult | None]:
        import numpy as np

        chosen = [None if action is None else self.parse(action.text) for action in actions]
        space = self.environment.single_action_space
        any_action = space.sample() if not hasattr(space, "n") else int(getattr(space, "start", 0))
        stepped = np.stack([any_action if one is None else one for one in chosen])
        observations, rewards, terminated, truncated, _ = self.environment.step(stepped)

        def result(index: int) -> StepResult:
            if chosen[index] is None:
                return StepResult(done=True, info={"invalid_actions": 1})
            done = bool(terminated[index] or truncated[index])
            return StepResult(self._shown(observations, index), float(rewards[index]), done, {"invalid_actions": 0})

        return [None if action is None else result(index) for index, action in enumerate(actions)]

    def _shown(self, observations: Any, index: int) -> str:
        observation = _of_one(observations, index)
        return observation_text(observation) if self.texts.render is None else str(self.texts.render(observation))

    def close(self) -> None:
        self.environment.close()


def _of_one(observations: Any, index: int) -> Any:
    if isinstance(observations, Mapping):
        return {name: _of_one(value, index) for name, value in observations.items()}
    if isinstance(observations, tuple):
        return tuple(_of_one(value, index) for value in observations)
    return observations[index]


def _numbers_of(info: Mapping[str, Any]) -> Mapping[str, Any]:
    return {"invalid_actions": 0, **{name: value for name, value in info.items() if isinstance(value, int | float)}}
