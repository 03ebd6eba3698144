"""Training with memory that comes and goes between all tasks equals training with memory that stays, bit for bit."""

from pathlib import Path
from typing import Any

import pytest

from tests.distributed.cases_offload import LEAVES, MODES, NUM_STEPS, STEP, SWAPPED, WAYS
from tests.support.tiny_checkpoints import make_checkpoints
from tests.support.torchrun import run_distributed

MOVED = [(way, mode) for way in WAYS for mode in MODES[way] if mode != "stays"]
EMPTIED = [(way, mode) for way, mode in MOVED if mode in (LEAVES, SWAPPED)]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    path: Path = tmp_path_factory.mktemp("checkpoints")
    return run_distributed(
        "tests.distributed.cases_offload:train_in_every_way",
        num_ranks=2,
        arguments={"path": make_checkpoints(path, ["qwen3"], num_hidden_layers=2)["qwen3"]},
        timeout_s=300,
    )


@pytest.mark.parametrize(("way", "mode"), MOVED)
@pytest.mark.parametrize("what", ["logprobs", "reference_logprobs", "updates", "weights", "states", "engine"])
def test_nothing_depends_on_where_the_memory_was(ranks: list[dict[str, Any]], way: str, mode: str, what: str) -> None:
    for rank in ranks:
        assert rank[way][mode][what] == rank[way]["stays"][what]


@pytest.mark.parametrize("way", WAYS)
def test_the_comparison_is_of_a_model_that_learns(ranks: list[dict[str, Any]], way: str) -> None:
    for rank in ranks:
        seen = rank[way]["stays"]
        assert len(set(seen["logprobs"])) == NUM_STEPS and len(set(seen["reference_logprobs"])) == 1
        losses = [update["loss"] for update in seen["updates"]]
        assert losses[-1] < losses[0]


@pytest.mark.parametrize(("way", "mode"), EMPTIED)
def test_storages_are_empty_while_a_task_does_not_need_them(ranks: list[dict[str, Any]], way: str, mode: str) -> None:
    for rank in ranks:
        assert rank[way][mode]["empty"] == [True] * (NUM_STEPS * len(STEP))
        assert not all(rank[way]["stays"]["empty"])
