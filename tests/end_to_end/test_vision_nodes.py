"""A whole job with images over two nodes: two torchrun agents on one machine, each with its own folder of images."""

from pathlib import Path

import pytest

from tests.support.counting_images import GRPO, IMAGE_BYTES, grpo_overrides
from tests.support.jobs import column, read_lines, read_records
from tests.support.torchrun import run_on_two_nodes

STEPS, PROMPTS, LOGGED = 3, 8, 3


@pytest.mark.slow
@pytest.mark.parametrize("reward", ["here", "there"])
def test_each_image_goes_to_the_node_of_the_trainer_once(reward: str, counting: Path, tmp_path: Path) -> None:
    """Actor and reference, two replicas of each, get the images of the rollout on the other node.

    There the reward also gets the images of evaluations, of the prompts with records alone.
    """
    beside = {"here": "'actor, reference': 'node:0', 'rollout, reward': 'node:1'"}
    beside["there"] = "'actor, reference, reward': 'node:0', rollout: 'node:1'"
    program = [
        *("launch/train.py", f"--config={GRPO}", *grpo_overrides(counting), f"output_dir={tmp_path}"),
        f"placement={{{beside[reward]}}}",
        f"evaluation.logged_prompts={LOGGED}",
        f"batch={{prompts_per_step: {PROMPTS}, samples_per_prompt: 4, mini_batches: 1}}",
        *(f"steps={STEPS}", "data.eval.max_rows=20"),
    ]
    for status, *said in run_on_two_nodes(program, num_ranks=(2, 2), timeout_s=300):
        assert status == 0, said
    records = read_records(tmp_path)
    assert max(column(records, "train/fresh_logprob_abs_diff")) <= 1e-5
    of_evaluations = LOGGED if reward == "there" else 0  # the second time the node has them
    assert sum(column(records, "images/bytes_sent")) == (STEPS * PROMPTS + of_evaluations) * IMAGE_BYTES
    logged = [sample for file in (tmp_path / "evaluation_samples").iterdir() for sample in read_lines(file)]
    assert len(logged) == 2 * LOGGED and all(len(sample["images"]) == 1 for sample in logged)
