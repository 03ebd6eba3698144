"""How SGLang's environment comes to be and how its tests are run; stand-ins replace what the scripts call."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.forked import popen as forked
from tests.unit.script_stand_ins import (
    INTERPRETER,
    REPOSITORY,
    prepare_script,
    repository_with_venv,
    run,
    stand_ins,
    started,
    write_program,
)


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    for name in ("chromium", "bwrap", "slurmctld", "munged", "ip"):  # nothing of the system is to be installed
        write_program(tmp_path / "bin" / name, "#!/usr/bin/env bash\n")
    write_program(tmp_path / "bin" / "python3", INTERPRETER)
    return stand_ins(tmp_path)


def repository_with_sglang_venv(folder: Path) -> tuple[Path, Path]:
    """(script that prepares SGLang's environment, what stands for SGLang once it is installed there)."""
    script = repository_with_venv(folder)
    (folder / ".venv").rename(folder / ".venv-sglang")
    script = prepare_script(folder, "prepare_sglang\necho ready: $sglang_python\n")
    return script, folder / ".venv-sglang" / "bin" / "sglang_is_installed"


PYTEST = ["-m", "pytest", "-n", "3", "--dist", "loadfile", "--no-loadscope-reorder"]
OF_CI = [["-n", "2", "-m", "slow and not alone"], ["-n", "0", "-m", "slow and alone"]]
WITH_SGLANG, WITH_SLURM = ["-n", "0", "tests/sglang", "-m", "slow or not slow"], ["-n", "0", "tests/slurm", "-rs"]
"""Beside the slow ones."""


def stamps(script: Path) -> list[str]:
    return [path.name for path in (script.parent / ".venv-sglang").glob(".installed-*")]


def test_sglang_is_installed_once_and_again_when_its_version_moves(environment: dict[str, str], tmp_path: Path) -> None:
    script, sglang = repository_with_sglang_venv(tmp_path / "repository")
    pins = script.parent / "launch" / "constraints-sglang.txt"

    def installs() -> list[list[str]]:
        Path(environment["FAKE_LOG"]).write_text("")
        done = run(environment, script.name, cwd=script.parent)
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines()[-1] == f"ready: {script.parent}/.venv-sglang/bin/python"
        return [note["arguments"] for note in started(environment) if "install" in note["arguments"]]

    [arguments] = installs()
    assert arguments[-2:] == ["--requirement", str(pins)]
    assert stamps(script) == [f".installed-{pins.read_text().splitlines()[-1]}"]
    assert installs() == []
    pins.write_text("sglang==9.9.9\n")
    sglang.unlink()  # what is there is another version
    assert len(installs()) == 1


def test_a_complete_sglang_that_was_installed_by_hand_is_kept(environment: dict[str, str], tmp_path: Path) -> None:
    script, sglang = repository_with_sglang_venv(tmp_path / "repository")
    sglang.touch()
    done = run(environment, script.name, cwd=script.parent)
    assert done.returncode == 0, done.stderr
    assert not Path(environment["FAKE_LOG"]).exists(), "pip was not asked"
    assert len(stamps(script)) == 1


def test_an_interrupted_installation_of_sglang_is_taken_up_again(environment: dict[str, str], tmp_path: Path) -> None:
    script, _ = repository_with_sglang_venv(tmp_path / "repository")
    failed = run(environment | {"FAKE_FAIL_AT": "constraints-sglang"}, script.name, cwd=script.parent)
    assert failed.returncode == 1 and "stopped at: install sglang==" in failed.stderr
    assert stamps(script) == []
    assert run(environment, script.name, cwd=script.parent).returncode == 0
    assert len(stamps(script)) == 1


@pytest.mark.parametrize(("free_gb", "status"), [(15, 1), (16, 0)])
def test_sglang_is_installed_only_where_it_fits(
    environment: dict[str, str], tmp_path: Path, free_gb: int, status: int
) -> None:
    script, _ = repository_with_sglang_venv(tmp_path / "repository")
    write_program(
        tmp_path / "bin" / "df", f"#!/usr/bin/env bash\necho Filesystem\necho /dev/disk 9 9 {free_gb * 2**20} 9% /\n"
    )
    done = run(environment, script.name, cwd=script.parent)
    assert done.returncode == status, done.stderr
    if status:
        assert "takes 16 GB of disk" in done.stderr and "has 15 GB free" in done.stderr
        assert not Path(environment["FAKE_LOG"]).exists(), "pip was not asked"


def with_sglang_python(environment: dict[str, str], folder: Path, *, installed: bool) -> dict[str, str]:
    interpreter = write_program(folder / "sglang" / "python", INTERPRETER)
    if installed:
        interpreter.with_name("sglang_is_installed").touch()
    return environment | {"RLTRAIN_SGLANG_PYTHON": str(interpreter)}


@pytest.mark.parametrize(
    ("given", "to_pytest"),
    [
        (["--sglang"], ["-n", "0", "tests/sglang"]),
        (["--slurm"], ["-n", "0", "tests/slurm"]),
        (["--sglang", "-m", "slow"], ["-n", "0", "tests/sglang", "-m", "slow"]),
        (["--sglang", "tests/sglang/test_process.py", "-x"], ["-n", "0", "tests/sglang/test_process.py", "-x"]),
        (["tests/unit"], ["tests/unit"]),
        ([], []),
    ],
)
def test_the_tests_with_sglang_run_with_its_python(
    environment: dict[str, str], tmp_path: Path, given: list[str], to_pytest: list[str]
) -> None:
    environment = with_sglang_python(environment, tmp_path, installed=True)
    done = run(environment, "tests/run.sh", *given)
    assert done.returncode == 0, done.stderr
    [note] = started(environment)
    assert note["arguments"] == [*PYTEST, *to_pytest]
    assert (note["RLTRAIN_SGLANG_PYTHON"], note["OMP_NUM_THREADS"]) == (environment["RLTRAIN_SGLANG_PYTHON"], "1")


def test_a_python_without_sglang_is_refused(environment: dict[str, str], tmp_path: Path) -> None:
    environment = with_sglang_python(environment, tmp_path, installed=False)
    done = run(environment, "tests/run.sh", "--sglang")
    assert done.returncode == 1
    assert "RLTRAIN_SGLANG_PYTHON" in done.stderr and "install sglang==" in done.stderr
    assert not Path(environment["FAKE_LOG"]).exists()


OF_CI_FILES = (
    *(".ci/run", "README.md", "pyproject.toml", "setup.py", "launch", "tests/run.sh"),
    *("tests/__init__.py", "tests/unit/__init__.py", "tests/unit/documented_commands.py"),
)


def run_ci(
    environment: dict[str, str], folder: Path, versions: str = "exit 0"
) -> tuple[subprocess.CompletedProcess[str], list[list[str]]]:
    """Returns (.ci/run, what it gave to pytest each time). It runs in a copy with a runs/ of its own.

    `versions` is what tests/versions.sh does there.
    """
    for name in OF_CI_FILES:
        target = folder / "copy" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        (shutil.copytree if (REPOSITORY / name).is_dir() else shutil.copy)(REPOSITORY / name, target)
    (folder / "copy/tests/versions.sh").write_text(f"{versions}\n")
    done = run(environment, ".ci/run", cwd=folder / "copy")
    notes = [note["arguments"] for note in started(environment)]
    tested = [arguments[len(PYTEST) :] for arguments in notes if arguments[: len(PYTEST)] == PYTEST]
    assert ["tests/lint.py"] in notes
    return done, [arguments for arguments in tested if arguments != ["--version"]]


def test_ci_runs_the_tests_with_sglang_too(environment: dict[str, str], tmp_path: Path) -> None:
    done, tested = run_ci(with_sglang_python(environment, tmp_path, installed=True), tmp_path)
    assert done.returncode == 0, done.stderr
    assert [arguments for arguments in tested if arguments in (WITH_SGLANG, WITH_SLURM)] == [WITH_SGLANG, WITH_SLURM]
    assert [arguments for arguments in tested if arguments not in (WITH_SGLANG, WITH_SLURM)] == [[], *OF_CI]


def test_ci_says_where_sglang_cannot_be_installed(environment: dict[str, str], tmp_path: Path) -> None:
    done, tested = run_ci(with_sglang_python(environment, tmp_path, installed=False), tmp_path)
    assert done.returncode == 0, done.stderr
    assert [arguments for arguments in tested if arguments != WITH_SLURM] == [[], *OF_CI]
    assert re.search(r"has no sglang.*\nthe tests with SGLang were not run", done.stdout)


@pytest.mark.parametrize(
    ("versions", "status", "said"),
    [
        ("exit 3", 0, "the numeric tests with the newest Megatron were not run"),
        ("[[ $2 == --prepare ]]", 1, "failed: numeric tests with the newest Megatron"),
        ('echo "versions.sh $*"', 0, "versions.sh newest --numeric"),
    ],
)
def test_ci_runs_numeric_tests_with_the_newest_megatron_where_it_can_be_had(
    environment: dict[str, str], tmp_path: Path, versions: str, status: int, said: str
) -> None:
    done, _ = run_ci(with_sglang_python(environment, tmp_path, installed=True), tmp_path, versions)
    assert done.returncode == status
    assert said in done.stdout + done.stderr


def test_ci_runs_everything_and_names_what_failed(environment: dict[str, str], tmp_path: Path) -> None:
    environment = with_sglang_python(environment, tmp_path, installed=True)
    calls = {"not alone": "slow tests", "lint.py": "lint", "tests/sglang": "tests with SGLang"}
    calls["tests/slurm"] = "tests with Slurm"
    done, tested = run_ci(environment | {"FAKE_FAIL_AT": "|".join(calls)}, tmp_path)
    assert done.returncode == 1 and len(tested) == 5
    assert done.stderr.splitlines()[-4:] == [f"failed: {stage}" for stage in calls.values()]


@pytest.mark.parametrize(
    ("arguments", "python", "status", "said"),
    [
        (["tests"], "any", 0, "tests/sglang was not collected; to run it: bash tests/run.sh --sglang"),
        (["tests/sglang"], "any", 1, "1 failed"),
        (["tests/sglang/test_it.py::test_it"], "any", 1, "1 failed"),
        (["tests/sglang"], "", 4, "needs RLTRAIN_SGLANG_PYTHON; bash tests/run.sh --sglang makes"),
    ],
)
def test_tests_with_sglang_are_collected_where_they_are_asked_for(
    tmp_path: Path, arguments: list[str], python: str, status: int, said: str
) -> None:
    """In a suite of one test there, which fails, and one beside it."""
    for name in ("__init__.py", "conftest.py"):
        target = tmp_path / "tests" / "sglang" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(REPOSITORY / "tests" / "sglang" / name, target)
    (tmp_path / "tests" / "sglang" / "test_it.py").write_text("def test_it(): assert False")
    (tmp_path / "tests" / "test_other.py").write_text("def test_other(): pass")
    done = forked.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments],
        timeout_s=240,
        environment={"RLTRAIN_SGLANG_PYTHON": python},
        folder=tmp_path,
    )
    assert done.returncode == status, done.stdout + done.stderr
    assert said in done.stdout + done.stderr
