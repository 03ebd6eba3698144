"""What a config may ask for of reward functions; whether they can be called is found out where they are imported."""

import re
from collections import Counter
from collections.abc import Iterator
from urllib.parse import urlsplit

from rltrain.algorithms.registry import algorithm_of
from rltrain.config.schema import Config, Reward
from rltrain.tasks.metrics import OF_ALL_REWARDS

NEEDS_LABEL = ("exact_match", "math", "code")


def reward_problems(config: Config) -> Iterator[str]:
    sections = {"reward": config.reward}
    for number, one in enumerate(config.evaluation.sets):
        if one.reward is not None:
            sections[f"evaluation.sets.{number}.reward"] = one.reward
    for section, reward in sections.items():
        yield from _section_problems(section, reward)
    yield from _label_problems(config)


def _section_problems(section: str, reward: Reward) -> Iterator[str]:
    if reward.functions:
        for key in ("function", "options"):
            if key in reward.model_fields_set:
                yield (
                    f"{section}.{key}: got {getattr(reward, key)!r} beside {section}.functions; expected one of the "
                    f"two: each entry of {section}.functions has a function and options of its own"
                )
        yield from _name_problems(section, reward)
        if not any(part.weight for part in reward.functions):
            yield f"{section}.functions: every weight is 0; expected one that is not, or every reward is 0"
    for name in reward.names:
        if name.startswith(("http://", "https://")) and not urlsplit(name).hostname:
            yield f"{section}.function: got {name!r}; expected an URL with a host, such as http://judge:8000/score"


def _name_problems(section: str, reward: Reward) -> Iterator[str]:
    titles = [part.title for part in reward.functions]
    for number, title in enumerate(titles):
        key = f"{section}.functions.{number}.name"
        taken = title in OF_ALL_REWARDS or title.endswith(("_errors", "_timeouts"))
        if taken or not re.fullmatch(r"[A-Za-z0-9_]+", title):
            yield (
                f"{key}: got {title!r}; expected letters, digits and underscores, none of {', '.join(OF_ALL_REWARDS)} "
                "and nothing that ends in _errors or _timeouts: the metric is rollout/reward_<name>"
            )
    for title, count in Counter(titles).items():
        if count > 1:
            yield (
                f"{section}.functions: {count} are called {title!r}; expected a name for each that tells their metrics "
                f"apart ({section}.functions.<number>.name)"
            )


def _label_problems(config: Config) -> Iterator[str]:
    """Files without labels, of which a function takes one."""
    scores_training = algorithm_of(config).generates
    files = [("data.train", config.data.train, config.reward)] if scores_training else []
    files += [(plan.config_key, plan.file, plan.reward or config.reward) for plan in config.evaluations]
    for key, file, reward in files:
        needing = [name for name in reward.names if name in NEEDS_LABEL]
        if needing and any(source.label_key is None for source in file.parts()):
            yield f"{key}.label_key: got null, but the reward {needing[0]} compares with labels; expected their column"
