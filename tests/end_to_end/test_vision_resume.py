"""Jobs with images resumed from a checkpoint. Their images are decoded again, as the store of the first is gone."""

from pathlib import Path

import pytest

from rltrain.checkpoint.run_files import read_contents
from rltrain.rollout.rollout_state import RolloutState
from tests.support.counting_images import GRPO, grpo_overrides
from tests.support.jobs import column, reported, train_in_turn

STEPS, SAVED, PROMPTS = 4, 2, 8
SAVES = f"checkpoint.save_interval={SAVED}"
PARTIAL = ("schedule.partial_rollouts=true", "schedule.oversampling=1.0", "rollout.max_running_requests=6")
FIRST = {"ahead": (), "partial": PARTIAL}


@pytest.fixture(scope="module")
def folder(counting: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the folder of two jobs, which generate a step ahead of training, and of their resumed runs."""
    folder = tmp_path_factory.mktemp("resume")
    own = [
        *grpo_overrides(counting),
        "placement={'actor, reference': 0, 'rollout, reward': 1}",
        "schedule={mode: asynchronous, max_staleness: 1, in_flight_sync: false, on_stale: mask}",
        f"batch={{prompts_per_step: {PROMPTS}, samples_per_prompt: 4, mini_batches: 1}}",
        *(f"steps={STEPS}", "data.eval=null", "checkpoint.save_hf=false", "logging.sample_ids=true"),
    ]
    jobs = {name: [*own, *changes, SAVES] for name, changes in FIRST.items()}
    for name, changes in FIRST.items():
        resume = f"checkpoint.resume={folder / name}/checkpoints/step_{SAVED:07d}"
        jobs[f"{name} resumed"] = [*own, *changes, resume]
    train_in_turn(GRPO, jobs, folder, num_ranks=2)
    return folder


@pytest.mark.slow
def test_a_resumed_run_equals_one_that_never_stopped(folder: Path) -> None:
    """The checkpoint has the next step's samples, which the trainer has not received yet."""
    (whole, whole_ids), (rest, rest_ids) = (reported(folder / name) for name in ("ahead", "ahead resumed"))
    assert rest == {step: metrics for step, metrics in whole.items() if step >= SAVED}
    assert rest_ids == {step: ids for step, ids in whole_ids.items() if step >= SAVED}
    assert column([*rest.values()], "train/grad_norm")


@pytest.mark.slow
def test_unfinished_samples_continue_with_their_images(folder: Path) -> None:
    checkpoint = folder / f"partial/checkpoints/step_{SAVED:07d}"
    state = RolloutState.from_contents(read_contents(checkpoint / "rollout/engine_00000.safetensors"))
    assert state.begun and all(sample.images for group in state.begun for sample in group.samples)
    rest, ids = reported(folder / "partial resumed")
    assert [*rest] == [*range(SAVED, STEPS)]
    assert {group.position for group in state.begun} <= {number // 4 for of_step in ids.values() for number in of_step}
    assert max(column([*rest.values()], "train/fresh_logprob_abs_diff"), default=0) <= 1e-5
