"""A whole job with images trains a model sharded over two ranks."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.support.counting_images import GRPO, grpo_overrides
from tests.support.jobs import column, read_records, train

pytestmark = pytest.mark.slow
STEPS = 2


@pytest.fixture(scope="module")
def finished(counting: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the folder of the job."""
    folder = tmp_path_factory.mktemp("sharded")
    placement = "placement={'actor, rollout, reward': all}"
    overrides = [*grpo_overrides(counting), "actor.backend=fsdp", placement]
    overrides += [f"steps={STEPS}", "data.eval.max_rows=20", f"output_dir={folder}"]
    overrides += ["batch={prompts_per_step: 8, samples_per_prompt: 4, mini_batches: 2}"]
    train(GRPO, *overrides, num_ranks=2)
    return folder


def test_engine_and_actor_agree_on_images_after_every_sync(finished: Path) -> None:
    differences = column(read_records(finished), "train/train_rollout_logprob_abs_diff_max")
    assert len(differences) == STEPS and max(differences) <= 1e-4


def test_the_exported_tower_is_the_trained_one(counting: Path, finished: Path) -> None:
    before, after = (tensors_of(folder / "hf") for folder in (counting / "sft", finished))
    assert before.keys() == after.keys()
    towers = {name for name in before if "visual." in name}
    changed = {name for name, weight in before.items() if not torch.equal(weight, after[name])}
    assert len(towers & changed) > len(towers) / 2


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}
