"""What engines that somebody else runs cannot be asked for, and what a dry run says of them."""

import re
from pathlib import Path
from typing import Any

import pytest

from rltrain.config.rollout import Http
from rltrain.errors import ConfigError
from rltrain.planning.hardware import GPUS
from rltrain.planning.memory import rank_memories, working_bytes
from rltrain.planning.problems import url_problems
from rltrain.planning.sync_time import least_sync_s, received_bytes
from rltrain.planning.validation import check_config
from rltrain.rollout.servers.fleet import checked, read
from rltrain.rollout.servers.http_engine import token_of
from tests.unit.schedule_configs import make_config
from tests.unit.test_estimated_memory import job_of
from tools.benchmarks.model_shapes import qwen3_8b

URLS = ("http://a:1", "http://b:1")
HTTP = {"engine": "http", "urls": URLS}
GROUP = {"weights": "group"}


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"rollout": {"engine": "http"}}, "rollout.urls: got none with rollout.engine http"),
        ({"rollout": {"urls": URLS}}, "rollout.urls: got some with rollout.engine embedded"),
        ({"rollout": HTTP | {"parallel": {"tp": 2}}}, "rollout.parallel: got tp 2"),
        ({"rollout": HTTP | {"dtype": "fp8"}}, "rollout.dtype: got fp8 with rollout.engine http"),
        ({"rollout": HTTP | {"kv_cache_gb": 3}}, "rollout.kv_cache_gb: got 3.0 with rollout.engine http"),
        ({"rollout": HTTP, "model": {"path": "m", "router_replay": "rollout"}}, "model.router_replay: got rollout"),
        ({"rollout": HTTP | {"protocol": "vllm", "http": GROUP}}, "rollout.http.weights: got group with"),
        ({"rollout": HTTP | {"http": GROUP | {"weights_dir": "w"}}}, "rollout.http.weights_dir: got w with"),
        (
            {"rollout": HTTP, "model": {"path": "m", "lora": {"rank": 4}}, "weight_sync": {"adapters": "apart"}},
            "weight_sync.adapters: got apart with rollout.engine http",
        ),
    ],
)
def test_each_refusal_has_its_reason(sections: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        check_config(make_config(**sections))


def test_evaluations_apart_need_engines_of_their_own() -> None:
    placed: dict[str, Any] = {"placement": {"actor": 0, "rollout, reward": 1, "evaluation": 2}, "rollout": HTTP}
    placed["data"] = {"train": {"path": "t"}, "eval": {"path": "e"}}
    with pytest.raises(ConfigError, match=r"rollout.engine: got http for role evaluation"):
        check_config(make_config(**placed))
    check_config(make_config(**placed, evaluation={"engine": "embedded"}))


def test_no_rank_is_without_a_server() -> None:
    config = make_config(rollout=HTTP)
    assert not [*url_problems(config, "rollout", 2)]
    assert "got 3 ranks for 2 rollout.urls" in [*url_problems(config, "rollout", 3)][0]


def test_ranks_that_ask_need_no_memory_but_what_weights_pass_through() -> None:
    job = job_of(qwen3_8b(), {"actor": "0-7", "rollout, reward": 8}, 9, rollout=HTTP)
    asking = next(memory for memory in rank_memories(job, GPUS["h100"]) if 8 in memory.ranks)
    assert {name for task in asking.tasks for name in task.bytes_of} <= {
        *("context", "communicators", "buckets", "staging", "rollout.weights", "rollout.kv_cache")
    }
    assert asking.peak.total < 5e9
    assert working_bytes(job, "weight_sync", {"rollout": 0})["staging"] == 512 * 2**20
    assert received_bytes(job, "rollout") > 16e9 and least_sync_s(job, "rollout", GPUS["h100"]) > 0
    grouped = job_of(qwen3_8b(), {"actor": "0-7", "rollout, reward": "8-9"}, 10, rollout=HTTP | {"http": GROUP})
    assert working_bytes(grouped, "weight_sync", {"rollout": 0})["staging"] == 2 * 512 * 2**20
    assert received_bytes(grouped, "rollout") == received_bytes(job, "rollout"), "each rank passes on everything"


def test_urls_are_read_line_by_line(tmp_path: Path) -> None:
    file = tmp_path / "urls"
    file.write_text("# of the first rack\nhttp://a:1/\n\n  https://b  # and of the second\n")
    assert read(file, "rollout.urls") == ("http://a:1", "https://b")
    for lines, said in (("a:1", "got 'a:1'"), ("http://a:1\nhttp://a:1/", "stands there 2 times")):
        with pytest.raises(ConfigError, match=said):
            checked(lines.splitlines(), "rollout.urls")


def test_a_token_comes_from_one_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "token"
    file.write_text("of-the-file\n")
    monkeypatch.setenv("ENGINES_TOKEN", "of-the-variable")
    assert token_of(Http(), "rollout.http") is None
    assert token_of(Http(token_file=str(file)), "rollout.http") == "of-the-file"
    assert token_of(Http(token_env="ENGINES_TOKEN"), "rollout.http") == "of-the-variable"
    for wrong in (Http(token_env="NOBODY"), Http(token_file="nowhere"), Http(token_env="A", token_file="b")):
        with pytest.raises(ConfigError, match=r"rollout.http"):
            token_of(wrong, "rollout.http")
