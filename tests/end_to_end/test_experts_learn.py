"""A model with experts learns by GRPO: experts dealt out to the actor's replicas and to an engine's ranks."""

from pathlib import Path

import pytest

from tests.end_to_end.jobs import REPOSITORY, column, train

STEPS = 24


@pytest.mark.slow
@pytest.mark.parametrize("replay", ["off", "rollout"])
def test_it_learns_and_engine_and_actor_agree(
    upcycled: Path, data_overrides: list[str], tmp_path: Path, replay: str
) -> None:
    records = train(
        REPOSITORY / "configs/quickstart_moe.yaml",
        f"model.path={upcycled}",
        f"output_dir={tmp_path}",
        f"steps={STEPS}",
        f"model.router_replay={replay}",
        f"evaluation.interval={STEPS}",
        *data_overrides,
    )
    scores, rewards = column(records, "eval/score"), column(records, "rollout/reward_mean")
    assert scores[-1] > scores[0] + 0.1
    assert sum(rewards[-5:]) > sum(rewards[:5]) + 0.5
    assert max(column(records, "train/train_rollout_logprob_abs_diff_max")) <= 1e-4
    assert min(column(records, "train/moe_idle_experts")) == 0
    replayed = column(records, "train/replayed_choices")
    assert not replayed if replay == "off" else min(replayed) > 0.9
    assert max(column(records, "train/replayed_choices_differing"), default=0) < 0.01
