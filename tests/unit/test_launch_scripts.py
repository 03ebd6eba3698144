"""The shell scripts, run for real with stand-ins for what they call."""

import re
import socket
import sys
from pathlib import Path

import pytest
import yaml

from tests.unit.script_stand_ins import REPOSITORY, repository_with_venv, run, stand_ins, started

# Slurm numbers a step's nodes by their place in the node list; here they start in another order.
SRUN = """#!/usr/bin/env bash
echo "srun $*" >> "$FAKE_SRUN_LOG"
while [[ $1 == --* ]]; do shift; done
for id in 2 0 1; do
  SLURM_NODEID=$id SLURM_GPUS_ON_NODE=8 FAKE_HOST=$(sed -n "$((id + 1))p" "$FAKE_HOSTS") "$@"
done
"""
SCONTROL = """#!/usr/bin/env bash
case "$*" in
  "show hostnames node[07,03,11]") cat "$FAKE_HOSTS" ;;
  "show job "*) echo "JobId=1 PreemptTime=${FAKE_PREEMPTED:-None} Requeue=1" ;;
  requeue*) echo "$*" >> "$FAKE_SRUN_LOG" ;;
esac
"""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "hosts").write_text("node07\nnode03\nnode11\n")
    added = {"FAKE_HOSTS": str(tmp_path / "hosts"), "FAKE_SRUN_LOG": str(tmp_path / "srun_log")}
    return stand_ins(tmp_path, srun=SRUN, scontrol=SCONTROL) | added


def after(arguments: list[str], option: str) -> str:
    return arguments[arguments.index(option) + 1]


def test_slurm_node_order_is_rank_order(environment: dict[str, str]) -> None:
    environment |= {"SLURM_JOB_NODELIST": "node[07,03,11]", "SLURM_JOB_ID": "123456", "SLURM_NNODES": "3"}
    user = ["--config", "configs/x y.yaml", "reward.function=a b", "steps=3"]
    done = run(environment, "launch/slurm/train.sbatch", *user)
    assert done.returncode == 0, done.stderr
    agents = started(environment)
    assert {agent["FAKE_HOST"]: after(agent["arguments"], "--node-rank") for agent in agents} == {
        "node07": "0",
        "node03": "1",
        "node11": "2",
    }
    ports = set()
    for agent in agents:
        arguments = agent["arguments"]
        assert arguments[:2] == ["-m", "torch.distributed.run"]
        assert (after(arguments, "--nnodes"), after(arguments, "--nproc-per-node")) == ("3", "8")
        assert after(arguments, "--master-addr") == "node07"
        assert not any(argument.startswith(("--rdzv", "--standalone")) for argument in arguments)
        assert arguments[-5:] == ["launch/train.py", *user]
        ports.add(int(after(arguments, "--master-port")))
    assert len(ports) == 1 and 1024 < ports.pop() < 32768
    assert "--ntasks-per-node=1" in Path(environment["FAKE_SRUN_LOG"]).read_text()


def test_slurm_ranks_per_node_can_be_given(environment: dict[str, str]) -> None:
    environment |= {"SLURM_JOB_NODELIST": "node[07,03,11]", "SLURM_JOB_ID": "1", "SLURM_NNODES": "3"}
    run(environment | {"RANKS_PER_NODE": "2"}, "launch/slurm/train.sbatch", "--config", "c.yaml")
    assert {after(agent["arguments"], "--nproc-per-node") for agent in started(environment)} == {"2"}


def test_a_failing_node_fails_the_slurm_job(environment: dict[str, str]) -> None:
    environment |= {"SLURM_JOB_NODELIST": "node[07,03,11]", "SLURM_JOB_ID": "1", "SLURM_NNODES": "3"}
    done = run(environment | {"FAKE_FAIL_AT": "--node-rank 1"}, "launch/slurm/train.sbatch", "--config", "c.yaml")
    assert done.returncode == 7


@pytest.mark.parametrize(
    ("preempted", "fails", "requeued"), [("", "", 0), ("", "-m", 0), ("2026-11-24", "", 1), ("2026-11-24", "-m", 1)]
)
def test_a_preempted_slurm_job_is_queued_again_however_torchrun_ends(
    environment: dict[str, str], preempted: str, fails: str, requeued: int
) -> None:
    environment |= {"SLURM_JOB_NODELIST": "node[07,03,11]", "SLURM_JOB_ID": "5", "SLURM_NNODES": "3"}
    if preempted:
        environment["FAKE_PREEMPTED"] = preempted
    done = run(environment | {"FAKE_FAIL_AT": fails}, "launch/slurm/requeue.sbatch", "--config", "c.yaml")
    assert done.returncode == (7 if fails else 0), done.stderr
    assert Path(environment["FAKE_SRUN_LOG"]).read_text().count("requeue 5") == requeued


def test_a_slurm_job_places_roles_by_nodes(environment: dict[str, str]) -> None:
    environment |= {"SLURM_JOB_NODELIST": "node[07,03,11]", "SLURM_JOB_ID": "1", "SLURM_NNODES": "3"}
    script = "launch/slurm/train_beside_inference.sbatch"
    assert run(environment | {"TRAINING_NODES": "2"}, script, "--config", "c.yaml").returncode == 0
    placement = yaml.safe_load(str(started(environment)[0]["arguments"][-1]).removeprefix("placement="))
    assert placement == {"actor, reference": "node:0-1", "rollout, reward": "node:2-2"}
    refused = run(environment | {"TRAINING_NODES": "3"}, script, "--config", "c.yaml")
    assert refused.returncode == 2 and "TRAINING_NODES is 3 of 3 nodes" in refused.stderr


def test_a_slurm_array_has_a_folder_for_every_seed(environment: dict[str, str]) -> None:
    environment |= {"SLURM_JOB_NODELIST": "node[07,03,11]", "SLURM_JOB_ID": "1", "SLURM_NNODES": "3"}
    environment |= {"SLURM_ARRAY_TASK_ID": "4", "OUTPUT_DIR": "runs/x y"}
    assert run(environment, "launch/slurm/seeds.sbatch", "--config", "c.yaml").returncode == 0
    assert started(environment)[0]["arguments"][-2:] == ["seed=4", "output_dir=runs/x y/seed_4"]
    assert run(environment, "launch/slurm/doctor.sbatch", "--mb", "1").returncode == 0
    assert started(environment)[-1]["arguments"][-5:] == ["-m", "rltrain", "doctor", "--mb", "1"]


def test_a_port_that_is_taken_is_not_a_slurm_jobs(environment: dict[str, str]) -> None:
    environment |= {"SLURM_JOB_NODELIST": "node[07,03,11]", "SLURM_NNODES": "3"}
    with socket.socket() as taken:
        port = next(port for port in range(20000, 29000) if _binds(taken, port))
        taken.listen()
        run(environment | {"SLURM_JOB_ID": str(port - 10000)}, "launch/slurm/train.sbatch", "--config", "c.yaml")
    chosen = {int(after(agent["arguments"], "--master-port")) for agent in started(environment)}
    assert len(chosen) == 1 and port < chosen.pop() < port + 100


def _binds(connection: socket.socket, port: int) -> bool:
    try:
        connection.bind(("127.0.0.1", port))
    except OSError:
        return False
    return True


def test_the_quickstart_runs_three_phases_and_ends_with_the_scores(environment: dict[str, str], tmp_path: Path) -> None:
    out = tmp_path / "my run"
    for _ in range(2):
        done = run(environment, "launch/quickstart.sh", "--out", str(out), "seed=3", "steps=5")
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines()[-1] == "held-out exact match: 0.42 -> 0.96"
    assert re.search(
        r"seconds by phase: environment \d+ s, checkpoint and data \d+ s, warm-up \d+ s, GRPO \d+ s", done.stdout
    )
    make, sft, grpo = (note["arguments"] for note in started(environment)[:3])
    assert make == ["tools/make_quickstart.py", "--output", f"{out}/start", "--seed", "3"]
    for arguments in (sft, grpo):
        assert arguments[:5] == ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
        assert arguments[5] == "launch/train.py" and "seed=3" in arguments
    assert after(sft, "--config") == "configs/quickstart_sft.yaml" and f"model.path={out}/start/model" in sft
    assert after(grpo, "--config") == "configs/quickstart.yaml" and f"model.path={out}/sft/hf" in grpo
    assert "steps=5" in grpo and "steps=5" not in sft
    assert {note["OMP_NUM_THREADS"] for note in started(environment)} == {"1"}
    assert {str(note["PYTHONPATH"]).split(":")[0] for note in started(environment)} == {str(REPOSITORY)}


def test_the_users_steps_win_over_the_short_form(environment: dict[str, str], tmp_path: Path) -> None:
    done = run(environment, "launch/quickstart.sh", "--short", "--out", str(tmp_path / "out"), "steps=7")
    assert done.returncode == 0, done.stderr
    _, sft, grpo = (note["arguments"] for note in started(environment))
    assert [a for a in grpo if a.startswith("steps=")][-1] == "steps=7"
    assert len([a for a in sft if a.startswith("steps=")]) == 1


def test_the_quickstart_takes_a_relative_folder_of_the_caller(environment: dict[str, str], tmp_path: Path) -> None:
    done = run(environment, str(REPOSITORY / "launch/quickstart.sh"), "--out", "here", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "here" / "grpo" / "metrics.jsonl").is_file()


def test_a_failed_phase_is_named_and_ends_the_quickstart(environment: dict[str, str], tmp_path: Path) -> None:
    fails = environment | {"FAKE_FAIL_AT": "quickstart_sft.yaml"}
    done = run(fails, "launch/quickstart.sh", "--out", str(tmp_path / "out"))
    assert done.returncode == 1
    assert "stopped at: warm-up (exit status 7)" in done.stderr
    assert len(started(environment)) == 2, "nothing runs after the failed phase"


@pytest.mark.parametrize(
    ("argument", "message"), [("--fast", "unknown argument --fast"), ("output_dir=x", "--out DIR"), ("7", "usage")]
)
def test_wrong_arguments_are_refused_at_once(environment: dict[str, str], argument: str, message: str) -> None:
    done = run(environment, "launch/quickstart.sh", argument)
    assert done.returncode == 1 and message in done.stderr
    assert not Path(environment["FAKE_LOG"]).exists()


def test_an_interpreter_without_torch_is_refused(environment: dict[str, str], tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    bare.write_text(f'#!/usr/bin/env bash\nexec {sys.executable} -S -I "$@"\n')
    bare.chmod(0o755)
    done = run(environment | {"RLTRAIN_PYTHON": str(bare)}, "tests/run.sh")
    assert done.returncode == 1 and "has no torch" in done.stderr


def test_the_environment_is_installed_once_torch_first_and_again_after_a_change(
    environment: dict[str, str], tmp_path: Path
) -> None:
    script = repository_with_venv(tmp_path / "repository")
    del environment["RLTRAIN_PYTHON"]

    def installs() -> list[list[str]]:
        Path(environment["FAKE_LOG"]).write_text("")
        done = run(environment, script.name, cwd=script.parent)
        assert done.returncode == 0 and done.stdout.splitlines()[-1] == f"ready: {script.parent}/.venv/bin/python", (
            done.stderr
        )
        notes = [note["arguments"] for note in started(environment)]
        return [arguments for arguments in notes if "install" in arguments]

    torch_first, package = installs()
    assert re.fullmatch(r"torch==[\d.]+", torch_first[-1])
    assert package[-2:] == ["--editable", f"{script.parent}[dev]"]
    assert all("--constraint" in arguments for arguments in (torch_first, package))
    assert installs() == []
    (script.parent / "pyproject.toml").open("a").write("\n")
    assert len(installs()) == 2


def test_an_interrupted_installation_is_taken_up_again(environment: dict[str, str], tmp_path: Path) -> None:
    script = repository_with_venv(tmp_path / "repository")
    del environment["RLTRAIN_PYTHON"]
    failed = run(environment | {"FAKE_FAIL_AT": "--editable"}, script.name, cwd=script.parent)
    assert failed.returncode == 1 and "stopped at: install rltrain[dev]" in failed.stderr
    assert list((script.parent / ".venv").glob(".installed-*")) == []
    assert run(environment, script.name, cwd=script.parent).returncode == 0
    assert len(list((script.parent / ".venv").glob(".installed-*"))) == 1


def test_without_a_new_enough_python_the_message_says_so(environment: dict[str, str], tmp_path: Path) -> None:
    script = repository_with_venv(tmp_path / "repository")
    (script.parent / ".venv" / "bin" / "python").unlink()
    old = tmp_path / "bin" / "python3"
    old.write_text("#!/usr/bin/env bash\nexit 1\n")
    old.chmod(0o755)
    for minor in (11, 12, 13):
        (tmp_path / "bin" / f"python3.{minor}").symlink_to(old)
    del environment["RLTRAIN_PYTHON"]
    done = run(environment, script.name, cwd=script.parent)
    assert done.returncode == 1 and "needs Python 3.11 or newer" in done.stderr


@pytest.mark.parametrize(("installed", "status"), [("2.8.0+cu130", 1), ("PIN+cpu", 0), ("PIN", 0), ("", 0)])
def test_another_torch_in_an_own_venv_is_not_replaced(
    environment: dict[str, str], tmp_path: Path, installed: str, status: int
) -> None:
    script = repository_with_venv(tmp_path / "repository")
    del environment["RLTRAIN_PYTHON"]
    pins = re.findall(r"^torch==([\d.]+)", (REPOSITORY / "launch/constraints-cpu.txt").read_text(), re.M)
    installed = installed.replace("PIN", pins[sys.version_info >= (3, 12)])
    done = run(environment | {"FAKE_INSTALLED_TORCH": installed}, script.name, cwd=script.parent)
    assert done.returncode == status, done.stderr
    if status:
        assert f"holds torch {installed}" in done.stderr and "RLTRAIN_PYTHON" in done.stderr
        assert not any("install" in note["arguments"] for note in started(environment))
