"""Compares the dry run's predicted step times with measured ones, after calibration on one run of this machine.

    python tools/benchmarks/foretold.py [--steps 8] [--rounds 3] [--ahead] [--runs FOLDER]

All runs are whole jobs of two ranks on CPUs, with one core each. One config is used to calibrate every task's factor.
The others differ in batch, lengths, placement or order. All configs run in turn, several times, and medians over the
steps of all rounds count. So other load on the machine affects all configs alike. Predictions use the measured lengths
of responses. Prints a table, and one JSON object last.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY))

from rltrain.planning.hardware import Efficiency, Gpu  # noqa: E402
from rltrain.planning.options import Record, calibration_of, measured_workload, read_measured, values_of  # noqa: E402
from rltrain.planning.step_time import Calibration, Clock  # noqa: E402

NUM_RANKS = 2
CPU = Gpu(
    memory_gb=4,
    tflops={"float32": 0.0425},
    memory_gb_per_s=10,
    node_gb_per_s=1,
    network_gb_per_s=1,
    host_gb_per_s=10,
    host_memory_gb=4,
    efficiency=Efficiency(
        matmul=0.5,
        moved=0,
        launches_ahead=False,
        layer_s=0.8e-3,
        micro_batch_s=2.5e-3,
        update_s=2e-3,
        decode_layer_s=3e-4,
        decode_step_s=4.5e-4,
        collective_s=9e-4,
        crowding=1.15,
        task_s=3e-3,
        reward_s=1e-5,
    ),
)
"""One core of an AMD EPYC, from processor times of the model outside of any job.

The times of a decode step are those per response and those of a step without responses. The times of a micro-batch and
an optimizer step are those without tokens. Gloo's time is that of one number. `crowding` is the slowdown by another
rank on the second core. Calibration corrects the rest.
"""
ON_ITS_CORE = 'exec taskset -c "$LOCAL_RANK" "$0" -u "$@"'
AHEAD = "echo -20 > /proc/self/autogroup; "
"""Gives a session priority over other processes. Each rank has its own session."""
COMMON = [
    "placement={'actor, reference': 0, 'rollout, reward': 1}",
    "actor.parallel.tp=1",
    "evaluation.interval=0",
    "data.eval=null",
    "checkpoint.save_hf=false",
    "checkpoint.save_every_s=0",
    "logging.progress=false",
    "batch={prompts_per_step: 32, samples_per_prompt: 8, mini_batches: 2}",
]
CALIBRATION = "calibration"
RUNS = {
    "twice the samples": ["batch={prompts_per_step: 32, samples_per_prompt: 16, mini_batches: 2}"],
    "longer responses": ["rollout.sampling.max_response_tokens=96", "rollout.max_context_tokens=112"],
    "smaller micro-batches": ["actor.micro_batch_tokens=1024", "reference.micro_batch_tokens=1024"],
    "everything on both ranks": ["placement={'actor, reference, rollout, reward': all}"],
    "generation one step ahead": ["schedule={mode: asynchronous, max_staleness: 1}"],
}


def run_job(start: Path, output: Path, overrides: list[str], *, ahead: bool) -> None:
    """Runs a job. Raises RuntimeError with its output if it fails."""
    paths = [f"model.path={start}/model", f"data.train.path={start}/train.jsonl", f"output_dir={output}"]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={NUM_RANKS}"]
    command += ["--no-python", "bash", "-c", AHEAD * ahead + ON_ITS_CORE, sys.executable, "launch/train.py"]
    command += ["--config", "configs/quickstart.yaml", *COMMON, *paths, *overrides]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")


def compare(outputs: Sequence[Path], calibration: Calibration) -> dict[str, float]:
    """Returns medians of measured and predicted seconds, for a step and for its tasks."""
    job, records = read_measured(outputs)
    foretold = Clock(job, CPU, measured_workload(job, records), calibration).step()
    measured = step_s(records)
    result = {"measured_s": measured, "foretold_s": foretold.step_s, "ratio": foretold.step_s / measured}
    for (task, _), seconds in foretold.tasks.items():
        if took := values_of(records, f"perf/{task}_s"):
            result |= {f"{task}_s": median(took), f"{task}_foretold_s": seconds}
    return result


def step_s(records: list[Record]) -> float:
    return median(values_of(records, "perf/step_time_s"))


def make_runs(folder: Path, steps: int, rounds: int, *, ahead: bool) -> None:
    """Makes one run of every config in each round, except for existing ones."""
    start = folder / "start"
    if not start.exists():
        make = [sys.executable, "tools/make_quickstart.py", "--output", str(start), "--seed", "0"]
        subprocess.run(make, cwd=REPOSITORY, check=True, capture_output=True)
    for number in range(rounds):
        for name, overrides in {CALIBRATION: [], **RUNS}.items():
            output = run_of(folder, name, number)
            if not output.exists():
                run_job(start, output, [f"steps={steps}", *overrides], ahead=ahead)


def run_of(folder: Path, name: str, number: int) -> Path:
    return folder / f"{name.replace(' ', '_')}_{number}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=8, help="steps of every run; the first two do not count")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ahead", action="store_true", help="give ranks priority over other processes")
    parser.add_argument("--runs", type=Path, help="folder for the runs; existing ones are reused")
    arguments = parser.parse_args()
    if arguments.ahead:
        os.setpriority(os.PRIO_PROCESS, 0, -20)
        Path("/proc/self/autogroup").write_text("-20")
    with tempfile.TemporaryDirectory() as temporary:
        folder = (arguments.runs or Path(temporary)).resolve()
        make_runs(folder, arguments.steps, arguments.rounds, ahead=arguments.ahead)
        runs = {name: [run_of(folder, name, i) for i in range(arguments.rounds)] for name in (CALIBRATION, *RUNS)}
        calibration = calibration_of(runs[CALIBRATION], CPU)
        results = {name: compare(outputs, calibration) for name, outputs in runs.items()}
    for name, result in results.items():
        print(f"{name:28}" + "  ".join(f"{key} {value:.3f}" for key, value in result.items()))
    print(json.dumps({"benchmark": "foretold", "steps": arguments.steps, "rounds": arguments.rounds, "runs": results}))


if __name__ == "__main__":
    main()
