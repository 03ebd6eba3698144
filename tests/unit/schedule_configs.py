"""Configs and placements for tests of the order of tasks."""

from collections.abc import Mapping
from typing import Any

from rltrain.cluster.placement import Placement, resolve_placement
from rltrain.config.schema import Config
from rltrain.schedule.order import Order
from rltrain.schedule.steps import build_order

WORLD_SIZE = 4
GRPO = {"actor,reference": 0, "rollout": 1, "reward": 2}
PPO = {"actor": 0, "critic": 1, "rollout": 2, "reward": 3}


def make_config(**sections: Any) -> Config:
    """Three steps of grpo with held-out prompts, changed by `sections`."""
    values = {
        "steps": 3,
        "placement": GRPO,
        "model": {"path": "m"},
        "data": {"train": {"path": "t"}, "eval": {"path": "e"}},
    }
    return Config.model_validate(values | sections)


def place(mapping: Mapping[str, str | int]) -> Placement:
    return resolve_placement(mapping, WORLD_SIZE, WORLD_SIZE)


def order_of(**sections: Any) -> Order:
    """The order of tasks of such a config."""
    config = make_config(**sections)
    return build_order(config, place(config.placement))


NO_EVALUATION = {"data": {"train": {"path": "t"}}}
