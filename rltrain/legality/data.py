"""What the config says of files of rows."""

import re
from collections import Counter
from collections.abc import Iterator

from rltrain.algorithms.registry import algorithm_of
from rltrain.config.schema import Config, PromptFile


def data_problems(config: Config) -> Iterator[str]:
    data = config.data
    evaluated = [(plan.config_key, plan.file) for plan in config.evaluations]
    for key, file in (("data.train", data.train), *evaluated):
        yield from file_problems(key, file)
        yield from _title_problems(key, file)
    for key, file in evaluated:
        if any(source.weight is not None for source in file.sources):
            yield f"{key}.sources: got weights; expected none: an evaluation draws every row"
    weighted = [source.weight is not None for source in data.train.sources]
    if any(weighted) and not all(weighted):
        yield (
            f"data.train.sources.{weighted.index(False)}.weight: got none beside sources that have one; expected a "
            "weight for every source, or none at all: the rows are one set then"
        )
    if data.min_prompt_tokens > data.max_prompt_tokens:
        yield (
            f"data.min_prompt_tokens: got {data.min_prompt_tokens}; expected at most data.max_prompt_tokens "
            f"{data.max_prompt_tokens}"
        )
    if not algorithm_of(config).reads_responses:
        for name in sorted({"max_response_tokens", "on_long_row"} & data.model_fields_set):
            yield (
                f"data.{name}: got {getattr(data, name)} with algorithm {config.algorithm}, whose rows have no "
                "responses; remove the key: rollout.sampling.max_response_tokens limits what is drawn"
            )
    yield from _solved_rate_problems(config)
    if "env" in config.placed_roles:
        yield from _environment_problems(data.train)


def _solved_rate_problems(config: Config) -> Iterator[str]:
    settings, num_samples = config.data.solved_rate, config.batch.samples_per_prompt
    if settings is None:
        return
    if not algorithm_of(config).generates:
        yield (
            f"data.solved_rate: got it with algorithm {config.algorithm}, which draws no samples that could solve a "
            "prompt; expected null"
        )
        return
    if config.data.curriculum is not None:
        yield (
            "data.solved_rate: got it beside data.curriculum, by which steps take prompts that a column tells; "
            "expected one of the two, and null for the other"
        )
    if settings.low > settings.high:
        yield f"data.solved_rate.low: got {settings.low}; expected at most data.solved_rate.high {settings.high}"
    elif not any(settings.low <= solved / num_samples <= settings.high for solved in range(num_samples + 1)):
        yield (
            f"data.solved_rate: got low {settings.low} and high {settings.high} with batch.samples_per_prompt "
            f"{num_samples}, of which no number that solve a prompt is a share between the two; expected a wider "
            "window, or more samples per prompt"
        )


def file_problems(key: str, file: PromptFile) -> Iterator[str]:
    """Of a PromptFile that stands at `key`."""
    if bool(file.path) == bool(file.sources):
        given = "both path and sources are" if file.path else "neither path nor sources is"
        yield f"{key}: {given} given; expected one: {key}.path, a file, or {key}.sources, a list of {{path, weight}}"
    for number, source in enumerate(file.sources):
        if not source.path:
            yield f"{key}.sources.{number}.path: got an empty list; expected a file or several"


def _title_problems(key: str, file: PromptFile) -> Iterator[str]:
    titles = [source.title for source in file.sources]
    for number, title in enumerate(titles):
        if not re.fullmatch(r"[A-Za-z0-9_.-]+", title):
            yield (
                f"{key}.sources.{number}.name: got {title!r}; expected letters, digits, underscores, points and "
                "hyphens: the metric is rollout/reward_mean/<name>"
            )
    for title, count in Counter(titles).items():
        if count > 1:
            yield (
                f"{key}.sources: {count} are called {title!r}; expected a name for each that tells their metrics apart "
                f"({key}.sources.<number>.name)"
            )


def _environment_problems(train: PromptFile) -> Iterator[str]:
    """Environments find the prompt and the label in the rows by one name each, and have tools of their own."""
    for name in ("prompt_key", "label_key"):
        keys = {getattr(source, name) for source in train.parts()}
        if len(keys) > 1:
            yield (
                f"data.train.sources: got {len(keys)} values of {name} with an environment; expected one, by which it "
                "finds the column in every row"
            )
    for number, source in enumerate(train.parts()):
        key = f"data.train.sources.{number}" if train.sources else "data.train"
        if source.system_key is not None:
            yield (
                f"{key}.system_key: got {source.system_key!r} with an environment; expected null: environments are "
                "given the row, and say what the model is shown first"
            )
        if source.tools_key is not None:
            yield (
                f"{key}.tools_key: got {source.tools_key!r} with an environment; expected null: environments say which "
                "tools there are"
            )
