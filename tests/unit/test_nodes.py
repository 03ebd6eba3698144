"""Nodes, interfaces, attempts to start, and the doctor."""

import logging
import os
import resource
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from packaging.requirements import Requirement

from rltrain.cli import doctor, doctor_job
from rltrain.cli.doctor import FINE, WRONG, Finding, has_fault
from rltrain.cli.doctor_job import Link, Storage, merged, of_clocks, of_links, of_storage, rounds_of_pairs, try_storage
from rltrain.cli.main import main
from rltrain.config.loader import load_config
from rltrain.errors import ConfigError, StallError
from rltrain.runtime import machine, nodes, world
from rltrain.runtime.nodes import Compared, NodeBoard, NodeDifference, Spoken, compare_nodes, refuse_folders_apart
from rltrain.runtime.world import (
    World,
    address_among_nodes,
    address_of,
    interface_with,
    join_attempt,
    join_world,
    own_address,
    start_process_groups,
)
from tests.support.script_stand_ins import REPOSITORY
from tests.support.shared_store import Jobs, at_the_same_time, on_ranks, open_store


def world_of(node: int, store: dist.Store, num_nodes: int = 2) -> World:
    """Returns the world of a node with one rank."""
    return World(node, num_nodes, 0, 1, torch.device("cpu"), store, 10, node=node, num_nodes=num_nodes)


def test_a_folder_that_another_node_has_by_the_same_name_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nodes, "VISIBLE_WITHIN_S", 0.3)
    (tmp_path / "lock").write_text("held by the leader")

    def refusal(node: int, store: dist.Store, theirs: str) -> str:
        """Returns the refusal of a node. Node 1 expects to find the text `theirs`."""
        text = "held by the leader" if node == 0 else theirs
        try:
            refuse_folders_apart(world_of(node, store), {"checkpoint.dir": (str(tmp_path / "lock"), text)})
        except ConfigError as error:
            return str(error)
        return ""

    with open_store() as store:
        said = on_ranks(store, lambda node, own: refusal(node, own, "held by another"), 2)
    assert said[0] == said[1] and said[0].count("checkpoint.dir: ") == 1 and "on node 1 (" in said[0]
    with open_store() as store:
        assert on_ranks(store, lambda node, own: refusal(node, own, "held by the leader"), 2) == ["", ""]


def test_a_file_that_comes_to_be_seen_late_is_seen(tmp_path: Path) -> None:
    late = threading.Timer(0.2, lambda: (tmp_path / "lock").write_text("text"))
    late.start()
    assert nodes._unseen({"checkpoint.dir": (str(tmp_path / "lock"), "text")}) == []


def test_what_cannot_be_written_is_said_with_its_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert [*machine.problems_of_disks({"output_dir": str(tmp_path / "not/yet/there")})] == []
    assert "is read-only" in next(machine.problems_of_disks({"output_dir": "/proc/sys"}))
    monkeypatch.setattr(machine, "LEAST_FREE_BYTES", 1 << 60)
    assert f"checkpoint.dir: {tmp_path} is full" in next(machine.problems_of_disks({"checkpoint.dir": str(tmp_path)}))
    monkeypatch.setattr(machine, "SHARED_MEMORY", tmp_path / "none")
    assert "--shm-size" in next(machine.problems_of_shared_memory())


def test_memory_for_servers_is_asked_for_where_their_role_is_placed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "problems_of_shared_memory", lambda: ["too little"])
    served = load_config(REPOSITORY / "configs/quickstart.yaml", ["rollout.engine=sglang"])
    trained = served.model_copy(update={"placement": {"actor": 0}})
    with open_store() as store:
        found = [nodes.of_machine(config, world_of(0, store), {}).problems for config in (served, trained)]
    assert found == [["too little"], []]


def test_code_and_config_are_compared_key_by_key(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("x = 1")
    before = nodes.digest_of_code(tmp_path)
    (tmp_path / "a.py").write_text("x = 2")
    nodes.digest_of_code.cache_clear()
    assert before != nodes.digest_of_code(tmp_path)
    config = load_config(REPOSITORY / "configs/quickstart.yaml", ["steps=7"])
    with open_store() as store:
        said = nodes.of_program(config, world_of(0, store)).compared
    assert said["config key steps"] == "7" and said["version of torch"].startswith(torch.__version__.partition("+")[0])
    assert "config key batch.prompts_per_step" in said


ROUTES = {
    "first": {"master": "127.0.1.1", "10.0.0.2": "10.0.0.1"},  # Debian's entry of the host name in /etc/hosts
    "second": {"master": "10.0.0.2"},
    "third": {"master": "10.0.0.3"},
}
"""The source address of packets, by node and peer."""


def test_this_machine_reaches_itself_over_loopback() -> None:
    assert own_address("127.0.0.1") == "127.0.0.1"
    assert interface_with("127.0.0.1") == "lo"
    assert interface_with("203.0.113.7") is None, "an address of no machine"
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
    """Returns a list of gloo's interface variable at each start of gloo."""
    seen: list[str | None] = []
    monkeypatch.setenv(world.GLOO_INTERFACE, "")  # so the test restores it
    monkeypatch.delenv(world.GLOO_INTERFACE)
    monkeypatch.setattr(world, "interface_with", {"10.0.0.1": "ib0", "127.0.0.1": "lo"}.get)
    monkeypatch.setattr(
        world.dist, "init_process_group", lambda *_, **__: seen.append(os.environ.get(world.GLOO_INTERFACE))
    )
    return seen


def world_at(address: str, ranks_per_node: int = 2) -> World:
    store = dist.HashStore()
    return World(0, 4, 0, ranks_per_node, torch.device("cpu"), store, timeout_s=1, address=address)


def test_gloo_takes_the_interface_of_the_route(
    started: list[str | None], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        start_process_groups(world_at("10.0.0.1"))
    assert started == ["ib0"]
    assert "over ib0" in caplog.text and "GLOO_SOCKET_IFNAME" in caplog.text
    caplog.clear()
    monkeypatch.setenv(world.GLOO_INTERFACE, "eth7")
    start_process_groups(world_at("10.0.0.1"))
    assert started[1:] == ["eth7"] and not caplog.text, "a user's own setting wins"


def test_gloo_is_left_alone_where_nothing_is_to_be_chosen(
    started: list[str | None], caplog: pytest.LogCaptureFixture
) -> None:
    start_process_groups(world_at("10.0.0.1", ranks_per_node=4))
    assert not caplog.text
    start_process_groups(world_at("10.9.9.9"))
    assert started == [None, None] and "an interface that gloo chooses" in caplog.text


NUM_RANKS = 3


@pytest.fixture
def stores() -> Iterator[list[dist.Store]]:
    with open_store() as store:
        yield Jobs(store, NUM_RANKS).start(NUM_RANKS)


def join_all(stores: list[dist.Store]) -> list[int]:
    return at_the_same_time(stores, lambda rank, store: join_attempt(store, rank, NUM_RANKS, timeout_s=10))


def test_every_attempt_has_a_number_of_its_own(stores: list[dist.Store]) -> None:
    assert [join_all(stores) for _ in range(4)] == [[attempt] * NUM_RANKS for attempt in range(4)]


def test_the_store_keeps_the_last_two_attempts(stores: list[dist.Store]) -> None:
    numbers = []
    for attempt in range(6):
        join_all(stores)
        stores[1].set(f"attempt{attempt}/a/key", "of a rank")
        numbers.append(stores[1].num_keys())  # counted after this rank's writes
    assert stores[2].check(["attempt4/a/key", "attempt5/a/key"]) and not stores[2].check(["attempt3/a/key"])
    assert numbers[2:] == numbers[2:3] * 4


@pytest.mark.parametrize("came", [[0], [1], [2, 0], [1, 2]])
def test_ranks_that_came_in_vain_do_not_count(stores: list[dist.Store], came: list[int]) -> None:
    """In the first attempt a rank died before it joined."""
    for rank in came:
        with pytest.raises(StallError, match="have not started within|for rank 0 to start"):
            join_attempt(stores[rank], rank, NUM_RANKS, timeout_s=0.1)
    attempts = join_all(stores)
    assert attempts == [int(0 in came)] * NUM_RANKS


def test_the_ranks_that_are_missing_are_named(stores: list[dist.Store]) -> None:
    with pytest.raises(StallError, match=r"ranks \[1, 2\] have not started within 0.1 s"):
        join_attempt(stores[0], 0, NUM_RANKS, timeout_s=0.1)


THREE = Compared(hosts=("a", "b", "c"), differences=(), problems={})


def test_it_tells_what_is_missing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(doctor, "LEAST_SHARED_GB", 0)
    assert main(["doctor"]) == 0
    told = capsys.readouterr().out
    assert "megatron-core" in told and "Megatron's own: " in told and "open files" in told
    monkeypatch.setattr(doctor, "NEEDED", ("torch", "no-such-package"))
    assert main(["doctor", "--sglang-python", "/nowhere/python"]) == 1
    told = capsys.readouterr().out
    assert "MISSING no-such-package" in told and "/nowhere/python" in told and "pip install -e ." in told


@pytest.mark.parametrize("asked", [[], ["--nproc-per-node", "2"]])
def test_it_needs_no_package(asked: list[str]) -> None:
    bare = [sys.executable, "-S", "-E"]
    assert subprocess.run([*bare, "-c", "import yaml"], capture_output=True, check=False).returncode
    environment = {name: value for name, value in os.environ.items() if name != "RANK"}
    done = subprocess.run(
        [*bare, "-m", "rltrain", "doctor", *asked],
        cwd=REPOSITORY,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1 and not done.stderr
    assert all(f"MISSING {name}" in done.stdout for name in doctor.NEEDED)
    assert "open files" in done.stdout and "bash launch/quickstart.sh" in done.stdout.splitlines()[-1]


def test_it_asks_for_all_dependencies() -> None:
    texts = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["dependencies"]
    assert [Requirement(text).name for text in texts] == [*doctor.NEEDED]


def test_a_torch_that_cannot_be_imported_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        def find_spec(self, name: str, *_: object) -> None:
            if name == "torch":
                raise ImportError("libcudart.so.13: cannot open shared object file")

    monkeypatch.delitem(sys.modules, "torch")
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(sys, "meta_path", [Broken(), *sys.meta_path])
    told = next(finding for finding in doctor.what_is_installed() if finding.what == "GPUs")
    assert told.state == WRONG and "libcudart.so.13" in told.detail


def test_limits_that_are_too_low_are_faults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "ulimit -n (up to 4000" in doctor.open_files(1024, 4000).detail
    assert doctor.open_files(resource.RLIM_INFINITY, resource.RLIM_INFINITY).state == FINE
    assert "unlimited" in doctor.locked_memory(2**23).detail
    assert doctor.room("disk", tmp_path / "none", 1).state == WRONG
    monkeypatch.setattr(doctor, "free_bytes", lambda _: 64 << 20)
    told = [finding for finding in doctor.what_is_allowed([tmp_path]) if finding.what.startswith(("shared", "disk"))]
    assert len(told) == 3 and all("0.0671 GB free" in finding.detail for finding in told)
    assert "--shm-size" in told[0].detail and has_fault(told)


def test_nodes_are_compared_with_the_first_one() -> None:
    said = [
        Spoken({"torch": "2.13", "x": "1"}),
        Spoken({"torch": "2.12"}, ["no disk"]),
        Spoken({"torch": "2.12", "x": "1"}),
    ]
    with open_store() as store:
        heard = on_ranks(store, lambda node, own: compare_nodes(NodeBoard(world_of(node, own, 3), "x"), said[node]), 3)
    assert heard[1:] == [None, None] and heard[0] is not None
    assert heard[0].differences == [
        NodeDifference("torch", {"2.13": [0], "2.12": [1, 2]}),
        NodeDifference("x", {"1": [0, 2], "nothing": [1]}),
    ]
    assert heard[0].problems == {"no disk": [1]} and len(heard[0].sentences()) == 3


def test_findings_of_nodes_are_said_once_where_they_agree() -> None:
    same, plain = Finding("python", FINE, "3.11", True), Finding("disk", FINE, "9 GB free")
    old, new = (Finding("torch", FINE, version, True) for version in ("2.12", "2.13"))
    told = [*merged([[same, old], [same, new, plain], [same, new]], THREE)]
    assert told == [
        same,
        Finding("torch", WRONG, "2.12, on node 0 (a); differs between nodes"),
        Finding("torch", WRONG, "2.13, on nodes 1-2 (b, c); differs between nodes"),
        Finding("disk", FINE, "9 GB free, on node 1 (b)"),
    ]


@given(st.integers(1, 12))
def test_every_pair_of_nodes_has_one_round(count: int) -> None:
    rounds = [*rounds_of_pairs(count)]
    assert sorted(pair for pairs in rounds for pair in pairs) == [*combinations(range(count), 2)]
    assert all(len({node for pair in pairs for node in pair}) == 2 * len(pairs) for pairs in rounds)


def test_slow_and_broken_links_are_named() -> None:
    fast = [Link((0, 1), 10, 10), Link((0, 2), 10, 9)]
    told = [*of_links([Link((0,), 90, 1), *fast, Link((1, 2), 8, 4)], THREE)]
    assert [finding.state for finding in told] == [FINE, FINE, FINE, WRONG, WRONG]
    assert told[-1].what == "slowest link" and "nodes 1-2 (b, c), all-to-all 4 GB/s" in told[-1].detail
    told = [*of_links([*fast, Link((1, 2), failure="Connection closed by peer")], THREE)]
    assert told[2] == Finding("between nodes 1-2 (b, c)", WRONG, "Connection closed by peer")
    assert "nodes 0,2 (a, c)" in told[-1].detail and told[-1].state == FINE


def test_clocks_apart_are_a_fault() -> None:
    assert [*of_clocks([0.0], THREE)] == []
    assert [finding.state for finding in of_clocks([0.0, 0.4, -0.9], THREE)] == [FINE]
    told = [*of_clocks([0.0, 0.4, -2.5], THREE)]
    assert told[0].state == WRONG and "2.5 s" in told[0].detail and "node 2 (c)" in told[0].detail


def test_a_folder_that_nodes_do_not_share_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_job, "VISIBLE_WITHIN_S", 0.3)
    folders = [tmp_path / "shared", tmp_path / "shared", tmp_path / "own"]
    for folder in folders:
        folder.mkdir(exist_ok=True)

    def body(node: int, store: dist.Store) -> list[Storage] | None:
        world = world_of(node, store, 3)
        monkeypatch.setattr(NodeBoard, "__init__", _of_one_topic)
        return try_storage(world, folders[node], 1 << 20)

    with open_store() as store:
        by_node, *others = on_ranks(store, body, 3)
    assert others == [None, None] and by_node is not None
    assert [one.unseen for one in by_node] == [(2,), (2,), (0, 1)]
    told = [*of_storage("shared", by_node, THREE)]
    assert has_fault(told) and told[2].detail == "node 2 (c) does not see files written on nodes 0-1 (a, b)"
    assert not [*tmp_path.rglob(".rltrain*")], "nothing is left"


def _of_one_topic(board: NodeBoard, world: World, topic: str) -> None:
    """Puts a board on the topic "storage". The nodes of this test have different folders, as if links led to other
    disks."""
    board.world, board.topic = world, "storage"
    board._store = dist.PrefixStore("nodes/storage", world.store)


def test_a_folder_that_one_node_cannot_write_is_named(tmp_path: Path) -> None:
    with open_store() as store:
        world = world_of(0, store, 1)
        by_node = try_storage(world, tmp_path, 1 << 20)
        assert by_node is not None and [finding.state for finding in of_storage("x", by_node, THREE)] == [FINE]
        by_node = try_storage(world, tmp_path / "none", 1 << 20)
    assert by_node is not None
    told = [*of_storage("x", by_node, THREE)]
    assert "cannot be written: No such file or directory, on node 0 (a)" in told[0].detail and has_fault(told)
