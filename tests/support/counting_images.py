"""Jobs of the shipped example with images: a tiny model counts red squares (tools/make_counting.py)."""

import sys
from pathlib import Path

from tests.support.jobs import REPOSITORY, succeed, train

SFT, GRPO = REPOSITORY / "configs/counting_sft.yaml", REPOSITORY / "configs/counting.yaml"
NUM_EVAL = 100
IMAGE_TOKENS, IMAGE_BYTES = 16, 56 * 56 * 3


def make_counting(folder: Path) -> Path:
    """Makes the model and the rows in start/, and learns from demonstrations in sft/. Returns the folder."""
    succeed([sys.executable, "tools/make_counting.py", "--output", str(folder / "start")], 120)
    train(SFT, *sft_overrides(folder), f"output_dir={folder / 'sft'}", num_ranks=1)
    return folder


def sft_overrides(folder: Path) -> list[str]:
    start = folder / "start"
    rows = [f"data.train.path={start}/warm_up.jsonl", f"data.eval.path={start}/eval.jsonl"]
    return [f"model.path={start}/model", *rows]


def grpo_overrides(folder: Path) -> list[str]:
    """Returns the overrides of a job that begins after the warm-up."""
    start = folder / "start"
    rows = [f"data.{name}.path={start}/{name}.jsonl" for name in ("train", "eval")]
    return [f"model.path={folder}/sft/hf", *rows]
