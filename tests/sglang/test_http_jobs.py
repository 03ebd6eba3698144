"""Jobs with separately started real SGLang servers as engines."""

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from rltrain.rollout.servers.protocols import ADAPTER
from rltrain.rollout.servers.sglang_process import AdapterSpec, Server
from tests.forked.popen import Popen, run
from tests.sglang.servers import FROM_DISK, call, running
from tests.support.jobs import column, read_records, start_on_servers, wait_until

LIMIT_S = 900.0
STEPS = 6
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def start_job(urls: Path, output: Path, model: Path, token: str, *overrides: str) -> Popen:
    placed = ("placement={'actor, reference, rollout, reward': 0}", "actor.parallel.tp=1")
    sizes = ("batch={prompts_per_step: 8, samples_per_prompt: 8, mini_batches: 1}", f"steps={STEPS}", "data.eval=null")
    own = (f"model.path={model}", f"output_dir={output}", *overrides)
    return start_on_servers(urls, token, *placed, *sizes, *own, num_ranks=1)


@pytest.mark.slow
def test_servers_started_apart_roll_out_and_may_come_and_die(
    start_server: Callable[..., Server],
    warmed_up: Path,
    data_overrides: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two servers share one token, for each way of sending weights. The second joins while the job runs, gets weights,
    and is killed.

    All float32 weights change. So a delta has all of them, and the next updates are whole folders.
    """
    monkeypatch.setattr("secrets.token_urlsafe", lambda length: "a-token-of-both")
    first, second = (start_server(warmed_up, max_context_tokens=120, args=FROM_DISK) for _ in range(2))
    for weights in ("delta", "group"):
        way = "weight_sync.delta={}" if weights == "delta" else "rollout.http.weights=group"
        overrides = ("data.train.max_rows=1024", *data_overrides[:1], way)
        records = records_of_job(first, running(second), warmed_up, tmp_path / weights, *overrides)
        assert [record["step"] for record in records] == [*range(STEPS)]
        assert max(column(records, "train/train_rollout_logprob_abs_diff_max")) < 1e-3
        assert max(column(records, "train/staleness_max")) == 0
        if weights == "delta":
            assert column(records, "rollout/weight_files_are_full") == [1, 0, 1, 1, 1, 1]
        assert weight_version(first).endswith(f".{STEPS - 1}")
        assert not (tmp_path / weights / "http_weights").exists(), "loaded weight files are removed"


def test_adapters_come_in_files_after_the_base(
    start_server: Callable[..., Server],
    quickstart_files: Path,
    data_overrides: list[str],
    tmp_path: Path,
) -> None:
    """The server was started with another model of this architecture. Its log-probs equal the trainer's while the
    adapters learn."""
    model = tmp_path / "other"
    write_other(quickstart_files / "model", model)
    server = start_server(model, max_context_tokens=120, args=FROM_DISK, adapter=AdapterSpec(8, 16.0, TARGETS))
    urls, output = tmp_path / "urls", tmp_path / "job"
    urls.write_text(f"{server.url}\n")
    adapting = ("model.lora={rank: 8, alpha: 16}", "weight_sync={adapters: apart, verify: true}")
    learning = ("loss.entropy_coef=1.0", "actor.optimizer={lr: 3.0e-3, warmup_steps: 0}")
    overrides = (*adapting, *learning, "rollout.http.staging_mb=0.02", "data.train.max_rows=1024", data_overrides[0])
    with start_job(urls, output, quickstart_files / "model", server.token, *overrides) as job:
        stdout, stderr = job.communicate(timeout=LIMIT_S)
        assert job.returncode == 0, f"{stdout[-3000:]}\n{stderr[-6000:]}"
    records = read_records(output)
    differences = column(records, "train/train_rollout_logprob_abs_diff_max")
    assert len(differences) == STEPS and max(differences) <= 1e-4
    assert column(records, "train/reference_kl")[-1] > 1e-3, "the adapters add more than rounding"
    with_base, *alone = column(records, "rollout/weight_files_bytes")
    assert alone and len({*alone}) == 1 and 0 < alone[0] < with_base / 2
    served = [model["id"] for model in call(server, "/v1/models")["data"]]
    assert [name for name in served if name.startswith(ADAPTER)] == [ADAPTER + weight_version(server)]


def write_other(model: Path, other: Path) -> None:
    """Writes a checkpoint with other weights than `model`."""
    shutil.copytree(model, other)
    tensors = load_file(other / "model.safetensors")
    doubled = {name: 2 * tensor for name, tensor in tensors.items()}
    save_file(doubled, other / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.slow
def test_the_benchmark_of_engines_asks_a_server(real_sglang_python: str) -> None:
    command = [sys.executable, "tools/benchmarks/rollout.py", "--repeats", "1", "--cases", "64 seq"]
    engines = ["--engines", "embedded,sglang", "--sglang-python", real_sglang_python]
    done = run([*command, *engines], timeout_s=LIMIT_S)
    assert done.returncode == 0, done.stderr[-4000:]
    [case] = json.loads(done.stdout.splitlines()[-1])["cases"]
    assert case["sglang_tokens_per_s"] > 0
    assert case["embedded_logprob_difference"] < 1e-4 and case["sglang_logprob_difference"] < 1e-4


def records_of_job(first: Server, second: Server, model: Path, output: Path, *overrides: str) -> list[dict[str, Any]]:
    urls, old = output.with_suffix(".urls"), weight_version(second)
    urls.write_text(f"{first.url}\n")
    in_parts = ("rollout.http.staging_mb=0.1", "rollout.http.reread_s=0.1")
    with start_job(urls, output, model, first.token, *overrides, *in_parts) as job:
        wait_until(lambda: (output / "metrics.jsonl").exists(), job, LIMIT_S)
        urls.write_text(f"{first.url}\n{second.url}\n")
        wait_until(lambda: weight_version(second) != old, job, LIMIT_S)
        second.kill()
        stdout, stderr = job.communicate(timeout=LIMIT_S)
        assert job.returncode == 0, f"{stdout[-3000:]}\n{stderr[-6000:]}"
    return read_records(output)


def weight_version(server: Server) -> str:
    return str(call(server, "/model_info")["weight_version"])
