"""Images of experience that goes to another node. Threads are ranks, and every node has a store of its own."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from rltrain.errors import ExchangeError
from rltrain.exchange.exchange import Exchange, Route, Shipment
from rltrain.exchange.image_requests import asked, decode_images, encode_images, keys_of
from rltrain.exchange.transport import Transport
from rltrain.runtime.grid import Grid
from rltrain.runtime.image_files import ImageStore, Pixels
from tests.support.shared_store import ShortPatience, on_ranks, open_store
from tests.unit.test_exchange import make_experience

RANKS_PER_NODE = 2
FIELDS = ("group_ids", "lengths", "tokens", "image_keys")
SIZE = 6 * 8 * 3
"""Bytes of an image."""


def image(key: int) -> Pixels:
    return np.random.default_rng(key).integers(0, 256, (1, 6, 8, 3), np.uint8)


def showing(keys_of_groups: Sequence[Sequence[int]], samples_per_group: int = 3) -> Shipment:
    """Returns samples of several groups, from one replica. All samples of a group show its images, two tokens each."""
    of_samples = [keys for keys in keys_of_groups for _ in range(samples_per_group)]
    lengths = [2 + 2 * len(keys) for keys in of_samples]
    groups = [group for group in range(len(keys_of_groups)) for _ in range(samples_per_group)]
    tokens = [place for keys in of_samples for place in (0, *(key for key in keys for _ in range(2)), 0)]
    experience = make_experience(lengths, groups).with_fields(image_keys=torch.tensor(tokens))
    group_tokens = torch.tensor(lengths).view(-1, samples_per_group).sum(1)
    return Shipment(experience, group_tokens, torch.zeros(len(keys_of_groups), dtype=torch.int64))


@dataclass
class Rank:
    exchange: Exchange
    images: ImageStore

    def sends(self, route: Route, shipment: Shipment) -> None:
        self.exchange.post(route, shipment)

    def receives(self, route: Route) -> list[int]:
        """Returns the keys of the received experience. Their images are held then, and have the right pixels."""
        keys = keys_of(self.exchange.wait(route).experience)
        self.images.hold(keys, step=1)
        assert all(np.array_equal(self.images.pixels(key), image(key)) for key in keys)
        return keys

    def ends(self) -> int:
        """Returns the bytes of images that this rank has sent to other nodes."""
        self.exchange.retire([*self.exchange.outbox])
        self.exchange.finish()
        return self.exchange.image_bytes_sent


@pytest.fixture(scope="module")
def store() -> Iterator[dist.TCPStore]:
    with open_store() as opened:
        yield opened


def run(store: dist.TCPStore, folder: Path, num_ranks: int, body: Callable[[Rank, int], Any]) -> list[Any]:
    """Runs `body(rank, number)` on all ranks at the same time. Returns its results by rank."""

    with ExitStack() as stack:
        nodes = [number // RANKS_PER_NODE for number in range(num_ranks)]
        opened = [
            ImageStore.open(f"job node {node}", number, folder=str(folder), keep_steps=2, cache_bytes=0)
            for number, node in enumerate(nodes)
        ]
        for images in opened:
            stack.callback(images.close)

        def on_rank(number: int, own: dist.Store) -> Any:
            prefixed = dist.PrefixStore(folder.name, own)
            transport = Transport(number, "127.0.0.1", prefixed, prefixed)
            waiter: Any = ShortPatience()
            rank = Rank(Exchange(number, transport, waiter, RANKS_PER_NODE, images=opened[number]), opened[number])
            result = body(rank, number)
            stack.callback(transport.close)
            return result

        return on_ranks(store, on_rank, num_ranks)


def test_images_go_to_each_node_once(store: dist.TCPStore, tmp_path: Path) -> None:
    """Rank 0 sends the same samples to rank 1 on its node, to a replica over two ranks of node 1, and to two replicas
    of another role there. Group 0 and group 2 show the same image."""
    whole = showing([[7], [8, 9], [7], []])
    routes = [
        Route(f"to {place}", Grid((0,)), grid, FIELDS, place)
        for place, grid in enumerate([Grid((1,)), Grid((2, 3), tp=2), Grid((2, 3))])
    ]

    def body(rank: Rank, number: int) -> Any:
        if number == 0:
            for key in (7, 8, 9):
                rank.images.put(key, image(key), step=1)
            for route in routes:
                rank.sends(route, whole)
        return [rank.receives(route) for route in routes if number in route.destination.ranks], rank.ends()

    (_, sent), (near, _), *far = run(store, tmp_path, 4, body)
    assert near == [[7, 8, 9]] and [keys[0] for keys, _ in far] == [[7, 8, 9]] * 2
    assert {key for keys, _ in far for key in keys[1]} == {7, 8, 9}
    assert sent == 3 * SIZE and not any(others for _, others in far)


def test_images_already_on_a_node_are_not_sent(store: dist.TCPStore, tmp_path: Path) -> None:
    route = Route("samples", Grid((0,)), Grid((2,)), FIELDS, 0)

    def body(rank: Rank, number: int) -> Any:
        if number == 0:
            for key in (7, 8):
                rank.images.put(key, image(key), step=1)
            rank.sends(route, showing([[7], [8]]))
        if number == 2:
            rank.images.put(7, image(7), step=1)
            rank.receives(route)
        return rank.ends()

    assert run(store, tmp_path, 3, body) == [SIZE, 0, 0]


def test_several_owners_send_their_own_images(store: dist.TCPStore, tmp_path: Path) -> None:
    route = Route("samples", Grid((0, 1)), Grid((2, 3)), FIELDS, 0)
    whole = showing([[7], [8], [9], [10]])
    holders = torch.tensor([0, 1, 1, 0])

    def body(rank: Rank, number: int) -> Any:
        if number < 2:
            mine = torch.nonzero(holders[whole.experience.group_ids] == number).flatten()
            for key in keys_of(whole.experience.select(mine)):
                rank.images.put(key, image(key), step=1)
            rank.sends(route, Shipment(whole.experience.select(mine), whole.group_tokens, holders))
            return rank.ends()
        return rank.receives(route)

    first, second, *received = run(store, tmp_path, 4, body)
    assert first == second == 2 * SIZE
    assert sorted(key for keys in received for key in keys) == [7, 8, 9, 10]


def test_a_sender_keeps_its_images_until_the_others_have_them(store: dist.TCPStore, tmp_path: Path) -> None:
    """The receiver comes late. The end of the sender waits for it."""
    route = Route("samples", Grid((0,)), Grid((2,)), FIELDS, 0)
    ended = []

    def body(rank: Rank, number: int) -> Any:
        if number == 0:
            rank.images.put(7, image(7), step=1)
            rank.sends(route, showing([[7]]))
            rank.ends()
            ended.append(True)
            rank.images.release_before(99)
        if number == 2:
            assert not rank.exchange.transport.wait([rank.exchange.transport.receive(0, 1000)], 0.2) and not ended
            return rank.receives(route)
        return None

    assert run(store, tmp_path, 3, body)[2] == [7]


# Answers.


@pytest.fixture
def images(tmp_path: Path) -> Iterator[ImageStore]:
    opened = ImageStore.open("job", 0, folder=str(tmp_path), keep_steps=2, cache_bytes=0)
    for key in (7, 8):
        opened.put(key, image(key), step=0)
    yield opened
    opened.close()


def message_of(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([torch.empty(0, dtype=torch.uint8), *(part.flatten().view(torch.uint8) for part in parts)])


def test_an_answer_decodes_to_the_images(images: ImageStore) -> None:
    found = dict(decode_images(message_of(encode_images(images, [8, 7]))))
    assert [*found] == [8, 7] and all(np.array_equal(pixels, image(key)) for key, pixels in found.items())
    assert [*decode_images(message_of(encode_images(images, [])))] == []
    assert asked(torch.tensor([2**62, 1]).view(torch.uint8)) == [2**62, 1]


def test_a_removed_image_ends_the_job_of_those_that_need_it(images: ImageStore) -> None:
    with pytest.raises(ExchangeError, match=r"needs the images \[9\], but this one has removed them"):
        encode_images(images, [7, 9])


@given(st.binary(max_size=200))
def test_a_damaged_answer_is_refused(damaged: bytes) -> None:
    message = torch.frombuffer(bytearray(damaged), dtype=torch.uint8) if damaged else torch.empty(0, dtype=torch.uint8)
    if message[:8].any() or len(message) != 8:
        with pytest.raises(ExchangeError, match="bytes with .* images arrived"):
            list(decode_images(message))
