"""Configs and placements for tests of the order of tasks."""

from collections.abc import Mapping
from typing import Any

from hypothesis import strategies as st

from rltrain.config.schema import Config
from rltrain.runtime.placement import Placement, resolve_placement
from rltrain.schedule.iterations import build_order
from rltrain.schedule.order import Order

WORLD_SIZE = 4
GRPO = {"actor,reference": 0, "rollout": 1, "reward": 2}
PPO = {"actor": 0, "critic": 1, "rollout": 2, "reward": 3}
EVALUATED_APART = {"actor": 0, "rollout": 1, "reward": 2, "evaluation": 3}


def make_config(**sections: Any) -> Config:
    """Returns a config for three steps of grpo with held-out prompts and without checkpoints, changed by `sections`."""
    values = {
        "steps": 3,
        "placement": GRPO,
        "model": {"path": "m"},
        "data": {"train": {"path": "t"}, "eval": {"path": "e"}},
        "checkpoint": {"save_every_s": 0},
    }
    return Config.model_validate(values | sections)


def place(mapping: Mapping[str, str | int]) -> Placement:
    return resolve_placement(mapping, WORLD_SIZE, WORLD_SIZE)


def order_of(**sections: Any) -> Order:
    """Returns the order of tasks of the config with these sections."""
    config = make_config(**sections)
    return build_order(config, place(config.placement))


@st.composite
def evaluations(draw: st.DrawFn) -> dict[str, Any]:
    """Generates sections `evaluation`. data.eval is given elsewhere."""
    of_its_own = {"name": "own", "data": {"path": "o"}, "interval": draw(st.integers(0, 2))}
    return {
        "interval": draw(st.integers(0, 3)),
        "stop_at": draw(st.sampled_from([None, 0.5])),
        "sets": draw(st.sampled_from([[], [of_its_own]])),
        "keep_best": draw(st.sampled_from([None, {"metric": "eval/score"}])),
    }


NO_EVALUATION = {"data": {"train": {"path": "t"}}}
