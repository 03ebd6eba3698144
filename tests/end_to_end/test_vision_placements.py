"""Whole jobs with images on two ranks: layouts of the actor, engines elsewhere, and generation ahead of training."""

from pathlib import Path

import pytest

from tests.support.counting_images import GRPO, IMAGE_TOKENS, grpo_overrides
from tests.support.jobs import column, train_each

STEPS, PROMPTS, SAMPLES = 3, 8, 4
ALL = "placement={'actor, reference, rollout, reward': 0-1}"
APART = "placement={'actor, reference': 0, 'rollout, reward': 1}"
AHEAD = ("schedule.mode=asynchronous", "schedule.max_staleness=1", "schedule.on_stale=mask")
PARTIAL = ("schedule.partial_rollouts=true", "schedule.oversampling=1.0", "rollout.max_running_requests=8")
JOBS = {
    "data parallel": [ALL],
    "tensor parallel": [ALL, "actor.parallel={tp: 2}", "rollout.parallel={tp: 2}"],
    "pipeline parallel": [ALL, "actor.parallel={pp: 2}"],
    "context parallel": [ALL, "actor.parallel={cp: 2}"],
    "critic": ["placement={'actor, critic, rollout, reward': 0-1}", "algorithm=ppo"],
    "apart": [APART],
    "ahead": [APART, *AHEAD],
    "partial, without a cache": [APART, *AHEAD, *PARTIAL, "data.images.cache_gb=0"],
    "dynamic sampling": [ALL, "batch.dynamic_sampling={max_drawn: 3}"],
    "fully sharded": [ALL, "actor.backend=fsdp", "reference.backend=fsdp"],
    "separate adapters": [ALL, "model.lora={rank: 2, alpha: 4, vision: true}", "weight_sync={adapters: apart}"],
    "frozen, offloaded": [ALL, "model.vision={train: false}", "rollout.offload=true"],
    "frozen, apart": [APART, "model.vision={train: false}"],
    "blocks": [ALL, "actor.parallel={tp: 2}", "rollout.parallel={tp: 2}", "rollout.kv_cache_gb=0.002"],
    "evaluated elsewhere": ["placement={'actor, reference, rollout, reward': 0, evaluation: 1}"],
}


@pytest.fixture(scope="module")
def jobs(counting: Path, tmp_path_factory: pytest.TempPathFactory):
    batch = f"batch={{prompts_per_step: {PROMPTS}, samples_per_prompt: {SAMPLES}, mini_batches: 1}}"
    own = [*grpo_overrides(counting), f"steps={STEPS}", batch, "data.eval.max_rows=20", "checkpoint.save_hf=false"]
    jobs = {name: [*own, *changes] for name, changes in JOBS.items()}
    return train_each(GRPO, jobs, tmp_path_factory.mktemp("placements"), num_ranks=2)


@pytest.mark.slow
@pytest.mark.parametrize("job", JOBS)
def test_engine_and_actor_agree_on_images(jobs, job: str) -> None:
    records = jobs[job]
    assert column(records, "images/tokens") == [PROMPTS * SAMPLES * float(IMAGE_TOKENS)] * STEPS
    assert max(column(records, "train/fresh_logprob_abs_diff")) <= 1e-5
    assert max(column(records, "train/fresh_image_logprob_abs_diff")) <= 1e-5
    assert not any(column(records, "images/bytes_sent"))
    assert len(column(records, "eval/score")) == 2


@pytest.mark.slow
def test_a_frozen_tower_is_sent_once_to_engines_that_keep_it(jobs) -> None:
    moved, kept = (column(jobs["frozen, apart"], f"perf/weight_sync_{name}") for name in ("bytes", "kept_bytes"))
    assert kept[0] == 0 and kept[1] > 0.1 * moved[0]
    assert {*kept[1:]} == {kept[1]} and {*moved[1:]} == {moved[0] - kept[1]}
    emptied = column(jobs["frozen, offloaded"], "perf/weight_sync_kept_bytes")
    assert not any(emptied), "the memory of these engines is the actor's in between"
