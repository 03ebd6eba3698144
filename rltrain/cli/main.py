"""The command `rltrain`: one name for everything that launch/ and tools/ do."""

import importlib
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from rltrain.cli.doctor import missing_packages, remedy
from rltrain.cli.ranks import dry_run_options, has_torchrun, possible_worlds, start_ranks, torchrun_options, wants_ranks
from rltrain.errors import USER_ERROR, UserError, one_of, typed


@dataclass(frozen=True)
class Subcommand:
    """`module` has main(argv), and is imported when it is asked for. `before` are arguments that it is given first."""

    module: str
    help: str
    before: tuple[str, ...] = ()
    starts_ranks: Literal["never", "always", "if asked"] = "never"
    """Whether it is a job of ranks, which are started where torchrun has not; if asked: by an option of torchrun's.
    Where it always is, `module` has check(argv, worlds) too, which refuses before any rank is started what each of the
    worlds, pairs of their ranks and those of a node, would refuse."""


SUBCOMMANDS = {
    "train": Subcommand("rltrain.cli.train", "train a model: --config FILE [key=value ...]", starts_ranks="always"),
    "dry-run": Subcommand("rltrain.cli.train", "what a job would do, without a GPU: --config FILE", ("--dry-run",)),
    "import-config": Subcommand(
        "rltrain.import_config.command", "a config or launch script of another trainer as ours"
    ),
    "convert": Subcommand("rltrain.cli.convert", "checkpoints between Hugging Face and Megatron"),
    "evaluate": Subcommand("rltrain.cli.evaluate", "evaluate a checkpoint", starts_ranks="always"),
    "serve": Subcommand("rltrain.cli.serve", "serve a checkpoint by HTTP"),
    "report": Subcommand("rltrain.cli.report", "a page and a trace of what became of a run"),
    "doctor": Subcommand(
        "rltrain.cli.doctor", "what machines have, lack and allow, and how they are linked", starts_ranks="if asked"
    ),
    "make-quickstart": Subcommand("rltrain.cli.quickstart", "a tiny model and its problems"),
    "schema": Subcommand("rltrain.config.json_schema", "the JSON schema of config files"),
    "completion": Subcommand("rltrain.cli.completion", "completion for bash, zsh or fish"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0 done, 2 a mistake the user can mend, 1 anything else."""
    arguments = [*(sys.argv[1:] if argv is None else argv)]
    if not arguments or arguments[0] in ("-h", "--help"):
        print(usage())
        return 0 if arguments else USER_ERROR
    name, rest = arguments[0], arguments[1:]
    subcommand = SUBCOMMANDS.get(name)
    if subcommand is None:
        print(f"rltrain: got {name!r}; expected {one_of(name, SUBCOMMANDS)}", file=sys.stderr)
        return USER_ERROR
    try:
        with typed(f"rltrain {name}"):
            return _run(name, subcommand, rest)
    except ModuleNotFoundError as error:
        if not (missing := missing_packages()):
            raise
        print(f"rltrain {name}: {error}. {sys.executable} lacks {', '.join(missing)}. {remedy()}", file=sys.stderr)
    except UserError as error:
        print(f"rltrain {name}: refused: {error}", file=sys.stderr)
    return USER_ERROR


def _run(name: str, subcommand: Subcommand, arguments: Sequence[str]) -> int:
    command = importlib.import_module(subcommand.module)
    status: int
    if subcommand.starts_ranks == "always" and wants_ranks(arguments):
        given, rest = torchrun_options(arguments)
        command.check([*subcommand.before, *rest], possible_worlds(given, os.environ))
        status = start_ranks(name, arguments)
    elif subcommand.starts_ranks == "if asked" and wants_ranks(arguments, only_if_asked=True) and has_torchrun():
        status = start_ranks(name, arguments)
    else:
        whole = [*subcommand.before, *arguments]
        status = command.main(dry_run_options(whole, os.environ) if "--dry-run" in whole else whole)
    return status


def usage() -> str:
    width = max(map(len, SUBCOMMANDS))
    lines = [f"  {name:{width}}  {subcommand.help}" for name, subcommand in SUBCOMMANDS.items()]
    return "\n".join(["usage: rltrain COMMAND [--help] ...", "", *lines])


if __name__ == "__main__":
    sys.exit(main())
