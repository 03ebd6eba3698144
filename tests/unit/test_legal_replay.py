"""model.router_replay is refused where nothing could be replayed, and its bytes are foretold."""

from typing import Any

import pytest

from rltrain.errors import ConfigError
from rltrain.planning.memory import host_bytes, kv_bytes, resident_bytes, working_bytes
from rltrain.planning.validation import check_config
from rltrain.planning.validation_models import replay_problems, replay_problems_of_models
from rltrain.runtime.grid import Grid
from tests.model_shards import tiny_architecture
from tests.unit.schedule_configs import make_config
from tests.unit.test_estimated_memory import job_of
from tools.benchmarks.model_shapes import qwen3_30b_a3b

SGLANG = {"rollout": {"engine": "sglang"}}
SFT = {"algorithm": "sft", "placement": {"actor": 0}, "data": {"train": {"path": "t"}}}


def make(mode: object, **sections: Any) -> Any:
    return make_config(model={"path": "m", "router_replay": mode}, **sections)


@pytest.mark.parametrize(
    ("mode", "sections", "said"),
    [
        ("rollout", SFT, r"got rollout with algorithm sft, whose samples no engine draws; expected off"),
        (
            "recompute",
            {"loss": {"old_logprobs": "rollout"}},
            r"got recompute, but .*; expected loss.old_logprobs: actor",
        ),
    ],
)
def test_what_has_nothing_to_replay_is_refused(mode: str, sections: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=f"model.router_replay: {said}"):
        check_config(make(mode, **sections))


@pytest.mark.parametrize(
    ("mode", "sections"),
    [
        ("rollout", {"loss": {"old_logprobs": "rollout"}}),
        ("recompute", {}),
        ("recompute", SGLANG),
        ("rollout", SGLANG),
        (False, SGLANG | SFT),
        ("rollout", {"algorithm": "evaluate", "placement": {"rollout, reward": 0}}),
    ],
)
def test_what_has_is_not(mode: object, sections: Any) -> None:
    """YAML has false for a bare off."""
    config = make(mode, **sections)
    assert config.model.router_replay in ("off", "rollout", "recompute")
    assert not [*replay_problems(config)]


def test_it_takes_a_model_with_experts_and_one_that_makes_both_passes() -> None:
    sparse, dense = {"actor": tiny_architecture("qwen3_moe")}, {"actor": tiny_architecture("qwen3")}
    grids = {"actor": Grid((0,))}
    beside = grids | {"inference": Grid((1,))}
    for mode in ("rollout", "recompute"):
        assert "expected off: the model in m has no experts" in next(
            replay_problems_of_models(make(mode), grids, dense)
        )
        assert not [*replay_problems_of_models(make(mode), grids, sparse)]
    assert not [*replay_problems_of_models(make("off"), grids, dense)]
    assert not [*replay_problems_of_models(make("rollout"), beside, sparse)]
    assert "got recompute with role inference" in next(replay_problems_of_models(make("recompute"), beside, sparse))


def test_what_travels_takes_memory() -> None:
    placement = {"actor": "0-7", "rollout, reward": "8-15"}
    off, rollout, recompute = (
        job_of(
            qwen3_30b_a3b(),
            placement,
            16,
            model={"path": "m", "router_replay": mode},
            actor={"parallel": {"tp": 2, "pp": 2}},
            rollout={"parallel": {"tp": 8}},
            loss={"old_logprobs": "actor"},
        )
        for mode in ("off", "rollout", "recompute")
    )
    caches = [resident_bytes(job, "rollout", 0)["kv_cache"] for job in (off, rollout, recompute)]
    assert caches[0] == caches[2]
    assert caches[1] / caches[0] == pytest.approx(1 + 48 * 8 / kv_bytes(qwen3_30b_a3b(), 1, tp=8))
    for task in ("actor_logprobs", "update"):
        assert "routed experts" not in working_bytes(off, task, {"actor": 0})
        for job in (rollout, recompute):
            tokens = job.micro_batch_rows("actor")
            assert working_bytes(job, task, {"actor": 0})["routed experts"] == tokens * 24 * 8 * 2 // 2


def test_a_server_keeps_what_it_records_on_the_host() -> None:
    """In int32, for all that its cache has room for."""
    off, rollout = (
        job_of(
            qwen3_30b_a3b(),
            {"actor": "0-7", "rollout, reward": "8-15"},
            16,
            model={"path": "m", "router_replay": mode},
            rollout={"engine": "sglang", "parallel": {"tp": 8}},
        )
        for mode in ("off", "rollout")
    )
    caches = [resident_bytes(job, "rollout", 0)["kv_cache"] for job in (off, rollout)]
    assert caches[0] == caches[1]
    num_tokens = caches[1] // kv_bytes(qwen3_30b_a3b(), 1, tp=8)
    host = [host_bytes(job, {"rollout": 0}, frozenset()) for job in (off, rollout)]
    assert "server's routed experts" not in host[0]
    assert host[1]["server's routed experts"] == num_tokens * 48 * 8 * 4
