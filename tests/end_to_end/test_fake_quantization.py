"""Whole jobs with experts in simulated INT4. Engines generate with the rounded weights of the trainer, and checkpoints
have the unrounded ones."""

from pathlib import Path

import pytest

from rltrain.models.experts import is_expert
from rltrain.models.products import int4_rounded
from tests.support.checkpoint_files import stored_tensors
from tests.support.jobs import QUICKSTART, column, learnt, read_records, train_in_turn

GROUP_SIZE, STEPS, SAVED = 16, 3, 2
SMALL = (
    f"steps={STEPS}",
    "batch={prompts_per_step: 4, samples_per_prompt: 8, mini_batches: 1}",
    "data.eval=null",
    "data.train.max_rows=1024",
    "logging={progress: false, samples: 0}",
    "placement={'actor, reference, rollout, reward': 0-1}",
    "actor.parallel={tp: 1, ep: 2}",
    "rollout.parallel={tp: 2, ep: 1}",
    "loss={kl: {coef: 0.01}}",
    f"checkpoint.save_interval={SAVED}",
)
APART = (
    "placement={actor: 0, 'rollout, reward, inference, reference': 1}",
    "actor.parallel.ep=1",
    f"model.fake_quantization={{group_size: {GROUP_SIZE}, scale_divisor: 7.5}}",
    "rollout.parallel.tp=1",
    "loss.old_logprobs=actor",
    "reference.refresh_every=1",
    "checkpoint={save_interval: 0, save_hf: false}",
    "steps=2",
)
"""Further models of the policy, on other ranks than the actor. Rounding twice by 7.5 differs from rounding once."""
ROUNDED = (
    f"model.fake_quantization={{group_size: {GROUP_SIZE}}}",
    "weight_sync={verify: true, delta: {in_shared_memory: true}}",
)

pytestmark = pytest.mark.slow  # tests/unit/test_megatron_layers.py has a quick part


@pytest.fixture(scope="module")
def jobs(upcycled: Path, data_overrides: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fake_quantization")
    common = [f"model.path={upcycled}", *data_overrides[:1], *SMALL, *ROUNDED]
    going_on = f"checkpoint.resume={folder}/whole/checkpoints/step_{SAVED:07d}"
    of_jobs = {"whole": common, "going_on": [*common, going_on], "apart": [*common, *APART]}
    train_in_turn(QUICKSTART, of_jobs, folder, 2)
    return folder


def test_engines_draw_with_what_the_actor_computes_with(jobs: Path) -> None:
    """The engine's ranks cut groups that the actor's ranks hold whole. Only changes are sent, and they are verified."""
    records = read_records(jobs / "whole")
    assert len(column(records, "train/loss")) == STEPS
    assert max(column(records, "train/train_rollout_logprob_abs_diff_max")) < 2e-4
    assert column(records, "train/reference_kl")[0] < 1e-6 < column(records, "train/reference_kl")[-1]
    assert column(records, "perf/weight_sync_changed_share"), "no sync sent changes only"


def test_a_run_goes_on_from_what_it_trained(jobs: Path) -> None:
    going_on, whole = (learnt(read_records(jobs / name), "train")[-1] for name in ("going_on", "whole"))
    assert going_on == whole


def test_others_that_get_the_actors_weights_round_them_once(jobs: Path) -> None:
    """The actor rounds once too. The old log-probs are inference's, and the reference is refreshed before each step."""
    records = read_records(jobs / "apart")
    assert column(records, "train/grad_norm")[0] > 0
    for name in ("train/ppo_kl", "train/reference_kl"):
        assert column(records, name) == pytest.approx([0.0] * 2, abs=1e-6), name
    assert column(records, "train/ratio_max") == pytest.approx([1.0] * 2, abs=1e-3)


def test_an_export_has_the_weights_that_are_trained(jobs: Path, upcycled: Path) -> None:
    exported, start = stored_tensors(jobs / "whole/hf"), stored_tensors(upcycled)
    experts = [name for name in exported if is_expert(name)]
    assert exported.keys() == start.keys() and experts
    for name in experts:
        moved = (exported[name] - start[name]).abs().max()
        rounded = (exported[name] - int4_rounded(exported[name], GROUP_SIZE, 7.0)).abs().max()
        assert 0 < moved < 0.5 * rounded, name
