"""The quickstart's files and its warmed-up checkpoint, made once for all end-to-end tests."""

import sys
from pathlib import Path

import pytest

from tests.end_to_end.jobs import REPOSITORY, run, train


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
def warm_up(quickstart_files: Path, data_overrides: list[str], tmp_path_factory: pytest.TempPathFactory):
    """(folder of the supervised warm-up's output, its metrics)."""
    folder = tmp_path_factory.mktemp("sft")
    records = train(
        REPOSITORY / "configs/quickstart_sft.yaml",
        f"model.path={quickstart_files}/model",
        f"output_dir={folder}",
        *data_overrides,
    )
    return folder, records
