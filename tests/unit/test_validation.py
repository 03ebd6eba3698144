"""Illegal configs are refused with the reason."""

import copy
import functools
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from rltrain.config.rollout import Http
from rltrain.config.schema import Optimizer
from rltrain.errors import ConfigError
from rltrain.planning.doubts import doubts
from rltrain.planning.hardware import GPUS
from rltrain.planning.memory import rank_memories, working_bytes
from rltrain.planning.problems import url_problems
from rltrain.planning.sync_time import least_sync_s, received_bytes
from rltrain.planning.validation import check_config
from rltrain.planning.validation_schedule import check_schedule
from rltrain.rollout.servers.fleet import checked, read
from rltrain.rollout.servers.http_engine import token_of
from rltrain.runtime.placement import role_grids
from tests.support.schedule_configs import GRPO, NO_EVALUATION, PPO, make_config, place
from tests.unit.test_estimated_memory import job_of
from tools.benchmarks.model_shapes import qwen3_8b

CAP = {"correction": {"high": 2.0}}


def check_sections(**sections: Any) -> None:
    config = make_config(**sections)
    placement = place(config.placement)
    check_schedule(config, placement, role_grids(config, placement))


def refusal(**sections: Any) -> str:
    with pytest.raises(ConfigError) as refused:
        check_sections(**sections)
    return str(refused.value)


COLOCATED = {"actor,reference,rollout,reward": "0-1"}
REWARD_APART = {"actor,reference,rollout": 0, "reward": 1}
REWARD_WITH_ROLLOUT = {"actor,reference": 0, "rollout,reward": 1}


@pytest.mark.parametrize(
    "sections",
    [
        {"placement": COLOCATED},
        {"schedule": {"mode": "pipelined"}},
        {"schedule": {"mode": "pipelined"}, "placement": REWARD_APART},
        {"schedule": {"mode": "pipelined", "chunks": 1}},
        {"schedule": {"mode": "pipelined", "chunks": 8}, "batch": {"mini_batches": 2}},
        {"schedule": {"mode": "asynchronous"}},
        {"schedule": {"mode": "asynchronous", "max_staleness": 4, "sync_every": 5}},
        {"schedule": {"max_staleness": 2, "sync_every": 3}, "placement": COLOCATED},
        {"schedule": {"mode": "asynchronous", "max_staleness": 1}, "placement": REWARD_WITH_ROLLOUT},
        {"schedule": {"mode": "asynchronous", "max_staleness": 2, "chunks": 2}, "algorithm": "ppo", "placement": PPO},
        {"schedule": {"max_staleness": 1, "partial_rollouts": True}, "placement": COLOCATED},
        {
            "schedule": {"mode": "asynchronous", "max_staleness": 1},
            "placement": {"actor,reference": 0, "rollout,reward": "1-2"},
            "rollout": {"parallel": {"tp": 2}},
        },
        {"schedule": {"partial_rollouts": True, "on_stale": "mask"}, "placement": COLOCATED},
        {"batch": {"dynamic_sampling": {}}, "placement": COLOCATED},
        {
            "batch": {"dynamic_sampling": {}},
            "placement": {"actor,reference": 0, "rollout": "1-2", "reward": 1},
            "rollout": {"parallel": {"tp": 2}},
        },
        {"schedule": {"mode": "asynchronous", "max_staleness": 1, "on_stale": "correct"}, "loss": CAP},
        {"rollout": {"engine": "sglang", "sglang": {"args": {"disable_overlap_schedule": False}}}},
    ],
    ids=str,
)
def test_schedules_that_work_are_accepted(sections):
    check_sections(**sections)


ASYNCHRONOUS = {"mode": "asynchronous", "max_staleness": 1}
REFUSED = {
    "sft has nothing to overlap": (
        {"algorithm": "sft", "placement": {"actor": 0}, "schedule": {"mode": "pipelined"}},
        "schedule.mode: got pipelined with algorithm sft, which generates no samples; expected sequential",
        ["schedule.mode: sequential"],
    ),
    "pipelined with everything on the rollout's ranks": (
        {"placement": COLOCATED, "schedule": {"mode": "pipelined"}},
        "schedule.mode: got pipelined, but rollout (ranks 0-1) shares ranks with every role that follows it (reward, "
        "actor, reference), and a rank can do nothing else while it decodes",
        ["schedule.mode: sequential"],
    ),
    "asynchronous with training on the rollout's ranks": (
        {"placement": COLOCATED, "schedule": {"mode": "asynchronous"}},
        "schedule.mode: got asynchronous, but rollout and actor share ranks 0-1",
        ["schedule.mode: sequential"],
    ),
    "asynchronous with one training role on a rank of the rollout": (
        {
            "algorithm": "ppo",
            "placement": {"actor": 0, "critic": "1-2", "rollout": "2-3", "reward": 0},
            "schedule": ASYNCHRONOUS | {"sync_every": 2},
        },
        "schedule.mode: got asynchronous, but rollout and critic share ranks 2. These",
        ["schedule.mode: pipelined", "schedule.max_staleness: 0", "schedule.sync_every: 1"],
    ),
    "weights older than allowed": (
        {"schedule": ASYNCHRONOUS | {"sync_every": 3}},
        "schedule.sync_every: got 3, so weights would be 2 steps old, but schedule.mode asynchronous with "
        "schedule.max_staleness 1 allows 1",
        ["schedule.sync_every: 2"],
    ),
    "rare syncs in a mode that needs the latest weights": (
        {"schedule": {"mode": "pipelined", "sync_every": 2}},
        "schedule.sync_every: got 2, so weights would be 1 steps old, but schedule.mode pipelined with "
        "schedule.max_staleness 0 allows 0",
        ["schedule.sync_every: 1"],
    ),
    "rare syncs without a limit that allows them": (
        {"schedule": {"sync_every": 3}},
        "schedule.sync_every: got 3, so weights would be 2 steps old, but schedule.mode sequential with "
        "schedule.max_staleness 0 allows 0",
        ["schedule.max_staleness: 2"],
    ),
    "staleness that cannot come up": (
        {"schedule": {"max_staleness": 2}},
        "schedule.max_staleness: got 2 with schedule.mode sequential, so no sample is older than its step; "
        "expected 0, or schedule.mode: asynchronous",
        ["schedule.mode: asynchronous"],
    ),
    "continued responses that would all be dropped": (
        {"schedule": {"partial_rollouts": True}},
        "schedule.partial_rollouts: got true with schedule.max_staleness 0 and schedule.on_stale drop, so every "
        "continued response would be dropped",
        ["schedule.on_stale: mask"],
    ),
    "a correction without its cap": (
        {"schedule": ASYNCHRONOUS | {"on_stale": "correct"}},
        "schedule.on_stale: got correct without loss.correction.high; expected a bound such as 2.0, or drop",
        ["loss.correction.high: 2.0"],
    ),
    "chunks of a sequential step": (
        {"schedule": {"chunks": 2}},
        "schedule.chunks: got 2 with schedule.mode sequential, so chunks of a step could not overlap",
        ["schedule.chunks: 1"],
    ),
    "chunks that do not divide the prompts": (
        {"schedule": {"mode": "pipelined", "chunks": 5}},
        "schedule.chunks: got 5, which does not divide batch.prompts_per_step 32",
        ["schedule.chunks: 4"],
    ),
    "groups selected by rewards of another rank": (
        {"batch": {"dynamic_sampling": {}}},
        "placement.reward: got ranks 2 with batch.dynamic_sampling: engines with first ranks 1 could not score their "
        "samples. The nearest that works is the rollout's ranks, 1; or batch.dynamic_sampling: null",
        ["batch.dynamic_sampling: null"],
    ),
    "rewards on ranks that draw nothing": (
        {"batch": {"dynamic_sampling": {}}, "placement": {"actor,reference": 0, "rollout": "1-2", "reward": "1-3"}},
        "ranks 3 generate no samples, and would have nothing to score. The nearest that works is the rollout's ranks, "
        "1-2",
        ["batch.dynamic_sampling: null"],
    ),
    "one sample whose rewards should differ": (
        {
            "algorithm": "ppo",
            "batch": {"dynamic_sampling": {}, "samples_per_prompt": 1},
            "placement": {"actor,critic": 0, "rollout,reward": 1},
        },
        "batch.dynamic_sampling.filter: got rewards_differ with batch.samples_per_prompt 1",
        ["batch.samples_per_prompt: 2"],
    ),
    "demonstrations to select from": (
        {"algorithm": "sft", "batch": {"dynamic_sampling": {}}},
        "batch.dynamic_sampling: got a section with algorithm sft, which generates no samples",
        ["batch.dynamic_sampling: null"],
    ),
    "chunks across the blocks of mini-batches": (
        {
            "schedule": {"mode": "pipelined", "chunks": 2},
            "batch": {"prompts_per_step": 12, "samples_per_prompt": 2, "mini_batches": 6},
        },
        "schedule.chunks: got 2 with 3 blocks of prompts (batch.mini_batches 6); expected a divisor or a multiple of 3",
        ["schedule.chunks: 3"],
    ),
    "chunks smaller than a role's number of replicas": (
        {"placement": {"actor,reference": "0-2", "rollout,reward": 3}, "schedule": {"mode": "pipelined", "chunks": 16}},
        "schedule.chunks: got 16: chunks of 2 prompts are too few for the 3 data-parallel replicas of actor",
        ["schedule.chunks: 8"],
    ),
    "batches that overlap where weights come in flight": (
        {
            "schedule": ASYNCHRONOUS,
            "rollout": {"engine": "sglang", "sglang": {"args": {"disable_overlap_schedule": False}}},
        },
        "rollout.sglang.args.disable_overlap_schedule: got false, but responses may be running when weights arrive",
        ["schedule.in_flight_sync: false"],
    ),
    "an engine of which one rank may be held up": (
        {
            "placement": {"actor,reference": 0, "rollout": "1-2", "reward": "2-3"},
            "rollout": {"parallel": {"tp": 2}},
            "schedule": ASYNCHRONOUS,
        },
        "schedule.in_flight_sync: got true, but ranks 1-2 of one engine have different roles, so it could not change "
        "its weights at one decode step",
        ["schedule.in_flight_sync: false"],
    ),
}


def test_groups_are_not_selected_by_what_a_model_says_later(monkeypatch):
    monkeypatch.setattr(
        "rltrain.planning.validation_schedule.informing", lambda role, transfer, placed: [("critic", None)]
    )
    placement = {"actor,critic": 0, "rollout,reward": 1}
    message = refusal(algorithm="ppo", placement=placement, batch={"dynamic_sampling": {}})
    assert message.startswith("placement.critic: placed with batch.dynamic_sampling, which selects groups before")


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_is_refused_with_its_reason_and_the_nearest_choice_works(case):
    sections, reason, choices = REFUSED[case]
    message = refusal(**sections)
    assert reason in message
    for choice in choices:
        key, value = choice.split(": ")
        assert key in message and value in message
    check_sections(**changed(sections, choices))


def changed(sections: dict[str, Any], choices: list[str]) -> dict[str, Any]:
    sections = copy.deepcopy(sections)
    for choice in choices:
        path, value = choice.split(": ")
        *parents, key = path.split(".")
        section = functools.reduce(lambda inside, name: inside.setdefault(name, {}), parents, sections)
        section[key] = yaml.safe_load(value)
    return sections


def test_all_that_cannot_be_comes_in_one_message():
    message = refusal(placement=COLOCATED, schedule={"mode": "pipelined", "chunks": 3, "sync_every": 2})
    assert message.startswith("3 impossible settings of the schedule:\n")
    assert all(re.search(rf"^  {key}: ", message, re.MULTILINE) for key in ("schedule.mode", "schedule.chunks"))
    assert "schedule.sync_every" in message


def test_a_single_rank_engine_may_share_its_rank_with_the_reward():
    """Each engine changes its weights alone. Only the ranks of one engine have to agree."""
    check_sections(placement={**GRPO, "rollout": "1-2", "reward": "2-3"}, schedule=ASYNCHRONOUS)


URLS = ("http://a:1", "http://b:1")
HTTP_ENGINE = {"engine": "http", "urls": URLS}
GROUP = {"weights": "group"}
FULL_GATHER = {"delta": {}, "transport": "full_gather"}


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"rollout": {"offload": True}}, r"each sync would send everything; expected rollout.offload: auto or false"),
        ({"weight_sync": FULL_GATHER}, r"expected weight_sync.transport: planned"),
        ({"rollout": HTTP_ENGINE | {"http": GROUP}}, r"expected rollout.http.weights: folder"),
        ({"rollout": HTTP_ENGINE | {"protocol": "vllm"}}, r"expected weight_sync.delta: null"),
    ],
)
def test_each_refusal_has_its_reason_and_its_cure(sections: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=f"weight_sync.delta: got a section with .*{said}"):
        check_config(make_config(**({"weight_sync": {"delta": {}}} | sections)))


def test_evaluations_apart_need_engines_of_their_own() -> None:
    placed: dict[str, Any] = {"placement": {"actor": 0, "rollout, reward": 1, "evaluation": 2}, "rollout": HTTP_ENGINE}
    placed["data"] = {"train": {"path": "t"}, "eval": {"path": "e"}}
    with pytest.raises(ConfigError, match=r"rollout.engine: got http for role evaluation"):
        check_config(make_config(**placed))
    check_config(make_config(**placed, evaluation={"engine": "embedded"}))


def test_no_rank_is_without_a_server() -> None:
    config = make_config(rollout=HTTP_ENGINE)
    assert not [*url_problems(config, "rollout", 2)]
    assert "got 3 ranks for 2 rollout.urls" in [*url_problems(config, "rollout", 3)][0]


def test_ranks_that_ask_need_no_memory_but_what_weights_pass_through() -> None:
    job = job_of(qwen3_8b(), {"actor": "0-7", "rollout, reward": 8}, 9, rollout=HTTP_ENGINE)
    asking = next(memory for memory in rank_memories(job, GPUS["h100"]) if 8 in memory.ranks)
    assert {name for task in asking.tasks for name in task.bytes_of} <= {
        *("context", "communicators", "buckets", "staging", "rollout.weights", "rollout.kv_cache")
    }
    assert asking.peak.total < 5e9
    embedding = 151_936 * 4096 * 2
    assert working_bytes(job, "weight_sync", {"rollout": 0})["staging"] == embedding > 512 * 2**20
    assert received_bytes(job, "rollout") > 16e9 and least_sync_s(job, "rollout", GPUS["h100"]) > 0
    grouped = job_of(qwen3_8b(), {"actor": "0-7", "rollout, reward": "8-9"}, 10, rollout=HTTP_ENGINE | {"http": GROUP})
    assert working_bytes(grouped, "weight_sync", {"rollout": 0})["staging"] == 2 * embedding
    assert received_bytes(grouped, "rollout") == received_bytes(job, "rollout"), "each rank forwards everything"


def test_urls_are_read_line_by_line(tmp_path: Path) -> None:
    file = tmp_path / "urls"
    file.write_text("# of the first rack\nhttp://a:1/\n\n  https://b  # and of the second\n")
    assert read(file, "rollout.urls") == ("http://a:1", "https://b")
    for lines, said in (("a:1", "got 'a:1'"), ("http://a:1\nhttp://a:1/", "is listed 2 times")):
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


OPTIMIZER = {"name": "muon", "moments_dtype": "bfloat16", "muon": {"momentum": 0.9}}
GEOMETRIC = {"policy": "geometric_mean"}


@pytest.mark.parametrize(
    "sections",
    [
        *({"actor": {"optimizer": given}} for given in (OPTIMIZER, {"cpu_offload": 0.5, "moments_dtype": "bfloat16"})),
        {"actor": {"optimizer": {"cpu_offload": True}}},
        *(
            {"weight_sync": {"delta": {"check_every": 5}}, "rollout": rollout}
            for rollout in ({}, {"dtype": "fp8"}, {"offload": False}, {"parallel": {"tp": 2}}, HTTP_ENGINE)
        ),
        {"weight_sync": {"delta": {"check_every": 5}}, "rollout": {"engine": "sglang"}},
        *(
            {"loss": loss}
            for loss in (
                {"dual_clip": 3.0},
                {"policy": "gspo", "correction": {"method": "mis", "level": "sequence", "low": 0.5, "high": 2.0}},
                {
                    "old_logprobs": "rollout",
                    "correction": {"method": "mask", "low": 0.5, "high": 2.0, "reject_above": 0.01},
                },
                {"policy": "reinforce", "old_logprobs": "rollout", "correction": {"method": "icepop", "high": 1.2}},
                {"old_logprobs": "rollout", "correction": {"opsm_delta": 0.1}, "kl": {"coef": 0.1, "unbiased": True}},
            )
        ),
    ],
    ids=str,
)
def test_what_has_a_meaning_is_accepted(sections: dict[str, Any]) -> None:
    check_config(make_config(**sections))


REFUSED_LOSSES = {
    "loss.dual_clip: got 3.0 with loss.policy cispo; expected null": {"policy": "cispo", "dual_clip": 3.0},
    "loss.clip_cov.low: got 5.0 with loss.clip_cov.high 5.0; expected less": {
        "policy": "clip_cov",
        "clip_cov": {"low": 5.0},
    },
    'loss.function: got None with loss.policy own; expected "file.py:function" or "module:function"': {"policy": "own"},
    "loss.function: got a.py:b with loss.policy clip; expected null": {"function": "a.py:b"},
    "loss.kl.unbiased: got true with loss.kl.where reward; expected loss.kl.where: loss": {
        "kl": {"coef": 0.1, "where": "reward", "unbiased": True}
    },
    "loss.kl.unbiased: got true with loss.kl.estimator k2, whose mean is never the KL": {
        "kl": {"coef": 0.1, "estimator": "k2", "unbiased": True}
    },
    "loss.correction.normalize: got step with loss.old_logprobs rollout; expected mini_batch": {
        "policy": "reinforce",
        "old_logprobs": "rollout",
        "correction": {"high": 2.0, "normalize": "step"},
    },
    "loss.correction.high: got 2.0 with loss.old_logprobs rollout and loss.correction.method tis, so the policy's "
    "ratio already compares the actor with the engine; expected loss.old_logprobs: actor": {
        "old_logprobs": "rollout",
        "correction": {"high": 2.0},
    },
}
REFUSED_CORRECTIONS = {
    "method: got icepop without loss.correction.high; expected an upper bound of the ratio": {"method": "icepop"},
    "level: got sequence without loss.correction.high": {"level": "sequence"},
    "low: got 0.5 without loss.correction.high": {"low": 0.5},
    "low: got 2.0 with loss.correction.high 0.5; expected less": {"method": "mis", "low": 2.0, "high": 0.5},
    "normalize: got step without loss.correction.high": {"normalize": "step"},
    "normalize: got step with loss.correction.method mask, whose weights are all 1": {
        "method": "mask",
        "high": 2.0,
        "normalize": "step",
    },
    "rejected: got weight_0 without loss.correction.masks or reject_above; expected one of these, or left_out": {
        "high": 2.0,
        "rejected": "weight_0",
    },
    "masks.0.low: got 1.1 with high 1.01; expected less": {"masks": [{"level": "geometric", "low": 1.1, "high": 1.01}]},
    "reject_by: got k1 without loss.correction.reject_above": {"reject_by": "k1"},
}
REFUSED_OPTIMIZERS: dict[str, dict[str, Any]] = {
    "cpu_offload: got true with actor.optimizer.name muon, whose orthogonalisation is too slow on a host": {
        "name": "muon",
        "cpu_offload": True,
    },
    "muon: got a section with actor.optimizer.name adamw, which ignores it; expected name: muon": {
        "muon": {"momentum": 0.9}
    },
}
REFUSED_ROLLOUTS: dict[str, dict[str, Any]] = {
    "urls: got none with rollout.engine http": {"engine": "http"},
    "urls: got URLs with rollout.engine embedded": {"urls": URLS},
    "parallel: got tp 2": HTTP_ENGINE | {"parallel": {"tp": 2}},
    "dtype: got fp8 with rollout.engine http": HTTP_ENGINE | {"dtype": "fp8"},
    "kv_cache_gb: got 3.0 with rollout.engine http": HTTP_ENGINE | {"kv_cache_gb": 3},
    "http.weights: got group with": HTTP_ENGINE | {"protocol": "openai", "http": GROUP},
    "http.weights_dir: got w with": HTTP_ENGINE | {"http": GROUP | {"weights_dir": "w"}},
}
REFUSED_SECTIONS: dict[str, dict[str, Any]] = {
    "model.router_replay: got rollout": {"rollout": HTTP_ENGINE, "model": {"path": "m", "router_replay": "rollout"}},
    "loss.policy: got gspo with algorithm sft, which has no policy loss; remove the key": {
        "algorithm": "sft",
        "placement": {"actor": 0},
        **NO_EVALUATION,
        "loss": {"policy": "gspo"},
    },
    "loss.policy: got geometric_mean with algorithm ppo, which has an advantage per token": {
        "algorithm": "ppo",
        "placement": PPO,
        "loss": GEOMETRIC,
    },
    "loss.policy: got geometric_mean with algorithm reinforce_plus_plus, which has an advantage per token": {
        "algorithm": "reinforce_plus_plus",
        "loss": GEOMETRIC,
    },
    **{reason: {"loss": given} for reason, given in REFUSED_LOSSES.items()},
    **{f"loss.correction.{reason}": {"loss": {"correction": given}} for reason, given in REFUSED_CORRECTIONS.items()},
    **{f"actor.optimizer.{reason}": {"actor": {"optimizer": given}} for reason, given in REFUSED_OPTIMIZERS.items()},
    **{f"rollout.{reason}": {"rollout": given} for reason, given in REFUSED_ROLLOUTS.items()},
}


@pytest.mark.parametrize("reason", REFUSED_SECTIONS)
def test_what_has_no_meaning_is_refused_with_its_reason(reason: str) -> None:
    with pytest.raises(ConfigError) as refused:
        check_config(make_config(**REFUSED_SECTIONS[reason]))
    assert str(refused.value).startswith(reason)


def test_sequences_that_count_by_their_length_are_doubted() -> None:
    def doubted(**loss: Any) -> list[str]:
        config = make_config(loss=loss)
        return [doubt for doubt in doubts(config, place(config.placement)) if doubt.startswith("loss.")]

    (doubt,) = doubted(policy="gspo")
    assert doubt.startswith("loss.normalization: got token_mean with loss.policy gspo")
    assert doubted(policy="gspo", normalization="sequence_mean") == []


def check(schedule, offload):
    check_sections(placement={"actor": 0, "rollout, reward": 1}, rollout={"offload": offload}, schedule=schedule)


def test_offload_is_refused_where_weights_arrive_in_flight():
    with pytest.raises(ConfigError, match=r"(?s)rollout\.offload: got true.*rollout\.offload: auto.*in_flight_sync: f"):
        check(ASYNCHRONOUS, True)


@pytest.mark.parametrize("offload", ["auto", False])
def test_an_engine_that_stays_may_take_them(offload):
    check(ASYNCHRONOUS, offload)


@pytest.mark.parametrize(
    "schedule", [{}, ASYNCHRONOUS | {"in_flight_sync": False}, ASYNCHRONOUS | {"max_staleness": 0}]
)
def test_offload_is_allowed_where_weights_wait_for_the_engine(schedule):
    check(schedule, True)


def check_server(placement, *, role="rollout", offload="auto", keep_weights=True):
    section = {"engine": "sglang", "offload": offload, "parallel": {"tp": 2}, "sglang": {"keep_weights": keep_weights}}
    check_sections(placement=placement, **{role: section})


def test_ranks_of_a_server_host_the_same_roles():
    with pytest.raises(ConfigError, match=r"placement\.rollout: the engine on ranks 2-3 shares.*some of its ranks"):
        check_server({"actor": "0-2", "rollout": "2-3", "reward": 0})
    check_server({"actor, rollout": "0-3", "reward": 0})
    check_server({"actor": "0-1", "rollout, reward": "2-3"})


def test_a_server_that_leaves_its_device_needs_the_copy_of_its_weights():
    colocated, apart = {"actor, rollout": "0-3", "reward": 0}, {"actor": "0-1", "rollout, reward": "2-3"}
    with pytest.raises(ConfigError, match=r"rollout\.sglang\.keep_weights: got false.*rollout\.offload: false"):
        check_server(colocated, keep_weights=False)
    check_server(colocated, keep_weights=False, offload=False)
    check_server(apart, keep_weights=False)


def test_a_judge_s_server_is_bound_by_the_same():
    around = {"actor": "0-1", "rollout, reward": 0}
    with pytest.raises(ConfigError, match=r"placement\.judge: the engine on ranks 1-2 shares.*judge\.engine: embedded"):
        check_server(around | {"judge": "1-2"}, role="judge")
    with pytest.raises(ConfigError, match=r"judge\.sglang\.keep_weights: got false.*judge\.offload: false"):
        check_server(around | {"judge": "0-1", "rollout, reward": "0-1"}, role="judge", keep_weights=False)
    check_server(around | {"judge": "2-3"}, role="judge", keep_weights=False)


def test_activations_that_are_filled_where_they_lie_cannot_leave() -> None:
    recompute = {"granularity": "selective", "modules": ["core_attn", "layernorm"]}
    with pytest.raises(ConfigError, match=r"model\.activation_offload: got true with layernorm in model\.recompute"):
        check_config(make_config(model={"path": "m", "activation_offload": True, "recompute": recompute}))
    for allowed in ("full", "selective"):
        check_config(make_config(model={"path": "m", "activation_offload": True, "recompute": allowed}))


def test_a_share_is_one() -> None:
    assert float(Optimizer(cpu_offload=True).cpu_offload) == 1.0
    with pytest.raises(ValueError, match="less than or equal to 1"):
        Optimizer(cpu_offload=1.5)
