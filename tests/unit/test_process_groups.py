"""The rank lists of process groups: what they cover, and that a large job makes few of them per rank."""

import itertools
import re
from dataclasses import fields

import rltrain.training.megatron  # noqa: F401  # isort: skip  # first: it loads Megatron without torch's compiler

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.process_groups_config import ProcessGroupCollection

from rltrain.runtime.grid import Grid
from rltrain.runtime.placement import group_lists, model_group_lists

EMBEDDING_FIELDS = ("embd", "pos_embd")
# Set by rltrain.training.megatron.model from other fields, or to None.
OF_LATER_RELEASES = re.compile("gtp_remat|dp(_cp)?_ag$")
"""Groups of Megatron 0.19 for ways of sharding and of overlapping that rltrain does not use."""
DERIVED_FIELDS = {"intra_dp_cp", "intra_expt_dp", "inter_dist_opt", "hcp"}


@st.composite
def grids(draw: st.DrawFn) -> Grid:
    tp, cp, dp, pp = (draw(st.integers(1, 3)) for _ in range(4))
    ep = draw(st.sampled_from([n for n in range(1, dp * cp + 1) if (dp * cp) % n == 0]))
    size = tp * cp * dp * pp
    ranks = draw(st.sets(st.integers(0, 2 * size), min_size=size, max_size=size))
    return Grid(tuple(sorted(ranks)), tp=tp, pp=pp, cp=cp, ep=ep)


def count_per_rank(lists, world_size: int) -> list[int]:
    return [sum(rank in ranks for ranks in lists) for rank in range(world_size)]


def test_every_field_of_megatrons_collection_has_lists():
    names = {field.name for field in fields(ProcessGroupCollection) if not OF_LATER_RELEASES.search(field.name)}
    assert set(model_group_lists(Grid((0,)))) == names - DERIVED_FIELDS


@given(grids())
def test_every_model_group_list_partitions_the_roles_ranks(grid):
    for field, lists in model_group_lists(grid).items():
        assert all(list(ranks) == sorted(set(ranks)) for ranks in lists)
        if field not in EMBEDDING_FIELDS:
            assert sorted(itertools.chain(*lists)) == sorted(grid.ranks), field
            assert len({len(ranks) for ranks in lists}) == 1, field


@given(grids())
def test_sizes_and_members_follow_the_grid(grid):
    lists = model_group_lists(grid)
    sizes = {"tp": grid.tp, "pp": grid.pp, "cp": grid.cp, "dp": grid.dp, "ep": grid.ep, "mp": grid.tp * grid.pp}
    assert {field: len(lists[field][0]) for field in sizes} == sizes
    assert len(lists["tp_ep_pp"][0]) == grid.tp * grid.ep * grid.pp
    for ranks in lists["pp"]:
        places = [grid.coordinates(rank) for rank in ranks]
        assert [place.pp for place in places] == list(range(grid.pp))
        assert len({(place.tp, place.cp, place.dp) for place in places}) == 1


@given(grids())
def test_embedding_groups_hold_the_first_and_last_stages(grid):
    lists = model_group_lists(grid)
    first, last = grid.array[0].reshape(-1).tolist(), grid.array[-1].reshape(-1).tolist()
    assert sorted(itertools.chain(*lists["embd"])) == sorted({*first, *last})
    assert sorted(itertools.chain(*lists["pos_embd"])) == sorted(first)


def test_an_ep_that_does_not_divide_is_refused():
    with pytest.raises(ValueError, match="ep 2 x etp"):
        model_group_lists(Grid((0, 1, 2), ep=2))


@given(grids(), grids())
def test_lists_are_distinct_ordered_and_hold_what_the_roles_use(actor, rollout):
    roles = {"actor": actor, "rollout": rollout, "reward": Grid(rollout.ranks)}
    lists = group_lists(roles)
    assert len(set(lists)) == len(lists)
    assert lists == group_lists(dict(reversed(roles.items())))
    assert {*itertools.chain(*model_group_lists(actor).values())} <= set(lists)
    assert {rollout.replica(dp) for dp in range(rollout.dp)} <= set(lists)
    assert {actor.replica(dp) for dp in range(actor.dp)} <= set(lists)
    assert {actor.ranks, rollout.ranks, tuple(sorted({*actor.ranks, *rollout.ranks}))} <= set(lists)


def large_job() -> dict[str, Grid]:
    actor = Grid(tuple(range(256)), tp=8, pp=4)
    rollout = Grid(tuple(range(256, 512)), tp=8)
    return {"actor": actor, "reference": actor, "rollout": rollout, "reward": Grid(rollout.ranks)}


def test_a_rank_of_a_512_rank_job_is_in_few_groups():
    counts = count_per_rank(group_lists(large_job()), 512)
    # tp, pp, dp, tp x pp, tp x dp, itself, first and last stage, the role, the world (which is also the sync's union).
    assert max(counts[:256]) == 9
    # tp, itself (reward), the role, the world.
    assert max(counts[256:]) == 4
    assert len(group_lists(large_job())) < 1000


def test_equal_rank_lists_share_one_group():
    roles = large_job()
    with_reference = group_lists(roles)
    del roles["reference"]
    assert group_lists(roles) == with_reference
    fields_of_actor = model_group_lists(roles["actor"])
    separate = sum(any(0 in ranks for ranks in lists) for lists in fields_of_actor.values())
    shared = len({ranks for lists in fields_of_actor.values() for ranks in lists if 0 in ranks})
    assert (separate, shared) == (16, 8)


def test_a_disjoint_job_of_many_sizes_stays_small_per_rank():
    for tp, pp in itertools.product((1, 2, 4, 8), (1, 2, 4)):
        actor, rollout = Grid(tuple(range(64)), tp=tp, pp=pp), Grid(tuple(range(64, 96)), tp=8)
        counts = np.array(count_per_rank(group_lists({"actor": actor, "rollout": rollout}), 96))
        assert counts.max() <= 10
