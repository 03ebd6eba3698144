import torch
from hypothesis import given
from hypothesis import strategies as st

from rltrain.data.experience import Experience
from rltrain.training.packing import balanced_bins, pack

lengths_strategy = st.lists(st.integers(1, 40), min_size=1, max_size=60)


def experience_of(lengths: list[int]) -> Experience:
    num_tokens, num_samples = sum(lengths), len(lengths)
    return Experience(
        sample_ids=torch.arange(num_samples),
        group_ids=torch.arange(num_samples),
        prompt_ids=torch.arange(num_samples) + 100,
        lengths=torch.tensor(lengths),
        truncated=torch.zeros(num_samples, dtype=torch.bool),
        tokens=torch.arange(num_tokens),
        response_mask=torch.ones(num_tokens, dtype=torch.bool),
        policy_version=torch.zeros(num_tokens, dtype=torch.int32),
        rollout_logprobs=torch.randn(num_tokens),
    )


@given(lengths_strategy, st.integers(1, 100))
def test_bins_hold_every_index_once_and_respect_the_limit(lengths: list[int], max_tokens: int) -> None:
    bins = balanced_bins(lengths, max_tokens)
    assert sorted(i for members in bins for i in members) == list(range(len(lengths)))
    for members in bins:
        assert members == sorted(members)
        assert sum(lengths[i] for i in members) <= max_tokens or len(members) == 1
    assert bins == sorted(bins) == balanced_bins(lengths, max_tokens)


@given(lengths_strategy, st.integers(40, 200))
def test_bins_are_few_and_balanced(lengths: list[int], max_tokens: int) -> None:
    loads = [sum(lengths[i] for i in members) for members in balanced_bins(lengths, max_tokens)]
    if len(loads) > 1:
        assert max(loads) - min(loads) <= max(lengths)
        # Any two of the bins needed beyond the minimum would have been needed by longest-first placement too.
        assert sum(loads) > (len(loads) - 1) * (max_tokens - max(lengths))


@given(st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=30), st.integers(1, 100))
def test_the_samples_of_a_pair_are_never_parted(pairs: list[tuple[int, int]], max_tokens: int) -> None:
    whole = experience_of([length for pair in pairs for length in pair])
    groups = torch.arange(len(pairs)).repeat_interleave(2) * 3
    whole = whole.with_fields(group_ids=groups, chosen=torch.tensor([True, False] * len(pairs)))
    batches = [batch.experience for batch in pack(whole, max_tokens, device=torch.device("cpu"))]
    for batch in batches:
        assert batch.group_ids[batch.chosen].tolist() == batch.group_ids[~batch.chosen].tolist()
        assert batch.num_tokens <= max_tokens or batch.num_samples == 2
    assert sorted(i for batch in batches for i in batch.sample_ids.tolist()) == list(range(2 * len(pairs)))


@given(lengths_strategy, st.integers(1, 100), st.integers(1, 8), st.booleans())
def test_micro_batches_hold_every_token_once_and_pad_as_asked(
    lengths: list[int], max_tokens: int, multiple_of: int, equal_lengths: bool
) -> None:
    experience = experience_of(lengths)
    batches = pack(
        experience, max_tokens, device=torch.device("cpu"), multiple_of=multiple_of, equal_lengths=equal_lengths
    )
    gathered = torch.cat([batch.token_index for batch in batches])
    assert torch.equal(gathered.sort().values, torch.arange(experience.num_tokens))
    for batch in batches:
        assert torch.equal(batch.experience.tokens, experience.tokens[batch.token_index])
        assert torch.equal(batch.experience.rollout_logprobs, experience.rollout_logprobs[batch.token_index])
        assert torch.equal(batch.padded_tokens[: batch.num_tokens], batch.experience.tokens)
        assert len(batch.padded_tokens) % multiple_of == 0
        assert sum(batch.segments) == len(batch.padded_tokens)
        num_samples = batch.experience.num_samples
        assert list(batch.segments[:num_samples]) == batch.experience.lengths.tolist()
        assert all(0 < piece <= max(batch.segments[:num_samples]) for piece in batch.segments[num_samples:])
    padded_lengths = {len(batch.padded_tokens) for batch in batches}
    assert not equal_lengths or len(padded_lengths) == 1
    if not equal_lengths:
        assert all(len(b.padded_tokens) - b.num_tokens < multiple_of for b in batches)


@given(st.lists(st.integers(1, 30), min_size=1, max_size=20), st.integers(1, 60), st.integers(1, 5))
def test_bins_can_be_a_multiple_of_a_number(lengths: list[int], max_tokens: int, multiple: int) -> None:
    bins = balanced_bins(lengths, max_tokens, multiple)
    assert len(bins) % multiple == 0 and len(bins) - len(balanced_bins(lengths, max_tokens)) < 2 * multiple
    assert sorted(index for members in bins for index in members) == [*range(len(lengths))]
    assert all(sum(lengths[i] for i in members) <= max_tokens or len(members) == 1 for members in bins)
    assert all(bins[: len(lengths)]), "none is empty while samples are left for it"


def test_micro_batches_that_are_too_few_are_filled_up_with_padding() -> None:
    batches = pack(experience_of([3, 5]), 6, device=torch.device("cpu"), equal_lengths=True, count_multiple_of=4)
    assert [batch.lengths for batch in batches] == [(3,), (5,), (), ()]
    assert {sum(batch.segments) for batch in batches} == {5} == {len(batch.padded_tokens) for batch in batches}
    assert [batch.token_index.tolist() for batch in batches] == [[0, 1, 2], [3, 4, 5, 6, 7], [], []]
