"""What a config may ask for of reward functions; whether they can be called is found out where they are imported."""

import re
from collections import Counter
from collections.abc import Iterator
from urllib.parse import urlsplit

from rltrain.algorithms.registry import algorithm_of
from rltrain.config.roles import split_roles
from rltrain.config.schema import Config, PromptFile
from rltrain.tasks.metrics import OF_ALL_REWARDS
from rltrain.tasks.roles import rewarding_roles

NEEDS_LABEL = ("exact_match", "math", "code")


def reward_problems(config: Config) -> Iterator[str]:
    reward, models = config.reward, _models(config)
    if reward.functions:
        for key in ("function", "options"):
            if key in reward.model_fields_set:
                yield (
                    f"reward.{key}: got {getattr(reward, key)!r} beside reward.functions; expected one of the two: "
                    "each entry of reward.functions has a function and options of its own"
                )
    if reward.functions is not None or models:
        yield from _name_problems(config, models)
        yield from _weight_problems(config, models)
    yield from _model_problems(config)
    for name in reward.names:
        if name.startswith(("http://", "https://")) and not urlsplit(name).hostname:
            yield f"reward.function: got {name!r}; expected an URL with a host, such as http://judge:8000/score"
    yield from _label_problems(config)


def _models(config: Config) -> list[str]:
    """Placed roles that tell the reward what responses are worth."""
    placed = {role for key in config.placement for role in split_roles(key)}
    return [role for role in rewarding_roles() if role in placed]


def _name_problems(config: Config, models: list[str]) -> Iterator[str]:
    functions = enumerate(config.reward.functions or ())
    titles = {f"reward.functions.{number}.name": part.title for number, part in functions}
    if config.reward.functions is None:
        titles["reward.function"] = config.reward.parts[0].title
    titles |= {f"{role}.name": getattr(config, role).name for role in models}
    for key, title in titles.items():
        taken = title in OF_ALL_REWARDS or title.endswith(("_errors", "_timeouts"))
        if taken or not re.fullmatch(r"[A-Za-z0-9_]+", title):
            yield (
                f"{key}: got {title!r}; expected letters, digits and underscores, none of {', '.join(OF_ALL_REWARDS)} "
                "and nothing that ends in _errors or _timeouts: the metric is rollout/reward_<name>"
            )
    for title, count in Counter(titles.values()).items():
        if count > 1:
            keys = [key for key, of_key in titles.items() if of_key == title]
            section = "reward.functions" if all(key.startswith("reward.functions") for key in keys) else "reward"
            yield (
                f"{section}: {count} are called {title!r}; expected a name for each that tells their metrics "
                f"apart ({', '.join(keys)})"
            )


def _weight_problems(config: Config, models: list[str]) -> Iterator[str]:
    weights = [part.weight for part in config.reward.parts] + [getattr(config, role).weight for role in models]
    if not weights:
        placing = " or ".join(rewarding_roles())
        yield (
            "reward.functions: got none, and no model tells what responses are worth; expected a function, or a role "
            f"{placing} in placement"
        )
    elif not any(weights):
        section = "reward.functions" if not models else "reward"
        yield f"{section}: every weight is 0; expected one that is not, or every reward is 0"


def _model_problems(config: Config) -> Iterator[str]:
    placed = _models(config)
    for role in rewarding_roles():
        path = getattr(config, role).path
        if role in placed and path is None:
            yield f"{role}.path: got null, and placement has role {role}; expected the folder of its checkpoint"
        if role in placed and role == "judge" and config.judge.prompt is None:
            yield "judge.prompt: got null; expected what the judge is asked, a text with {response}"
        if role not in placed and path is not None:
            yield f"{role}.path: got {path!r}, but no role {role} is placed; expected {role}: ranks in placement"


def _label_problems(config: Config) -> Iterator[str]:
    needing = [name for name in config.reward.names if name in NEEDS_LABEL]
    files: dict[str, PromptFile | None] = {"data.train": config.data.train, "data.eval": config.data.eval}
    for key, file in files.items():
        without = [source for source in file.parts() if source.label_key is None] if file is not None else []
        if without and needing and algorithm_of(config).generates:
            yield f"{key}.label_key: got null, but the reward {needing[0]} compares with labels; expected their column"
