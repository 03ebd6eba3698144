"""The configs of jobs that only a GPU runs are read, checked and dry run here, and all of tests/gpu is imported."""

import importlib
import re
import shutil
from pathlib import Path

import pytest

from rltrain.config.loader import load_config
from rltrain.planning.description import describe_job
from rltrain.planning.options import DryRunOptions
from rltrain.planning.validation import check_config
from tests.distributed.family_checkpoints import SHAPE, tiny_config
from tests.forked.popen import REPOSITORY
from tests.gpu.jobs import JOBS, WARMED_UP
from tools.benchmarks import real_size
from tools.gpu_check import GRPO
from tools.gpu_prepared import STARTS

GPU_TESTS = sorted((REPOSITORY / "tests/gpu").glob("*.py"))
CASE = re.compile(r"\"(tests\.gpu\.\w+):(\w+)\"")


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folders that a GPU machine has, with models of their kinds and a row of each file."""
    folder = tmp_path_factory.mktemp("start")
    row = '{"prompt": "1+1=", "response": "2", "label": "2", "chosen": "2", "rejected": "3"}\n'
    for name in STARTS:
        shutil.copytree(WARMED_UP, folder / name / "model")
        for rows in {job.rows for job in JOBS.values() if job.rows.startswith(f"{name}/")}:
            (folder / rows).write_text(row * 512)
    (folder / "experts/model/model.safetensors").unlink()  # of another model
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
    assert not starts_jobs or "from tests.gpu.jobs import JOBS" in text, "jobs are data, so that they are checked here"
