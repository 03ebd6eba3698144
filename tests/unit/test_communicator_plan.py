"""When communicators are released: members always agree on the generation, wherever they are in the order."""

from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from rltrain.offload.offload import CommunicatorPlan
from rltrain.runtime.grid import Grid
from rltrain.runtime.placement import Placement, group_lists, lists_of_task, role_group_lists
from rltrain.schedule.order import Order
from rltrain.tasks.roles import needs_of

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
    """By rank: (position, list) -> generation at every use; and the lists open during every task of the rank."""
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
    assert all((0, 1, 2, 3) in lists for lists in opened[0].values()), "the engine's own"


def test_disjoint_roles_and_those_that_stay_keep_their_communicators():
    apart = {"actor": Grid((0, 1), tp=2), "rollout": Grid((2, 3), tp=2), "reward": Grid((2,))}
    used, _ = run(STEP * 3, apart, kept=["reward"])
    assert {generation for rank in used for generation in rank.values()} == {0}
    together = {"actor": Grid((0, 1, 2, 3), tp=2), "rollout": Grid((0, 1, 2, 3), tp=4), "reward": Grid((0,))}
    assert plans(STEP, together, kept=["actor"])[1][0].lists == (), "the rollout has no list that the actor has not"


def test_a_list_with_a_member_that_has_nothing_else_to_do_is_kept():
    """The actor's ranks 2 and 3 host nothing beside it, and so would not leave when 0 and 1 do."""
    grids = {"actor": Grid((0, 1, 2, 3), tp=2), "rollout": Grid((0, 1), tp=2), "reward": Grid((0,))}
    used, _ = run(STEP * 2, grids)
    assert {generation for (_, ranks), generation in used[0].items() if ranks == (0, 2)} == {0}
