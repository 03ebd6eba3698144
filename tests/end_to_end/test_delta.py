"""Jobs with delta weight syncs generate and learn the same as jobs with full syncs."""

from pathlib import Path

import pytest

from tests.end_to_end.test_fp8_rollouts import FP8
from tests.support.jobs import QUICKSTART, SHORT, column, train

pytestmark = pytest.mark.slow

COMPARED = ("weight_sync.delta.in_shared_memory=true", "weight_sync.delta.full_every=20")
TWO_RANKS = ("placement={'actor, reference': 0, 'rollout, reward': 1}", "actor.parallel.tp=1")
SMALL = (
    *("batch={prompts_per_step: 8, samples_per_prompt: 4, mini_batches: 1}", "steps=4"),
    *(*TWO_RANKS, *SHORT, "weight_sync.verify=true"),
)
OF_FSDP = ("placement={'actor, reference': 0-1, 'rollout, reward': 2}", "actor.backend=fsdp")
WAYS = {
    "of float32 weights, from fsdp": OF_FSDP,
    "of bfloat16 weights": ("model.dtype=bfloat16",),
    "in FP8": FP8,
    "in FP8, of merged adapters from fsdp": (*OF_FSDP, "model.lora={rank: 16, alpha: 32}", *FP8),
    "to engines of several ranks": (
        "placement={'actor, reference': 0, 'rollout, reward': 1-2}",
        "rollout.parallel.tp=2",
    ),
}


@pytest.mark.parametrize("way", WAYS)
def test_what_is_drawn_and_trained_is_the_same(way: str, warm_start: list[str], tmp_path: Path) -> None:
    """Equality is bit for bit. Both jobs compare checksums of the weights on both sides."""
    ranks = 3 if "placement" in "".join(WAYS[way]) else 2
    full, delta = (
        train(QUICKSTART, *warm_start, f"output_dir={tmp_path / name}", *SMALL, *WAYS[way], *more, num_ranks=ranks)
        for name, more in (("full", ()), ("delta", COMPARED))
    )
    for name in ("train/loss", "train/grad_norm", "rollout/reward_mean", "train/train_rollout_logprob_abs_diff"):
        assert column(delta, name) == column(full, name), name
    full = column(delta, "perf/weight_sync_is_full")
    assert full[:2] == [1.0, 0.0]
    if way.startswith("in FP8"):
        assert full == [1.0, 0.0, 0.0, 0.0]
        assert all(0 < share < 0.8 for share in column(delta, "perf/weight_sync_changed_share"))
    elif "model.dtype" not in "".join(WAYS[way]):
        assert full == [1.0, 0.0, 1.0, 1.0], "all float32 weights change, so some syncs are full without a try"


def test_weights_in_flight_are_those_of_their_step(warm_start: list[str], tmp_path: Path) -> None:
    flight = (f"output_dir={tmp_path}", *SMALL, "schedule={mode: asynchronous, max_staleness: 1}", *COMPARED)
    records = train(QUICKSTART, *warm_start, *flight, num_ranks=2)
    assert column(records, "perf/weight_sync_is_full") == [1.0, 0.0, 1.0], "steps 0 and 1 use the first weights"
