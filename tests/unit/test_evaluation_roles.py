"""Tests of held-out evaluation by the roles of a job, with and without separate ranks."""

import json
import re
from itertools import combinations
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rltrain.algorithms.registry import algorithm_of
from rltrain.checkpoint.run_files import write_files
from rltrain.checkpoint.run_folder import Resumed
from rltrain.config.schema import Config
from rltrain.data.experience import SIBLINGS_APART, Experience
from rltrain.data.images import Context
from rltrain.errors import ConfigError
from rltrain.exchange.exchange import Shipment
from rltrain.observability.evaluations import (
    BEST_FILE,
    BEST_STATE_FILE,
    Best,
    BestSoFar,
    best_at_k,
    best_verdict_of,
    end_verdict_of,
    pass_at_k,
    sizes_up_to,
)
from rltrain.planning.description import describe_evaluation, estimator_of_sets
from rltrain.planning.doubts import obstacle_to_repeating
from rltrain.planning.hardware import GPUS
from rltrain.planning.memory import rank_memories
from rltrain.planning.options import DryRunOptions, best_changes
from rltrain.planning.planned import Workload
from rltrain.planning.step_time import Clock
from rltrain.planning.validation import check_config
from rltrain.planning.validation_schedule import check_schedule
from rltrain.roles import actor as actor_module
from rltrain.roles import evaluation as evaluation_module
from rltrain.roles import rollout as rollout_module
from rltrain.roles.actor import ActorRole
from rltrain.roles.evaluation import EvaluationRole, metrics_of, record_of
from rltrain.roles.reward import RewardRole
from rltrain.roles.rollout import RolloutRole
from rltrain.rollout.engine import SamplingParams
from rltrain.runtime.grid import Grid
from rltrain.runtime.placement import role_grids
from rltrain.schedule.shape import RunShape
from tests.support.packed_experience import packed_experience
from tests.support.schedule_configs import make_config, place
from tests.support.scripted_engine import ScriptedEngine
from tests.support.shared_store import ShortPatience, open_store
from tests.unit.test_estimated_memory import anything, job_of
from tests.unit.test_metrics import FakeBulletin
from tools.benchmarks.model_shapes import qwen3_8b

HARD = {"name": "hard", "data": {"path": "h"}, "samples_per_prompt": 4}
HARD |= {"sampling": {"temperature": 0.7, "max_response_tokens": 9}}
KEEP_BEST = {"metric": "eval/hard/pass@4"}


class Rows:
    """Prompts of two tokens. The label is the number of the row."""

    sources = ("one",)

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows

    def __len__(self) -> int:
        return self.num_rows

    def __getitem__(self, row: int) -> SimpleNamespace:
        return SimpleNamespace(label=str(row), prompt=f"{row}?")

    def context(self, row: int) -> Context:
        return Context((row, row + 1))

    def image_sources(self, row: int) -> tuple[()]:
        return ()

    def prompt_text(self, row: int) -> str:
        return f"{row}?"


class LastToken:
    """A stand-in for a tokenizer. It decodes only the last token of a response."""

    def decode(self, tokens: list[int]) -> str:
        return str(tokens[-1])

    spelled = decode


def config_of(**evaluation: Any) -> Config:
    return make_config(evaluation={"sets": [HARD], **evaluation}, placement={"actor": 0, "rollout,reward": "1-2"})


def evaluating_job(config: Config, rank: int, shared: dict[str, str], **more: Any) -> Any:
    rows, encoder = (Rows(3), Rows(5)), SimpleNamespace(end_tokens=frozenset({1}))
    prompts = SimpleNamespace(
        training=None, order=None, train=rows[0], evaluations=rows, decoder=LastToken(), encoder=encoder
    )
    return SimpleNamespace(
        config=config,
        shape=RunShape.of(config),
        world=SimpleNamespace(rank=rank, store=None),
        placement=SimpleNamespace(roles=("rollout", "reward")),
        grids={"rollout": Grid((1,)), "reward": Grid((1, 2)), "actor": Grid((0,))},
        leader_of=lambda role: {"actor": 0}.get(role, 1),
        rows=SimpleNamespace(prompts=prompts, first_step=0),
        job_store=FakeBulletin(shared, rank),
        waiter=ShortPatience(),
        heartbeat=SimpleNamespace(advance=lambda: None),
        architecture=SimpleNamespace(eos_token_ids=(1,), vision=None),
        decoder=None,
        images=None,
        hold_images=lambda experience, step, rows: None,
        operations=SimpleNamespace(add=lambda *counted, backward: None),
        resumed=None,
        first_step=0,
        **more,
    )


class RecordingEngine(ScriptedEngine):
    """An engine with a record of its samples' seeds and samplings."""

    def __init__(self) -> None:
        super().__init__(lambda sample: 1 + sample % 3)
        self.sampled: list[SamplingParams] = []
        self.seeds: dict[int, int] = {}

    def submit(self, samples, sampling) -> None:
        self.sampled.append(sampling)
        self.seeds |= {sample.id: sample.seed for sample in samples}
        super().submit(samples, sampling)


def test_an_engine_draws_a_set_as_it_says_and_alike_at_every_step(monkeypatch: pytest.MonkeyPatch):
    engine = RecordingEngine()
    hosted = SimpleNamespace(engine=engine, parts={}, metrics=dict)
    monkeypatch.setattr(rollout_module, "build_engine", lambda *_: hosted)
    monkeypatch.setattr(RolloutRole, "site", lambda self: None)
    with open_store() as store:
        job = evaluating_job(config_of(), 0, {})
        job.world.store = store
        job.grids["rollout"] = Grid((0,))
        rollout = RolloutRole(job)
        drawn, seeds = [], []
        for step in (0, 5):
            engine.policy_version = step
            rollout.generate_evaluation(step, 1)
            drawn.append(rollout.shipments.pop(("evaluation_samples", step, 1)).experience)
            seeds.append(dict(engine.seeds))
    assert all((sampled.temperature, sampled.max_response_tokens) == (0.7, 9) for sampled in engine.sampled)
    assert seeds[0] == seeds[1] and len(set(seeds[0].values())) == 20
    for step, experience in zip((0, 5), drawn, strict=True):
        assert experience.prompt_ids.tolist() == [row for row in range(5) for _ in range(4)]
        assert set(experience.policy_version[experience.response_mask].tolist()) == {step}


def of_samples(*samples: tuple[int, int, int]) -> Experience:
    """Returns experience of (prompt, sample id, last token) triples."""
    experience = packed_experience([(2, 3)] * len(samples))
    tokens = torch.tensor([token for *_, last in samples for token in (0, 0, 0, 0, last)])
    prompts, ids, _ = (torch.tensor(column) for column in zip(*samples, strict=True))
    version = torch.full_like(experience.policy_version, 7)
    return experience.with_fields(
        tokens=tokens, prompt_ids=prompts, sample_ids=ids, group_ids=prompts, policy_version=version
    )


PASSES = of_samples((0, 0, 0), (0, 1, 9), (0, 2, 9), (0, 3, 9))
FAILS = of_samples((1, 4, 9), (1, 5, 9), (1, 6, 9), (1, 7, 9))


def score(config: Config, parts: dict[int, Experience], step: int, resumed: Resumed | None = None) -> tuple[Any, ...]:
    """Scores parts of set 1 on the reward's ranks. Returns the leader's role, its metrics, and its entries in the
    store.

    The last rank to come is the leader.
    """
    shared: dict[str, str] = {}
    for rank in sorted(parts, reverse=True):
        job = evaluating_job(config, rank, shared)
        job.resumed = resumed
        reward = RewardRole(job)
        samples = Shipment(parts[rank], torch.ones(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64))
        reward.shipments["evaluation_samples", step, 1] = samples
        metrics = reward.score_evaluation(step, 1)
        assert bool(metrics) == (rank == 1)
    return reward, metrics, shared


def test_ranks_bring_their_samples_together(tmp_path: Path):
    """The samples of a prompt are on several ranks. Sibling trajectories of an episode count once."""
    config = config_of(logged_prompts=1).model_copy(update={"output_dir": str(tmp_path)})
    right_once = of_samples((0, 0, 0), (0, 1, 9), (1, 4, 9))
    rest = of_samples((0, 2, 9), (0, 3, 9), (1, 5, 9), (1, 6, 1), (1, 6 + SIBLINGS_APART, 1), (1, 7, 1))
    _, metrics, _ = score(config, {1: right_once, 2: rest}, step=5)
    assert metrics["eval/hard/pass@1"] == metrics["eval/hard/mean@4"] == pytest.approx((1 / 4 + 2 / 4) / 2)
    assert metrics["eval/hard/pass@2"] == pytest.approx((1 / 2 + 5 / 6) / 2)
    assert metrics["eval/hard/pass@4"] == metrics["eval/hard/best@4"] == 1.0
    assert metrics["eval/hard/policy_version"] == 7
    assert metrics["eval/hard/prompts"] == 2
    assert "eval/hard/policy_version_max" not in metrics
    logged = [json.loads(line) for path in tmp_path.glob("evaluation_samples/*") for line in path.open()]
    assert {(record["set"], record["step"], record["prompt"]) for record in logged} == {("hard", 5, "0?")}
    assert sorted(record["reward"] for record in logged) == [0, 0, 0, 1]


def test_what_passes_is_for_the_config_to_say():
    experience = of_samples((0, 0, 0), (0, 1, 9)).with_fields(rewards=torch.tensor([0.5, 0.8]))
    records = [record_of(experience)]
    at = {t: metrics_of(records, num_samples=2, threshold=t) for t in (0.4, 0.5, 0.9)}
    assert [at[threshold]["pass@1"] for threshold in at] == [1.0, 0.5, 0.0]
    assert at[0.9]["best@2"] == pytest.approx(0.8)
    right = {row + 1: of_samples(*((row, 4 * row + n, row) for n in range(4))) for row in (0, 1)}  # with reward 1
    passed = [score(config_of(pass_threshold=at), right, step=5)[1]["eval/hard/pass@1"] for at in (0.9, 1.0)]
    assert passed == [1.0, 0.0]


def test_the_best_evaluation_is_the_first_of_the_best_and_survives_an_interruption(tmp_path: Path):
    config = config_of(keep_best=KEEP_BEST).model_copy(update={"output_dir": str(tmp_path)})
    also_passes = of_samples((1, 4, 1), (1, 5, 9), (1, 6, 9), (1, 7, 9))
    reward, _, shared = score(config, {1: PASSES, 2: FAILS}, step=2)
    best = {"step": 2, "metric": "eval/hard/pass@4", "value": 0.5}
    assert json.loads(shared[best_verdict_of(2)]) == best
    write_files(tmp_path / "saved" / "reward", reward.save_state())
    resumed = Resumed(tmp_path / "saved", 3)
    _, _, shared = score(config, {1: PASSES, 2: FAILS}, 4, resumed)
    assert json.loads(shared[best_verdict_of(4)]) is None, "equal to the best"
    _, _, shared = score(config, {1: PASSES, 2: also_passes}, 6, resumed)
    assert json.loads(shared[best_verdict_of(6)])["value"] == 1.0
    assert [*reward.save_state()] == [BEST_STATE_FILE]


@pytest.mark.parametrize(("goal", "ends"), [(0.5, True), (0.6, False)])
def test_who_waits_for_the_score_learns_whether_it_ends_training(tmp_path: Path, goal: float, ends: bool):
    config = config_of(stop_at=goal, stop_metric="eval/hard/pass@4").model_copy(update={"output_dir": str(tmp_path)})
    _, _, shared = score(config, {1: PASSES, 2: FAILS}, step=2)
    assert json.loads(shared[end_verdict_of(2)]) is ends


@pytest.mark.parametrize(("mode", "values", "kept"), [("max", [1, 3, 3, 2], [0, 1]), ("min", [2, 3, 1, 1], [0, 2])])
def test_the_mode_says_what_is_better(mode: Any, values: list[float], kept: list[int]):
    best = BestSoFar(config_of(keep_best={**KEEP_BEST, "mode": mode}).evaluation.keep_best)  # type: ignore[arg-type]
    assert [step for step, value in enumerate(values) if best.offer(step, value)] == kept
    assert best.offer(9, float("nan")) is None


def test_a_metric_that_no_evaluation_reports_ends_the_run_with_its_key():
    best = BestSoFar(config_of(keep_best={"metric": "eval/reward_form"}).evaluation.keep_best)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"evaluation.keep_best.metric: got 'eval/reward_form', .*one of eval/score"):
        best.verdict(0, {"eval/score": 1.0})


def actor_of(config: Config, rank: int, shared: dict[str, str], saved: list[str]) -> ActorRole:
    actor = ActorRole.__new__(ActorRole)
    actor.job, actor.config, actor.grid = evaluating_job(config, rank, shared), config, Grid((0, 3))
    actor.held_out_best = None
    actor._save = lambda folder, notes={}: saved.append(folder)  # type: ignore[method-assign]
    return actor


def test_step_by_step_only_the_best_is_saved(tmp_path: Path):
    saved: list[str] = []
    best = {"step": 2, "metric": "eval/score", "value": 0.5}
    shared = {best_verdict_of(2): json.dumps(best), best_verdict_of(4): json.dumps(None)}
    actor = actor_of(config_of(), 3, shared, saved)
    for step in (2, 4):
        actor.save_best(step, 0)
    assert saved == ["hf_best"]


def test_a_held_out_loss_ends_training_and_keeps_the_best(tmp_path: Path):
    """The loss is the mean over all response tokens: 3 tokens of two demonstrations."""
    saved: list[str] = []
    shared: dict[str, str] = {}
    evaluation = {"stop_at": 0.5, "keep_best": {"metric": "eval/loss", "mode": "min"}}
    config = make_config(algorithm="sft", placement={"actor": 0}, output_dir=str(tmp_path), evaluation=evaluation)
    actor = actor_of(config, 0, shared, saved)
    rows = packed_experience([(1, 1), (1, 2)])
    actor.training_data = SimpleNamespace(  # type: ignore[assignment]
        held_out=lambda part, num_parts: rows, datasets={"data.eval": None}
    )
    actor.algorithm = algorithm_of(config)
    actor.loss_function, actor.grid, actor.shipments = actor.algorithm.loss_function(), Grid((0,)), {}
    actor.held_out_best, actor._total = BestSoFar(config.evaluation.keep_best), torch.Tensor.double  # type: ignore
    for step, loss in enumerate([0.75, 0.5, 0.625]):
        logprobs = torch.tensor([9.0, -loss - 0.25, 9.0, -loss, -loss + 0.25])
        actor.logprobs = lambda experience, given=logprobs: given  # type: ignore[method-assign,misc]
        assert actor.score_held_out(step, 0) == {"eval/loss": pytest.approx(loss)}
        actor.save_best(step, 0)
    assert [json.loads(shared[end_verdict_of(step)]) for step in range(3)] == [False, True, False]
    assert saved == ["hf_best", "hf_best"] and actor.held_out_best.best == Best(1, "eval/loss", 0.5)  # type: ignore


def test_a_candidate_is_kept_or_removed_by_one_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    kept: list[tuple[str, str]] = []

    def replace(to: Path, saved: Path, *, like: Any, notes: Any) -> None:
        kept.append((f"{saved.name} -> {to.name}", notes[BEST_FILE]))

    monkeypatch.setattr(actor_module, "replace_checkpoint", replace)
    best = Best(2, "eval/score", 0.5)
    shared = {best_verdict_of(2): json.dumps(vars(best)), best_verdict_of(4): json.dumps(None)}
    config = config_of().model_copy(update={"output_dir": str(tmp_path)})
    (tmp_path / "hf_candidate").mkdir()
    for rank in (3, 0):
        actor_of(config, rank, shared, []).keep_candidate(2, 0)
    assert kept == [("hf_candidate -> hf_best", best.as_json())]
    actor_of(config, 3, shared, []).keep_candidate(4, 0)
    assert (tmp_path / "hf_candidate").exists(), "only the first rank removes it"
    actor_of(config, 0, shared, []).keep_candidate(4, 0)
    assert not (tmp_path / "hf_candidate").exists()


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


REFUSED = {
    "placement.evaluation: shares ranks 1 with reward, rollout, which would wait during an "
    "evaluation; expected separate ranks, or no role evaluation": {"placement": {**PLACED, "evaluation": "1-2"}},
    "placement.evaluation: the role is placed, but nothing is evaluated": {"data": {"train": {"path": "t"}}},
    "placement.evaluation: the role is placed with role env": {
        "placement": {**PLACED, "env": 1},
        "env": {"function": "calculator"},
    },
    "data.eval: the set uses the run's reward with reward_model, which cannot score": {
        "placement": {**PLACED, "evaluation": 2, "reward_model": 3},
        "reward_model": {"path": "rm"},
    },
    "evaluation.keep_best: got a section with engines of role evaluation in fp8, which hold only rounded "
    "weights; expected evaluation.dtype: auto": {
        "rollout": {"dtype": "fp8"},
        "evaluation": {"keep_best": {"metric": "eval/score"}},
    },
    "evaluation.kv_cache_gb: got 4.0 with evaluation.engine sglang; expected auto, and "
    "mem_fraction_static in rollout.sglang.args": {"evaluation": {"engine": "sglang", "kv_cache_gb": 4.0}},
    "rollout.kv_cache_gb: got 4.0 with evaluation.engine sglang": {
        "rollout": {"kv_cache_gb": 4.0},
        "evaluation": {"engine": "sglang"},
    },
    "evaluation.max_running_requests: got 8, but role evaluation is not placed; expected evaluation: ranks in "
    "placement, or rollout.max_running_requests": {
        "placement": {"actor": 0, "rollout, reward": 1},
        "evaluation": {"max_running_requests": 8},
    },
    "evaluation.max_context_tokens: got 1000; expected at least data.max_prompt_tokens 1024 + "
    "rollout.sampling.max_response_tokens 1024 = 2048": {"evaluation": {"max_context_tokens": 1000}},
    "evaluation.parallel.pp: got 2; expected 1": {"evaluation": {"parallel": {"pp": 2}}},
    "role evaluation has nothing to do in algorithm dpo": {"algorithm": "dpo"},
    "role evaluation has nothing to do in algorithm evaluate": {"algorithm": "evaluate"},
}


@pytest.mark.parametrize(("expected", "sections"), REFUSED.items(), ids=range(len(REFUSED)))
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
    data, gpu = {"train": {"path": "t"}, "eval": {"path": "e"}}, GPUS["h100"]
    sections = {"data": data, "evaluation": {"interval": 2}, "actor": {"parallel": {"tp": 4}}}
    job, more_at_once = (
        job_of(qwen3_8b(), apart, 8, **sections | {"evaluation": {"interval": 2, "max_running_requests": number}})
        for number in (64, 32768)
    )
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
    assert lines[0].startswith("by role evaluation, 2 engines of tp 1 on ranks 6-7, in parallel with training")
    assert "32.8 GB of weights" in lines[1] and lines[-1].endswith(" s")


class FakeEngine:
    """An engine with one parameter."""

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
    for step in (2, 2, 4):  # the first two sets, then the next evaluation
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
        job = {"job_store": board, "waiter": ShortPatience(), "world": SimpleNamespace(rank=rank)}
        role = role_of(monkeypatch, **job, leader_of=lambda role: 2)
        joined: list[int] = []
        role.serve = lambda joined=joined: (joined.append(1), board.put(best_verdict_of(4), verdict))[0]  # type: ignore[misc]
        role.keep_evaluated(4, 0)
        assert bool(joined) == (rank == 2), "the rank joins weight syncs while it waits"
        shared.clear()
    assert saved == kept


rewards = st.lists(st.floats(-5, 5, width=32), min_size=1, max_size=7)


@settings(max_examples=30)
@given(st.lists(st.booleans(), min_size=1, max_size=7), st.data())
def test_pass_at_k_is_the_share_of_subsets_with_a_sample_that_passed(passed: list[bool], data: st.DataObject):
    k = data.draw(st.integers(1, len(passed)))
    of_subsets = [any(subset) for subset in combinations(passed, k)]
    assert pass_at_k(len(passed), sum(passed), k) == pytest.approx(fmean(of_subsets))


@settings(max_examples=30)
@given(rewards, st.data())
def test_best_at_k_is_the_mean_over_subsets_of_their_largest_reward(drawn: list[float], data: st.DataObject):
    k = data.draw(st.integers(1, len(drawn)))
    assert best_at_k(drawn, k) == pytest.approx(fmean(max(subset) for subset in combinations(drawn, k)), abs=1e-9)


def test_many_samples_are_no_matter():
    assert pass_at_k(1024, 1, 512) == pytest.approx(0.5)
    assert pass_at_k(4096, 0, 64) == 0.0
    assert best_at_k([0.0] * 1023 + [1.0], 512) == pytest.approx(0.5)


@pytest.mark.parametrize(("num_samples", "sizes"), [(1, [1]), (2, [1, 2]), (6, [1, 2, 4, 6]), (8, [1, 2, 4, 8])])
def test_powers_of_two_are_reported_and_all_samples(num_samples: int, sizes: list[int]):
    assert sizes_up_to(num_samples) == sizes


@pytest.mark.parametrize("impossible", [(4, 5, 1), (4, -1, 1), (4, 2, 0), (4, 2, 5)])
def test_what_cannot_be_is_an_error(impossible: tuple[int, int, int]):
    with pytest.raises(ValueError, match="samples"):
        pass_at_k(*impossible)
