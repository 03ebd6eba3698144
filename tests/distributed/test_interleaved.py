"""Two stages whose chunks take turns train as one rank does, though each is both before and behind the other."""

from pathlib import Path

import pytest

from rltrain.config import schema
from rltrain.models import read_architecture
from rltrain.planning.planned import layers_of_chunks
from tests.distributed.cases_interleaved import GRIDS, MICRO_BATCH_TOKENS
from tests.support.tiny_checkpoints import make_checkpoints
from tests.support.torchrun import run_distributed

RELATIVE = 1e-5
UNEVEN = "vpp2_uneven"
LAYOUTS = {
    "qwen2_tied": [UNEVEN, "vpp4_dp2", "vpp2_tp2", "vpp2_cp2"],
    "deepseek_v3": ["vpp2", "vpp2_cp2_ep2"],
}


@pytest.mark.slow
def test_steps_and_log_probs_are_those_of_one_rank(tmp_path: Path) -> None:
    arguments = {"checkpoints": make_checkpoints(tmp_path, LAYOUTS), "layouts": LAYOUTS}
    ranks = run_distributed("tests.distributed.cases_interleaved:trained", 4, arguments)
    for name in LAYOUTS:
        expected = ranks[0][f"{name}/alone"]
        for case in (f"{name}/{layout}/{tokens}" for layout in LAYOUTS[name] for tokens in MICRO_BATCH_TOKENS):
            found = [rank[case] for rank in ranks if case in rank]
            assert len(found) > 1
            for report in found:
                for step, wanted in zip(report["steps"], expected["steps"], strict=True):
                    assert step == pytest.approx(wanted, rel=RELATIVE), case
                assert report["after"] == pytest.approx(expected["after"], abs=1e-4), case


@pytest.mark.slow
def test_layers_that_are_recomputed_are_those_that_the_dry_run_counts(tmp_path: Path) -> None:
    """One of every chunk's, of chunks of 2, 0, 1 and 1 layers."""
    (name,) = checkpoints = make_checkpoints(tmp_path, ["qwen2_tied"])
    arguments = {"checkpoint": checkpoints[name], "layout": UNEVEN, "layers": 1}
    ranks = run_distributed("tests.distributed.cases_interleaved:recomputed", 4, arguments)
    grid, recompute = GRIDS[UNEVEN], schema.Recompute(layers=1)
    architecture = read_architecture(Path(checkpoints[name]))
    for stage, rank in enumerate(grid.ranks):
        chunks, found = layers_of_chunks(architecture, grid, stage), ranks[rank]
        again = sum(count - found["micro_batches"] for count in found["runs"].values())
        assert set(found["runs"].values()) <= {found["micro_batches"], 2 * found["micro_batches"]}
        assert again == found["micro_batches"] * sum(recompute.full_layers(len(chunk)) for chunk in chunks)
    assert ranks[2]["runs"]["1"] < ranks[2]["runs"]["0"] == ranks[2]["runs"]["2"], (
        "the second of the first chunk is kept"
    )
