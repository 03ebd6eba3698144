"""check() finds exactly the orders that cannot finish, and the orders of all modes are not among them."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rltrain.errors import ConfigError
from rltrain.runtime.placement import Placement
from rltrain.schedule.iterations import build_order
from rltrain.schedule.order import Entries, Entry
from rltrain.schedule.replay import check
from tests.unit.schedule_configs import WORLD_SIZE, evaluations, make_config, order_of, place

rank_subsets = st.lists(st.integers(0, WORLD_SIZE - 1), min_size=1, max_size=WORLD_SIZE, unique=True)


@st.composite
def placements(draw: st.DrawFn, *roles: str) -> Placement:
    return place({role: ",".join(map(str, draw(rank_subsets))) for role in roles})


GRPO_PLACEMENTS = placements("actor", "reference", "rollout", "reward")


@st.composite
def runs(draw: st.DrawFn):
    """(config, placement) of any mode, legal on the placement or not."""
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
    """The proof in words: the first entry in the order that is not done can always be done."""
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


def test_a_wait_before_its_post_is_refused():
    order = Entries()
    order.wait("samples", "rollout", "reward", step=0)
    order.post("samples", "rollout", "reward", step=0)
    with pytest.raises(ConfigError, match="waits before the post"):
        check(order, place({"rollout": 0, "reward": 1}))


def test_a_post_without_a_wait_is_refused():
    order = Entries()
    order.post("samples", "rollout", "reward", step=0)
    with pytest.raises(ConfigError, match="never waits"):
        check(order, place({"rollout": 0, "reward": 1}))


def test_chunks_of_a_transfer_are_told_apart():
    order = Entries()
    order.post("samples", "rollout", "reward", step=0, chunk=0)
    order.wait("samples", "rollout", "reward", step=0, chunk=1)
    with pytest.raises(ConfigError, match="waits before the post"):
        check(order, place({"rollout": 0, "reward": 1}))


def test_the_same_entry_twice_is_refused():
    order = Entries()
    order.task("generate", "rollout", step=0)
    order.task("generate", "rollout", step=0)
    with pytest.raises(ConfigError, match="twice"):
        check(order, place({"rollout": 0}))
