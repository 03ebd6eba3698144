"""The example of docs/python.md on real ranks: a config made in Python, with functions and classes in it."""

import sys
from pathlib import Path

import pytest

from tests.support.jobs import SHORT, read_records, run, succeed, torchrun

EXAMPLE = "examples/own_functions.py"


def test_the_example_trains_by_its_own_environment_and_reward(tmp_path: Path, warm_start: list[str]) -> None:
    settings = ["steps=1", *SHORT, "batch={prompts_per_step: 4, samples_per_prompt: 4, mini_batches: 1}"]
    succeed([*torchrun(2), EXAMPLE, *warm_start, *settings, f"output_dir={tmp_path}"], 200)
    (step,) = [record for record in read_records(tmp_path) if "train/loss" in record]
    assert 1 <= step["env/turns_mean"] <= 2
    assert 0 < step["rollout/reward_digits"] <= 1
    expected = step["rollout/reward_environment"] + 0.1 * step["rollout/reward_digits"]
    assert abs(step["rollout/reward_mean"] - expected) < 1e-5


def test_what_the_config_is_refused_for_is_said_once_for_all_ranks(tmp_path: Path) -> None:
    done = run([*torchrun(2), EXAMPLE, "stepps=2", f"output_dir={tmp_path}"], 100)
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
def test_without_torchrun_a_script_trains_on_one_rank(tmp_path: Path, warm_start: list[str]) -> None:
    (tmp_path / "script.py").write_text(ON_ONE_RANK)
    settings = ["steps=1", *SHORT, "batch={prompts_per_step: 2, samples_per_prompt: 2, mini_batches: 1}"]
    script = [sys.executable, str(tmp_path / "script.py")]
    done = succeed([*script, *warm_start, *settings, f"output_dir={tmp_path}/run"], 200)
    assert done.stdout.splitlines()[-1] == "the program goes on"
    (record,) = (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    assert "train/loss" in record and "perf/checkpoint_s" not in record, "nothing was saved, so nothing is reported"
