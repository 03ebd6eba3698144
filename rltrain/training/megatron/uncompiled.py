"""Imports megatron-core without what of it nothing here uses and every process would pay for."""

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch


def import_megatron() -> None:
    """Without wandb and tensorboard; and without CUDA, where nothing would be compiled, without torch's compiler.

    Megatron hands its fused functions to torch.compile when its modules are imported. That loads torch's compiler, a
    third of the CPU time of importing this package, for functions that models on CPUs do not call: they stay as they
    are written. wandb, a sixth of that time, and tensorboard are for timers and an engine of Megatron that
    have no part in a job here; the job's own metrics import them where the config asks for them.
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
    """What is imported meanwhile does not find `package`, unless it was there before."""
    if package in sys.modules:
        yield
        return
    sys.modules[package] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules[package]
