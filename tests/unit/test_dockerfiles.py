"""The images: what a linter that knows BuildKit's grammar says of them, and that the CPU one does what CI does.

Its steps are run by .ci/run, which has no Docker."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.dockerfile_steps import instructions

REPOSITORY = Path(__file__).resolve().parents[2]
DOCKERFILES = sorted((REPOSITORY / "docker").glob("*.Dockerfile"))


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.name)
def test_a_dockerfile_is_free_of_errors_and_warnings(dockerfile: Path) -> None:
    lint = [sys.executable, "-m", "tally_cli", "lint", "--fail-level", "warning", "--slow-checks", "off"]
    done = subprocess.run([*lint, str(dockerfile)], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_linter_finds_what_is_wrong(tmp_path: Path) -> None:
    (tmp_path / "Dockerfile").write_text("FROM python:latest\nRUN apt-get install g++\nENTRYPOINT python\n")
    lint = [sys.executable, "-m", "tally_cli", "lint", "--fail-level", "warning", "--slow-checks", "off"]
    done = subprocess.run([*lint, str(tmp_path / "Dockerfile")], capture_output=True, timeout=60, check=False)
    assert done.returncode != 0


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.name)
def test_what_it_copies_exists_and_nobody_is_root_in_the_end(dockerfile: Path) -> None:
    found = list(instructions(dockerfile.read_text()))
    copied = [word for name, arguments in found if name == "COPY" for word in arguments.split()[:-1]]
    assert copied and all((REPOSITORY / path).exists() for path in copied)
    assert [arguments for name, arguments in found if name == "USER"] == ["1000:1000"]


def test_the_steps_of_the_cpu_image_are_run_in_ci() -> None:
    assert "tests/dockerfile_steps.py docker/cpu.Dockerfile" in (REPOSITORY / ".ci/run").read_text()


def test_files_of_a_build_or_a_run_stay_out_of_images() -> None:
    """Whatever git does not keep, but for what tools leave beside the sources of tests."""
    kept_out = set((REPOSITORY / ".dockerignore").read_text().split())
    for pattern in (".venv", ".venv-sglang", "runs", "build", "*.egg-info", "wandb", ".git"):
        assert pattern in kept_out
    assert "**/*.so" in kept_out, "an image builds its own kernels"
