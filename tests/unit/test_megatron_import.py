"""What Megatron would import for nothing is not there while it is imported."""

import importlib
import sys

import pytest
import torch

import rltrain.training.megatron  # noqa: F401  # isort: skip  # first: it loads Megatron without torch's compiler
import megatron.core.timers

from rltrain.training.megatron import uncompiled
from rltrain.training.megatron.uncompiled import _absent


def test_a_package_is_absent_for_as_long_as_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "wave", raising=False)
    with _absent("wave"), pytest.raises(ImportError):
        importlib.import_module("wave")
    assert importlib.import_module("wave") is sys.modules["wave"]


def test_one_that_is_in_use_stays() -> None:
    with _absent("sys"):
        assert importlib.import_module("sys") is sys


def test_megatron_has_neither_wandb_nor_tensorboard() -> None:
    assert megatron.core.timers.wandb is None and megatron.core.timers.SummaryWriter is None


ABSENT = ("wandb", "torch.utils.tensorboard")


@pytest.mark.parametrize("on_gpu", [False, True])
def test_it_is_imported_without_them_everywhere(on_gpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    imported: list[tuple[str, list[object]]] = []

    def import_module(name: str) -> object:
        imported.append((name, [sys.modules[package] for package in ABSENT]))
        return sys.modules[name]

    for package in ABSENT:
        monkeypatch.delitem(sys.modules, package, raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: on_gpu)
    monkeypatch.setattr(uncompiled.importlib, "import_module", import_module)
    uncompiled.import_megatron()
    assert imported == [("megatron.core.jit", [None, None])] and sys.modules.keys().isdisjoint(ABSENT)
