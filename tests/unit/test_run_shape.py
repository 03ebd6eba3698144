"""What follows from a config for the order of tasks and for batches."""

from dataclasses import asdict

import pytest

from rltrain.schedule.shape import RunShape
from tests.unit.schedule_configs import make_config

BATCH = {"prompts_per_step": 8, "samples_per_prompt": 4}
PIPELINED = {"mode": "pipelined"}


def asynchronous(**settings):
    return {"schedule": {"mode": "asynchronous", "max_staleness": 3, **settings}}


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        ({}, {"lead": 0, "num_chunks": 1, "samples_per_group": 4, "prompt_blocks": 1, "num_actor_updates": 10}),
        ({"algorithm": "remax"}, {"samples_per_group": 4, "greedy_per_group": 1}),
        ({"algorithm": "sft"}, {"greedy_per_group": 0, "samples_per_group": 1, "needs_actor_logprobs": False}),
        ({"batch": {**BATCH, "mini_batches": 8}}, {"prompt_blocks": 2, "chunk_blocks": 2, "num_actor_updates": 80}),
        ({"batch": {**BATCH, "mini_batches": 4, "mini_batches_by": "prompts"}}, {"prompt_blocks": 4}),
        ({"batch": {**BATCH, "samples_per_prompt": 5, "mini_batches": 4}}, {"prompt_blocks": 4}),
        ({"batch": {**BATCH, "samples_per_prompt": 6, "mini_batches": 4}}, {"prompt_blocks": 2}),
        ({"batch": {**BATCH, "mini_batches": 2, "epochs": 3}}, {"updates_per_step": 6, "num_actor_updates": 60}),
        ({"schedule": PIPELINED, "batch": {**BATCH, "epochs": 2}}, {"accumulates_actor": False}),
        (
            {"schedule": PIPELINED, "loss": {"correction": {"high": 2.0, "normalize": "step"}}},
            {"accumulates_actor": False},
        ),
        ({"algorithm": "sft", "batch": {**BATCH, "mini_batches": 4}}, {"prompt_blocks": 4}),
        ({"algorithm": "dpo", "batch": {**BATCH, "mini_batches": 4}}, {"prompt_blocks": 4, "samples_per_group": 2}),
        ({"batch": {**BATCH, "mini_batches": 16}, "schedule": {**PIPELINED, "chunks": 2}}, {"chunk_blocks": 2}),
        ({"schedule": PIPELINED}, {"num_chunks": 4, "shares_prompts": True, "accumulates_actor": True}),
        ({"schedule": PIPELINED, "batch": {**BATCH, "mini_batches": 2}}, {"accumulates_critic": False}),
        ({"schedule": PIPELINED, "algorithm": "ppo"}, {"accumulates_critic": True, "accumulates_actor": False}),
        ({"schedule": PIPELINED, "algorithm": "ppo", "advantages": {"whiten": False}}, {"accumulates_actor": True}),
        (asynchronous(), {"lead": 3, "syncs_in_flight": True, "shares_prompts": True}),
        (asynchronous(in_flight_sync=False), {"lead": 3, "syncs_in_flight": False, "shares_prompts": False}),
        (asynchronous(), {"draws_during_syncs": True}),
        (asynchronous(in_flight_sync=False), {"draws_during_syncs": False}),
        ({"schedule": {"partial_rollouts": True}}, {"syncs_in_flight": False, "draws_during_syncs": True}),
        ({"schedule": PIPELINED}, {"draws_during_syncs": False}),
        (asynchronous(sync_every=4), {"lead": 0, "syncs_in_flight": False}),
        (asynchronous(sync_every=5), {"lead": -1}),
        ({"algorithm": "ppo", "critic": {"critic_warmup_steps": 4}}, {"first_actor_step": 4, "num_actor_updates": 6}),
        ({"critic": {"critic_warmup_steps": 4}}, {"first_actor_step": 0, "num_actor_updates": 10}),
        ({"loss": {"old_logprobs": "rollout"}}, {"needs_actor_logprobs": False}),
    ],
    ids=str,
)
def test_what_follows_from_a_config(sections, expected):
    shape = asdict(RunShape.of(make_config(**{"steps": 10, "batch": BATCH, **sections})))
    assert {name: shape[name] for name in expected} == expected
