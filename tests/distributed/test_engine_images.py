"""Tokens and log-probs of samples with images do not depend on tensor parallelism."""

from pathlib import Path

import pytest

from rltrain.models.vision import Tower
from rltrain.runtime.grid import Grid
from tests.distributed.cases_engine_images import converse
from tests.support.vision_checkpoints import write_checkpoint
from tests.support.vision_engines import filled_store
from tests.support.worlds import run_case

FEW: tuple[Tower, ...] = ("qwen3_vl",)
MANY: tuple[Tower, ...] = ("qwen2_5_vl", "qwen3_vl_moe", "qwen3_5")


@pytest.mark.parametrize("kinds", [FEW, pytest.param(MANY, marks=pytest.mark.slow)], ids=["few", "many"])
def test_tensor_parallel_engines_equal_a_single_rank(tmp_path: Path, kinds: tuple[Tower, ...]) -> None:
    for kind in kinds:
        write_checkpoint(tmp_path / kind, kind)
    store = filled_store(tmp_path / "store")
    checkpoints = [tmp_path / kind for kind in kinds]
    by_rank = run_case(
        "cases_engine_images:converse_with_tensor_parallelism",
        num_ranks=2,
        checkpoints=[str(checkpoint) for checkpoint in checkpoints],
        store=str(store.folder),
    )
    assert by_rank[0] == by_rank[1]
    for checkpoint, found in zip(checkpoints, by_rank[0], strict=True):
        for done, alone in zip(found, converse(checkpoint, store, Grid((0,)), 0, None, None), strict=True):
            assert done["tokens"] == alone["tokens"]
            assert done["logprobs"] == pytest.approx(alone["logprobs"], abs=1e-4)
