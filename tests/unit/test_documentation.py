"""Tests of the pages: their commands run, their examples work, their links lead somewhere."""

import argparse
import ast
import asyncio
import contextlib
import copy
import functools
import importlib.util
import inspect
import json
import re
import runpy
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from torch.distributed.run import get_args_parser

from rltrain.cli.main import main, run_script
from rltrain.cli.train import OF_EVERY_CALL
from rltrain.config.explain import all_keys
from rltrain.config.key_reference import COMMAND, docstrings, document
from rltrain.config.loader import Source, load_config, read_source, validated
from rltrain.config.schema import Config, Schedule
from rltrain.environments.agent import SESSION, AgentEnvironment
from rltrain.environments.interface import StepResult
from rltrain.errors import UserError
from rltrain.planning.description import describe, describe_job
from rltrain.planning.hardware import gpu_named
from rltrain.planning.options import DryRunOptions
from rltrain.sandbox.means import means
from tests.forked.popen import run
from tests.support.documented_commands import PAGES, REPOSITORY, Command, blocks, commands, first_commands, program_of
from tests.support.talking_engine import byte_tokenizer, endpoint

BLOCK = re.compile(r"^```(\S*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
NAMED = re.compile(r"`([\w/.]+\.(?:py|jsonl|json|yaml|sh))`")
RUNS = re.compile(r"\brun_script\(\"([\w-]+)\"\)")
SPAN = re.compile(r"`([^`]+)`")
SETTING = re.compile(r"(\w+)(?:(?:\.\w+)+(?:: |=)|: \{)(?!\.\.\.)")
Values = dict[str, Any]

BASE: Values = {"steps": 10, "model": {"path": "model"}, "data": {"train": {"path": "rows.jsonl"}}}
PLACEMENTS: tuple[Values, ...] = (
    {"actor, reference": "0-3", "rollout, reward": "4-7"},
    {"actor, reference, rollout, reward": "all"},
    {"actor": "all"},
)
"""Placements for a page's config without one. Readers choose one of them."""
WHOLE = ("placement", "train")
"""Sections that are replaced, not merged."""


@dataclass(frozen=True)
class Example:
    page: str
    line: int
    language: str
    text: str
    before: str
    """The paragraph before the block."""

    @property
    def title(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def file(self) -> str | None:
        """Returns the name of the block's file, from the paragraph before it."""
        names = NAMED.findall(self.before)
        return names[-1] if names and names[-1].endswith(SUFFIXES[self.language]) else None


SUFFIXES = {"python": (".py",), "json": (".json", ".jsonl"), "yaml": (".yaml",)}


def examples_of(page: Path) -> list[Example]:
    """Returns all blocks of a page."""
    text, name = page.read_text(), page.relative_to(REPOSITORY).as_posix()
    found = []
    for match in BLOCK.finditer(text):
        before = text[: match.start()].rstrip("\n").rpartition("\n\n")[2]
        line = text.count("\n", 0, match.start()) + 1
        found.append(Example(name, line, match[1], match[2], before))
    return found


EXAMPLES = [example for page in PAGES for example in examples_of(page)]


def settings_of(page: Path) -> list[tuple[str, str]]:
    """Returns pairs of the page and a setting quoted in its sentences: `a.b: value`, `a.b=value`, `a: {...}`."""
    spans = [span.replace("\n", " ") for span in SPAN.findall(BLOCK.sub("", page.read_text()))]
    sections = Config.model_fields.keys()
    name = page.relative_to(REPOSITORY).as_posix()
    return [(name, span) for span in spans if (found := SETTING.match(span)) and found[1] in sections]


def overrides_of(setting: str) -> list[str]:
    """Returns the setting in the form of command-line overrides."""
    key, separator, value = setting.partition(": ")
    return [f"{key}={value}"] if separator and "=" not in key else shlex.split(setting)


def of_language(language: str) -> list[Example]:
    return [example for example in EXAMPLES if example.language == language]


def before_on_its_page(example: Example) -> list[Example]:
    """Returns the earlier blocks of the same page."""
    return [other for other in EXAMPLES if other.page == example.page and other.line < example.line]


def merged(base: Values, own: Values) -> Values:
    """Returns `base` with the keys of `own` in their place."""
    made = dict(base)
    for key, value in own.items():
        nested = isinstance(value, dict) and isinstance(base.get(key), dict) and key not in WHOLE
        made[key] = merged(base[key], value) if nested else value
    return made


def configs_of(example: Example, read: Callable[[str], Values]) -> Iterator[Values]:
    """Yields the configs that readers may build from a block: alone, with one earlier block, and with all earlier
    blocks. Adds the keys left out by pages. `read` reads YAML."""
    earlier = [read(other.text) for other in before_on_its_page(example) if other.language == "yaml"]
    together = functools.reduce(merged, earlier, Values())
    for before in ({}, *earlier, together):
        own = merged(merged({"data": {"train": {}}}, before), read(example.text))
        own["data"]["train"] = own["data"]["train"] or BASE["data"]["train"]
        for placement in [own["placement"]] if "placement" in own else PLACEMENTS:
            yield merged({**BASE, "placement": placement}, own)


def write_files(page: str, folder: Path) -> None:
    """Writes the files shown on the page."""
    for other in EXAMPLES:
        if other.page == page and other.language in SUFFIXES and other.file is not None:
            path = folder / other.file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(other.text)


DOCS = REPOSITORY / "docs"


def test_the_config_reference_is_the_schema() -> None:
    assert (DOCS / "config.md").read_text() == document() + "\n", f"run: {COMMAND}"


def test_the_config_reference_has_every_key() -> None:
    """If several keys share a section, the first one lists the section's keys."""
    text = document()
    explained_elsewhere = [
        line.split("`")[1].replace("[]", "") for line in text.splitlines() if "Its keys are those of" in line
    ]
    named = {name.replace("[]", "") for name in re.findall(r"^\| `([^`]+)`", text, flags=re.MULTILINE)}
    expected = {key for key in all_keys() if not any(key.startswith(f"{other}.") for other in explained_elsewhere)}
    assert expected - named == {name for name in expected if f"## {name}\n" in text}


def test_docstrings_of_attributes_are_read_with_those_of_the_classes_that_a_section_is_made_from() -> None:
    found = docstrings(Schedule)
    assert found["partial_rollouts"].startswith("A generate task ends when enough prompt groups are done")
    assert "mode" in found and "steps" not in found


ARCHITECTURE = (REPOSITORY / "ARCHITECTURE.md").read_text()


def test_the_architecture_page_names_files_that_exist() -> None:
    roots = (REPOSITORY, REPOSITORY / "rltrain", REPOSITORY / "rltrain/rollout/servers/in_sglang")
    named = set(re.findall(r"`((?:\w+/)*\w+\.py)`", ARCHITECTURE))
    assert [name for name in sorted(named) if not any((root / name).is_file() for root in roots)] == []
    assert len(ARCHITECTURE.splitlines()) <= 400


def test_every_change_has_a_file_to_open_that_defines_the_name() -> None:
    table = ARCHITECTURE.split("## To change X, open Y")[1].split("## ")[0]
    rows = re.findall(r"^\| .+ \| `([\w/]+\.py)` \| `(\w+)` \|$", table, flags=re.MULTILINE)
    assert len(rows) == table.count("\n| ") - 1 >= 40, "a row is: change | `file` | `name`"
    for file, name in rows:
        body = ast.parse((REPOSITORY / "rltrain" / file).read_text()).body
        assert name in {getattr(node, "name", None) for node in body}, f"{file} defines no {name}"


@functools.cache
def texts_of_the_code() -> str:
    """Returns all texts of the code. Values inside f-strings become zero bytes."""
    parts = []
    for path in sorted((REPOSITORY / "rltrain").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts.append("".join(v.value if isinstance(v, ast.Constant) else "\0" for v in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                parts.append(node.value)
    return "\n".join(parts)


def quoted_messages() -> list[str]:
    rows = [line for line in (DOCS / "troubleshooting.md").read_text().splitlines() if line.startswith("| `")]
    return [quoted for row in rows for quoted in re.findall(r"`([^`]+)`", row.split(" | ")[0])]


@pytest.mark.parametrize("words", quoted_messages())
def test_troubleshooting_quotes_what_the_code_says(words: str) -> None:
    assert words in texts_of_the_code()


def test_every_benchmark_stands_on_the_page_of_their_commands() -> None:
    page = (DOCS / "benchmarks/commands.md").read_text()
    runnable = [path for path in (REPOSITORY / "tools/benchmarks").glob("*.py") if "__main__" in path.read_text()]
    assert runnable and not [path.name for path in runnable if path.name not in page]


UNTESTED = "not tested"


def marks_of(test: str) -> list[str]:
    """Returns the marks of a test, FILE::FUNCTION, and of its file, as source text. Raises if there is no such test."""
    file, function = test.split("::")
    body = ast.parse((REPOSITORY / file).read_text()).body
    [found] = [node for node in body if isinstance(node, ast.FunctionDef) and node.name == function]
    assert function.startswith("test_")
    of_file = [
        node.value for node in body if isinstance(node, ast.Assign) and "pytestmark" in ast.unparse(node.targets[0])
    ]
    return [ast.unparse(mark) for mark in (*found.decorator_list, *of_file)]


def test_every_cell_of_the_engines_features_has_a_test_that_runs() -> None:
    """A test may need an environment or a GPU. None is skipped everywhere."""
    section = (DOCS / "engines.md").read_text().split("## Features by engine\n")[1].split("\n## ")[0]
    table, _, comment = section.partition("<!-- ")
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if line.startswith("|")
    ]
    tests: dict[str, list[str]] = yaml.safe_load(comment.split("\n", 1)[1].split("-->")[0])
    assert [name.split(" ([")[0] for name, *_ in rows[2:]] == [*tests], "the rows have the same names"
    for name, *cells in rows[2:]:
        named = tests[name.split(" ([")[0]]
        assert len(named) == len(cells) == len(rows[0]) - 1, name
        for cell, of_cell in zip(cells, named, strict=True):
            assert (cell == UNTESTED) is (of_cell == UNTESTED), f"{name}: {cell}"
            for test in of_cell.split() if of_cell != UNTESTED else ():
                assert not [mark for mark in marks_of(test) if re.search(r"mark\.(skip|xfail)\b", mark)], test


def test_a_test_that_is_none_has_no_marks() -> None:
    assert marks_of("tests/end_to_end/test_serve.py::test_a_checkpoint_is_served_until_a_signal") is not None
    for wrong in ("tests/unit/test_http_engine.py::test_none", "tests/unit/test_none.py::test_none"):
        with pytest.raises((ValueError, FileNotFoundError)):
            marks_of(wrong)


def test_every_dependency_has_a_row_with_its_bound() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    page = (DOCS / "dependencies.md").read_text()
    needed, optional, for_tests = (
        dict(re.findall(r"^\|(?: `\w+` \|)? ([\w, -]+) \|(.*)$", part, re.MULTILINE)) for part in page.split("\n## ")
    )
    extras = dict(project["optional-dependencies"])
    dev = {name: "" for names in for_tests for name in names.split(", ")}
    of_tables = ((project["dependencies"], needed), (extras.pop("dev"), dev), (sum(extras.values(), []), optional))
    for requirements, rows in of_tables:
        for name, operator, version in re.findall(r"^([\w-]+?)(?:(>=|==)([\d.]+).*)?$", "\n".join(requirements), re.M):
            assert name in rows, f"docs/dependencies.md has no row of {name}"
            said = {"==": f"exactly {version}:", ">=": f" {version}:"}.get(operator, "")
            assert rows is dev or said in rows[name], f"the lower bound of {name}"
    assert len(needed) == len(project["dependencies"]) + 1, "one row per dependency, plus the heading"


def test_every_page_stands_in_the_navigation() -> None:
    """mkdocs also warns about missing pages, but it may not be installed."""
    navigation = (REPOSITORY / "mkdocs.yml").read_text().partition("\nnav:")[2]
    pages = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md") if ".template." not in path.name}
    assert pages == set(re.findall(r"\S+\.md", navigation))
    assert yaml.safe_load(f"nav:{navigation}")


def test_the_site_builds_without_a_warning_and_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    loaded = re.compile(r"<(?:script|img|iframe|source)[^>]*\ssrc=\"?(https?:)?//|<link[^>]*rel=\"?stylesheet[^>]*//")
    for page in (tmp_path / "site").rglob("*.html"):
        assert not loaded.search(page.read_text()), page


COMMANDS = [command for page in PAGES for command in commands(page)]

RUN_ELSEWHERE = {
    "pip install -e .": "tests/run.sh installs so before any test runs",
    ".venv/bin/pre-commit install": "changes the clone's hooks; .pre-commit-config.yaml calls what --lint calls",
    "python3 -m venv ENV && ENV/bin/pip install -r launch/constraints-sglang.txt": "what launch/environment.sh does",
    "mkdocs serve": "test_documentation.py builds the site",
}
"""Commands without a parser of rltrain, and the check of each."""

NEEDS_GPUS = {"configs/gsm8k_qwen3_0.6b.yaml": "Qwen3-0.6B at full batch; test_gsm8k.py runs gsm8k_tiny.yaml"}
"""Configs named by commands that no test runs in full. Their commands are checked like all others."""

RUN = (
    "rltrain doctor",
    "python -m rltrain.sandbox.means",
    "python examples/",
    "python tools/make_",
    *(f"rltrain convert {what}" for what in ("hf-to-megatron", "megatron-to-hf", "inspect", "verify")),
)
"""Prefixes of commands without need for a GPU or minutes. `run-to-hf` needs a run, as in test_convert_checkpoint.py."""

QUICKSTART = "configs/quickstart.yaml"
NO_COMMANDS = ("    ", " ", "ranks 0-7: peak", "launch/  ", "sequential ", "ids  ", "{")
"""Prefixes of blocks without commands."""


class Parsed(Exception):  # noqa: N818 - not an error, but the end of parsing
    def __init__(self, values: argparse.Namespace) -> None:
        self.values = values


@pytest.fixture
def parse(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[..., Any], list[str]], argparse.Namespace]:
    """Returns a function that parses arguments with the parser of a main function. The main function stops after
    parsing."""
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
    """Replaces N, R and PORT by numbers."""
    return ["1" if word in ("N", "R", "PORT") else word for word in words if word != "key=value"]


def alternatives(words: list[str]) -> list[list[str]]:
    """Returns one command for each of "a|b|c"."""
    [varied] = [i for i, word in enumerate(words) if re.fullmatch(r"\w+(\|\w+)+", word)] or [None]
    if varied is None:
        return [words]
    return [[*words[:varied], choice, *words[varied + 1 :]] for choice in words[varied].split("|")]


def main_of(path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Returns the main function of a script, with its neighbours importable. If the script runs a subcommand, returns
    that."""
    if subcommand := RUNS.search(path.read_text()):
        return functools.partial(run_script, subcommand[1])
    monkeypatch.syspath_prepend(str(path.parent))
    spec = importlib.util.spec_from_file_location(f"documented_{path.stem}", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    main: Callable[..., Any] = module.main
    return main


def world_of(text: str) -> tuple[int, int]:
    """Returns the ranks of a command and the ranks per node. Takes the largest number of a range of nodes."""
    per_node = re.search(r"--nproc-per-node[ =](\d+)", text)
    nodes = re.search(r"--(?:nnodes|nodes)[ =](?:\d+:)?(\d+)", text)
    ranks = int(per_node[1]) if per_node else 8 if nodes else 1
    return ranks * int(nodes[1] if nodes else 1), ranks


def check_config(values: argparse.Namespace, command: Command, folder: Path) -> None:
    """Makes the dry run in the empty `folder`. Uses the quickstart's config for a reader's own config.

    Raises UserError if the job is refused.
    """
    config, overrides = getattr(values, "config", None), getattr(values, "overrides", [])
    if config is None:
        return
    world = world_of(command.text)
    if is_placeholder(str(config)) or str(config) in made_before(command) | shown_on(command.page):
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
    if script.name == "gpu_check.sh":  # starts gpu_check.py
        parse(main_of(script.with_suffix(".py"), monkeypatch), arguments)
        return
    options = {argument for argument in arguments if argument.startswith("--")}
    assert all(f"{option})" in script.read_text() for option in options), f"{script.name} has not all of {options}"
    if script.name == "quickstart.sh":
        overrides = [argument.replace("$PWD", str(REPOSITORY)) for argument in arguments if "=" in argument]
        load_config(REPOSITORY / "configs/quickstart.yaml", overrides)
    paths = [argument for argument in arguments if "/" in argument and "=" not in argument]
    assert all((REPOSITORY / path).exists() for path in paths), paths


def made_before(command: Command) -> set[str]:
    """Returns the files made by commands of the same page."""
    return {other.makes for other in COMMANDS if other.page == command.page and other.makes}


def shown_on(page: str) -> set[str]:
    """Returns the files shown on a page. Their configs are checked as examples."""
    return {str(example.file) for example in EXAMPLES if example.page == page and example.file is not None}


def test_the_readme_begins_with_the_main_job_and_the_tests_and_ci_runs_both() -> None:
    assert first_commands(REPOSITORY / "README.md") == ["bash launch/quickstart.sh", "bash tests/run.sh"]
    assert "tests.support.documented_commands" in (REPOSITORY / ".ci/run").read_text()


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


ASKS_SERVERS = "rltrain doctor --config"
"""A command for a reader's own servers. test_doctor_servers.py runs it on stand-ins."""


@pytest.mark.slow
@pytest.mark.parametrize("page", dict.fromkeys(command.page for command in COMMANDS if command.text.startswith(RUN)))
def test_the_commands_of_a_page_run_one_after_the_other(page: str, tmp_path: Path) -> None:
    for name in ("configs", "examples", "launch", "tools"):
        (tmp_path / name).symlink_to(REPOSITORY / name)
    programs = {"rltrain": [sys.executable, "-m", "rltrain"], "python": [sys.executable]}
    for command in COMMANDS:
        if command.page == page and command.text.startswith(RUN) and not command.text.startswith(ASKS_SERVERS):
            program, *rest = with_numbers(command.words())
            done = run([*programs[program], *with_folders(rest)], 600, folder=tmp_path)
            assert done.returncode == 0, f"{command.text}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"


def with_folders(words: list[str]) -> list[str]:
    """Returns the words with a checkpoint for HF_DIR and a folder for outputs."""
    given = {"HF_DIR": str(REPOSITORY / "tests/warmed_up"), "DIR": "made"}
    made = {"HF_DIR": "made_hf", "DIR": "made"}
    pairs = zip(["", *words], words, strict=False)
    return [(made if before == "--output" else given).get(word, word) for before, word in pairs]


def of_module(program: str, rest: list[str]) -> tuple[str, list[str]]:
    """Expands `python -m rltrain` and `torchrun ... -m rltrain`."""
    if program in ("python", "torchrun") and "-m" in rest and rest[rest.index("-m") + 1] == "rltrain":
        return "rltrain", rest[rest.index("-m") + 2 :]
    return program, rest


def check(command: Command, parse: Any, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Raises AssertionError, or the error of the reading program, if the command is wrong."""
    words = command.words()
    if " ".join(words) in RUN_ELSEWHERE:
        return
    for program, *rest in alternatives(words):
        rest = with_numbers(rest)
        program, rest = of_module(program, rest)
        if program == "rltrain":
            check_config(parse(main, rest), command, folder)
        elif program == "python" and rest[0] == "-m":
            assert importlib.util.find_spec(rest[1]), rest[1]
        elif program == "sbatch":
            check_config(parse(functools.partial(run_script, "train"), script_and_rest(rest)[1]), command, folder)
        elif program == "bash":
            check_shell_script(*script_and_rest(rest), parse, monkeypatch)
        else:
            script, arguments = script_and_rest(rest)
            if program == "torchrun":
                words_of_torchrun = rest[: rest.index(script.relative_to(REPOSITORY).as_posix()) + 1]
                _, unknown = get_args_parser().parse_known_args(words_of_torchrun)
                assert not unknown, unknown
            if script.parent.name == "examples":
                load_config(REPOSITORY / "configs/quickstart.yaml", arguments)
                continue
            check_config(parse(main_of(script, monkeypatch), arguments), command, folder)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_block_for_a_shell_is_overlooked(page: Path) -> None:
    """A block has only commands or none. Or it begins with a command after "$ " and shows its output."""
    for block in blocks(page):
        lines = [line for line in re.sub(r"\\\n\s*", " ", block).splitlines() if line.strip()]
        known = [bool(program_of(line)) for line in lines]
        shown = lines[0].startswith("$ ") and known[0]
        assert all(known) or shown or (not any(known) and block.startswith(NO_COMMANDS)), block


def test_what_needs_gpus_is_named_by_a_command() -> None:
    assert COMMANDS
    for config in NEEDS_GPUS:
        assert (REPOSITORY / config).is_file() and any(config in command.text for command in COMMANDS)


WORLDS = (8, 16)
GPU_KEYS = ("memory_gb", "tflops")
ROW = {
    **{"prompt": "1+1=", "label": "2", "response": "2", "question": "Why?", "answer": "So.", "level": 1},
    "teacher": "math",
    "messages": [{"role": "user", "content": "Hi."}, {"role": "assistant", "content": "Hello."}],
    "tools": [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}],
}
READERS_FILES = ("my_reward.py", "rewards/form.py")
"""Files of functions that pages leave to their reader."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Returns the working directory with a reader's files: a tokenizer, rows and functions."""
    monkeypatch.chdir(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path / "model")
    for name in ("rows.jsonl", "gsm8k/train.jsonl", "train.jsonl", "eval.jsonl", "aime.jsonl", "talks.jsonl"):
        rows = tmp_path / name
        rows.parent.mkdir(exist_ok=True)
        rows.write_text(f"{json.dumps(ROW)}\n" * 8)
    for name in READERS_FILES:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("def score(prompt, response, label):\n    return 0.0\n")
    (tmp_path / "configs").symlink_to(REPOSITORY / "configs")
    return tmp_path


def read(text: str) -> dict[str, Any]:
    """Returns the values of YAML, read like a config."""
    path = Path("block.yaml")
    path.write_text(text)
    return read_source(path).data


def refusals(example: Example, values: Mapping[str, Any]) -> Iterator[str]:
    """Yields the reasons of refusals of the config, for each of WORLDS."""
    for world in WORLDS:
        try:
            describe(validated(Source(dict(values), example.title)), DryRunOptions(world, 8))
        except UserError as error:
            yield f"{world} ranks: {error}"


def check_example(example: Example) -> None:
    """Raises AssertionError if no reader can use the config."""
    own = read(example.text)
    if own.keys() >= {*GPU_KEYS}:
        gpu_named("block.yaml")
        return
    said = []
    for values in configs_of(example, read):
        found = [*refusals(example, values)]
        if len(found) < len(WORLDS):
            return
        said += found
    raise AssertionError("\n".join([f"{example.title} is refused:", *dict.fromkeys(said)]))


@pytest.mark.parametrize("example", of_language("yaml"), ids=lambda example: example.title)
def test_a_config_is_accepted(example: Example, folder: Path) -> None:
    write_files(example.page, folder)
    check_example(example)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("rollout: {engin: sglang}", "engin: unknown key"),
        ("actor: {optimizer: {name: adamw, muon: {momentum: 0.9}}}", "optimizer.muon"),
        ("reward: {function: 'missing.py:score'}", "there is no file 'missing.py'"),
        ("data: {train: {path: rows.jsonl, label_key: labels}}", "no key 'labels'"),
        ("data: {train: {path: rows.jsonl, prompt_key: empty}}", "no key 'empty'"),
    ],
)
def test_a_config_that_is_refused_is_found(text: str, expected: str, folder: Path) -> None:
    with pytest.raises(AssertionError, match=expected):
        check_example(Example("README.md", 0, "yaml", text, ""))


SETTINGS = [one for page in PAGES if page.parent.name != "coming_from" for one in settings_of(page)]
"""Settings on all pages except coming_from/. Those pages also quote settings of other trainers."""
STANDS_FOR_VALUES = {
    "advantages.overlong_penalty: {buffer_tokens: B, factor: f}": "letters for numbers",
    "preference.center_coef: c": "a letter for a number",
    "loss.kl.adaptive: {target, horizon}": "names of keys",
}


@pytest.mark.parametrize(("page", "setting"), [one for one in SETTINGS if one[1] not in STANDS_FOR_VALUES])
def test_a_setting_in_a_sentence_is_one(page: str, setting: str) -> None:
    source = Source(copy.deepcopy({**BASE, "placement": {"actor": 0}}), page)
    for override in overrides_of(setting):
        source.override(override)
    validated(source)


@pytest.mark.parametrize("example", of_language("json"), ids=lambda example: example.title)
def test_rows_are_json(example: Example) -> None:
    assert all(isinstance(json.loads(line), dict) for line in example.text.splitlines())


PROGRAMS = [example for example in of_language("python") if example.file is None]
"""Python blocks to run. Blocks with a file name are used by configs and programs of their page."""


@pytest.mark.parametrize("example", PROGRAMS, ids=lambda example: example.title)
def test_a_program_runs(example: Example, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if example.page == "docs/sandbox.md" and not any(finding.works for finding in means().values()):
        pytest.skip("this machine has no sandbox")
    write_files(example.page, folder)
    (folder / "program.py").write_text(example.text)
    monkeypatch.setattr(sys, "argv", ["program.py"])
    runpy.run_path("program.py", run_name="__main__")


@pytest.mark.slow
@pytest.mark.parametrize("page", ["docs/endpoint.md", "docs/hooks.md"])
def test_the_agent_of_the_page_is_an_episode(page: str, folder: Path) -> None:
    write_files(page, folder)
    config = yaml.safe_load(next(one.text for one in of_language("yaml") if one.page == page and "agent:" in one.text))
    with endpoint(lambda context: f"I say: {ROW['answer']}") as served:
        opened = served.server.open_session(None, seed=3)
        session = {"url": f"{served.url}/sessions/{opened.id}", "token": opened.token}
        agent = AgentEnvironment(**config["env"]["agent"], sandbox="none", limits={"wall_s": 300})
        (result,) = asyncio.run(agent.reset([{**ROW, SESSION: session}], [0]))
        assert isinstance(result, StepResult) and (result.reward, result.info["rewarded"]) == (1.0, 1.0)
        assert len(served.record(opened.id).trajectories) == 1


def test_what_stands_for_values_is_on_a_page() -> None:
    assert STANDS_FOR_VALUES.keys() <= {setting for _, setting in SETTINGS} and len(SETTINGS) > 50


def test_every_block_is_of_a_known_kind() -> None:
    """Blocks without a language are commands or show output. test_documentation.py checks them."""
    unknown = [example.title for example in EXAMPLES if example.language not in ("", "text", "yaml", "python", "json")]
    assert not unknown
