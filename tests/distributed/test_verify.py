"""A tampered sync is noticed on every rank, with the name of the tensor."""

import re

import pytest

from tests.distributed.cases_verify import CASES
from tests.support.worlds import Ranks, reports, world

ranks = world("cases_verify:all_checks")
NAMED = {
    "nothing arrived": "model.embed_tokens.weight",
    "nothing": None,
    "flip_a_bit": "model.layers.1.mlp.down_proj.weight",
    "swap_two_rows": "model.layers.0.self_attn.k_proj.weight",
    "change_the_source": "model.layers.0.self_attn.o_proj.weight",
    "wipe_a_vector": "model.layers.1.input_layernorm.weight",
    "change_a_scale": "model.layers.1.mlp.down_proj.weight_scale_inv",
    "hide_two_changes": "model.layers.1.mlp.down_proj.weight",
}


@pytest.mark.parametrize("name", NAMED)
def test_the_tensor_that_differs_is_named_on_every_rank(name: str, ranks: Ranks) -> None:
    compared = 0
    for case in (f"{placement}, {kind}" for placement, kinds in CASES.items() for kind in kinds):
        said = {found[name] for found in reports(ranks, case)}
        assert len(said) == 1, f"{case}: all ranks say the same"
        expected = NAMED[name] if name != "change_a_scale" or case.endswith("fp8") else None
        if expected is None:
            assert said == {""}, case
        else:
            assert re.match(rf"after the weight sync {re.escape(expected)} differs on rank\(s\)", said.pop()), case
            compared += 1
    assert compared or name == "nothing"


def test_the_ranks_concerned_are_named(ranks: Ranks) -> None:
    overlapping = ranks[2]["pp2 -> tp2, overlapping, fp32 to fp8"]
    assert "differs on rank(s) 3 from what rank(s) 2 sent" in overlapping["flip_a_bit"]
    assert "differs on rank(s) 3 from what rank(s) 1 sent" in overlapping["swap_two_rows"]
    assert "differs on rank(s) 2, 3 from what rank(s) 1 sent" in overlapping["change_the_source"]
    assert "weight_sync.verify" in overlapping["flip_a_bit"] and "transport=full_gather" in overlapping["flip_a_bit"]
    # Fanned-out data is compared with the rank that passed it on.
    fanned_out = ranks[0]["tp2 -> tp1 dp2 on another node, fp32 to fp8"]
    assert "differs on rank(s) 3 from what rank(s) 2 sent" in fanned_out["swap_two_rows"]
