"""A whole run follows NCCL's rules: groups that are released and reopened, pipelines, engines with recorded steps."""

from pathlib import Path

import pytest

from tests.support.jobs import QUICKSTART, SHORT, column, read_records, succeed, torchrun

LAYOUTS = {
    "colocated": (2, "placement={'actor, reference, rollout, reward': 0-1}", "actor.parallel={tp: 1, pp: 2}"),
    "overlapping": (3, "placement={'actor, reference': 0-2, rollout: 1-2, reward: 0}", "actor.parallel.tp=1"),
    "disaggregated": (
        4,
        "placement={'actor, reference': 0-1, 'rollout, reward': 2-3}",
        "actor.parallel={tp: 1, pp: 2}",
    ),
}
"""Ranks and placements.

The communicator of overlapping engines belongs to no other role, so it is released. Graphs of disaggregated engines
live until the end.
"""
SMALL = (
    *("steps=2", *SHORT, "weight_sync.verify=true", "weight_sync.bucket_mb=1"),
    "batch={prompts_per_step: 4, samples_per_prompt: 4, mini_batches: 2}",
    "rollout={parallel: {tp: 2}, sampling: {max_response_tokens: 16}}",
    "loss.old_logprobs=actor",
    # An untrained model answers no question, but its answers differ in length.
    "reward={function: 'tools.benchmarks.slow_reward:slow', options: {seconds: 0.0}, num_workers: 1}",
    *("actor.overlap=true", "actor.gradient_bucket_mb=0.1", "logging={progress: false, samples: 0}"),
    *(f"{role}.offload=true" for role in ("actor", "reference", "rollout")),
)


@pytest.mark.slow  # tests/distributed/test_nccl_rules.py tests all parts of such a run
@pytest.mark.parametrize(
    ("layout", "communicators"), [("overlapping", "release"), ("colocated", "keep"), ("disaggregated", "keep")]
)
def test_a_run_keeps_to_them(
    layout: str, communicators: str, quickstart_files: Path, data_overrides: list[str], tmp_path: Path
) -> None:
    num_ranks, *places = LAYOUTS[layout]
    command = [*torchrun(num_ranks), "tests/support/nccl_rules_train.py", "--config", str(QUICKSTART)]
    settings = [*data_overrides, *SMALL, *places, f"residency.communicators={communicators}"]
    succeed([*command, *settings, f"model.path={quickstart_files}/model", f"output_dir={tmp_path}"], 240)
    assert [norm > 0 for norm in column(read_records(tmp_path), "train/grad_norm")] == [True, True]
