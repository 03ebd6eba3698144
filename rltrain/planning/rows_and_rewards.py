"""Checks rows, reward functions and programs for a dry run, without running them."""

import ast
import shlex
from collections.abc import Iterator, Sequence
from math import prod
from pathlib import Path
from statistics import fmean

from rltrain.algorithms.registry import algorithm_of
from rltrain.config.schema import Config, PromptFile, PromptSource
from rltrain.data.columns import teachers_of_rows
from rltrain.data.prompt_rows import Needs, RowParser, encoded, responses_of
from rltrain.data.prompts import (
    PromptDataset,
    PromptRow,
    SourceRows,
    difficulty_key,
    keyed_sources,
    load_source,
    repeated_within_a_step,
    same_tokens,
    shown_prompt,
)
from rltrain.data.row_index import Chained
from rltrain.data.rows import Location
from rltrain.data.tokenizer import UNKNOWN_MODEL, ModelLimits, PromptEncoder, load_encoder
from rltrain.errors import CheckpointError, ConfigError, DataError
from rltrain.models.vision import Grid
from rltrain.planning.planned import RowImages
from rltrain.planning.sizes import size, wrapped
from rltrain.rewards.functions import BUILT_IN, labels_of
from rltrain.rewards.judge import is_url
from rltrain.rewards.locating import found_command, unknown_function

# The numbers of used and skipped rows of each source, with reasons.

MOST_BYTES = 2 * 2**30
"""Most bytes of a source's files that are read. A dry run must take only seconds."""

MEASURED = 64
"""Number of rows whose images are measured."""


def describe_rows(config: Config, model: ModelLimits = UNKNOWN_MODEL) -> tuple[list[str], RowImages | None]:
    """Returns a line for each source, and the images of rows for training with model.vision if such rows were read.
    `model` is the one of load_prompts.

    Raises the DataError that the job would raise: for a bad row without data.on_bad_row: skip, for a source without
    usable rows, and for a row with an unknown teacher.
    """
    named = [
        (key, source, needs, difficulty_key(config.data, file))
        for file_key, file, needs in files_read(config)
        for key, source in keyed_sources(file, file_key)
    ]
    files = {key: _files(source, key) for key, source, *_ in named}
    lines: list[str] = []
    trained_on: list[tuple[Sequence[PromptRow], SourceRows]] = []
    evaluated: list[Sequence[PromptRow]] = []
    encoder = None
    for key, source, needs, difficulty in named:
        found = files[key]
        title = f"{key} ({source.title})"
        if isinstance(found, str):
            lines.append(f"{title}: rows unknown: {found}")
            continue
        if encoder is None:
            encoder = _encoder(config)
        if isinstance(encoder, str):
            lines.append(f"{title}: rows unknown: {encoder}")
        else:
            is_trained_on = key.startswith("data.train")
            first = sum(len(part) for part, _ in trained_on) if is_trained_on else 0
            parser = RowParser(source, encoder, needs, difficulty, model)
            parsed, rows = load_source(parser, config.data, key, first=first)
            lines += _counted(title, rows, source)
            if is_trained_on and not trained_on:
                lines.append(f"  {shown_prompt(parsed[0], encoder)}")
            if (same := same_tokens(parsed, encoder)) is not None:
                lines.append(f"  {same}")
            trained_on += [(parsed, rows)] if is_trained_on else []
            evaluated += [] if is_trained_on else [parsed]
    _refuse_unknown_teachers(config, trained_on, encoder)
    num_trained_on = sum(rows.num_rows for _, rows in trained_on)
    if num_trained_on and algorithm_of(config).generates:
        repeated = repeated_within_a_step(num_trained_on, config.batch.prompts_per_step)
        lines += [repeated] if repeated else []
    images = None
    if num_trained_on and isinstance(encoder, PromptEncoder) and encoder.images is not None:
        images = measured_images([rows for rows, _ in trained_on], evaluated, encoder)
        lines += _told_of_images(config, images)
    return [part for line in lines for part in wrapped(line)], images


def measured_images(
    trained_on: Sequence[Sequence[PromptRow]], evaluated: Sequence[Sequence[PromptRow]], encoder: PromptEncoder
) -> RowImages:
    """Returns the images of MEASURED rows, evenly over all rows of `trained_on`. `encoder` is the one of a run that
    sees."""
    assert encoder.images is not None
    merge = encoder.images.merge
    rows = _evenly(Chained(trained_on))
    of_rows = [_grids(row, encoder) for row in rows]
    tokens = [sum(prod(grid) for grid in grids) // merge**2 for grids in of_rows]
    of_evaluations = [grid for part in evaluated for row in _evenly(part) for grid in _grids(row, encoder)]
    grids = tuple(grid for of_row in of_rows for grid in of_row)
    return RowImages(
        num_rows=len(rows),
        prompt_tokens=fmean(len(encoder.encode(row.prompt, row.tools).ids) for row in rows),
        tokens=fmean(tokens),
        most_tokens=max(tokens),
        grids=grids,
        largest=max(map(prod, (*grids, *of_evaluations)), default=0),
    )


def _evenly(rows: Sequence[PromptRow]) -> list[PromptRow]:
    count = min(len(rows), MEASURED)
    return [rows[number * len(rows) // count] for number in range(count)]


def _grids(row: PromptRow, encoder: PromptEncoder) -> list[Grid]:
    """Returns the different images of a row's prompt and of its responses to train on."""
    images = [*encoder.encode(row.prompt, row.tools).images]
    for response in responses_of(row):
        if not isinstance(response, str):
            images += encoded(row, response, encoder)[2]
    return [*{image.key: image.grid for image in images}.values()]


def _told_of_images(config: Config, images: RowImages) -> Iterator[str]:
    used = "images of observations are assumed" if "env" in config.placed_roles else "estimates use them"
    yield (
        f"data.train: a prompt has {len(images.grids) / images.num_rows:.3g} images with {images.tokens:.4g} of its "
        f"{images.prompt_tokens:.4g} tokens, on average over {images.num_rows} rows, and at most "
        f"{images.most_tokens:,}; {used}"
    )
    settings = config.model.vision
    if settings is not None and images.largest > settings.max_patches:
        yield (
            f"an image has {images.largest:,} patches, more than model.vision.max_patches {settings.max_patches:,}: it "
            "is encoded alone, and the estimated bytes include this"
        )


def _refuse_unknown_teachers(
    config: Config, trained_on: Sequence[tuple[Sequence[PromptRow], SourceRows]], encoder: PromptEncoder | str | None
) -> None:
    """Raises DataError like role teacher. Sources that were not read are skipped."""
    train, names = config.data.train, [*config.teacher.checkpoints]
    if "teacher" not in config.placed_roles or len(names) < 2:
        return
    if isinstance(encoder, PromptEncoder) and len(trained_on) == len(train.parts()):
        parts, sources = zip(*trained_on, strict=True)
        dataset = PromptDataset(parts, encoder, config.data.max_prompt_tokens, sources)
        teachers_of_rows(dataset, train, config.teacher.column, names)


def files_read(config: Config) -> Iterator[tuple[str, PromptFile, Needs]]:
    """Yields the files of rows, each with its config key and the required content of its rows."""
    algorithm = algorithm_of(config)
    if algorithm.from_pairs:
        yield "data.train", config.data.train, "pair"
    elif algorithm.generates:
        yield "data.train", config.data.train, labels_of(config.reward)
    elif algorithm.trains:
        yield "data.train", config.data.train, "response"
    for plan in config.evaluations:
        held_out: Needs = "pair" if algorithm.from_pairs else "response"
        needed = held_out if config.scores_held_out else labels_of(plan.reward or config.reward)
        yield plan.config_key, plan.file, needed


def _files(source: PromptSource, key: str) -> list[Path] | str:
    """Returns the files of a source, or the reason why its rows are not read."""
    paths = (source.path,) if isinstance(source.path, str) else source.path
    try:
        locations = [Location.of(path, key) for path in paths]
        found = [file for one in locations for file in one.files(key, source.subset, source.split)]
    except DataError as error:
        return str(error).removeprefix(f"{key}: ")
    num_bytes = sum(file.stat().st_size for file in found)
    if num_bytes > MOST_BYTES:
        return f"{size(num_bytes)} in {len(found)} files; a dry run reads at most {size(MOST_BYTES)}"
    return found


def _encoder(config: Config) -> PromptEncoder | str:
    """Returns the encoder that measures prompts, or the reason why there is none."""
    try:
        return load_encoder(config)
    except CheckpointError as error:
        return str(error)


def _counted(title: str, found: SourceRows, source: PromptSource) -> list[str]:
    rows, dropped = f"{title}: {found.num_rows:,} rows", found.dropped
    if found.num_rows == source.max_rows:
        rows += ", limited by max_rows"
    if not dropped:
        return [f"{rows}; none left out"]
    if dropped.num_cut and dropped.num_left_out == 0:
        return [f"{rows}; none left out; {dropped.cut}"]
    return [f"{rows}; left out: {dropped.counts}", *(f"  {problem}" for problem in dropped.problems)]


# The functions and programs of a config, located without running them.


def refuse_missing_functions(config: Config) -> None:
    """Raises ConfigError if the file or function of a placed reward or environment is missing."""
    if "reward" in config.placed_roles:
        describe_reward(config)
    if "env" in config.placed_roles:
        describe_environment(config)


def describe_reward(config: Config) -> list[str]:
    """Returns a line for each function. Raises ConfigError if its file or the function in it is missing."""
    rewards = {"reward": config.reward}
    rewards |= {
        f"evaluation.sets.{number}.reward": own.reward
        for number, own in enumerate(config.evaluation.sets)
        if own.reward
    }
    lines = []
    for section, reward in rewards.items():
        for number, part in enumerate(reward.parts):
            key = f"{section}.function" if reward.functions is None else f"{section}.functions.{number}.function"
            lines.append(f"{key}: {part.function}{_where(part.function, key)}")
    return [part for line in lines for part in wrapped(line)]


def describe_environment(config: Config) -> list[str]:
    """Returns the environment or agent in words. Raises ConfigError if its file or the function in it is missing."""
    env, agent = config.env, config.env.agent
    if agent is not None and agent.command:
        return [f"env.agent.command: {shlex.join(found_command(agent.command, 'env.agent.command'))}"]
    key, name = ("env.function", env.function) if agent is None else ("env.agent.function", agent.function)
    if name is None:
        return []
    place, _, function = name.rpartition(":")
    return [f"{key}: {name}{_in_file(place, function, name, key) if place.endswith('.py') else ''}"]


def _where(name: str, config_key: str) -> str:
    if name in BUILT_IN:
        return ", built in"
    if is_url(name):
        return ", asked over HTTP"
    place, _, function = name.rpartition(":")
    if name.endswith(".py"):
        raise ConfigError(f"{config_key}: {name!r} names a file without a function; expected {name}:FUNCTION")
    if not place.endswith(".py"):
        if not place and "." not in name:
            raise unknown_function(name, config_key, [*BUILT_IN, "an URL"])
        return ", imported when the job starts"
    return _in_file(place, function, name, config_key)


def _in_file(place: str, function: str, name: str, config_key: str) -> str:
    path = Path(place).expanduser()
    if not path.is_file():
        raise ConfigError(f"{config_key}: {name!r}: there is no file {place!r} (relative paths start at {Path.cwd()})")
    try:
        tree = ast.parse(path.read_text())
    except (SyntaxError, UnicodeDecodeError) as error:
        raise ConfigError(f"{config_key}: {name!r}: {path} is not valid Python: {error}") from error
    lines = dict(_bound(tree))
    if function not in lines and "*" not in lines:
        raise ConfigError(f"{config_key}: {name!r}: {path} has no function {function!r}")
    return f", line {lines[function]}" if function in lines else ""


def _bound(scope: ast.AST) -> Iterator[tuple[str, int]]:
    """Yields the names that a module binds, with their lines. `*` means all names of another module."""
    for node in ast.iter_child_nodes(scope):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name, node.lineno
            continue
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield from ((alias.asname or alias.name.partition(".")[0], node.lineno) for alias in node.names)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id, node.lineno
        yield from _bound(node)
