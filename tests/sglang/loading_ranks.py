"""The ranks of one engine. They give a server weights by the names of the checkpoint."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rltrain.checkpoint.hf_reader import load_parameters, load_quantized
from rltrain.errors import EngineLost
from rltrain.models import read_architecture
from rltrain.rollout.layout import EnginePart, engine_by_names, engine_of, in_parts
from rltrain.rollout.servers import sglang_weights
from rltrain.rollout.servers.calls import Client
from rltrain.rollout.servers.sglang_weights import Call, Delivery, NamedWeights
from rltrain.runtime.grid import Grid
from tests.sglang.servers import CALL_TIMEOUT_S, CPU, PART_BYTES


class Sender:
    """One rank of an engine. It sends checkpoints like the first one, in `dtype`, or with `fp8` rounded to FP8.

    With `direct` it sends SGLang's own parameters, otherwise the checkpoint's tensors by name.
    """

    def __init__(
        self,
        call: Call,
        checkpoint: Path,
        *,
        direct: bool = False,
        sees: bool = False,
        dtype: str = "float32",
        fp8: bool = False,
        rank: int = 0,
        num_ranks: int = 1,
    ) -> None:
        architecture = read_architecture(checkpoint, sees=sees)
        grid = Grid(tuple(range(num_ranks)), tp=num_ranks)
        self.rank, self.dtype = rank, dtype
        whole = engine_by_names(architecture, grid, dtype=dtype, fp8=fp8)
        if direct:
            whole = engine_of(architecture, grid, dtype=dtype, fp8=fp8, sglang=True)
        self.parts = in_parts(whole, PART_BYTES)
        self.delivery = Delivery(
            [part.layout for part in self.parts],
            rank,
            device=CPU,
            keep=True,
            group=dist.group.WORLD if num_ranks > 1 else None,
            call=call if rank == 0 else None,
            names=None if direct else NamedWeights.of(architecture),
        )
        self.delivery.check_layout()

    def send(
        self, checkpoint: Path, version: int, *, as_changes: bool = False, after_part: Callable[[int], object] = id
    ) -> None:
        """Sends a checkpoint's tensors as a weight sync does, and has them verified in every second one.

        With `as_changes` only elements that differ from those of the last sync are written.
        """
        self.delivery.begin()
        for number, part in enumerate(self.parts):
            views = self.delivery.tensors(number, is_kept=as_changes)
            wanted = {name: torch.zeros_like(view) for name, view in views.items()} if as_changes else views
            self._load(checkpoint, part, wanted)
            for name, view in views.items() if as_changes else ():
                held, new = (tensor.view(torch.uint8) for tensor in (view, wanted[name]))
                changed = held != new
                held[changed] = new[changed]
            self.delivery.arrived(number, verify=version % 2 == 0)
            after_part(number)
        self.delivery.finish(version)

    def _load(self, checkpoint: Path, part: EnginePart, parameters: Mapping[str, Tensor]) -> None:
        if not part.quantized.any():
            load_parameters(checkpoint, part.plain, self.rank, parameters)
            return
        dtype, layouts = getattr(torch, self.dtype), part.filled_from(part.plain)
        load_quantized(checkpoint, part.plain, layouts, self.rank, parameters, dtype=dtype)


@contextmanager
def opened(url: str, token: str, checkpoint: str, **options: Any) -> Iterator[tuple[Sender, Client]]:
    client = Client(CALL_TIMEOUT_S)
    client.connect(url, token)
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    sender = Sender(client.call, Path(checkpoint), **options, rank=rank, num_ranks=num_ranks)
    yield sender, client
    sender.delivery.close()
    client.close()


def send_in_turn(url: str, token: str, checkpoints: list[str], **options: Any) -> list[Any]:
    """Returns, on the first rank, SGLang's checksums of every rank after each checkpoint.

    The second one is sent as changes, all others whole.
    """
    with opened(url, token, checkpoints[0], **options) as (sender, client):
        found = []
        for version, checkpoint in enumerate(checkpoints, start=1):
            sender.send(Path(checkpoint), version, as_changes=version == 2)
            found.append(checksums_on_first(client))
        return found


def send_damaged(url: str, token: str, checkpoint: str) -> tuple[str, bool]:
    """Returns the failure of a sync with a damaged tensor on the second rank, and whether the server has loaded
    nothing."""
    with opened(url, token, checkpoint) as (sender, client):
        before = checksums_on_first(client)
        if dist.get_rank() == 1:
            sglang_weights.checksum_of = lambda tensor: 1
        try:
            sender.send(Path(checkpoint), 2)
        except EngineLost as lost:
            return str(lost), checksums_on_first(client) == before
        return "", False


def checksums_on_first(client: Client) -> Any:
    if dist.get_rank() > 0:
        return None
    return [of["checksums"] for of in client.call("/weights_checker", {"action": "checksum"})["ranks"]]
