"""Imports megatron-core without torch's compiler where nothing would be compiled."""

from collections.abc import Callable
from typing import Any

import torch


def import_megatron() -> None:
    """Without CUDA, Megatron's fused functions stay as they are written; with CUDA this does nothing.

    Megatron hands them to torch.compile when its modules are imported. That loads torch's compiler, a third of the CPU
    time of importing this package, for functions that models on CPUs do not call.
    """
    if torch.cuda.is_available():
        return
    compiled = torch.compile
    torch.compile = _as_written  # type: ignore[assignment]
    try:
        import megatron.core.jit
    finally:
        torch.compile = compiled
    megatron.core.jit.disable_jit_fuser()


def _as_written(function: Callable[..., Any]) -> Callable[..., Any]:
    return function
