"""Rollouts with FP8 weights: the weight sync quantises, engines generate, the actor corrects.

test_resume.py has a model that learns from them.
"""

import math
from pathlib import Path

import pytest

from tests.support.jobs import QUICKSTART, SHORT, column, train_each

FP8 = ("rollout.dtype=fp8", "loss.old_logprobs=actor", "loss.correction.high=2.0")


@pytest.mark.slow
def test_both_ways_of_syncing_give_engines_the_same_weights(warm_start: list[str], tmp_path: Path) -> None:
    """Both sides use tensor parallelism. The engines' weights are compared with the actor's quantised weights."""
    small = ("batch={prompts_per_step: 4, samples_per_prompt: 4, mini_batches: 1}", "steps=2", *SHORT)
    common = [*warm_start, *FP8, *small, "rollout.parallel.tp=2", "weight_sync.verify=true"]
    jobs = {way: [*common, f"weight_sync.transport={way}"] for way in ("planned", "full_gather")}
    runs = train_each(QUICKSTART, jobs, tmp_path, num_ranks=4)
    planned, gathered = (column(records, "rollout/reward_mean") for records in runs.values())
    assert planned == gathered
    differences = column(runs["planned"], "train/train_rollout_logprob_abs_diff")
    assert all(1e-4 < difference < 0.1 for difference in differences), differences
    assert runs["planned"][0]["perf/weight_sync_bytes"] > 0
    assert all(not math.isnan(weight) for weight in column(runs["planned"], "train/tis_weight"))
