"""The quickstart's files and its warmed-up checkpoint, for all end-to-end tests."""

import sys
from pathlib import Path

import pytest

from tests.end_to_end.jobs import REPOSITORY, run


@pytest.fixture(scope="session")
def quickstart_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with model/, train.jsonl and eval.jsonl."""
    folder = tmp_path_factory.mktemp("quickstart")
    done = run([sys.executable, "tools/make_quickstart.py", "--output", str(folder / "start"), "--seed", "0"], 120)
    assert done.returncode == 0, done.stderr
    return folder / "start"


@pytest.fixture(scope="session")
def data_overrides(quickstart_files: Path) -> list[str]:
    return [f"data.train.path={quickstart_files}/train.jsonl", f"data.eval.path={quickstart_files}/eval.jsonl"]


@pytest.fixture(scope="session")
def warmed_up() -> Path:
    """A checkpoint of the quickstart's warm-up: model_path of tests that go on from there.

    `bash launch/quickstart.sh` makes it anew, as runs/quickstart/sft/hf.
    """
    return REPOSITORY / "tests/warmed_up"
