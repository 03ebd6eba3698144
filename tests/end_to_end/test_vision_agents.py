"""A whole job with an agent that shows images to the model at the endpoint."""

from pathlib import Path

import pytest

from tests.support.counting_images import grpo, write_config
from tests.support.jobs import column, read_records, train

pytestmark = pytest.mark.slow
STEPS, PROMPTS, SAMPLES = 2, 4, 4
IMAGE_TOKENS = 16


def test_the_images_of_an_agent_are_trained_on_as_they_were_seen(counting: Path, tmp_path: Path) -> None:
    config = grpo(
        counting,
        STEPS,
        placement={"actor, reference, rollout, env": 0},
        env={"agent": {"function": "tests.support.counting_agent:two_counts"}, "num_workers": 2, "max_turns": 2},
        rollout={"sampling": {"temperature": 1.0, "max_response_tokens": 64}, "max_context_tokens": 128},
        batch={"prompts_per_step": PROMPTS, "samples_per_prompt": SAMPLES},
        reward={"function": "environment"},
    )
    records = train(write_config(tmp_path / "grpo.yaml", **config), f"output_dir={tmp_path}", num_ranks=1)
    assert not any(column(records, "env/failed"))
    differences = column(records, "train/train_rollout_logprob_abs_diff_max")
    assert len(differences) == STEPS and max(differences) <= 1e-4
    seen = column(records, "images/tokens")
    assert seen == [PROMPTS * SAMPLES * 2 * IMAGE_TOKENS] * STEPS, "both images of an episode"
    assert max(column(records, "images/distinct")) <= 5
