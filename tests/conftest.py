"""Hooks for all tests: the collected files, their order, and forking of processes."""

import functools
import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests.forked.popen import SETTING, forks, start_zygote
from tests.forked.zygote import RARE_COLLECTIONS
from tests.support import triton_interpreter

triton_interpreter.interpret()  # before any test imports Triton

# Property tests have fewer examples than usual and no deadline. A shared machine would exceed one at random.
settings.register_profile("shared machine", parent=settings(), deadline=None, max_examples=20)
settings.load_profile("shared machine")

GLOO_LAZY = "TORCH_GLOO_LAZY_INIT"
FOLDERS = ("end_to_end", "distributed", "sglang", "unit", "gpu")
LONGEST = (
    "test_orders.py",
    "test_resume.py",
    "test_faults.py",
    "test_learning.py",
    "test_weights.py",
    "test_process.py",
    "test_jobs.py",
    "test_training.py",
    "test_reshard.py",
    "test_benchmarks.py",
    "test_embedded_decoder.py",
)
"""These files come first in their folders. A missing or superfluous entry costs nothing but time."""


@pytest.fixture(autouse=True)
def as_a_user_starts_them(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Starts the processes of tests marked `by_command_line` without forking."""
    if request.node.get_closest_marker("by_command_line"):
        monkeypatch.setenv(SETTING, "off")


@pytest.fixture(autouse=True)
def as_kernels_read_numbers() -> None:
    """Mends Triton's interpreter for tests whose files import Triton."""
    triton_interpreter.mend()


@pytest.fixture(autouse=True)
def as_gloo_connects_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Starts each test without a setting left by a rank in this process. Both ends of a group must connect alike."""
    monkeypatch.setenv(GLOO_LAZY, "")  # restores the old value after the test
    monkeypatch.delenv(GLOO_LAZY)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes() -> None:
    """Starts one zygote for all workers. It imports while they collect."""
    if forks():
        start_zygote()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Excludes imported objects from garbage collection, because they stay until the end."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()
        gc.set_threshold(*RARE_COLLECTIONS)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Skips files without slow tests if only slow tests are selected, to save their imports."""
    asked_for: str = config.option.markexpr
    slow_alone = asked_for.split(" ")[0] == "slow" and " or " not in asked_for
    is_tests = collection_path.name.startswith("test_") and collection_path.suffix == ".py"
    return True if slow_alone and is_tests and not marks_slow(collection_path) else None


@functools.cache
def marks_slow(path: Path) -> bool:
    return any(said in path.read_text() for said in ("pytest.mark.slow", "slow_but("))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Runs the longest tests first, so that no worker is left with one at the end."""
    unsaid = {str(item.path) for item in items if item.get_closest_marker("slow") and not marks_slow(item.path)}
    assert not unsaid, f"write pytest.mark.slow in {unsaid}: otherwise a run of slow tests skips them"
    items.sort(key=lambda item: place_of(item.path))


def place_of(path: Path) -> tuple[int, int]:
    folder = FOLDERS.index(path.parent.name) if path.parent.name in FOLDERS else len(FOLDERS)
    return folder, LONGEST.index(path.name) if path.name in LONGEST else len(LONGEST)
