"""A job with engines of launch/serve.py on other ports. One is killed and another replaces it."""

from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from tests.forked.popen import Popen
from tests.support.jobs import column, read_lines, read_records, sample_ids, start_on_servers, wait_until
from tests.support.reward_models import make_judge_who_loves
from tests.support.served import CHECKPOINT, served

TOKEN = "of-the-engines"
LIMIT_S = 300.0
STEPS, PROMPTS, SAMPLES = 5, 4, 4


def wait_for(metrics: Path, num_steps: int, job: Popen) -> None:
    wait_until(lambda: metrics.exists() and len(metrics.read_text().splitlines()) >= num_steps, job, LIMIT_S)


def start_job(urls: Path, output: Path, *overrides: str) -> Popen:
    return start_on_servers(
        urls,
        TOKEN,
        *(f"model.path={CHECKPOINT}", "actor.parallel.tp=1", "logging.sample_ids=true", f"output_dir={output}"),
        f"batch={{prompts_per_step: {PROMPTS}, samples_per_prompt: {SAMPLES}, mini_batches: 1}}",
        *("data.train.max_rows=1024", *overrides),
        num_ranks=2,
    )


@pytest.mark.slow  # test_http_engine.py tests servers of every protocol in seconds
def test_a_job_goes_on_while_its_engines_come_and_go(data_overrides: list[str], tmp_path: Path) -> None:
    """Each of the two ranks uses one server. The new server finishes the samples of the killed one.

    It has to catch up: servers receive only changes, and compare checksums of the result.
    """
    urls, output = tmp_path / "urls", tmp_path / "run"
    with ExitStack() as servers:
        options = ("--token", TOKEN, "--max-context-tokens", "64")
        first, second = (servers.enter_context(served(*options)) for _ in range(2))
        urls.write_text(f"{first[0]}\n{second[0]}\n")
        placed = ("placement={'actor, reference, rollout, reward': 0-1}", "rollout.http.reread_s=0.1")
        changes = ("weight_sync.delta.full_every=3", "model.dtype=bfloat16", "actor.optimizer.lr=1e-6")
        job = start_job(urls, output, *data_overrides, *placed, *changes, f"steps={STEPS}", "data.eval=null")
        with job:
            wait_for(output / "metrics.jsonl", 2, job)
            second[2].kill()
            third = servers.enter_context(served(*options))
            urls.write_text(f"{first[0]}\n{third[0]}\n")
            stdout, stderr = job.communicate(timeout=LIMIT_S)
            assert job.returncode == 0, f"{stdout[-3000:]}\n{stderr[-6000:]}"
        headers = {"Authorization": f"Bearer {TOKEN}"}
        for url in (first[0], third[0]):
            told = httpx.get(f"{url}/model_info", headers=headers, verify=False, trust_env=False).json()
            assert told["weight_version"].endswith(f".{STEPS - 1}"), told
    records = read_records(output)
    assert [record["step"] for record in records] == [*range(STEPS)]
    assert all(len(ids) == PROMPTS * SAMPLES for ids in sample_ids(output).values())
    assert max(column(records, "train/train_rollout_logprob_abs_diff")) < 0.05, "equal to the precision of bfloat16"
    assert max(column(records, "train/staleness_max")) == 0
    assert column(records, "rollout/weight_files_are_full") == [1, 0, 0, 1, 0]
    whole, *_, delta = column(records, "rollout/weight_files_bytes")
    assert 0 < delta < whole / 5
    assert "is given the whole checkpoint" not in stdout + stderr
    assert TOKEN not in "".join(path.read_text() for path in output.glob("*.json*"))
    assert not (output / "http_weights").exists(), "loaded weight files are removed"


@pytest.mark.slow
def test_weights_come_while_conversations_are_under_way(data_overrides: list[str], tmp_path: Path) -> None:
    """The job is asynchronous, with partial rollouts, evaluations, environments, adapters, and a judge at its own
    server. One rank trains, the other uses three servers."""
    steps = 3
    urls, output, judge = tmp_path / "urls", tmp_path / "run", make_judge_who_loves("1", tmp_path / "judge")
    with ExitStack() as servers:
        options = ("--token", TOKEN, "--max-context-tokens", "128")
        started = [servers.enter_context(served(*options)) for _ in range(2)]
        urls.write_text("".join(f"{url}\n" for url, _, _ in started))
        judges, _, _ = servers.enter_context(served(*options, checkpoint=judge))
        asked = f"engine: http, urls: ['{judges}'], http: {{token_env: ENGINES_TOKEN}}, max_context_tokens: 128"
        told = (
            "prompt: '{prompt} {response}', verdict: 'tests.support.reward_models:points', "
            "sampling: {max_response_tokens: 4}"
        )
        with start_job(
            *(urls, output, *data_overrides, f"steps={steps}", "evaluation.interval=2", "data.eval.max_rows=8"),
            "placement={'actor, reference, judge': 0, 'rollout, reward, env': 1}",
            "schedule={mode: asynchronous, max_staleness: 1, partial_rollouts: true, on_stale: mask}",
            "env={function: 'tests.support.sums_environment:TwoSums', num_workers: 1, max_turn_tokens: 40}",
            *("rollout.sampling.max_response_tokens=96", "rollout.max_context_tokens=112", "logging.samples=8"),
            *("reward={function: environment}", f"judge={{path: {judge}, weight: 0.25, {asked}, {told}}}"),
            *("model.lora={rank: 8, alpha: 16}", "actor.optimizer.lr=3e-3"),
        ) as job:
            stdout, stderr = job.communicate(timeout=LIMIT_S)
            assert job.returncode == 0, f"{stdout[-3000:]}\n{stderr[-6000:]}"
    records = read_records(output)
    assert max(column(records, "train/fresh_logprob_abs_diff")) < 1e-4, "engines have the adapters, merged"
    assert len(column(records, "eval/score")) >= 2 and column(records, "rollout/servers")[-1] == 2
    assert all(1.5 < turns <= 2 for turns in column(records, "env/turns_mean"))
    assert max(column(records, "rollout/reward_judge_errors")) == 0 and max(column(records, "rollout/reward_judge")) > 0
    for sample in read_lines(output / "samples.jsonl"):
        assert sample["rewards"]["judge"] == sample["response"].endswith("1")
    ids = [number for of_step in sample_ids(output).values() for number in of_step]
    assert len(ids) == len({*ids}) == steps * PROMPTS * SAMPLES
