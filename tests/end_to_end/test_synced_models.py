"""Models that get the actor's weights: inference on its own ranks, and a refreshed reference."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.end_to_end.test_resume import saved_and_resumed  # noqa: F401
from tests.support.jobs import QUICKSTART, Run, column, train, train_each
from tests.support.tolerances import ADAM_EPS

OPTIMIZER = f"actor.optimizer={{lr: 1e-3, warmup_steps: 0, eps: {ADAM_EPS}}}"
SMALL = (
    *("batch={prompts_per_step: 8, samples_per_prompt: 4, mini_batches: 1}", "steps=3", OPTIMIZER),
    *("loss.old_logprobs=actor", "actor.parallel.tp=1", "data.eval=null", "checkpoint.save_hf=false"),
)
pytestmark = pytest.mark.slow


def test_inference_tells_what_the_actor_would(warm_start: list[str], tmp_path: Path) -> None:
    """Inference has another layout and other ranks. Its log-probs are those of the weights before each update."""
    of_inference = "placement={'actor, reference': 0, 'rollout, reward': 1, inference: 2-3}"
    places = {
        "of actor": ["placement={'actor, reference': 0, 'rollout, reward': 1}"],
        "apart": [of_inference, "inference.parallel={tp: 2}"],
    }
    jobs = {name: [*warm_start, *SMALL, *where] for name, where in places.items()}
    of_actor, apart = train_each(QUICKSTART, jobs, tmp_path, num_ranks=4).values()
    assert column(apart, "train/grad_norm") == pytest.approx(column(of_actor, "train/grad_norm"), rel=1e-3)
    assert max(column(apart, "train/ppo_kl")) < 1e-5
    assert "perf/inference_logprobs_s" in apart[1] and "perf/actor_logprobs_s" not in apart[1]


def test_inference_works_ahead_with_the_weights_of_the_rollout(warm_start: list[str], tmp_path: Path) -> None:
    """Its log-probs are therefore as old as the samples."""
    records = train(
        QUICKSTART,
        *(*warm_start, f"output_dir={tmp_path}", *SMALL, "loss.kl.coef=0"),
        "placement={actor: 0, 'rollout, reward': 1, inference: 2-3}",
        "schedule={mode: asynchronous, max_staleness: 1, in_flight_sync: false}",
    )
    distances = column(records, "train/ppo_kl")
    assert abs(distances[0]) < 1e-5 < min(map(abs, distances[1:])), "the first samples are no older than the actor"
    assert max(column(records, "train/train_rollout_logprob_abs_diff")) > 1e-4


PLACES = {
    "in the actor's place": ("placement={'actor, reference, rollout, reward': 0-3}", "reference.offload=true"),
    "elsewhere": ("placement={actor: 0, 'rollout, reward': 1, reference: 2-3}", "reference.parallel={tp: 2}"),
}


@pytest.mark.parametrize("place", PLACES)
def test_a_refreshed_reference_is_the_actor_of_that_step(
    place: str,
    saved_and_resumed: Callable[..., list[Run]],  # noqa: F811
) -> None:
    """This also holds in a run resumed after the refresh."""
    settings = (*PLACES[place], "reference.refresh_every=2", OPTIMIZER)
    settings = (*settings, "data.eval=null", "actor.parallel.tp=1", "batch.mini_batches=1")
    (whole, _), (resumed, _) = saved_and_resumed("configs/quickstart.yaml", settings, ())
    distance, again = (
        {step: of["train/reference_kl"] for step, of in run.items() if "train/reference_kl" in of}
        for run in (whole, resumed)
    )
    refreshed = {step: value < 1e-6 for step, value in distance.items()}
    assert refreshed == {0: True, 1: False, 2: True, 3: False, 4: True}
    assert again and again == pytest.approx({step: distance[step] for step in again}, rel=1e-4, abs=1e-9)
