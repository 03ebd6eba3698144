"""A config in a world of ranks, once nothing of it is refused: its placement, grids, models and order."""

from collections.abc import Mapping
from dataclasses import dataclass

from rltrain.config.schema import Config
from rltrain.legality.architecture import check_against_architecture
from rltrain.legality.schedule import check_schedule
from rltrain.models import Architecture
from rltrain.models.checkpoint_model import role_architectures
from rltrain.runtime.grid import Grid
from rltrain.runtime.placement import Placement, placement_of, role_grids
from rltrain.schedule.order import Order
from rltrain.schedule.replay import check
from rltrain.schedule.steps import build_order


@dataclass(frozen=True)
class PlacedConfig:
    placement: Placement
    grids: Mapping[str, Grid]
    architectures: Mapping[str, Architecture]
    """By role; empty where no model was read."""
    order: Order


def place_config(config: Config, world_size: int, ranks_per_node: int, *, reads_models: bool = True) -> PlacedConfig:
    """Returns `config` in that world. Raises UserError for what is illegal there. Call `check_config` before.

    `reads_models`: whether the checkpoints' config.json are there, and models checked against the rest.
    """
    placement = placement_of(config, world_size, ranks_per_node)
    grids = role_grids(config, placement)
    architectures = role_architectures(config, placement.roles) if reads_models else {}
    if reads_models:
        check_against_architecture(config, grids, architectures)
    check_schedule(config, placement, grids)
    order = build_order(config, placement)
    check(order.excerpt(), placement)
    return PlacedConfig(placement, grids, architectures, order)
