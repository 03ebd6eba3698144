"""What the doctor says of a machine, and of nodes that are unlike each other."""

import os
import resource
import subprocess
import sys
import tomllib
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
from rltrain.runtime.nodes import Compared, NodeBoard, NodeDifference, Spoken, compare_nodes
from rltrain.runtime.world import World
from tests.unit.shared_store import on_ranks, open_store

REPOSITORY = Path(__file__).resolve().parents[2]
THREE = Compared(hosts=("a", "b", "c"), differences=(), problems={})


def world_of(node: int, num_nodes: int, store: dist.Store, timeout_s: float = 10) -> World:
    """Of a node of one rank."""
    cpu = torch.device("cpu")
    return World(node, num_nodes, 0, 1, cpu, store, timeout_s, node=node, num_nodes=num_nodes)


def test_it_tells_what_is_missing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(doctor, "LEAST_SHARED_GB", 0)
    assert doctor.main([]) == 0
    told = capsys.readouterr().out
    assert "megatron-core" in told and "Megatron's own: " in told and "open files" in told
    monkeypatch.setattr(doctor, "NEEDED", ("torch", "no-such-package"))
    assert doctor.main(["--sglang-python", "/nowhere/python"]) == 1
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
        heard = on_ranks(store, lambda node, own: compare_nodes(NodeBoard(world_of(node, 3, own), "x"), said[node]), 3)
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
        world = world_of(node, 3, store)
        monkeypatch.setattr(NodeBoard, "__init__", _of_one_topic)
        return try_storage(world, folders[node], 1 << 20)

    with open_store() as store:
        by_node, *others = on_ranks(store, body, 3)
    assert others == [None, None] and by_node is not None
    assert [one.unseen for one in by_node] == [(2,), (2,), (0, 1)]
    told = [*of_storage("shared", by_node, THREE)]
    assert has_fault(told) and told[2].detail == "node 2 (c) does not see what is written on nodes 0-1 (a, b)"
    assert not [*tmp_path.rglob(".rltrain*")], "nothing is left"


def _of_one_topic(board: NodeBoard, world: World, topic: str) -> None:
    """Nodes of this test call their folders differently, as a link to another disk would be called the same."""
    board.world, board.topic = world, "storage"
    board._store = dist.PrefixStore("nodes/storage", world.store)


def test_a_folder_that_one_node_cannot_write_is_named(tmp_path: Path) -> None:
    with open_store() as store:
        world = world_of(0, 1, store)
        by_node = try_storage(world, tmp_path, 1 << 20)
        assert by_node is not None and [finding.state for finding in of_storage("x", by_node, THREE)] == [FINE]
        by_node = try_storage(world, tmp_path / "none", 1 << 20)
    assert by_node is not None
    told = [*of_storage("x", by_node, THREE)]
    assert "cannot be written: No such file or directory, on node 0 (a)" in told[0].detail and has_fault(told)
