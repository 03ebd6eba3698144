"""The command `rltrain import-config`."""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from pydantic import ValidationError

from rltrain.config.loader import Source
from rltrain.config.schema import Config
from rltrain.errors import ConfigError, UserError, command_name
from rltrain.importing.fitting import KEEP, USUAL, fit_memory
from rltrain.importing.sources import FRAMEWORKS, framework_of, read, translated
from rltrain.importing.steps import Rows
from rltrain.importing.translation import Translation, keys_of, refuse_differences
from rltrain.importing.writing import written
from rltrain.planning.validation import check_config

EXIT_USER_ERROR = 2
UNKNOWN_ROWS = Rows()
SUFFIXES = (".sh", ".yaml", ".yml", ".json")
"""The first word of a command has none of these."""
SHELLS = ("bash", "sh", "source", ".")


def main(argv: Sequence[str]) -> int:
    """Exit status: 0 done, 2 a mistake the user can mend."""
    arguments = parsed(argv)
    try:
        found = imported(
            arguments.framework or framework_of(arguments.source, os.environ),
            arguments.source,
            rows=Rows(arguments.rows, arguments.steps),
            settings=arguments.set,
            allow_differences=arguments.allow_differences,
            gpu=arguments.gpu,
        )
        text = written(found, " ".join(arguments.source) if Path(arguments.source[0]).is_file() else "a command")
        if arguments.output is None:
            print(text, end="")
        else:
            arguments.output.write_text(text, encoding="utf-8")
    except UserError as error:
        print(f"{command_name()}: refused: {error}", file=sys.stderr)
        return EXIT_USER_ERROR
    return 0


def imported(
    framework: str,
    source: Sequence[str],
    *,
    rows: Rows = UNKNOWN_ROWS,
    settings: Sequence[str] = (),
    allow_differences: bool = False,
    gpu: str | None = None,
) -> Translation:
    """What a config or a command of `framework` becomes, with settings of memory for a `gpu` (see `fit_memory`).
    ConfigError where it cannot be read, where it changes what is computed by keys that have no counterpart, unless
    these are allowed, and where the result is no legal config."""
    named = FRAMEWORKS[framework]
    out = translated(named, read(named, source, os.environ), rows)
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
    try:
        check_config(Config.model_validate(out.data))
    except ValidationError as error:
        problems = "\n".join(f"  {'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors())
        raise ConfigError(f"what it becomes is no config of rltrain:\n{problems}\n--set KEY=VALUE mends it") from None
    fit_memory(out, gpu)
    return out


def _named_file(source: Sequence[str]) -> str | None:
    """Returns the file that a source is read from; None where it is a command of its own."""
    first, *words = source
    if len(first.split()) != 1:
        return None
    if Path(first).suffix in SUFFIXES or not words:
        return first
    if first not in SHELLS or "-c" in words:
        return None
    return next((word for word in words if not word.startswith("-")), None)


def parsed(argv: Sequence[str]) -> argparse.Namespace:
    """Returns the options and the words of the source. Options may also follow a file; what comes after "--" is the
    script's."""
    options = _options()
    made = argparse.ArgumentParser(
        prog=command_name(),
        description="Print a config of rltrain that does what a config or a launch script of another trainer does.",
        parents=[options],
        allow_abbrev=False,
    )
    made.add_argument(
        "source",
        nargs=argparse.REMAINDER,
        metavar="FILE_OR_COMMAND",
        help="a shell script with its arguments, a YAML file with overrides, or a command line",
    )
    arguments = made.parse_args(argv)
    if not arguments.source:
        made.error("expected a script, a YAML file or a command to import")
    file, *words = arguments.source
    if (named := _named_file(arguments.source)) is not None and not Path(named).is_file():
        made.error(f"there is no file {named} (relative paths start at {Path.cwd()})")
    if Path(file).is_file():
        end = words.index("--") if "--" in words else len(words)
        _, own = options.parse_known_args(words[:end], arguments)
        arguments.source = [file, *own, *words[end + 1 :]]
    return arguments


def _options() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog=command_name(), add_help=False, allow_abbrev=False)
    made.add_argument("--from", dest="framework", choices=[*FRAMEWORKS], help="by default what the source shows")
    made.add_argument("--rows", type=int, help="rows of the training files, where steps follow from epochs")
    made.add_argument("--steps", type=int, help="steps of the run, in the place of what the source says")
    made.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a config key of rltrain to set")
    made.add_argument(
        "--allow-differences", action="store_true", help="import although some keys that matter have no counterpart"
    )
    made.add_argument(
        "--gpu",
        help=f"that settings of memory alone are chosen for, where it would not fit: a100, h100, ..., a YAML file, or "
        f"{KEEP} (default {USUAL}, if the model's config.json is at hand)",
    )
    made.add_argument("--output", type=Path, help="write to this file")
    return made
