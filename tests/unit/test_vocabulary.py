"""Tests of vocab_parallel_logprobs against torch.log_softmax. tests/distributed has shards on real ranks."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from threading import Barrier
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from rltrain.training import vocabulary as module
from rltrain.training.vocabulary import LabelledRows, Logits, vocab_parallel_logprobs

ROWS = 7


class Alone:
    """A tensor-parallel group of one."""

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 1


class Gathering:
    """A tensor-parallel group of threads. A gather returns once all threads have called it."""

    def __init__(self, size: int) -> None:
        self.barrier, self.given = Barrier(size), [torch.empty(0)] * size

    def gather(self, local: Tensor, member: "Member") -> Tensor:
        self.given[member.index] = local
        self.barrier.wait(timeout=60)
        gathered = torch.stack(self.given)
        self.barrier.wait(timeout=60)
        return gathered


@dataclass
class Member:
    index: int
    num_ranks: int

    def rank(self) -> int:
        return self.index

    def size(self) -> int:
        return self.num_ranks


def found_by_ranks(tp: int, found_of: Callable[..., Any], logits: Tensor, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Returns the results of `found_of` by rank, for shards of the vocabulary on `tp` ranks."""
    monkeypatch.setattr(module, "_gather", Gathering(tp).gather)
    shards = map(Logits, logits.chunk(tp, dim=1))
    with ThreadPoolExecutor(tp) as threads:
        return [*threads.map(lambda shard, rank: found_of(shard, group=Member(rank, tp)), shards, range(tp))]


def reference(logits: Tensor, labels: Tensor, vocab_size: int, temperature: float) -> tuple[Tensor, Tensor]:
    log_softmax = torch.log_softmax(logits[:, :vocab_size].double() / temperature, dim=-1)
    drawn = log_softmax.gather(1, labels.view(ROWS, -1)).view(labels.shape)
    return drawn, -(log_softmax.exp() * log_softmax).sum(-1)


def sharded(
    logits: Tensor, labels: Tensor, vocab_size: int, temperature: float, tp: int, monkeypatch: pytest.MonkeyPatch
) -> list[tuple[Tensor, Tensor]]:
    found_of = partial(vocab_parallel_logprobs, labels=labels, vocab_size=vocab_size, temperature=temperature)
    return found_by_ranks(tp, found_of, logits, monkeypatch)


@pytest.mark.parametrize(("tp", "vocab_size"), [(1, 15), (1, 16), (2, 15), (4, 13), (4, 6), (8, 3)])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("labels_of_a_row", [(), (5,)], ids=["one label", "several labels"])
def test_values_and_gradients_equal_log_softmax(
    tp: int, vocab_size: int, temperature: float, labels_of_a_row: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    logits = (4 * torch.randn(ROWS, 16)).requires_grad_()
    labels = torch.randint(vocab_size, (ROWS, *labels_of_a_row))
    weights, entropy_weights = torch.randn(labels.shape), torch.randn(ROWS)

    expected = reference(logits, labels, vocab_size, temperature)
    (expected_grad,) = torch.autograd.grad(
        (expected[0] * weights).sum() + (expected[1] * entropy_weights).sum(), logits
    )
    results = sharded(logits, labels, vocab_size, temperature, tp, monkeypatch)
    for logprobs, entropy in results:
        torch.testing.assert_close(logprobs.double(), expected[0], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(entropy.double(), expected[1], rtol=1e-5, atol=1e-5)
    # Every rank differentiates the same loss with respect to its own columns.
    (grad,) = torch.autograd.grad(
        sum((logprobs * weights).sum() + (entropy * entropy_weights).sum() for logprobs, entropy in results), logits
    )
    torch.testing.assert_close(grad, expected_grad, rtol=1e-4, atol=1e-5)
    assert torch.equal(grad[:, vocab_size:], torch.zeros(ROWS, 16 - vocab_size))


def test_chunks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(1)
    logits, labels = torch.randn(ROWS, 16, requires_grad=True), torch.randint(16, (ROWS,))
    whole = sharded(logits, labels, 16, 1.0, 1, monkeypatch)[0]
    (whole_grad,) = torch.autograd.grad((whole[0] + whole[1]).sum(), logits)
    monkeypatch.setattr(module, "CHUNK_ELEMENTS", 32)
    chunked = sharded(logits, labels, 16, 1.0, 1, monkeypatch)[0]
    (chunked_grad,) = torch.autograd.grad((chunked[0] + chunked[1]).sum(), logits)
    for found, expected in zip((*chunked, chunked_grad), (*whole, whole_grad), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rows_in_a_chunk", [2, ROWS])
@pytest.mark.parametrize("labels_of_a_place", [(), (3,)], ids=["one label", "several labels"])
@pytest.mark.parametrize("tp", [1, 2])
def test_rows_may_have_different_numbers_of_labels(
    tp: int, labels_of_a_place: tuple[int, ...], rows_in_a_chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Row 1 has two labels, equal ones, and row 4 has none."""
    torch.manual_seed(0)
    monkeypatch.setattr(module, "CHUNK_ELEMENTS", rows_in_a_chunk * 16 // tp)
    logits = torch.randn(ROWS, 16, requires_grad=True)
    rows = torch.tensor([0, 1, 1, 2, 3, 5, 6, 6])
    labels = torch.randint(15, (len(rows), *labels_of_a_place))
    labels[2] = labels[1]
    labelled = LabelledRows(rows, torch.searchsorted(rows, torch.arange(ROWS + 1)))
    found_of = partial(vocab_parallel_logprobs, labels=labels, vocab_size=15, temperature=0.7, labelled=labelled)
    found = found_by_ranks(tp, found_of, logits, monkeypatch)

    log_softmax = torch.log_softmax(logits[:, :15] / 0.7, dim=-1)
    expected = log_softmax[rows].gather(1, labels.view(len(rows), -1)).view(labels.shape)
    entropies = -(log_softmax.exp() * log_softmax).sum(-1)
    weights = torch.randn(labels.shape)
    (expected_grad,) = torch.autograd.grad((expected * weights).sum() + entropies.square().sum(), logits)
    for logprobs, entropy in found:
        torch.testing.assert_close(logprobs, expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(entropy, entropies, rtol=1e-5, atol=1e-5)
    (grad,) = torch.autograd.grad(
        sum((logprobs * weights).sum() + entropy.square().sum() for logprobs, entropy in found), logits
    )
    torch.testing.assert_close(grad, expected_grad, rtol=1e-4, atol=1e-5)


class LargestMatrix(TorchDispatchMode):
    """The number of elements of the largest matrix created."""

    def __init__(self) -> None:
        super().__init__()
        self.num_elements = 0

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), settings: Any = None) -> Any:
        made = function(*arguments, **(settings or {}))
        if isinstance(made, Tensor) and made.dim() == 2:
            self.num_elements = max(self.num_elements, made.numel())
        return made


@dataclass(frozen=True)
class Tiles:
    """Limits of a test, instead of those for real sizes."""

    elements: int
    rows: int
    kept: int

    def set(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(module.TILE_ELEMENTS, "cpu", self.elements)
        monkeypatch.setitem(module.TILE_ROWS, "cpu", self.rows)
        monkeypatch.setitem(module.KEPT_ELEMENTS, "cpu", self.kept)


TILES = {
    "one row": Tiles(elements=64, rows=1, kept=0),
    "rows": Tiles(elements=8 * 64, rows=32, kept=0),
    "columns": Tiles(elements=700, rows=100, kept=0),
    "rows and columns": Tiles(elements=120, rows=30, kept=0),
    "rows and columns, some kept": Tiles(elements=120, rows=30, kept=1000),
    "rows and columns, kept": Tiles(elements=120, rows=30, kept=10_000),
    "one": Tiles(elements=10_000, rows=100, kept=0),
}


@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("of_entropy", [0.0, 1.0])
@pytest.mark.parametrize("tiles", TILES.values(), ids=TILES.keys())
def test_tiles_of_states_and_weights_equal_log_softmax_of_whole_logits(
    tiles: Tiles, of_entropy: float, softcap: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some columns are padding. No matrix is larger than a tile."""
    tiles.set(monkeypatch)
    torch.manual_seed(0)
    num_rows, hidden, columns, vocab_size = 100, 2, 64, 61
    states, weight = (torch.randn(size, hidden, requires_grad=True) for size in (num_rows, columns))
    labels, wanted = torch.randint(vocab_size, (num_rows, 3)), torch.randn(num_rows, 3)

    def gradients(logprobs: Tensor, entropy: Tensor) -> tuple[Tensor, ...]:
        loss = (logprobs * wanted).sum() + of_entropy * (entropy * wanted[:, 0]).sum()
        return torch.autograd.grad(loss, (states, weight))

    whole = (states @ weight.T)[:, :vocab_size]
    whole = whole if softcap is None else softcap * (whole / softcap).tanh()
    log_softmax = torch.log_softmax(whole / 0.7, dim=-1)
    expected = log_softmax.gather(1, labels), -(log_softmax.exp() * log_softmax).sum(-1)
    expected_gradients = gradients(*expected)
    group: Any = Alone()
    with LargestMatrix() as largest:
        logits = Logits(states, weight, softcap=softcap)
        found = vocab_parallel_logprobs(logits, labels, vocab_size=vocab_size, temperature=0.7, group=group)
        found_gradients = gradients(*found)
    for one, other in zip((*found, *found_gradients), (*expected, *expected_gradients), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    assert largest.num_elements <= max(tiles.elements, num_rows * labels.size(1), columns * hidden)


def test_large_and_half_precision_logits_stay_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = (1000 * torch.randn(ROWS, 16)).bfloat16().requires_grad_()
    labels = torch.randint(15, (ROWS,))
    ((logprobs, entropy),) = sharded(logits, labels, 15, 1.0, 1, monkeypatch)
    expected = reference(logits, labels, 15, 1.0)
    torch.testing.assert_close(logprobs.double(), expected[0], rtol=1e-5, atol=1e-3)
    torch.testing.assert_close(entropy.double(), expected[1], rtol=1e-5, atol=1e-3)
    (grad,) = torch.autograd.grad((logprobs + entropy).sum(), logits)
    assert grad.dtype == torch.bfloat16
    assert torch.isfinite(grad).all()


def test_a_temperature_of_zero_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, labels = torch.randn(ROWS, 16), torch.zeros(ROWS, dtype=torch.int64)
    with pytest.raises(ValueError, match="above 0"):
        vocab_parallel_logprobs(Logits(logits), labels, vocab_size=16, temperature=0.0, group=Alone())


@pytest.mark.parametrize(("tp", "vocab_size", "count"), [(1, 15, 4), (2, 15, 8), (4, 6, 6), (4, 13, 13), (8, 3, 2)])
def test_the_likeliest_tokens_are_found_over_all_shards(
    tp: int, vocab_size: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some shards have fewer tokens than requested, or only padding."""
    torch.manual_seed(0)
    logits = 4 * torch.randn(ROWS, 16)
    top = partial(module.vocab_parallel_top, count=count, vocab_size=vocab_size, temperature=0.7)
    expected = torch.log_softmax(logits[:, :vocab_size] / 0.7, dim=1).topk(count, dim=1)
    for ids, logprobs in found_by_ranks(tp, top, logits, monkeypatch):
        torch.testing.assert_close(logprobs, expected.values, rtol=1e-5, atol=1e-5)
        assert torch.equal(ids, expected.indices)


@pytest.mark.parametrize(("tp", "vocab_size"), [(1, 15), (2, 15), (4, 6), (8, 3)])
def test_squared_probabilities_equal_softmax(tp: int, vocab_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Covers shards of only padding, and rows in several chunks."""
    monkeypatch.setattr(module, "CHUNK_ELEMENTS", 32)
    logits = 4 * torch.randn(ROWS, 16, generator=torch.Generator().manual_seed(0)) + 100
    expected = torch.softmax(logits[:, :vocab_size].double() / 0.7, dim=1).square().sum(1)
    squares = partial(module.vocab_parallel_squares, vocab_size=vocab_size, temperature=0.7)
    for found in found_by_ranks(tp, squares, logits, monkeypatch):
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kept", [0, 1000], ids=["recomputed", "kept"])
def test_backward_may_be_repeated(kept: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kept logits are overwritten by their gradients."""
    Tiles(elements=120, rows=30, kept=kept).set(monkeypatch)
    states, weight = (torch.randn(size, 4, requires_grad=True) for size in (ROWS, 16))
    group: Any = Alone()
    logprobs, entropy = vocab_parallel_logprobs(
        Logits(states, weight), torch.randint(15, (ROWS,)), vocab_size=15, temperature=1.0, group=group
    )
    first, second = (
        torch.autograd.grad((logprobs + entropy).sum(), (states, weight), retain_graph=True) for _ in range(2)
    )
    for one, other in zip(first, second, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("trained", ["states", "weight"])
def test_only_gradients_that_are_needed_are_computed(trained: str, dtype: torch.dtype) -> None:
    """Frozen heads beside adapters need no gradient of the weights, and a detached layer none of its inputs."""
    found = {}
    for needed in ({trained}, {"states", "weight"}):
        torch.manual_seed(0)
        inputs = {name: torch.randn(size, 4).to(dtype) for name, size in {"states": ROWS, "weight": 16}.items()}
        for name in needed:
            inputs[name].requires_grad_()
        group: Any = Alone()
        logits = Logits(inputs["states"], inputs["weight"])
        labels = torch.arange(ROWS)
        logprobs, _ = vocab_parallel_logprobs(logits, labels, vocab_size=16, temperature=1.0, group=group)
        logprobs.sum().backward()
        assert {name for name, tensor in inputs.items() if tensor.grad is not None} == needed
        found[len(needed)] = inputs[trained].grad
    assert torch.equal(found[1], found[2])


@pytest.mark.parametrize("softcap", [None, 1.5])
def test_likeliest_tokens_and_squares_come_from_states_too(
    softcap: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CHUNK_ELEMENTS", 32)
    states, weight = torch.randn(ROWS, 4), torch.randn(16, 4)
    whole = (states @ weight.T)[:, :15]
    log_softmax = torch.log_softmax((whole if softcap is None else softcap * (whole / softcap).tanh()) / 0.7, dim=1)
    logits, group = Logits(states, weight, softcap=softcap), Alone()
    distribution: dict[str, Any] = {"vocab_size": 15, "temperature": 0.7, "group": group}
    ids, logprobs = module.vocab_parallel_top(logits, 3, **distribution)
    expected = log_softmax.topk(3, dim=1)
    assert torch.equal(ids, expected.indices)
    torch.testing.assert_close(logprobs, expected.values, rtol=1e-5, atol=1e-5)
    squares = module.vocab_parallel_squares(logits, **distribution)
    torch.testing.assert_close(squares, log_softmax.exp().square().sum(1), rtol=1e-5, atol=1e-5)


def test_a_rank_may_have_no_rows_and_columns_of_padding_alone() -> None:
    """All gradients are zeros then, and none is missing."""
    group: Any = Member(1, 1)
    for num_rows, vocab_size in ((0, 16), (ROWS, 16)):
        states, weight = (torch.randn(size, 4, requires_grad=True) for size in (num_rows, 16))
        labels = torch.zeros(num_rows, dtype=torch.int64)
        logprobs, entropy = vocab_parallel_logprobs(
            Logits(states, weight), labels, vocab_size=vocab_size, temperature=1.0, group=group
        )
        (logprobs.sum() + entropy.sum()).nan_to_num().backward()
        for tensor in (states, weight):
            assert tensor.grad is not None and not tensor.grad.any()


@pytest.mark.parametrize("tiles", [TILES["one"], TILES["rows and columns"]], ids=["one tile", "tiles"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("stands_in", [False, True])
def test_the_gradient_of_the_weights_is_added_to_a_given_sum(
    tiles: Tiles, dtype: torch.dtype, stands_in: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hooks of the weights then see no gradient, or one whose values they must not use."""
    tiles.set(monkeypatch)
    torch.manual_seed(0)
    states, weight = (torch.randn(size, 4).to(dtype).requires_grad_() for size in (100, 64))
    labels, group = torch.randint(61, (100,)), Alone()
    distribution: dict[str, Any] = {"vocab_size": 61, "temperature": 0.7, "group": group}
    vocab_parallel_logprobs(Logits(states, weight), labels, **distribution)[0].sum().backward()
    assert weight.grad is not None
    expected, weight.grad = weight.grad.float(), None
    total = torch.ones(64, 4)
    logits = Logits(states, weight, weight_grad=total, stands_in=stands_in)
    vocab_parallel_logprobs(logits, labels, **distribution)[0].sum().backward()
    assert (weight.grad is not None) == stands_in
    tolerance = 1e-5 if dtype == torch.float32 else 2**-6
    torch.testing.assert_close(total, 1 + expected, rtol=tolerance, atol=tolerance)
    assert torch.equal(total[61:], torch.ones(3, 4))
