"""Every tensor of a model is on its role's device, even if a library made it. The device here is meta."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.cases_devices import UNTRAINABLE
from tests.support.family_checkpoints import CHECKPOINTS, VARIANTS
from tests.support.marks import slow_but
from tests.support.worlds import made_once, run_case

QUICK = ("qwen3_tied", "gemma3", "qwen3_moe", "deepseek_v3", "qwen3_5_moe", "gpt_oss")
"""These include windows, experts, biases of experts, gated shared experts, latent attention, delta nets and sinks."""
WITHOUT_FSDP = {"deepseek_v3", "deepseek_v3_tied", "moonlight", "glm4_moe", "glm4_moe_air", "hy_v3", "glm4_moe_lite"}
WITHOUT_FSDP |= {"minimax_m2"}
FAMILIES = [name for name in CHECKPOINTS if name not in VARIANTS]


def build(folder: Path, families: list[str]) -> dict[str, Any]:
    return run_case("cases_devices:built", 1, families=families, folder=folder)[0]


OTHERS = [family for family in FAMILIES if family not in QUICK]
quick_world, slow_world = (made_once(partial(build, families=[*families])) for families in (QUICK, OTHERS))


@pytest.mark.parametrize("family", slow_but(FAMILIES, *QUICK))
def test_nothing_is_left_elsewhere(ranks: dict[str, Any], family: str) -> None:
    found = {name.partition("/")[2]: names for name, names in ranks.items() if name.partition("/")[0] == family}
    assert len(found) >= 7
    for kind, names in found.items():
        refused = kind.startswith("fsdp") and family in WITHOUT_FSDP
        assert names == (UNTRAINABLE if refused else []), kind


ROUTERS = {"mixtral": "chunks.0.decoder.layers.0.mlp.router.weight", "qwen2_moe": "router.weight"}


@pytest.mark.parametrize("family", slow_but(ROUTERS, "mixtral"))
def test_what_megatron_makes_on_the_host_is_named(family: str, tmp_path: Path) -> None:
    """Without the move a router's weight stays on the host, and the error names its expected device."""
    (message,) = run_case("cases_devices:left_on_the_host", 1, family=family, folder=tmp_path)
    assert ROUTERS[family] in message
    assert "is on cpu, but the device of its role is meta" in message
