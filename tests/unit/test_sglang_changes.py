"""What changed of the weights, written over what a server has of them: its own parameters come into the slots first."""

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from rltrain.errors import EngineLost
from rltrain.rollout.servers.sglang_weights import Delivery
from tests.loading_server import NOISE, LoadingServer, model_of
from tests.unit.test_sglang_delivery import (
    LAYOUT,
    PARTS,
    assert_holds,
    deliver,
    delivery,
    delivery_to,
    padded_rows,
    server,
    weights,
)

__all__ = ["delivery", "server"]

READS = len(PARTS)
CALLS = 1 + 2 * len(PARTS) + 3
"""Of a sync of what changed: its begin, a read and a load of each part, its finish and end, the version asked."""


def changed(values: Mapping[str, Tensor], version: int) -> dict[str, Tensor]:
    """With some elements of some parameters changed; no element that is padding."""
    made = {name: tensor.clone() for name, tensor in values.items()}
    for number, (name, tensor) in enumerate(made.items()):
        rows = tensor[:21] if padded_rows(name) else tensor
        if number % 3 != version % 3:
            rows.view(-1)[version :: 5 + number] += 1.0
    return made


def send_changes(
    delivery: Delivery,
    before: Mapping[str, Tensor],
    values: Mapping[str, Tensor],
    version: int,
    skip: int | None = None,
) -> None:
    """As a reshard does: only what differs is written."""
    delivery.begin()
    for part in range(delivery.num_parts):
        if part == skip:
            continue
        for name, view in delivery.tensors(part, is_kept=True).items():
            differs = values[name] != before[name]
            view[differs] = values[name][differs]
        delivery.arrived(part, verify=version % 2 == 1)
    delivery.finish(version)


def test_changes_are_written_over_what_the_server_has(server: LoadingServer, delivery: Delivery) -> None:
    values = weights(1)
    deliver(delivery, values, 1)
    for version in range(2, 6):
        server.calls = []
        before, values = values, changed(values, version)
        send_changes(delivery, before, values, version)
        assert_holds(server.models[0], values)
        assert (delivery.version, server.version, len(server.calls)) == (version, str(version), CALLS)
    deliver(delivery, weights(9), 9)
    assert_holds(server.models[0], weights(9))


def test_the_servers_own_memory_is_what_is_remembered(server: LoadingServer, delivery: Delivery) -> None:
    """And not a copy of it: what the server changed would be found by whoever compares both sides."""
    values = weights(1)
    deliver(delivery, values, 1)
    server.models[0].held["model.norm.weight"][3] = 77.0
    delivery.begin()
    found = {name: view.clone() for part in range(READS) for name, view in delivery.tensors(part, is_kept=True).items()}
    assert float(found.pop("model.norm.weight")[3]) == 77.0
    assert all(torch.equal(tensor, values[name]) for name, tensor in found.items())


def test_parts_without_changes_need_not_come(server: LoadingServer, delivery: Delivery) -> None:
    values = weights(1)
    deliver(delivery, values, 1)
    for version, skipped in ((2, 0), (3, 1), (4, READS - 1)):
        before, values = values, changed(values, version)
        for name in delivery._staging.views(skipped):
            values[name] = before[name]
        send_changes(delivery, before, values, version, skip=skipped)
        assert_holds(server.models[0], values)
        server.models[0].held["model.norm.weight"].fill_(NOISE)
        delivery.redeliver()
        assert_holds(server.models[0], values)


@pytest.mark.parametrize("dies_at", [0, 1, 2, 3, 4, 2 * READS, CALLS - 3, CALLS - 1])
def test_a_server_that_dies_meanwhile_is_replaced_by_one_with_all_changes(dies_at: int) -> None:
    """What is still to come is written over the copy of what it had."""
    server = LoadingServer(model_of(LAYOUT, 0))
    delivery = Delivery(
        PARTS, 0, device=torch.device("cpu"), keep=True, group=None, call=lambda p, b: server.call(p, b)
    )
    before = weights(1)
    deliver(delivery, before, 1)
    server.calls, server.dies_at = [], dies_at
    values = changed(before, 2)
    with pytest.raises(EngineLost, match="connection reset"):
        send_changes(delivery, before, values, 2)
    assert delivery.version is None
    server = LoadingServer(model_of(LAYOUT, 0))
    delivery.check_layout()
    delivery.redeliver()
    assert_holds(server.models[0], values)
    before, values = values, changed(values, 4)
    send_changes(delivery, before, values, 4)
    assert_holds(server.models[0], values)
    delivery.close()


def test_a_sync_of_changes_may_begin_anew_and_send_everything(server: LoadingServer, delivery: Delivery) -> None:
    before = weights(1)
    deliver(delivery, before, 1)
    for abandoned in range(READS):
        delivery.begin()
        for part in range(abandoned):
            delivery.tensors(part, is_kept=True)
            delivery.arrived(part)
        delivery.tensors(abandoned, is_kept=True)
        values = weights(10 + abandoned)
        for part in range(READS):
            for name, view in delivery.tensors(part).items():
                rows = slice(0, 21) if padded_rows(name) else slice(None)
                view[rows] = values[name][rows]
            delivery.arrived(part, verify=True)
        delivery.finish(10 + abandoned)
        assert_holds(server.models[0], values)


def test_what_the_server_cannot_read_is_taken_from_the_copy(server: LoadingServer, delivery: Delivery) -> None:
    """So that no memory of another part gets into it, or to other engines."""
    before = weights(1)
    deliver(delivery, before, 1)
    values, norm = changed(before, 2), server.models[0].get_submodule("model.norm")
    weight = norm.get_parameter("weight")
    del norm.weight
    with pytest.raises(EngineLost, match=r"no parameter model\.norm\.weight"):
        send_changes(delivery, before, values, 2)
    norm.register_parameter("weight", weight)
    server.is_open = False
    delivery.redeliver()
    assert_holds(server.models[0], values)


def test_without_a_copy_a_sync_of_changes_needs_none(server: LoadingServer) -> None:
    delivery = delivery_to(server, keep=False)
    before = weights(1)
    deliver(delivery, before, 1)
    values = changed(before, 2)
    send_changes(delivery, before, values, 2)
    assert_holds(server.models[0], values)
    delivery.close()
