"""Placements, grids, groups and communicators."""

import rltrain.training.megatron  # noqa: F401  # isort: skip  # first: it loads Megatron without torch's compiler
import itertools
import re
from dataclasses import asdict, dataclass, fields

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core.process_groups_config import ProcessGroupCollection

from rltrain.config.schema import Config
from rltrain.errors import PlacementError
from rltrain.offload.offload import CommunicatorPlan
from rltrain.runtime.grid import Grid, planned_layers
from rltrain.runtime.placement import (
    Placement,
    format_ranks,
    group_lists,
    lists_of_task,
    model_group_lists,
    parse_ranks,
    placement_of,
    resolve_placement,
    role_grids,
    role_group_lists,
)
from rltrain.schedule.order import Order
from rltrain.schedule.shape import RunShape
from rltrain.tasks.roles import needs_of
from tests.support.schedule_configs import make_config

WORLD = 16
rank_sets = st.sets(st.integers(0, WORLD - 1), min_size=1)


def config_placed(placement=None, **sections) -> Config:
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
    assert "placement.reward: 'rest': placement.rollout is rest too" in str(refused.value)
    assert 'on the remaining ranks: "rollout, reward": rest' in str(refused.value)
    with pytest.raises(PlacementError, match=r"placement\.rollout: 'rest': no rank is left: other roles are on 0-3"):
        resolve_placement({"rollout": "rest", "actor": "all"}, 4, 4)
    placement = resolve_placement({"actor": "0-1", "rollout": "rest"}, 5, 5)
    with pytest.raises(PlacementError, match="placement.rollout: 'rest': role rollout has 3 ranks"):
        role_grids(config_placed(rollout={"parallel": {"tp": 2}}), placement)


def test_a_reward_that_nobody_places_is_where_the_rollout_is_wherever_that_is():
    config = config_placed({"actor, env": 0, "rollout": "rest"}, env={"function": "calculator"})
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
        ("actor", "0-1:0-3", "puts 4 processes on 2 ranks; expected at most one process per rank"),
        ("actor", "0-2:0-1", "divides 3 ranks among 2 processes; expected a divisor of 3"),
        ("actor", "0-1:4-5", "begin with 4; expected 0"),
        ("actor", "0-1:x", "'x' after the colon is no range of processes"),
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
    grids = role_grids(config_placed(mapping, **sections), placement)
    assert {role: (grid.tp, grid.pp, grid.dp) for role, grid in grids.items()} == {
        "actor": (2, 1, 2),
        "reference": (2, 1, 2),
        "rollout": (4, 1, 1),
        "reward": (1, 1, 8),
    }
    own = role_grids(config_placed(mapping, reference={"parallel": {"pp": 4}}, **sections), placement)
    assert (own["reference"].tp, own["reference"].pp) == (1, 4)


@given(rank_sets, st.integers(1, 4), st.integers(1, 4))
def test_grids_hold_each_rank_once_or_are_refused(ranks, tp, pp):
    placement = resolve_placement({"actor": format_ranks(ranks)}, WORLD, 8)
    config = config_placed(actor={"parallel": {"tp": tp, "pp": pp}})
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
        role_grids(config_placed(actor={"parallel": {"tp": 2}}), placement)
    assert "placement.actor: '0-2': role actor has 3 ranks" in str(refused.value)
    assert "tp 2 x pp 1 x cp 1 = 2; expected a multiple of 2 ranks, or another actor.parallel" in str(refused.value)


def test_inference_in_the_place_of_the_actor_is_the_actor():
    together = {"rollout, inference, actor": "0-3"}
    assert placement_of(config_placed(together), 4, 4).roles == ("actor", "rollout")
    other_layout = config_placed(together, inference={"parallel": {"tp": 2}})
    assert placement_of(other_layout, 4, 4).roles == ("actor", "inference", "rollout")
    assert "inference" in placement_of(config_placed({"rollout, actor": "0-3", "inference": "2-3"}), 4, 4).roles


EMBEDDING_FIELDS = ("embd", "pos_embd")
OF_LATER_RELEASES = re.compile("gtp_remat|dp(_cp)?_ag$")
"""Groups of Megatron 0.19 for sharding and overlap that rltrain does not use."""
# rltrain.training.megatron.model sets them from other fields, or to None.
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


WORLD_SIZE = 4
ROLES_OF = {
    "weight_sync": ("actor", "rollout"),
    "generate": ("rollout",),
    "score": ("reward",),
    "reference_logprobs": ("reference",),
    "values": ("critic",),
    "update_critic": ("critic",),
    "advantages": ("actor",),
    "update": ("actor",),
    "save_hf": ("actor",),
}


@dataclass(frozen=True)
class Entry:
    name: str
    final: bool = False
    step: int = 0
    kind: str = "task"

    @property
    def roles(self):
        return ROLES_OF[self.name]


def plans(order, grids, kept=()):
    placement = Placement({role: grid.ranks for role, grid in grids.items()}, {}, WORLD_SIZE)
    lists = group_lists(grids)
    return placement, [
        CommunicatorPlan(Order.of(order), placement, grids, rank, lists=lists, kept=kept) for rank in range(WORLD_SIZE)
    ]


def run(order, grids, kept=(), stop_at=None):
    """Returns two lists by rank: (position, list) -> generation at every use, and the open lists during every task."""
    placement, by_rank = plans(order, grids, kept)
    used, opened = [], []
    for rank, plan in enumerate(by_rank):
        now = dict.fromkeys(plan.lists, 0)
        used.append({})
        opened.append({})
        for position, entry in enumerate(order):
            skipped = stop_at is not None and position > stop_at and not entry.final
            if skipped or set(placement.hosts(rank)).isdisjoint(entry.roles):
                continue
            for ranks in plan.to_close(position):
                now.pop(ranks, None)
            wanted = plan.to_open(position)
            now |= wanted
            used[rank] |= {(position, ranks): generation for ranks, generation in wanted.items()}
            opened[rank][position] = set(now)
    return used, opened


@st.composite
def jobs(draw):
    grids = {}
    for role in ("actor", "critic", "reference", "rollout", "reward"):
        ranks = tuple(sorted(draw(st.sets(st.integers(0, WORLD_SIZE - 1), min_size=1))))
        grids[role] = Grid(ranks, tp=2 if len(ranks) % 2 == 0 and draw(st.booleans()) else 1)
    names = draw(st.lists(st.sampled_from(sorted(ROLES_OF)), min_size=1, max_size=14))
    return [Entry(name, final=name == "save_hf") for name in names], grids


@settings(max_examples=30)
@given(jobs(), st.none() | st.integers(0, 13))
def test_members_agree_on_every_generation_also_when_training_ends_early(job, stop_at):
    order, grids = job
    used, _ = run(order, grids, stop_at=stop_at)
    for position, entry in enumerate(order):
        if stop_at is not None and position > stop_at and not entry.final:
            continue
        for ranks in lists_of_task(entry.roles, grids):
            generations = {used[member].get((position, ranks)) for member in ranks}
            assert len(generations) == 1 and None not in generations, (position, ranks)


@settings(max_examples=30)
@given(jobs())
def test_what_no_longer_serves_is_closed_while_others_have_the_device(job):
    order, grids = job
    placement, by_rank = plans(order, grids)
    used, opened = run(order, grids)
    for rank, plan in enumerate(by_rank):
        for position, lists in opened[rank].items():
            task = order[position]
            needs_device = needs_of(task.name).of(placement.hosts(rank)).parts
            for ranks in plan.lists:
                users = {r for roles, lists_of in role_group_lists(grids).items() if ranks in lists_of for r in roles}
                uses = {p: g for (p, other), g in used[rank].items() if other == ranks}
                before = max((p for p in uses if p < position), default=None)
                after = min((p for p in uses if p > position), default=None)
                if position in uses:
                    assert ranks in lists
                elif not needs_device or users & set(task.roles):
                    continue
                elif after is None or uses[after] != (0 if before is None else uses[before]):
                    assert ranks not in lists


STEP = [Entry("weight_sync"), Entry("generate"), Entry("score"), Entry("advantages"), Entry("update")]


def test_colocated_roles_release_what_the_other_does_not_use():
    grids = {"actor": Grid((0, 1, 2, 3), tp=2), "rollout": Grid((0, 1, 2, 3), tp=4), "reward": Grid((0,))}
    used, opened = run(STEP * 3, grids)
    assert [(0, 2) in opened[0][position] for position in range(5)] == [True, False, False, True, True]
    assert [generation for (_, ranks), generation in used[0].items() if ranks == (0, 2)][::3] == [0, 3, 8]
    assert all((0, 1, 2, 3) in lists for lists in opened[0].values()), "the engine uses this list"


def test_disjoint_roles_and_those_that_stay_keep_their_communicators():
    apart = {"actor": Grid((0, 1), tp=2), "rollout": Grid((2, 3), tp=2), "reward": Grid((2,))}
    used, _ = run(STEP * 3, apart, kept=["reward"])
    assert {generation for rank in used for generation in rank.values()} == {0}
    together = {"actor": Grid((0, 1, 2, 3), tp=2), "rollout": Grid((0, 1, 2, 3), tp=4), "reward": Grid((0,))}
    assert plans(STEP, together, kept=["actor"])[1][0].lists == (), "every list of the rollout is one of the actor's"


def test_a_list_with_a_member_that_has_nothing_else_to_do_is_kept():
    """Ranks 2 and 3 of the actor host no other role, so they would not leave together with ranks 0 and 1."""
    grids = {"actor": Grid((0, 1, 2, 3), tp=2), "rollout": Grid((0, 1), tp=2), "reward": Grid((0,))}
    used, _ = run(STEP * 2, grids)
    assert {generation for (_, ranks), generation in used[0].items() if ranks == (0, 2)} == {0}


@given(st.integers(1, 16), st.integers(0, 100))
def test_every_chunk_has_layers_and_none_has_much_more_than_another(num_chunks: int, more: int) -> None:
    counts = planned_layers(num_chunks + more, num_chunks)
    assert len(counts) == num_chunks and sum(counts) == num_chunks + more and min(counts) >= 1
    if (num_chunks + more) % num_chunks == 0:
        assert len(set(counts)) == 1
        return
    work = [count + (number == 0) + (number == num_chunks - 1) for number, count in enumerate(counts)]
    assert max(work) - min(work) <= 1
    assert max(work) == -(-(num_chunks + more + 2) // num_chunks), "the slowest chunk is as fast as possible"


def test_the_last_chunk_has_the_fewest() -> None:
    assert planned_layers(61, 8) == (7, 8, 8, 8, 8, 8, 8, 6)  # DeepSeek-V3
    assert planned_layers(3, 2) == (2, 1)


def test_what_cannot_be_shared_out_is_refused() -> None:
    with pytest.raises(ValueError, match="3 layers cannot be divided among 4 chunks"):
        planned_layers(3, 4)
    with pytest.raises(ValueError, match=r"layers_per_stage is \[1, 1\]; expected 4 numbers \(pp 2 x vpp 2\)"):
        Grid((0, 1), pp=2, vpp=2, layers_per_stage=(1, 1)).layers_of_chunks(2)


BATCH = {"prompts_per_step": 8, "samples_per_prompt": 4}
PIPELINED = {"mode": "pipelined"}


def asynchronous(**settings):
    return {"schedule": {"mode": "asynchronous", "max_staleness": 3, **settings}}


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        ({}, {"lead": 0, "num_chunks": 1, "samples_per_group": 4, "prompt_blocks": 1, "num_actor_updates": 10}),
        ({"algorithm": "remax"}, {"samples_per_group": 4, "greedy_per_group": 1}),
        ({"algorithm": "sft"}, {"greedy_per_group": 0, "samples_per_group": 1, "needs_actor_logprobs": False}),
        ({"batch": {**BATCH, "mini_batches": 8}}, {"prompt_blocks": 2, "chunk_blocks": 2, "num_actor_updates": 80}),
        ({"batch": {**BATCH, "mini_batches": 4, "mini_batches_by": "prompts"}}, {"prompt_blocks": 4}),
        ({"batch": {**BATCH, "samples_per_prompt": 5, "mini_batches": 4}}, {"prompt_blocks": 4}),
        ({"batch": {**BATCH, "samples_per_prompt": 6, "mini_batches": 4}}, {"prompt_blocks": 2}),
        ({"batch": {**BATCH, "mini_batches": 2, "epochs": 3}}, {"updates_per_step": 6, "num_actor_updates": 60}),
        ({"schedule": PIPELINED, "batch": {**BATCH, "epochs": 2}}, {"accumulates_actor": False}),
        (
            {"schedule": PIPELINED, "loss": {"correction": {"high": 2.0, "normalize": "step"}}},
            {"accumulates_actor": False},
        ),
        ({"algorithm": "sft", "batch": {**BATCH, "mini_batches": 4}}, {"prompt_blocks": 4}),
        ({"algorithm": "dpo", "batch": {**BATCH, "mini_batches": 4}}, {"prompt_blocks": 4, "samples_per_group": 2}),
        ({"batch": {**BATCH, "mini_batches": 16}, "schedule": {**PIPELINED, "chunks": 2}}, {"chunk_blocks": 2}),
        ({"schedule": PIPELINED}, {"num_chunks": 4, "shares_prompts": True, "accumulates_actor": True}),
        ({"schedule": PIPELINED, "batch": {**BATCH, "mini_batches": 2}}, {"accumulates_critic": False}),
        ({"schedule": PIPELINED, "algorithm": "ppo"}, {"accumulates_critic": True, "accumulates_actor": False}),
        ({"schedule": PIPELINED, "algorithm": "ppo", "advantages": {"whiten": False}}, {"accumulates_actor": True}),
        (asynchronous(), {"lead": 3, "syncs_in_flight": True, "shares_prompts": True}),
        (asynchronous(in_flight_sync=False), {"lead": 3, "syncs_in_flight": False, "shares_prompts": False}),
        (asynchronous(), {"draws_during_syncs": True}),
        (asynchronous(in_flight_sync=False), {"draws_during_syncs": False}),
        ({"schedule": {"partial_rollouts": True}}, {"syncs_in_flight": False, "draws_during_syncs": True}),
        ({"schedule": PIPELINED}, {"draws_during_syncs": False}),
        (asynchronous(sync_every=4), {"lead": 0, "syncs_in_flight": False}),
        (asynchronous(sync_every=5), {"lead": -1}),
        ({"algorithm": "ppo", "critic": {"critic_warmup_steps": 4}}, {"first_actor_step": 4, "num_actor_updates": 6}),
        ({"critic": {"critic_warmup_steps": 4}}, {"first_actor_step": 0, "num_actor_updates": 10}),
        ({"loss": {"old_logprobs": "rollout"}}, {"needs_actor_logprobs": False}),
    ],
    ids=str,
)
def test_what_follows_from_a_config(sections, expected):
    shape = asdict(RunShape.of(make_config(**{"steps": 10, "batch": BATCH, **sections})))
    assert {name: shape[name] for name in expected} == expected
