"""Tests of the GPU check without a GPU."""

import importlib
import json
import re
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rltrain.config.loader import load_config
from rltrain.planning.description import describe_job
from rltrain.planning.options import DryRunOptions
from rltrain.planning.validation import check_config
from tests.forked.popen import REPOSITORY, run
from tests.gpu.jobs import JOBS, WARMED_UP, broadcasts
from tests.support.cuda_driver import build
from tests.support.family_checkpoints import SHAPE, tiny_config
from tools import gpu_check, gpu_prepared
from tools.benchmarks import real_size
from tools.gpu_check import GRPO, Runner, Step, all_steps, critical_path_s
from tools.gpu_prepared import STARTS

EIGHT_MINUTES_S = 480
FOLDER = Path("results")


def python(name: str, code: str, limit_s: float = 60, **settings: bool) -> Step:
    return Step(name, limit_s, ("-c", code), **settings)


@pytest.fixture
def make_runner(tmp_path: Path) -> Callable[..., Runner]:
    environment = {"PYTHONUNBUFFERED": "1"}

    def make(*, total_s: float = 60, answers: bool = True, **settings: float) -> Runner:
        deadline = time.monotonic() + total_s
        return Runner(tmp_path, environment, deadline, lambda limit_s: answers, grace_s=1.0, **settings)

    return make


def outcomes(runner: Runner) -> dict[str, tuple[str, bool]]:
    return {result.name: (result.outcome, result.failed) for result in runner.results}


def test_results_come_as_steps_end(make_runner: Callable[..., Runner], capsys: pytest.CaptureFixture[str]) -> None:
    runner = make_runner()
    tests, benchmark = "print('...'); print('== 3 passed, 1 skipped in 2s ==')", "print('{\"ms\": 5.4}')"
    fails = "print('what went wrong'); raise SystemExit(3)"
    runner.run([python("tests", tests), python("broken", fails), python("benchmark", benchmark)])
    assert outcomes(runner) == {
        "tests": ("passed", False),
        "broken": ("ended with status 3", True),
        "benchmark": ("passed", False),
    }
    shown = capsys.readouterr().out
    assert "3 passed, 1 skipped" in shown and "what went wrong" in shown and '{"ms": 5.4}' in shown
    assert runner.results[-1].described()["result"] == {"ms": 5.4}


def test_a_step_that_is_cut_shows_what_it_had_printed(
    make_runner: Callable[..., Runner], capsys: pytest.CaptureFixture[str]
) -> None:
    runner = make_runner()
    begin = time.monotonic()
    runner.run([python("slow", "import time; print('step 1 of 3'); time.sleep(50)", limit_s=3), python("next", "")])
    assert time.monotonic() - begin < 40
    assert outcomes(runner) == {"slow": ("cut by its limit of 3 s", True), "next": ("passed", False)}
    assert "step 1 of 3" in capsys.readouterr().out


def test_a_probe_reports_and_does_not_fail(make_runner: Callable[..., Runner]) -> None:
    runner = make_runner()
    crash = "print('INTERNAL ASSERT FAILED'); import os; os.abort()"
    runner.run([python("probe", crash, is_probe=True), python("next", "")])
    (outcome, failed), following = outcomes(runner).values()
    assert outcome.startswith("reported: ended with status") and not failed
    assert following == ("passed", False)


@pytest.mark.parametrize("answers", [True, False])
def test_a_crash_ends_the_check_where_the_gpu_does_not_answer(
    make_runner: Callable[..., Runner], answers: bool
) -> None:
    runner = make_runner(answers=answers)
    runner.run([python("crash", "raise SystemExit('CUDA error: 700')"), python("next", "")])
    _, (outcome, failed) = outcomes(runner).values()
    assert (outcome, failed) == (("passed", False) if answers else ("not run: the GPU does not answer", True))


def test_steps_run_beside_each_other_and_others_alone(make_runner: Callable[..., Runner], tmp_path: Path) -> None:
    """Two concurrent steps wait for each other and end. A later step runs alone."""
    meet = (
        "import pathlib, sys, time; here = pathlib.Path(sys.argv[1]); (here / sys.argv[2]).touch()\n"
        "while not (here / sys.argv[3]).exists(): time.sleep(0.01)\n"
        "(here / sys.argv[2]).with_suffix('.ended').touch()"
    )
    first, second = (
        Step(one, 50, ("-c", meet, str(tmp_path), one, other), beside=True) for one, other in (("a", "b"), ("b", "a"))
    )
    alone = "import pathlib, sys; assert len(list(pathlib.Path(sys.argv[1]).glob('*.ended'))) == 2"
    runner = make_runner(lanes=2)
    runner.run([python("build", ""), first, second, Step("alone", 30, ("-c", alone, str(tmp_path)))])
    assert [result.name for result in runner.results][::3] == ["build", "alone"]
    assert not [name for name, (_, failed) in outcomes(runner).items() if failed]


def test_no_step_goes_beyond_the_deadline(make_runner: Callable[..., Runner]) -> None:
    runner = make_runner(total_s=3, lanes=1)
    begin = time.monotonic()
    sleep = "import time; time.sleep(50)"
    runner.run([python("beside", sleep, beside=True), python("waits", sleep, beside=True), python("alone", sleep)])
    assert time.monotonic() - begin < 40
    assert all(failed for _, failed in outcomes(runner).values())
    assert outcomes(runner)["alone"][0] == "not run: no time was left" or runner.is_lost


def test_the_whole_fits_eight_minutes_and_has_every_gpu_test() -> None:
    steps = all_steps(FOLDER, is_prepared=True)
    assert critical_path_s(steps, is_prepared=True) <= EIGHT_MINUTES_S
    files = {path.name for path in (REPOSITORY / "tests/gpu").glob("test_*.py")}
    selected = [word.partition("::") for step in steps for word in step.arguments if word.startswith("tests/gpu/")]
    tested = {Path(file).name for file, _, _ in selected}
    assert len({name for _, _, name in selected if name}) == len(JOBS)
    engines = ["sglang", "vllm"]
    assert tested == files - {f"test_{name}.py" for name in engines}
    more = all_steps(FOLDER, is_prepared=True, engines=engines)[len(steps) :]
    assert [step.arguments[-1] for step in more] == [f"tests/gpu/test_{name}.py" for name in engines]
    scripts = {word for step in steps for word in step.arguments if word.startswith("tools/")}
    assert all((REPOSITORY / script).exists() for script in scripts)
    assert all(step.limit_s > gpu_check.GRACE_S for step in steps)
    assert {step.name for step in steps if step.is_probe} == {"versions", "graphs"}


def test_the_summary_has_every_result(tmp_path: Path) -> None:
    results = [gpu_check.Result("plan", "passed", 1.25, result={"ms": 2}), gpu_check.Result("grpo", "cut", failed=True)]
    gpu_check.summarise(tmp_path, results)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["steps"] == [
        {"name": "plan", "outcome": "passed", "seconds": 1.2, "result": {"ms": 2}},
        {"name": "grpo", "outcome": "cut", "seconds": 0.0},
    ]
    assert json.loads((tmp_path / "plan.json").read_text()) == {"ms": 2}


@pytest.mark.slow
def test_it_refuses_without_a_gpu(tmp_path: Path) -> None:
    output = tmp_path / "out"
    environment = {"RLTRAIN_PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": ""}
    done = run(["bash", str(REPOSITORY / "tools/gpu_check.sh"), str(output)], 120, environment)
    assert done.returncode == 2 and "finds no GPU" in done.stderr
    assert not output.exists()


@pytest.mark.parametrize(
    ("wheel", "fits"),
    [
        ("pydantic_core-2.50.4-cp312-cp312-manylinux_2_17_x86_64.manylinux2014_x86_64.whl", True),
        ("math_verify-0.9.0-py3-none-any.whl", True),
        ("antlr4_python3_runtime-4.13.2-py3-none-any.whl", True),
        ("megatron_core-0.16.1-cp311-cp311-manylinux_2_17_x86_64.whl", False),
        ("antlr4_python3_runtime-4.13.2.tar.gz", False),
    ],
)
def test_wheels_are_those_of_the_other_python(wheel: str, fits: bool) -> None:
    assert gpu_prepared.fits(wheel, "3.12") is fits


def test_prepared_versions_are_the_pinned_ones_and_the_folder_is_new(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pinned = gpu_prepared.pinned(gpu_prepared.WHEELS, "3.12")
    lines = (REPOSITORY / "launch/constraints-cpu.txt").read_text().splitlines()
    constraints = {line.partition(";")[0] for line in lines}
    assert len(pinned) == len(gpu_prepared.WHEELS) and set(pinned) <= constraints
    assert set(pinned) != set(gpu_prepared.pinned(gpu_prepared.WHEELS, "3.11")), "newer Megatron for newer Python"
    (tmp_path / "old").touch()
    assert gpu_prepared.prepare(tmp_path, "3.12") == 2
    assert "is not empty" in capsys.readouterr().err


GPU_TESTS = sorted((REPOSITORY / "tests/gpu").glob("*.py"))
CASE = re.compile(r"\"(tests\.gpu\.\w+):(\w+)\"")


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the folders of a GPU machine, with tiny models of the same kinds and copies of one row."""
    folder = tmp_path_factory.mktemp("start")
    row = '{"prompt": "1+1=", "response": "2", "label": "2", "chosen": "2", "rejected": "3"}\n'
    for name in STARTS:
        shutil.copytree(WARMED_UP, folder / name / "model")
        for rows in {job.rows for job in JOBS.values() if job.rows.startswith(f"{name}/")}:
            (folder / rows).write_text(row * 512)
    (folder / "experts/model/model.safetensors").unlink()  # replaced by another model
    sizes = SHAPE | {"vocab_size": 15, "num_attention_heads": 4, "num_key_value_heads": 2}
    tiny_config("qwen3_moe", sizes).save_pretrained(folder / "experts/model")
    return folder


@pytest.mark.parametrize("name", JOBS)
def test_a_gpu_job_is_legal(name: str, start: Path, tmp_path: Path) -> None:
    job = JOBS[name]
    overrides = [*job.arguments(start), f"output_dir={tmp_path / 'run'}"]
    config = load_config(job.path(), overrides)
    assert config.steps == 3 and not [override for override in overrides if "{start}" in override]
    described = describe_job(job.path(), overrides, DryRunOptions(world_size=1))
    assert "rank 0" in described and "does not exist yet" not in described


def test_the_job_with_broadcasts_is_legal(start: Path, tmp_path: Path) -> None:
    job = broadcasts(WARMED_UP, "http://127.0.0.1:1")
    overrides = [*job.arguments(start), f"output_dir={tmp_path / 'run'}"]
    assert load_config(job.path(), overrides).rollout.http.weights == "group"
    described = describe_job(job.path(), overrides, DryRunOptions(world_size=1))
    assert "rank 0" in described and "does not exist yet" not in described


def test_the_run_of_real_size_is_legal(tmp_path: Path) -> None:
    arguments = real_size.parse_arguments([*GRPO, "--logs", str(tmp_path)])
    (tmp_path / "empty.yaml").write_text("{}")
    for case in arguments.cases.split(","):
        settings = real_size.settings_of(case, WARMED_UP, tmp_path / case, real_size.job_settings(arguments))
        config = load_config(tmp_path / "empty.yaml", settings)
        check_config(config)
        assert (config.steps, config.model.dtype, config.rollout.max_running_requests) == (3, "bfloat16", 64)


@pytest.mark.parametrize("path", GPU_TESTS, ids=lambda path: path.stem)
def test_gpu_tests_are_imported_and_name_cases_that_exist(path: Path) -> None:
    importlib.import_module(f"tests.gpu.{path.stem}")
    text = path.read_text()
    for module, function in CASE.findall(text):
        assert callable(getattr(importlib.import_module(module), function))
    starts_jobs = re.search(r"jobs import .*\btrain|jobs import .*try_to_train", text)
    assert not starts_jobs or "from tests.gpu.jobs import" in text, "jobs are data, so this file checks them"


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    library = build(tmp_path_factory.mktemp("driver"))
    done = run([sys.executable, "-m", "tests.support.staging_processes", str(library)], timeout_s=60)
    assert done.returncode == 0, done.stderr[-4000:]
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def reserving(folder: Path, case: str) -> dict[str, Any]:
    """Returns what a case of tests/support/reserving_process.py finds."""
    done = run([sys.executable, "-m", "tests.support.reserving_process", str(build(folder)), case], timeout_s=120)
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.slow
def test_recorded_steps_outlive_moves_of_the_kv_cache(tmp_path: Path) -> None:
    found = reserving(tmp_path, "generations")
    assert all(found["equal"]) and not any(found["bytes"])
    first, second, *later = found["recorded"]
    assert 0 < first < second and later == [second, second], "the cache moves once, when other roles have allocated"


def test_memory_leaves_and_returns_under_the_same_addresses(tmp_path: Path) -> None:
    page = 2**21
    assert reserving(tmp_path, "moves") == {
        "bytes after the trial": 0,
        "zeros": [[3, 5], [page], [0, 2]],
        "bytes": [3 * page, 3 * page],
        "bytes away": [0, 0, 0],
        "too much": "cuMemCreate of the CUDA driver returned error 2, not 0",
        "addresses stay": True,
        "content": [float(number) for number in range(15)],
        "dropped": False,
        "bytes at the end": [0, 0],
    }


def test_what_one_process_stages_the_other_one_loads(found: dict[str, Any]) -> None:
    assert found["weights"] == {"version": 2, "same": True, "kinds": ["cuda"]}
    assert found["other ended with"] == 0


def test_other_types_or_another_order_would_fail(found: dict[str, Any]) -> None:
    assert len(found["wrong"]) == 10
    assert [name for name, status in found["wrong"].items() if status == 0] == []


def test_what_the_driver_refuses_is_named(found: dict[str, Any]) -> None:
    too_much, elsewhere = found["refusals"]
    assert "cuMemAlloc_v2 of the CUDA driver returned error 2" in too_much and "rollout.sglang.staging_mb" in too_much
    assert "staged on device GPU-another" in elsewhere
    assert found["pages"] == 2, "the driver shares whole pages, with everything in them"
