"""The order of tasks: how it is made, checked, cut and executed."""

import random
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, call

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rltrain.errors import ConfigError
from rltrain.roles.joint_tasks import EndOfTraining
from rltrain.runtime.placement import Placement
from rltrain.schedule.iterations import DueEvaluations, build_order
from rltrain.schedule.order import CHECKPOINT, Entries, Entry, Order, program
from rltrain.schedule.replay import check, overlapping_tasks
from rltrain.schedule.shape import RunShape
from rltrain.trainer import Trainer
from tests.support.schedule_configs import (
    EVALUATED_APART,
    GRPO,
    NO_EVALUATION,
    PPO,
    WORLD_SIZE,
    evaluations,
    make_config,
    order_of,
    place,
)


def tasks(order: Iterable[Entry]) -> list[str]:
    """Returns names like "generate 1.2" for chunk 2 of step 1. Transfers are left out."""
    return [
        f"{entry.name} {entry.step}" + (f".{entry.chunk}" if entry.chunk else "")
        for entry in order
        if entry.kind == "task"
    ]


def position(order: Order, name: str, step: int, chunk: int = 0) -> int:
    return next(i for i, e in order.items() if (e.kind, e.name, e.step, e.chunk) == ("task", name, step, chunk))


def steps_of(order: Order, name: str) -> list[int]:
    return [entry.step for entry in order if entry.name == name and entry.kind == "task"]


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


def test_while_one_chunk_is_worked_on_the_next_one_decodes():
    """The rollout's next task comes after all other tasks of the previous chunk, so no rank has to wait."""
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
        steps=1, algorithm="ppo", placement=PPO, batch={"mini_batches": 2}, schedule={"mode": "pipelined", "chunks": 2}
    )
    update = position(order, "update_critic", 0)
    assert [str(entry) for _, entry in order.items(update - 2, update)] == [
        "wait returns[0] (actor -> critic)",
        "wait returns[0.1] (actor -> critic)",
    ]


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
    """Every generate uses weights within the limit. With enough steps the limit is reached."""
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
    assert steps_of(asynchronous(2), "weight_sync") == [0, 1, 2, 3], "version 3 generates the last step, 5"
    assert steps_of(asynchronous(3, sync_every=2), "weight_sync") == [0, 2]
    assert steps_of(asynchronous(2, data={"train": {"path": "t"}, "eval": {"path": "e"}}), "weight_sync")[-1] == 6


def test_a_reward_that_shares_ranks_with_training_scores_when_training_needs_it():
    """Otherwise training would wait for responses of a later step."""
    shared = asynchronous(2, placement={"actor,reward": 0, "rollout": 1})
    apart = asynchronous(2, placement={"actor": 0, "rollout,reward": 1})
    assert position(shared, "score", 3) > position(shared, "update", 2)
    assert position(apart, "score", 3) < position(apart, "update", 1)


def test_the_exchange_holds_no_more_steps_than_the_lead():
    """At every position of the order, posts minus waits of one transfer are counted."""
    held, most = 0, 0
    for entry in asynchronous(3, steps=12):
        if entry.name == "scored" and entry.roles[1] == "actor":
            held += {"post": 1, "wait": -1}[entry.kind]
            most = max(most, held)
    assert most == 3 + 1


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
    """Only the actor decides when a sync is due: after its updates up to the sync."""
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


rank_subsets = st.lists(st.integers(0, WORLD_SIZE - 1), min_size=1, max_size=WORLD_SIZE, unique=True)


@st.composite
def placements(draw: st.DrawFn, *roles: str) -> Placement:
    return place({role: ",".join(map(str, draw(rank_subsets))) for role in roles})


GRPO_PLACEMENTS = placements("actor", "reference", "rollout", "reward")


@st.composite
def runs(draw: st.DrawFn):
    """Draws (config, placement) of any mode, legal on the placement or not."""
    algorithm = draw(st.sampled_from(["grpo", "ppo"]))
    roles = ["actor", "rollout", "reward", *(["critic"] if algorithm == "ppo" else [])]
    roles += [role for role in ("reference", "evaluation") if draw(st.booleans())]
    mode = draw(st.sampled_from(["sequential", "pipelined", "asynchronous"]))
    schedule = {"mode": mode, "chunks": 1 if mode == "sequential" else draw(st.sampled_from([1, 2, 4]))}
    if mode != "pipelined":
        schedule |= {"max_staleness": (staleness := draw(st.integers(0, 4)))}
        schedule |= {"sync_every": draw(st.integers(1, staleness + 1))}
    config = make_config(
        algorithm=algorithm,
        steps=draw(st.integers(1, 6)),
        schedule=schedule,
        batch={"mini_batches": draw(st.sampled_from([1, 2]))},
        loss={"old_logprobs": draw(st.sampled_from(["actor", "rollout"]))},
        advantages={"whiten": draw(st.booleans())},
        evaluation=draw(evaluations()),
    )
    return config, draw(placements(*roles))


@settings(max_examples=150)
@given(runs())
def test_no_mode_deadlocks_whatever_the_placement(run):
    config, placement = run
    order = build_order(config, placement)
    check(order, placement)
    posted = set()
    for entry in order:
        assert entry.kind != "wait" or entry.transfer in posted, "a wait follows its post"
        posted |= {entry.transfer} if entry.kind == "post" else set()


@settings(max_examples=50)
@given(GRPO_PLACEMENTS, st.randoms(use_true_random=False))
def test_any_total_order_with_waits_after_their_posts_finishes(placement: Placement, rng: random.Random):
    """The proof: the first unfinished entry of the order can always be executed."""
    shuffled = list(order_of(steps=2))
    rng.shuffle(shuffled)
    order, pending = Entries(), []
    for entry in shuffled:
        if entry.kind != "wait":
            order.append(entry)
        if entry.kind == "post":
            pending.append(Entry("wait", entry.name, entry.roles, entry.step, entry.chunk))
        while pending and rng.random() < 0.5:
            order.append(pending.pop(rng.randrange(len(pending))))
    check(order + pending, placement)


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        ([("wait", "samples", 0), ("post", "samples", 0)], "waits before the post"),
        ([("post", "samples", 0)], "never waits"),
        ([("post", "samples", 0), ("wait", "samples", 1)], "waits before the post"),
        ([("task", "generate", 0), ("task", "generate", 0)], "twice"),
    ],
    ids=["a wait before its post", "a post without a wait", "another chunk", "the same entry twice"],
)
def test_orders_that_cannot_be_are_refused(entries, said):
    roles = {"task": ("rollout",), "wait": ("rollout", "reward"), "post": ("rollout", "reward")}
    order = [Entry(kind, name, roles[kind], 0, chunk) for kind, name, chunk in entries]
    with pytest.raises(ConfigError, match=said):
        check(order, place({"rollout": 0, "reward": 1}))


SCHEDULES = st.one_of(
    st.just({}),
    st.builds(lambda chunks: {"mode": "pipelined", "chunks": chunks}, st.integers(1, 4)),
    st.builds(
        lambda staleness, sync_every, chunks: {
            "mode": "asynchronous",
            "max_staleness": staleness + sync_every - 1,
            "sync_every": sync_every,
            "chunks": chunks,
        },
        st.integers(0, 3),
        st.integers(1, 2),
        st.integers(1, 2),
    ),
)
STEPS = 7
AHEAD = {"mode": "asynchronous", "max_staleness": 1}


def saves_of(order, steps):
    return [step for step in range(1, steps + 1) if order.saves(step)]


@st.composite
def runs_and_cuts(draw):
    """Draws a config, and a step at whose boundary it saves."""
    placement = draw(st.sampled_from([GRPO, PPO, EVALUATED_APART]))
    schedule = draw(SCHEDULES)
    config = make_config(
        algorithm="ppo" if placement is PPO else "grpo",
        placement=placement,
        steps=STEPS,
        schedule=schedule,
        checkpoint={"save_interval": schedule.get("sync_every", 1)},
        evaluation=draw(evaluations()),
    )
    return config, draw(st.sampled_from(saves_of(build_order(config, place(placement)), STEPS)))


@given(runs_and_cuts())
def test_what_is_left_can_finish_and_is_all_that_was_not_done(run):
    config, step = run
    placement = place(config.placement)
    whole = build_order(config, placement)
    rest = whole.from_step(step)
    check(rest, placement)
    cut = whole.boundary(step)
    crossing = [*whole.crossing(cut).values()]
    assert [*rest] == [*crossing, *(entry for _, entry in whole.items(cut))]
    assert all(entry.step >= step for entry in rest if entry.kind == "task")
    assert {entry.name for entry in crossing} <= {"samples", "scored"}
    assert len({entry.step for entry in crossing}) <= RunShape.of(config).lead


@given(runs_and_cuts())
def test_without_what_crossed_the_steps_ahead_are_drawn_anew(run):
    config, step = run
    placement = place(config.placement)
    rest = build_order(config, placement, first_step=step)
    check(rest, placement)
    for name in ("generate", "update"):
        steps = {entry.step for entry in rest if entry.name == name}
        assert steps == {*range(step, STEPS)}
    syncs = [i for i, entry in enumerate(rest) if entry.name == "weight_sync"]
    draws = [i for i, entry in enumerate(rest) if entry.name == "generate"]
    assert not draws or min(syncs) < min(draws), "engines start without weights"


@given(runs_and_cuts())
def test_the_rest_of_the_rest_is_the_rest(run):
    config, step = run
    whole = build_order(config, place(config.placement))
    for later in (save for save in saves_of(whole, STEPS) if save > step):
        assert [*whole.from_step(step).from_step(later)] == [*whole.from_step(later)]


@pytest.mark.parametrize(
    "checkpoint, saves",
    [
        ({"save_interval": 2}, [2, 4, 5]),
        ({"memory": {"interval": 2}}, [2, 4]),
        ({"save_interval": 4, "memory": {"interval": 3}}, [3, 4, 5]),
    ],
)
def test_every_role_comes_to_every_boundary(checkpoint, saves):
    order = order_of(checkpoint=checkpoint, steps=5)
    assert saves_of(order, 5) == saves
    for step in range(1, 6):
        roles = [entry.roles for entry in order if entry.name == CHECKPOINT and entry.step == step]
        assert roles == [("actor",), ("reference",), ("rollout",), ("reward",)]
        assert all(entry.step < step for _, entry in order.items(end=order.boundary(step)) if entry.name == "update")


def test_no_sync_is_joined_before_a_save_that_stands_before_it():
    saving = order_of(schedule=AHEAD, steps=5, checkpoint={"save_interval": 3}, data={"train": {"path": "t"}})
    earliest = {saving[position].step: first for position, first in saving.syncs()}
    boundary = saving.boundary(3)
    assert earliest[3] == boundary
    assert earliest[2] < saving.boundary(2), "without a save a sync is joined early"


def trainer_of(hosted: set[str], ending: set[int]) -> Any:
    """Returns a trainer with an empty order."""
    trainer: Any = Trainer.__new__(Trainer)
    trainer.order, trainer.hosted, trainer.roles = Order.of([]), hosted, {}
    trainer.checkpointing = SimpleNamespace(finish=lambda: None, close=lambda: None, stopped_by=None)
    trainer.transfers = trainer.trace = trainer.job = trainer.reporter = MagicMock()
    trainer.end = EndOfTraining(trainer.job, trainer.order, hosted)
    trainer.end.ranks = ending
    return trainer


@pytest.mark.parametrize("hosted, expected", [(set(), [call.await_end(), call.close()]), ({"reward"}, [call.close()])])
def test_a_rank_without_a_role_stays_until_the_run_ends(hosted: set[str], expected: list[Any]) -> None:
    trainer = trainer_of(hosted, ending=set())
    trainer.reporter = MagicMock()
    assert trainer.run()
    assert trainer.reporter.mock_calls == expected


def test_ranks_that_end_training_early_leave_together() -> None:
    """A slower rank may still send experience to finished ranks."""
    trainer = trainer_of({"actor"}, ending={0, 2, 3})
    assert trainer.run()
    assert trainer.job.job_store.meet.mock_calls == [call("end", 3, waiting_for="the end of the other ranks")]


@pytest.mark.parametrize("together", [True, False], ids=["decide_to_stop", "stop_if_reached"])
def test_all_that_learn_that_training_ends_meet_there(together: bool) -> None:
    """This holds for one common task, and for one task per role."""
    roles, name = ("actor", "rollout"), "decide_to_stop" if together else "stop_if_reached"
    entries = [
        Entry("task", "update", ("actor",), 1),
        *([Entry("task", name, roles, 1)] if together else [Entry("task", name, (role,), 1) for role in roles]),
        Entry("task", "generate", ("rollout",), 2),
        Entry("task", "save_hf", ("actor",), 2, final=True),
    ]
    job = MagicMock()
    job.placement.ranks = {"actor": (0, 1), "rollout": (1, 4)}.__getitem__
    end = EndOfTraining(job, Order.of(entries), {"actor"})
    job.job_store.agreed.return_value = job.job_store.get.return_value = False
    end.tasks[name](1, 0)
    assert (end.position, end.ranks) == (len(entries), set())
    job.job_store.agreed.return_value = job.job_store.get.return_value = True
    end.tasks[name](1, 0)
    assert (end.position, end.ranks) == (1, {0, 1, 4})
    skipped = [entry.name for position, entry in enumerate(entries) if end.skips(position, entry)]
    assert skipped == (["generate"] if together else [name, "generate"])
