"""A job that broadcasts its weights over NCCL to a server of vLLM on this machine. Uses two GPUs if there are two."""

import json
import os
from pathlib import Path

import pytest
import torch

from tests.gpu.jobs import broadcasts
from tests.support.jobs import column, read_records, try_to_train
from tests.vllm.servers import TOKEN, VLLMServer, call, write_models

PYTHON = "RLTRAIN_VLLM_PYTHON"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not os.environ.get(PYTHON), reason=f"needs vLLM for GPUs: {PYTHON}"),
]
ARGUMENTS = (
    "--dtype",
    "bfloat16",
    "--gpu-memory-utilization",
    "0.2",
    "--weight-transfer-config",
    '{"backend": "nccl"}',
)
TOLERANCE = 0.1
"""Allowed difference of log-probs in bfloat16 between the server and the actor."""


def test_the_server_draws_by_the_weights_of_every_step(
    start: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    [model, _] = write_models(tmp_path / "models", "qwen3")
    server = VLLMServer(os.environ[PYTHON], model, tmp_path / "server.log", *ARGUMENTS)
    with monkeypatch.context() as of_server:
        of_server.setenv("CUDA_VISIBLE_DEVICES", str(torch.cuda.device_count() - 1))
        if torch.cuda.device_count() == 1:  # NCCL lets ranks of two hosts have what looks like one device
            of_server.setenv("NCCL_HOSTID", "server")
        server.start()
    try:
        server.ensure()
        job, output = broadcasts(model, server.url), tmp_path / "job"
        overrides = [*job.arguments(start), f"output_dir={output}"]
        environment = {"CUDA_VISIBLE_DEVICES": "0", "ENGINES_TOKEN": TOKEN}
        done = try_to_train(job.path(), *overrides, num_ranks=1, timeout_s=300, environment=environment)
        log = (tmp_path / "server.log").read_text()
        assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-6000:]}\n{log[-6000:]}"
        records = read_records(output)
        assert len(records) == 3 and min(column(records, "train/grad_norm")) > 0
        assert max(column(records, "train/train_rollout_logprob_abs_diff_max")) < TOLERANCE
        assert json.loads(call(server, "/weight_info")[1])["weight_version"].endswith(".2")
    finally:
        server.kill()
