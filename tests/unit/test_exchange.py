"""Tests of experience, of its shipments between roles, and of their connections."""

import socket
import struct
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock
from zlib import crc32

import pytest
import torch
import torch.distributed as dist
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rltrain.checkpoint.run_files import Contents, read_contents, write_files
from rltrain.data.experience import FIELDS, Experience, assign_groups, join, mini_batch_of
from rltrain.errors import CheckpointError
from rltrain.exchange.exchange import (
    Shipment,
    as_tensors,
    body_bytes,
    decode,
    encode,
    intake,
    joined,
    read_parts,
    receivers,
    share,
)
from rltrain.exchange.transport import HELLO, Called, Caller, InTransit, LinkLost, Transport
from rltrain.roles.transfers import Transfers
from rltrain.runtime.grid import Grid
from rltrain.schedule.order import Entries, Order
from tests.support.mutations import mutated_bytes


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


@given(st.just([]) | sample_lengths, st.lists(st.integers(0, 100), min_size=1, max_size=6))
@example(lengths=[], group_tokens=[5, 6])
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


KEY = ("rollout", "samples", 7, 0)
NUM_GROUPS = 6

owners = st.lists(st.integers(0, 3), min_size=NUM_GROUPS, max_size=NUM_GROUPS)
"""The replica that generated each group."""


def whole_step(seed: int = 0) -> Shipment:
    """Returns two samples of every group."""
    lengths = [1 + (5 * i + seed) % 7 for i in range(2 * NUM_GROUPS)]
    experience = make_experience(lengths, [i // 2 for i in range(2 * NUM_GROUPS)], seed)
    return Shipment(experience, torch.tensor(lengths).view(-1, 2).sum(1), torch.zeros(NUM_GROUPS, dtype=torch.int64))


def of_owner(step: Shipment, owner_of: list[int], owner: int) -> Shipment:
    mine = torch.tensor(owner_of)[step.experience.group_ids] == owner
    return replace(step, experience=step.experience.select(mine.nonzero().flatten()))


def assert_equal(one: Shipment, other: Shipment) -> None:
    assert one.experience.present() == other.experience.present()
    for name, values in one.experience.columns().items():
        assert torch.equal(values, getattr(other.experience, name)), name
    assert torch.equal(one.group_tokens, other.group_tokens)


@given(owners, st.integers(1, 6))
def test_replicas_of_any_number_send_on_the_whole_step(owner_of, num_replicas):
    step = whole_step()
    saved = [as_tensors({KEY: of_owner(step, owner_of, owner)}) for owner in range(4)]
    parts = read_parts(saved)[KEY]
    shares = [share(parts, replica, num_replicas) for replica in range(num_replicas)]
    assert_equal(joined(shares), step)
    for group in range(NUM_GROUPS):
        with_group = [replica for replica, part in enumerate(shares) if group in part.experience.group_ids]
        assert len(with_group) == 1, "a group stays together"
        assert all(part.holders[group] == with_group[0] for part in shares), "and all ranks know its place"
    for part in shares:
        assert all(values.dtype == FIELDS[name][0] for name, values in part.experience.columns().items())


def test_shipments_of_several_steps_do_not_mix():
    shipments = {(*KEY[:2], step, chunk): whole_step(step) for step in (7, 8) for chunk in (0, 1)}
    parts = read_parts([{}, as_tensors(shipments)])
    assert parts.keys() == shipments.keys()
    for key, (part,) in parts.items():
        assert_equal(part, shipments[key])


def test_a_file_holds_a_shipment_without_samples(tmp_path: Path):
    nothing = of_owner(whole_step(), [0] * NUM_GROUPS, 1)
    write_files(tmp_path, {"file": Contents(as_tensors({KEY: nothing}), {})})
    ((part,),) = read_parts([read_contents(tmp_path / "file").tensors]).values()
    assert_equal(part, nothing)


def transfers_of(order: Order, *roles: str) -> Transfers:
    """Returns the transfers of a rank with `roles` of one replica each."""
    hosted = {name: SimpleNamespace(shipments={}, dp=0, grid=SimpleNamespace(dp=1)) for name in roles}
    shape = SimpleNamespace(selects_groups=False, replays_rollout=False, sees=False)
    return Transfers(shape=shape, grids={}, order=order, exchange=None, roles=hosted, trace=None)


def crossing_order(step: int) -> Order:
    order = Entries()
    order.post("samples", "rollout", "reward", step)
    order.task("generate", "rollout", step=step + 1)
    order.post("samples", "rollout", "reward", step + 1)
    order.wait("samples", "rollout", "reward", step)
    order.wait("samples", "rollout", "reward", step + 1)
    return Order.of(order)


def test_what_crosses_goes_to_the_role_that_posted_it():
    saved = [as_tensors({KEY: whole_step()})]
    source, other = transfers_of(crossing_order(7), "rollout"), transfers_of(crossing_order(7), "reward")
    source.restore(saved)
    other.restore(saved)
    assert_equal(source.roles["rollout"].shipments["samples", 7, 0], whole_step())
    assert not other.roles["reward"].shipments


@pytest.mark.parametrize("saved", [[], [as_tensors({(*KEY[:2], 6, 0): whole_step()})]])
def test_what_the_order_does_not_begin_with_is_refused(saved):
    with pytest.raises(CheckpointError, match=r"expected \[\('rollout', 'samples', 7, 0\)\]"):
        transfers_of(crossing_order(7), "rollout").restore(saved)


@st.composite
def grids(draw: st.DrawFn, num_ranks: int) -> Grid:
    tp, pp, cp = (draw(st.sampled_from([1, 2, 3])) for _ in range(3))
    most = num_ranks // (tp * pp * cp)
    ranks = draw(st.permutations(range(num_ranks)))[: tp * pp * cp * draw(st.integers(1, max(most, 1)))]
    return Grid(tuple(sorted(ranks)), tp=tp, pp=pp, cp=cp)


@given(st.data())
def test_what_a_replica_is_due_enters_each_of_its_nodes_once_and_reaches_every_rank_once(data: Any) -> None:
    ranks_per_node = data.draw(st.sampled_from([1, 2, 4, 8, 24]))
    source, destination = data.draw(grids(24)), data.draw(grids(24))
    owners, node = source.owners(), lambda rank: rank // ranks_per_node
    for replica in (destination.replica(dp) for dp in range(destination.dp)):
        sent = {owner: receivers(owner, replica, ranks_per_node) for owner in owners}
        for owner, peers in sent.items():
            afar = Counter(node(peer) for peer in peers if node(peer) != node(owner))
            assert afar == Counter({node(rank) for rank in replica} - {node(owner)})
        taken = {rank: intake(rank, owners, replica, ranks_per_node) for rank in replica}
        for rank, of_rank in taken.items():
            assert {*of_rank.owners} == {owner for owner in owners if rank in sent[owner]} - {rank}
            for follower in of_rank.followers:
                assert taken[follower].relay == rank and not taken[follower].followers
            passed_on = taken[of_rank.relay].from_afar if of_rank.relay is not None else ()
            got = Counter([*of_rank.owners, *passed_on, *({rank} & {*owners})])
            assert got == Counter(owners)
            if of_rank.relay is not None:
                assert node(of_rank.relay) == node(rank) and rank in taken[of_rank.relay].followers


HOST = "127.0.0.1"
LONG_S = 30.0
TOKEN = "0" * 32


def at(rank: int, store: dist.Store) -> Transport:
    return Transport(rank, HOST, store, store)


@contextmanager
def transports(*ranks: int) -> Iterator[list[Transport]]:
    store = dist.HashStore()
    with ExitStack() as stack:
        made = [at(rank, store) for rank in ranks]
        for transport in made:
            stack.callback(transport.close)
        yield made


def numbers(size: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


@settings(max_examples=20)
@given(st.lists(st.tuples(st.sampled_from([*permutations(range(3), 2)]), st.sampled_from([0, 1, 7, 5000, 3_000_000]))))
def test_every_message_arrives_whole_under_its_tag_in_whatever_order_it_is_asked_for(sent: Any) -> None:
    with transports(0, 1, 2) as ranks:
        deliveries: list[list[InTransit]] = [[], [], []]
        for tag, ((source, peer), size) in enumerate(sent):
            message = numbers(size, seed=tag)
            deliveries[source].append(ranks[source].send(peer, tag, [message[: size // 2], message[size // 2 :]]))
        for tag, ((source, peer), size) in reversed([*enumerate(sent)]):
            received = ranks[peer].receive(source, tag)
            assert ranks[peer].wait([received], LONG_S)
            assert torch.equal(received.message, numbers(size, seed=tag))
        assert all(rank.wait(own, LONG_S) for rank, own in zip(ranks, deliveries, strict=True)), (
            "the senders notice the delivery"
        )


def test_who_sends_need_not_wait_until_the_other_side_is_there() -> None:
    store = dist.HashStore()
    first = at(0, store)
    delivery = first.send(1, 5, [torch.arange(4)])
    assert not first.wait([delivery], 0.05)
    second = at(1, store)
    received = second.receive(0, 5)
    assert second.wait([received], LONG_S) and first.wait([delivery], LONG_S)
    assert received.message.view(torch.int64).tolist() == [0, 1, 2, 3]
    first.close()
    second.close()


def test_ranks_connect_to_those_alone_that_they_have_something_for_or_wait_for() -> None:
    with transports(*range(6)) as ranks:
        deliveries = [ranks[0].send(1, 0, [torch.ones(1)])]
        received = [ranks[1].receive(0, 0)]
        assert ranks[0].wait(deliveries, LONG_S) and ranks[1].wait(received, LONG_S)
        assert [len(rank._callers) for rank in ranks][2:] == [0] * 4
        assert {*ranks[0]._callers} == {1} and {*ranks[1]._callers} <= {0}


@pytest.mark.parametrize("waits_for", ["a message", "a receipt"])
def test_a_wait_ends_with_the_name_of_who_is_gone(waits_for: str) -> None:
    store = dist.HashStore()
    mine, other = at(0, store), at(7, store)
    first = mine.send(7, 0, [torch.ones(1)])
    assert mine.wait([first], LONG_S)
    awaited = mine.receive(7, 1)
    assert not mine.wait([awaited], 0.05)
    other.close()
    if waits_for == "a receipt":
        awaited = mine.send(7, 2, [torch.ones(1)])
    with pytest.raises(ConnectionError, match="rank 7: "):
        mine.wait([awaited], LONG_S)
    mine.close()


def test_one_that_has_ended_harms_nobody_who_waits_for_others() -> None:
    store = dist.HashStore()
    mine, ended, other = at(0, store), at(1, store), at(2, store)
    done = ended.send(0, 0, [torch.ones(1)])
    assert ended.wait([done], LONG_S)
    ended.close()
    awaited = mine.receive(2, 0)
    assert not mine.wait([awaited], 0.05)
    other.send(0, 0, [torch.ones(1)])
    assert mine.wait([awaited, mine.receive(1, 0)], LONG_S), "the wait also covers earlier messages"
    mine.close()
    other.close()


def test_who_does_not_know_the_token_harms_nobody() -> None:
    with transports(0, 1) as (first, second):
        port = first._listener.getsockname()[1]
        counts = struct.pack("<QQ", 0, 1)
        for said in (b"", b"x" * 100, HELLO.pack(TOKEN.encode(), 1) + counts + struct.pack("<I", crc32(counts)) + b"?"):
            with socket.create_connection((HOST, port)) as stranger:
                stranger.sendall(said)
        delivery, received = second.send(0, 0, [torch.ones(1)]), first.receive(1, 0)
        assert first.wait([received], LONG_S) and second.wait([delivery], LONG_S)
        assert received.message.view(torch.float32).tolist() == [1.0]


@pytest.mark.parametrize("count", [200, pytest.param(2000, marks=pytest.mark.slow)])
def test_damaged_bytes_are_a_lost_link_or_whole_messages(count: int) -> None:
    with socket.create_server((HOST, 0)) as listener:
        caller = Caller(1, listener.getsockname()[:2], TOKEN, rank=3)
        for tag in range(3):
            caller.put(tag, [memoryview(bytes([tag] * 50))])
        whole = b"".join(caller._unsent)
        caller.socket.close()
        for damaged in mutated_bytes(whole, count):
            came = read_all(listener, damaged)
            assert len(came) <= 3 and all(tag < 3 and len(message) == 50 for tag, message in came)


def read_all(listener: socket.socket, sent: bytes) -> list[tuple[int, Any]]:
    """Returns the messages in the bytes of a peer that sends them and hangs up."""
    with socket.create_connection(listener.getsockname()[:2]) as theirs:
        called, came = Called(listener.accept()[0], TOKEN), list[tuple[int, Any]]()
        theirs.sendall(sent)
        theirs.shutdown(socket.SHUT_WR)
        with called.socket, pytest.raises(LinkLost):
            while True:
                came += called.read()
    return came
