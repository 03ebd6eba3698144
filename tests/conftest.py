"""For all tests: which files are read and in what order, and whether their processes are forked."""

import functools
import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests.forked.popen import SETTING, forks, start_zygote
from tests.forked.zygote import RARE_COLLECTIONS

# Property tests have fewer examples than is usual, and no limit of time for one: a shared machine breaks it at random.
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
"""First in their folders. An entry that is missing or too much costs time and nothing else."""


@pytest.fixture(autouse=True)
def as_a_user_starts_them(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The processes of a test marked `by_command_line` are not forked."""
    if request.node.get_closest_marker("by_command_line"):
        monkeypatch.setenv(SETTING, "off")


@pytest.fixture(autouse=True)
def as_gloo_connects_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that a test has in this process leaves nothing to the next: both ends of a group must connect alike."""
    monkeypatch.setenv(GLOO_LAZY, "")  # so that it is as before when the test is over
    monkeypatch.delenv(GLOO_LAZY)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes() -> None:
    """One zygote for all workers, which imports while they collect."""
    if forks():
        start_zygote()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """What tests import stays until the end: the collector need not look through it again and again."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()
        gc.set_threshold(*RARE_COLLECTIONS)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Where slow tests alone are asked for, a file that marks none is not read: its imports are saved."""
    asked_for: str = config.option.markexpr
    slow_alone = asked_for.split(" ")[0] == "slow" and " or " not in asked_for
    is_tests = collection_path.name.startswith("test_") and collection_path.suffix == ".py"
    return True if slow_alone and is_tests and not marks_slow(collection_path) else None


@functools.cache
def marks_slow(path: Path) -> bool:
    return any(said in path.read_text() for said in ("pytest.mark.slow", "slow_but("))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Those that take longest come first, so that no worker is left alone with one at the end."""
    unsaid = {str(item.path) for item in items if item.get_closest_marker("slow") and not marks_slow(item.path)}
    assert not unsaid, f"write pytest.mark.slow in {unsaid}: where slow tests are asked for, they would be left out"
    items.sort(key=lambda item: place_of(item.path))


def place_of(path: Path) -> tuple[int, int]:
    folder = FOLDERS.index(path.parent.name) if path.parent.name in FOLDERS else len(FOLDERS)
    return folder, LONGEST.index(path.name) if path.name in LONGEST else len(LONGEST)
