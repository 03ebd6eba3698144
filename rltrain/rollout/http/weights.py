"""How new weights reach servers that somebody else runs: what all ways have in common."""

import secrets
from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from rltrain.checkpoint.safetensors_file import Entry
from rltrain.models.table import ElementType
from rltrain.reshard.copy_table import DTYPES
from rltrain.reshard.layout import Layout, parameter_types
from rltrain.rollout.http.calls import Calls
from rltrain.rollout.http.protocol import Receiver, ServerProtocol
from rltrain.runtime.job_store import JobStore


class Weights(Protocol):
    """What this rank has of the weights, on their way to its servers. An update is `begin`, for every part in order
    `tensors` and `arrived`, then `complete`; after that any server can be given them, as often as need be.

    `open` follows `begin`, and `pass_on` every `arrived`: those two, `give` and `forget` are called in the event loop,
    the others by the rank's main thread.
    """

    way: str
    """Of a protocol's ways."""
    label: str | None
    """Of the weights that `give` gives; None before the first update. No other job has the same."""

    def begin(self) -> None: ...

    def tensors(self, part: int) -> Mapping[str, Tensor]:
        """Where to write the part's parameters, by name."""
        ...

    def arrived(self, part: int) -> None:
        """`tensors(part)` are written."""
        ...

    def complete(self, version: int) -> None:
        """All parts have arrived, on all ranks of the role. Collective over: these."""
        ...

    async def open(self, receivers: Sequence[Receiver]) -> None:
        """These servers will be given the update. What fails for one is raised by its `give`."""
        ...

    async def pass_on(self) -> None:
        """Send on what has arrived, where servers are sent anything before all has."""
        ...

    async def give(self, protocol: ServerProtocol, calls: Calls) -> None:
        """Returns when the server has taken them; raises as `Calls` does, WeightsLater where it can take no others than
        the next ones."""
        ...

    async def forget(self, calls: Calls) -> None:
        """The server is gone, or has left: what was made for it alone is of no use any more."""
        ...

    def metrics(self) -> dict[str, float]:
        """Of the last update."""
        ...

    def close(self) -> None: ...


class WeightsLater(Exception):  # noqa: N818 - names what happens
    """A server has to wait for the next update: nothing is kept of the last one."""


class WholeUpdates:
    """Of ways by which servers are sent nothing before all has arrived."""

    async def open(self, receivers: Sequence[Receiver]) -> None:
        """Nothing."""

    async def pass_on(self) -> None:
        """Nothing."""

    async def forget(self, calls: Calls) -> None:
        """Nothing was made for it."""

    def metrics(self) -> dict[str, float]:
        return {}


def shared_run(job_store: JobStore, role: str, *, leads: bool) -> str:
    """The beginning of labels that this run gives weights, the same on all ranks of the role; one of them leads."""
    key = f"http/{role}/run"
    if leads:
        job_store.put(key, secrets.token_hex(4))
    return str(job_store.get(key, waiting_for=f"the labels of role {role}'s weights"))


def entries_of(part: Layout, rank: int) -> list[Entry]:
    """Of the parameters of a part on a rank."""
    types: Sequence[int] = parameter_types(part, part.parts[part.ranks.index(rank)]).tolist()
    return [
        Entry(name, DTYPES[ElementType(kind)], tuple(shape))
        for (name, shape), kind in zip(part.on(rank).parameters, types, strict=True)
    ]


def empty_tensors(part: Layout, rank: int, device: torch.device) -> dict[str, Tensor]:
    """For the parameters of a part on a rank, by name."""
    return {entry.name: torch.empty(entry.shape, dtype=entry.dtype, device=device) for entry in entries_of(part, rank)}
