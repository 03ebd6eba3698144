"""Training with memory offloaded between all tasks equals training with resident memory, bit for bit."""

from pathlib import Path

import pytest

from tests.distributed.cases_offload import LEAVES, MODES, NUM_STEPS, STEP, SWAPPED, WAYS
from tests.support.tiny_checkpoints import make_checkpoints
from tests.support.worlds import Ranks, made_once, run_case

MOVED = [(way, mode) for way in WAYS for mode in MODES[way] if mode != "stays"]
EMPTIED = [(way, mode) for way, mode in MOVED if mode in (LEAVES, SWAPPED)]


@made_once
def ranks(folder: Path) -> Ranks:
    path = make_checkpoints(folder, ["qwen3"], num_hidden_layers=2)["qwen3"]
    return run_case("cases_offload:train_in_every_way", 2, path=path)


@pytest.mark.parametrize(("way", "mode"), MOVED)
@pytest.mark.parametrize("what", ["logprobs", "reference_logprobs", "updates", "weights", "states", "engine"])
def test_nothing_depends_on_where_the_memory_was(ranks: Ranks, way: str, mode: str, what: str) -> None:
    for rank in ranks:
        assert rank[way][mode][what] == rank[way]["stays"][what]


@pytest.mark.parametrize("way", WAYS)
def test_the_comparison_is_of_a_model_that_learns(ranks: Ranks, way: str) -> None:
    for rank in ranks:
        seen = rank[way]["stays"]
        assert len(set(seen["logprobs"])) == NUM_STEPS and len(set(seen["reference_logprobs"])) == 1
        losses = [update["loss"] for update in seen["updates"]]
        assert losses[-1] < losses[0]


@pytest.mark.parametrize(("way", "mode"), EMPTIED)
def test_storages_are_empty_while_a_task_does_not_need_them(ranks: Ranks, way: str, mode: str) -> None:
    for rank in ranks:
        assert rank[way][mode]["empty"] == [True] * (NUM_STEPS * len(STEP))
        assert not all(rank[way]["stays"]["empty"])
