"""How new weights reach servers that somebody else runs: what all ways have in common."""

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from rltrain.models.element_types import ElementType
from rltrain.reshard.kernels.torch_types import DTYPES
from rltrain.reshard.layout import Layout
from rltrain.reshard.parts import parameter_types
from rltrain.rollout.http.calls import Calls
from rltrain.rollout.http.protocol import ServerProtocol


class Weights(Protocol):
    """What this rank has of the weights, on their way to its servers. An update is `begin`, for every part in order
    `tensors` and `arrived`, then `complete`; after that any server can be given them, as often as need be.

    `begin` to `complete` are called by the rank's main thread, `give` and `forget` in the event loop.
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

    async def give(self, protocol: ServerProtocol, calls: Calls) -> None:
        """Returns when the server has taken them; raises as `Calls` does."""
        ...

    async def forget(self, calls: Calls) -> None:
        """The server is gone, or has left: what was made for it alone is of no use any more."""
        ...

    def close(self) -> None: ...


def empty_tensors(part: Layout, rank: int, device: torch.device) -> dict[str, Tensor]:
    """For the parameters of a part on a rank, by name."""
    types: Sequence[int] = parameter_types(part, part.parts[part.ranks.index(rank)]).tolist()
    return {
        name: torch.empty(shape, dtype=DTYPES[ElementType(kind)], device=device)
        for (name, shape), kind in zip(part.on(rank).parameters, types, strict=True)
    }
