"""What a stand-in for SGLang's server does in an update group: it makes its end of torch's own, as SGLang does."""

import asyncio
from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from starlette.responses import JSONResponse, Response
from torch import Tensor
from torch.distributed.distributed_c10d import Backend, PrefixStore, _new_process_group_helper, _world, rendezvous

if TYPE_CHECKING:
    from tests.unit.http_servers import StandInServer

LIMIT = timedelta(seconds=30)


class StandInBroadcasts:
    """`received` is what the last update brought, or brings. `dies_in`, `hangs_in`: the part, counted from 1, in which
    the server ends, or takes no broadcast."""

    def __init__(self, server: "StandInServer") -> None:
        self.server = server
        self.received: dict[str, Tensor] = {}
        self.num_parts = 0
        self.start()

    def start(self) -> None:
        """As a new process has it."""
        self.groups: dict[str, dist.ProcessGroup] = {}
        self.is_open = False
        self.dies_in = self.hangs_in = 0

    def routes(self) -> Mapping[str, Any]:
        return {
            "/init_weights_update_group": self._join,
            "/destroy_weights_update_group": self._leave,
            "/begin_weight_update": self._begin,
            "/update_weights_from_distributed": self._receive,
            "/end_weight_update": self._end,
            "/flush_cache": self._flush,
            "/update_weight_version": self._label,
        }

    async def _join(self, body: Any, query: Any) -> Response:
        if not body:
            return refused("master_address is missing", 422)
        await asyncio.to_thread(self._make, body)
        return JSONResponse({"success": True})

    def _make(self, body: Mapping[str, Any]) -> None:
        size, rank, name = body["world_size"], body["rank_offset"], body["group_name"]
        address = f"tcp://{body['master_address']}:{body['master_port']}"
        store, _, _ = next(iter(rendezvous(address, rank, size, timeout=LIMIT)))
        within = PrefixStore(name, store)
        how = {"group_name": name, "timeout": LIMIT}
        group, _ = _new_process_group_helper(size, rank, [], Backend(body["backend"]), within, **how)
        self.groups[name], _world.pg_group_ranks[group] = group, {number: number for number in range(size)}

    async def _leave(self, body: Any, query: Any) -> Response:
        if body["group_name"] not in self.groups:
            return refused("The group to be destroyed does not exist.")
        dist.destroy_process_group(self.groups.pop(body["group_name"]))
        return JSONResponse({"success": True})

    async def _begin(self, body: Any, query: Any) -> Response:
        if self.is_open:
            return refused("a weight-update session is already open; call end_weight_update() first")
        self.server.idle("the beginning of an update")
        self.is_open, self.received, self.num_parts = True, {}, 0
        return JSONResponse({"success": True})

    async def _receive(self, body: Any, query: Any) -> Response:
        if not self.is_open or body["group_name"] not in self.groups:
            return refused("it has no such group, or no session is open")
        self.num_parts += 1
        if self.num_parts == self.hangs_in:
            await asyncio.sleep(LIMIT.total_seconds())
        if self.num_parts == self.dies_in:
            dist.destroy_process_group(self.groups.pop(body["group_name"]))
            self.server.end()
            return JSONResponse({})
        kinds = [getattr(torch, name) for name in body["dtypes"]]
        sizes = [kind.itemsize * torch.Size(shape).numel() for kind, shape in zip(kinds, body["shapes"], strict=True)]
        flat = torch.empty(sum(sizes), dtype=torch.uint8)
        options = dist.BroadcastOptions()
        await asyncio.to_thread(lambda: self.groups[body["group_name"]].broadcast([flat], options).wait())
        for name, piece, kind, shape in zip(body["names"], flat.split(sizes), kinds, body["shapes"], strict=True):
            self.received[name] = piece.view(kind).view(shape)
        return JSONResponse({"success": True})

    async def _end(self, body: Any, query: Any) -> Response:
        if not self.is_open:
            return refused("no weight-update session is open; call begin_weight_update() first")
        self.is_open = False
        return JSONResponse({"success": True})

    async def _flush(self, body: Any, query: Any) -> Response:
        self.server.idle("a flush of the cache")
        return await self.server.flush(float(query.get("timeout", 0)))

    async def _label(self, body: Any, query: Any) -> Response:
        if self.is_open:
            self.server.broken.append("a version in the middle of an update")
        self.server.label = body["new_version"]
        return JSONResponse({"success": True})


def refused(message: str, status: int = 400) -> Response:
    return JSONResponse({"success": False, "message": message}, status)
