"""Log-probs and gradients from hidden states and a real vocabulary's weights, in tiles that Triton kernels turn."""

from typing import Any

import pytest
import torch
from torch import Tensor

from rltrain.training import vocabulary
from rltrain.training.vocabulary import LabelledRows, Logits, vocab_parallel_logprobs

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda", 0)
NUM_ROWS, HIDDEN, VOCAB_SIZE = 1500, 256, 151_936


class Alone:
    """A tensor-parallel group of one."""

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 1


def passed(dtype: torch.dtype, labelled: LabelledRows | None, softcap: float | None) -> tuple[Tensor, ...]:
    """Returns log-probs, entropies, and the gradients of states and weights."""
    torch.manual_seed(0)
    states, weight = (
        torch.randn(size, HIDDEN, device=DEVICE).div(HIDDEN**0.25).to(dtype).requires_grad_()
        for size in (NUM_ROWS, VOCAB_SIZE)
    )
    labels = torch.randint(VOCAB_SIZE, (NUM_ROWS,) if labelled is None else labelled.rows.shape, device=DEVICE)
    group: Any = Alone()
    logprobs, entropy = vocab_parallel_logprobs(
        Logits(states, weight, softcap=softcap),
        labels,
        vocab_size=VOCAB_SIZE - 36,
        temperature=0.8,
        group=group,
        labelled=labelled,
    )
    loss = logprobs.sum() + (entropy * torch.linspace(-1, 1, NUM_ROWS, device=DEVICE)).sum()
    return logprobs, entropy, *torch.autograd.grad(loss, (states, weight))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("elements", [1 << 20, 1 << 26], ids=["tiles", "large tiles"])
def test_kernels_equal_torch(
    dtype: torch.dtype, softcap: float | None, elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(vocabulary.TILE_ELEMENTS, "cuda", elements)
    monkeypatch.setitem(vocabulary.TILE_ROWS, "cuda", 512)
    assert vocabulary._kernels(DEVICE) is not None, "Triton's kernels work on this GPU"
    rows = torch.arange(NUM_ROWS).repeat_interleave(torch.arange(NUM_ROWS) % 3)
    starts = torch.searchsorted(rows, torch.arange(NUM_ROWS + 1))
    for labelled in (None, LabelledRows(rows.to(DEVICE), starts)):
        found = passed(dtype, labelled, softcap)
        with monkeypatch.context() as patch:
            patch.setattr(vocabulary, "_kernels", lambda device: None)
            expected = passed(dtype, labelled, softcap)
        for one, other in zip(found, expected, strict=True):
            error = float((one - other).norm() / other.norm())
            assert error < (1e-5 if dtype == torch.float32 else 1e-2)


def test_no_more_than_a_tile_of_logits_is_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(vocabulary.TILE_ELEMENTS, "cuda", 1 << 22)
    monkeypatch.setitem(vocabulary.KEPT_ELEMENTS, "cuda", 0)
    passed(torch.bfloat16, None, None)  # compiles the kernels
    torch.cuda.reset_peak_memory_stats(DEVICE)
    before = torch.cuda.memory_allocated(DEVICE)
    passed(torch.bfloat16, None, None)
    weights, logits = VOCAB_SIZE * HIDDEN * 2, NUM_ROWS * VOCAB_SIZE * 2
    made_from_fp32 = VOCAB_SIZE * HIDDEN * 4
    peak = torch.cuda.max_memory_allocated(DEVICE) - before
    assert peak < 2 * weights + made_from_fp32 + logits / 4
