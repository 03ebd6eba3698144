"""What servers of a kind understand: samples to draw, and new weights."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rltrain.checkpoint.safetensors_file import Entry
from rltrain.rollout.engine import SamplingParams
from rltrain.rollout.http.calls import Calls
from rltrain.rollout.http.drawing import Drawing
from rltrain.rollout.http.update_group import GroupAddress


@dataclass(frozen=True)
class Described:
    """What a server says of itself; None: it says nothing."""

    model: str
    """What requests call its model."""
    max_context_tokens: int | None = None
    num_ranks: int | None = None
    """That would join an update group; None: it can have none."""


class BroadcastProtocol(Protocol):
    """How servers of a kind take weights over a process group. Raises as `Calls` does."""

    async def join(self, calls: Calls, group: GroupAddress, limit_s: float) -> None:
        """Answers once the group is there."""
        ...

    async def begin(self, calls: Calls) -> None:
        """An update; one that somebody left open ends."""
        ...

    async def receive(self, calls: Calls, group: str, entries: Sequence[Entry], limit_s: float) -> None:
        """Take one broadcast of bytes, of which `entries` lie one behind the other; answers once they are in use."""
        ...

    async def end(self, calls: Calls, label: str, limit_s: float) -> None:
        """It serves what it has received under `label`, with nothing kept of older weights."""
        ...

    async def leave(self, calls: Calls, group: str) -> None:
        """Its part of the group is over."""
        ...


class ServerProtocol(Protocol):
    """Of servers of one kind; it has no state. Raises as `Calls` does."""

    name: str
    ways: Sequence[str]
    """By which its weights can be changed: those of http.weights (folder, group), and delta, by folders of what changed
    since a version, as server/rltrain_delta_files.py has them."""
    broadcasts: BroadcastProtocol | None
    """For way group; None: it has no such."""

    async def describe(self, calls: Calls) -> Described: ...

    def request(
        self, drawing: Drawing, sampling: SamplingParams, described: Described
    ) -> tuple[str, Mapping[str, Any]]:
        """The path and body of a POST that draws."""
        ...

    def take(self, drawing: Drawing, event: Mapping[str, Any]) -> str | None:
        """Add what an event brings to the drawing; the label of the weights that it is of, where the event has it.

        Raises ServerRefuses where it is an error.
        """
        ...

    async def withdraw(self, calls: Calls, names: Sequence[str]) -> bool:
        """End these requests early; whether the server then tells the rest of what it has drawn."""
        ...

    async def version(self, calls: Calls) -> str | None:
        """The label of its weights; None where it knows none."""
        ...

    async def prepare_for_weights(self, calls: Calls, way: str) -> str | None:
        """Before the first update by one of `ways`: why it cannot be, None where it can."""
        ...

    async def load_from_disk(self, calls: Calls, folder: str, label: str, limit_s: float) -> None:
        """Have it serve the checkpoint in `folder`, under `label`, with nothing kept of older weights; by way delta
        that may be what changed since the version that it has."""
        ...


@dataclass(frozen=True)
class Receiver:
    """A server that weights are sent to."""

    protocol: ServerProtocol
    calls: Calls
