"""Whole jobs that roll out on SGLang, with one server per engine."""

import json
from pathlib import Path

import pytest

from tests.support.jobs import QUICKSTART, column, read_lines, sample_ids, succeed, torchrun, train
from tests.support.reward_models import make_judge_who_loves
from tests.support.sums_agent import RECORDS

IN_MANY_PARTS = ("weight_sync.verify=true", "rollout.sglang.staging_mb=0.1")
SMALL = ("actor.parallel.tp=1", "data.eval=null", "batch={prompts_per_step: 8, samples_per_prompt: 4, mini_batches: 2}")
AHEAD = ("placement={'actor, reference': 0, 'rollout, reward': 1}", "schedule={mode: asynchronous, max_staleness: 1}")
TIMEOUT_S = 800


@pytest.fixture
def overrides(sglang_python: str, quickstart_files: Path, data_overrides: list[str]) -> list[str]:
    engine = ["rollout.engine=sglang", f"rollout.sglang.python={sglang_python}"]
    return [*engine, f"model.path={quickstart_files}/model", *data_overrides, *SMALL]


def train_on(*overrides, num_ranks):
    return train(QUICKSTART, *overrides, num_ranks=num_ranks, timeout_s=TIMEOUT_S)


def test_the_engine_draws_from_the_weights_that_it_was_sent(overrides, tmp_path):
    """Log-probs of its tokens equal the actor's after every update, with weights that arrive in many parts."""
    job = [*overrides, *IN_MANY_PARTS, "placement={'actor, reference, rollout, reward': 0}", "steps=3"]
    records = train_on(*job, f"output_dir={tmp_path}", num_ranks=1)
    differences = column(records, "train/train_rollout_logprob_abs_diff_max")
    assert len(differences) == 3 and max(differences) <= 1e-4
    assert len(column(records, "perf/weight_sync_verify_s")) == 3


def test_what_changed_of_the_weights_comes_in_flight(overrides, tmp_path):
    """Checksums are compared on both ways: from the actor to staging memory, and from there into the server."""
    records = train_on(
        *(*overrides, *IN_MANY_PARTS, *AHEAD, f"output_dir={tmp_path}", "steps=4"),
        *("model.dtype=bfloat16", "loss.old_logprobs=actor", "weight_sync.delta={in_shared_memory: true}"),
        *("loss.entropy_coef=1.0", "actor.optimizer={lr: 2.0e-4, warmup_steps: 0}"),  # all samples get the same reward
        num_ranks=2,
    )
    shares = column(records, "perf/weight_sync_changed_share")
    assert shares and all(0 < share < 1 for share in shares)
    assert max(column(records, "train/train_rollout_logprob_abs_diff")) < 0.1


def test_adapters_come_alone_after_the_base(overrides, tmp_path):
    """The engine's log-probs are the actor's while its adapters learn. A resumed run sends the base once more, and
    adapters while responses run."""
    common = [
        *(*overrides, *IN_MANY_PARTS, "model.lora={rank: 8, alpha: 16}", "weight_sync.adapters=apart"),
        *("loss.entropy_coef=1.0", "actor.optimizer={lr: 3.0e-3, warmup_steps: 0}"),  # all samples get the same reward
        "checkpoint={save_interval: 2, keep: 0}",
    ]
    begun = [*common, "placement={'actor, reference, rollout, reward': 0}", "steps=3", f"output_dir={tmp_path}/begun"]
    going_on = f"checkpoint.resume={tmp_path}/begun/checkpoints/step_0000002"
    resumed = [*common, *AHEAD, going_on, "steps=5", f"output_dir={tmp_path}/resumed"]
    records = train_on(*begun, num_ranks=1)
    assert max(column(records, "train/train_rollout_logprob_abs_diff_max")) <= 1e-4
    assert column(records, "train/reference_kl")[-1] > 1e-3, "the adapters add more than rounding"
    later = train_on(*resumed, num_ranks=2)
    assert len(column(later, "train/loss")) == 3
    for found in (column(records, "perf/weight_sync_local_bytes"), column(later, "perf/weight_sync_bytes")):
        with_base, *alone = found
        assert alone and len({*alone}) == 1 and 0 < alone[0] < with_base / 4


def test_weights_change_while_responses_run(overrides, tmp_path):
    """Every token has the version of its weights, within the limit. No sample is lost or used twice."""
    steps = 6
    records = train_on(
        *(*overrides, f"output_dir={tmp_path}", f"steps={steps}", "loss.old_logprobs=actor", "logging.sample_ids=true"),
        "placement={'actor, reference': 0, rollout: 1, reward: 2}",
        "schedule={mode: asynchronous, max_staleness: 1, partial_rollouts: true, on_stale: mask}",
        num_ranks=3,
    )
    assert len(column(records, "train/loss")) == steps
    ids = [i for step in sample_ids(tmp_path).values() for i in step]
    assert len(ids) == len(set(ids)) == steps * 8 * 4


CONVERSATIONS = {
    "environments": "{function: 'tests.support.sums_environment:TwoSums', num_workers: 1, max_turn_tokens: 40}",
    "an agent": "{agent: {function: 'tests.support.sums_agent:counts_on'}, num_workers: 1, max_turns: 4}",
}


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_conversations_go_on_while_weights_change(name, overrides, tmp_path, monkeypatch):
    """Environments answer turns, or an agent requests them at the endpoint. The actor trains on the engine's own
    tokens."""
    monkeypatch.setenv(RECORDS, str(tmp_path / "sessions.jsonl"))
    steps = 3
    records = train_on(
        *(*overrides, *AHEAD, f"output_dir={tmp_path}", f"steps={steps}", "logging={samples: 16, sample_ids: true}"),
        *(f"env={CONVERSATIONS[name]}", "reward={function: environment}", "rollout.max_context_tokens=112"),
        *("rollout.max_running_requests=8", "rollout.sampling.max_response_tokens=96"),
        "batch={prompts_per_step: 4, samples_per_prompt: 4, mini_batches: 1}",
        "placement={'actor, reference': 0, rollout: 1, 'reward, env': 2}",
        num_ranks=3,
    )
    assert len(column(records, "train/loss")) == steps
    assert all(failed == 0 for failed in column(records, "env/failed"))
    ids = [number for of_step in sample_ids(tmp_path).values() for number in of_step]
    assert sorted(ids) == [*range(steps * 16)], "every sample is trained on once"
    if name == "environments":
        assert all(1 < turns <= 2 for turns in column(records, "env/turns_mean"))
        return
    sessions = read_lines(tmp_path / "sessions.jsonl")
    assert len(sessions) == steps * 16
    for sample in (sample for session in sessions for sample in session["samples"]):
        drawn = [v for v, drawn in zip(sample["policy_versions"], sample["loss_mask"], strict=True) if drawn]
        assert len(sample["turns"]) == 3 and drawn == sorted(drawn) and drawn[-1] < steps


def test_a_checkpoint_is_evaluated_by_one_server_and_judged_by_another(
    sglang_python: str, quickstart_files: Path, warmed_up: Path, tmp_path: Path
):
    """Each server has the weights of a separate checkpoint, without a sync."""
    judge = make_judge_who_loves("1", tmp_path / "judge")
    succeed(
        [
            *(*torchrun(2), "launch/evaluate.py", "--checkpoint", str(warmed_up)),
            *("--output", str(tmp_path / "evaluated"), "--config", str(QUICKSTART)),
            "placement={'rollout, reward': 0, judge: 1}",
            f"data={{train: {{path: nowhere}}, eval: {{path: {quickstart_files}/eval.jsonl, max_rows: 64}}, "
            "max_prompt_tokens: 16}",
            *("rollout.engine=sglang", f"rollout.sglang.python={sglang_python}", "rollout.sglang.staging_mb=0.1"),
            f"judge={{path: {judge}, engine: sglang, weight: 0.5, prompt: '{{prompt}} {{response}}', verdict: "
            "'tests.support.reward_models:points', max_context_tokens: 128, sampling: {max_response_tokens: 4}}",
            "reward={functions: [{function: exact_match, options: {after: ','}}]}",
        ],
        timeout_s=TIMEOUT_S,
    )
    metrics = json.loads((tmp_path / "evaluated/evaluation.json").read_text())["sets"]["eval"]
    assert 0.25 < metrics["reward_exact_match"] < 0.6, "the checkpoint solves a third of all additions"
    files = (tmp_path / "evaluated/evaluation_samples").glob("*.jsonl")
    samples = [sample for path in files for sample in read_lines(path)]
    assert len(samples) == 64 and any(sample["response"].endswith("1") for sample in samples)
    for sample in samples:
        assert sample["rewards"] == {
            "exact_match": sample["response"].rsplit(",")[-1] == sample["label"],
            "judge": sample["response"].endswith("1"),
        }
