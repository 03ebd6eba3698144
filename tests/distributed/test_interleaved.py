"""Two stages whose chunks take turns train as one rank does, though each is both before and behind the other."""

from pathlib import Path

import pytest

from tests.distributed.cases_interleaved import MICRO_BATCH_TOKENS
from tests.distributed.tiny_checkpoints import make_checkpoints
from tests.distributed.torchrun import run_distributed

FIRST, LATER = 1e-5, 1e-4
"""Relative: updates amplify what rounding makes of gradients."""
LAYOUTS = {
    "qwen2_tied": ["vpp2_uneven", "vpp4_dp2", "vpp2_tp2", "vpp2_cp2"],
    "deepseek_v3": ["vpp2", "vpp2_cp2_ep2", "vpp2_dp2_ep2", "vpp2_tp2"],
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
                first, *later = zip(report["steps"], expected["steps"], strict=True)
                assert first[0] == pytest.approx(first[1], rel=FIRST), case
                assert all(step == pytest.approx(wanted, rel=LATER) for step, wanted in later), case
                assert report["after"] == pytest.approx(expected["after"], abs=1e-3), case
