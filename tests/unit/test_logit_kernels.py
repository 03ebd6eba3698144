"""The Triton kernels of tiles of logits, in Triton's interpreter and compiled for GPUs that are not here."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("triton", reason="Triton's wheels are for Linux alone")

from rltrain.training import logit_kernels, vocabulary
from rltrain.training.vocabulary import LabelledRows, Logits, vocab_parallel_logprobs
from tests.support.triton_interpreter import compiled, interprets

HIDDEN = 3
CPU = torch.device("cpu")

pytestmark = pytest.mark.skipif(not interprets(), reason="kernels take CUDA tensors on this machine")


class Alone:
    """A tensor-parallel group of one."""

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 1


@dataclass(frozen=True)
class Case:
    """Numbers of a pass over logits. `counts` are the labels of each row; `tile` are its most elements and rows."""

    counts: tuple[int, ...]
    num_columns: int
    vocab_size: int
    temperature: float
    softcap: float | None
    has_entropy: bool
    tile: tuple[int, int]
    kept: int
    seed: int

    @property
    def labelled(self) -> LabelledRows | None:
        """None if all rows have equally many labels."""
        if len({*self.counts}) == 1:
            return None
        rows = torch.arange(len(self.counts)).repeat_interleave(torch.tensor(self.counts))
        return LabelledRows(rows, torch.tensor([0, *self.counts]).cumsum(0))

    def labels(self) -> Tensor:
        labels = torch.randint(self.vocab_size, (sum(self.counts),))
        return labels if self.labelled is not None else labels.view(len(self.counts), -1)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    num_columns = draw(st.integers(1, 70))
    one = draw(st.integers(0, 3))
    num_rows = draw(st.integers(1, 4))
    different = st.lists(st.integers(0, 3), min_size=num_rows, max_size=num_rows)
    return Case(
        counts=tuple(draw(st.one_of(st.just([one] * num_rows), different))),
        num_columns=num_columns,
        vocab_size=draw(st.integers(1, num_columns)),
        temperature=draw(st.sampled_from([1.0, 0.6])),
        softcap=draw(st.sampled_from([None, 2.0])),
        has_entropy=draw(st.booleans()),
        tile=draw(st.sampled_from([(20, 1), (40, 2), (60, 8), (1000, 8)])),
        kept=draw(st.sampled_from([0, 50, 10_000])),
        seed=draw(st.integers(0, 100)),
    )


def computed(case: Case, dtype: torch.dtype, *, wide: bool = False, kernels: Any = logit_kernels) -> list[Tensor]:
    """Returns log-probs, entropies, and the gradients of states and weights."""
    states, weight, labels, upstream = inputs(case, dtype)
    elements, rows = case.tile
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vocabulary, "_kernels", lambda device: kernels)
        patch.setitem(vocabulary.TILE_ELEMENTS, "cpu", elements)
        patch.setitem(vocabulary.TILE_ROWS, "cpu", rows)
        patch.setitem(vocabulary.KEPT_ELEMENTS, "cpu", case.kept)
        group: Any = Alone()
        logprobs, entropy = vocab_parallel_logprobs(
            Logits(states, weight, wide, case.softcap),
            labels,
            vocab_size=case.vocab_size,
            temperature=case.temperature,
            group=group,
            labelled=case.labelled,
        )
        return [logprobs, entropy, *gradients(case, (logprobs, entropy), upstream, (states, weight))]


def inputs(case: Case, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor, Tensor]]:
    torch.manual_seed(case.seed)
    states, weight = (
        torch.randn(size, HIDDEN).to(dtype).requires_grad_() for size in (len(case.counts), case.num_columns)
    )
    labels = case.labels()
    return states, weight, labels, (torch.randn(labels.shape), torch.randn(len(case.counts)))


def gradients(
    case: Case, found: tuple[Tensor, Tensor], upstream: tuple[Tensor, Tensor], of: tuple[Tensor, Tensor]
) -> tuple[Tensor, ...]:
    loss = (found[0] * upstream[0]).sum()
    if case.has_entropy:
        loss = loss + (found[1] * upstream[1]).sum()
    return torch.autograd.grad(loss, of)


def expected_of(case: Case) -> list[Tensor]:
    """Returns the results in fp32 from torch's log_softmax of whole logits."""
    states, weight, labels, upstream = inputs(case, torch.float32)
    logits = (states @ weight.T)[:, : case.vocab_size]
    if case.softcap is not None:
        logits = case.softcap * (logits / case.softcap).tanh()
    log_softmax = torch.log_softmax(logits / case.temperature, dim=-1)
    rows = torch.arange(len(case.counts)).repeat_interleave(torch.tensor(case.counts))
    logprobs = log_softmax[rows, labels.flatten()].view(labels.shape)
    entropy = -(log_softmax.exp() * log_softmax).sum(-1)
    return [logprobs, entropy, *gradients(case, (logprobs, entropy), upstream, (states, weight))]


@settings(max_examples=12)
@given(cases())
def test_kernels_equal_log_softmax_of_whole_logits(case: Case) -> None:
    for found, expected in zip(computed(case, torch.float32), expected_of(case), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("wide", [False, True], ids=["half", "wide"])
@pytest.mark.parametrize("softcap", [None, 2.0], ids=["plain", "capped"])
def test_kernels_round_half_precision_like_torch(softcap: float | None, wide: bool) -> None:
    """Triton's interpreter cuts numbers to bfloat16 where GPUs round, so these differ by up to one unit."""
    case = Case((1, 2, 0), 40, 37, 0.6, softcap, has_entropy=True, tile=(60, 2), kept=0, seed=1)
    found = computed(case, torch.bfloat16, wide=wide)
    by_torch = computed(case, torch.bfloat16, wide=wide, kernels=None)
    is_cut = softcap is not None and not wide
    exact, rounded = {"rtol": 1e-5, "atol": 1e-5}, {"rtol": 2**-6, "atol": 2**-6}
    for number, (one, other) in enumerate(zip(found, by_torch, strict=True)):
        torch.testing.assert_close(one, other, **(rounded if number >= 2 or is_cut else exact))


def test_rows_may_have_more_columns_than_a_block() -> None:
    case = Case((1, 1), 5000, 4990, 1.0, None, has_entropy=True, tile=(20_000, 2), kept=10_000, seed=2)
    for found, expected in zip(computed(case, torch.float32), expected_of(case), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_the_check_of_kernels_finds_wrong_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    logit_kernels.check(CPU)
    right = logit_kernels.read
    monkeypatch.setattr(logit_kernels, "read", lambda *given: right(*given[:5], 2 * given[5], given[6]))
    with pytest.raises(AssertionError):
        logit_kernels.check(CPU)


NUMBERS = {name: "i32" for name in ("row_stride", "first_row", "first_column", "num_columns", "of_each_row")}
FACTORS = {"scale": "fp32", "softcap": "fp32"}
OF_READ = NUMBERS | FACTORS | {"num_rows": "i32", "statistics": "*fp32", "targets": "*fp32"}
OF_DIFFERENTIATE = (
    NUMBERS
    | FACTORS
    | {"gradient_stride": "i32"}
    | {name: "*fp32" for name in ("log_normalizers", "factors", "of_entropies", "of_labels")}
)
POINTERS = {"labels": "*i64", "starts": "*i64"}


@pytest.mark.slow
@pytest.mark.parametrize("logits", ["*bf16", "*fp32"])
def test_kernels_compile_for_gpus_without_spilling_registers(logits: str) -> None:
    constants = {"block_columns": 4096, "has_starts": True, "is_capped": True}
    found = compiled(
        "rltrain.training.logit_kernels",
        {
            "_read": ({"logits": logits, **OF_READ, **POINTERS}, constants),
            "_differentiate": (
                {"logits": logits, "gradients": "*bf16", **OF_DIFFERENTIATE, **POINTERS},
                {**constants, "has_entropies": True},
            ),
        },
        num_warps=8,
    )
    for name, by_architecture in found.items():
        for architecture, figures in by_architecture.items():
            assert figures["spills"] == 0, (name, architecture, figures)
