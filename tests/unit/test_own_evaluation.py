"""Role evaluation: what may be asked of it, what is foretold of it, and what becomes of weights that come early."""

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rltrain.config.schema import Config
from rltrain.errors import ConfigError
from rltrain.observability.evaluations import best_verdict_of
from rltrain.planning.description import describe_evaluation, estimator_of_sets
from rltrain.planning.doubts import obstacle_to_repeating
from rltrain.planning.hardware import GPUS
from rltrain.planning.memory import rank_memories
from rltrain.planning.options import DryRunOptions
from rltrain.planning.planned import Workload
from rltrain.planning.search import best_changes
from rltrain.planning.step_time import Clock
from rltrain.planning.validation import check_config
from rltrain.planning.validation_schedule import check_schedule
from rltrain.roles import evaluation as evaluation_module
from rltrain.roles.evaluation import EvaluationRole
from rltrain.runtime.grid import Grid
from rltrain.runtime.placement import role_grids
from tests.unit.schedule_configs import make_config, place
from tests.unit.shared_store import ShortPatience
from tests.unit.test_estimated_memory import anything, job_of
from tests.unit.test_reporter import FakeBulletin
from tools.benchmarks.model_shapes import qwen3_8b

PLACED = {"actor": 0, "rollout, reward": 1, "evaluation": "2-3"}
OWN = {"name": "own", "data": {"path": "o"}, "samples_per_prompt": 4, "sampling": {"temperature": 1.0}}


def check_sections(**sections: Any) -> Config:
    config = make_config(**{"placement": PLACED, **sections})
    check_config(config)
    placement = place(config.placement)
    check_schedule(config, placement, role_grids(config, placement))
    return config


@pytest.mark.parametrize(
    "sections",
    [
        {},
        {"evaluation": {"parallel": {"tp": 2}, "max_context_tokens": 8192, "sets": [OWN]}},
        {"schedule": {"mode": "asynchronous", "max_staleness": 1}, "evaluation": {"stop_at": 0.5}},
        {"algorithm": "sft", "placement": {"actor": 0, "evaluation": 1}},
    ],
)
def test_it_may_be_placed_on_ranks_of_its_own_in_any_mode(sections: dict[str, Any]):
    check_sections(**sections)


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        (
            {"placement": {**PLACED, "evaluation": "1-2"}},
            "placement.evaluation: shares ranks 1 with reward, rollout, which could not go on while it draws; expected "
            "ranks of its own. Or leave the role out",
        ),
        ({"data": {"train": {"path": "t"}}}, "placement.evaluation: the role is placed, and nothing is evaluated"),
        (
            {"placement": {**PLACED, "env": 1}, "env": {"function": "calculator"}},
            "placement.evaluation: got the role with role env",
        ),
        (
            {"placement": {**PLACED, "evaluation": 2, "reward_model": 3}, "reward_model": {"path": "rm"}},
            "data.eval: is scored by the run's reward, of which reward_model is part",
        ),
        (
            {"rollout": {"dtype": "fp8"}, "evaluation": {"keep_best": {"metric": "eval/score"}}},
            "evaluation.keep_best: got one with engines of role evaluation in fp8, which have no other weights to "
            "keep; expected evaluation.dtype: auto",
        ),
        (
            {"evaluation": {"engine": "sglang", "kv_cache_gb": 4.0}},
            "evaluation.kv_cache_gb: got 4.0 with evaluation.engine sglang, whose server decides; expected auto: set "
            "mem_fraction_static in rollout.sglang.args",
        ),
        (
            {"rollout": {"kv_cache_gb": 4.0}, "evaluation": {"engine": "sglang"}},
            "rollout.kv_cache_gb: got 4.0 with evaluation.engine sglang",
        ),
        (
            {"placement": {"actor": 0, "rollout, reward": 1}, "evaluation": {"max_running_requests": 8}},
            "evaluation.max_running_requests: got 8, of engines of role evaluation, which is not placed; expected "
            "evaluation: ranks in placement, or rollout.max_running_requests",
        ),
        (
            {"evaluation": {"max_context_tokens": 1000}},
            "evaluation.max_context_tokens: got 1000; expected at least data.max_prompt_tokens 1024 + "
            "rollout.sampling.max_response_tokens 1024 = 2048",
        ),
        ({"evaluation": {"parallel": {"pp": 2}}}, "evaluation.parallel.pp: got 2; expected 1"),
        ({"algorithm": "dpo"}, "role evaluation has nothing to do in algorithm dpo"),
        ({"algorithm": "evaluate"}, "role evaluation has nothing to do in algorithm evaluate"),
    ],
)
def test_what_it_cannot_have_is_refused_with_the_key(sections: dict[str, Any], expected: str):
    with pytest.raises(ConfigError, match=re.escape(expected)):
        check_sections(**sections)


def test_its_engines_are_the_rollouts_but_for_what_it_says():
    config = make_config(
        placement=PLACED, rollout={"dtype": "fp8", "parallel": {"tp": 2}}, evaluation={"dtype": "auto"}
    )
    assert config.served("evaluation") == config.rollout.model_copy(update={"dtype": "auto", "offload": False})
    assert config.parallel_of("evaluation") == (config.rollout.parallel, "rollout.parallel")
    assert config.served("rollout") is config.rollout


def test_where_it_may_end_a_run_that_run_does_not_repeat():
    placement = place(PLACED)
    ends, goes_on = (check_sections(evaluation={"stop_at": goal}) for goal in (0.5, None))
    assert "evaluation.stop_at" in (obstacle_to_repeating(ends, role_grids(ends, placement)) or "")
    assert obstacle_to_repeating(goes_on, role_grids(goes_on, placement)) is None


def test_its_bytes_and_seconds_are_foretold_and_are_no_part_of_a_step():
    apart = {"actor": "0-3", "rollout, reward": "4-5", "evaluation": "6-7"}
    data = {"train": {"path": "t"}, "eval": {"path": "e"}}
    gpu, sections = GPUS["h100"], {"data": data, "evaluation": {"interval": 2}, "actor": {"parallel": {"tp": 4}}}
    job = job_of(qwen3_8b(), apart, 8, **{**sections, "evaluation": {"interval": 2, "max_running_requests": 64}})
    crowd = {"interval": 2, "max_running_requests": 32768}
    more_at_once = job_of(qwen3_8b(), apart, 8, **{**sections, "evaluation": crowd})
    (memory,) = (memory for memory in rank_memories(job, gpu) if "evaluation" in memory.kind.roles)
    assert memory.parts["evaluation", "weights"] == pytest.approx(16.4e9, rel=0.05)
    assert memory.peak.task == "run_evaluation" and memory.fits(gpu), memory.peak
    (crowded,) = (more for more in rank_memories(more_at_once, gpu) if "evaluation" in more.kind.roles)
    assert not crowded.fits(gpu)
    assert any(change.text.startswith("evaluation.") for change in best_changes(more_at_once, gpu, anything))
    assert sum(memory.host.values()) == (1 + 4) * memory.parts["evaluation", "weights"]
    without = job_of(qwen3_8b(), {"actor": "0-3", "rollout, reward": "4-5"}, 8, **sections)
    workload = Workload.of(job.config)
    steps = [Clock(each, gpu, workload).step() for each in (job, without)]
    assert steps[0].step_s == pytest.approx(steps[1].step_s) and "evaluation" not in steps[0].busy
    lines = describe_evaluation(job.config, job.grids, estimator_of_sets(job, DryRunOptions(8, 8)))
    assert lines[0].startswith("by role evaluation, 2 engines of tp 1 on ranks 6-7, beside training")
    assert "32.8 GB of weights" in lines[1] and lines[-1].endswith(" s")


class FakeEngine:
    """Of one parameter."""

    def __init__(self) -> None:
        self.policy_version: int | None = None
        self.parameters = {"w": torch.zeros(2)}
        self.num_updates = 0

    def begin_update(self) -> None:
        self.policy_version = None

    def incoming(self, part: int) -> dict[str, torch.Tensor]:
        return self.parameters

    def arrived(self, part: int) -> None:
        self.num_updates += 1

    def end_update(self, version: int) -> None:
        self.policy_version = version


def role_of(monkeypatch: pytest.MonkeyPatch, **attributes: Any) -> EvaluationRole:
    role = EvaluationRole.__new__(EvaluationRole)
    monkeypatch.setattr(evaluation_module, "engine_parts", lambda *_: [None])
    role.engine = FakeEngine()  # type: ignore[assignment]
    role.config, role.grid, role.weights = make_config(placement=PLACED), Grid((2, 3)), {}
    role.job = SimpleNamespace(architecture=None, **attributes)  # type: ignore[assignment]
    return role


def test_weights_wait_for_the_turn_of_their_evaluation(monkeypatch: pytest.MonkeyPatch):
    role = role_of(monkeypatch)
    engine: Any = role.engine
    for step in (2, 4, 6):
        role.weights[step] = {"w": torch.full((2,), float(step))}
    seen = []
    for step in (2, 2, 4):  # of the first two sets, then of the next evaluation's
        role._take_weights(step)
        seen.append((engine.policy_version, engine.parameters["w"].tolist(), sorted(role.weights)))
    assert seen == [(2, [2.0, 2.0], [2, 4, 6]), (2, [2.0, 2.0], [2, 4, 6]), (4, [4.0, 4.0], [4, 6])]
    assert engine.num_updates == 2


@pytest.mark.parametrize(("kept", "version", "has_room"), [((), None, True), ((2, 4), 2, True), ((2, 4, 6), 2, False)])
def test_no_more_weights_come_early_than_the_host_is_to_keep(
    monkeypatch: pytest.MonkeyPatch, kept: tuple[int, ...], version: int | None, has_room: bool
):
    role = role_of(monkeypatch)
    role.config = make_config(placement=PLACED, evaluation={"max_waiting": 2})
    role.weights, role.engine.policy_version = {step: {} for step in kept}, version
    assert role.has_room() == has_room


@pytest.mark.parametrize(("verdict", "kept"), [(None, []), ({"step": 4, "metric": "m", "value": 0.5}, [4])])
def test_the_first_engine_keeps_the_best(monkeypatch: pytest.MonkeyPatch, verdict: Any, kept: list[int]):
    shared: dict[str, str] = {}
    board = FakeBulletin(shared, 2)
    saved: list[int] = []
    monkeypatch.setattr(EvaluationRole, "_save", lambda self, step, best: saved.append(best.step))
    for rank in (2, 3):
        role = role_of(
            monkeypatch,
            job_store=board,
            waiter=ShortPatience(),
            world=SimpleNamespace(rank=rank),
            leader_of=lambda role: 2,
        )
        joined: list[int] = []
        role.serve = lambda joined=joined: (joined.append(1), board.put(best_verdict_of(4), verdict))[0]  # type: ignore[misc]
        role.keep_evaluated(4, 0)
        assert bool(joined) == (rank == 2), "weight syncs are joined meanwhile"
        shared.clear()
    assert saved == kept
