"""The command `rltrain`, with one name and one parser for all scripts in launch/ and tools/."""

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn

from rltrain.cli.doctor import missing_packages, remedy
from rltrain.cli.ranks import (
    add_torchrun_options,
    has_torchrun,
    possible_worlds,
    set_world,
    start_ranks,
    torchrun_options,
)
from rltrain.errors import USER_ERROR, UserError, one_of
from rltrain.runtime.machine import leave_for_launcher


@dataclass(frozen=True)
class Subcommand:
    """A subcommand. Its module is imported at its first use.

    `module` has add_arguments(parser) and run(arguments). The latter returns the exit status. `before` are arguments in
    front of the given ones.
    """

    module: str
    help: str
    before: tuple[str, ...] = ()
    starts_ranks: Literal["never", "always", "if asked"] = "never"
    """Decides whether the subcommand starts ranks through torchrun. "if asked" requires an option of torchrun.

    With "always" the module also has check(arguments, worlds). It raises the refusals of the ranks before any rank is
    started. A world is a pair of the number of ranks and the ranks of a node.
    """
    takes_keys: bool = False
    """True if the subcommand accepts config keys anywhere among its options."""


SUBCOMMANDS = {
    "train": Subcommand(
        "rltrain.cli.train", "train a model: --config FILE [key=value ...]", starts_ranks="always", takes_keys=True
    ),
    "dry-run": Subcommand(
        "rltrain.cli.train", "print what a job would do, without a GPU: --config FILE", ("--dry-run",), "always", True
    ),
    "import-config": Subcommand(
        "rltrain.import_config.command", "convert a config or launch script of another trainer"
    ),
    "convert": Subcommand("rltrain.cli.convert", "convert checkpoints between Hugging Face and Megatron"),
    "evaluate": Subcommand("rltrain.cli.evaluate", "evaluate a checkpoint", starts_ranks="always", takes_keys=True),
    "serve": Subcommand("rltrain.cli.serve", "serve a checkpoint over HTTP"),
    "report": Subcommand("rltrain.cli.report", "write a report page and a trace of a run"),
    "doctor": Subcommand(
        "rltrain.cli.doctor", "check machines, packages, links and servers", starts_ranks="if asked", takes_keys=True
    ),
    "make-quickstart": Subcommand("rltrain.cli.quickstart", "write a tiny model and training problems"),
    "schema": Subcommand("rltrain.config.key_reference", "print the JSON schema of config files"),
    "completion": Subcommand("rltrain.cli.completion", "print completion for bash, zsh or fish"),
}


class Parser(argparse.ArgumentParser):
    """The parser of every command. It reports a wrong call in one line."""

    def __init__(self, *, takes_keys: bool = False, **given: Any) -> None:
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, **given)
        self.takes_keys = takes_keys

    def error(self, message: str) -> NoReturn:
        """Exits with the message on one line."""
        is_key = self.takes_keys and message.startswith("unrecognized arguments")
        hint = "config keys are given without dashes, such as steps=5" if is_key else f"see {self.prog} --help"
        sys.exit(refuse(f"{self.prog}: error: {message}; {hint}"))


def refuse(message: str) -> int:
    """Prints `message` once per node and stores it for torchrun's summary. Returns the exit status."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print(message, file=sys.stderr, flush=True)
    leave_for_launcher(message)
    return USER_ERROR


def main(argv: Sequence[str] | None = None) -> int:
    """Runs `rltrain`. Returns the exit status: 0 for success, 2 for a mistake of the user, 1 for anything else."""
    arguments = [*(sys.argv[1:] if argv is None else argv)]
    if not arguments or arguments[0] in ("-h", "--help"):
        print(help_of_all(), end="")
        return 0 if arguments else USER_ERROR
    if arguments[0] not in SUBCOMMANDS:
        return refuse(f"rltrain: got {arguments[0]!r}; expected {one_of(arguments[0], SUBCOMMANDS)}")
    return _refusing(arguments[0], arguments[1:])


def run_script(name: str, argv: Sequence[str] | None = None) -> int:
    """Runs the subcommand `name` for a script. Its messages begin with the file name of the script. It starts no
    ranks."""
    return _refusing(name, sys.argv[1:] if argv is None else argv, Path(sys.argv[0]).name)


def _refusing(name: str, argv: Sequence[str], script: str | None = None) -> int:
    called = script or f"rltrain {name}"
    try:
        return _run(name, argv, script)
    except ModuleNotFoundError as error:
        if not (missing := missing_packages()):
            raise
        return refuse(f"{called}: {error}. {sys.executable} lacks {', '.join(missing)}. {remedy()}")
    except UserError as error:
        return refuse(f"{called}: refused: {error}")


def _run(name: str, argv: Sequence[str], script: str | None) -> int:
    subcommand = SUBCOMMANDS[name]
    given, rest = torchrun_options(argv) if subcommand.starts_ranks != "never" else ({}, argv)
    is_asked = any(value is not None for value in given.values())
    arguments = parsed(name, rest, script)
    command = importlib.import_module(subcommand.module)
    is_dry_run = vars(arguments).get("dry_run", False)
    if is_asked and (script or ("RANK" in os.environ and not is_dry_run)):
        raise UserError(
            "--nproc-per-node and --nnodes are options of the command `rltrain` only; expected torchrun "
            f"--nproc-per-node N {script or f'rltrain {name}'}"
            + (", or --dry-run --world-size W" if "dry_run" in arguments else "")
        )
    if is_dry_run:
        if is_asked:
            set_world(arguments, given, os.environ)
    elif not script and "RANK" not in os.environ:
        if subcommand.starts_ranks == "always":
            command.check(arguments, possible_worlds(given, os.environ))
            return start_ranks(name, argv)
        if is_asked and has_torchrun():
            return start_ranks(name, argv)
    status: int = command.run(arguments)
    return status


def parsed(name: str, argv: Sequence[str], script: str | None = None) -> argparse.Namespace:
    """Returns the parsed arguments of a subcommand, without torchrun's options. Exits if they are wrong."""
    parser = parser_of(name, script)
    parse = parser.parse_intermixed_args if parser.takes_keys else parser.parse_args
    return parse([*SUBCOMMANDS[name].before, *argv])


def parser_of(name: str, script: str | None = None) -> Parser:
    """Returns the parser of a subcommand. Imports its module."""
    subcommand = SUBCOMMANDS[name]
    parser = Parser(prog=script or f"rltrain {name}", takes_keys=subcommand.takes_keys)
    importlib.import_module(subcommand.module).add_arguments(parser)
    if subcommand.starts_ranks != "never":
        add_torchrun_options(parser)
    if subcommand.takes_keys:
        parser.add_argument("overrides", nargs="*", metavar="key=value", help="config keys to override, dotted")
    return parser


def help_of_all() -> str:
    """Returns the help of `rltrain`. It imports no subcommand."""
    parser = Parser(prog="rltrain")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for name, subcommand in SUBCOMMANDS.items():
        commands.add_parser(name, help=subcommand.help, add_help=False)
    return parser.format_help()


if __name__ == "__main__":
    sys.exit(main())
