"""Whole jobs trained with torch's fully_shard: equal to Megatron's, also from each other's checkpoints."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.end_to_end.test_resume import PROMPTS, SAMPLES, SAVED, SMALL, STEPS, after, assert_close_in_the_next_step
from tests.support.jobs import QUICKSTART, REPOSITORY, column, reported, train, train_in_turn
from tests.support.tolerances import ADAM_EPS

APART = "placement={'actor, reference': 0-2, 'rollout, reward': 3}"
"""Three ranks for the actor. They divide no matrix of the model evenly."""
OPTIMIZER = f"optimizer: {{lr: 3e-4, warmup_steps: 5, decay: linear, eps: {ADAM_EPS}}}"
FSDP = (APART, f"actor={{backend: fsdp, parallel: {{tp: 1}}, {OPTIMIZER}}}")
MEGATRON = (APART, f"actor={{parallel: {{tp: 1}}, {OPTIMIZER}}}")
TWO_SAMPLES = 2 / (PROMPTS * SAMPLES)
"""Tolerance of a step's mean reward: after some updates one or two tokens differ."""


def from_checkpoint(folder: Path) -> str:
    return f"checkpoint.resume={folder}/checkpoints/step_{SAVED:07d}"


@pytest.fixture(scope="module")
def jobs(warm_start: list[str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("jobs")
    settings = {
        "fsdp": FSDP,
        "megatron": MEGATRON,
        "offloaded": (*FSDP, "actor.offload=true", "reference.offload=true"),
        "on the host": (*FSDP, "actor.optimizer.cpu_offload=true", "actor.offload=true"),
        "fsdp resumed": (*FSDP, from_checkpoint(folder / "fsdp")),
        "fsdp to megatron": (*MEGATRON, from_checkpoint(folder / "fsdp")),
        "megatron to fsdp": (*FSDP, from_checkpoint(folder / "megatron")),
    }
    common = [*warm_start, "data.eval=null", *SMALL, f"checkpoint.save_interval={SAVED}"]
    train_in_turn(QUICKSTART, {name: [*common, *chosen] for name, chosen in settings.items()}, folder, num_ranks=4)
    return {name: reported(folder / name)[0] for name in settings}


@pytest.mark.slow
def test_first_steps_have_megatrons_rewards(jobs: dict[str, Any]) -> None:
    for step in range(STEPS):
        found, expected = (jobs[name][step] for name in ("fsdp", "megatron"))
        assert found["rollout/reward_mean"] == pytest.approx(expected["rollout/reward_mean"], abs=TWO_SAMPLES)
        assert found["train/train_rollout_logprob_abs_diff_max"] < 1e-4, "synced weights are the actor's"
    assert jobs["fsdp"][0] == pytest.approx(jobs["megatron"][0], rel=1e-2, abs=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["offloaded", "on the host"])
def test_memory_that_leaves_or_is_on_the_host_is_as_it_was(jobs: dict[str, Any], name: str) -> None:
    assert jobs[name] == jobs["fsdp"]


@pytest.mark.slow
def test_a_run_goes_on_bit_for_bit(jobs: dict[str, Any]) -> None:
    assert jobs["fsdp resumed"] == after(jobs["fsdp"])


@pytest.mark.slow
@pytest.mark.parametrize(("name", "whole"), [("fsdp to megatron", "fsdp"), ("megatron to fsdp", "megatron")])
def test_a_run_goes_on_under_the_other_backend(jobs: dict[str, Any], name: str, whole: str) -> None:
    assert_close_in_the_next_step({SAVED: jobs[name][SAVED]}, jobs[whole])


@pytest.mark.slow
def test_the_quickstart_reaches_nine_tenths(warm_start: list[str], tmp_path: Path) -> None:
    records = train(
        QUICKSTART,
        *[*warm_start, f"output_dir={tmp_path}"],
        *["placement={'actor, rollout, reward': all}", "actor.backend=fsdp", "actor.parallel.tp=1"],
        *["loss.kl.coef=0", "evaluation={interval: 10, stop_at: 0.9}"],
        num_ranks=2,
    )
    scores = column(records, "eval/score")
    assert scores[0] < 0.6 and scores[-1] >= 0.9


@pytest.fixture
def gpt2(warmed_up: Path, tmp_path: Path) -> Path:
    """Returns a model of a family without a table, with random weights and the quickstart's tokenizer."""
    folder = tmp_path / "gpt2"
    shutil.copytree(warmed_up, folder, ignore=shutil.ignore_patterns("*.safetensors", "*config.json"))
    shutil.copy(warmed_up / "tokenizer_config.json", folder)
    ids = json.loads((warmed_up / "config.json").read_text())
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=ids["vocab_size"], n_embd=64, n_layer=2, n_head=4, n_positions=64, eos_token_id=ids["eos_token_id"]
    )
    transformers.GPT2LMHeadModel(config).save_pretrained(folder)
    return folder


def test_a_family_without_a_table_learns_and_loads_in_transformers(
    gpt2: Path, data_overrides: list[str], tmp_path: Path
) -> None:
    records = train(
        REPOSITORY / "configs/quickstart_sft.yaml",
        *(f"model.path={gpt2}", f"output_dir={tmp_path / 'run'}", *data_overrides, "data.eval=null", "evaluation={}"),
        *("placement={actor: 0-2}", "steps=8"),
        "actor={backend: fsdp, parallel: {tp: 1}, optimizer: {lr: 3e-3, warmup_steps: 2}}",
        num_ranks=3,
    )
    losses = column(records, "train/loss")
    assert losses[-1] < 0.8 * losses[0]
    before, after_training = (
        transformers.AutoModelForCausalLM.from_pretrained(path).state_dict() for path in (gpt2, tmp_path / "run/hf")
    )
    assert before.keys() == after_training.keys()
    assert all(not torch.equal(before[name], after_training[name]) for name in before)
