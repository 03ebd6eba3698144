"""A whole run with optimizer and activations on the host. Others train by Muon, in test_estimated_bytes.py."""

from pathlib import Path

import pytest

from tests.support.jobs import REPOSITORY, column, train

pytestmark = pytest.mark.slow

QUICKSTART = REPOSITORY / "configs/quickstart.yaml"


def test_roles_take_turns_beside_an_optimizer_that_stays_on_the_host(
    warmed_up: Path, data_overrides: list[str], tmp_path: Path
) -> None:
    """All else leaves the device between tasks, and what is learned is the same bit for bit."""
    common = (
        f"model.path={warmed_up}",
        data_overrides[0],
        "data.eval=null",
        "evaluation.interval=0",
        "steps=3",
        "placement={'actor, rollout, reference, reward': all}",
        "batch={prompts_per_step: 8, samples_per_prompt: 4}",
        "model.dtype=bfloat16",
    )
    moving = ("actor.offload=true", "reference.offload=true", "rollout.offload=true", "model.activation_offload=true")
    resident = train(QUICKSTART, *common, f"output_dir={tmp_path / 'resident'}", num_ranks=2)
    hosted = train(
        QUICKSTART,
        *common,
        *moving,
        "actor.optimizer.cpu_offload=true",
        f"output_dir={tmp_path / 'hosted'}",
        num_ranks=2,
    )
    for name in ("train/loss", "train/grad_norm", "rollout/reward_mean"):
        assert column(hosted, name) == column(resident, name) and len(column(resident, name)) == 3
    peaks = [max(column(records, "memory/actor_resident_bytes")) for records in (resident, hosted)]
    assert peaks[1] < 0.6 * peaks[0]
