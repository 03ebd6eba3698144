"""Weights of an actor with adapters: what changes, and what of it is sent in which turn."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rltrain.config.models import Lora
from rltrain.reshard.delta import DeltaTurn
from rltrain.reshard.megatron_layout import megatron_layout
from rltrain.roles.weight_sync import RoleResharding, groups_of
from rltrain.runtime.grid import Grid
from tests.model_shards import tiny_architecture

ATTENTION = {"q_proj.weight", "k_proj.weight", "v_proj.weight", "o_proj.weight"}


@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3_moe"])
@pytest.mark.parametrize("targets", [None, ("q_proj", "o_proj"), ("v_proj",)])
def test_what_adapters_touch_is_apart_from_what_never_changes(family: str, targets: tuple[str, ...] | None) -> None:
    architecture = tiny_architecture(family)
    config = SimpleNamespace(model=SimpleNamespace(lora=Lora(rank=2, targets=targets)))
    source = megatron_layout(architecture, Grid((0,)))
    found = groups_of(SimpleNamespace(config=config, architecture=architecture), source, 2000)  # type: ignore[arg-type]
    groups, frozen = ([group for group, is_frozen in found if is_frozen is wanted] for wanted in (False, True))
    names = np.array(source.tensors.names)
    assert len(groups) > 1 and (np.sum([*groups, *frozen], axis=0) == 1).all(), "each tensor is in one of them"
    adapted = {".".join(name.split(".")[-2:]) for name in names[np.any(groups, axis=0)]}
    if targets == ("v_proj",):
        assert adapted == {"q_proj.weight", "k_proj.weight", "v_proj.weight"}, "they are one parameter in training"
    elif targets is not None:
        assert adapted == ATTENTION
    else:
        assert adapted == {*ATTENTION, "gate_proj.weight", "up_proj.weight", "down_proj.weight"}
    [rest] = frozen
    assert "model.embed_tokens.weight" in names[rest] and "model.norm.weight" in names[rest]


def test_what_never_changes_is_sent_with_everything_alone_and_compared_with_the_rest() -> None:
    asked: list[Any] = []

    class Noting(RoleResharding):
        """Notes what it is to send, and whether both sides are compared."""

        def __init__(self, *, is_frozen: bool) -> None:
            self.config = SimpleNamespace(verify=False)  # type: ignore[assignment]
            self.is_frozen = is_frozen

        def _send(self, source: object, destination: object, turn: DeltaTurn) -> None:
            asked.append(("frozen" if self.is_frozen else "adapted", turn))

        def verify(self, source: object, destination: object) -> float:
            asked.append(("frozen" if self.is_frozen else "adapted", "compared"))
            return 0.25

    adapted, frozen, compared = (("adapted", DeltaTurn.WHOLE), ("frozen", DeltaTurn.WHOLE), "compared")
    changes = ("adapted", DeltaTurn.CHANGES)
    for turn, compares, expected in (
        (DeltaTurn.WHOLE, False, [adapted, frozen]),
        (DeltaTurn.CHANGES, False, [changes]),
        (DeltaTurn.CHANGES, True, [changes, ("adapted", compared), ("frozen", compared)]),
    ):
        asked.clear()
        seconds = [Noting(is_frozen=is_frozen).run(None, {}, turn, compares=compares)[1] for is_frozen in (False, True)]
        assert asked == expected and sum(seconds) == (0.5 if compares else 0)
