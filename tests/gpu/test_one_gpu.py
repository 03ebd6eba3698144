"""One job of one rank, on the GPU with NCCL and on the CPU with gloo: the same model, prompts and first numbers."""

import sys
from pathlib import Path

import pytest

from tests.end_to_end.jobs import REPOSITORY, run, train
from tests.tolerances import EPS_OF_ACTOR

pytestmark = pytest.mark.gpu


def records(device: str, start: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[dict]:
    if device == "cpu":
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    return train(
        REPOSITORY / "configs/quickstart_sft.yaml",
        f"model.path={start}/model",
        f"data.train.path={start}/train.jsonl",
        f"data.eval.path={start}/eval.jsonl",
        f"output_dir={folder / device}",
        "placement={actor,rollout,reward: 0}",
        "actor.parallel.tp=1",
        "steps=3",
        EPS_OF_ACTOR,
        num_ranks=1,
    )


def test_three_steps_agree_with_the_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    start = tmp_path / "start"
    done = run([sys.executable, "tools/make_quickstart.py", "--output", str(start)], 120)
    assert done.returncode == 0, done.stderr
    on_gpu = records("cuda", start, tmp_path, monkeypatch)
    on_cpu = records("cpu", start, tmp_path, monkeypatch)
    for name in ("train/loss", "train/grad_norm"):
        expected = [record[name] for record in on_cpu[:3]]
        assert [record[name] for record in on_gpu[:3]] == pytest.approx(expected, rel=1e-3), name
