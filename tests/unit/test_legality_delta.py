"""What a weight sync of what changed cannot be combined with."""

from typing import Any

import pytest

from rltrain.errors import ConfigError
from rltrain.planning.validation import check_config
from tests.unit.schedule_configs import make_config

HTTP = {"engine": "http", "urls": ["http://server"]}


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"rollout": {"offload": True}}, r"each would send everything; expected rollout.offload: auto or false"),
        ({"weight_sync": {"delta": {}, "transport": "full_gather"}}, r"expected weight_sync.transport: planned"),
        ({"rollout": {**HTTP, "http": {"weights": "group"}}}, r"expected rollout.http.weights: folder"),
        ({"rollout": {**HTTP, "protocol": "vllm"}}, r"expected weight_sync.delta: null"),
    ],
)
def test_each_refusal_has_its_reason_and_its_cure(sections: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=f"weight_sync.delta: got a section with .*{said}"):
        check_config(make_config(**({"weight_sync": {"delta": {}}} | sections)))


@pytest.mark.parametrize(
    "rollout",
    [{}, {"dtype": "fp8"}, {"offload": False}, {"parallel": {"tp": 2}}, {"engine": "sglang"}, HTTP],
)
def test_engines_that_keep_their_weights_take_changes(rollout: dict[str, Any]) -> None:
    check_config(make_config(weight_sync={"delta": {"check_every": 5}}, rollout=rollout))
