"""Offloading from a GPU: its speed, its residue, and roles that fit only in turn."""

import json
from typing import Any

import pytest

from tests.forked.popen import run_module
from tests.gpu.offload_cases import GIB, ROLE_BYTES

pytestmark = pytest.mark.gpu

LEAST_SHARE_OF_PINNED = 0.85
MOST_RESIDUE_BYTES = GIB
"""Bytes more than an empty process, on a single GPU."""


def in_a_new_process(case: str, allocator: str = "", **arguments: Any) -> dict[str, Any]:
    """Runs a case in a new process, with these settings of the allocator and without blocks of other tests."""
    environment = {"PYTORCH_CUDA_ALLOC_CONF": allocator}
    printed = run_module("tests.gpu.offload_cases", case, json.dumps(arguments), **environment)
    return json.loads(printed.splitlines()[-1])


def test_moves_reach_the_bandwidth_of_a_pinned_copy() -> None:
    measured = in_a_new_process("bandwidth")
    for way in ("out", "in"):
        share = measured[f"residency_{way}"] / measured[f"pinned_{way}"]
        assert share >= LEAST_SHARE_OF_PINNED, measured


@pytest.mark.parametrize("fragmented", [False, True])
@pytest.mark.parametrize("allocator", ["", "expandable_segments:True"])
def test_little_stays_behind_and_it_does_not_grow(allocator: str, fragmented: bool) -> None:
    seen = in_a_new_process("take_turns", allocator, num_steps=20, fragmented=fragmented)
    assert seen["right"] == [True] * 20
    assert max(seen["after_offload"]) <= MOST_RESIDUE_BYTES
    assert max(seen["after_offload"][-5:]) <= max(seen["after_offload"][1:6]) + 2**20, "no growth over 20 cycles"
    assert max(seen["residues"]) <= MOST_RESIDUE_BYTES


def test_roles_that_do_not_fit_together_fit_in_turn() -> None:
    """The device is limited to 1.5 times the memory of each role."""
    seen = in_a_new_process("take_turns", num_steps=3, fragmented=False, limit=1.5 * ROLE_BYTES)
    assert seen["right"] == [True] * 3
