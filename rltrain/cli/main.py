"""The command `rltrain`: one name and one parser for everything that launch/ and tools/ do."""

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
    """`module` has add_arguments(parser) and run(arguments), which returns the exit status, and is imported when it is
    asked for. `before` are arguments that it is given first."""

    module: str
    help: str
    before: tuple[str, ...] = ()
    starts_ranks: Literal["never", "always", "if asked"] = "never"
    """Whether it is a job of ranks, which are started where torchrun has not; if asked: by an option of torchrun's.
    Where it always is, `module` has check(arguments, worlds) too, which refuses before any rank is started what each of
    the worlds, pairs of their ranks and those of a node, would refuse."""
    takes_keys: bool = False
    """Whether it takes config keys, which may stand anywhere among its options."""


SUBCOMMANDS = {
    "train": Subcommand(
        "rltrain.cli.train", "train a model: --config FILE [key=value ...]", starts_ranks="always", takes_keys=True
    ),
    "dry-run": Subcommand(
        "rltrain.cli.train", "what a job would do, without a GPU: --config FILE", ("--dry-run",), "always", True
    ),
    "import-config": Subcommand(
        "rltrain.import_config.command", "a config or launch script of another trainer as ours"
    ),
    "convert": Subcommand("rltrain.cli.convert", "checkpoints between Hugging Face and Megatron"),
    "evaluate": Subcommand("rltrain.cli.evaluate", "evaluate a checkpoint", starts_ranks="always", takes_keys=True),
    "serve": Subcommand("rltrain.cli.serve", "serve a checkpoint by HTTP"),
    "report": Subcommand("rltrain.cli.report", "a page and a trace of what became of a run"),
    "doctor": Subcommand(
        "rltrain.cli.doctor", "what machines have, lack and allow, and how they are linked", starts_ranks="if asked"
    ),
    "make-quickstart": Subcommand("rltrain.cli.quickstart", "a tiny model and its problems"),
    "schema": Subcommand("rltrain.config.key_reference", "the JSON schema of config files"),
    "completion": Subcommand("rltrain.cli.completion", "completion for bash, zsh or fish"),
}


class Parser(argparse.ArgumentParser):
    """The parser of every command, which says in one line what is wrong with a call."""

    def __init__(self, *, takes_keys: bool = False, **given: Any) -> None:
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, **given)
        self.takes_keys = takes_keys

    def error(self, message: str) -> NoReturn:
        is_key = self.takes_keys and message.startswith("unrecognized arguments")
        hint = "config keys are given without dashes, such as steps=5" if is_key else f"see {self.prog} --help"
        sys.exit(refuse(f"{self.prog}: error: {message}; {hint}"))


def refuse(message: str) -> int:
    """Prints `message`, of several ranks once for each node, and leaves it for torchrun's summary. Returns the exit
    status."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print(message, file=sys.stderr, flush=True)
    leave_for_launcher(message)
    return USER_ERROR


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0 done, 2 a mistake the user can mend, 1 anything else."""
    arguments = [*(sys.argv[1:] if argv is None else argv)]
    if not arguments or arguments[0] in ("-h", "--help"):
        print(help_of_all(), end="")
        return 0 if arguments else USER_ERROR
    if arguments[0] not in SUBCOMMANDS:
        return refuse(f"rltrain: got {arguments[0]!r}; expected {one_of(arguments[0], SUBCOMMANDS)}")
    return _refusing(arguments[0], arguments[1:])


def run_script(name: str, argv: Sequence[str] | None = None) -> int:
    """Runs the subcommand `name` for a script, whose file name messages begin with and which starts no ranks."""
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
            "--nproc-per-node and --nnodes: the command `rltrain` alone takes them; expected torchrun "
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
    """Returns what the arguments of a subcommand say, torchrun's options apart; exits where they are wrong."""
    parser = parser_of(name, script)
    parse = parser.parse_intermixed_args if parser.takes_keys else parser.parse_args
    return parse([*SUBCOMMANDS[name].before, *argv])


def parser_of(name: str, script: str | None = None) -> Parser:
    """Returns the parser of a subcommand, whose module is imported."""
    subcommand = SUBCOMMANDS[name]
    parser = Parser(prog=script or f"rltrain {name}", takes_keys=subcommand.takes_keys)
    importlib.import_module(subcommand.module).add_arguments(parser)
    if subcommand.starts_ranks != "never":
        add_torchrun_options(parser)
    if subcommand.takes_keys:
        parser.add_argument("overrides", nargs="*", metavar="key=value", help="config keys to override, dotted")
    return parser


def help_of_all() -> str:
    """Returns the help of `rltrain`, for which no subcommand is imported."""
    parser = Parser(prog="rltrain")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for name, subcommand in SUBCOMMANDS.items():
        commands.add_parser(name, help=subcommand.help, add_help=False)
    return parser.format_help()


if __name__ == "__main__":
    sys.exit(main())
