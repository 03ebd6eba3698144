"""Traffic of four hosts' interfaces: every byte enters each host once if the host needs it."""

from typing import Any

import pytest

from tests.distributed.cases_interface_bytes import RANKS_PER_NODE
from tests.support.hosts import Hosts, obstacle
from tests.support.worlds import run_case

pytestmark = pytest.mark.slow

OVERHEAD, WORDS_BYTES = 0.02, 200_000
"""Upper limits: relative for headers of packets, absolute for all other overhead in bytes.

The latter covers acknowledgements, headers of messages, counts of groups, meetings, and two segments of 64 KiB that TCP
repeats on a busy machine.
"""
EVERY_RANK = "every rank as if on a node of its own"


@pytest.fixture(scope="module")
def ways(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    if reason := obstacle():
        pytest.skip(reason)
    with Hosts(tmp_path_factory.mktemp("hosts"), 4) as hosts:
        commands = [hosts.inside(number) for number in hosts.numbers]
        return run_case("cases_interface_bytes:every_way", 4 * RANKS_PER_NODE, hosts=commands)[0]


def test_a_byte_of_weights_or_experience_comes_to_each_host_that_needs_it_once(ways: dict[str, Any]) -> None:
    for name, way in ways.items():
        for direction in ("received", "sent"):
            for counted, due in zip(way["counted"][direction], way["due"][direction], strict=True):
                assert due <= counted, (name, direction, way)
                if name != EVERY_RANK:
                    assert counted <= due * (1 + OVERHEAD) + WORDS_BYTES, (name, direction, way)


def test_a_field_that_is_sent_to_every_rank_of_a_replica_is_seen(ways: dict[str, Any]) -> None:
    way = ways[EVERY_RANK]
    for counted, due in zip(way["counted"]["received"][:2], way["due"]["received"][:2], strict=True):
        assert counted >= RANKS_PER_NODE * due > 5 * WORDS_BYTES
