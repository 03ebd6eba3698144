"""Whole jobs with images: every family, adapters, a frozen tower and a critic. transformers opens the exports."""

import sys
from pathlib import Path

import pytest
import torch

from rltrain.models.vision import Tower
from tests.support.counting_images import GRPO, IMAGE_TOKENS
from tests.support.jobs import column, succeed, train_each
from tests.support.vision_checkpoints import load_model, write_checkpoint

STEPS, PROMPTS, SAMPLES = 2, 4, 4
BATCH = f"batch={{prompts_per_step: {PROMPTS}, samples_per_prompt: {SAMPLES}, mini_batches: 1}}"
SHORT = [
    "data.max_prompt_tokens=64",
    "rollout.max_context_tokens=80",
    "rollout.sampling.max_response_tokens=8",
    "data.eval.max_rows=4",
]
ALL = "placement={'actor, rollout, reward': 0-1}"
LORA = "model.lora={rank: 4, alpha: 8, vision: true}"
JOBS: dict[str, tuple[Tower, list[str], int]] = {
    "qwen2_5_vl, frozen": ("qwen2_5_vl", [ALL, "actor.parallel={pp: 2}", "model.vision.train=false"], 0),
    "qwen2_5_vl, adapters": ("qwen2_5_vl", [ALL, LORA], 17),
    "qwen2_5_vl, adapters apart": ("qwen2_5_vl", [ALL, LORA, "weight_sync.adapters=apart"], 17),
    "qwen2_5_vl, critic": ("qwen2_5_vl", ["placement={'actor, critic, rollout, reward': 0-1}", "algorithm=ppo"], 42),
    "qwen3_vl": ("qwen3_vl", [ALL, "actor.parallel={tp: 2, sequence_parallel: true}", "rollout.parallel={tp: 2}"], 51),
    "qwen3_vl_moe": ("qwen3_vl_moe", [ALL, "actor.parallel={ep: 2}", "rollout.parallel={tp: 2, ep: 2}"], 51),
    "qwen3_vl_moe, fsdp": ("qwen3_vl_moe", [ALL, "actor.backend=fsdp"], 51),
    "qwen3_vl, changes": (
        "qwen3_vl",
        ["placement={actor: 0, 'rollout, reward': 1}", "weight_sync.delta={}", "weight_sync.verify=true"],
        51,
    ),
    "qwen3_5": ("qwen3_5", [ALL], 45),
    "qwen3_5_moe, adapters": ("qwen3_5_moe", [ALL, "model.lora={rank: 4, alpha: 8}"], 0),
}
"""Each with its family and the number of changed tensors of the tower. In qwen3_vl, the features of the last merger are
added after the last layer, where they have no gradients."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder with rows in start/ and the outputs of all jobs in jobs/."""
    folder = tmp_path_factory.mktemp("families")
    command = [sys.executable, "tools/make_counting.py", "--output", str(folder / "start")]
    succeed(command, 120)
    (folder / "jobs").mkdir()
    for kind in {kind for kind, _, _ in JOBS.values()}:
        write_checkpoint(folder / kind, kind)
    return folder


@pytest.fixture(scope="module")
def jobs(folder: Path):
    rows = [f"data.{name}.path={folder}/start/{name}.jsonl" for name in ("train", "eval")]
    jobs = {
        name: [f"model.path={folder}/{kind}", *rows, *SHORT, BATCH, f"steps={STEPS}", *changes]
        for name, (kind, changes, _) in JOBS.items()
    }
    return train_each(GRPO, jobs, folder / "jobs", num_ranks=2)


@pytest.mark.slow
@pytest.mark.parametrize("job", JOBS)
def test_engine_and_actor_agree(jobs, job: str) -> None:
    records = jobs[job]
    assert column(records, "images/tokens") == [PROMPTS * SAMPLES * float(IMAGE_TOKENS)] * STEPS
    assert max(column(records, "train/train_rollout_logprob_abs_diff_max")) <= 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("job", JOBS)
def test_transformers_opens_the_export(jobs, folder: Path, job: str) -> None:
    kind, _, num_changed = JOBS[job]
    before, after = (load_model(of).state_dict() for of in (folder / kind, folder / "jobs" / job / "hf"))
    changed = {name for name, value in before.items() if not torch.equal(after[name], value)}
    assert after.keys() == before.keys()
    assert len([name for name in changed if "visual" in name]) == num_changed
    assert any("language_model" in name for name in changed)
