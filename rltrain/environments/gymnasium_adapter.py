"""Gymnasium's environments, single or vectorised, with observations as text or images and actions as text."""

import gc
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import partial, reduce
from importlib import import_module
from math import prod
from operator import getitem
from types import SimpleNamespace
from typing import Any

from rltrain.environments.batch import EnvironmentFactory
from rltrain.environments.convention import Build, as_messages, parameters_of, refuse_unknown_options
from rltrain.environments.encoding import BadAnswer
from rltrain.environments.image_urls import image_url, is_image
from rltrain.environments.interface import Action, Environment, Message, Opening, Row, StepResult
from rltrain.environments.one_by_one import one_by_one
from rltrain.errors import ConfigError, one_of
from rltrain.rewards.locating import locate

# Observations as text. Spaces are recognised by their attributes.
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


# Observations as images.


@dataclass(frozen=True)
class Shown:
    """An observation for the model: a text, and images before it."""

    text: str
    images: tuple[str, ...] = ()
    """Data URLs."""

    def as_observation(self, before: str = "", after: str = "") -> str | Sequence[Message]:
        """Returns the observation between two texts."""
        texts = [text for text in (self.text, after) if text]
        if not self.images:
            return "\n".join([before, *texts] if before else texts)
        parts = [{"type": "text", "text": before}] if before else []
        parts += [{"type": "image", "image": image} for image in self.images]
        parts += [{"type": "text", "text": "\n".join(texts)}] if texts else []
        return [{"role": "user", "content": parts}]


def is_of_pixels(space: Any) -> bool:
    """Returns whether the observations of a space, or an array, are images: uint8 of shape [height, width, 3]."""
    shape = [*(getattr(space, "shape", None) or ())]
    return str(getattr(space, "dtype", "")) == "uint8" and len(shape) == 3 and shape[2] == 3


def is_single(value: Any, batch_axes: int) -> bool:
    """Returns whether the value is a text or a number, or a batch of them with one axis."""
    if isinstance(value, tuple):
        return all(is_single(one, batch_axes) for one in value)
    return len(getattr(value, "shape", ())) <= batch_axes


def beside_drawing(observation: Any, batch_axes: int) -> Any:
    """Returns the texts and single values of an observation, or of a batch with one axis. None if there are none."""
    if isinstance(observation, Mapping):
        single = {
            name: beside_drawing(value, batch_axes) if isinstance(value, Mapping) else value
            for name, value in observation.items()
            if isinstance(value, Mapping) or is_single(value, batch_axes)
        }
        return {name: value for name, value in single.items() if value is not None} or None
    is_text = isinstance(observation, str | tuple) and all(isinstance(one, str) for one in observation)
    return observation if is_text else None


def entry_at(observation: Any, path: str) -> Any:
    """Returns the entry of nested mappings at a path such as "sensor_data.base_camera.rgb"."""
    return reduce(getitem, path.split("."), observation)


def entries_of(space: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yields path and space of each entry of a space of mappings. The path of any other space is empty."""
    within = getattr(space, "spaces", None)
    if not isinstance(within, Mapping):
        yield path, space
        return
    for name, of_value in within.items():
        yield from entries_of(of_value, f"{path}.{name}" if path else name)


def on_host(value: Any) -> Any:
    """Returns the value with arrays of numpy instead of tensors. Each tensor is copied once from its device."""
    if isinstance(value, Mapping):
        return {name: on_host(held) for name, held in value.items()}
    if isinstance(value, tuple):
        return tuple(map(on_host, value))
    return value.cpu().numpy() if hasattr(value, "cpu") else value


# Texts as actions.


def default_parse(space: Any, names: Sequence[str] = ()) -> Parse:
    """Returns the default parser for one action of a space. It takes the last one in the text."""
    parse = default_parse_all(space, names, 1)

    def last(text: str) -> Any:
        found = parse(text)
        return found[-1] if found else None

    return last


def default_parse_all(space: Any, names: Sequence[str], most: int) -> Callable[[str], Sequence[Any] | None]:
    """Returns the default parser for the last `most` actions in a text, in order. The text may have fewer.

    For finitely many actions each number or name is an action. Otherwise as many numbers are one as the space needs.
    The parser returns None if there is no action, or an impossible one.
    """
    if hasattr(space, "n"):
        return lambda text: _choices(text, int(space.n), int(getattr(space, "start", 0)), names, most)
    if getattr(space, "shape", None) is not None:
        return lambda text: _arrays(text, space, most)
    raise TypeError(f"actions of {space} cannot be read from texts; set env.options.parse to a function that can")


def _choices(text: str, num_actions: int, start: int, names: Sequence[str], most: int) -> list[int] | None:
    if names:
        found = re.findall("|".join(rf"\b{re.escape(name)}\b" for name in names), text, re.IGNORECASE)
        lowered = [name.lower() for name in names]
        return [start + lowered.index(name.lower()) for name in found[-most:]] or None
    numbers = NUMBER.findall(text)[-most:]
    if not numbers or not all(number.lstrip("-").isdigit() for number in numbers):
        return None
    chosen = [int(number) for number in numbers]
    return chosen if all(start <= number < start + num_actions for number in chosen) else None


def _arrays(text: str, space: Any, most: int) -> list[Any] | None:
    import numpy as np

    count = prod(space.shape)
    numbers = [float(number) for number in NUMBER.findall(text)]
    num_actions = min(len(numbers) // count, most) if count else 1
    if not num_actions:
        return None
    last = numbers[len(numbers) - num_actions * count :] if count else []
    actions = [*np.array(last).reshape(num_actions, *space.shape).astype(space.dtype)]
    return actions if all(map(space.contains, actions)) else None


def action_help(space: Any, names: Sequence[str] = (), most: int = 1) -> str:
    """Returns the text that describes the possible answers to the model. `most` is the largest number of actions."""
    many = "" if most == 1 else f" up to {most}"
    if names:
        return f"Answer with{many or ' one'} of: {', '.join(names)}."
    if hasattr(space, "n"):
        start = int(getattr(space, "start", 0))
        numbers = f"{many} numbers" if many else " a number"
        return f"Answer with{numbers} from {start} to {start + int(space.n) - 1}."
    times = f"{many} times" if many else ""
    return f"Answer with{times} {prod(space.shape)} numbers."


# Registered environments ("gymnasium:FrozenLake-v1") and classes of the user.

PREFIX = "gymnasium:"
SEEDS_EACH = ("sync", "async")
"""Vectorisations with a seed per episode. A custom vector environment takes one seed for all."""
DRAWING = "rgb_array"
"""Gymnasium's name for drawings in pixels."""
ENTRY_POINT = "vector_entry_point"
"""Gymnasium's name for an environment's own vector environment."""
SYMBOLS_BELOW = 32
"""Arrays with fewer rows or columns may be symbols in cells. Larger ones are images, too long as text."""
OPTIONS = (
    "make",
    "vectorization",
    "render",
    "entries",
    "frames",
    "action_chunk",
    "parse",
    "action_names",
    "on_invalid",
)


def recognises(thing: Any) -> bool:
    parameters = parameters_of(thing, "reset") or ()
    return {"seed", "options"} <= {*parameters} and len(parameters_of(thing, "step") or ()) == 1


def adapt(build: Build, factory: EnvironmentFactory) -> Environment:
    """Returns an environment for a user's class. `env.options.make` are its arguments."""
    return one_by_one(lambda: GymnasiumEpisode(build, TurnOptions(factory)))


def registered(factory: EnvironmentFactory) -> Callable[[], Environment]:
    """Returns a function that builds the environment registered under the name after PREFIX.

    The name may have the module that registers it, as in gymnasium:minigrid:MiniGrid-Empty-5x5-v0.
    """
    try:
        import gymnasium
    except ImportError as error:
        raise ConfigError(
            f"env.function: {factory.function!r} needs the package gymnasium, which is not installed"
        ) from error
    module, _, name = factory.function.removeprefix(PREFIX).rpartition(":")
    try:
        if module:
            import_module(module)
        gymnasium.spec(name)
    except (ImportError, gymnasium.error.Error) as error:
        raise ConfigError(f"env.function: {factory.function!r}: {error}") from error
    vectorization = factory.options.get("vectorization")

    def make(**arguments: Any) -> Any:
        return gymnasium.make(name, **arguments)

    if vectorization is None:
        return lambda: adapt(make, factory)

    options = TurnOptions(factory)

    def make_vector(num_envs: int) -> Any:
        return vector_environment(name, num_envs, vectorization, options.arguments)

    return lambda: VectorGymnasium(
        make_vector, options, seeds_each=vectorization in SEEDS_EACH, num_envs=factory.batch_size
    )


def vector_environment(name: str, num_envs: int, vectorization: str, arguments: Mapping[str, Any]) -> Any:
    """Returns a vector environment of a registered environment.

    Gymnasium refuses vector entry points of environments that are registered with wrappers, such as ManiSkill's. Those
    that apply the wrappers themselves are used all the same. The others raise ConfigError.
    """
    import gymnasium

    spec = copy(gymnasium.spec(name))
    wrappers = [wrapper.entry_point for wrapper in spec.additional_wrappers]
    if vectorization == ENTRY_POINT:
        spec.additional_wrappers = ()
    environment = gymnasium.make_vec(spec, num_envs, vectorization_mode=vectorization, **arguments)
    if vectorization == ENTRY_POINT:
        applied = [wrapper.entry_point for wrapper in getattr(environment.spec, "additional_wrappers", ())]
        if missing := sorted({*wrappers} - {*applied}):
            raise ConfigError(
                f"env.options.vectorization: the vector_entry_point of {name} does not apply {', '.join(missing)}, "
                "which it is registered with; set env.options.vectorization to sync or async"
            )
    return environment


class TurnOptions:
    """The options about observations and actions:

    - render: "rgb_array" shows the environment's drawing. Any other value names a function (observation) -> text or
      image. By default an environment's text drawing is shown, or its observation: as an image if it is one, else its
      numbers.
    - entries: paths of the entries of a dict observation to show, such as sensor_data.base_camera.rgb. Images are shown
      as such, and others as text.
    - frames: most images of a turn, those of its last steps (default 1).
    - action_chunk: most actions of a turn (default 1). They are stepped in order until the episode is done.
    - parse: the name of a function (text) -> action, or None if there is no action. With action_chunk it returns a list
      of actions.
    - action_names: names of finitely many actions, in order.
    - on_invalid: "ask" (default) describes the possible actions and costs a turn. "end" ends the episode. Vectorised
      environments always end it. They step all episodes together, so a turn there needs exactly action_chunk actions.
    """

    def __init__(self, factory: EnvironmentFactory) -> None:
        options = dict(factory.options)
        refuse_unknown_options(options, OPTIONS)
        self.draws = options.get("render") == DRAWING
        self.make: Mapping[str, Any] = options.get("make") or {}
        self.names: Sequence[str] = options.get("action_names") or ()
        self.render = None if self.draws else _function(options, "render")
        self.entries = _paths(options, "entries")
        if self.entries and self.render is not None:
            raise ConfigError("env.options has render and entries; expected one, as the function chooses what is shown")
        self.parse = _function(options, "parse")
        self.action_chunk, self.frames = _count(options, "action_chunk"), _count(options, "frames")
        if self.frames > self.action_chunk:
            raise ConfigError(
                f"env.options: frames is {self.frames} and action_chunk {self.action_chunk}; expected at most "
                "action_chunk frames, as the model still sees those of earlier turns"
            )
        self.asks = options.get("on_invalid", "ask") == "ask"
        self.prompt_key = factory.prompt_key

    @property
    def arguments(self) -> Mapping[str, Any]:
        """The environment's arguments."""
        return {"render_mode": DRAWING, **self.make} if self.draws else self.make

    def require_drawing(self, environment: Any) -> None:
        """Raises ConfigError if the environment has no drawing but `render` asks for one."""
        modes = [*(getattr(environment, "metadata", None) or {}).get("render_modes", ())]
        if self.draws and DRAWING not in modes:
            raise ConfigError(
                f"env.options.render is {DRAWING}, but the environment draws {', '.join(modes) or 'nothing'}; expected "
                f"{DRAWING} among its render_modes, or a function (observation) -> image"
            )

    def require_entries(self, space: Any) -> None:
        """Raises ConfigError if observations lack an entry of `entries`, or have images that would become text."""
        known = dict(entries_of(space))
        for path in self.entries:
            if path not in known:
                raise ConfigError(
                    f"env.options.entries: {path!r} is no entry of the observations; expected "
                    f"{one_of(path, filter(None, known)) if any(known) else f'a space of dicts, but it is {space}'}"
                )
        if self.entries or self.draws or self.render is not None:
            return
        for path, of_value in known.items():
            if path and is_of_pixels(of_value) and min(of_value.shape[:2]) >= SYMBOLS_BELOW:
                raise ConfigError(
                    f"env.options: the observations have an image at {path}, which is too long as text; set "
                    f"env.options.entries to the entries to show, such as [{path}]"
                )

    def first(self, row: Row, shown: Shown, action_space: Any) -> Opening:
        """Returns the row's prompt with the observation. Without a prompt, a description of the actions follows the
        observation."""
        prompt = row.get(self.prompt_key)
        if not prompt:
            return shown.as_observation(after=self.help(action_space))
        if isinstance(prompt, str):
            return shown.as_observation(before=prompt)
        return [*prompt, *as_messages(shown.as_observation())]

    def help(self, action_space: Any) -> str:
        return action_help(action_space, self.names, self.action_chunk)

    def needed(self, observation: Any, batch_axes: int = 0) -> Any:
        """Returns what `shown` needs of an observation, or of a batch with one axis."""
        if self.entries:
            return {path: entry_at(observation, path) for path in self.entries}
        return beside_drawing(observation, batch_axes) if self.draws else observation

    def shown(self, needed: Any, space: Any, drawing: Callable[[], Any]) -> Shown:
        """Returns the part of an observation that the model sees. `space` is that of observations."""
        if self.render is not None:
            rendered = self.render(needed)
            return Shown("", (image_url(rendered),)) if is_image(rendered) else Shown(str(rendered))
        if self.draws or self.entries:
            images = [drawing()] if self.draws else []
            if isinstance(needed, Mapping):
                images += filter(is_of_pixels, needed.values())
                needed = {path: value for path, value in needed.items() if not is_of_pixels(value)}
            return Shown("" if needed is None else observation_text(needed), tuple(map(image_url, images)))
        if is_of_pixels(space):
            return Shown("", (image_url(needed),))
        return Shown(observation_text(needed))

    def parser(self, action_space: Any) -> Callable[[str], Sequence[Any] | None]:
        """Returns the function from a text to its actions, in order. It returns None if there is none."""
        parse, most = self.parse, self.action_chunk
        if parse is None:
            return default_parse_all(action_space, self.names, most)

        def parsed(text: str) -> Sequence[Any] | None:
            found = parse(text)
            if found is None or most == 1:
                return None if found is None else [found]
            if not 0 < len(found) <= most:
                raise BadAnswer(f"env.options.parse returned {len(found)} actions; expected 1 to {most}, or None")
            return [*found]

        return parsed


def _count(options: Mapping[str, Any], key: str) -> int:
    count = options.get(key, 1)
    if type(count) is not int or count < 1:
        raise ConfigError(f"env.options.{key} is {count!r}; expected a whole number, at least 1")
    return count


def _paths(options: Mapping[str, Any], key: str) -> Sequence[str]:
    paths = options.get(key) or []
    if not isinstance(paths, list) or not all(isinstance(path, str) for path in paths):
        raise ConfigError(f"env.options.{key} is {paths!r}; expected a list of paths such as camera.rgb")
    return paths


def last_frames(shown: Sequence[Shown]) -> Shown:
    """Returns the observation after several steps: the images of all, and the text of the last."""
    return Shown(shown[-1].text, tuple(image for one in shown for image in one.images))


def _function(options: Mapping[str, Any], key: str) -> Callable[[Any], Any] | None:
    return None if options.get(key) is None else locate(options[key], f"env.options.{key}")


def refuse_batches(*environments: Any) -> None:
    """Raises ConfigError if an environment for one episode steps a batch of them, as ManiSkill's do."""
    if any(getattr(getattr(one, "unwrapped", None), "num_envs", None) is not None for one in environments):
        raise ConfigError(
            "env.options.vectorization: this environment steps a batch of episodes by itself; set "
            f"env.options.vectorization to {ENTRY_POINT}, and env.batch_size to the number of episodes"
        )


def seed_of(row: Row, seed: int) -> int:
    """Returns the row's seed, or else `seed`."""
    return int(row.get("seed", seed))


class GymnasiumEpisode:
    """One episode. The row's column `reset_options` is passed to the reset."""

    def __init__(self, build: Build, options: TurnOptions) -> None:
        self.options = options
        self.environment = build(**options.arguments)
        refuse_batches(self.environment)
        options.require_drawing(self.environment)
        options.require_entries(self._space)
        if "render_mode" not in options.arguments and options.render is None and self._draws_text:
            self.environment.close()
            self.environment = build(**options.make, render_mode="ansi")
        self.parse = options.parser(self.environment.action_space)

    @property
    def _space(self) -> Any:
        return getattr(self.environment, "observation_space", None)

    @property
    def _draws_text(self) -> bool:
        return "ansi" in self.environment.metadata.get("render_modes", ()) and not is_of_pixels(self._space)

    def reset(self, row: Row, seed: int) -> Opening:
        observation, _ = self.environment.reset(seed=seed_of(row, seed), options=row.get("reset_options"))
        return self.options.first(row, self._shown(observation), self.environment.action_space)

    def step(self, action: Action) -> StepResult:
        chosen = self.parse(action.text)
        if chosen is None:
            expected = self.options.help(self.environment.action_space)
            return StepResult(expected, done=not self.options.asks, info={"invalid_actions": 1})
        total, seen, info = 0.0, list[Shown](), dict[str, Any]()
        for number, one in enumerate(chosen, start=1):
            observation, reward, terminated, truncated, info = self.environment.step(one)
            total += float(reward)
            if terminated or truncated:
                return StepResult(reward=total, done=True, info=_numbers_of(info))
            if number > len(chosen) - self.options.frames:
                seen.append(self._shown(observation))
        return StepResult(last_frames(seen).as_observation(), total, False, _numbers_of(info))

    def _shown(self, observation: Any) -> Shown:
        if getattr(self.environment, "render_mode", None) == "ansi" and self.options.render is None:
            return Shown(without_colours(self.environment.render()))
        needed = self.options.needed(observation)
        return self.options.shown(needed, self._space, lambda: self.environment.render())

    def close(self) -> None:
        self.environment.close()


class VectorGymnasium:
    """A batch in a vector environment of at least its size. Finished episodes and those that no row needs are stepped
    with any action, as Gymnasium requires, and their results are ignored.

    With `seeds_each` one reset takes all seeds. ManiSkill's episodes are reset one after the other, because a reset of
    several draws all of their beginnings from one seed. For other environments the first seed is used for all.
    """

    def __init__(
        self, make: Callable[[int], Any], options: TurnOptions, *, seeds_each: bool, num_envs: int = 1
    ) -> None:
        self.make = make
        self.options = options
        self.seeds_each = seeds_each
        self.environment: Any
        self.live: set[int] = set()
        """Episodes that have begun and not ended."""
        self._build(num_envs)
        refuse_batches(*getattr(self.environment, "envs", ()))
        options.require_drawing(self.environment)
        options.require_entries(getattr(self.environment, "single_observation_space", None))
        self.parse = options.parser(self.environment.single_action_space)

    def reset(self, rows: Sequence[Row], seeds: Sequence[int]) -> Sequence[Opening]:
        if self.num_envs < len(rows):
            self.environment.close()
            self._build(len(rows))
        own_seeds = [seed_of(row, seed) for row, seed in zip(rows, seeds, strict=True)]
        observations = self._reset(own_seeds)
        self.live = {*range(len(rows))}
        space = self.environment.single_action_space
        shown = self._shown(observations, range(len(rows)))
        return [self.options.first(row, shown[index], space) for index, row in enumerate(rows)]

    def step(self, actions: Sequence[Action | None]) -> Sequence[StepResult | None]:
        chosen = {index: self.parse(action.text) for index, action in enumerate(actions) if action is not None}
        playing = {index: taken for index, taken in chosen.items() if taken and len(taken) == self.options.action_chunk}
        results = {index: StepResult(done=True, info={"invalid_actions": 1}) for index in chosen.keys() - playing}
        totals = dict.fromkeys(playing, 0.0)
        seen: dict[int, list[Shown]] = {index: [] for index in playing}
        infos: dict[int, Mapping[str, Any]] = {}
        for number in range(self.options.action_chunk):
            if not playing:
                break
            stepped = self._stacked({index: taken[number] for index, taken in playing.items()})
            observations, *ends, info = self.environment.step(stepped)
            rewards, terminated, truncated = on_host(tuple(ends))
            infos = _infos_of_each(info, self.num_envs, playing)
            for index in [*playing]:
                totals[index] += float(rewards[index])
                if terminated[index] or truncated[index]:
                    results[index] = StepResult(reward=totals[index], done=True, info=infos[index])
                    del playing[index]
            if playing and number >= self.options.action_chunk - self.options.frames:
                for index, shown in self._shown(observations, playing).items():
                    seen[index].append(shown)
        for index in playing:
            after = last_frames(seen[index]).as_observation()
            results[index] = StepResult(after, totals[index], False, infos[index])
        self.live = {*playing}
        return [results.get(index) for index in range(len(actions))]

    def offload(self) -> None:
        """Closes the environment and frees its memory, unless an episode goes on."""
        if self.live or self.environment is None:
            return
        self.environment.close()
        self.environment = None
        gc.collect()
        torch = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_initialized():
            torch.cuda.empty_cache()

    def onload(self) -> None:
        """Builds the environment again, if it was offloaded."""
        if self.environment is None:
            self._build(self.num_envs)

    def close(self) -> None:
        if self.environment is not None:
            self.environment.close()

    def _build(self, num_envs: int) -> None:
        self.environment, self.num_envs = self.make(num_envs), num_envs
        if self._resets_apart:
            self.environment.auto_reset = False  # a batch is reset as a whole, and a reset draws every episode again

    @property
    def _resets_apart(self) -> bool:
        """Whether the vector environment is ManiSkill's: it resets the episodes of reset's option `env_idx`."""
        return hasattr(self.environment, "auto_reset") and hasattr(self.environment, "base_env")

    def _reset(self, seeds: Sequence[int]) -> Any:
        """Begins an episode for each seed. Returns the observations of all, in which the first are theirs."""
        if not self._resets_apart:
            every = [*seeds, *[seeds[-1]] * (self.num_envs - len(seeds))]
            observations, _ = self.environment.reset(seed=every if self.seeds_each else seeds[0])
            return observations
        import torch

        observations = None
        for index, seed in enumerate(seeds):
            selected = torch.tensor([index], device=self.environment.device)
            observations, _ = self.environment.reset(seed=[seed] * self.num_envs, options={"env_idx": selected})
        return observations

    def _stacked(self, stepped: Mapping[int, Any]) -> Any:
        """Returns an action for each episode: any action for those that do not step."""
        import numpy as np

        space = self.environment.single_action_space
        any_action = space.sample() if not hasattr(space, "n") else int(getattr(space, "start", 0))
        return np.stack([stepped.get(index, any_action) for index in range(self.num_envs)])

    def _shown(self, observations: Any, indices: Iterable[int]) -> dict[int, Shown]:
        """Returns the observations of some episodes. All are drawn at once, if they are drawn."""
        drawings = self._drawings() if self.options.draws else ()
        space = getattr(self.environment, "single_observation_space", None)
        needed = on_host(self.options.needed(observations, batch_axes=1))
        spaces = SimpleNamespace(spaces=dict(entries_of(space))) if self.options.entries else space
        found = {}
        for index in indices:
            drawing = partial(getitem, drawings, index)
            found[index] = self.options.shown(_of_one(needed, spaces, index), space, drawing)
        return found

    def _drawings(self) -> Any:
        """Returns the drawings of all episodes, in order."""
        drawings = on_host(self.environment.render())
        if drawings is None or len(drawings) != self.num_envs:
            raise BadAnswer(
                f"render() of the vector environment returned {type(drawings).__name__}; expected a drawing for each "
                f"of its {self.num_envs} episodes, as env.options.render is {DRAWING}"
            )
        return drawings


def _infos_of_each(infos: Mapping[str, Any], num_envs: int, indices: Iterable[int]) -> dict[int, Mapping[str, Any]]:
    """Returns the numbers in `infos` for some episodes of a vector environment.

    A mask with a leading underscore tells which episodes have a number. If a step has reset an episode, those of its
    end are in "final_info".
    """
    now, last = _per_episode(infos, num_envs), infos.get("final_info")
    at_end = _per_episode(last, num_envs) if isinstance(last, Mapping) else {}
    has_ended = now.get("_final_info")
    each: dict[int, Mapping[str, Any]] = {}
    for index in indices:
        is_over = has_ended is not None and has_ended[index]
        each[index] = {"invalid_actions": 0, **_numbers_at(at_end if is_over else now, index)}
    return each


def _numbers_at(told: Mapping[str, Any], index: int) -> dict[str, float]:
    numbers = {}
    for name, values in told.items():
        mask = told.get(f"_{name}")
        if not name.startswith("_") and values.dtype.kind in "biuf" and (mask is None or mask[index]):
            numbers[name] = float(values[index])
    return numbers


def _per_episode(infos: Mapping[str, Any], num_envs: int) -> dict[str, Any]:
    """Returns the arrays of infos with one value for each episode, on the host."""
    return {name: on_host(value) for name, value in infos.items() if getattr(value, "shape", None) == (num_envs,)}


def _of_one(observations: Any, space: Any, index: int) -> Any:
    """Returns the observation of one episode. `space` is that of a single observation."""
    within = getattr(space, "spaces", None)
    if observations is None:
        return None
    if isinstance(observations, Mapping):
        return {name: _of_one(value, (within or {}).get(name), index) for name, value in observations.items()}
    if isinstance(observations, tuple) and within is not None:
        return tuple(_of_one(value, of_value, index) for value, of_value in zip(observations, within, strict=True))
    return observations[index]


def _numbers_of(info: Mapping[str, Any]) -> Mapping[str, Any]:
    return {"invalid_actions": 0, **{name: value for name, value in info.items() if isinstance(value, int | float)}}
