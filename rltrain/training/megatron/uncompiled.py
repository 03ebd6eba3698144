"""Imports megatron-core without expensive and unused parts."""

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch


def import_megatron() -> None:
    """Imports Megatron without wandb and tensorboard, and without torch's compiler if there is no GPU.

    Megatron passes its fused functions to torch.compile at import. Loading torch's compiler takes a third of the CPU
    time of importing this package, and models on CPUs do not call these functions. So they stay uncompiled. wandb takes
    a sixth of that time. wandb and tensorboard serve Megatron's timers and engine, and jobs use neither. The job's own
    metrics import them if the config asks for them.
    """
    on_cpu = not torch.cuda.is_available()
    with _absent("wandb"), _absent("torch.utils.tensorboard"), _uncompiled() if on_cpu else nullcontext():
        jit = importlib.import_module("megatron.core.jit")
    if on_cpu:
        jit.disable_jit_fuser()


@contextmanager
def _uncompiled() -> Iterator[None]:
    compiled = torch.compile
    torch.compile = _as_written  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.compile = compiled


def _as_written(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


@contextmanager
def _absent(package: str) -> Iterator[None]:
    """Makes imports of `package` fail within the context, unless it was already imported."""
    if package in sys.modules:
        yield
        return
    sys.modules[package] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules[package]
