"""Schedules that a placement does not allow are refused with the key, the reason and the nearest one that works."""

import copy
import functools
import re
from typing import Any

import pytest
import yaml

from rltrain.errors import ConfigError
from rltrain.planning.validation_schedule import check_schedule
from rltrain.runtime.placement import role_grids
from tests.unit.schedule_configs import GRPO, PPO, make_config, place

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


REFUSED = {
    "sft has nothing to overlap": (
        {"algorithm": "sft", "placement": {"actor": 0}, "schedule": {"mode": "pipelined"}},
        "schedule.mode: got pipelined with algorithm sft, which generates nothing; expected sequential",
        ["schedule.mode: sequential"],
    ),
    "pipelined with everything on the rollout's ranks": (
        {"placement": COLOCATED, "schedule": {"mode": "pipelined"}},
        "schedule.mode: got pipelined, but rollout (ranks 0-1) shares ranks with every role that follows it (reward, "
        "actor, reference): a rank that decodes can do nothing else meanwhile",
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
            "schedule": {"mode": "asynchronous", "max_staleness": 1, "sync_every": 2},
        },
        "schedule.mode: got asynchronous, but rollout and critic share ranks 2,",
        ["schedule.mode: pipelined", "schedule.max_staleness: 0", "schedule.sync_every: 1"],
    ),
    "weights older than allowed": (
        {"schedule": {"mode": "asynchronous", "max_staleness": 1, "sync_every": 3}},
        "schedule.sync_every: got 3: weights would be 2 steps old, and schedule.mode asynchronous with "
        "schedule.max_staleness 1 allows 1",
        ["schedule.sync_every: 2"],
    ),
    "rare syncs in a mode that needs the latest weights": (
        {"schedule": {"mode": "pipelined", "sync_every": 2}},
        "schedule.sync_every: got 2: weights would be 1 steps old, and schedule.mode pipelined with "
        "schedule.max_staleness 0 allows 0",
        ["schedule.sync_every: 1"],
    ),
    "rare syncs without a limit that allows them": (
        {"schedule": {"sync_every": 3}},
        "schedule.sync_every: got 3: weights would be 2 steps old, and schedule.mode sequential with "
        "schedule.max_staleness 0 allows 0",
        ["schedule.max_staleness: 2"],
    ),
    "staleness that cannot come up": (
        {"schedule": {"max_staleness": 2}},
        "schedule.max_staleness: got 2 with schedule.mode sequential, in which no sample is older than its step; "
        "expected 0, or schedule.mode: asynchronous",
        ["schedule.mode: asynchronous"],
    ),
    "continued responses that would all be dropped": (
        {"schedule": {"partial_rollouts": True}},
        "schedule.partial_rollouts: with schedule.max_staleness 0 and schedule.on_stale drop every continued response "
        "would be thrown away",
        ["schedule.on_stale: mask"],
    ),
    "a correction without its cap": (
        {"schedule": {"mode": "asynchronous", "max_staleness": 1, "on_stale": "correct"}},
        "schedule.on_stale: got correct without loss.correction.high; expected a bound such as 2.0, or drop",
        ["loss.correction.high: 2.0"],
    ),
    "chunks of a sequential step": (
        {"schedule": {"chunks": 2}},
        "schedule.chunks: got 2 with schedule.mode sequential, where parts of a step have nothing to overlap with",
        ["schedule.chunks: 1"],
    ),
    "chunks that do not divide the prompts": (
        {"schedule": {"mode": "pipelined", "chunks": 5}},
        "schedule.chunks: got 5, which does not divide batch.prompts_per_step 32",
        ["schedule.chunks: 4"],
    ),
    "groups selected by rewards of another rank": (
        {"batch": {"dynamic_sampling": {}}},
        "placement.reward: got ranks 2 with batch.dynamic_sampling: engines whose first ranks are 1 could not score "
        "what they draw. The nearest that works is the rollout's ranks, 1; or batch.dynamic_sampling: null",
        ["batch.dynamic_sampling: null"],
    ),
    "rewards on ranks that draw nothing": (
        {"batch": {"dynamic_sampling": {}}, "placement": {"actor,reference": 0, "rollout": "1-2", "reward": "1-3"}},
        "ranks 3 draw nothing, and would get no rewards to give. The nearest that works is the rollout's ranks, 1-2",
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
        "batch.dynamic_sampling: got it with algorithm sft, which draws nothing to select from",
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
        {
            "placement": {"actor,reference": "0-2", "rollout,reward": 3},
            "schedule": {"mode": "pipelined", "chunks": 16},
        },
        "schedule.chunks: got 16: chunks of 2 prompts are too few for the 3 data-parallel replicas of actor",
        ["schedule.chunks: 8"],
    ),
    "batches that overlap where weights come in flight": (
        {
            "schedule": {"mode": "asynchronous", "max_staleness": 1},
            "rollout": {"engine": "sglang", "sglang": {"args": {"disable_overlap_schedule": False}}},
        },
        "rollout.sglang.args.disable_overlap_schedule: got false in a run whose responses may be under way",
        ["schedule.in_flight_sync: false"],
    ),
    "an engine of which one rank may be held up": (
        {
            "placement": {"actor,reference": 0, "rollout": "1-2", "reward": "2-3"},
            "rollout": {"parallel": {"tp": 2}},
            "schedule": {"mode": "asynchronous", "max_staleness": 1},
        },
        "schedule.in_flight_sync: the engine on ranks 1-2 has ranks that host different roles, and could not change "
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
def test_what_cannot_be_is_refused_with_its_reason(case):
    sections, reason, _ = REFUSED[case]
    assert reason in refusal(**sections)


@pytest.mark.parametrize("case", REFUSED)
def test_the_nearest_choice_that_is_named_works(case):
    sections, _, choices = REFUSED[case]
    message = refusal(**sections)
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
    assert message.startswith("3 things in the schedule that cannot be:\n")
    assert all(re.search(rf"^  {key}: ", message, re.MULTILINE) for key in ("schedule.mode", "schedule.chunks"))
    assert "schedule.sync_every" in message


def test_a_single_rank_engine_may_share_its_rank_with_the_reward():
    """Each engine changes its weights by itself; only the ranks of one engine have to agree."""
    check_sections(
        placement={**GRPO, "rollout": "1-2", "reward": "2-3"},
        schedule={"mode": "asynchronous", "max_staleness": 1},
    )
