"""Two stages with alternating chunks train as one rank does. Each stage is both before and after the other."""

from pathlib import Path

import pytest

from rltrain.config import schema
from rltrain.models import read_architecture
from rltrain.planning.planned import layers_of_chunks
from tests.distributed.cases_interleaved import GRIDS, MICRO_BATCH_TOKENS
from tests.support.tiny_checkpoints import make_checkpoints
from tests.support.worlds import reports, run_case

RELATIVE = 1e-5
UNEVEN = "vpp2_uneven"
LAYOUTS = {"qwen2_tied": [UNEVEN, "vpp4_dp2", "vpp2_tp2", "vpp2_cp2"], "deepseek_v3": ["vpp2", "vpp2_cp2_ep2"]}


pytestmark = pytest.mark.slow


def test_steps_and_log_probs_are_those_of_one_rank(tmp_path: Path) -> None:
    checkpoints = make_checkpoints(tmp_path, LAYOUTS)
    ranks = run_case("cases_interleaved:trained", checkpoints=checkpoints, layouts=LAYOUTS)
    for name in LAYOUTS:
        expected = ranks[0][f"{name}/alone"]
        for case in (f"{name}/{layout}/{tokens}" for layout in LAYOUTS[name] for tokens in MICRO_BATCH_TOKENS):
            found = reports(ranks, case)
            assert len(found) > 1
            for report in found:
                for step, wanted in zip(report["steps"], expected["steps"], strict=True):
                    assert step == pytest.approx(wanted, rel=RELATIVE), case
                assert report["after"] == pytest.approx(expected["after"], abs=1e-4), case


def test_layers_that_are_recomputed_are_those_that_the_dry_run_counts(tmp_path: Path) -> None:
    """One layer of every chunk, of chunks of 2, 0, 1 and 1 layers."""
    (name,) = checkpoints = make_checkpoints(tmp_path, ["qwen2_tied"])
    ranks = run_case("cases_interleaved:recomputed", checkpoint=checkpoints[name], layout=UNEVEN, layers=1)
    grid, recompute = GRIDS[UNEVEN], schema.Recompute(layers=1)
    architecture = read_architecture(Path(checkpoints[name]))
    for stage, rank in enumerate(grid.ranks):
        chunks, found = layers_of_chunks(architecture, grid, stage), ranks[rank]
        again = sum(count - found["micro_batches"] for count in found["runs"].values())
        assert set(found["runs"].values()) <= {found["micro_batches"], 2 * found["micro_batches"]}
        assert again == found["micro_batches"] * sum(recompute.full_layers(len(chunk)) for chunk in chunks)
    of_first = ranks[2]["runs"]
    assert of_first["1"] < of_first["0"] == of_first["2"], "the second layer of the first chunk is not recomputed"
