"""Every algorithm that learns from rewards makes some steps of the quickstart's task, with all kinds of reward
shaping."""

import json
import math
from pathlib import Path

import pytest

from rltrain.algorithms.registry import ALGORITHMS
from rltrain.observability.names import documented
from tests.support.jobs import QUICKSTART, REPOSITORY, column, read_records, sample_ids, train_in_turn

pytestmark = pytest.mark.slow

NAMES = [name for name, algorithm in ALGORITHMS.items() if algorithm.generates and name != "distillation"]
STEPS = 2
PROMPTS, SAMPLES = 8, 4
SMALL = (
    "placement={'actor, reference, rollout, reward': 0}",
    "actor.parallel.tp=1",
    f"batch={{prompts_per_step: {PROMPTS}, samples_per_prompt: {SAMPLES}, mini_batches: 2}}",
    "checkpoint.save_hf=false",
    "logging={progress: false, sample_ids: true}",
    "data.eval=null",
    f"steps={STEPS}",
)
SHAPED = (
    "loss.kl={coef: 0.05, estimator: k1, where: reward, adaptive: {target: 0.01, horizon: 100}}",
    "advantages.overlong_penalty={buffer_tokens: 30, factor: 0.5}",
)
IN_ENVIRONMENT = (
    "placement={'actor, reference, rollout, reward, env': 0}",
    "env={function: 'tests.support.sums_environment:TwoSums', num_workers: 1, max_turn_tokens: 40}",
    "rollout.sampling.max_response_tokens=96",
    "rollout.max_context_tokens=112",
    "reward={function: environment}",
)
RESUMED = "rloo"
"""Saves after its first step. Another run resumes from there."""
MORE = {
    "grpo": SHAPED,
    "rloo": (*SHAPED, "checkpoint.save_interval=1"),
    "reinforce_plus_plus": SHAPED,
    "reinforce_plus_plus_baseline": SHAPED,
    "remax": SHAPED,
    "maxrl": ("advantages={mask_truncated: true}",),
    "pass_at_k": (*SHAPED, "advantages.k=2"),
    "gpg": ("loss.policy=reinforce",),
    "optimal_token_baseline": (*SHAPED, "loss.old_logprobs=actor", "loss.correction={high: 2.0, normalize: step}"),
    "own": (*SHAPED, f"advantages.function={REPOSITORY}/tests/support/user_learning.py:centred_over_step"),
    "ppo": (*SHAPED, "placement={'actor, critic, reference, rollout, reward': 0}"),
}


def two_functions(folder: Path) -> str:
    (folder / "own.py").write_text("def brevity(response):\n    return -len(response) / 40\n")
    first = {"function": "exact_match", "options": {"after": ","}}
    second = {"function": f"{folder}/own.py:brevity", "weight": 0.5}
    return f"reward={json.dumps({'functions': [first, second], 'num_workers': 1})}"


@pytest.fixture(scope="module")
def runs(warm_start: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder with one run of each name, "resumed" and "remax in an environment", made in one process."""
    folder = tmp_path_factory.mktemp("algorithms")
    common = [*warm_start[:2], *SMALL]
    more = {**MORE, "gdpo": (two_functions(folder),)}
    jobs = {name: [*common, f"algorithm={name}", *more[name]] for name in NAMES}
    jobs["resumed"] = [*jobs[RESUMED], f"checkpoint.resume={folder / RESUMED}/checkpoints/step_0000001"]
    jobs["remax in an environment"] = [*common, "algorithm=remax", *IN_ENVIRONMENT]
    train_in_turn(QUICKSTART, jobs, folder, num_ranks=1)
    return folder


@pytest.mark.parametrize("name", [*NAMES, "remax in an environment"])
def test_every_algorithm_trains(runs: Path, name: str) -> None:
    records = read_records(runs / name)
    assert all(documented(metric) for record in records for metric in record.keys() - {"step", "time_s"})
    for metric in ("train/loss", "train/grad_norm", "train/entropy", "rollout/reward_mean"):
        values = column(records, metric)
        assert len(values) == STEPS and all(map(math.isfinite, values)), metric
    assert any(column(records, "train/grad_norm"))
    assert [len(ids) for ids in sample_ids(runs / name).values()] == [PROMPTS * SAMPLES] * STEPS
    assert ("rollout/greedy_reward_mean" in records[0]) == name.startswith("remax")
    if SHAPED[0] in MORE.get(name, ()):
        first, second = column(records, "train/kl_coef")
        assert first == 0.05 and second != 0.05
        assert all(-0.5 <= penalty < 0 for penalty in column(records, "train/overlong_penalty"))


def test_an_adaptive_coefficient_goes_on_from_a_checkpoint(runs: Path) -> None:
    records = [read_records(runs / name) for name in (RESUMED, "resumed")]
    whole, resumed = (next(record for record in run if record["step"] == 1) for run in records)
    assert whole["train/kl_coef"] == resumed["train/kl_coef"] != 0.05
    for metric in ("train/reward_kl", "train/overlong_penalty"):
        assert resumed[metric] == pytest.approx(whole[metric], rel=1e-4), metric
