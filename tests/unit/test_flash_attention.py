"""An installed release of flash attention takes the place of torch's own kernels if it agrees with them."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import (
    current_flash_attention_impl,
    register_flash_attention_impl,
    restore_flash_attention_impl,
)
from torch.nn.attention._fa3 import register_flash_attention_fa3

from rltrain.models import attention
from rltrain.models.attention import attend, newer_flash_attention, sees

Activate = Callable[[], Any]


class Library:
    """The kernels of a release, while it is active."""

    def remove(self) -> None:
        return None


def by_sequence(query: Tensor, key: Tensor, value: Tensor, ends: Tensor, *further: Any, **settings: Any) -> Tensor:
    """Computes on the CPU what the kernel of torch.nn.attention.varlen does within sequences and a window."""
    made = []
    for rows in zip(*(x.split(ends.diff().tolist()) for x in (query, key, value)), strict=True):
        places = torch.arange(len(rows[0]))
        seen = sees(places, places, settings["window_size"][0] + 1)
        made.append(attend(*(x.transpose(0, 1) for x in rows), seen, scale=settings["scale"]).transpose(0, 1))
    return torch.cat(made)


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Activate], None]]:
    """Yields a function that installs a release for a Hopper GPU, whose stand-in is the CPU.

    torch's own registry calls the given function to activate the release.
    """
    (tmp_path / "flash_attn_interface.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(attention, "FLASH_DEVICE", "cpu")
    yield lambda activate: register_flash_attention_impl("FA3", register_fn=activate)
    restore_flash_attention_impl(_raise_warn=False)
    register_flash_attention_impl("FA3", register_fn=register_flash_attention_fa3)


@pytest.mark.parametrize(("factor", "taken"), [(1.0, "FA3"), (1.5, None)])
def test_a_release_is_used_if_it_agrees(factor: float, taken: str | None, installed: Any, caplog: Any) -> None:
    installed(Library)

    def kernel(*rows: Tensor, **settings: Any) -> Tensor:
        return by_sequence(*rows, **settings) * (factor if current_flash_attention_impl() == "FA3" else 1)

    assert newer_flash_attention(kernel) == current_flash_attention_impl() == taken
    assert ("torch's own flash kernels, not FA3: it differs" in caplog.text) is (taken is None)


def test_a_release_that_fails_leaves_torchs_kernels(installed: Any, caplog: Any) -> None:
    def activate() -> None:
        raise RuntimeError("built for another torch")

    installed(activate)
    assert newer_flash_attention(by_sequence) is current_flash_attention_impl() is None
    assert "not FA3: RuntimeError: built for another torch" in caplog.text


def test_without_a_release_for_the_gpu_nothing_is_tried(installed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    installed(Library)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    assert newer_flash_attention(by_sequence) is current_flash_attention_impl() is None
