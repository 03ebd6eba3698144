"""The routes of a vLLM server for weights over NCCL, over its stand-in. They answer as those of vLLM 0.32 do."""

import asyncio
import base64
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from starlette.responses import JSONResponse, Response
from torch import Tensor

from tests.support.nccl_on_gloo import UNIQUE_ID_BYTES, PyNcclCommunicator

if TYPE_CHECKING:
    from tests.support.http_servers import StandInServer

PACKING = {"packed", "packed_buffer_size_bytes", "packed_num_buffers"}
INIT_FIELDS = {"rank_offset", "world_size", "nccl_unique_id_b64", *PACKING}
HANG_S = 30.0


class StandInTransfers:
    """`received` has the tensors of the last or current update.

    In part `dies_in`, counted from 1, the server ends; in part `hangs_in` it does not take the broadcast, and in part
    `fails_in` it does not load the tensors. With `fails_to_join` it joins no group. `num_replicas` are those of
    data parallelism.
    """

    def __init__(self, server: "StandInServer", engine: str) -> None:
        self.server, self.engine = server, engine
        self.received: dict[str, Tensor] = {}
        self.num_parts, self.num_replicas = 0, 1
        self.start()

    def start(self) -> None:
        """Resets the state to that of a new process."""
        self.groups: dict[str, PyNcclCommunicator] = {}
        self.is_open = self.has_remains = False
        """Whether an update is open, and whether the model holds parts of a failed one."""
        self.dies_in = self.hangs_in = self.fails_in = 0
        self.fails_to_join = False

    def routes(self) -> Mapping[str, Any]:
        return {
            "/get_world_size": self._world_size,
            "/is_paused": self._is_paused,
            "/init_weight_transfer_engine": self._init,
            "/shutdown_weight_transfer_engine": self._shut_down,
            "/start_weight_update": self._begin,
            "/update_weights": self._receive,
            "/finish_weight_update": self._end,
        }

    async def _world_size(self, body: Any, query: Any) -> Response:
        return JSONResponse({"world_size": self.num_replicas})

    async def _is_paused(self, body: Any, query: Any) -> Response:
        return JSONResponse({"is_paused": self.server.is_paused})

    async def _init(self, body: Any, query: Any) -> Response:
        told = body["init_info"]
        assert told.keys() == INIT_FIELDS and told["packed"]
        assert not self.groups, "vLLM would keep both communicators"
        unique_id, rank = base64.b64decode(told["nccl_unique_id_b64"], validate=True), told["rank_offset"]
        if len(unique_id) != UNIQUE_ID_BYTES:
            return failed(
                f"NCCLWeightTransferInitInfo: nccl_unique_id_b64 must decode to 128 bytes, got {len(unique_id)}"
            )
        if self.fails_to_join:
            return failed("NCCL error: invalid usage (run with NCCL_DEBUG=WARN for details)")
        join = PyNcclCommunicator.from_unique_id_bytes
        self.groups["its one"] = await asyncio.to_thread(join, unique_id, rank, told["world_size"], None)
        return JSONResponse({"message": "Weight transfer initialized"})

    async def _shut_down(self, body: Any, query: Any) -> Response:
        if self.is_open:
            return failed("Cannot release a trainer connection during a weight update")
        for group in self.groups.values():
            group.destroy()
        self.groups = {}
        return JSONResponse({"message": "Weight transfer shut down"})

    async def _begin(self, body: Any, query: Any) -> Response:
        if self.is_open:
            return failed(
                "start_weight_update called while a weight update is already active. Call finish_weight_update first."
            )
        if not self.server.is_paused:
            self.server.broken.append("an update while it was not paused")
        self.server.idle("the beginning of an update")
        self.is_open, self.received, self.num_parts = True, {}, 0
        return JSONResponse({"message": "Weight update started"})

    async def _receive(self, body: Any, query: Any) -> Response:
        if not self.is_open:
            return failed("start_weight_update must be called before update_weights.")
        if not self.groups:
            self.is_open = False
            return failed("NCCL weight transfer not initialized. Call init_transfer_engine() first.")
        if self.has_remains:
            self.server.broken.append("parts of an update on top of those of a failed one")
        self.num_parts += 1
        if self.num_parts == self.hangs_in:
            await asyncio.sleep(HANG_S)
        if self.num_parts == self.dies_in:
            self.groups.popitem()[1].destroy()
            self.server.end()
            return JSONResponse({})
        told = body["update_info"]
        kinds = [getattr(torch, name) for name in told["dtype_names"]]
        sizes = [kind.itemsize * torch.Size(shape).numel() for kind, shape in zip(kinds, told["shapes"], strict=True)]
        flat = torch.empty(sum(sizes), dtype=torch.uint8)
        await asyncio.to_thread(self.groups["its one"].broadcast, flat, 0)
        for name, piece, kind, shape in zip(told["names"], flat.split(sizes), kinds, told["shapes"], strict=True):
            self.received[name] = piece.view(kind).view(shape)
        if self.num_parts == self.fails_in:
            self.is_open, self.has_remains = False, True
            return failed(f"There is no module or parameter named {told['names'][0]!r}")
        return JSONResponse({"message": "Weights updated"})

    async def _end(self, body: Any, query: Any) -> Response:
        if not self.is_open:
            return failed("finish_weight_update called without a matching start_weight_update.")
        self.is_open = self.has_remains = False
        self.server.label = body.get("weight_version", self.server.label)
        return JSONResponse({"message": "Weight update finished"})


def failed(why: str) -> Response:
    """Returns the answer of vLLM if a worker raises."""
    message = (
        f"Call to collective_rpc method failed: Worker failed with error '{why}', "
        "please check the stack trace above for the root cause"
    )
    return JSONResponse({"error": {"message": message, "type": "InternalServerError", "param": None, "code": 500}}, 500)
