"""Whole jobs that roll out on a real vLLM server, started apart."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.jobs import QUICKSTART, SHORT, column, sample_ids, train
from tests.vllm.servers import TOKEN, VLLMServer, call

STEPS = 4
TIMEOUT_S = 600


def job_on(server: VLLMServer, checkpoint: Path, data_overrides: list[str], folder: Path) -> list[str]:
    """Returns the overrides of a job on a server, with its output in `folder`/run."""
    (folder / "token").write_text(TOKEN)
    return [
        *("rollout.engine=http", f"rollout.urls=[{server.url}]", f"rollout.http.token_file={folder}/token"),
        *(f"model.path={checkpoint}", *data_overrides, *SHORT, "actor.parallel.tp=1", f"steps={STEPS}"),
        *("batch={prompts_per_step: 4, samples_per_prompt: 4, mini_batches: 2}", "logging.sample_ids=true"),
        *("loss.entropy_coef=1.0", "actor.optimizer={lr: 3.0e-3, warmup_steps: 0}"),  # all samples get the same reward
        f"output_dir={folder}/run",
    ]


@pytest.fixture
def overrides(server: VLLMServer, checkpoints: list[Path], data_overrides: list[str], tmp_path: Path) -> list[str]:
    return job_on(server, checkpoints[0], data_overrides, tmp_path)


def assert_every_sample_once(output: Path) -> None:
    ids = [number for of_step in sample_ids(output).values() for number in of_step]
    assert len(ids) == len({*ids}) == STEPS * 16


def weight_version(server: VLLMServer) -> str:
    return call(server, "/weight_info")[1]


def test_a_job_trains_on_tokens_of_the_weights_that_it_wrote(
    overrides: list[str], server: VLLMServer, tmp_path: Path
) -> None:
    """The server loads every update from a folder. Its log-probs equal the trainer's."""
    records: list[dict[str, Any]] = train(
        QUICKSTART, *overrides, "placement={'actor, reference, rollout, reward': 0}", num_ranks=1, timeout_s=TIMEOUT_S
    )
    differences = column(records, "train/train_rollout_logprob_abs_diff_max")
    assert len(differences) == STEPS and max(differences) <= 1e-5
    assert column(records, "train/reference_kl")[-1] > 1e-3, "the weights have changed by more than rounding"
    assert max(column(records, "train/staleness_max")) == 0
    assert f".{STEPS - 1}" in weight_version(server)
    assert_every_sample_once(tmp_path / "run")
    assert not (tmp_path / "run/http_weights").exists(), "loaded weight files are removed"


def test_responses_continue_while_weights_change(overrides: list[str], tmp_path: Path) -> None:
    """An asynchronous job with partial rollouts and merged adapters. No sample is lost or used twice."""
    records = train(
        *(QUICKSTART, *overrides, "placement={'actor, reference': 0, 'rollout, reward': 1}"),
        "schedule={mode: asynchronous, max_staleness: 1, partial_rollouts: true, on_stale: mask}",
        *("loss.old_logprobs=actor", "model.lora={rank: 8, alpha: 16}"),
        num_ranks=2,
        timeout_s=TIMEOUT_S,
    )
    assert len(column(records, "train/loss")) == STEPS
    assert max(column(records, "train/fresh_logprob_abs_diff")) <= 1e-5
    assert_every_sample_once(tmp_path / "run")
