"""Whole jobs with environments, on their own ranks or on the ranks of other roles."""

import sys
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import yaml

from tests.support.jobs import QUICKSTART, REPOSITORY, column, read_lines, sample_ids, succeed, train
from tests.support.marks import slow_but
from tests.support.sums_agent import RECORDS

ENVIRONMENT = ["env={function: 'tests.support.sums_environment:TwoSums', num_workers: 1, max_turn_tokens: 40}"]
SETTINGS = [
    *(*ENVIRONMENT, "reward={function: environment}", "actor.parallel.tp=1"),
    *("rollout.sampling.max_response_tokens=96", "rollout.max_context_tokens=112"),
    *("batch={prompts_per_step: 4, samples_per_prompt: 4, mini_batches: 2}", "steps=2"),
    *("logging={samples: 8, sample_ids: true}", "data.eval.max_rows=8", "data.train.max_rows=1024"),
]
PLACEMENTS = {
    "everything on one rank": (1, "{'actor, reference, rollout, reward, env': 0}"),
    "ranks of its own": (3, "{'actor, reference': 0, 'rollout, reward': 1, env: 2}"),
    "with the actor and two engines": (3, "{'actor, reference, env': 0-1, 'rollout, reward': 1-2}"),
    "with an engine of two ranks": (2, "{'actor, reference, rollout, reward, env': 0-1}"),
}
OVERRIDES = {
    "everything on one rank": ["env.offload=true", "env.overlap=false", "steps=3"],
    "with an engine of two ranks": ["rollout.parallel.tp=2", "env.batch_size=2"],
}


@pytest.mark.parametrize("name", slow_but(PLACEMENTS, "everything on one rank"))
def test_environments_answer_wherever_they_are(name: str, tmp_path: Path, warm_start: list[str]) -> None:
    num_ranks, placement = PLACEMENTS[name]
    own = OVERRIDES.get(name, [])
    num_steps = 3 if "steps=3" in own else 2
    common = [*warm_start, *SETTINGS, f"placement={placement}", f"output_dir={tmp_path}"]
    records = train(QUICKSTART, *common, *own, num_ranks=num_ranks)
    assert len(column(records, "train/loss")) == num_steps
    assert all(1.5 < turns <= 2 for turns in column(records, "env/turns_mean"))
    assert all(0 <= reward <= 1 for reward in column(records, "rollout/reward_mean"))
    assert sorted(number for ids in sample_ids(tmp_path).values() for number in ids) == [*range(num_steps * 16)]
    assert "env.offload=true" not in own or column(records, "env/offloads")[-1] >= 2
    conversations = read_lines(tmp_path / "samples.jsonl")
    assert len(conversations) == num_steps * 8
    turns = [turn for sample in conversations for turn in sample.get("turns", ())]
    assert turns and all(turn["message"]["role"] == "assistant" for turn in turns)
    assert any(reply["content"].endswith("=") for turn in turns for reply in turn["replies"]), "the second question"


ORDERS = {
    "pipelined": ["schedule={mode: pipelined, chunks: 2}"],
    "one step ahead, weights in flight": ["schedule={mode: asynchronous, max_staleness: 1}"],
    "partial rollouts": [
        "schedule={mode: asynchronous, max_staleness: 2, partial_rollouts: true, oversampling: 1.0, on_stale: mask}",
        "loss.old_logprobs=actor",
    ],
}


@pytest.mark.parametrize("name", slow_but(ORDERS, "partial rollouts"))
def test_every_sample_is_trained_on_once_in_every_order_and_across_a_restart(
    name: str, tmp_path: Path, warm_start: list[str]
) -> None:
    overrides = [
        *(*warm_start, *SETTINGS, *ORDERS[name], f"output_dir={tmp_path}", "data.eval=null"),
        *("placement={'actor, reference': 0, rollout: 1-2, 'reward, env': '0,2'}", "rollout.max_running_requests=8"),
        "checkpoint={save_interval: 2, save_hf: false, resume: auto}",
    ]
    train(QUICKSTART, *overrides, num_ranks=3)
    records = train(QUICKSTART, *overrides, "steps=4", num_ranks=3)
    assert len(column(records, "train/loss")) == 4
    ids = [number for of_step in sample_ids(tmp_path).values() for number in of_step]
    assert len(ids) == len(set(ids)) == 4 * 16, "no sample is trained on twice or lost"
    assert all(failed == 0 for failed in column(records, "env/failed"))


AGENTS = {
    "function": "{function: 'tests.support.sums_agent:two_sums'}",
    "program": "{command: [python3, TESTS/sum_program.py], sandbox: none, environment: {ANSWER_TOKENS: '40'}}",
}


@pytest.mark.parametrize("kind", slow_but(AGENTS, "program"))
def test_an_agent_draws_its_turns_at_the_endpoint(kind: str, tmp_path: Path, warm_start: list[str]) -> None:
    agent = AGENTS[kind].replace("TESTS", str(REPOSITORY / "tests/support"))
    records = train(
        QUICKSTART,
        *(*warm_start, *SETTINGS[1:], f"env={{agent: {agent}, num_workers: 1, max_turns: 4}}", "steps=1"),
        *("batch={prompts_per_step: 2, samples_per_prompt: 2, mini_batches: 1}", "data.eval.max_rows=1"),
        *("checkpoint.save_hf=false", "placement={'actor, reference, rollout': 0, env: 1}", f"output_dir={tmp_path}"),
        num_ranks=2,
    )
    assert len(column(records, "train/loss")) == 1
    assert all(failed == 0 for failed in column(records, "env/failed"))
    for sample in read_lines(tmp_path / "samples.jsonl"):
        assert sample["length"] > 0, "all turns requested by the agent are generated and recorded"
        is_right = sample["response"].rpartition(",")[2] == sample["label"]
        assert sample["reward"] in ((is_right,) if kind == "program" else (0.0, 1.0))


@pytest.mark.slow
def test_weights_change_between_the_turns_of_an_agent_and_inside_them(
    tmp_path: Path, quickstart_files: Path, data_overrides: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The endpoint is in front of an engine of two ranks. It takes new weights while it generates for the actor
    elsewhere."""
    monkeypatch.setenv(RECORDS, str(tmp_path / "sessions.jsonl"))
    steps = 8
    records = train(
        QUICKSTART,
        *(*data_overrides, *SETTINGS[1:], *ORDERS["one step ahead, weights in flight"], "data.eval=null"),
        "env={agent: {function: 'tests.support.sums_agent:counts_on'}, num_workers: 1, max_turns: 4}",
        *("rollout.parallel.tp=2", "rollout.max_running_requests=8"),
        "placement={'actor, reference, env': 0, rollout: 1-2, reward: 0}",
        *(f"model.path={quickstart_files}/model", f"output_dir={tmp_path}", f"steps={steps}"),
        num_ranks=3,
    )
    assert len(column(records, "train/loss")) == steps
    assert all(failed == 0 for failed in column(records, "env/failed"))
    sessions = read_lines(tmp_path / "sessions.jsonl")
    assert len(sessions) == steps * 16
    versions = [versions_of_turns(sample) for session in sessions for sample in session["samples"]]
    for turns in versions:
        drawn = [version for turn in turns for version in turn]
        assert drawn == sorted(drawn) and drawn[-1] < steps, "weights only get newer"
    assert any(len({*turn}) > 1 for turns in versions for turn in turns), "some syncs come inside a turn"
    assert any(turns[k][-1] < turns[k + 1][0] for turns in versions for k in range(len(turns) - 1)), (
        "some syncs come between two turns"
    )


def versions_of_turns(sample: dict[str, Any]) -> list[list[int]]:
    """Returns the policy versions of the generated tokens of each turn. Other tokens have version 0."""
    ends = sample["turns"]
    told = [*zip(sample["policy_versions"], sample["loss_mask"], strict=True)]
    assert all(version == 0 for version, drawn in told if not drawn)
    turns = [told[start:end] for start, end in zip([0, *ends], ends, strict=False)]
    return [[version for version, drawn in turn if drawn] for turn in turns]


@pytest.mark.slow
def test_environments_on_half_of_the_actors_ranks_and_the_rollout_on_the_other(
    tmp_path: Path, warm_start: list[str]
) -> None:
    """The config says nothing about the reward, so the environments give it."""
    settings = [setting for setting in SETTINGS if not setting.startswith("reward")]
    quickstart = yaml.safe_load(QUICKSTART.read_text())
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump({key: section for key, section in quickstart.items() if key != "reward"}))
    records = train(
        config,
        *(*warm_start, *settings, f"output_dir={tmp_path}", "loss.kl.coef=0", "actor.parallel.tp=2"),
        "placement={env: 0-3, rollout: 4-7, actor: 0-7}",
        "batch={prompts_per_step: 8, samples_per_prompt: 2, mini_batches: 1}",
        num_ranks=8,
    )
    assert len(column(records, "train/loss")) == 2
    assert all(turns > 1.5 for turns in column(records, "env/turns_mean"))


@pytest.mark.slow
def test_a_tiny_model_plays_a_text_game(tmp_path: Path) -> None:
    """After some steps of warm-up the model writes valid moves and is rewarded for some games."""
    start, warm_up = tmp_path / "start", tmp_path / "sft"
    succeed([sys.executable, "tools/make_text_game.py", "--output", str(start), "--seed", "0"], 120)
    paths = [f"model.path={start}/model", f"data.train.path={start}/warm_up.jsonl", f"output_dir={warm_up}"]
    train("configs/text_game_sft.yaml", *paths, "steps=60", num_ranks=2)
    records = train(
        "configs/text_game.yaml",
        *(f"model.path={warm_up}/hf", f"output_dir={tmp_path / 'grpo'}"),
        *(f"data.{rows}.path={start}/{rows}.jsonl" for rows in ("train", "eval")),
        *("steps=2", "batch={prompts_per_step: 16, samples_per_prompt: 8, mini_batches: 1}"),
        num_ranks=2,
    )
    assert all(turns > 1 for turns in column(records, "env/turns_mean"))
    assert all(0 < reward < 1 for reward in column(records, "rollout/reward_mean"))


SLOW_TURNS, SHARE_OF_DECODING = 8, 0.7
"""Turns of the slow environment, and its mean time as a share of the time to decode a turn of all samples."""
SLOW_SETTINGS = [
    *("placement={'actor, rollout, reward': 0, env: 1}", "actor={parallel: {tp: 1}, optimizer: {lr: 1.0e-9}}"),
    *("loss={kl: {coef: 0}, old_logprobs: rollout}", "reward={function: exact_match}", "data.eval=null", "steps=3"),
    *("checkpoint={save_hf: false, save_every_s: 0}", "batch={prompts_per_step: 32, samples_per_prompt: 8}"),
    "batch.mini_batches=1",
    "rollout={max_running_requests: 32, max_context_tokens: 128, sampling: {max_response_tokens: 112}}",
]


def generating_s(files: Path, output: Path, *, overlap: bool, seconds: float) -> float:
    """Returns the median seconds of the generate tasks after the first, by an untrained model."""
    environment = f"function: 'tests.end_to_end.slow_environment:SlowEnvironment', overlap: {str(overlap).lower()}"
    options = f"{{seconds: {seconds}, turns: {SLOW_TURNS}}}"
    records = train(
        QUICKSTART,
        *SLOW_SETTINGS,
        f"env={{{environment}, num_workers: 1, max_turn_tokens: 8, options: {options}}}",
        *(f"model.path={files}/model", f"data.train.path={files}/train.jsonl", f"output_dir={output}"),
        num_ranks=2,
    )
    took = zip(column(records, "perf/generate_s"), column(records, "perf/generate_wait_s"), strict=True)
    return median([sum(seconds) for seconds in took][1:])


@pytest.mark.slow
@pytest.mark.alone
def test_environments_that_step_while_engines_decode_are_faster(quickstart_files: Path, tmp_path: Path) -> None:
    """The baseline alternates between engine and environments. The measurement is repeated on a busy machine."""
    for number in range(3):
        decoding = generating_s(quickstart_files, tmp_path / f"decoding{number}", overlap=False, seconds=0.0)
        seconds = SHARE_OF_DECODING * decoding / SLOW_TURNS
        in_turn, overlapped = (
            generating_s(quickstart_files, tmp_path / f"{overlap}{number}", overlap=overlap, seconds=seconds)
            for overlap in (False, True)
        )
        if in_turn / overlapped >= 1.3:
            break
    assert in_turn / overlapped >= 1.3
