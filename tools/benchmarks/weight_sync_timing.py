"""Times several collective operations in turn, and says on what machine."""

import ctypes
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

Rival = Callable[[], object]

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # parameters of glibc's mallopt


def keep_freed_memory() -> bool:
    """From now on this process gives no freed memory back to the system; False where its C library cannot do that."""
    library = ctypes.CDLL(None)
    if not hasattr(library, "mallopt"):
        return False
    return bool(library.mallopt(_M_MMAP_MAX, 0) and library.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1))


def time_rounds(
    rivals: Mapping[str, Rival], rounds: int, warm_up: int, group: dist.ProcessGroup, device: torch.device
) -> dict[str, dict[str, list[float]]]:
    """Seconds of the slowest rank by allocator, rival and round, after `warm_up` more rounds.

    A round runs each rival once, in an order that turns by one place per round. On the CPU there are two series: with
    the C library's allocator as it comes ("default"), where large blocks are given back to the system and come as new
    pages, which cost more than the copies that fill them; and with all freed memory "kept", where what a rival
    allocates costs it little. With CUDA memory comes from torch's cache and is always kept. Collective over: `group`,
    which is gloo.
    """
    if device.type != "cpu":
        return {"kept": _series(rivals, rounds, warm_up, group, device)}
    found = {"default": _series(rivals, rounds, warm_up, group, device)}
    if keep_freed_memory():
        found["kept"] = _series(rivals, rounds, warm_up, group, device)
    return found


def _series(
    rivals: Mapping[str, Rival], rounds: int, warm_up: int, group: dist.ProcessGroup, device: torch.device
) -> dict[str, list[float]]:
    names = list(rivals)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for number in range(warm_up + rounds):
        first = number % max(len(names), 1)
        for name in names[first:] + names[:first]:
            seconds[name].append(_time(rivals[name], group, device))
    return {name: values[warm_up:] for name, values in seconds.items()}


def _time(rival: Rival, group: dist.ProcessGroup, device: torch.device) -> float:
    _synchronize(device)
    dist.barrier(group)
    start = time.perf_counter()
    rival()
    _synchronize(device)
    elapsed = torch.tensor([time.perf_counter() - start], dtype=torch.float64)
    dist.all_reduce(elapsed, dist.ReduceOp.MAX, group=group)
    return float(elapsed)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def milliseconds(seconds: Mapping[str, list[float]]) -> dict[str, dict[str, float]]:
    """Median, smallest and upper quartile of each."""
    return {
        name: {
            "median": round(1e3 * statistics.median(values), 3),
            "min": round(1e3 * min(values), 3),
            "upper_quartile": round(1e3 * sorted(values)[len(values) * 3 // 4], 3),
        }
        for name, values in seconds.items()
    }


def describe_machine(device: torch.device) -> dict[str, Any]:
    """Date, hardware and versions, for a result that stands alone."""
    machine = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "megatron_core": _version("megatron-core"),
    }
    if device.type == "cuda":
        machine |= {"gpu": torch.cuda.get_device_name(device), "cuda": torch.version.cuda, "driver": _driver()}
    return machine


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _cpu_name() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def _driver() -> str | None:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout.split("\n")[0]
    except (OSError, subprocess.SubprocessError):
        return None
