"""A role is a class and a declaration: the order, the exchange, memory, metrics and checkpoints follow from them."""

from pathlib import Path

from tests.support.jobs import QUICKSTART, SHORT, read_records, succeed, torchrun


def test_a_role_that_nobody_knew_takes_its_place(tmp_path: Path, warm_start: list[str]) -> None:
    """The new role is an adviser on both ranks."""
    settings = [
        *(*warm_start, f"output_dir={tmp_path}", *SHORT, "steps=2", "actor.parallel.tp=1", "loss.kl.coef=0"),
        *("batch={prompts_per_step: 4, samples_per_prompt: 4, mini_batches: 1}", "checkpoint.save_interval=1"),
        *("placement={'actor': 0, 'rollout, reward': 1, 'adviser': '0-1'}", "schedule={mode: pipelined, chunks: 2}"),
    ]
    succeed([*torchrun(2), "tests/support/new_role_train.py", "--config", str(QUICKSTART), *settings], 200)
    steps = [record for record in read_records(tmp_path) if "train/loss" in record]
    assert len(steps) == 2
    for record in steps:
        assert record["perf/adviser_logprobs_s"] >= 0
        assert record["train/reference_kl"] > 1, "the actor is sure of most tokens, and the adviser of none"
    assert [*tmp_path.glob("checkpoints/step_*2")], "all of its ranks came to the boundary"
