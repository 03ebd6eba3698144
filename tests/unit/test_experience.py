"""Experience: selecting and joining samples, their assignment to replicas, and their encoding as bytes."""

from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rltrain.data.experience import Experience, assign_groups, join, mini_batch_of
from rltrain.exchange.exchange import Shipment, body_bytes, decode, encode


def make_experience(lengths, group_ids=None, seed=0):
    generator = torch.Generator().manual_seed(seed)
    num_tokens = sum(lengths)
    return Experience(
        sample_ids=torch.randperm(100 + len(lengths), generator=generator)[: len(lengths)],
        group_ids=torch.tensor(group_ids if group_ids is not None else range(len(lengths)), dtype=torch.int64),
        prompt_ids=torch.arange(len(lengths)) * 7,
        lengths=torch.tensor(lengths, dtype=torch.int64),
        truncated=torch.rand(len(lengths), generator=generator) < 0.5,
        tokens=torch.randint(0, 1000, (num_tokens,), generator=generator),
        response_mask=torch.rand(num_tokens, generator=generator) < 0.5,
        policy_version=torch.randint(0, 9, (num_tokens,), generator=generator, dtype=torch.int32),
        rollout_logprobs=torch.randn(num_tokens, generator=generator),
        turns=torch.ones(len(lengths), dtype=torch.int32),
        turn_rewards=torch.zeros(num_tokens),
        reward_parts=torch.randn(len(lengths), 3, generator=generator),
    )


sample_lengths = st.lists(st.integers(1, 9), min_size=1, max_size=12)


@given(sample_lengths, st.data())
def test_take_keeps_each_sample_whole(lengths, data):
    experience = make_experience(lengths)
    samples = data.draw(st.lists(st.integers(0, len(lengths) - 1), max_size=10))
    with mock.patch("rltrain.data.experience.LONG_SAMPLE_TOKENS", data.draw(st.sampled_from([0, 6, 256]))):
        chosen = experience.select(torch.tensor(samples, dtype=torch.int64))
    expected = [experience.tokens.split(lengths)[i] for i in samples]
    assert chosen.lengths.tolist() == [lengths[i] for i in samples]
    assert torch.equal(chosen.tokens, torch.cat([torch.empty(0, dtype=torch.int64), *expected]))


@given(sample_lengths, st.data())
def test_parts_join_to_the_whole(lengths, data):
    whole = make_experience(lengths)
    cut = data.draw(st.integers(0, len(lengths)))
    joined = join([whole.select(torch.arange(cut)), whole.select(torch.arange(cut, len(lengths)))])
    assert joined.present() == whole.present()
    assert all(torch.equal(value, getattr(whole, name)) for name, value in joined.columns().items())


def test_a_field_that_is_not_there_is_named():
    part = make_experience([3, 4]).only(("group_ids", "lengths", "tokens"))
    assert part.present() == ("group_ids", "lengths", "tokens")
    assert not part.has("rewards")
    with pytest.raises(ValueError, match="no rewards in this experience; present: group_ids, lengths, tokens"):
        _ = part.rewards
    with pytest.raises(ValueError, match="no rewards"):
        part.only(("group_ids", "lengths", "rewards"))
    assert not hasattr(part, "reward"), "no field at all"
    assert part.select(torch.tensor([1])).present() == part.present()


def test_fields_of_other_samples_are_not_taken():
    whole = make_experience([3, 4])
    other = make_experience([3, 4], [1, 0]).with_fields(values=torch.zeros(7))
    with pytest.raises(AssertionError, match="assignment of groups"):
        whole.with_fields_of(other)
    taken = whole.with_fields_of(other.with_fields(group_ids=whole.group_ids))
    assert {*taken.present()} == {*whole.present(), "values"}


@given(sample_lengths, st.lists(st.integers(0, 100), min_size=1, max_size=6))
def test_a_message_decodes_to_what_was_encoded(lengths, group_tokens):
    shipment = Shipment(make_experience(lengths), torch.tensor(group_tokens), torch.arange(len(group_tokens)))
    fields = shipment.experience.present()
    header, body = encode(shipment, fields)
    assert len(body) == body_bytes(header, fields)
    received = decode(header, body, fields)
    assert torch.equal(received.group_tokens, shipment.group_tokens)
    assert torch.equal(received.holders, shipment.holders)
    assert received.experience.present() == fields
    for name in fields:
        assert torch.equal(getattr(received.experience, name), getattr(shipment.experience, name))


def test_a_message_without_samples_still_says_how_many_groups_there_are():
    nothing = make_experience([3]).select(torch.empty(0, dtype=torch.int64))
    header, body = encode(Shipment(nothing, torch.tensor([5, 6]), torch.tensor([0, 1])), nothing.present())
    assert decode(header, body, nothing.present()).group_tokens.tolist() == [5, 6]


@given(st.lists(st.integers(1, 100), min_size=4, max_size=40), st.integers(1, 4))
def test_longest_first_is_balanced_to_within_the_longest_group(group_tokens, num_replicas):
    replicas = assign_groups(torch.tensor(group_tokens), num_replicas)
    loads = [
        sum(t for t, r in zip(group_tokens, replicas.tolist(), strict=True) if r == i) for i in range(num_replicas)
    ]
    assert max(loads) - min(loads) <= max(group_tokens)
    assert set(replicas.tolist()) == set(range(num_replicas))


batch_shapes = st.sampled_from([(1, 1), (1, 3), (4, 2), (4, 4), (2, 6), (16, 4)])


@given(st.integers(1, 4), batch_shapes, st.integers(1, 4), st.randoms(use_true_random=False))
def test_every_replica_has_a_share_of_every_equal_mini_batch(num_replicas, shape, factor, rng):
    samples_per_group, num_mini_batches = shape
    num_blocks = max(num_mini_batches // samples_per_group, 1)
    shape = (samples_per_group, num_mini_batches, num_blocks)
    num_groups = num_replicas * num_blocks * factor
    group_tokens = torch.tensor([rng.randint(1, 50) for _ in range(num_groups)])
    replicas = assign_groups(group_tokens, num_replicas, num_blocks)
    group_ids = torch.arange(num_groups).repeat_interleave(samples_per_group)
    everywhere = mini_batch_of(group_ids, num_groups, *shape)
    assert everywhere.bincount().tolist() == [num_groups * samples_per_group // num_mini_batches] * num_mini_batches
    for replica in range(num_replicas):
        mine = replicas[group_ids] == replica
        here = mini_batch_of(group_ids[mine], num_groups, *shape)
        assert torch.equal(here, everywhere[mine])
        assert set(here.tolist()) == set(range(num_mini_batches))


def test_mini_batches_hold_samples_of_every_group_where_they_can():
    group_ids = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1])
    assert mini_batch_of(group_ids, 2, 4, 2, 1).tolist() == [0, 0, 1, 1, 0, 0, 1, 1]
    assert mini_batch_of(torch.arange(4), 4, 1, 2, 2).tolist() == [0, 0, 1, 1]
