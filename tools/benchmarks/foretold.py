"""Steps that the dry run foretells after calibration on one run, beside what other runs then took, on this machine.

    python tools/benchmarks/foretold.py [--steps 8]

All runs are whole jobs of two ranks on CPUs, with a core for each. One gives every task its factor; of the others the
batch, the lengths, the placement or the order differ. It is run anew right before each of them, and by how much its own
steps then differ tells how even the machine is. Lengths of responses are those that a run had. Of steps the
fastest counts: what else the machine does makes the others longer. Prints a table, and one JSON object last.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY))

from rltrain.estimate.calibration import Record, factors_of, measured_workload, read_measured, values_of  # noqa: E402
from rltrain.estimate.hardware import Efficiency, Gpu  # noqa: E402
from rltrain.estimate.step_time import Clock, Factors  # noqa: E402

NUM_RANKS = 2
CPU = Gpu(
    memory_gb=4,
    tflops={"float32": 0.02},
    memory_gb_per_s=5,
    node_gb_per_s=1,
    network_gb_per_s=1,
    host_gb_per_s=5,
    host_memory_gb=4,
    efficiency=Efficiency(
        layer_s=3e-3, decode_layer_s=3e-4, decode_step_s=1e-3, collective_s=3e-4, task_s=5e-3, reward_s=1e-5
    ),
)
"""A rank with one core: rough, since the calibration is to mend it."""
COMMON = [
    "placement={'actor, reference': 0, 'rollout, reward': 1}",
    "actor.parallel.tp=1",
    "evaluation.interval=0",
    "data.eval=null",
    "checkpoint.save_hf=false",
    "logging.progress=false",
    "batch={prompts_per_step: 32, samples_per_prompt: 8, mini_batches: 2}",
]
RUNS = {
    "twice the samples": ["batch={prompts_per_step: 32, samples_per_prompt: 16, mini_batches: 2}"],
    "longer responses": ["rollout.sampling.max_response_tokens=96", "rollout.max_context_tokens=112"],
    "smaller micro-batches": ["actor.micro_batch_tokens=1024", "reference.micro_batch_tokens=1024"],
    "everything on both ranks": ["placement={'actor, reference, rollout, reward': all}"],
    "generation one step ahead": ["schedule={mode: asynchronous, max_staleness: 1}"],
}


def run_job(start: Path, output: Path, overrides: list[str]) -> None:
    """RuntimeError with its output where it fails."""
    paths = [f"model.path={start}/model", f"data.train.path={start}/train.jsonl", f"output_dir={output}"]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={NUM_RANKS}"]
    command += ["launch/train.py", "--config", "configs/quickstart.yaml", *COMMON, *paths, *overrides]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")


def compare(output: Path, factors: Factors) -> dict[str, float]:
    """Seconds of a step, and of its tasks: measured, and foretold by `factors`."""
    job, records = read_measured(output)
    foretold = Clock(job, CPU, measured_workload(job, records), factors).step()
    measured = step_s(records)
    result = {"measured_s": measured, "foretold_s": foretold.step_s, "ratio": foretold.step_s / measured}
    for (task, _), seconds in foretold.tasks.items():
        if took := values_of(records, f"perf/{task}_s"):
            result |= {f"{task}_s": min(took), f"{task}_foretold_s": seconds}
    return result


def step_s(records: list[Record]) -> float:
    return min(values_of(records, "perf/step_time_s"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=8)
    arguments = parser.parse_args()
    results: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        start = Path(folder, "start")
        make = [sys.executable, "tools/make_quickstart.py", "--output", str(start), "--seed", "0"]
        subprocess.run(make, cwd=REPOSITORY, check=True, capture_output=True)
        for number, (name, overrides) in enumerate(RUNS.items()):
            first, second = (Path(folder, f"{number}_{which}") for which in ("calibration", "compared"))
            for output, chosen in ((first, []), (second, overrides)):
                run_job(start, output, [f"steps={arguments.steps}", *chosen])
            results[name] = compare(second, factors_of(first, CPU, min))
            results[name]["calibration_s"] = step_s(read_measured(first)[1])
            print(f"{name:28}" + "  ".join(f"{key} {value:.3f}" for key, value in results[name].items()), flush=True)
    print(json.dumps({"benchmark": "foretold", "steps": arguments.steps, "runs": results}))


if __name__ == "__main__":
    main()
