"""What --dry-run says of the order of tasks, of what overlaps, and of what is on whose device when."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rltrain.config.schema import Config
from rltrain.errors import DataError
from rltrain.planning.description import (
    by_task,
    describe_job,
    describe_memory,
    describe_mode,
    describe_order,
    describe_overlaps,
)
from rltrain.planning.options import DryRunOptions
from rltrain.runtime.placement import resolve_placement
from rltrain.schedule.iterations import build_order, fullest_step, steady_order
from rltrain.schedule.order import Order

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
    """Lines without their indent, words without their columns."""
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
    assert "generate_evaluation (rollout) beside" in words
    assert "generate_evaluation (rollout)" in words and "update (actor)" in words


@given(st.sets(st.tuples(st.sampled_from("abcdef"), st.sampled_from("ghi"))))
def test_every_pair_is_told_once(pairs):
    told = [tuple(sorted((task, other))) for task, others in by_task(pairs) for other in others]
    assert sorted(told) == sorted(pairs)


def test_pairs_are_told_at_the_task_that_has_most():
    assert list(by_task({("a", "z"), ("b", "z"), ("c", "z"), ("a", "y")})) == [("z", {"a", "b", "c"}), ("a", {"y"})]


# --- The order -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schedule", "words"),
    [
        ({}, "sequential, chunks 1, max_staleness 0"),
        ({"mode": "pipelined"}, "pipelined, chunks 4, max_staleness 0"),
        (
            {"mode": "asynchronous", "max_staleness": 1},
            "asynchronous, chunks 1, max_staleness 1, generation 1 step ahead, weight syncs in flight",
        ),
        (
            {"mode": "asynchronous", "max_staleness": 3, "sync_every": 2, "in_flight_sync": False},
            "asynchronous, chunks 1, max_staleness 3, generation 2 steps ahead, weight syncs between generate tasks, "
            "sync_every 2",
        ),
        (
            {"mode": "sequential", "partial_rollouts": True},
            "sequential, chunks 1, max_staleness 0, partial rollouts, 25% oversampled",
        ),
    ],
)
def test_the_mode_comes_with_its_limits(schedule, words):
    config, _ = make(COLOCATED, schedule=schedule)
    assert describe_mode(config) == words


def test_the_step_in_the_middle_is_complete_and_without_an_evaluation():
    config, placement = make(COLOCATED, evaluation={"interval": 1})
    order = build_order(config, placement)
    assert fullest_step(order) == 0, "every step has one"
    config, placement = make(APART, algorithm="ppo", critic={"critic_warmup_steps": 7}, evaluation={"interval": 7})
    assert fullest_step(build_order(config, placement)) == 8
    assert fullest_step(Order.of([])) == 0


def test_a_run_of_one_step_can_be_described():
    config, placement = make(COLOCATED, steps=1)
    lines = describe_order(build_order(config, placement), config)
    assert any("update[0]" in line for line in lines) and any("save_hf[1]" in line for line in lines)


def rows_of(*overrides: str, model: str = str(WARMED_UP), config: str = "quickstart") -> str:
    """What is said of rows, its lines joined."""
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
    assert "data.train.sources.1 (good): 999 rows, no more by max_rows; none left out" in said
    assert "data.eval (nowhere): rows unknown: there is no file 'nowhere.jsonl'" in said
    without_tokenizer = rows_of(f"data.train.path={tmp_path}/good.jsonl", model="nowhere")
    assert without_tokenizer.startswith("data.train (good): rows unknown: model.path: there is no folder 'nowhere'")


@pytest.mark.parametrize(
    ("what", "told"),
    [
        ("skip", "1 rows; left out: 0 bad rows skipped, 0 prompts too long, 1 responses too long"),
        ("cut", "2 rows; none left out; 1 of them with a response that is cut"),
    ],
)
def test_rows_with_long_responses_are_counted(tmp_path, what, told):
    (tmp_path / "rows.jsonl").write_text(
        "".join(f'{{"prompt": "1+1=", "response": "{response}"}}\n' for response in ("2", "2" * 90))
    )
    of_rows = f"data.train.path={tmp_path}/rows.jsonl", "data.max_response_tokens=8", f"data.on_long_row={what}"
    said = rows_of(*of_rows, "rollout.sampling.max_response_tokens=1", config="quickstart_sft")
    assert said.startswith(f"data.train (rows): {told}")


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
    assert "3.22 GB in 1 files; a dry run reads 2.15 GB at most" in rows_of(f"data.train.path={tmp_path}/rows.jsonl")


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
