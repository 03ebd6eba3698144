"""Megatron's collection of process groups for one role, made from explicit rank lists."""

import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection

from rltrain.runtime.grid import Grid
from rltrain.runtime.placement import model_group_lists
from rltrain.runtime.process_groups import ProcessGroups

# Fields that mean the same group as another one while there is a single optimizer instance per role.
ALIASES = {"intra_dp_cp": "dp_cp", "intra_expt_dp": "expt_dp"}
UNUSED = ("inter_dist_opt", "hcp")


def process_group_collection(grid: Grid, groups: ProcessGroups) -> ProcessGroupCollection:
    """This rank's groups in `grid`, under Megatron's field names; None where the rank is in no such group.

    Makes no group: `groups` holds them all. Megatron's global parallel state stays uninitialised, so that roles with
    different grids can share a process.
    """
    rank = dist.get_rank()
    collection = ProcessGroupCollection()
    for field, rank_lists in model_group_lists(grid).items():
        mine = next((ranks for ranks in rank_lists if rank in ranks), None)
        setattr(collection, field, None if mine is None else groups[mine])
    for alias, field in ALIASES.items():
        setattr(collection, alias, getattr(collection, field))
    for field in UNUSED:
        setattr(collection, field, None)
    return collection
