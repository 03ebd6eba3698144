"""Processes that share a conversion meet in a store; here they are threads."""

import io
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType

import pytest
import torch.distributed as dist
from rich.console import Console
from safetensors.torch import save_file

from rltrain.checkpoint.conversion import ConversionProgress, convert_to_hf, first_difference
from rltrain.checkpoint.conversion_sources import HfSource, Processes
from tests.converted_checkpoints import make_checkpoint


@pytest.mark.parametrize("count", [1, 2, 5])
def test_every_process_gets_what_all_gave(count: int) -> None:
    store = dist.HashStore()

    def work(rank: int) -> list[list[bytes]]:
        processes = Processes(rank, count, store)
        processes.meet()
        return [processes.gather(bytes([rank, step])) for step in range(3)]

    with ThreadPoolExecutor(count) as threads:
        found = list(threads.map(work, range(count)))
    assert found == [[[bytes([rank, step]) for rank in range(count)] for step in range(3)]] * count


def test_waiting_hears_signals() -> None:
    """torchrun ends the others with SIGTERM when one has failed, and kills them 30 s later."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise InterruptedError

    previous = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.1)
    try:
        with pytest.raises(InterruptedError):
            Processes(0, 2, dist.HashStore()).meet()
    finally:
        signal.signal(signal.SIGALRM, previous)


def test_three_write_what_one_writes(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "original", "qwen3")
    store = dist.HashStore()

    def work(rank: int) -> None:
        convert_to_hf(HfSource(tmp_path / "original", "--input"), tmp_path / "output", Processes(rank, 3, store))

    with ThreadPoolExecutor(3) as threads:
        list(threads.map(work, range(3)))
    assert len(list((tmp_path / "output").glob("*.safetensors"))) == 3
    sources = [HfSource(tmp_path / name, name) for name in ("original", "output")]
    assert first_difference(*sources, Processes()) is None


def test_the_first_of_all_processes_differences_is_named(tmp_path: Path) -> None:
    tensors = make_checkpoint(tmp_path / "a")
    make_checkpoint(tmp_path / "b")
    for name in list(tensors)[5:]:
        tensors[name] += 1
    save_file(tensors, tmp_path / "b/model.safetensors")
    first = min(list(tensors)[5:], key=HfSource(tmp_path / "a", "A").tensors.numbers.__getitem__)
    store = dist.HashStore()

    def work(rank: int) -> str | None:
        sources = [HfSource(tmp_path / name, name) for name in ("a", "b")]
        return first_difference(*sources, Processes(rank, 3, store))

    with ThreadPoolExecutor(3) as threads:
        found = set(threads.map(work, range(3)))
    assert len(found) == 1
    assert str(found.pop()).startswith(f"{first}[0")


def shown(rank: int, *, terminal: bool) -> str:
    """What one of two processes shows while each does half of 2 MB."""
    store, screen = dist.HashStore(), io.StringIO()
    other = ConversionProgress(Processes(1 - rank, 2, store), "to_hf", 2 * 10**6, console=Console(file=io.StringIO()))
    console = Console(file=screen, force_terminal=terminal, width=120)
    with ConversionProgress(Processes(rank, 2, store), "to_hf", 2 * 10**6, console=console) as bar:
        other.advance(10**6)
        bar.advance(10**6)
    return screen.getvalue()


def test_the_first_process_shows_what_all_have_done() -> None:
    assert "to_hf" in (screen := shown(0, terminal=True))
    assert "2.0/2.0 MB" in screen
    assert shown(1, terminal=True) == ""
    assert shown(0, terminal=False) == ""
