"""Every command that the pages quote: its file or entry point exists, its options are known to the parser that reads
them, the job of its config and overrides is one in its world, and its files exist or are made by a command before it.
Dry runs are made, and what needs neither a GPU nor minutes is run."""

import argparse
import contextlib
import importlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rltrain.cli.main import SUBCOMMANDS
from rltrain.cli.ranks import torchrun_command
from rltrain.cli.train import OF_EVERY_CALL
from rltrain.config.loader import load_config
from rltrain.errors import UserError
from rltrain.planning.description import describe_job
from rltrain.planning.options import DryRunOptions
from tests.forked.popen import run
from tests.unit.documented_commands import (
    PAGES,
    REPOSITORY,
    Command,
    blocks,
    commands,
    first_commands,
    program_of,
)

COMMANDS = [command for page in PAGES for command in commands(page)]

RUN_ELSEWHERE = {
    "pip install -e .": "tests/run.sh installs so before any test runs",
    ".venv/bin/pre-commit install": "changes the clone's hooks; .pre-commit-config.yaml calls what --lint calls",
    "python3 -m venv ENV && ENV/bin/pip install -r launch/constraints-sglang.txt": "what launch/environment.sh does",
    "mkdocs serve": "test_documentation.py builds the site",
}
"""Commands without a parser of ours, and what shows that they are right."""

NEEDS_GPUS = {"configs/gsm8k_qwen3_0.6b.yaml": "Qwen3-0.6B at full batch; test_gsm8k.py runs gsm8k_tiny.yaml"}
"""Configs that commands name and that nothing here runs whole: their commands are checked as all others are."""

RUN = (
    "rltrain doctor",
    "python -m rltrain.sandbox.means",
    "python examples/",
    "python tools/make_",
    *(
        f"python tools/convert_checkpoint.py {what}"
        for what in ("hf-to-megatron", "megatron-to-hf", "inspect", "verify")
    ),
)
"""How commands begin that need neither a GPU nor minutes; `run-to-hf` needs a run, as in test_convert_checkpoint.py."""

QUICKSTART = "configs/quickstart.yaml"
NO_COMMANDS = ("    ", " ", "ranks 0-7: peak", "launch/  ", "sequential ", "ids  ", "{")
"""How blocks begin that show something else."""

MADE = ("runs/", "DIR", "HF_DIR", "FILE", "CHECKPOINT", "SCRIPT", "RUN")
"""Outputs of commands, and what stands for the reader's own."""


class Parsed(Exception):  # noqa: N818 - the end of what is wanted of a command
    def __init__(self, values: argparse.Namespace) -> None:
        self.values = values


@pytest.fixture
def parse(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[..., Any], list[str]], argparse.Namespace]:
    """What a main function's own parser makes of arguments; the function goes no further."""
    for name in ("parse_args", "parse_intermixed_args"):
        original = getattr(argparse.ArgumentParser, name)

        def stop(self: Any, *given: Any, of: Any = original, **named: Any) -> None:
            raise Parsed(of(self, *given, **named))

        monkeypatch.setattr(argparse.ArgumentParser, name, stop)

    def of(main: Callable[..., Any], arguments: list[str]) -> argparse.Namespace:
        monkeypatch.setattr(sys, "argv", ["command", *arguments])
        try:
            main(arguments) if inspect.signature(main).parameters else main()
        except Parsed as parsed:
            return parsed.values
        except SystemExit as error:
            raise AssertionError(f"{arguments}: refused by its parser") from error
        raise AssertionError(f"{arguments}: parsed nothing")

    return of


def is_placeholder(path: str) -> bool:
    return re.search(r"\b[A-Z]{2,}(_[A-Z]+)*\b", path) is not None


def with_numbers(words: list[str]) -> list[str]:
    """N, R and PORT stand for numbers."""
    return ["1" if word in ("N", "R", "PORT") else word for word in words if word != "key=value"]


def alternatives(words: list[str]) -> list[list[str]]:
    """One command for each of "a|b|c"."""
    [varied] = [i for i, word in enumerate(words) if re.fullmatch(r"\w+(\|\w+)+", word)] or [None]
    if varied is None:
        return [words]
    return [[*words[:varied], choice, *words[varied + 1 :]] for choice in words[varied].split("|")]


def main_of(path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """The main function of a script, which finds its neighbours as when it is started."""
    monkeypatch.syspath_prepend(str(path.parent))
    spec = importlib.util.spec_from_file_location(f"documented_{path.stem}", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    main: Callable[..., Any] = module.main
    return main


def world_of(text: str) -> tuple[int, int]:
    """Returns the ranks that a command starts, and those of a node: of a range of nodes the largest."""
    per_node = re.search(r"--nproc-per-node[ =](\d+)", text)
    nodes = re.search(r"--(?:nnodes|nodes)[ =](?:\d+:)?(\d+)", text)
    ranks = int(per_node[1]) if per_node else 8 if nodes else 1
    return ranks * int(nodes[1] if nodes else 1), ranks


def check_config(values: argparse.Namespace, command: Command, folder: Path) -> None:
    """Makes the dry run in `folder`, which is empty. A reader's own config is the quickstart's.

    Raises the UserError that the job is refused with.
    """
    config, overrides = getattr(values, "config", None), getattr(values, "overrides", [])
    if config is None:
        return
    world = world_of(command.text)
    if is_placeholder(str(config)) or str(config) in made_before(command):
        config, world = QUICKSTART, (4, 4)
    options: dict[str, Any] = {"world_size": world[0], "ranks_per_node": world[1]}
    if getattr(values, "dry_run", False):
        options = {name: value for name, value in vars(values).items() if name not in OF_EVERY_CALL}
    if config == QUICKSTART:
        options["world_size"] = max(options.get("world_size", 0), 4)
    with contextlib.chdir(folder):
        describe_job(REPOSITORY / config, overrides, DryRunOptions(**options))


def script_and_rest(words: list[str]) -> tuple[Path, list[str]]:
    at = next(i for i, word in enumerate(words) if word.endswith((".py", ".sbatch", ".sh")))
    assert (REPOSITORY / words[at]).is_file(), words[at]
    return REPOSITORY / words[at], words[at + 1 :]


def check_shell_script(script: Path, arguments: list[str], parse: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    if script.name == "gpu_check.sh":  # starts the program of that name
        parse(main_of(script.with_suffix(".py"), monkeypatch), arguments)
        return
    options = {argument for argument in arguments if argument.startswith("--")}
    assert all(f"{option})" in script.read_text() for option in options), f"{script.name} has not all of {options}"
    if script.name == "quickstart.sh":
        overrides = [argument.replace("$PWD", str(REPOSITORY)) for argument in arguments if "=" in argument]
        load_config(REPOSITORY / "configs/quickstart.yaml", overrides)
    paths = [argument for argument in arguments if "/" in argument and "=" not in argument]
    assert all((REPOSITORY / path).exists() for path in paths), paths


def torchrun_options(words: list[str]) -> None:
    from torch.distributed.run import get_args_parser

    _, unknown = get_args_parser().parse_known_args(words)
    assert not unknown, unknown


def made_before(command: Command) -> set[str]:
    """The files that commands of the same page make."""
    return {other.makes for other in COMMANDS if other.page == command.page and other.makes}


def test_the_readme_begins_with_the_main_job_and_the_tests_and_ci_runs_both() -> None:
    assert first_commands(REPOSITORY / "README.md") == ["bash launch/quickstart.sh", "bash tests/run.sh"]
    assert "tests.unit.documented_commands" in (REPOSITORY / ".ci/run").read_text()


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: f"{command.page}:{command.text[:60]}")
def test_a_command_is_one(command: Command, parse: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    check(command, parse, monkeypatch, tmp_path)


@pytest.mark.parametrize(
    "wrong",
    [
        "rltrain dry-run --config configs/quickstart.yaml --world-sizes 4",
        "rltrain train --config configs/quickstart.yaml stepps=2",
        "rltrain train --config configs/none.yaml",
        "rltrain train --nproc-per-node 3 --config configs/quickstart.yaml",
        "torchrun --nproc-per-node 4 launch/train.py --config configs/quickstart.yaml env.function=calculator",
        "rltrain dry-run --config FILE --world-size 4 reward.function=missing.py:score",
        "torchrun --standalone --nprocs 2 launch/train.py --config configs/quickstart.yaml",
        "torchrun --nproc-per-node 2 launch/trian.py --config configs/quickstart.yaml",
        "bash tests/run.sh --fast",
        "bash launch/quickstart.sh stepps=2",
        "python -m rltrain.sandbox.meens",
    ],
)
def test_a_command_that_is_none_is_found(
    wrong: str, parse: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises((AssertionError, UserError, SystemExit)):
        check(Command("README.md", wrong), parse, monkeypatch, tmp_path)


def pages_that_run() -> list[str]:
    return list(dict.fromkeys(command.page for command in COMMANDS if command.text.startswith(RUN)))


@pytest.mark.slow
@pytest.mark.parametrize("page", pages_that_run())
def test_the_commands_of_a_page_run_one_after_the_other(page: str, tmp_path: Path) -> None:
    for name in ("configs", "examples", "launch", "tools"):
        (tmp_path / name).symlink_to(REPOSITORY / name)
    programs = {"rltrain": [sys.executable, "-m", "rltrain"], "python": [sys.executable]}
    for command in COMMANDS:
        if command.page == page and command.text.startswith(RUN):
            program, *rest = with_numbers(command.words())
            done = run([*programs[program], *with_folders(rest)], 600, folder=tmp_path)
            assert done.returncode == 0, f"{command.text}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"


def with_folders(words: list[str]) -> list[str]:
    """Returns the words with a checkpoint for HF_DIR, and a folder for what a command makes."""
    given = {"HF_DIR": str(REPOSITORY / "tests/warmed_up"), "DIR": "made"}
    made = {"HF_DIR": "made_hf", "DIR": "made"}
    pairs = zip(["", *words], words, strict=False)
    return [(made if before == "--output" else given).get(word, word) for before, word in pairs]


def of_module(program: str, rest: list[str]) -> tuple[str, list[str]]:
    """What `python -m rltrain` and `torchrun ... -m rltrain` are short for."""
    if program in ("python", "torchrun") and "-m" in rest and rest[rest.index("-m") + 1] == "rltrain":
        return "rltrain", rest[rest.index("-m") + 2 :]
    return program, rest


def check(command: Command, parse: Any, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """AssertionError, or the error of what reads it, where the command is wrong."""
    words = command.words()
    if " ".join(words) in RUN_ELSEWHERE:
        return
    for program, *rest in alternatives(words):
        rest = with_numbers(rest)
        program, rest = of_module(program, rest)
        if program == "rltrain":
            subcommand = SUBCOMMANDS[rest[0]]
            arguments = rest[1:]
            if subcommand.starts_ranks != "never":
                started = torchrun_command(rest[0], arguments)
                arguments = started[started.index(rest[0]) + 1 :]
            main = importlib.import_module(subcommand.module).main
            check_config(parse(main, [*subcommand.before, *arguments]), command, folder)
        elif program == "python" and rest[0] == "-m":
            assert importlib.util.find_spec(rest[1]), rest[1]
        elif program == "sbatch":
            main = importlib.import_module("rltrain.cli.train").main
            check_config(parse(main, script_and_rest(rest)[1]), command, folder)
        elif program == "bash":
            check_shell_script(*script_and_rest(rest), parse, monkeypatch)
        else:
            script, arguments = script_and_rest(rest)
            if program == "torchrun":
                torchrun_options(rest[: rest.index(script.relative_to(REPOSITORY).as_posix()) + 1])
            if script.parent.name == "examples":
                load_config(REPOSITORY / "configs/quickstart.yaml", arguments)
                continue
            check_config(parse(main_of(script, monkeypatch), arguments), command, folder)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_block_for_a_shell_is_overlooked(page: Path) -> None:
    """All of its lines are commands, or none, or it begins with one behind "$ " and shows what that prints."""
    for block in blocks(page):
        lines = [line for line in re.sub(r"\\\n\s*", " ", block).splitlines() if line.strip()]
        known = [bool(program_of(line)) for line in lines]
        shown = lines[0].startswith("$ ") and known[0]
        assert all(known) or shown or (not any(known) and block.startswith(NO_COMMANDS)), block


def test_what_needs_gpus_is_named_by_a_command() -> None:
    assert COMMANDS
    for config in NEEDS_GPUS:
        assert (REPOSITORY / config).is_file() and any(config in command.text for command in COMMANDS)
