"""Whole jobs with models as the reward."""

from pathlib import Path

import pytest

from tests.support.jobs import QUICKSTART, column, read_lines, train
from tests.support.reward_models import make_judge_who_loves, make_lover_of

PLACEMENT = "placement={actor: 0, 'rollout, reward': 1, reward_model: '0-1', judge: '0-1'}"


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["parallel: {tp: 2}", "backend: fsdp, parallel: {tp: 1}"])
def test_a_policy_learns_to_end_its_answers_as_models_like_it(backend: str, tmp_path: Path, warm_start) -> None:
    """A classifier with another vocabulary wants a 7 at the end and has the largest weight. A judge wants a 1."""
    classifier, judge = make_lover_of("7", tmp_path / "rm"), make_judge_who_loves("1", tmp_path / "judge")
    records = train(
        QUICKSTART,
        *(*warm_start, "data.eval.max_rows=32", PLACEMENT, f"output_dir={tmp_path / 'run'}"),
        f"reward_model={{path: {classifier}, {backend}, offload: true}}",
        f"judge={{path: {judge}, weight: 0.25, parallel: {{tp: 1}}, offload: true, prompt: '{{prompt}} {{response}}', "
        "verdict: 'tests.support.reward_models:points', max_context_tokens: 128, sampling: {max_response_tokens: 4}}",
        *("reward={functions: []}", "steps=8", "loss.kl.coef=0", "checkpoint.save_hf=false"),
        "batch={prompts_per_step: 16, samples_per_prompt: 8, mini_batches: 1}",
        "actor={parallel: {tp: 1}, optimizer: {lr: 1e-3, warmup_steps: 0}}",
        num_ranks=2,
    )
    rewards, liked = column(records, "rollout/reward_mean"), column(records, "rollout/reward_model")
    judged, unread = column(records, "rollout/reward_judge"), column(records, "rollout/reward_judge_errors")
    assert [model + 0.25 * judge for model, judge in zip(liked, judged, strict=True)] == pytest.approx(rewards)
    assert max(unread) == 0 and max(judged) > 0
    evaluated = column(records, "eval/reward_model")
    assert evaluated[-1] > evaluated[0] + 0.2 and max(liked) > liked[0] + 0.2
    for sample in read_lines(tmp_path / "run/samples.jsonl"):
        assert sample["rewards"]["model"] == pytest.approx(float(sample["response"].endswith("7")), abs=1e-4)
        assert sample["rewards"]["judge"] == sample["response"].endswith("1")
