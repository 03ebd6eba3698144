"""What ranks remember of a sync: when they lose it, and messages that do not fit."""

from types import SimpleNamespace

import pytest
import torch

from rltrain.errors import SyncError
from rltrain.offload.memory_parts import MemoryPart
from rltrain.reshard.changes import Extent
from rltrain.reshard.copies import Steps, make_steps
from rltrain.reshard.copy_table import CopyTable
from rltrain.reshard.delta import CHANGES, HEADER_BYTES, WHOLE, Coder, DeltaSettings, headers_of
from rltrain.reshard.megatron_layout import megatron_layout
from rltrain.reshard.plan import plan
from rltrain.reshard.rounds import STAGES, choose_rounds, stage_streams
from rltrain.reshard.wires import Memory
from rltrain.roles.weight_sync import WeightSyncTask
from rltrain.rollout.layout import engine_layout
from rltrain.runtime.grid import Grid
from tests.model_shards import tiny_architecture

CPU = torch.device("cpu")


def steps_of(rank: int) -> Steps:
    """Of a sync from rank 0 to rank 1, of which neither has native memory to share."""
    architecture = tiny_architecture("llama")
    layouts = megatron_layout(architecture, Grid((0,))), engine_layout(architecture, Grid((1,)))
    planned = plan(*layouts, rank, 2)
    exchanged, headers = stage_streams(planned), headers_of(DeltaSettings())
    rounds = tuple(
        choose_rounds(max(made.sends.total_bytes, made.receives.total_bytes), 1, 2**16) for made in exchanged
    )
    return make_steps(planned, exchanged, rounds, headers=headers)


@pytest.fixture
def receiver() -> tuple[Coder, Steps, Memory]:
    """With memory for all that arrives, of zeros."""
    steps = steps_of(1)
    coder = Coder(steps, CPU, DeltaSettings())
    coder.begin(whole=True)
    used = steps.slices["src_base"].max() + 1
    memory = Memory([torch.zeros(2**18, dtype=torch.uint8) for _ in range(max(used, steps.bases.slots))])
    coder.use(memory, CopyTable(steps.slices, CPU))
    return coder, steps, memory


HEADERS = {
    "of no kind": [0, 0],
    "whole, and too short": [WHOLE, 64],
    "longer than the message": [CHANGES, 2**40, 0, 2**38],
    "of fewer values than it has": [CHANGES, 0, 0, 5],
    "with a negative count": [CHANGES, 0, -1, 0],
    "whose lengths say otherwise": [CHANGES, 0, 5, 5],
}


@pytest.mark.parametrize("header", HEADERS)
def test_a_message_that_does_not_fit_is_refused_by_name(header: str, receiver: tuple[Coder, Steps, Memory]) -> None:
    coder, steps, memory = receiver
    stage = steps.stages[0]
    message = stage.receives[0][0]
    numbers = HEADERS[header] + [0] * (HEADER_BYTES // 8 - len(HEADERS[header]))
    if header == "whose lengths say otherwise":
        numbers[1] = Extent((message.num_bytes - HEADER_BYTES) // 4, 4, 5, 5).num_bytes
    memory.bytes(message.base)[message.offset : message.offset + HEADER_BYTES].view(torch.int64).copy_(
        torch.tensor(numbers)
    )
    with pytest.raises(SyncError, match="does not fit the plan.*weight_sync.delta=null sends everything"):
        coder.decode(stage, 0)


def test_a_sender_keeps_as_many_bytes_as_it_sends() -> None:
    sender, receiver = (Coder(steps_of(rank), CPU, DeltaSettings()) for rank in (0, 1))
    sends = [message for stage in steps_of(0).stages for messages in stage.sends for message in messages]
    total = sum(message.num_bytes - HEADER_BYTES for message in sends)
    assert receiver.kept_bytes == 0 and total <= sender.kept_bytes < total + 16 * len(sends)


def test_headers_are_of_messages_that_are_compared() -> None:
    assert [bool(size) for size in headers_of(DeltaSettings())] == [not kind.shared for kind in STAGES]
    assert all(headers_of(DeltaSettings(in_shared_memory=True)))


def test_what_changed_since_a_run_that_failed_is_not_sent() -> None:
    coder = Coder(steps_of(0), CPU, DeltaSettings())
    coder.begin(whole=True)
    coder.finish()
    coder.begin(whole=False)  # and does not come to its end
    with pytest.raises(SyncError, match="did not come to its end"):
        coder.begin(whole=False)


def test_an_engine_has_lost_its_weights_where_another_version_or_empty_memory_is_found() -> None:
    part = MemoryPart(lambda: [weights])
    weights = torch.ones(8)
    engine = SimpleNamespace(policy_version=4, num_restarts=0)
    sync = SimpleNamespace(engine=engine, weights=part, left=None)

    def lost() -> bool:
        return WeightSyncTask.has_lost_weights(sync)  # type: ignore[arg-type]

    assert lost(), "nothing has come yet"
    sync.left = 4, 0, 0
    assert not lost()
    engine.policy_version = None
    assert lost(), "an update has failed"
    engine.policy_version, engine.num_restarts = 4, 1
    assert lost(), "its process was started anew"
    engine.num_restarts = 0
    part.save()
    part.leave()
    part.allocate()
    part.fill()
    assert not lost(), "it was on the host meanwhile"
    part.leave(drop=True)
    part.allocate()
    part.fill(rewritten=True)
    assert lost()
    sync.engine = None
    assert not lost(), "a rank of the actor alone"
