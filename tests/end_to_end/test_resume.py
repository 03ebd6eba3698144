"""Runs resumed from a checkpoint equal unbroken ones."""

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rltrain.checkpoint.run_files import read_manifest
from rltrain.checkpoint.run_folder import RUN_FILE
from rltrain.cli.main import main
from tests.end_to_end.test_fp8_rollouts import FP8
from tests.support.jobs import (
    QUICKSTART,
    REPOSITORY,
    Run,
    column,
    read_lines,
    read_records,
    reported,
    sample_ids,
    train,
    train_in_turn,
)
from tests.support.marks import slow_but
from tests.support.tolerances import EPS_OF_ACTOR, EPS_OF_CRITIC, near

STEPS, SAVED = 5, 3
PARTIAL = "schedule={mode: asynchronous, max_staleness: 2, partial_rollouts: true, on_stale: mask}"
PROMPTS, SAMPLES = 4, 8
SMALL = (
    f"batch={{prompts_per_step: {PROMPTS}, samples_per_prompt: {SAMPLES}, mini_batches: 2}}",
    f"steps={STEPS}",
    "logging.sample_ids=true",
    "data.train.max_rows=1024",
    "checkpoint.save_hf=false",
    EPS_OF_ACTOR,
)
APART = "placement={'actor, reference': 0-1, 'rollout, reward': 2-3}"


@pytest.fixture
def saved_and_resumed(warm_start, tmp_path) -> Callable[..., list[Run]]:
    """Runs a config that saves after SAVED steps, then resumes it with each of `changes`. Returns the reports of each
    run."""

    def run_all(config: str, common: tuple[str, ...], *changes: tuple[str, ...]) -> list[Run]:
        own = [*warm_start, *SMALL, *common]
        resume = f"checkpoint.resume={tmp_path}/first/checkpoints/step_{SAVED:07d}"
        jobs = {"first": [*own, f"checkpoint.save_interval={SAVED}"]}
        jobs |= {str(number): [*own, resume, *change] for number, change in enumerate(changes)}
        train_in_turn(REPOSITORY / config, jobs, tmp_path, num_ranks=4)
        return [reported(tmp_path / name) for name in jobs]

    return run_all


def after(steps: dict[int, Any], first: int = SAVED) -> dict[int, Any]:
    return {step: value for step, value in steps.items() if step >= first}


ONE_MORE = ("data.eval=null", "evaluation.keep_best=null", f"steps={SAVED + 1}")


def assert_close_in_the_next_step(rest: dict[int, Any], whole: dict[int, Any]) -> None:
    """Compares the next step with tolerances.

    Its second mini-batch meets weights of the first update, so a generated token may differ. Different orders of sums
    were seen to move ratio_max and log-probs by 2e-5. A learning rate 0.3% off moves ratio_max by 2e-3.
    """
    assert rest.keys() == {SAVED}
    assert rest[SAVED] == near(whole[SAVED], tokens=PROMPTS * SAMPLES, rel=1e-4, abs=1e-4)


FEW = "batch={prompts_per_step: 4, samples_per_prompt: 4, mini_batches: 2}"
FEW_ROWS = "data.eval.max_rows=16"
BY_SOLVED_RATE = ("data.solved_rate={outside: 0.3, retire_after: 2}", f"data.train.max_rows={2 * PROMPTS}")
"""Overrides with few rows, so that they come again."""
AHEAD = "schedule={mode: asynchronous, max_staleness: 2, in_flight_sync: false}"
CONFIGS = {
    "sequential": (
        "configs/quickstart.yaml",
        (
            *(FEW, FEW_ROWS, *BY_SOLVED_RATE, "evaluation={interval: 2, keep_best: {metric: eval/score}}"),
            f"checkpoint.save_hf_interval={SAVED}",
        ),
    ),
    "asynchronous": ("configs/quickstart.yaml", (APART, "data.eval=null", *BY_SOLVED_RATE, AHEAD)),
    "asynchronous, with models that work ahead": (
        "configs/quickstart.yaml",
        (
            *("placement={actor: 0, 'reference, inference': 1, 'rollout, reward': 2-3}", "actor.parallel.tp=1"),
            *("loss.old_logprobs=actor", "reference.refresh_every=2", "data.eval=null", AHEAD),
        ),
    ),
    "ppo": ("configs/quickstart_ppo.yaml", (FEW, "data.eval=null", "critic.critic_warmup_steps=1", EPS_OF_CRITIC)),
    "sft": (
        "configs/quickstart_sft.yaml",
        (FEW_ROWS, "evaluation={interval: 2, stop_at: null}", "data.max_response_tokens=16", "data.on_long_row=cut"),
    ),
    "dpo": (
        "configs/quickstart_dpo.yaml",
        (
            "placement={actor: 0-1, reference: 2-3}",
            *(FEW_ROWS, "evaluation={interval: 2, stop_at: null}"),
            *(f"data.{part}.chosen_key=response" for part in ("train", "eval")),
            *(f"data.{part}.rejected_key=label" for part in ("train", "eval")),
        ),
    ),
}
EXPORTS = {"sequential": [f"step_{SAVED:07d}"]}


@pytest.mark.parametrize("name", slow_but(CONFIGS, "sequential"))
def test_a_resumed_run_equals_one_that_never_stopped(saved_and_resumed, name, tmp_path):
    config, overrides = CONFIGS[name]
    (whole, whole_ids), (rest, rest_ids) = saved_and_resumed(config, overrides, ())
    assert rest == after(whole) and rest_ids == after(whole_ids)
    assert column([*rest.values()], "train/grad_norm")
    for metric in ("train/truncated_ratio", "train/long_rows") if "data.on_long_row=cut" in overrides else ():
        assert min(column([*rest.values()], metric)) > 0
    assert [path.name for path in sorted(tmp_path.glob("first/hf_steps/*"))] == EXPORTS.get(name, [])
    assert_checkpoint_is_in_the_metrics(tmp_path / "first")
    for step in EXPORTS.get(name, []):
        names = (f"first/checkpoints/{step}", f"first/hf_steps/{step}", "later")
        saved, exported, later = (str(tmp_path / path) for path in names)
        assert main(["convert", "run-to-hf", "--input", saved, "--output", later]) == 0
        assert main(["convert", "verify", later, exported]) == 0
    if "keep_best" in str(overrides):
        assert_the_same_is_the_best(whole, tmp_path / "first", tmp_path / "0")


def assert_the_same_is_the_best(whole: dict[int, dict[str, float]], first: Path, resumed: Path) -> None:
    """Asserts that both jobs know the same best policy. A best policy from before the checkpoint is in the first job's
    folder."""
    scores = {step: metrics["eval/score"] for step, metrics in whole.items() if "eval/score" in metrics}
    best = max(scores, key=lambda step: (scores[step], -step))
    kept = json.loads((first / "hf_best/best.json").read_text())
    assert kept == {"step": best, "metric": "eval/score", "value": scores[best]}
    again = resumed / "hf_best/best.json"
    assert again.exists() == (best >= SAVED)
    assert not again.exists() or json.loads(again.read_text()) == kept


def assert_checkpoint_is_in_the_metrics(output: Path) -> None:
    """Checks the seconds that the step waited for the checkpoint, and the seconds of the concurrent writing."""
    records = read_records(output)
    copied = next(record for record in records if "perf/checkpoint_copy_s" in record)
    assert copied["step"] == SAVED
    assert 0 < copied["perf/checkpoint_copy_s"] <= copied["perf/checkpoint_s"] and "perf/checkpoint_wait_s" in copied
    written = next(record for record in records if "perf/checkpoint_bytes" in record)
    sizes = read_manifest(output / "checkpoints" / f"step_{SAVED:07d}")
    assert written["perf/checkpoint_bytes"] == sum(size.num_bytes for name, size in sizes.items() if name != RUN_FILE)
    assert written["step"] >= SAVED and written["perf/checkpoint_write_s"] > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "schedule", ["schedule={partial_rollouts: true, max_staleness: 1}", "schedule={mode: pipelined, chunks: 2}"]
)
def test_with_one_engine_so_does_one_in_which_the_first_groups_to_finish_count_and_it_repeats(
    saved_and_resumed, schedule
):
    one_engine = (
        "placement={'actor, reference': 0-1, 'rollout, reward': 2}",
        "data.eval=null",
        *(FEW, *BY_SOLVED_RATE),
        "rollout.max_running_requests=8",
        schedule,
    )
    again = ("checkpoint.resume=none", f"checkpoint.save_interval={SAVED}")
    whole, resumed, repeated = saved_and_resumed(CONFIGS["sequential"][0], one_engine, (), again)
    assert repeated == whole
    assert resumed == tuple(map(after, whole))


@pytest.mark.slow
def test_so_does_one_whose_actor_visits_the_experts_that_the_engine_chose(saved_and_resumed, upcycled):
    """This holds for unfinished responses and for experience in flight."""
    overrides = (
        *(APART, FEW, "data.eval=null", f"model.path={upcycled}", "model.router_replay=rollout"),
        *("rollout.parallel.tp=2", "rollout.max_running_requests=12", AHEAD, "schedule.partial_rollouts=true"),
    )
    (whole, whole_ids), (rest, rest_ids) = saved_and_resumed(CONFIGS["sequential"][0], overrides, ())
    assert rest == after(whole) and rest_ids == after(whole_ids)
    assert min(column([*rest.values()], "train/replayed_choices")) > 0.9


DROPPED = "dropped_sample_ids"
"""Folder of the ids of samples in dropped groups, by the step that dropped them."""

SELECTING = ("batch.dynamic_sampling.max_drawn=3", "data.eval=null", APART, *BY_SOLVED_RATE)
SEVERAL_PASSES = ("batch.mini_batches=4", "batch.mini_batches_by=prompts", "batch.epochs=2")


@pytest.mark.slow
def test_so_does_one_with_groups_that_are_selected_by_their_rewards(saved_and_resumed, tmp_path):
    """The engine has two ranks, and each step makes several passes over its mini-batches."""
    schedule = "schedule={partial_rollouts: true, max_staleness: 1}"
    engine = (*SELECTING, *SEVERAL_PASSES, "rollout.parallel.tp=2", "rollout.max_running_requests=32", schedule)
    whole, resumed = saved_and_resumed(CONFIGS["sequential"][0], engine, ())
    assert resumed == tuple(map(after, whole))
    dropped = sample_ids(tmp_path / "first", DROPPED)
    assert after(dropped) == sample_ids(tmp_path / "0", DROPPED)
    metrics, trained_on = whole
    by_step = {step: record["rollout/dynamic_filter/dropped"] for step, record in metrics.items()}
    assert by_step == {step: len(dropped.get(step, [])) // SAMPLES for step in range(STEPS)} and any(by_step.values())
    for record in metrics.values():
        reasons = {k: v for k, v in record.items() if k.startswith("rollout/dynamic_filter/drop_")}
        assert sum(reasons.values()) == record["rollout/dynamic_filter/dropped"]
        assert all("zero_std" in name for name in reasons)
    counts = Counter(number for ids in (*trained_on.values(), *dropped.values()) for number in ids)
    assert set(counts.values()) == {1}, "no sample is both trained on and dropped, or counted twice"


@pytest.mark.slow
def test_two_engines_that_select_groups_ahead_of_training_account_for_every_sample(saved_and_resumed, tmp_path):
    ((_, trained_on),) = saved_and_resumed(CONFIGS["sequential"][0], (*SELECTING, PARTIAL))
    assert {len(ids) for ids in trained_on.values()} == {PROMPTS * SAMPLES}
    dropped = sample_ids(tmp_path / "first", DROPPED)
    counts = Counter(number for ids in (*trained_on.values(), *dropped.values()) for number in ids)
    assert set(counts.values()) == {1} and dropped


@pytest.mark.slow
def test_so_does_a_pipelined_one_but_for_the_order_of_its_sums(saved_and_resumed):
    """The groups of a chunk depend on which of two engines finishes them first. So do the contexts of an engine."""
    schedule = (APART, "schedule={mode: pipelined, chunks: 2}")
    (whole, _), (rest, _) = saved_and_resumed(CONFIGS["sequential"][0], (*schedule, *ONE_MORE), ())
    for record in (*whole.values(), *rest.values()):
        for name in [name for name in record if name.startswith("rollout/context_")]:
            del record[name]
    assert_close_in_the_next_step(rest, whole)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sequential", "asynchronous", "ppo"])
def test_so_does_one_in_another_layout(saved_and_resumed, name):
    config, overrides = CONFIGS[name]
    whole_models = ("actor.parallel={tp: 1}", "actor.distributed_optimizer=true")
    layouts = ("actor.parallel={tp: 1, pp: 2}",), whole_models, ("actor.parallel={cp: 2}",)
    (whole, _), *others = saved_and_resumed(config, (*overrides, *ONE_MORE), *layouts)
    for rest, _ in others:
        assert_close_in_the_next_step(rest, whole)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "engines"),
    [
        ("schedule={mode: asynchronous, max_staleness: 2}", "rollout.parallel.tp=2"),
        (PARTIAL, "rollout.parallel.tp=1"),
        ("schedule={partial_rollouts: true, max_staleness: 4, on_stale: mask}", "rollout.parallel.tp=2"),
    ],
)
def test_where_responses_go_on_every_sample_is_trained_on_once(saved_and_resumed, schedule, engines):
    """There are two engines before the checkpoint. After it there are two, or one of two ranks."""
    common = (APART, "data.eval=null", *BY_SOLVED_RATE, schedule, "rollout.max_running_requests=12")
    (_, whole_ids), (_, rest_ids) = saved_and_resumed(CONFIGS["sequential"][0], common, (engines,))
    before = [ids for step, ids in whole_ids.items() if step < SAVED]
    trained_on = [number for ids in (*before, *rest_ids.values()) for number in ids]
    assert sorted(trained_on) == [*range(STEPS * PROMPTS * SAMPLES)]
    assert {len(ids) for ids in rest_ids.values()} == {PROMPTS * SAMPLES}


@pytest.mark.slow
def test_other_rows_are_taken_from_the_first_one_on(saved_and_resumed, quickstart_files, tmp_path):
    """Even steps with already generated groups use the new rows. A third job with more steps continues with them."""
    more = STEPS + 2
    rows = (quickstart_files / "train.jsonl").read_text().splitlines()[-more * PROMPTS :]
    other = tmp_path / "other.jsonl"
    other.write_text("\n".join(rows))
    config, overrides = CONFIGS["asynchronous"]
    shown = f"logging.samples={PROMPTS * SAMPLES}"
    one_engine = "placement={'actor, reference': 0-1, 'rollout, reward': 2}"
    in_order = ("data.solved_rate=null", "data.shuffle=false", "data.train.max_rows=null")
    common = (*overrides, one_engine, *in_order, shown)
    changed = (f"data.train.path={other}", "checkpoint.save_interval=1")
    last = f"checkpoint.resume={tmp_path}/0/checkpoints/step_{STEPS - 1:07d}"
    saved_and_resumed(config, common, changed, (f"data.train.path={other}", last, f"steps={more}"))
    prompts = [json.loads(row)["prompt"] for row in rows]
    for job, steps in (("0", range(SAVED, STEPS)), ("1", range(STEPS - 1, more))):
        samples = read_lines(tmp_path / job / "samples.jsonl")
        for step in steps:
            taken = {sample["prompt"] for sample in samples if sample["step"] == step}
            assert taken == {*prompts[(step - SAVED) * PROMPTS :][:PROMPTS]}


TOGETHER = "placement={'actor, reference, rollout, reward': 0-2}"
THREE_DRAW = "placement={'actor, reference, reward': 0, rollout: 1-3}"
ONE_TRAINS = "placement={actor: 2, 'reference, reward': 0, rollout: '1,3'}"
OUT_OF_ORDER = "{partial_rollouts: true, oversampling: 1.5, max_staleness: 4, on_stale: mask"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after"),
    [
        (
            (THREE_DRAW, f"schedule={OUT_OF_ORDER}, mode: asynchronous}}"),
            (TOGETHER, "schedule={mode: sequential, partial_rollouts: false, max_staleness: 0}"),
        ),
        (
            (TOGETHER, f"schedule={OUT_OF_ORDER}, mode: sequential}}"),
            (ONE_TRAINS, "schedule={mode: asynchronous, partial_rollouts: false, max_staleness: 1}"),
        ),
    ],
)
def test_under_another_schedule_every_group_is_trained_on_once(saved_and_resumed, before, after, tmp_path):
    """The first job has several engines, and hands over groups in the order of their completion."""
    common = ("data.eval=null", "actor.parallel.tp=1", "batch.mini_batches=1", "rollout.max_running_requests=8")
    (_, whole_ids), (_, rest_ids) = saved_and_resumed(CONFIGS["sequential"][0], (*common, *before), after)
    trained_on = {**whole_ids, **rest_ids}
    assert sorted(rest_ids) == [*range(SAVED, STEPS)] and sorted(trained_on) == [*range(STEPS)]
    assert {len(ids) for ids in trained_on.values()} == {PROMPTS * SAMPLES}
    assert sorted(number for ids in trained_on.values() for number in ids) == [*range(STEPS * PROMPTS * SAMPLES)]


@pytest.mark.slow
def test_under_another_schedule_the_steps_ahead_are_drawn_anew(saved_and_resumed):
    config, overrides = CONFIGS["asynchronous"]
    _, (rest, ids) = saved_and_resumed(config, overrides, ("schedule={mode: sequential, max_staleness: 0}",))
    assert sorted(rest) == sorted(ids) == [*range(SAVED, STEPS)]
    first, last = (steps * PROMPTS * SAMPLES for steps in (SAVED, STEPS))
    assert sorted(number for step in ids.values() for number in step) == [*range(first, last)]


@pytest.mark.slow
def test_stale_samples_of_weights_in_fp8_are_trained_on_after_a_resume(warm_start, tmp_path):
    """Truncated importance sampling corrects them."""
    staleness, saved, steps = 4, 6, 10
    overrides = (
        *(*warm_start, "data.eval=null", f"steps={steps}", *FP8, APART),
        f"schedule={{mode: asynchronous, max_staleness: {staleness}, partial_rollouts: true, on_stale: mask}}",
        f"checkpoint={{save_hf: false, save_interval: {saved}}}",
    )
    train(QUICKSTART, *overrides, f"output_dir={tmp_path}/first")
    resume = f"checkpoint.resume={tmp_path}/first/checkpoints/step_{saved:07d}"
    records = train(QUICKSTART, *overrides, f"output_dir={tmp_path}/second", resume)
    assert records[0]["step"] == saved and len(column(records, "train/loss")) == steps - saved
    assert max(column(records, "train/staleness_max")) == staleness
