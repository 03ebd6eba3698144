"""What a config may ask for of reward functions; whether they can be called is found out where they are imported."""

import re
from collections import Counter
from collections.abc import Iterator
from urllib.parse import urlsplit

from rltrain.config.schema import Config, PromptFile
from rltrain.tasks.metrics import OF_ALL_REWARDS

NEEDS_LABEL = ("exact_match", "math", "code")


def reward_problems(config: Config) -> Iterator[str]:
    reward = config.reward
    if reward.functions:
        for key in ("function", "options"):
            if key in reward.model_fields_set:
                yield (
                    f"reward.{key}: got {getattr(reward, key)!r} beside reward.functions; expected one of the two: "
                    "each entry of reward.functions has a function and options of its own"
                )
        yield from _name_problems(config)
        if not any(part.weight for part in reward.functions):
            yield "reward.functions: every weight is 0; expected one that is not, or every reward is 0"
    for name in reward.names:
        if name.startswith(("http://", "https://")) and not urlsplit(name).hostname:
            yield f"reward.function: got {name!r}; expected an URL with a host, such as http://judge:8000/score"
    yield from _label_problems(config)


def _name_problems(config: Config) -> Iterator[str]:
    titles = [part.title for part in config.reward.functions]
    for number, title in enumerate(titles):
        key = f"reward.functions.{number}.name"
        taken = title in OF_ALL_REWARDS or title.endswith(("_errors", "_timeouts"))
        if taken or not re.fullmatch(r"[A-Za-z0-9_]+", title):
            yield (
                f"{key}: got {title!r}; expected letters, digits and underscores, none of {', '.join(OF_ALL_REWARDS)} "
                "and nothing that ends in _errors or _timeouts: the metric is rollout/reward_<name>"
            )
    for title, count in Counter(titles).items():
        if count > 1:
            yield (
                f"reward.functions: {count} are called {title!r}; expected a name for each that tells their metrics "
                "apart (reward.functions.<number>.name)"
            )


def _label_problems(config: Config) -> Iterator[str]:
    needing = [name for name in config.reward.names if name in NEEDS_LABEL]
    files: dict[str, PromptFile | None] = {"data.train": config.data.train, "data.eval": config.data.eval}
    for key, file in files.items():
        without = [source for source in file.parts() if source.label_key is None] if file is not None else []
        if without and needing and config.algorithm != "sft":
            yield f"{key}.label_key: got null, but the reward {needing[0]} compares with labels; expected their column"
