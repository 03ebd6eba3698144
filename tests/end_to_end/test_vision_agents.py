"""Whole jobs with an agent that shows images to the model at the endpoint."""

from pathlib import Path

import pytest

from tests.support.counting_images import GRPO, IMAGE_TOKENS, grpo_overrides
from tests.support.jobs import column, read_lines, train

pytestmark = pytest.mark.slow
STEPS, PROMPTS, SAMPLES = 3, 4, 4
AHEAD = "schedule={mode: asynchronous, max_staleness: 2, partial_rollouts: true, oversampling: 1.0, on_stale: mask}"
ORDERS = {
    "in turn": (1, ["placement={'actor, rollout, env': 0}"]),
    "ahead": (2, ["placement={actor: 0, 'rollout, env': 1}", AHEAD]),
}


@pytest.mark.parametrize("order", ORDERS)
def test_the_images_of_an_agent_are_trained_on_as_they_were_seen(order: str, counting: Path, tmp_path: Path) -> None:
    """Ahead of training, episodes end some steps after their first image. The store keeps no image without need."""
    num_ranks, overrides = ORDERS[order]
    records = train(
        GRPO,
        *(*grpo_overrides(counting), *overrides, f"output_dir={tmp_path}", f"steps={STEPS}"),
        *("data.eval=null", "evaluation.interval=0", "data.images={cache_gb: 0}", "loss.old_logprobs=actor"),
        "env={agent: {function: 'tests.support.counting_agent:two_counts'}, num_workers: 2, max_turns: 2}",
        *("rollout.sampling.max_response_tokens=64", "rollout.max_context_tokens=128", "reward.function=environment"),
        f"batch={{prompts_per_step: {PROMPTS}, samples_per_prompt: {SAMPLES}, mini_batches: 1}}",
        num_ranks=num_ranks,
    )
    assert not any(column(records, "env/failed"))
    num_images = PROMPTS * SAMPLES * 2
    assert column(records, "images/tokens") == [num_images * IMAGE_TOKENS] * STEPS, "both images of an episode"
    assert column(records, "images/distinct") == [num_images] * STEPS
    for sample in read_lines(tmp_path / "samples.jsonl"):
        (shown,) = [reply for turn in sample["turns"] for reply in turn["replies"]]
        assert "<image>" in shown["content"] and len(sample["images"]) == len(shown["images"]) == 1
    if order == "in turn":
        assert max(column(records, "train/train_rollout_logprob_abs_diff_max")) <= 1e-4
