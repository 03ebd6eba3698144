"""What a config may ask for of reward functions; whether they can be called is found out where they are imported."""

import re
from collections import Counter
from collections.abc import Iterator
from urllib.parse import urlsplit

from rltrain.algorithms.registry import algorithm_of
from rltrain.config.schema import Config, Reward
from rltrain.errors import listed
from rltrain.tasks.metrics import OF_ALL_REWARDS
from rltrain.tasks.roles import rewarding_roles

NEEDS_LABEL = ("exact_match", "math", "code")


def reward_problems(config: Config) -> Iterator[str]:
    yield from _section_problems("reward", config.reward, config, _models(config))
    for number, one in enumerate(config.evaluation.sets):
        if one.reward is not None:
            yield from _section_problems(f"evaluation.sets.{number}.reward", one.reward, config, [])
    yield from _model_problems(config)
    yield from _label_problems(config)


def _section_problems(section: str, reward: Reward, config: Config, models: list[str]) -> Iterator[str]:
    """`models` are roles that are part of this reward."""
    if reward.functions:
        for key in ("function", "options"):
            if key in reward.model_fields_set:
                yield (
                    f"{section}.{key}: got {getattr(reward, key)!r} beside {section}.functions; expected one of the "
                    f"two: each entry of {section}.functions has a function and options of its own"
                )
    if reward.functions is not None or models:
        yield from _name_problems(section, reward, config, models)
        yield from _weight_problems(section, reward, config, models)
    for name in reward.names:
        if name.startswith(("http://", "https://")) and not urlsplit(name).hostname:
            yield f"{section}.function: got {name!r}; expected an URL with a host, such as http://judge:8000/score"


def _models(config: Config) -> list[str]:
    """Placed roles that tell the reward what responses are worth."""
    return [role for role in rewarding_roles() if role in config.placed_roles]


def _name_problems(section: str, reward: Reward, config: Config, models: list[str]) -> Iterator[str]:
    titles = {f"{section}.functions.{number}.name": part.title for number, part in enumerate(reward.functions or ())}
    if reward.functions is None:
        titles[f"{section}.function"] = reward.parts[0].title
    titles |= {f"{role}.name": getattr(config, role).name for role in models}
    for key, title in titles.items():
        taken = title in OF_ALL_REWARDS or title.endswith(("_errors", "_timeouts"))
        if taken or not re.fullmatch(r"[A-Za-z0-9_]+", title):
            yield (
                f"{key}: got {title!r}; expected letters, digits and underscores, none of {listed(OF_ALL_REWARDS)} "
                "and nothing that ends in _errors or _timeouts: the metric is rollout/reward_<name>"
            )
    for title, count in Counter(titles.values()).items():
        if count > 1:
            keys = [key for key, of_key in titles.items() if of_key == title]
            of_functions = all(key.startswith(f"{section}.functions") for key in keys)
            yield (
                f"{section + '.functions' if of_functions else section}: {count} are called {title!r}; expected a name "
                f"for each that tells their metrics apart ({', '.join(keys)})"
            )


def _weight_problems(section: str, reward: Reward, config: Config, models: list[str]) -> Iterator[str]:
    weights = [part.weight for part in reward.parts] + [getattr(config, role).weight for role in models]
    if not weights:
        placing = " or ".join(rewarding_roles())
        yield (
            f"{section}.functions: got none, and no model tells what responses are worth; expected a function, or a "
            f"role {placing} in placement"
        )
    elif not any(weights):
        yield (
            f"{section if models else section + '.functions'}: every weight is 0; expected one that is not, or every "
            "reward is 0"
        )


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
    """Files without labels, of which a function takes one."""
    scores_training = algorithm_of(config).generates
    files = [("data.train", config.data.train, config.reward)] if scores_training else []
    answered = [] if config.scores_held_out else config.evaluations
    files += [(plan.config_key, plan.file, plan.reward or config.reward) for plan in answered]
    for key, file, reward in files:
        needing = [name for name in reward.names if name in NEEDS_LABEL]
        if needing and any(source.label_key is None for source in file.parts()):
            yield f"{key}.label_key: got null, but the reward {needing[0]} compares with labels; expected their column"
