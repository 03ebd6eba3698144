"""The command `rltrain import-config`: imports a config, fits its memory to a GPU, and writes it."""

import argparse
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from rltrain.config.loader import HOLE, Source
from rltrain.config.schema import Config
from rltrain.errors import ConfigError, UserError
from rltrain.import_config.influence import (
    NO_COUNTERPART,
    WRITTEN,
    ask_for_missing,
    open_holes,
    refuse_differences,
)
from rltrain.import_config.sources import FRAMEWORKS, asked_for, framework_of, parse_value, read, translated
from rltrain.import_config.translation import (
    Leftover,
    RowCounts,
    Setting,
    Translation,
    flattened,
    keys_of,
    nested,
)
from rltrain.models.of_roles import role_architectures
from rltrain.planning.hardware import Gpu, gpu_named
from rltrain.planning.memory import largest, rank_memories
from rltrain.planning.planned import plan_job
from rltrain.planning.validation import check_config
from rltrain.planning.validation_models import check_against_architecture
from rltrain.planning.validation_schedule import check_schedule
from rltrain.runtime.placement import placement_of
from rltrain.tasks.roles import model_roles, trained_roles

# Writes an import as a config file. Every value has a comment with its key in the source.

WIDTH = 118
ORDER = {name: number for number, name in enumerate(Config.model_fields)}


def written(out: Translation, source: str) -> str:
    """Returns the text of the config file."""
    sections = nested(out.settings)
    lines = [
        f"# world size: {out.world_size}",
        f"# Imported from {out.framework}: {source}",
        *(f"# {note}" for note in out.notes),
        *(f"# {line}" for line in holes(out)),
    ]
    for name in sorted(sections, key=lambda key: ORDER.get(key, len(ORDER))):
        lines += _lines(name, sections[name], 0)
    lines += _listed("Not translated, without influence on results:", out.leftovers)
    lines += _listed("NOT TRANSLATED, BUT CHANGES RESULTS:", out.differences)
    return "\n".join(lines) + "\n"


def holes(out: Translation) -> list[str]:
    """Returns lines about the parts that are left open, with the source's settings of each. Empty without any."""
    lines = []
    for path, settings in out.holes.items():
        is_open = out.get(path) == HOLE
        lines.append(
            f"HOLE: {path}: write {WRITTEN[path]}. The run is refused until then" if is_open else f"{path} is your own"
        )
        for one in settings:
            reason = "" if one.reason == NO_COUNTERPART else f"   ({one.reason})"
            lines.append(f"  not carried over: {one.key}: {scalar(_short(one.value))}{reason}")
    return lines


def _lines(name: str, value: Any, depth: int) -> list[str]:
    key = "  " * depth + (json.dumps(name) if any(char in name for char in ":{}[]#") else name)
    if isinstance(value, Setting):
        text = f"{key}: {scalar(value.value)}"
        comment = f"# {value.origin}"
        return [f"{text}   {comment}"] if len(text) + len(comment) < WIDTH else ["  " * depth + comment, text]
    return [f"{key}:", *(line for inner, one in value.items() for line in _lines(inner, one, depth + 1))]


def scalar(value: Any) -> str:
    """Returns a value as YAML on one line."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {scalar(one)}" for key, one in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(scalar(one) for one in value) + "]"
    text: str = yaml.safe_dump(value, default_flow_style=True, width=10**6, allow_unicode=True)
    text = text.removesuffix("\n").removesuffix("\n...").strip()
    return json.dumps(value) if isinstance(value, str) and any(char in text for char in ",{}[]#:") else text


def _listed(title: str, found: list[Leftover]) -> list[str]:
    if not found:
        return []
    return ["", f"# {title}", *(f"#   {one.key}: {scalar(_short(one.value))}   ({one.reason})" for one in found)]


def _short(value: Any) -> Any:
    text = str(value)
    return value if len(text) <= 80 else text[:80] + "..."


# Settings of memory for an import too large for a GPU. They do not change any result.

LEAST_TOKENS = 2048
"""Fewest tokens of a micro-batch. Products still run at full speed."""
BY_MICRO_BATCH = ("clip_cov", "kl_cov")
"""Policy losses over a whole micro-batch."""
MOST_CHANGES = 12
TENSOR_PARALLEL = (2, 4, 8)
"""Sizes to try if Megatron replaces a backend with its optimizer on the device."""

USUAL = "h100"
"""The default GPU. Most launch scripts that name no GPU are written for 80 GB."""
KEEP = "none"
"""The name for leaving memory as in the source."""

Changed = Mapping[str, Any]
"""Values of config keys."""


def fit_memory(out: Translation, name: str | None) -> None:
    """Sets memory settings for the GPU called `name`. None selects the usual GPU, if the model's config.json exists.

    Raises ConfigError if a GPU is named without a config.json for the model's shape.
    """
    path = out.get("model.path")
    if name == KEEP:
        return
    if Path(str(path), "config.json").is_file():
        _fit(out, name or USUAL)
    elif name is None:
        out.notes.append(f"memory settings are those of the source, as there is no {path}/config.json (--gpu)")
    else:
        raise ConfigError(
            f"--gpu: there is no {path}/config.json with the model's shape; expected the folder of a checkpoint, for "
            "example by --set model.path=FOLDER"
        )


def _fit(out: Translation, name: str) -> None:
    """Makes the changes with the lowest cost in speed until the estimate fits or no change helps. The dry run then
    reports the missing memory."""
    gpu = gpu_named(name)
    held = peak_bytes(out, {}, gpu)
    for _ in range(MOST_CHANGES):
        if held is None or held <= gpu.usable_bytes:
            return
        tried = [(peak_bytes(out, changed, gpu), changed) for changed in _changes(out, gpu)]
        helping = [(peak, changed) for peak, changed in tried if peak is not None and peak < held]
        if not helping:
            return
        enough = [one for one in helping if one[0] <= gpu.usable_bytes]
        held, chosen = enough[0] if enough else min(helping, key=lambda one: one[0])
        for path, value in chosen.items():
            given = out.settings[path].origin if path in out.settings else None
            out.set(path, value, f"--gpu {name}: memory only" + (f", instead of {given}" if given else ""))


def peak_bytes(out: Translation, changed: Changed, gpu: Gpu) -> int | None:
    """Returns the bytes on the fullest rank, or None if the config is refused for another reason."""
    settings = {**out.settings, **{path: Setting(value, "") for path, value in changed.items()}}
    try:
        config = Config.model_validate(replace(out, settings=settings).data)
        check_config(config)
        placement = placement_of(config, out.world_size, min(out.ranks_per_node, out.world_size))
        architectures = role_architectures(config, placement.roles)
        job = plan_job(config, placement, architectures, min(out.ranks_per_node, out.world_size))
        check_schedule(config, placement, job.grids)
        check_against_architecture(config, job.grids, architectures)
        return largest(rank_memories(job, gpu)).peak.total
    except (UserError, ValidationError, ValueError):
        return None


def _changes(out: Translation, gpu: Gpu) -> Iterator[Changed]:
    """Yields possible changes, from the lowest to the highest cost in speed."""
    sharded, placed = out.get("actor.backend") == "fsdp", out.placed.keys()
    yield from _smaller_engines(out, gpu)
    if out.get("loss.policy") not in BY_MICRO_BATCH:
        for role in sorted(placed & {*model_roles()}):
            path = f"{role}.micro_batch_tokens"
            if out.get(path) >= 2 * LEAST_TOKENS:
                yield {path: out.get(path) // 2}
    if out.get("model.recompute") != "full":
        yield {"model.recompute": "full"}
    for role in sorted(placed & {*trained_roles()}):
        yield {f"{role}.optimizer.cpu_offload": True}
    yield {"model.activation_offload": True}
    tp = out.get("rollout.parallel.tp")
    yield {"rollout.parallel.tp": 2 * tp}
    if sharded and not any(path.startswith("actor.fsdp.") for path in out.settings):
        for size in dict.fromkeys((tp, *TENSOR_PARALLEL)):
            cut = {"actor.parallel.tp": size, "actor.parallel.sequence_parallel": size > 1}
            yield {"actor.backend": "megatron", **cut, "actor.optimizer.cpu_offload": True}
    if not sharded:
        yield {"actor.parallel.ep": 2 * out.get("actor.parallel.ep")}


def _of(whole: Any, share: int) -> float:
    return round(float(whole) / share, 1)


def _smaller_engines(out: Translation, gpu: Gpu) -> Iterator[Changed]:
    """Yields changes with less memory for keys and values."""
    if out.get("rollout.engine") == "embedded":
        given = out.get("rollout.kv_cache_gb")
        shares = (2, 4) if given == "auto" else (2,)
        yield from (
            {"rollout.kv_cache_gb": _of(gpu.memory_gb if given == "auto" else given, share)} for share in shares
        )
        return
    arguments = out.get("rollout.sglang.args") or {}
    share = float(arguments.get("mem_fraction_static", 0.85))
    if share > 0.4:
        yield {"rollout.sglang.args": {**arguments, "mem_fraction_static": round(share - 0.1, 2)}}


# The command line.

UNKNOWN_ROWS = RowCounts()
VERSION = "--source-version"
SUFFIXES = (".sh", ".yaml", ".yml", ".json")
"""Suffixes of files. The first word of a command has none of them."""
SHELLS = ("bash", "sh", "source", ".")


def run(arguments: argparse.Namespace) -> int:
    """Runs the command. Returns the exit status: 0 for success, 2 for a mistake of the user."""
    _read_source(arguments)
    found = imported(
        arguments.framework or framework_of(arguments.source, _environment(arguments.env)),
        arguments.source,
        rows=RowCounts(arguments.rows, arguments.steps),
        settings=arguments.set,
        allow_differences=arguments.allow_differences,
        allow_holes=arguments.allow_holes,
        gpu=arguments.gpu,
        variables=arguments.env,
        version=arguments.source_version,
        keys=arguments.key,
    )
    text = written(found, " ".join(arguments.source) if Path(arguments.source[0]).is_file() else "a command")
    if arguments.output is None:
        print(text, end="")
    else:
        arguments.output.write_text(text, encoding="utf-8")
        print(*holes(found), sep="\n", end="\n" if found.holes else "")
    return 0


def imported(
    framework: str,
    source: Sequence[str],
    *,
    rows: RowCounts = UNKNOWN_ROWS,
    settings: Sequence[str] = (),
    allow_differences: bool = False,
    allow_holes: bool = False,
    gpu: str | None = None,
    variables: Sequence[str] = (),
    version: str | None = None,
    keys: Sequence[str] = (),
) -> Translation:
    """Imports a config or a command of `framework`, with memory settings for `gpu` (see `fit_memory`).

    `variables` are values NAME=VALUE of the script's variables. `version` is the framework's version. `keys` are values
    KEY=VALUE of keys of the source.

    Raises ConfigError if the source cannot be read or the result is not a valid config. Keys without counterpart that
    change results raise it too, unless `allow_differences` is set. With `allow_holes` an environment or a reward that
    only the source has stays open, with its keys in `Translation.holes`.
    """
    named = FRAMEWORKS[framework]
    found = read(named, source, _environment(variables))
    if version is not None:
        found.keys[VERSION] = version
    for text in keys:
        name, separator, told = text.partition("=")
        if not name or not separator:
            raise ConfigError(f"--key {text}: expected KEY=VALUE with a key of {named.name}")
        found.keys[name.lstrip("-")] = parse_value(told)
    fixed = Source({}, "--set")
    for text in settings:
        fixed.override(text)
    out = translated(named, found, rows, flattened(fixed.data))
    if allow_holes:
        open_holes(out)
    for text in settings:
        own = Source(out.data, "the import")
        own.override(text)
        path = text.partition("=")[0].strip()
        value = own.data
        for key in keys_of(path):
            value = value[key]
        out.set(path, value, "--set")
    if not allow_differences:
        refuse_differences(out)
    ask_for_missing(out, asked_for(found.unset))
    try:
        check_config(Config.model_validate(out.data))
    except ValidationError as error:
        problems = "\n".join(f"  {'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors())
        hint = f"Correct it with --set KEY=VALUE{asked_for(found.unset)}"
        raise ConfigError(f"the result is not a valid config:\n{problems}\n{hint}") from None
    fit_memory(out, gpu)
    return out


def _environment(variables: Sequence[str]) -> dict[str, str]:
    """Returns the variables of a script: the user's own, and those of --env."""
    given = dict(text.partition("=")[::2] for text in variables)
    if unnamed := [text for text in variables if not text.partition("=")[0] or "=" not in text]:
        raise ConfigError(f"--env {unnamed[0]}: expected NAME=VALUE")
    return {**os.environ, **given}


def _named_file(source: Sequence[str]) -> str | None:
    """Returns the file of a source, or None if the source is a command."""
    first, *words = source
    if len(first.split()) != 1:
        return None
    if Path(first).suffix in SUFFIXES or not words:
        return first
    if first not in SHELLS or "-c" in words:
        return None
    return next((word for word in words if not word.startswith("-")), None)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the description and the arguments of the command to the parser."""
    parser.description = "Converts a config or launch script of another trainer to a config of rltrain."
    parser.allow_abbrev = False
    _add_options(parser)
    parser.add_argument(
        "source",
        nargs=argparse.REMAINDER,
        metavar="FILE_OR_COMMAND",
        help="a shell script with its arguments, a YAML file with overrides, or a command line",
    )


def _read_source(arguments: argparse.Namespace) -> None:
    """Checks the words of the source, and parses options placed after a file. Words after "--" belong to the script."""
    if not arguments.source:
        raise ConfigError("expected a script, a YAML file or a command to import")
    file, *words = arguments.source
    if (named := _named_file(arguments.source)) is not None and not Path(named).is_file():
        raise ConfigError(f"there is no file {named} (relative paths start at {Path.cwd()})")
    if Path(file).is_file():
        end = words.index("--") if "--" in words else len(words)
        options = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
        _add_options(options)
        try:
            _, own = options.parse_known_args(words[:end], arguments)
        except argparse.ArgumentError as error:
            raise ConfigError(str(error)) from None
        arguments.source = [file, *own, *words[end + 1 :]]


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--from", dest="framework", choices=[*FRAMEWORKS], help="the trainer (default: by the source)")
    parser.add_argument("--rows", type=int, help="rows of the training files, to compute steps from epochs")
    parser.add_argument("--steps", type=int, help="steps of the run, instead of those of the source")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a key of rltrain to set")
    parser.add_argument(
        "--env", action="append", default=[], metavar="NAME=VALUE", help="a variable of the script to set"
    )
    parser.add_argument(
        "--key",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="a key of the source, such as one whose value only running it tells",
    )
    parser.add_argument("--source-version", metavar="X.Y", help="the version of verl (default: by keys and files)")
    parser.add_argument(
        "--allow-differences", action="store_true", help="import even if keys without counterpart change results"
    )
    parser.add_argument(
        "--allow-holes",
        action="store_true",
        help="leave an environment or a reward open that only the source has; the config is refused until then",
    )
    parser.add_argument(
        "--gpu",
        help=f"GPU to fit memory settings to: a100, h100, ..., a YAML file, or {KEEP} (default {USUAL}, if the model's "
        "config.json exists)",
    )
    parser.add_argument("--output", type=Path, help="write to this file")
