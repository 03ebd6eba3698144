"""How a transfer reaches the ranks of a replica."""

from collections import Counter
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from rltrain.exchange.exchange import intake, receivers
from rltrain.runtime.grid import Grid


@st.composite
def grids(draw: st.DrawFn, num_ranks: int) -> Grid:
    tp, pp, cp = (draw(st.sampled_from([1, 2, 3])) for _ in range(3))
    most = num_ranks // (tp * pp * cp)
    ranks = draw(st.permutations(range(num_ranks)))[: tp * pp * cp * draw(st.integers(1, max(most, 1)))]
    return Grid(tuple(sorted(ranks)), tp=tp, pp=pp, cp=cp)


@given(st.data())
def test_what_a_replica_is_due_enters_each_of_its_nodes_once_and_reaches_every_rank_once(data: Any) -> None:
    ranks_per_node = data.draw(st.sampled_from([1, 2, 4, 8, 24]))
    source, destination = data.draw(grids(24)), data.draw(grids(24))
    owners, node = source.owners(), lambda rank: rank // ranks_per_node
    for replica in (destination.replica(dp) for dp in range(destination.dp)):
        sent = {owner: receivers(owner, replica, ranks_per_node) for owner in owners}
        for owner, peers in sent.items():
            afar = Counter(node(peer) for peer in peers if node(peer) != node(owner))
            assert afar == Counter({node(rank) for rank in replica} - {node(owner)})
        taken = {rank: intake(rank, owners, replica, ranks_per_node) for rank in replica}
        for rank, of_rank in taken.items():
            assert {*of_rank.owners} == {owner for owner in owners if rank in sent[owner]} - {rank}
            for follower in of_rank.followers:
                assert taken[follower].relay == rank and not taken[follower].followers
            passed_on = taken[of_rank.relay].from_afar if of_rank.relay is not None else ()
            got = Counter([*of_rank.owners, *passed_on, *({rank} & {*owners})])
            assert got == Counter(owners)
            if of_rank.relay is not None:
                assert node(of_rank.relay) == node(rank) and rank in taken[of_rank.relay].followers
