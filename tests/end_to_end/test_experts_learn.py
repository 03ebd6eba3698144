"""A model with experts learns by GRPO: experts dealt out to the actor's replicas and to an engine's ranks."""

from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.jobs import REPOSITORY, column, train

STEPS = 24


def run(upcycled: Path, data_overrides: list[str], output: Path, replay: str, *overrides: str) -> list[dict[str, Any]]:
    paths = [f"model.path={upcycled}", f"output_dir={output}", *data_overrides]
    replays = f"model.router_replay={replay}"
    records = train(REPOSITORY / "configs/quickstart_moe.yaml", *paths, replays, *overrides)
    assert max(column(records, "train/train_rollout_logprob_abs_diff_max")) <= 1e-4
    assert min(column(records, "train/moe_idle_experts")) == 0
    return records


@pytest.mark.slow
def test_it_learns_from_the_experts_that_the_engine_chose(
    upcycled: Path, data_overrides: list[str], tmp_path: Path
) -> None:
    lasts = (f"steps={STEPS}", f"evaluation.interval={STEPS}")
    records = run(upcycled, data_overrides, tmp_path, "rollout", *lasts)
    scores, rewards = column(records, "eval/score"), column(records, "rollout/reward_mean")
    assert scores[-1] > scores[0] + 0.1
    assert sum(rewards[-5:]) > sum(rewards[:5]) + 0.5
    assert min(column(records, "train/replayed_choices")) > 0.9
    assert max(column(records, "train/replayed_choices_differing"), default=0) < 0.01


@pytest.mark.slow
def test_engine_and_actor_agree_where_each_chooses(upcycled: Path, data_overrides: list[str], tmp_path: Path) -> None:
    """The other test sees that it learns."""
    records = run(upcycled, data_overrides, tmp_path, "off", "steps=6", "data.eval=null")
    assert not column(records, "train/replayed_choices")
