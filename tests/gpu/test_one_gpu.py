"""Jobs of one rank, on the GPU with NCCL and on the CPU with gloo: the same model, prompts and first numbers."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.gpu.jobs import JOBS
from tests.support.jobs import read_records, try_to_train

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", JOBS)
def test_three_steps_agree_with_the_cpu(name: str, start: Path, tmp_path: Path) -> None:
    job = JOBS[name]

    def records(device: str) -> list[dict]:
        hidden = {"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {}
        overrides = [*job.arguments(start), f"output_dir={tmp_path / device}"]
        done = try_to_train(job.path(), *overrides, num_ranks=1, timeout_s=90, environment=hidden)
        assert done.returncode == 0, f"{device}: {done.stdout[-4000:]}\n{done.stderr[-8000:]}"
        return read_records(tmp_path / device)[:3]

    with ThreadPoolExecutor() as pool:
        on_gpu, on_cpu = pool.map(records, ("cuda", "cpu"))
    for metric in ("train/loss", "train/grad_norm"):
        expected = [record[metric] for record in on_cpu]
        found = [record[metric] for record in on_gpu]
        assert found == pytest.approx(expected, rel=job.tolerance, abs=1e-6), metric
