"""Tests of the text, the checks and the doubts of a dry run."""

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rltrain.config.loader import load_config
from rltrain.config.schema import Config
from rltrain.errors import ConfigError, DataError
from rltrain.planning.description import (
    by_task,
    describe_job,
    describe_memory,
    describe_mode,
    describe_order,
    describe_overlaps,
    describe_repeating,
)
from rltrain.planning.doubts import VARIABLES, doubts, doubts_about_variables, obstacle_to_repeating
from rltrain.planning.options import DryRunOptions
from rltrain.planning.rows_and_rewards import describe_environment, describe_reward
from rltrain.planning.validation_schedule import check_schedule
from rltrain.runtime.placement import resolve_placement, role_grids
from rltrain.schedule.iterations import build_order, fullest_step, steady_order
from rltrain.schedule.order import Order
from tests.support.schedule_configs import make_config, place

REPOSITORY = Path(__file__).resolve().parents[2]
CONFIGS, WARMED_UP = REPOSITORY / "configs", REPOSITORY / "tests/warmed_up"
COLOCATED = {"actor, rollout, reward": "0-1"}
APART = {"actor, critic": 0, "rollout": 1, "reward": 2}
WORLD = 4


def make(placement, **sections):
    values = {
        "steps": 100,
        "placement": placement,
        "model": {"path": "m", "dtype": "float32"},
        "data": {"train": {"path": "t"}, "eval": {"path": "e"}},
    }
    return Config.model_validate(values | sections), resolve_placement(placement, WORLD, WORLD)


def memory(placement, guests=(), **sections):
    """Returns lines without their indent, with single spaces between words."""
    config, placed = make(placement, **sections)
    return [" ".join(line.split()) for line in describe_memory(steady_order(config, placed), config, placed, guests)]


def overlaps(placement, **sections):
    config, placed = make(placement, **sections)
    return describe_overlaps(steady_order(config, placed), config, placed)


# --- Memory ----------------------------------------------------------------------------------------------------------


def test_colocated_roles_take_turns():
    assert memory(COLOCATED)[:7] == [
        "ranks 0-1: actor, rollout",
        "actor rollout",
        "weights optimizer gradients weights kv_cache",
        "weight_sync used host dropped used dropped",
        "generate host host dropped used used",
        "actor_logprobs used host dropped dropped dropped",
        "update used used used dropped dropped",
    ]


def test_a_role_that_stays_is_told_from_one_that_leaves():
    lines = memory(COLOCATED, actor={"offload": False})
    assert "generate stays stays stays used used" in lines
    assert "update used used used dropped dropped" in lines


def test_a_reference_in_the_actors_modules_takes_the_place_of_its_weights_alone():
    lines = memory({"actor, reference": 0, "rollout, reward": 1}, guests=["reference"])
    assert lines[0] == "rank 0: actor, reference (in the actor's modules)"
    assert "reference_logprobs host stays stays used" in lines
    assert "update used used used host" in lines


def test_half_precision_has_master_weights():
    lines = memory(COLOCATED, model={"path": "m", "dtype": "bfloat16"})
    assert "weights master_weights optimizer gradients weights kv_cache" in lines


def test_ranks_with_the_same_roles_are_told_of_together_and_those_that_keep_all_in_a_line():
    lines = memory({"actor": "0-3", "critic": 0, "rollout": "2-3", "reward": 0}, algorithm="ppo")
    titles = [line for line in lines if line.startswith("rank")]
    assert titles == [
        "rank 0: actor, critic",
        "rank 1: actor: everything stays on the device",
        "ranks 2-3: actor, rollout",
    ]


def test_nothing_is_explained_where_nothing_leaves():
    lines = memory({"actor": 0, "rollout, reward": 1})
    assert lines == ["rank 0: actor: everything stays on the device", "rank 1: rollout: everything stays on the device"]


def test_chunks_are_told_apart_where_they_differ():
    lines = memory(APART, algorithm="ppo", loss={"old_logprobs": "rollout"}, schedule={"mode": "pipelined"})
    assert "values, chunk 0 host host dropped used host dropped" in lines
    assert "values, chunks 1-3 host host dropped used host host" in lines
    assert "accumulate_critic host host dropped used host used" in lines
    assert not any(line.startswith("accumulate_critic, ") for line in lines)


def test_the_critics_head_start_does_not_hide_the_actors_update():
    lines = memory({"actor, critic": 0, "rollout, reward": 1}, algorithm="ppo", critic={"critic_warmup_steps": 9})
    assert any(line.startswith("update used used used") for line in lines)


# --- Overlaps --------------------------------------------------------------------------------------------------------


def test_colocated_nothing_overlaps_and_that_is_said():
    (line,) = overlaps(COLOCATED)
    assert line.startswith("none: ")


def test_generation_overlaps_training_where_it_is_ahead():
    sections = {"algorithm": "ppo", "critic": {"critic_warmup_steps": 50}}
    sequential = " ".join(overlaps(APART, **sections))
    ahead = " ".join(overlaps(APART, **sections, schedule={"mode": "asynchronous", "max_staleness": 1}))
    beside_generate = ahead[ahead.index("generate (rollout) beside") :].split(" beside ")[1]
    assert "update (actor)" in beside_generate and "update_critic (critic)" in beside_generate
    assert "update (actor)" not in sequential


def test_evaluations_between_are_told_of():
    schedule = {"mode": "asynchronous", "max_staleness": 1}
    words = " ".join(overlaps(APART, algorithm="ppo", evaluation={"interval": 20}, schedule=schedule))
    assert "generate_evaluation (rollout) beside" in words and "update (actor)" in words


@given(st.sets(st.tuples(st.sampled_from("abcdef"), st.sampled_from("ghi"))))
def test_every_pair_is_told_once(pairs):
    told = [tuple(sorted((task, other))) for task, others in by_task(pairs) for other in others]
    assert sorted(told) == sorted(pairs)


def test_pairs_are_told_at_the_task_that_has_most():
    assert list(by_task({("a", "z"), ("b", "z"), ("c", "z"), ("a", "y")})) == [("z", {"a", "b", "c"}), ("a", {"y"})]


# --- The order -------------------------------------------------------------------------------------------------------


MODES = {
    "sequential, chunks 1, max_staleness 0": {},
    "pipelined, chunks 4, max_staleness 0": {"mode": "pipelined"},
    "asynchronous, chunks 1, max_staleness 1, generation 1 step ahead, weight syncs in flight": {
        "mode": "asynchronous",
        "max_staleness": 1,
    },
    "asynchronous, chunks 1, max_staleness 3, generation 2 steps ahead, weight syncs between generate tasks, "
    "sync_every 2": {"mode": "asynchronous", "max_staleness": 3, "sync_every": 2, "in_flight_sync": False},
    "sequential, chunks 1, max_staleness 0, partial rollouts, 25% oversampled": {
        "mode": "sequential",
        "partial_rollouts": True,
    },
}


@pytest.mark.parametrize(("words", "schedule"), MODES.items(), ids=range(len(MODES)))
def test_the_mode_comes_with_its_limits(schedule, words):
    config, _ = make(COLOCATED, schedule=schedule)
    assert describe_mode(config) == words


def test_the_step_in_the_middle_is_complete_and_without_an_evaluation():
    config, placement = make(COLOCATED, evaluation={"interval": 1})
    order = build_order(config, placement)
    assert fullest_step(order) == 0, "every step has an evaluation"
    config, placement = make(APART, algorithm="ppo", critic={"critic_warmup_steps": 7}, evaluation={"interval": 7})
    assert fullest_step(build_order(config, placement)) == 8
    assert fullest_step(Order.of([])) == 0


def test_a_run_of_one_step_can_be_described():
    config, placement = make(COLOCATED, steps=1)
    lines = describe_order(build_order(config, placement), config)
    assert any("update[0]" in line for line in lines) and any("save_hf[1]" in line for line in lines)


def rows_of(*overrides: str, model: str = str(WARMED_UP), config: str = "quickstart") -> str:
    """Returns the section about rows as one line."""
    text = describe_job(CONFIGS / f"{config}.yaml", [f"model.path={model}", *overrides], DryRunOptions(4, 4))
    return " ".join(text.partition("\nRows\n")[2].split())


def test_rows_are_counted_by_source_and_reason_where_files_are_at_hand(tmp_path):
    kept = '{"prompt": "1+1=", "label": "2"}'
    bad = ('{"prompt": "1+1="}', "1+1=2", '{"label": "2"}', '{"prompt": ""}', '{"prompt": "2+2="}')
    (tmp_path / "bad.jsonl").write_text("\n".join([kept, *bad, kept, kept.replace("1+1", "1+" * 40)]))
    (tmp_path / "good.jsonl").write_text(f"{kept}\n" * 1000)
    sources = f"{{sources: [{{path: {tmp_path}/bad.jsonl}}, {{path: {tmp_path}/good.jsonl, max_rows: 999}}]}}"
    said = rows_of(f"data.train={sources}", "data.on_bad_row=skip", "data.eval.path=nowhere.jsonl")
    assert said.startswith(
        "data.train.sources.0 (bad): 2 rows; left out: 5 bad rows skipped (no key 'label': 2, no JSON object: 1, no "
        f"key 'prompt': 1, unusable value: 1), 1 prompts too long {tmp_path}/bad.jsonl:2: the row has no key 'label'"
    )
    assert "data.train.sources.1 (good): 999 rows, limited by max_rows; none left out" in said
    assert "data.eval (nowhere): rows unknown: there is no file 'nowhere.jsonl'" in said
    without_tokenizer = rows_of(f"data.train.path={tmp_path}/good.jsonl", model="nowhere")
    assert without_tokenizer.startswith("data.train (good): rows unknown: model.path: there is no folder 'nowhere'")


@pytest.mark.parametrize(
    ("what", "told"),
    [
        ("skip", "1 rows; left out: 0 bad rows skipped, 0 prompts too long, 1 responses too long"),
        ("cut", "2 rows; none left out; 1 of them with a cut response"),
    ],
)
def test_rows_with_long_responses_are_counted(tmp_path, what, told):
    (tmp_path / "rows.jsonl").write_text(
        "".join(f'{{"prompt": "1+1=", "response": "{response}"}}\n' for response in ("2", "2" * 90))
    )
    of_rows = f"data.train.path={tmp_path}/rows.jsonl", "data.max_response_tokens=8", f"data.on_long_row={what}"
    said = rows_of(*of_rows, "rollout.sampling.max_response_tokens=1", config="quickstart_sft")
    assert said.startswith(f"data.train (rows): {told}")


def test_automatic_micro_batches_are_told_as_numbers():
    options, gpu = ["actor.micro_batch_tokens=auto"], DryRunOptions(4, 4)
    text = describe_job(CONFIGS / "gsm8k_qwen3_0.6b.yaml", options, gpu)
    (size,) = re.findall(r"actor\.micro_batch_tokens: auto is (\d+)", text)
    assert int(size) > 16384 and int(size) % 1024 == 0
    assert describe_job(CONFIGS / "gsm8k_qwen3_0.6b.yaml", [f"actor.micro_batch_tokens={size}"], gpu)


def test_a_row_that_would_end_the_job_ends_the_dry_run(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1="}')
    with pytest.raises(DataError, match="rows.jsonl:1: the row has no key 'label'"):
        rows_of(f"data.train.path={tmp_path}/rows.jsonl")


def test_a_column_that_the_config_names_and_rows_lack_ends_the_dry_run(tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "1+1=", "label": "2", "kind": "math", "level": 1}\n' * 2)
    teachers = [
        f"teacher.path={{math: {WARMED_UP}, code: {WARMED_UP}}}",
        "placement={'actor, teacher': 0-1, 'rollout, reward': 2-3}",
    ]
    given = [f"data.train.path={rows}", "data.eval=null", "algorithm=distillation", "loss.kl.coef=0", *teachers]
    with pytest.raises(DataError, match=r"has no column 'teacher', which role teacher \(teacher.column\) takes"):
        rows_of(*given)
    assert "2 rows; none left out" in rows_of(*given, "teacher.column=kind")
    with pytest.raises(DataError, match=r"rows.jsonl:1: 'level' is 1; expected one of math, code \(teacher.path\)"):
        rows_of(*given, "teacher.column=level")
    sources = f"data.train={{sources: [{{path: {rows}}}, {{path: {rows}, name: again}}]}}"
    assert "again): 2 rows" in rows_of(*given[1:], sources, "teacher.column=kind")
    assert "2 rows" in rows_of(given[0], "data.curriculum.key=level", "data.curriculum.steps=5")
    with pytest.raises(DataError, match="the row has no key 'difficulty'"):
        rows_of(given[0], "data.curriculum.key=difficulty", "data.curriculum.steps=5")


def test_files_of_many_bytes_are_not_read(tmp_path):
    with (tmp_path / "rows.jsonl").open("wb") as file:
        file.truncate(3 * 2**30)
    assert "3.22 GB in 1 files; a dry run reads at most 2.15 GB" in rows_of(f"data.train.path={tmp_path}/rows.jsonl")


@pytest.mark.parametrize("name", [path.stem for path in CONFIGS.glob("quickstart*.yaml")])
def test_every_shipped_run_can_be_described(name):
    absent = ["model.path=nowhere", *(["teacher.path=nowhere"] if name == "quickstart_distillation" else [])]
    text = describe_job(CONFIGS / f"{name}.yaml", absent, DryRunOptions(4, 4))
    titles = [line.split(":")[0] for line in text.splitlines() if line and not line.startswith(" ")]
    answered = [] if name == "quickstart_moe_sft" else ["Evaluation"]
    scored = [] if name in ("quickstart_dpo", "quickstart_reward_model", "quickstart_moe_sft") else ["Reward"]
    assert titles == [
        "Ranks", "Pairs of roles", "Parallel grids", "Process groups", "Schedule", *answered, "Repeats", "Overlaps",
        "Memory", "Weight sync", "Rows", *scored,
    ]  # fmt: skip
    assert max(map(len, text.splitlines())) <= 130


SHIPPED = CONFIGS / "quickstart.yaml"


def config(*overrides: str) -> Config:
    return load_config(SHIPPED, overrides)


def test_a_reward_that_is_built_in() -> None:
    assert describe_reward(config()) == ["reward.function: exact_match, built in"]


def test_a_function_is_found_in_its_file_which_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(
        "raise SystemExit('run')\n"
        "from elsewhere import given\n"
        "if True:\n"
        "    def score(prompt, response, label):\n"
        "        within = 1\n"
        "also = score\n"
    )
    for name, line in (("score", 4), ("given", 2), ("also", 6)):
        assert describe_reward(config(f"reward.function=mine.py:{name}")) == [
            f"reward.function: mine.py:{name}, line {line}"
        ]
    with pytest.raises(ConfigError, match=r"reward\.function: 'mine.py:within': mine.py has no function 'within'"):
        describe_reward(config("reward.function=mine.py:within"))
    several = "reward={functions: [{function: math}, {function: 'mine.py:scor', weight: 2}]}"
    with pytest.raises(ConfigError, match=r"reward\.functions\.1\.function: 'mine.py:scor': mine.py has no function"):
        describe_reward(config(several))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("none.py:score", "'none.py:score': there is no file 'none.py'"),
        ("mine.py", "'mine.py' names a file without a function; expected mine.py:FUNCTION"),
        ("broken.py:score", "'broken.py:score': broken.py is not valid Python"),
        ("exact_mach", "'exact_mach' is unknown; expected exact_match, math, code, environment, an URL, "),
    ],
)
def test_what_the_job_would_refuse_is_refused(
    name: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text("def score(response): return 0\n")
    Path("broken.py").write_text("def score(:\n")
    with pytest.raises(ConfigError, match=re.escape(f"reward.function: {message}")):
        describe_reward(config(f"reward.function={name}"))


@pytest.mark.parametrize(
    "name, where",
    [("http://127.0.0.1:1/score", "asked over HTTP"), ("my.module:score", "imported when the job starts")],
)
def test_what_only_the_job_reaches(name: str, where: str) -> None:
    assert describe_reward(config(f"reward.function={name}")) == [f"reward.function: {name}, {where}"]


def test_what_answers_the_model_is_found_in_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text("class Task:\n    pass\n")
    script = tmp_path / "mine.py"
    for written, said in (
        ("{function: 'mine.py:Task'}", "env.function: mine.py:Task, line 1"),
        ("{function: calculator}", "env.function: calculator"),
        ("{agent: {function: 'mine.py:Task'}}", "env.agent.function: mine.py:Task, line 1"),
        ("{agent: {command: [python3, mine.py]}}", f"env.agent.command: python3 {script}"),
    ):
        assert describe_environment(config(f"env={written}")) == [said]
    for written, said in (
        ("{function: 'mine.py:Tusk'}", "env.function: 'mine.py:Tusk': mine.py has no function 'Tusk'"),
        ("{agent: {function: 'no.py:Task'}}", "env.agent.function: 'no.py:Task': there is no file 'no.py'"),
        ("{agent: {command: [python3, no.py]}}", "env.agent.command: got ['python3', 'no.py']: there is no file"),
    ):
        with pytest.raises(ConfigError, match=re.escape(said)):
            describe_environment(config(f"env={written}"))


SOURCES = (".py", ".sh", ".sbatch", ".cpp", ".cu", ".h")
BOTH_ON = ["placement={'actor, reference': 1, 'rollout, reward': 3}", "actor.parallel.tp=1"]


def doubts_about(*overrides: str, world_size: int = 4) -> list[str]:
    found = config(*overrides)
    return [*doubts(found, resolve_placement(found.placement, world_size, world_size))]


def test_the_shipped_config_is_beyond_doubt() -> None:
    assert doubts_about() == []


@pytest.mark.parametrize("world_size, who", [(5, "ranks 0,2,4 host"), (4, "ranks 0,2 host")])
def test_ranks_without_a_role_are_named(world_size: int, who: str) -> None:
    (doubt,) = doubts_about(*BOTH_ON, world_size=world_size)
    assert doubt.startswith(f"placement: {who} no role and will do nothing; expected a role on every rank")
    assert doubt.endswith("or start 2 ranks")
    assert "placement: rank 4 hosts no role" in doubts_about(world_size=5)[0]


def test_variables_that_nobody_reads_are_doubted() -> None:
    (doubt,) = doubts_about_variables(["PATH", "RLTRAIN_NATVE", "RLTRAIN_NATIVE", "RLTRAIN_TEST_ANYTHING"])
    assert doubt == (
        f"the environment variable RLTRAIN_NATVE has no effect; expected one of {', '.join(VARIABLES)} "
        "(the nearest is RLTRAIN_NATIVE)"
    )


def test_all_variables_that_the_project_names_are_known() -> None:
    folders = ("launch", "tools", "csrc", ".ci", "rltrain")
    files = [file for folder in folders for file in (REPOSITORY / folder).rglob("*") if file.suffix in SOURCES]
    files = [REPOSITORY / ".ci" / "run", *(file for file in files if file.name != "doubts.py")]
    named = {name for file in files for name in re.findall(r"RLTRAIN_[A-Z_]*[A-Z]", file.read_text())}
    assert named - {"RLTRAIN_TEST"} == {*VARIABLES}


def test_changes_for_engines_that_have_left_their_gpus_are_doubted() -> None:
    delta, together = "weight_sync.delta={}", "placement={'actor, reference, rollout, reward': all}"
    assert doubts_about(delta) == [], "engines have their own ranks"
    (doubt,) = doubts_about(delta, together)
    assert doubt.startswith("weight_sync.delta: got a section with rollout.offload auto on ranks 0-3")
    assert doubts_about(delta, together, "rollout.offload=false") == []
    found = config(delta, together)
    assert [*doubts(found, resolve_placement(found.placement, 4, 4), on_gpus=False)] == []


WIDE = "model.dtype=bfloat16 model.residual_dtype=float32"
DOUBTS = {
    "evaluation.interval: got 5 without data.eval": ("data.eval=null evaluation.interval=5", "evaluation.interval=0"),
    "rollout.dtype: got fp8 with loss.correction.high null": (
        "rollout.dtype=fp8 loss.old_logprobs=actor",
        "loss.correction.high=2.0 loss.old_logprobs=rollout",
    ),
    "model.residual_dtype: got float32 with rollout.engine sglang, which rounds": (
        f"{WIDE} rollout.engine=sglang",
        "rollout.engine=embedded",
    ),
    "checks.max_kl: got 0.1 with schedule.mode asynchronous and schedule.in_flight_sync false": (
        "schedule.mode=asynchronous schedule.max_staleness=1 checks.max_kl=0.1 schedule.in_flight_sync=false",
        "schedule.in_flight_sync=true",
    ),
}
"""Overrides with their doubt, and further overrides that resolve it."""


@pytest.mark.parametrize("told", DOUBTS)
def test_what_may_be_a_mistake_is_doubted(told: str) -> None:
    overrides, others = (words.split() for words in DOUBTS[told])
    (doubt,) = doubts_about(*overrides)
    assert doubt.startswith(told)
    assert [doubts_about(*overrides, other) for other in others] == [[]] * len(others)


def test_keys_of_a_rollout_that_is_not_placed_raise_no_doubt() -> None:
    keys = (*WIDE.split(), "rollout={engine: sglang, dtype: fp8}", "loss.old_logprobs=actor")
    assert len(doubts_about(*keys)) == 2
    assert doubts_about("algorithm=sft", "placement={actor: 0-3}", "data.eval=null", *keys) == []


def test_the_dry_run_ends_with_them() -> None:
    overrides = ["model.path=nowhere", *BOTH_ON, "data.eval=null", "evaluation.interval=5"]
    text = describe_job(SHIPPED, overrides, DryRunOptions(4, 4))
    warnings = text.split("\n\n")[-1].splitlines()
    assert warnings[0] == "Warnings" and len(warnings) == 3
    assert "Warnings" not in describe_job(SHIPPED, ["model.path=nowhere"], DryRunOptions(4, 4))


ONE_ENGINE = {"actor": 0, "rollout": 1, "reward": 2}
TWO_ENGINES = {"actor": 0, "rollout": "1-2", "reward": 3}
PARTIAL = {"partial_rollouts": True, "on_stale": "mask"}
AHEAD = {"mode": "asynchronous", "max_staleness": 1, "in_flight_sync": False}
SGLANG = {"engine": "sglang"}
SERVERS = {"engine": "http", "urls": ["http://a:1"]}
SEEDED = SGLANG | {"sglang": {"args": {"enable_deterministic_inference": True}}}


def obstacle(
    placement: dict[str, Any], schedule: dict[str, Any], rollout: dict[str, Any] | None = None, **sections: Any
) -> str | None:
    sections = {"batch": {"mini_batches": 1}, **sections}
    config = make_config(placement=placement, schedule=schedule, rollout=rollout or {}, **sections)
    grids = role_grids(config, place(placement))
    check_schedule(config, place(placement), grids)
    return obstacle_to_repeating(config, grids)


@pytest.mark.parametrize(
    "schedule", [{}, PARTIAL, {"mode": "pipelined"}, AHEAD, AHEAD | PARTIAL, AHEAD | {"chunks": 2}]
)
def test_a_run_with_one_engine_of_our_own_repeats_unless_weights_come_in_flight(schedule):
    assert obstacle(ONE_ENGINE, schedule) is None


@pytest.mark.parametrize("schedule", [{}, AHEAD, {"mode": "asynchronous"}])
def test_so_does_one_with_several_engines_that_settle_nothing_between_them(schedule):
    assert obstacle(TWO_ENGINES, schedule) is None
    assert obstacle(TWO_ENGINES, schedule, SEEDED) is None


@pytest.mark.parametrize(
    ("placement", "schedule", "rollout", "reason"),
    [
        (TWO_ENGINES, PARTIAL, {}, "schedule.partial_rollouts) depends on the speed of each of the 2 engines"),
        (TWO_ENGINES, AHEAD | PARTIAL, {}, "schedule.partial_rollouts"),
        (TWO_ENGINES, AHEAD | {"chunks": 2}, {}, "schedule.chunks) depends on the speed of each of the 2 engines"),
        (TWO_ENGINES, {"mode": "pipelined"}, {}, "schedule.chunks"),
        (TWO_ENGINES, {"mode": "pipelined", "chunks": 1}, {}, "schedule.mode"),
        (ONE_ENGINE, {"mode": "asynchronous", "max_staleness": 1}, {}, "schedule.in_flight_sync"),
        (ONE_ENGINE, {}, SGLANG, "enable_deterministic_inference"),
        (ONE_ENGINE, {}, SERVERS, "servers at URLs decide how they sample"),
        (ONE_ENGINE, PARTIAL, SEEDED, "schedule.partial_rollouts) depends on the speed of the SGLang server"),
    ],
)
def test_what_keeps_a_run_from_repeating_is_named_with_its_key(placement, schedule, rollout, reason):
    assert reason in (obstacle(placement, schedule, rollout) or "")


SELECTING = {"batch": {"dynamic_sampling": {}}, "data": {"train": {"path": "t", "label_key": "answer"}}}


@pytest.mark.parametrize("schedule", [{}, PARTIAL, AHEAD])
def test_selecting_groups_repeats_where_rewards_are_known_at_once(schedule):
    placement = {"actor": 0, "rollout,reward": 1}
    assert obstacle(placement, schedule, **SELECTING, reward={"function": "exact_match"}) is None
    of_a_process = obstacle(placement, schedule, **SELECTING, reward={"function": "math"})
    assert of_a_process is not None and of_a_process.startswith("the decode step at which other prompts replace")
    several = obstacle({"actor": 0, "rollout,reward": "1-2"}, {}, **SELECTING, reward={"function": "exact_match"})
    assert several is not None and "batch.dynamic_sampling) depends on the speed of each of the 2 engines" in several


def test_the_dry_run_says_it():
    config = make_config(placement=TWO_ENGINES, schedule=PARTIAL)
    grids = role_grids(config, place(TWO_ENGINES))
    assert describe_repeating(config, grids).startswith("no: the choice of responses that a generate task leaves")
    alike = config.model_copy(update={"schedule": config.schedule.model_copy(update={"partial_rollouts": False})})
    assert describe_repeating(alike, grids).startswith("yes, on CPUs bit for bit")


def test_a_run_without_a_rollout_repeats():
    assert obstacle_to_repeating(make_config(), {}) is None


@pytest.mark.parametrize(("judge", "reason"), [({}, None), (SGLANG, "(judge.sglang.args"), (SEEDED, None)])
def test_a_judge_s_server_answers_as_it_likes(judge, reason):
    judged = obstacle({**ONE_ENGINE, "judge": 3}, {}, judge={"path": "j", "prompt": "{response}?", **judge})
    assert (judged is None) if reason is None else reason in str(judged)
