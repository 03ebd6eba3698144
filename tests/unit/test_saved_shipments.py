"""Experience that crosses a checkpoint: every sample of it is sent on by one replica, whatever their number."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rltrain.checkpoint.run_files import Contents, read_contents, write_files
from rltrain.data.experience import FIELDS
from rltrain.errors import CheckpointError
from rltrain.exchange.exchange import Shipment, as_tensors, joined, read_parts, share
from rltrain.roles.transfers import Transfers
from rltrain.schedule.order import Entries, Order
from tests.unit.test_experience import make_experience

KEY = ("rollout", "samples", 7, 0)
NUM_GROUPS = 6

owners = st.lists(st.integers(0, 3), min_size=NUM_GROUPS, max_size=NUM_GROUPS)
"""Of each group, the replica that has drawn it."""


def whole_step(seed: int = 0) -> Shipment:
    """Two samples of every group."""
    lengths = [1 + (5 * i + seed) % 7 for i in range(2 * NUM_GROUPS)]
    experience = make_experience(lengths, [i // 2 for i in range(2 * NUM_GROUPS)], seed)
    return Shipment(experience, torch.tensor(lengths).view(-1, 2).sum(1), torch.zeros(NUM_GROUPS, dtype=torch.int64))


def of_owner(step: Shipment, owner_of: list[int], owner: int) -> Shipment:
    mine = torch.tensor(owner_of)[step.experience.group_ids] == owner
    return replace(step, experience=step.experience.select(mine.nonzero().flatten()))


def assert_equal(one: Shipment, other: Shipment) -> None:
    assert one.experience.present() == other.experience.present()
    for name, values in one.experience.columns().items():
        assert torch.equal(values, getattr(other.experience, name)), name
    assert torch.equal(one.group_tokens, other.group_tokens)


@given(owners, st.integers(1, 6))
def test_replicas_of_any_number_send_on_the_whole_step(owner_of, num_replicas):
    step = whole_step()
    saved = [as_tensors({KEY: of_owner(step, owner_of, owner)}) for owner in range(4)]
    parts = read_parts(saved)[KEY]
    shares = [share(parts, replica, num_replicas) for replica in range(num_replicas)]
    assert_equal(joined(shares), step)
    for group in range(NUM_GROUPS):
        with_group = [replica for replica, part in enumerate(shares) if group in part.experience.group_ids]
        assert len(with_group) == 1, "a group stays together"
        assert all(part.holders[group] == with_group[0] for part in shares), "and all say where it is"
    for part in shares:
        assert all(values.dtype == FIELDS[name][0] for name, values in part.experience.columns().items())


def test_shipments_of_several_steps_do_not_mix():
    shipments = {(*KEY[:2], step, chunk): whole_step(step) for step in (7, 8) for chunk in (0, 1)}
    parts = read_parts([{}, as_tensors(shipments)])
    assert parts.keys() == shipments.keys()
    for key, (part,) in parts.items():
        assert_equal(part, shipments[key])


def test_a_file_holds_a_shipment_without_samples(tmp_path: Path):
    nothing = of_owner(whole_step(), [0] * NUM_GROUPS, 1)
    write_files(tmp_path, {"file": Contents(as_tensors({KEY: nothing}), {})})
    ((part,),) = read_parts([read_contents(tmp_path / "file").tensors]).values()
    assert_equal(part, nothing)


def transfers_of(order: Order, *roles: str) -> Transfers:
    """Of a rank that hosts `roles`, each of one replica."""
    hosted = {name: SimpleNamespace(shipments={}, dp=0, grid=SimpleNamespace(dp=1)) for name in roles}
    shape = SimpleNamespace(selects_groups=False, replays_rollout=False)
    return Transfers(shape=shape, grids={}, order=order, exchange=None, roles=hosted, trace=None)


def crossing_order(step: int) -> Order:
    order = Entries()
    order.post("samples", "rollout", "reward", step)
    order.task("generate", "rollout", step=step + 1)
    order.post("samples", "rollout", "reward", step + 1)
    order.wait("samples", "rollout", "reward", step)
    order.wait("samples", "rollout", "reward", step + 1)
    return Order.of(order)


def test_what_crosses_goes_to_the_role_that_posted_it():
    saved = [as_tensors({KEY: whole_step()})]
    source, other = transfers_of(crossing_order(7), "rollout"), transfers_of(crossing_order(7), "reward")
    source.restore(saved)
    other.restore(saved)
    assert_equal(source.roles["rollout"].shipments["samples", 7, 0], whole_step())
    assert not other.roles["reward"].shipments


@pytest.mark.parametrize("saved", [[], [as_tensors({(*KEY[:2], 6, 0): whole_step()})]])
def test_what_the_order_does_not_begin_with_is_refused(saved):
    with pytest.raises(CheckpointError, match=r"expected \[\('rollout', 'samples', 7, 0\)\]"):
        transfers_of(crossing_order(7), "rollout").restore(saved)
