"""A job over two hosts, namespaces with addresses of their own: as on one host, until its cable is cut."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.jobs import REPOSITORY, read_records, train
from tests.hosts import Hosts, obstacle

pytestmark = pytest.mark.slow

NUM_STEPS = 3
NO_PROGRESS_S = 30
CLEAN_UP_S = 40
"""For messages, stacks, and torchrun."""


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    if reason := obstacle():
        pytest.skip(reason)
    with Hosts(tmp_path, 2) as hosts:
        yield hosts


def start(hosts: Hosts, number: int, arguments: list[str], log: Path) -> subprocess.Popen[bytes]:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", f"--node-rank={number - 1}"]
    torchrun += ["--nproc-per-node=1", "--master-addr=n1", "--master-port=23456", "launch/train.py"]
    path = os.pathsep.join(filter(None, (str(REPOSITORY), os.environ.get("PYTHONPATH"))))
    with log.open("wb") as output:
        return subprocess.Popen(
            [*hosts.on(number), *torchrun, *arguments],
            cwd=REPOSITORY,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )


def numbers(record: dict[str, Any]) -> dict[str, Any]:
    """Those that say neither how long something took nor how much memory."""
    measured = ("time_s", "perf/", "memory/")
    return {name: value for name, value in record.items() if not name.startswith(measured)}


def test_two_hosts_compute_what_one_does_and_end_when_they_are_cut_apart(
    hosts: Hosts, warmed_up: Path, data_overrides: list[str], tmp_path: Path
) -> None:
    overrides = [
        f"model.path={warmed_up}",
        *data_overrides,
        "placement={'actor, reference': 0, 'rollout, reward': 1}",
        "actor.parallel.tp=1",
        "actor.optimizer.decay=constant",
        "batch={prompts_per_step: 2, samples_per_prompt: 2, mini_batches: 1}",
        "data.train.max_rows=512",
        "data.eval=null",
        "checkpoint={save_interval: 0, save_hf: false}",
        f"timeouts.no_progress_s={NO_PROGRESS_S}",
    ]
    config, metrics, logs = (
        REPOSITORY / "configs/quickstart.yaml",
        tmp_path / "two/metrics.jsonl",
        [tmp_path / "a", tmp_path / "b"],
    )
    arguments = [f"--config={config}", *overrides, f"output_dir={tmp_path}/two", "steps=100000"]
    agents = [start(hosts, number, arguments, log) for number, log in zip(hosts.numbers, logs, strict=True)]
    try:
        deadline = time.monotonic() + 200
        while not (metrics.exists() and metrics.read_text().count("\n") > NUM_STEPS):
            assert time.monotonic() < deadline and agents[0].poll() is None, "".join(log.read_text() for log in logs)
            time.sleep(0.2)
        hosts.cut(2)
        statuses = [agent.wait(NO_PROGRESS_S + CLEAN_UP_S) for agent in agents]
    finally:
        for agent in agents:
            agent.kill()
    assert 0 not in statuses
    first, second = (log.read_text() for log in logs)
    assert first.count("\nrltrain: ") == 1 and "rank 1 on n2 was last known to be at " in first, first
    assert second.count("\nrltrain: ") == 1 and "rank 1 on n2 " in second, second
    assert "the job's store on n1 has not answered" in second
    alone = train(config, *overrides, f"output_dir={tmp_path}/one", f"steps={NUM_STEPS}", num_ranks=2)
    of_both = read_records(tmp_path / "two")[:NUM_STEPS]
    assert [numbers(record) for record in of_both] == [numbers(record) for record in alone[:NUM_STEPS]]
