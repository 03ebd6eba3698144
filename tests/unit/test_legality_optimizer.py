"""What optimizers cannot do together is refused with the key, the reason, and what is expected."""

from typing import Any

import pytest

from rltrain.config.schema import Optimizer
from rltrain.errors import ConfigError
from rltrain.planning.validation import check_config
from tests.unit.schedule_configs import make_config

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "whole matrices on the host": (
        {"name": "muon", "cpu_offload": True},
        "actor.optimizer.cpu_offload: got true with actor.optimizer.name muon, which makes whole matrices orthogonal",
    ),
    "keys that nobody looks at": (
        {"muon": {"momentum": 0.9}},
        "actor.optimizer.muon: given with actor.optimizer.name adamw, which does not look at it; expected name muon",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused(name: str) -> None:
    given, message = REFUSED[name]
    with pytest.raises(ConfigError, match="^") as caught:
        check_config(make_config(actor={"optimizer": given}))
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "given",
    [
        {"name": "muon", "moments_dtype": "bfloat16", "muon": {"momentum": 0.9}},
        {"cpu_offload": 0.5, "moments_dtype": "bfloat16"},
        {"cpu_offload": True},
    ],
)
def test_the_rest_goes_together(given: dict[str, Any]) -> None:
    check_config(make_config(actor={"optimizer": given}))


def test_activations_that_are_filled_where_they_lie_cannot_leave() -> None:
    recompute = {"granularity": "selective", "modules": ["core_attn", "layernorm"]}
    with pytest.raises(ConfigError, match=r"model\.activation_offload: got true with layernorm in model\.recompute"):
        check_config(make_config(model={"path": "m", "activation_offload": True, "recompute": recompute}))
    check_config(make_config(model={"path": "m", "activation_offload": True, "recompute": "full"}))


def test_a_share_is_one() -> None:
    assert float(Optimizer(cpu_offload=True).cpu_offload) == 1.0
    with pytest.raises(ValueError, match="less than or equal to 1"):
        Optimizer(cpu_offload=1.5)
