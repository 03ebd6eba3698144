"""Over which network interface the ranks of several nodes meet."""

import logging
import os
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from rltrain.errors import StallError
from rltrain.runtime import world
from rltrain.runtime.world import (
    World,
    address_among_nodes,
    address_of,
    interface_with,
    join_world,
    own_address,
    start_process_groups,
)
from tests.unit.shared_store import on_ranks, open_store

ROUTES = {
    "first": {"master": "127.0.1.1", "10.0.0.2": "10.0.0.1"},  # as Debian has the host's name in /etc/hosts
    "second": {"master": "10.0.0.2"},
    "third": {"master": "10.0.0.3"},
}
"""By node and peer: where packets come from."""


def test_this_machine_reaches_itself_over_loopback() -> None:
    assert own_address("127.0.0.1") == "127.0.0.1"
    assert interface_with("127.0.0.1") == "lo"
    assert interface_with("203.0.113.7") is None, "an address that is nobody's"
    assert [address_of(names) for names in ("lo", "lo,eth0", "none", "")] == ["127.0.0.1", "127.0.0.1", None, None]


def test_interfaces_with_addresses_of_the_newer_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = tmp_path / "if_inet6"
    table.write_text(
        "00000000000000000000000000000001 01 80 10 80       lo\n"
        "fd000000000000000000000000000002 02 40 00 80   ib0\n"
    )  # fmt: skip
    monkeypatch.setattr(world, "IPV6_ADDRESSES", table)
    assert [interface_with(address) for address in ("::1", "fd00::2", "fd00::3")] == ["lo", "ib0", None]
    monkeypatch.setattr(world, "IPV6_ADDRESSES", tmp_path / "none")
    assert interface_with("::1") is None


def test_every_node_is_found_by_its_route_to_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    here = threading.local()
    monkeypatch.setattr(world, "own_address", lambda peer: ROUTES[here.node][peer])

    def address(rank: int, store: dist.Store) -> str:
        here.node = [*ROUTES][rank // 2]
        return address_among_nodes(store, rank, rank == 2, "master", timeout_s=10)

    with open_store() as store:
        assert on_ranks(store, address, 6) == [f"10.0.0.{rank // 2 + 1}" for rank in range(6)]


def test_a_second_node_that_does_not_come_is_named() -> None:
    with open_store() as store, pytest.raises(StallError, match="rank 0 has waited 0.1 s for .* the second node"):
        address_among_nodes(store, 0, False, "127.0.0.1", timeout_s=0.1)


@pytest.mark.parametrize(
    ("num_ranks", "named", "address"), [(2, "", "127.0.0.1"), (4, "", "10.0.0.1"), (4, "lo", "127.0.0.1")]
)
def test_ranks_of_several_nodes_know_the_address_of_their_own(
    monkeypatch: pytest.MonkeyPatch, num_ranks: int, named: str, address: str
) -> None:
    monkeypatch.setenv(world.GLOO_INTERFACE, named)
    for name, value in {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "master"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(world.dist, "rendezvous", lambda *_, **__: iter([(dist.HashStore(), 0, num_ranks)]))
    monkeypatch.setattr(world, "join_attempt", lambda *_: 0)
    monkeypatch.setattr(world, "address_among_nodes", lambda *_: "10.0.0.1")
    assert join_world(timeout_s=1).address == address


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[str | None]:
    """What gloo finds in its variable, every time that it is started."""
    seen: list[str | None] = []
    monkeypatch.setenv(world.GLOO_INTERFACE, "")  # so that it is as before when the test is over
    monkeypatch.delenv(world.GLOO_INTERFACE)
    monkeypatch.setattr(world, "interface_with", {"10.0.0.1": "ib0", "127.0.0.1": "lo"}.get)
    monkeypatch.setattr(
        world.dist, "init_process_group", lambda *_, **__: seen.append(os.environ.get(world.GLOO_INTERFACE))
    )
    return seen


def world_of(address: str, ranks_per_node: int = 2) -> World:
    store = dist.HashStore()
    return World(0, 4, 0, ranks_per_node, torch.device("cpu"), store, timeout_s=1, address=address)


def test_gloo_takes_the_interface_of_the_route(
    started: list[str | None], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        start_process_groups(world_of("10.0.0.1"))
    assert started == ["ib0"]
    assert "over ib0" in caplog.text and "GLOO_SOCKET_IFNAME" in caplog.text
    caplog.clear()
    monkeypatch.setenv(world.GLOO_INTERFACE, "eth7")
    start_process_groups(world_of("10.0.0.1"))
    assert started[1:] == ["eth7"] and not caplog.text, "a user's own setting wins"


def test_gloo_is_left_alone_where_nothing_is_to_be_chosen(
    started: list[str | None], caplog: pytest.LogCaptureFixture
) -> None:
    start_process_groups(world_of("10.0.0.1", ranks_per_node=4))
    assert not caplog.text
    start_process_groups(world_of("10.9.9.9"))
    assert started == [None, None] and "an interface of its own choice" in caplog.text
