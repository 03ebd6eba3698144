"""GRPO of a model with experts. They are divided among the actor's replicas and among the engine's ranks."""

from pathlib import Path

import pytest

from tests.support.jobs import REPOSITORY, column, train

STEPS = 4


@pytest.mark.slow
@pytest.mark.parametrize("replay", ["rollout", "off"])
def test_engine_and_actor_agree_on_experts(replay: str, upcycled: Path, data_overrides: list[str], tmp_path: Path):
    """The actor uses the engine's choices of experts, or its own."""
    records = train(
        REPOSITORY / "configs/quickstart_moe.yaml",
        *[f"model.path={upcycled}", f"output_dir={tmp_path}", *data_overrides, "data.eval=null"],
        *[f"model.router_replay={replay}", f"steps={STEPS}"],
    )
    assert len(column(records, "train/loss")) == STEPS
    assert max(column(records, "train/train_rollout_logprob_abs_diff_max")) <= 1e-4
    assert min(column(records, "train/moe_idle_experts")) == 0
    replayed = column(records, "train/replayed_choices")
    assert len(replayed) == (STEPS if replay == "rollout" else 0) and all(share > 0.9 for share in replayed)
    assert max(column(records, "train/replayed_choices_differing"), default=0) < 0.01
