"""Samples that begin alike share rows. What is computed from the rows is what is computed from each sample alone."""

from collections.abc import Iterator
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rltrain.data.experience import Experience
from rltrain.training import prefix_tree, sliced_attention
from rltrain.training.packed_attention import attend_blockwise
from rltrain.training.packing import ContextShare, Packing, make_micro_batches, pack, places_of, places_of_all
from rltrain.training.prefix_tree import PrefixTree, SortedSamples
from rltrain.training.sliced_attention import SlicedRows, TreeBlocks, attend_rows, tree_rows
from tests.support.packed_experience import plain_experience

CPU = torch.device("cpu")
FEWEST = 3
"""MIN_SHARED_TOKENS of most tests here."""


@pytest.fixture(autouse=True, scope="module")
def short_runs() -> Iterator[None]:
    with patch.object(prefix_tree, "MIN_SHARED_TOKENS", FEWEST):
        yield


def samples_of(texts: list[list[int]]) -> Experience:
    return plain_experience([len(text) for text in texts], torch.tensor([token for text in texts for token in text]))


@st.composite
def tries(draw: st.DrawFn) -> list[list[int]]:
    """Draws samples, each of which may begin as an earlier one does: chains, bushes, beginnings and equal samples."""
    texts: list[list[int]] = []
    for _ in range(draw(st.integers(1, 12))):
        begin: list[int] = []
        if texts:
            other = draw(st.sampled_from(texts))
            begin = other[: draw(st.integers(0, len(other)))]
        text = [*begin, *draw(st.lists(st.integers(0, 3), max_size=12))]
        texts.append(text or [0])
    return texts


def tree_of(texts: list[list[int]], *, looks_ahead: bool = False) -> PrefixTree:
    return SortedSamples.of(samples_of(texts), looks_ahead=looks_ahead).tree()


@given(tries())
@settings(max_examples=60, deadline=None)
def test_a_row_is_the_end_of_one_beginning(texts: list[list[int]]) -> None:
    tree, samples = tree_of(texts), samples_of(texts)
    beginnings = [tuple(text[: place + 1]) for text in texts for place in range(len(text))]
    of_rows: dict[int, tuple[int, ...]] = {}
    for row, beginning in zip(tree.row_of_token.tolist(), beginnings, strict=True):
        assert of_rows.setdefault(row, beginning) == beginning
    assert sorted(of_rows) == [*range(tree.num_rows)]
    assert torch.equal(samples.tokens[tree.token_of_row][tree.row_of_token], samples.tokens)
    assert [len(beginning) - 1 for _, beginning in sorted(of_rows.items())] == tree.positions.tolist()
    for number, path in enumerate(tree.paths()):
        rows = [row for start, length in path for row in range(start, start + length)]
        assert rows[-1] == tree.starts[number] + tree.lengths[number] - 1
        assert tree.positions[rows].tolist() == [*range(len(rows))]


@given(tries())
@settings(max_examples=60, deadline=None)
def test_what_is_shared_is_long_enough_and_all_that_is(texts: list[list[int]]) -> None:
    tree = tree_of(texts)
    users = tree.row_of_token.bincount(minlength=tree.num_rows)
    for start, length in zip(tree.starts, tree.lengths, strict=True):
        own = users[start : start + length]
        assert length >= FEWEST or own.max() == 1
    with patch.object(prefix_tree, "MIN_SHARED_TOKENS", 1):
        distinct = {tuple(text[: place + 1]) for text in texts for place in range(len(text))}
        assert tree_of(texts).num_rows == len(distinct)


@given(tries())
@settings(max_examples=60, deadline=None)
def test_the_samples_of_a_row_go_on_alike_if_it_looks_ahead(texts: list[list[int]]) -> None:
    with patch.object(prefix_tree, "MIN_SHARED_TOKENS", 1):
        tree = tree_of(texts, looks_ahead=True)
    seen = [(*text[: place + 1], *(text[place + 1 : place + 2] or [0])) for text in texts for place in range(len(text))]
    of_rows: dict[int, tuple[int, ...]] = {}
    for row, beginning in zip(tree.row_of_token.tolist(), seen, strict=True):
        assert of_rows.setdefault(row, beginning) == beginning
    assert tree.num_rows == len(set(seen)), "all that can be shared is"


@given(tries(), st.data())
@settings(max_examples=60, deadline=None)
def test_some_samples_have_the_tree_of_their_own(texts: list[list[int]], data: st.DataObject) -> None:
    some = sorted(data.draw(st.sets(st.integers(0, len(texts) - 1), min_size=1)))
    found = SortedSamples.of(samples_of(texts)).of_some(some).tree()
    expected = tree_of([texts[number] for number in some])
    assert (found.lengths, found.parents) == (expected.lengths, expected.parents)
    assert torch.equal(found.row_of_token, expected.row_of_token)


def test_a_short_common_beginning_is_not_shared_but_longer_ones_after_it_are() -> None:
    tree = tree_of([[1, 2, 5, 5, 5, 5], [1, 2, 5, 5, 5, 6], [1, 2, 7, 7, 7, 7], [1, 3]])
    assert tree.lengths == (5, 1, 1, 6, 2)
    assert tree.parents == (-1, 0, 0, -1, -1)


def test_tokens_with_other_experts_or_images_are_other_tokens() -> None:
    same = samples_of([[4, 5, 6, 7, 8], [4, 5, 6, 7, 9]])
    for field in ("routed_experts", "image_keys", "rope_positions"):
        shape = (10,) if field == "image_keys" else (10, 3)
        values = torch.zeros(shape, dtype=torch.int8 if field == "routed_experts" else torch.int64)
        assert SortedSamples.of(same.with_fields(**{field: values})).tree().num_rows == 6
        values[8] = 1
        values = values.T.contiguous().T  # as some of a run's fields are, not contiguous
        assert SortedSamples.of(same.with_fields(**{field: values})).tree().num_rows == 7


def alone(rows: Tensor, texts: list[list[int]], tree: PrefixTree) -> list[Tensor]:
    """Returns the rows of each sample."""
    return [rows[own] for own in tree.row_of_token.split([len(text) for text in texts])]


WAYS = [
    {},
    {"blocks": True},
    {"window": 2},
    {"softcap": 3.0},
    {"window": 3, "sinks": True},
]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: " ".join(way) or "plain")
@given(texts=tries(), seed=st.integers(0, 99))
@settings(max_examples=10, deadline=None)
def test_attention_and_its_gradients_are_those_of_each_sample(
    way: dict[str, object], texts: list[list[int]], seed: int
) -> None:
    tree, generator = tree_of(texts), torch.Generator().manual_seed(seed)
    settings, by_blocks = {**way}, "blocks" in way
    settings.pop("blocks", None)
    if settings.pop("sinks", None):
        settings["sinks"] = torch.randn(4, generator=generator, dtype=torch.float64)
    query, key, value = (
        torch.randn(tree.num_rows, heads, 8, generator=generator, dtype=torch.float64, requires_grad=True)
        for heads in (4, 2, 2)
    )
    wanted = torch.randn(sum(map(len, texts)), 4, 8, generator=generator, dtype=torch.float64)
    rows = tree_rows(tree, tree.lengths, [len(text) for text in texts], SlicedRows, CPU)
    with patch.object(sliced_attention, "LEAST_COPIES", 0 if by_blocks else 1000):
        found = attend_rows(query, key, value, rows, None, **settings)[tree.row_of_token]  # type: ignore[arg-type]
    expected = torch.cat(
        [
            attend_blockwise(*(x.transpose(0, 1)[None] for x in parts), **settings)[0].transpose(0, 1)  # type: ignore[arg-type]
            for parts in zip(*(alone(x, texts, tree) for x in (query, key, value)), strict=True)
        ]
    )
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)  # softcap and sinks are computed in fp32
    of_found, of_expected = (torch.autograd.grad((x * wanted).sum(), (query, key, value)) for x in (found, expected))
    for one, other in zip(of_found, of_expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@given(st.lists(st.integers(33, 300), min_size=1, max_size=40))
@settings(max_examples=30, deadline=None)
def test_runs_are_padded_by_at_most_a_third_on_cpus(lengths: list[int]) -> None:
    starts = [sum(lengths[:number]) for number in range(len(lengths))]
    blocks = TreeBlocks.of([-1] * len(lengths), starts, lengths, CPU)
    assert sum(count * width for count, width in blocks.runs.batches) <= sum(lengths) / 0.75


@given(texts=tries(), size=st.sampled_from([2, 3]))
@settings(max_examples=15, deadline=None)
def test_ranks_that_cut_a_tree_attend_to_the_same_keys(texts: list[list[int]], size: int) -> None:
    """Each rank has two slices of the tree's rows, and keys and values of all ranks in their order."""
    tree, lengths = tree_of(texts), [len(text) for text in texts]
    padding = -tree.num_rows % (2 * size)
    segments = (*tree.lengths, *[1] * padding)
    query, key, value = (torch.randn(sum(segments), heads, 8, dtype=torch.float64) for heads in (4, 2, 2))
    whole = attend_rows(query, key, value, tree_rows(tree, segments, lengths, SlicedRows, CPU), None)
    order = places_of_all((sum(segments),), size)
    row_of_place = order.argsort()
    for rank in range(size):
        share = ContextShare(rank, size)
        own = places_of((sum(segments),), share)
        rows = tree_rows(tree, segments, lengths, SlicedRows, CPU, share, row_of_place)
        found = attend_rows(query[own], key[order], value[order], rows, None)
        torch.testing.assert_close(found, whole[own])


@pytest.mark.parametrize("value_size", [8, 5])
def test_a_gpu_takes_all_runs_in_one_call_and_keeps_no_copies_of_keys(
    value_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel's stand-in computes on the CPU, and autograd keeps its inputs. It takes one size of heads."""
    texts = [[1] * 20 + [2] * 9, [1] * 20 + [3] * 4, [1] * 20]
    tree = tree_of(texts)
    rows = tree_rows(tree, tree.lengths, [len(text) for text in texts], SlicedRows, CPU)
    calls = []

    def kernel(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, longest: int, **settings: object) -> Tensor:
        calls.append((len(q), len(k)))
        assert q.size(-1) == k.size(-1) == v.size(-1)
        of_keys: Tensor = settings["key_boundaries"]  # type: ignore[assignment]
        parts = []
        for first, last, first_key, last_key in zip(bounds, bounds[1:], of_keys, of_keys[1:], strict=False):
            keys, values = (x[first_key:last_key].transpose(0, 1) for x in (k, v))
            queries = q[first:last].transpose(0, 1)
            places = torch.arange(len(keys[0]) - len(queries[0]), len(keys[0]))
            seen = places[:, None] >= torch.arange(len(keys[0]))
            scores = (queries @ keys.mT / 8**0.5).masked_fill(~seen, -torch.inf)
            parts.append((scores.softmax(-1) @ values).transpose(0, 1))
        return torch.cat(parts)

    query, key, value = (torch.randn(tree.num_rows, 2, size, requires_grad=True) for size in (8, 8, value_size))
    expected = attend_rows(query, key, value, rows, None)
    wanted = torch.randn_like(expected)
    gradients = torch.autograd.grad((expected * wanted).sum(), (query, key, value))
    monkeypatch.setattr(sliced_attention, "attends_packed", lambda *inputs: True)
    monkeypatch.setattr(sliced_attention, "attend_packed", kernel)
    found = attend_rows(query, key, value, rows, None)
    assert calls == [(tree.num_rows, 20 + 29 + 24)]
    torch.testing.assert_close(found, expected)
    for one, other in zip(torch.autograd.grad((found * wanted).sum(), (query, key, value)), gradients, strict=True):
        torch.testing.assert_close(one, other)


@given(tries(), st.integers(5, 60), st.booleans())
@settings(max_examples=40, deadline=None)
def test_micro_batches_count_computed_tokens(texts: list[list[int]], max_tokens: int, looks_ahead: bool) -> None:
    samples = samples_of(texts)
    batches = pack(samples, max_tokens, device=CPU, prefixes=SortedSamples.of(samples, looks_ahead=looks_ahead))
    places = torch.cat([batch.token_index for batch in batches])
    assert torch.equal(places.sort().values, torch.arange(samples.num_tokens))
    for batch in batches:
        assert batch.num_computed_tokens <= max_tokens or len(batch.lengths) == 1
        assert batch.slices is not None and len(batch.slices.drawn) == 1 + looks_ahead
        assert torch.equal(batch.padded_tokens[batch.slices.row_of_token], batch.experience.tokens)
        for ahead, drawn in enumerate(batch.slices.drawn, 1):
            assert torch.equal(drawn.rows, batch.slices.row_of_token[drawn.tokens - ahead])
            assert len(drawn.tokens) == sum(max(length - ahead, 0) for length in batch.lengths)
            assert torch.equal(drawn.starts.diff(), drawn.rows.bincount(minlength=batch.num_rows))
        ends, before = batch.computed
        assert sum(ends) - sum(before) == batch.num_computed_tokens == batch.num_rows


def test_samples_that_share_much_go_together() -> None:
    groups = [[group] * 30 + [100 + number] * 10 for group in range(4) for number in range(4)]
    texts = [groups[number % 4 * 4 + number // 4] for number in range(16)]
    samples = samples_of(texts)
    batches = pack(samples, 140, device=CPU, prefixes=SortedSamples.of(samples))
    assert [batch.num_computed_tokens for batch in batches] == [140, 140]


@pytest.mark.parametrize(("shared_tokens", "is_shared"), [(4, False), (5, True)])
def test_auto_shares_where_a_tenth_is_saved(shared_tokens: int, is_shared: bool) -> None:
    texts = [[7] * shared_tokens + [8] * (20 - shared_tokens), [7] * shared_tokens + [9] * (25 - shared_tokens)]
    batches = {
        how: make_micro_batches(samples_of(texts), 100, Packing(CPU, prefixes=how))[0] for how in ("auto", True, False)
    }
    assert (batches["auto"].tree is not None) == is_shared
    assert batches[True].tree is not None and batches[False].tree is None


def test_without_common_beginnings_samples_are_packed_as_ever() -> None:
    [batch] = make_micro_batches(samples_of([[1, 2, 3], [4, 5]]), 100, Packing(CPU, prefixes=True))
    assert batch.tree is None and batch.slices is None
