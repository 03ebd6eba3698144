"""Whole jobs that train the layer for a further token: its loss falls, checkpoints and exports have it.

Engines generate without it as the actor does.
"""

import json
import shutil
from pathlib import Path

import pytest

from rltrain.cli.main import main
from tests.support.checkpoint_files import stored_tensors
from tests.support.jobs import QUICKSTART, column, learnt, read_records, train_in_turn
from tests.support.prediction_checkpoints import LAYER, make_mimo

STEPS, SAVED = 6, 3
SMALL = (
    f"steps={STEPS}",
    "batch={prompts_per_step: 4, samples_per_prompt: 8, mini_batches: 2}",
    "data.eval=null",
    "data.train.max_rows=1024",
    "logging={progress: false, samples: 0}",
    "actor.optimizer={lr: 3e-3, warmup_steps: 0, decay: constant, clip_grad: 1.0}",
    "placement={'actor, reference, rollout, reward': 0-1}",
    "actor.parallel={tp: 1, pp: 2}",
    "rollout.parallel.tp=2",
    "weight_sync.verify=true",
    "model.mtp={coef: 0.2}",
    f"checkpoint.save_interval={SAVED}",
)
APART = (
    "placement={actor: 0, 'rollout, reward, inference, reference': 1}",
    "actor.parallel.pp=1",
    "batch.mini_batches=1",
    "rollout.parallel.tp=1",
    "rollout.dtype=fp8",
    "weight_sync={verify: true, delta: {in_shared_memory: true}}",
    "model.mtp.trains=model",
    "actor.share_prefixes=true",
    "loss.old_logprobs=actor",
    "reference.refresh_every=1",
    "checkpoint={save_interval: 0, save_hf: false}",
    "steps=2",
)
"""Further models of the policy, on other ranks than the actor, with and without its layer."""

pytestmark = pytest.mark.slow  # tests/unit/test_validation_models.py has a quick part


@pytest.fixture(scope="module")
def mimo(warmed_up: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = json.loads((warmed_up / "config.json").read_text())
    folder = make_mimo(tmp_path_factory.mktemp("mimo"), vocab_size=config["vocab_size"], max_position_embeddings=128)
    for file in ("generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(warmed_up / file, folder)
    return folder


@pytest.fixture(scope="module")
def jobs(mimo: Path, data_overrides: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("prediction")
    common = [f"model.path={mimo}", *data_overrides[:1], *SMALL]
    going_on = f"checkpoint.resume={folder}/whole/checkpoints/step_{SAVED:07d}"
    of_jobs = {"whole": common, "going_on": [*common, going_on], "apart": [*common, *APART]}
    train_in_turn(QUICKSTART, of_jobs, folder, 2)
    return folder


def test_the_loss_falls_and_the_engine_draws_as_the_actor_does(jobs: Path) -> None:
    records = read_records(jobs / "whole")
    losses = column(records, "train/mtp_loss")
    assert len(losses) == STEPS and losses[-1] < 0.9 * losses[0]
    assert max(column(records, "train/train_rollout_logprob_abs_diff_max")) < 2e-4


def test_a_run_goes_on_from_what_it_trained(jobs: Path) -> None:
    going_on, whole = (learnt(read_records(jobs / name), "train")[-1] for name in ("going_on", "whole"))
    assert going_on == whole


def test_others_get_the_actors_weights(jobs: Path) -> None:
    """The old log-probs are inference's, and the reference is refreshed before each step."""
    records = read_records(jobs / "apart")
    assert column(records, "train/reference_kl")[0] == pytest.approx(0, abs=1e-6)
    assert column(records, "train/mtp_loss")[0] > 0


def test_exports_and_conversions_have_the_layer_that_was_trained(jobs: Path, mimo: Path) -> None:
    start, exported = stored_tensors(mimo), stored_tensors(jobs / "whole/hf")
    assert exported.keys() == start.keys()
    for name in exported:
        if name.startswith(LAYER):
            assert (exported[name] != start[name]).any(), name
    assert (
        main(["convert", "run-to-hf", "--input", str(jobs / "whole/checkpoints"), "--output", str(jobs / "converted")])
        == 0
    )
    converted = stored_tensors(jobs / "converted")
    assert converted.keys() == exported.keys()
    assert all((converted[name] == exported[name]).all() for name in exported)
