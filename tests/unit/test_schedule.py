"""The order of tasks: what it contains, and that check() finds exactly the orders that cannot finish."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rltrain.cluster.placement import resolve_placement
from rltrain.config.schema import Config
from rltrain.errors import ConfigError
from rltrain.schedule import Entry, Order, build_order, check, is_evaluation_step, program

GRPO_ROLES = ("actor", "reference", "rollout", "reward")


def make_config(**changes):
    values = {
        "steps": 3,
        "placement": {"actor": 0},
        "model": {"path": "m"},
        "data": {"train": {"path": "t"}, "eval": {"path": "e"}},
    }
    return Config.model_validate(values | changes)


def sequential_order(steps=2):
    return build_order(make_config(steps=steps), GRPO_ROLES)


def names(order, step):
    return [(entry.kind, entry.name) for entry in order if entry.step == step]


def test_a_grpo_step_reads_like_the_algorithm():
    assert [name for kind, name in names(sequential_order(), 1) if kind == "task"] == [
        "weight_sync",
        "generate",
        "score",
        "reference_logprobs",
        "actor_logprobs",
        "advantages",
        "update",
    ]


def test_old_logprobs_from_the_rollout_need_no_recomputation():
    order = build_order(make_config(loss={"old_logprobs": "rollout"}), GRPO_ROLES)
    assert not [entry for entry in order if entry.name == "actor_logprobs"]


def test_sft_needs_the_rollout_only_for_evaluations():
    order = build_order(make_config(algorithm="sft"), ("actor", "rollout", "reward"))
    assert names(order, 1) == [("task", "demonstrate"), ("task", "update")]
    assert ("task", "weight_sync") in names(order, 0)


def test_evaluations_frame_the_run_and_come_at_the_interval():
    config = make_config(steps=7, evaluation={"interval": 3})
    assert [step for step in range(8) if is_evaluation_step(config, step)] == [0, 3, 6, 7]
    assert not is_evaluation_step(make_config(data={"train": {"path": "t"}}), 0)


def test_early_stopping_is_decided_by_all_roles_together():
    order = build_order(make_config(evaluation={"stop_at": 0.5}), GRPO_ROLES)
    decisions = [entry for entry in order if entry.name == "decide_to_stop"]
    assert [entry.step for entry in decisions] == [0, 3]
    assert all(entry.roles == GRPO_ROLES for entry in decisions)
    assert [entry.name for entry in order if entry.final] == ["save_hf"]


def test_a_rank_executes_the_entries_of_its_roles_only():
    placement = resolve_placement({"actor,reference": "0", "rollout,reward": "1"}, 2, 2)
    order = sequential_order()
    assert {role for entry in program(order, placement, 0) for role in entry.actors} >= {"actor", "reference"}
    assert all(set(entry.actors) & {"rollout", "reward"} for entry in program(order, placement, 1))


def test_digest_tells_orders_apart():
    assert sequential_order(2).digest() == sequential_order(2).digest() != sequential_order(3).digest()


rank_subsets = st.lists(st.integers(0, 3), min_size=1, max_size=4, unique=True)


@given(st.lists(rank_subsets, min_size=4, max_size=4))
def test_the_built_order_never_deadlocks_whatever_the_placement(subsets):
    mapping = {role: ",".join(map(str, ranks)) for role, ranks in zip(GRPO_ROLES, subsets, strict=True)}
    check(sequential_order(), resolve_placement(mapping, 4, 4))


@given(st.lists(rank_subsets, min_size=4, max_size=4), st.randoms(use_true_random=False))
def test_any_total_order_with_waits_after_their_posts_finishes(subsets, rng: random.Random):
    mapping = {role: ",".join(map(str, ranks)) for role, ranks in zip(GRPO_ROLES, subsets, strict=True)}
    shuffled = list(sequential_order())
    rng.shuffle(shuffled)
    order = Order()
    for entry in shuffled:
        if entry.kind != "wait":
            order.append(entry)
        if entry.kind == "post":
            order.append(Entry("wait", entry.name, entry.roles, entry.step))
    check(order, resolve_placement(mapping, 4, 4))


def test_a_wait_before_its_post_is_refused():
    order = Order()
    order.wait("samples", "rollout", "reward", step=0)
    order.post("samples", "rollout", "reward", step=0)
    with pytest.raises(ConfigError, match="waits before the post"):
        check(order, resolve_placement({"rollout": 0, "reward": 1}, 2, 2))


def test_a_post_without_a_wait_is_refused():
    order = Order()
    order.post("samples", "rollout", "reward", step=0)
    with pytest.raises(ConfigError, match="never waits"):
        check(order, resolve_placement({"rollout": 0, "reward": 1}, 2, 2))


def test_the_same_entry_twice_is_refused():
    order = Order()
    order.task("generate", "rollout", step=0)
    order.task("generate", "rollout", step=0)
    with pytest.raises(ConfigError, match="twice"):
        check(order, resolve_placement({"rollout": 0}, 1, 1))
