"""Jobs whose engines are real SGLang servers that were started apart from them."""

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from rltrain.rollout.sglang.process import Server
from tests.end_to_end.jobs import column, read_records
from tests.forked.popen import FORKED_ENVIRONMENT, REPOSITORY, Popen
from tests.sglang.servers import FROM_DISK, call, running

LIMIT_S = 900.0
STEPS = 4


def start_job(urls: Path, output: Path, model: Path, token: str, *overrides: str) -> Popen:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1"]
    placed = ("placement={'actor, reference, rollout, reward': 0}", "actor.parallel.tp=1")
    sizes = ("batch={prompts_per_step: 8, samples_per_prompt: 8, mini_batches: 1}", f"steps={STEPS}", "data.eval=null")
    engines = ("rollout.engine=http", f"rollout.urls={urls}", "rollout.http.token_env=ENGINES_TOKEN")
    return Popen(
        [
            *(*torchrun, "launch/train.py", "--config", "configs/quickstart.yaml", f"model.path={model}"),
            *(*placed, *sizes, *engines, "checkpoint.save_hf=false", f"output_dir={output}", *overrides),
        ],
        cwd=REPOSITORY,
        env={**FORKED_ENVIRONMENT, "PATH": "/bin", "ENGINES_TOKEN": token},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.slow
def test_servers_started_apart_roll_out_and_may_die(
    start_server: Callable[..., Server],
    warmed_up: Path,
    data_overrides: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two with one token; one is killed in the second step, and started anew at another port."""
    monkeypatch.setattr("secrets.token_urlsafe", lambda length: "a-token-of-both")
    servers = [start_server(warmed_up, max_context_tokens=120, args=FROM_DISK) for _ in range(2)]
    urls, output = tmp_path / "urls", tmp_path / "run"
    urls.write_text("".join(f"{server.url}\n" for server in servers))
    chosen = ("data.train.max_rows=1024", *data_overrides[:1])
    with start_job(urls, output, warmed_up, servers[0].token, *chosen) as job:
        deadline = time.monotonic() + LIMIT_S
        while not (output / "metrics.jsonl").exists():
            assert job.poll() is None and time.monotonic() < deadline
            time.sleep(0.1)
        servers[1].kill()
        running(servers[1])
        urls.write_text("".join(f"{server.url}\n" for server in servers))
        stdout, stderr = job.communicate(timeout=LIMIT_S)
        assert job.returncode == 0, f"{stdout[-3000:]}\n{stderr[-6000:]}"
    records = read_records(output)
    assert [record["step"] for record in records] == [*range(STEPS)]
    assert max(column(records, "train/train_rollout_logprob_abs_diff_max")) < 1e-3
    assert max(column(records, "train/staleness_max")) == 0
    assert str(call(servers[0], "/model_info")["weight_version"]).endswith(f".{STEPS - 1}")
