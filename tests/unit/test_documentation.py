"""The pages in docs/: what they quote exists, what is made from the code is as the code has it, and the site builds."""

import ast
import functools
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from rltrain.config.explain import all_keys
from rltrain.config.key_reference import COMMAND, docstrings, document
from rltrain.config.schema import Schedule

REPOSITORY = Path(__file__).resolve().parents[2]
DOCS = REPOSITORY / "docs"


def test_the_config_reference_is_the_schema() -> None:
    assert (DOCS / "config.md").read_text() == document() + "\n", f"run: {COMMAND}"


def test_the_config_reference_has_every_key() -> None:
    """Of a section that several keys have, the first has its keys."""
    text = document()
    explained_elsewhere = [
        line.split("`")[1].replace("[]", "") for line in text.splitlines() if "Its keys are those of" in line
    ]
    named = {name.replace("[]", "") for name in re.findall(r"^\| `([^`]+)`", text, flags=re.MULTILINE)}
    expected = {key for key in all_keys() if not any(key.startswith(f"{other}.") for other in explained_elsewhere)}
    assert expected - named == {name for name in expected if f"## {name}\n" in text}


def test_docstrings_of_attributes_are_read_with_those_of_the_classes_that_a_section_is_made_from() -> None:
    assert docstrings(Schedule)["partial_rollouts"].startswith(
        "A generate task ends when enough prompt groups are done"
    )
    assert "mode" in docstrings(Schedule) and "steps" not in docstrings(Schedule)


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
    """All that the code may say, the parts of a text that stand for values left out."""
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


def test_every_page_stands_in_the_navigation() -> None:
    """mkdocs warns of it too, where it is installed."""
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
