"""The grammar of placements, their refusals, and what follows from them: modes and grids."""

import itertools
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rltrain.config.schema import Config
from rltrain.errors import PlacementError
from rltrain.runtime.placement import format_ranks, parse_ranks, placement_of, resolve_placement, role_grids

WORLD = 16
rank_sets = st.sets(st.integers(0, WORLD - 1), min_size=1)


def make_config(placement=None, **sections) -> Config:
    required = {"steps": 1, "model": {"path": "m"}, "data": {"train": {"path": "t"}}}
    return Config.model_validate({**required, "placement": placement or {"actor": "all"}, **sections})


@pytest.mark.parametrize(
    ("value", "ranks"),
    [
        ("all", range(16)),
        (3, [3]),
        ("3", [3]),
        ("0,2,3", [0, 2, 3]),
        ("0-3", [0, 1, 2, 3]),
        ("0-3,5,7", [0, 1, 2, 3, 5, 7]),
        ("7,5,0-3", [0, 1, 2, 3, 5, 7]),
        ("4-4", [4]),
        (" 0 - 1 , 5 ", [0, 1, 5]),
        ("node:1", [4, 5, 6, 7]),
        ("node:1-2", range(4, 12)),
        ("node:0,2", [0, 1, 2, 3, 8, 9, 10, 11]),
        ("node: 0, 3", [0, 1, 2, 3, 12, 13, 14, 15]),
        ("0-3:0-3", [0, 1, 2, 3]),
        ("0-3:0", [0, 1, 2, 3]),
        ("0-3:0-1,8-11:2-3", [0, 1, 2, 3, 8, 9, 10, 11]),
        ("all:0-15", range(16)),
    ],
)
def test_every_form_of_the_grammar(value, ranks):
    assert resolve_placement({"actor": value}, world_size=16, ranks_per_node=4).ranks("actor") == tuple(ranks)


def test_a_last_node_with_fewer_ranks():
    assert parse_ranks("node:1", world_size=6, ranks_per_node=4) == (4, 5)


@given(rank_sets)
def test_formatting_and_parsing_are_inverse(ranks):
    assert parse_ranks(format_ranks(ranks), WORLD, ranks_per_node=4) == tuple(sorted(ranks))


@given(rank_sets)
def test_formatted_ranges_are_the_shortest(ranks):
    runs = sum(rank - 1 not in ranks for rank in ranks)
    assert len(format_ranks(ranks).split(",")) == runs


@given(st.lists(rank_sets, max_size=2), st.integers(1, 2 * WORLD))
def test_the_rest_is_what_no_other_role_names_in_a_world_of_any_size(taken, world_size):
    named = [{rank for rank in ranks if rank < world_size} for ranks in taken]
    mapping = {"rollout, reward": " rest ", **dict(zip(("actor", "critic"), map(format_ranks, named), strict=False))}
    left = set(range(world_size)).difference(*named)
    if not all(named) or not left:
        with pytest.raises(PlacementError, match="no rank is left" if all(named) else "is missing"):
            resolve_placement(mapping, world_size, 4)
        return
    placement = resolve_placement(mapping, world_size, 4)
    assert placement.ranks("rollout") == placement.ranks("reward") == tuple(sorted(left))
    assert not placement.idle


def test_the_rest_is_of_one_key_whose_refusals_name_it():
    with pytest.raises(PlacementError) as refused:
        resolve_placement({"actor": 0, "rollout": "rest", "reward": "rest"}, 4, 4)
    assert "placement.reward: 'rest': placement.rollout says so too" in str(refused.value)
    assert 'share what is left: "rollout, reward": rest' in str(refused.value)
    with pytest.raises(PlacementError, match=r"placement\.rollout: 'rest': no rank is left: other roles are on 0-3"):
        resolve_placement({"rollout": "rest", "actor": "all"}, 4, 4)
    placement = resolve_placement({"actor": "0-1", "rollout": "rest"}, 5, 5)
    with pytest.raises(PlacementError, match="placement.rollout: 'rest': role rollout has 3 ranks"):
        role_grids(make_config(rollout={"parallel": {"tp": 2}}), placement)


def test_a_reward_that_nobody_places_is_where_the_rollout_is_wherever_that_is():
    config = make_config({"actor, env": 0, "rollout": "rest"}, env={"function": "calculator"})
    assert placement_of(config, 3, 3).ranks("reward") == (1, 2)


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("actor", "0,2,0", "rank 0 is named twice"),
        ("actor", "0-3,2-5", "rank 2 is named twice"),
        ("actor", "node:1,1", "node 1 is named twice"),
        ("actor", "0-8", "rank 8 does not exist; expected ranks in 0-7 (8 in this world)"),
        ("actor", 8, "rank 8 does not exist"),
        ("actor", "0-99999999999999", "rank 99999999999999 does not exist"),
        ("actor", "node:2", "node 2 does not exist; expected nodes in 0-1"),
        ("actor", "3-1", "range '3-1' is reversed; expected 1-3"),
        ("actor", "0-1:0-3", "puts 4 processes on 2 ranks; expected at most as many"),
        ("actor", "0-2:0-1", "shares 3 ranks out among 2 processes; expected a divisor of 3"),
        ("actor", "0-1:4-5", "begin with 4; expected 0"),
        ("actor", "0-1:x", "'x' behind the colon is no range of processes"),
        ("actor", "", "a rank or range of ranks is missing; expected inclusive ranks"),
        ("actor", "0,,1", "a rank or range of ranks is missing"),
        ("actor", "node:", "a node or range of nodes is missing"),
        ("actor", -1, "'-1' is no rank or range of ranks; expected inclusive ranks"),
        ("actor", "0..3", "'0..3' is no rank"),
        ("actor", "0:3", "the processes of '0:3' begin with 3; expected 0"),
        ("actor", "0-3,node:1", "'node:1' is no rank"),
        ("actor", "everything", "'everything' is no rank"),
        ("actor", "0-1-2", "'0-1-2' is no rank"),
        ("actor", "0-1,rest", "'rest' is no rank"),
        ("actor", "rest:0-1", "'rest:0-1' is no rank"),
        ("actor", "node:rest", "'rest' is no node or range of nodes; expected inclusive ranks such as 3, \"0,2,3\""),
        ("actor", "٣", "is no rank"),
        ("actor,", "0", "the key has an empty role name"),
        ("actor,actor", "0", "role actor is already placed by placement.actor,actor: '0'"),
    ],
)
def test_bad_placements_are_refused_with_key_string_and_expectation(key, value, expected):
    with pytest.raises(PlacementError, match=re.escape(expected)) as refused:
        resolve_placement({key: value}, world_size=8, ranks_per_node=4)
    assert f"placement.{key}: {str(value)!r}" in str(refused.value)


def test_a_role_placed_by_two_keys_is_refused_with_both():
    with pytest.raises(PlacementError) as refused:
        resolve_placement({"actor": "0-1", "reference, actor": "2-3"}, 4, 4)
    assert "placement.reference, actor: '2-3'" in str(refused.value)
    assert "already placed by placement.actor: '0-1'" in str(refused.value)


def test_an_empty_placement_is_refused():
    with pytest.raises(PlacementError, match="no role is placed"):
        resolve_placement({}, 4, 4)


def test_joined_keys_share_ranks_and_roles_come_in_a_fixed_order():
    placement = resolve_placement({"reward , rollout": "1-2", "actor,reference": "0-1"}, 4, 4)
    assert placement.roles == ("actor", "reference", "rollout", "reward")
    assert [placement.hosts(rank) for rank in range(4)] == [
        ("actor", "reference"),
        ("actor", "reference", "rollout", "reward"),
        ("rollout", "reward"),
        (),
    ]
    with pytest.raises(PlacementError, match=r"placement\.critic: the role is not placed"):
        placement.ranks("critic")


@given(rank_sets, rank_sets)
def test_modes_follow_from_the_ranks(a, b):
    placement = resolve_placement({"actor": format_ranks(a), "rollout": format_ranks(b)}, WORLD, 8)
    shared = sum("actor" in placement.hosts(r) and "rollout" in placement.hosts(r) for r in range(WORLD))
    mode = placement.mode("actor", "rollout")
    assert (mode == "colocated") == (shared == len(a) == len(b))
    assert (mode == "disaggregated") == (shared == 0)
    assert mode == placement.mode("rollout", "actor")


def test_the_reference_takes_the_actors_parallel_sizes_unless_it_has_its_own():
    mapping = {"actor,reference": "0-3", "rollout": "4-7", "reward": "all"}
    placement = resolve_placement(mapping, 8, 8)
    sections = {"actor": {"parallel": {"tp": 2}}, "rollout": {"parallel": {"tp": 4}}}
    grids = role_grids(make_config(mapping, **sections), placement)
    assert {role: (grid.tp, grid.pp, grid.dp) for role, grid in grids.items()} == {
        "actor": (2, 1, 2),
        "reference": (2, 1, 2),
        "rollout": (4, 1, 1),
        "reward": (1, 1, 8),
    }
    own = role_grids(make_config(mapping, reference={"parallel": {"pp": 4}}, **sections), placement)
    assert (own["reference"].tp, own["reference"].pp) == (1, 4)


@given(rank_sets, st.integers(1, 4), st.integers(1, 4))
def test_grids_hold_each_rank_once_or_are_refused(ranks, tp, pp):
    placement = resolve_placement({"actor": format_ranks(ranks)}, WORLD, 8)
    config = make_config(actor={"parallel": {"tp": tp, "pp": pp}})
    if len(ranks) % (tp * pp):
        with pytest.raises(PlacementError, match=f"has {len(ranks)} ranks"):
            role_grids(config, placement)
        return
    grid = role_grids(config, placement)["actor"]
    assert sorted(grid.array.reshape(-1).tolist()) == sorted(ranks)
    assert sorted(itertools.chain(*(grid.replica(i) for i in range(grid.dp)))) == sorted(ranks)


def test_sizes_that_do_not_divide_the_ranks_are_refused_with_both_keys():
    placement = resolve_placement({"actor": "0-2", "reference": "0-3"}, 4, 4)
    with pytest.raises(PlacementError) as refused:
        role_grids(make_config(actor={"parallel": {"tp": 2}}), placement)
    assert "placement.actor: '0-2': role actor has 3 ranks" in str(refused.value)
    assert "tp 2 x pp 1 x cp 1 = 2; expected a multiple of 2 ranks, or another actor.parallel" in str(refused.value)


def test_inference_in_the_place_of_the_actor_is_the_actor():
    together = {"rollout, inference, actor": "0-3"}
    assert placement_of(make_config(together), 4, 4).roles == ("actor", "rollout")
    other_layout = make_config(together, inference={"parallel": {"tp": 2}})
    assert placement_of(other_layout, 4, 4).roles == ("actor", "inference", "rollout")
    assert "inference" in placement_of(make_config({"rollout, actor": "0-3", "inference": "2-3"}), 4, 4).roles
