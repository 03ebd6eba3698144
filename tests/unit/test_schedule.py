"""The order of tasks in every mode: what it contains and in which order, and when engines may join a weight sync."""

from collections.abc import Iterable

import pytest

from rltrain.schedule.iterations import DueEvaluations, build_order
from rltrain.schedule.order import Entry, Order, program
from rltrain.schedule.replay import check, overlapping_tasks
from tests.unit.schedule_configs import GRPO, NO_EVALUATION, PPO, make_config, order_of, place


def tasks(order: Iterable[Entry]) -> list[str]:
    """Such as "generate 1.2" for chunk 2 of step 1; transfers left out."""
    return [
        f"{entry.name} {entry.step}" + (f".{entry.chunk}" if entry.chunk else "")
        for entry in order
        if entry.kind == "task"
    ]


def position(order: Order, name: str, step: int, chunk: int = 0) -> int:
    return next(i for i, e in order.items() if (e.kind, e.name, e.step, e.chunk) == ("task", name, step, chunk))


def steps_of(order: Order, name: str) -> list[int]:
    return [entry.step for entry in order if entry.name == name and entry.kind == "task"]


# --- sequential


def test_a_grpo_step_reads_like_the_algorithm():
    step = [str(entry) for entry in order_of() if entry.step == 1]
    assert step == [
        "weight_sync[1] (actor+rollout)",
        "generate[1] (rollout)",
        "post samples[1] (rollout -> reward)",
        "wait samples[1] (rollout -> reward)",
        "score[1] (reward)",
        "post scored[1] (reward -> actor)",
        "post scored[1] (reward -> reference)",
        "wait scored[1] (reward -> reference)",
        "reference_logprobs[1] (reference)",
        "post reference_logprobs[1] (reference -> actor)",
        "wait scored[1] (reward -> actor)",
        "actor_logprobs[1] (actor)",
        "wait reference_logprobs[1] (reference -> actor)",
        "advantages[1] (actor)",
        "update[1] (actor)",
    ]


def test_a_ppo_step_asks_the_critic_before_the_advantages_and_trains_it_on_the_returns():
    step = [str(entry) for entry in order_of(algorithm="ppo", placement=PPO) if entry.step == 1]
    assert step[step.index("score[1] (reward)") + 1 :] == [
        "post scored[1] (reward -> actor)",
        "post scored[1] (reward -> critic)",
        "wait scored[1] (reward -> critic)",
        "values[1] (critic)",
        "post values[1] (critic -> actor)",
        "wait scored[1] (reward -> actor)",
        "actor_logprobs[1] (actor)",
        "wait values[1] (critic -> actor)",
        "advantages[1] (actor)",
        "post returns[1] (actor -> critic)",
        "wait returns[1] (actor -> critic)",
        "update_critic[1] (critic)",
        "update[1] (actor)",
    ]


def test_the_actor_stays_as_it_is_while_the_critic_warms_up():
    order = order_of(algorithm="ppo", placement=PPO, critic={"critic_warmup_steps": 2})
    assert steps_of(order, "update") == [2]
    assert steps_of(order, "update_critic") == [0, 1, 2]
    assert steps_of(order, "advantages") == [0, 1, 2], "the critic learns from their returns"


def test_the_actor_gathers_no_gradients_either_while_the_critic_warms_up():
    order = order_of(
        algorithm="ppo",
        placement=PPO,
        critic={"critic_warmup_steps": 2},
        advantages={"whiten": False},
        schedule={"mode": "pipelined", "chunks": 2},
    )
    assert steps_of(order, "accumulate") == [2, 2]
    assert steps_of(order, "accumulate_critic") == [0, 0, 1, 1, 2, 2]


def test_old_logprobs_from_the_rollout_need_no_recomputation():
    assert "actor_logprobs" not in {entry.name for entry in order_of(loss={"old_logprobs": "rollout"})}


def test_sft_needs_the_rollout_only_for_evaluations():
    order = order_of(algorithm="sft", placement={"actor": 0, "rollout": 1, "reward": 2})
    assert tasks(entry for entry in order if entry.step == 1) == ["load_batch 1", "update 1"]
    assert steps_of(order, "weight_sync") == steps_of(order, "generate_evaluation") == [0, 3]


def test_held_out_demonstrations_are_scored_by_the_actor_alone():
    loss = {"interval": 2, "stop_at": 0.5, "keep_best": {"metric": "eval/loss", "mode": "min"}}
    order = order_of(algorithm="sft", placement={"actor": 0}, evaluation=loss)
    assert {entry.roles for entry in order} == {("actor",)}
    for name in ("score_held_out", "save_best", "decide_to_stop"):
        assert steps_of(order, name) == [0, 2, 3]
    check(order, place({"actor": 0}))


@pytest.mark.parametrize("placement", [{"actor,reference": 0}, {"actor": 0, "reference": 1}])
def test_pairs_are_trained_on_and_evaluated_beside_a_reference(placement):
    order = order_of(algorithm="dpo", placement=placement)
    assert tasks(entry for entry in order if entry.step == 1) == ["reference_logprobs 1", "load_batch 1", "update 1"]
    evaluations = {"evaluation_logprobs", "score_held_out"}
    for name in evaluations:
        assert steps_of(order, name) == [0, 3]
    assert {entry.name for entry in order if entry.kind != "task"} == {"reference_logprobs", "evaluation_logprobs"}
    check(order, place(placement))


def test_a_reference_apart_is_a_step_ahead_of_training_on_pairs():
    placement = {"actor": 0, "reference": 1}
    order = order_of(algorithm="dpo", placement=placement)
    overlaps = overlapping_tasks(order, place(placement), syncs_in_flight=False)
    assert ("reference_logprobs (reference)", "update (actor)") in overlaps


def test_a_reward_model_needs_the_actor_alone():
    order = order_of(algorithm="reward_model", placement={"actor": 0}, evaluation={"stop_at": 0.9})
    assert {entry.roles for entry in order} == {("actor",)}
    assert tasks(entry for entry in order if entry.step == 0) == [
        "score_held_out 0",
        "decide_to_stop 0",
        "load_batch 0",
        "update 0",
    ]


def test_evaluations_frame_the_run_and_come_at_the_interval():
    due = DueEvaluations.of(make_config(steps=7, evaluation={"interval": 3}))
    assert [step for step in range(8) if due.sets(step)] == [0, 3, 6, 7]
    assert not DueEvaluations.of(make_config(**NO_EVALUATION)).sets(0)


def test_early_stopping_is_decided_by_all_roles_together():
    order = order_of(evaluation={"stop_at": 0.5})
    decisions = [entry for entry in order if entry.name == "decide_to_stop"]
    assert [entry.step for entry in decisions] == [0, 3]
    assert all(entry.roles == ("actor", "reference", "rollout", "reward") for entry in decisions)
    assert [entry.name for entry in order if entry.final] == ["save_hf"]


# --- pipelined


def test_while_one_chunk_is_worked_on_the_next_one_decodes():
    """The rollout's next task stands after that of everybody else's on the chunk before, so nobody need wait."""
    order = order_of(steps=1, schedule={"mode": "pipelined", "chunks": 2}, **NO_EVALUATION)
    assert tasks(order) == [
        "weight_sync 0",
        *["generate 0", "score 0", "reference_logprobs 0", "actor_logprobs 0", "advantages 0", "accumulate 0"],
        *["generate 0.1", "score 0.1", "reference_logprobs 0.1"],
        *["actor_logprobs 0.1", "advantages 0.1", "accumulate 0.1"],
        "update 0",
        "save_hf 1",
    ]


def test_pipelined_steps_have_four_chunks_unless_told():
    order = order_of(steps=1, schedule={"mode": "pipelined"})
    assert [entry.chunk for entry in order if entry.name == "generate"] == [0, 1, 2, 3]


def test_gradients_wait_for_the_whole_step_where_it_has_several_mini_batches():
    order = order_of(schedule={"mode": "pipelined"}, batch={"mini_batches": 2})
    assert not {"accumulate", "accumulate_critic"} & {entry.name for entry in order}


def test_gradients_wait_for_the_whole_step_where_its_advantages_are_whitened():
    order = order_of(algorithm="ppo", placement=PPO, schedule={"mode": "pipelined", "chunks": 2})
    assert "accumulate" not in {entry.name for entry in order}
    assert steps_of(order, "accumulate_critic") == [0, 0, 1, 1, 2, 2], "values need no whitening"


def test_a_critic_that_does_not_accumulate_gets_all_returns_before_its_update():
    order = order_of(
        steps=1,
        algorithm="ppo",
        placement=PPO,
        batch={"mini_batches": 2},
        schedule={"mode": "pipelined", "chunks": 2},
    )
    update = position(order, "update_critic", 0)
    assert [str(entry) for _, entry in order.items(update - 2, update)] == [
        "wait returns[0] (actor -> critic)",
        "wait returns[0.1] (actor -> critic)",
    ]


# --- asynchronous


def asynchronous(max_staleness: int, sync_every: int = 1, steps: int = 6, **sections) -> Order:
    schedule = {"mode": "asynchronous", "max_staleness": max_staleness, "sync_every": sync_every}
    return order_of(steps=steps, schedule=schedule, **{**NO_EVALUATION, **sections})


def test_generation_is_ahead_of_training_by_the_staleness_allowed():
    order = asynchronous(1, steps=3, placement={"actor": 0, "rollout": 1, "reward": 2})
    assert tasks(order) == [
        *["weight_sync 0", "generate 0", "score 0", "generate 1", "score 1"],
        *["actor_logprobs 0", "advantages 0", "update 0", "weight_sync 1"],
        *["generate 2", "score 2", "actor_logprobs 1", "advantages 1", "update 1"],
        *["actor_logprobs 2", "advantages 2", "update 2", "save_hf 3"],
    ]


def test_no_staleness_is_the_sequential_order():
    assert [*asynchronous(0)] == [*order_of(steps=6, **NO_EVALUATION)]
    assert asynchronous(0).digest() == order_of(steps=6, **NO_EVALUATION).digest()


@pytest.mark.parametrize(("max_staleness", "sync_every"), [(0, 1), (1, 1), (1, 2), (2, 1), (2, 2), (3, 2), (4, 5)])
def test_samples_are_never_older_than_allowed_and_get_there(max_staleness, sync_every):
    """Every generate finds weights no older than the limit; with enough steps the limit is reached."""
    version, ages = -1, []
    for entry in asynchronous(max_staleness, sync_every, steps=12):
        if entry.name == "weight_sync":
            version = entry.step
        if entry.name == "generate":
            ages.append(entry.step - version)
    assert max(ages) == max_staleness
    assert len(ages) == 12


@pytest.mark.parametrize("max_staleness", [0, 1, 2, 4])
def test_every_step_is_generated_and_trained_on_once_and_in_turn(max_staleness):
    order = asynchronous(max_staleness)
    for name in ("generate", "score", "advantages", "update"):
        assert steps_of(order, name) == list(range(6))
    for step in range(6):
        assert position(order, "generate", step) < position(order, "score", step) < position(order, "update", step)


def test_weights_that_nobody_would_use_are_not_sent():
    assert steps_of(asynchronous(2), "weight_sync") == [0, 1, 2, 3], "version 3 draws the last step, 5"
    assert steps_of(asynchronous(3, sync_every=2), "weight_sync") == [0, 2]
    assert steps_of(asynchronous(2, data={"train": {"path": "t"}, "eval": {"path": "e"}}), "weight_sync")[-1] == 6


def test_a_reward_that_shares_ranks_with_training_scores_when_training_needs_it():
    """Otherwise training would wait for responses to a step that comes later."""
    shared = asynchronous(2, placement={"actor,reward": 0, "rollout": 1})
    apart = asynchronous(2, placement={"actor": 0, "rollout,reward": 1})
    assert position(shared, "score", 3) > position(shared, "update", 2)
    assert position(apart, "score", 3) < position(apart, "update", 1)


def test_the_exchange_holds_no_more_steps_than_the_lead():
    """Posts less waits of one transfer, anywhere in the order."""
    held, most = 0, 0
    for entry in asynchronous(3, steps=12):
        if entry.name == "scored" and entry.roles[1] == "actor":
            held += {"post": 1, "wait": -1}[entry.kind]
            most = max(most, held)
    assert most == 3 + 1


# --- what ranks make of it


def test_a_rank_executes_the_entries_of_its_roles_only():
    placement = place({"actor,reference": 0, "rollout,reward": 1})
    order = build_order(make_config(), placement)
    of_training, of_rollout = program(order, placement, 0), program(order, placement, 1)
    assert {entry.name for entry in of_training if entry.kind == "wait"} == {"scored", "reference_logprobs"}
    assert {entry.name for entry in of_rollout if entry.kind == "wait"} == {"samples", "evaluation_samples"}
    assert {entry.name for entry in of_training} & {entry.name for entry in of_rollout} == {"weight_sync", "scored"}
    assert program(order, placement, 2) == []


def test_digest_tells_orders_apart():
    assert order_of(steps=2).digest() == order_of(steps=2).digest() != order_of(steps=3).digest()


def test_engines_may_join_a_sync_from_the_start_where_no_evaluation_stands_between():
    """The actor alone says when a sync is due: not before its updates up to then."""
    order = asynchronous(2)
    assert [*order.syncs()] == [(position(order, "weight_sync", step), 0) for step in range(4)]


def test_engines_join_no_sync_before_an_evaluation_of_older_weights_is_drawn():
    order = asynchronous(
        2,
        data={"train": {"path": "t"}, "eval": {"path": "e"}},
        evaluation={"interval": 2, "stop_at": 0.9},
        placement=GRPO,
    )
    drawn = {step: position(order, "generate_evaluation", step) for step in (0, 2, 4, 6)}
    synced = {step: position(order, "weight_sync", step) for step in (0, 1, 2, 3, 4, 6)}
    assert [*order.syncs()] == [
        (synced[0], 0),
        (synced[1], drawn[0] + 1),
        (synced[2], drawn[0] + 1),
        (synced[3], drawn[2] + 1),
        (synced[4], drawn[2] + 1),
        (synced[6], drawn[4] + 1),
    ]


INFERENCE = {"actor": 0, "rollout": 1, "reward": 2, "inference": 3}


def names(order: Order, *wanted: str) -> list[str]:
    return [f"{entry.name}[{entry.step}]" for entry in order if entry.kind == "task" and entry.name in wanted]


def test_inference_gets_the_actors_weights_with_the_rollout_and_says_what_the_actor_would():
    order = order_of(steps=2, placement=INFERENCE, **NO_EVALUATION)
    assert "actor_logprobs" not in {entry.name for entry in order}
    assert names(order, "weight_sync", "sync_inference", "generate", "inference_logprobs", "update") == [
        *("weight_sync[0]", "sync_inference[0]", "generate[0]", "inference_logprobs[0]", "update[0]"),
        *("weight_sync[1]", "sync_inference[1]", "generate[1]", "inference_logprobs[1]", "update[1]"),
    ]


def test_models_apart_from_training_evaluate_what_is_drawn_ahead_while_others_train():
    order = asynchronous(1, placement=INFERENCE, steps=3)
    assert names(order, "sync_inference", "inference_logprobs", "update") == [
        *("sync_inference[0]", "inference_logprobs[0]", "inference_logprobs[1]", "update[0]"),
        *("sync_inference[1]", "inference_logprobs[2]", "update[1]"),
        "update[2]",
    ]


def test_a_reference_is_refreshed_before_anything_of_its_step():
    order = order_of(steps=5, reference={"refresh_every": 2}, **NO_EVALUATION)
    assert names(order, "refresh_reference", "weight_sync", "update") == [
        *("weight_sync[0]", "update[0]", "weight_sync[1]", "update[1]"),
        *("refresh_reference[2]", "weight_sync[2]", "update[2]", "weight_sync[3]", "update[3]"),
        *("refresh_reference[4]", "weight_sync[4]", "update[4]"),
    ]
