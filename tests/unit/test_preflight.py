"""What a node says of itself at the start, and folders that nodes do not share."""

import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from rltrain.config.loader import load_config
from rltrain.errors import ConfigError
from rltrain.runtime import machine, nodes
from rltrain.runtime.nodes import refuse_folders_apart
from rltrain.runtime.world import World
from tests.unit.script_stand_ins import REPOSITORY
from tests.unit.shared_store import on_ranks, open_store


def world_of(node: int, store: dist.Store) -> World:
    return World(node, 2, 0, 1, torch.device("cpu"), store, 10, node=node, num_nodes=2)


def test_a_folder_that_another_node_has_by_the_same_name_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nodes, "VISIBLE_WITHIN_S", 0.3)
    (tmp_path / "lock").write_text("held by the leader")

    def refusal(node: int, store: dist.Store, theirs: str) -> str:
        """`theirs`: what node 1 expects to find."""
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
