"""What a config may ask for but hardly means is said, once, by the dry run and by the job."""

import re
from pathlib import Path

import pytest

from rltrain.config.loader import load_config
from rltrain.config.schema import Config
from rltrain.planning.description import describe_job
from rltrain.planning.doubts import VARIABLES, doubts, doubts_about_variables
from rltrain.planning.options import DryRunOptions
from rltrain.runtime.placement import resolve_placement

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
SOURCES = (".py", ".sh", ".sbatch", ".cpp", ".cu", ".h")
SHIPPED = CONFIGS / "quickstart.yaml"
BOTH_ON = ["placement={'actor, reference': 1, 'rollout, reward': 3}", "actor.parallel.tp=1"]


def doubts_about(*overrides: str, world_size: int = 4) -> list[str]:
    config: Config = load_config(SHIPPED, overrides)
    return [*doubts(config, resolve_placement(config.placement, world_size, world_size))]


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
        f"the environment variable RLTRAIN_NATVE is read by nobody; expected one of {', '.join(VARIABLES)} "
        "(the nearest is RLTRAIN_NATIVE)"
    )


def test_all_variables_that_the_project_names_are_known() -> None:
    repository = CONFIGS.parent
    folders = ("launch", "tools", "csrc", ".ci", "rltrain")
    files = [file for folder in folders for file in (repository / folder).rglob("*") if file.suffix in SOURCES]
    files = [repository / ".ci" / "run", *(file for file in files if file.name != "doubts.py")]
    named = {name for file in files for name in re.findall(r"RLTRAIN_[A-Z_]*[A-Z]", file.read_text())}
    assert named - {"RLTRAIN_TEST"} == {*VARIABLES}


def test_evaluations_without_prompts_are_doubted() -> None:
    assert doubts_about("data.eval=null", "evaluation.interval=0") == []
    (doubt,) = doubts_about("data.eval=null", "evaluation.interval=5")
    assert doubt.startswith("evaluation.interval: got 5 without data.eval")


def test_changes_for_engines_that_have_left_their_gpus_are_doubted() -> None:
    delta, together = "weight_sync.delta={}", "placement={'actor, reference, rollout, reward': all}"
    assert doubts_about(delta) == [], "engines on ranks of their own"
    (doubt,) = doubts_about(delta, together)
    assert doubt.startswith("weight_sync.delta: got a section with rollout.offload auto on ranks 0-3")
    assert doubts_about(delta, together, "rollout.offload=false") == []
    config = load_config(SHIPPED, [delta, together])
    assert [*doubts(config, resolve_placement(config.placement, 4, 4), on_gpus=False)] == []


def test_rollouts_in_fp8_without_a_correction_are_doubted() -> None:
    (doubt,) = doubts_about("rollout.dtype=fp8", "loss.old_logprobs=actor")
    assert doubt.startswith("rollout.dtype: got fp8 with loss.correction.high null")
    assert doubts_about("rollout.dtype=fp8", "loss={old_logprobs: actor, correction: {high: 2.0}}") == []
    assert doubts_about("rollout.dtype=fp8", "loss.old_logprobs=rollout") == []


def test_a_residual_stream_that_sglang_rounds_is_doubted() -> None:
    wide = ("model.dtype=bfloat16", "model.residual_dtype=float32")
    assert doubts_about(*wide) == []
    (doubt,) = doubts_about(*wide, "rollout.engine=sglang")
    assert doubt.startswith("model.residual_dtype: got float32 with rollout.engine sglang, which rounds")


def test_keys_of_a_rollout_that_is_not_placed_raise_no_doubt() -> None:
    keys = ("model.dtype=bfloat16", "model.residual_dtype=float32", "rollout={engine: sglang, dtype: fp8}")
    loss, supervised = "loss.old_logprobs=actor", ("algorithm=sft", "placement={actor: 0-3}", "data.eval=null")
    assert len(doubts_about(*keys, loss)) == 2
    assert doubts_about(*supervised, *keys, loss) == []


def test_checks_that_find_no_token_are_doubted() -> None:
    asynchronous = ("schedule.mode=asynchronous", "schedule.max_staleness=1", "checks.max_kl=0.1")
    assert doubts_about(*asynchronous) == []
    (doubt,) = doubts_about(*asynchronous, "schedule.in_flight_sync=false")
    assert doubt.startswith("checks.max_kl: got 0.1 with schedule.mode asynchronous and schedule.in_flight_sync false")


def test_the_dry_run_ends_with_them() -> None:
    overrides = ["model.path=nowhere", *BOTH_ON, "data.eval=null", "evaluation.interval=5"]
    text = describe_job(SHIPPED, overrides, DryRunOptions(4, 4))
    warnings = text.split("\n\n")[-1].splitlines()
    assert warnings[0] == "Warnings" and len(warnings) == 3
    assert "Warnings" not in describe_job(SHIPPED, ["model.path=nowhere"], DryRunOptions(4, 4))
