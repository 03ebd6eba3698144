"""Messages between ranks: whoever comes first, in any order, once; and waits for those whose other side is gone."""

import socket
import struct
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import permutations
from typing import Any
from zlib import crc32

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from rltrain.exchange.transport import HELLO, Called, Caller, InTransit, LinkLost, Transport
from tests.mutations import mutated_bytes

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
        assert all(rank.wait(own, LONG_S) for rank, own in zip(ranks, deliveries, strict=True)), "who sent them knows"


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
    assert mine.wait([awaited, mine.receive(1, 0)], LONG_S), "also for what came before the end"
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
    """The messages that are made of what somebody sends who then hangs up."""
    with socket.create_connection(listener.getsockname()[:2]) as theirs:
        called, came = Called(listener.accept()[0], TOKEN), list[tuple[int, Any]]()
        theirs.sendall(sent)
        theirs.shutdown(socket.SHUT_WR)
        with called.socket, pytest.raises(LinkLost):
            while True:
                came += called.read()
    return came
