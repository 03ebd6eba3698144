"""The example of docs/python.md, on real ranks: a config made in Python, with functions and classes in it."""

import json
import sys
from pathlib import Path

import pytest

from tests.support.jobs import run

EXAMPLE = "examples/own_functions.py"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", EXAMPLE]


def test_the_example_trains_by_its_own_environment_and_reward(
    tmp_path: Path, warmed_up: Path, data_overrides: list[str]
) -> None:
    settings = ["steps=1", "data.eval=null", "data.train.max_rows=1024", "checkpoint.save_hf=false"]
    settings += ["batch={prompts_per_step: 4, samples_per_prompt: 4, mini_batches: 1}"]
    settings += [*data_overrides[:1], f"model.path={warmed_up}", f"output_dir={tmp_path}"]
    done = run([*TORCHRUN, *settings], 200)
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-8000:]}"
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    steps = [record for record in records if "train/loss" in record]
    assert len(steps) == 1
    for step in steps:
        assert 1 <= step["env/turns_mean"] <= 2
        assert 0 < step["rollout/reward_digits"] <= 1
        expected = step["rollout/reward_environment"] + 0.1 * step["rollout/reward_digits"]
        assert abs(step["rollout/reward_mean"] - expected) < 1e-5


def test_what_the_config_is_refused_for_is_said_once_for_all_ranks(tmp_path: Path) -> None:
    done = run([*TORCHRUN, "stepps=2", f"output_dir={tmp_path}"], 100)
    assert done.returncode != 0
    assert done.stderr.count("rltrain: override 'stepps=2': stepps: unknown key") == 1, done.stderr
    assert "rltrain/cli/python_interface.py" not in done.stderr, "no traceback"


ON_ONE_RANK = """\
import sys
from rltrain import Config, run

if __name__ == "__main__":
    one = {"placement": {"actor, reference, rollout, reward": 0}, "actor.parallel.tp": 1}
    run(Config.from_file("configs/quickstart.yaml", one, *sys.argv[1:]))
    print("the program goes on")
"""


@pytest.mark.slow
def test_without_torchrun_a_script_trains_on_one_rank(
    tmp_path: Path, warmed_up: Path, data_overrides: list[str]
) -> None:
    (tmp_path / "script.py").write_text(ON_ONE_RANK)
    settings = ["steps=1", "data.eval=null", "data.train.max_rows=64", "checkpoint.save_hf=false"]
    settings += ["batch={prompts_per_step: 2, samples_per_prompt: 2, mini_batches: 1}", *data_overrides[:1]]
    settings += [f"model.path={warmed_up}", f"output_dir={tmp_path}/run"]
    done = run([sys.executable, str(tmp_path / "script.py"), *settings], 200)
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-8000:]}"
    assert done.stdout.splitlines()[-1] == "the program goes on"
    (record,) = (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    assert "train/loss" in record and "perf/checkpoint_s" not in record, "nothing was saved, so nothing is told of it"
