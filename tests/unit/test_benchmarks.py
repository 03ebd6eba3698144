"""Tests of the benchmarks, and of the agreement of their page with their results."""

import importlib
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from rltrain.runtime.job_store import GATHERED_FROM
from tests.forked import popen as forked
from tests.support.run_folders import RankLog
from tools.benchmarks import orders, rollout

REPOSITORY = Path(__file__).resolve().parents[2]
BENCHMARKS = REPOSITORY / "tools/benchmarks"


def run(command: list[str], **variables: str) -> subprocess.CompletedProcess[str]:
    return forked.run(command, timeout_s=240, environment=variables)


def result_of(script: str, *options: str) -> dict[str, Any]:
    done = run([sys.executable, str(BENCHMARKS / script), *options])
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "sent", "local"),
    [
        # Each rank holds half of about 1 million float32 values and needs all of them.
        (["--ranks", "2", "--src", "tp2", "--dst", "tp1"], 2.1e6, 2.1e6),
        # The first rank trains and the second generates. All elements cross, at two bytes each.
        (["--ranks", "2", "--src", "tp1", "--src-ranks", "0", "--dst-ranks", "1", "--dtype", "bfloat16"], 2.1e6, 0),
    ],
)
def test_weight_sync_times_all_rivals(options: list[str], sent: float, local: float) -> None:
    small = ["--params", "1m", "--bucket-mb", "0.25", "--iterations", "2", "--warm-up", "0"]
    found = result_of("weight_sync.py", *options, *small)
    colocated = local > 0
    rivals = {"ours", "ours_wire", "raw"} | ({"refit"} if colocated else set())
    assert ("refit" in found["left_out"]) is not colocated
    for memory, times in found["milliseconds"].items():
        assert times.keys() == rivals, memory
        assert all(0 < numbers["min"] <= numbers["median"] for numbers in times.values())
        ratios = found["ratios"][memory]
        assert ratios["ours_over_raw"] == pytest.approx(times["ours"]["median"] / times["raw"]["median"], abs=2e-3)
        assert ("refit_over_ours" in ratios) is colocated
    assert found["bytes_per_rank"]["sent"] == pytest.approx(sent, rel=0.02)
    assert found["bytes_per_rank"]["local"] == pytest.approx(local, rel=0.02)
    assert found["machine"]["torch"] == torch.__version__


def test_weight_sync_of_experts() -> None:
    """Sends whole experts from two replicas to a tensor-parallel engine. Every rival must write the same weights."""
    small = ["--params", "1m", "--iterations", "2", "--warm-up", "0", "--rivals", "ours,refit"]
    found = result_of("weight_sync.py", "--ranks", "2", "--src", "ep2", "--dst", "tp2", "--experts", "4", *small)
    assert all(times.keys() == {"ours", "refit"} for times in found["milliseconds"].values())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--ranks", "3", "--src", "tp2"], "tp2 does not fit on 3 ranks"),
        (["--src", "xp2"], "'xp2' is not a layout"),
        (["--dst", "tp1.pp2"], "engines are split only by tensor parallelism"),
        (["--ranks", "4", "--src-ranks", "0-1", "--dst-ranks", "2"], "ranks [3] are neither"),
        (["--rivals", "ours,theirs"], "--rivals has theirs"),
        (["--device", "cuda"], "needs a GPU"),
    ],
)
def test_weight_sync_refuses_what_it_cannot_run(
    options: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    monkeypatch.setattr(sys, "argv", ["weight_sync.py", *options])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        importlib.import_module("weight_sync").parse_arguments()
    assert message in capsys.readouterr().err


def test_a_wrong_result_ends_the_benchmark(tmp_path: Path) -> None:
    """A rival is not timed if it leaves one element unchanged."""
    program = f"""
import sys
sys.path.insert(0, {str(BENCHMARKS)!r})
import weight_sync
from weight_sync import Ours

def forgetful(self):
    complete(self)
    next(iter(self.destination.values())).view(-1)[5] = 7

complete = Ours.__call__
Ours.__call__ = forgetful
sys.argv = ["weight_sync.py", "--ranks", "1", "--params", "1m", "--rivals", "ours"]
weight_sync.main()
"""
    script = tmp_path / "forgetful.py"
    script.write_text(program)
    done = run([sys.executable, str(script)], RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    assert done.returncode == 1
    assert "ours wrote 1 tensors wrong, the first is model.embed_tokens.weight" in done.stdout
    assert "does not move the weights correctly" in done.stderr
    assert '"milliseconds"' not in done.stdout


@pytest.mark.slow
@pytest.mark.by_command_line  # it finds its ranks among its own child processes
def test_a_model_of_full_vocabulary_is_trained_and_checkpointed_for_its_size() -> None:
    options = ["--size", "tiny", "--vocabulary", "151936", "--cases", "colocated,checkpoint", "--steps", "5"]
    found = result_of("real_size.py", *options)
    assert found["num_parameters"] == pytest.approx(151_936 * 64, rel=0.02)
    for case in found["cases"].values():
        assert case["step_s"] > 0 and case["moves_s"] == 0
        assert all(case["peak_gb"][rank] > gb for rank, gb in case["must_gb"].items())
    assert found["cases"]["colocated"]["verify_s"] > 0
    # Master weights and two moments take four bytes each.
    assert found["cases"]["checkpoint"]["checkpoint_bytes"] == pytest.approx(12 * found["num_parameters"], rel=0.02)


def test_engines_are_compared_in_speed_and_log_probs() -> None:
    found = result_of("rollout.py", "--repeats", "1", "--cases", "64 seq", "--engines", "embedded,generate")
    [case] = found["cases"]
    assert case["embedded_tokens_per_s"] > 0 and case["generate_tokens_per_s"] > 0
    ratio = case["embedded_tokens_per_s"] / case["generate_tokens_per_s"]
    assert case["embedded_over_generate"] == pytest.approx(ratio, abs=0.02)
    assert 0 < case["embedded_logprob_difference"] < 1e-4 and "generate_logprob_difference" not in case


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--engines", "embedded,tgi"], "--engines has 'tgi'; expected some of embedded, generate, sglang, vllm"),
        (["--engines", "embedded,vllm"], "--engines has vllm, which needs --vllm-python"),
        (["--cases", "7 sequences"], "fits none of"),
        (["--device", "cuda"], "needs a GPU"),
    ],
)
def test_engines_that_cannot_be_compared_are_refused(
    options: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["rollout.py", *options])
    monkeypatch.delenv("RLTRAIN_VLLM_PYTHON", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        rollout.parse_arguments()
    assert message in capsys.readouterr().err


def test_the_probe_of_a_gpu_machine_runs_without_one() -> None:
    done = run([sys.executable, "tools/gpu_probe.py", "versions", "--device", "cpu"])
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["torch"] == torch.__version__ and found["attention_packed"] is False
    assert {name: len(times) for name, times in found["attention_new_shape_ms"].items()} == {"ours": 6, "torchs": 6}


def test_orders_take_a_sync_for_its_work_and_tell_the_wait_for_engines_apart(tmp_path: Path) -> None:
    actor, engine = (RankLog(tmp_path / "trace", rank, (role,)) for rank, role in enumerate(("actor", "rollout")))
    at = {"step": 5, "chunk": 0}
    for log, waited_s in ((actor, 0.75), (engine, 0.25)):
        log.event("B", "generate", cat="task", args=at)
        log.now += 1.0
        log.event("B", "weight_sync", cat="task", args=at)
        log.span("the others", "wait", waited_s)
        log.now += 0.125
        log.event("E", "weight_sync", cat="task")
        log.span("the last groups", "wait", 2.0)
        log.event("E", "generate", cat="task")
        log.write()
    spans = orders.task_spans(tmp_path)
    for task, own_s in (("generate", 1.0), ("weight_sync", 0.125)):
        assert {rank: span.own_s for rank, span in spans[task, 5, 0].items()} == pytest.approx({0: own_s, 1: own_s})
    assert orders.sync_waits(spans) == pytest.approx({"sync_wait_s": 0.75, "sync_wait_max_s": 0.75})


SIZES = (64, 256)
CALLS = {"meet in the store": 6, "agree": 8, "heartbeats": 4, "join in flight": 3, "save": 4}
"""The most store calls of a rank, on average. For heartbeats, calls per second."""
MOST_CONNECTIONS = 4


@pytest.fixture
def control_plane(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(BENCHMARKS)
    import control_plane

    return control_plane


def test_nothing_grows_as_ranks_squared(control_plane: ModuleType, tmp_path: Path) -> None:
    jobs = [control_plane.JobAtSize(size, tmp_path / str(size)) for size in SIZES]
    growth = SIZES[1] / SIZES[0]
    for phase, most_calls in CALLS.items():
        small, large = (control_plane.PHASES[phase](job) for job in jobs)
        assert large.store_calls <= most_calls, (phase, large)
        assert large.all_store_bytes <= 1.3 * growth * small.all_store_bytes or phase == "meet in the store", phase
    exchanged, met = ([control_plane.PHASES[phase](job) for job in jobs] for phase in ("exchange", "meet for a sync"))
    for small, large in (exchanged, met):
        assert large.message_bytes <= growth * small.message_bytes, "bytes of the busiest sender"
    for job, cost in zip(jobs, exchanged, strict=True):
        owners, replicas = job.grids["rollout"].dp, job.grids["actor"].dp
        num_groups = job.config.batch.prompts_per_step
        assert cost.messages <= num_groups // owners + 1, "one message per group or receiving replica"
        assert cost.passed_on == control_plane.RANKS_PER_NODE - 1
        assert cost.received <= 2 * num_groups // replicas and cost.least_received == 1
    assert all(control_plane.connect(job).communicators <= MOST_CONNECTIONS for job in jobs)


def test_a_first_rank_that_does_not_run_is_missed_by_few(control_plane: ModuleType, tmp_path: Path) -> None:
    """Only the lowest ranks look for the next judge. Each reads one heartbeat per such rank."""
    job = control_plane.JobAtSize(SIZES[1], tmp_path)
    for store in job.job_stores[1:]:
        store.heartbeat.publish()
    second = 0
    for watchdog in job.watchdogs:
        watchdog.observer.clock = lambda: float(second)
    judging = []
    for second in range(40):  # noqa: B007 - the clock reads it
        for rank in (1, 2, 65):
            job.job_stores[rank].heartbeat.publish()
        judging = [rank for rank in (1, 2, 65) if job.watchdogs[rank]._judges()]
    assert judging == [1]
    job.shared.take()
    job.watchdogs[-1]._judges()
    assert sum(traffic.num_operations for traffic in job.shared.take().values()) <= 4


def test_in_a_large_job_the_first_rank_of_a_node_speaks_for_all(control_plane: ModuleType, tmp_path: Path) -> None:
    assert control_plane.PHASES["heartbeats"](control_plane.JobAtSize(GATHERED_FROM, tmp_path)).store_calls < 1
