"""What SGLang, vLLM and OpenAI's API understand: samples to draw, and new weights."""

import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from secrets import token_hex
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from rltrain.checkpoint.safetensors_file import TensorEntry
from rltrain.rollout.delta_form import form
from rltrain.rollout.engine import SamplingParams
from rltrain.rollout.servers.calls import Calls, ServerBusy, ServerGone, ServerRefuses
from rltrain.rollout.servers.remote_engine import Drawing
from rltrain.rollout.servers.sglang_session import sampling_fields
from rltrain.runtime.messages import family_of
from rltrain.runtime.world import own_address

# The process group of this rank and one server, over which it broadcasts weights: torch's own, as SGLang makes it.
#
# No public function of torch's makes a group with the processes of another job. Stores and backends are public; what
# stands here besides is how torch nests their prefixes.

Backend = Any
"""torch's, of which its stubs leave out what is used here."""


@dataclass(frozen=True)
class GroupAddress:
    """Where a server finds the group, of which its ranks are 1 to `size` - 1."""

    name: str
    host: str
    port: int
    size: int
    backend: str


class UpdateGroup:
    """This rank's end, rank 0. Its store listens on the address alone by which this host reaches `peer`, and gloo's
    connections use that too. `join` and `broadcast` block, no longer than `timeout_s`, and raise RuntimeError where
    the other end is lost; `close` may be called meanwhile, and ends them.
    """

    def __init__(self, peer: str, num_ranks: int, device: torch.device, timeout_s: float) -> None:
        host = own_address(peer)
        family = family_of(host)
        with socket.create_server((host, 0), family=family) as listener:
            port, descriptor = listener.getsockname()[1], listener.detach()
        self._timeout, self._device = timedelta(seconds=timeout_s), device
        backend = "nccl" if device.type == "cuda" else "gloo"
        self.address = GroupAddress(f"rltrain-{token_hex(8)}", host, port, 1 + num_ranks, backend)
        self._store = dist.TCPStore(
            *(host, port, self.address.size),
            is_master=True,
            timeout=self._timeout,
            wait_for_workers=False,
            master_listen_fd=descriptor,
        )
        self._backend: Backend | None = None

    def join(self) -> None:
        """Once the server has been asked to."""
        within = dist.PrefixStore(f"{self.address.name}/", dist.PrefixStore(self.address.name, self._store))
        self._backend = self._nccl(within) if self.address.backend == "nccl" else self._gloo(within)

    def broadcast(self, tensor: Tensor) -> None:
        """`tensor`, contiguous and on this rank's device, has been taken by all when this returns."""
        assert self._backend is not None, "the group was joined"
        options = dist.BroadcastOptions()
        options.rootRank, options.timeout = 0, self._timeout
        self._backend.broadcast([tensor], options).wait()
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()

    def close(self) -> None:
        """The server's part of the group goes with its process, or by its own call for that."""
        backend, self._backend = self._backend, None
        if backend is not None:
            with suppress(RuntimeError):  # whatever state it is in
                backend.abort()

    def _gloo(self, store: dist.Store) -> Backend:
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = self._timeout
        # Connected at once, as the server's end is, whatever this process has for groups of its own.
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=self.address.host, lazy_init=False)]
        return dist.ProcessGroupGloo(dist.PrefixStore("cpu/", store), 0, self.address.size, options)

    def _nccl(self, store: dist.Store) -> Backend:
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = 2 * self._timeout  # torch then ends this process: whoever waits closes the group before
        with torch.cuda.device(self._device):
            return dist.ProcessGroupNCCL(dist.PrefixStore("cuda/", store), 0, self.address.size, options)


# SGLang's update groups: weights by broadcasts, within a session that it opens and closes for an update.

JOIN = "/init_weights_update_group"
BEGIN, END = "/begin_weight_update", "/end_weight_update"
FLUSH_S = 30
"""For requests to be over that were ended."""


class SGLangBroadcasts:
    """How a server takes weights over a process group. Raises as `Calls` does.

    Between `begin` and `end` it is not paused: it has no requests, and each call waits for those that others may have
    sent it.
    """

    async def join(self, calls: Calls, group: GroupAddress, limit_s: float) -> None:
        """Answers once the group is there."""
        body = {
            "master_address": group.host,
            "master_port": group.port,
            "rank_offset": 1,
            "world_size": group.size,
            "group_name": group.name,
            "backend": group.backend,
        }
        await calls.post(JOIN, body, limit_s)

    async def begin(self, calls: Calls) -> None:
        """An update; one that somebody left open ends."""
        try:
            await calls.post(BEGIN, {"selector": "target"})
        except ServerRefuses:
            await calls.post(END, {})
            await calls.post(BEGIN, {"selector": "target"})

    async def receive(self, calls: Calls, group: str, entries: Sequence[TensorEntry], limit_s: float) -> None:
        """Take one broadcast of bytes, of which `entries` lie one behind the other; answers once they are in use."""
        body = {
            "names": [entry.name for entry in entries],
            "dtypes": [str(entry.dtype).removeprefix("torch.") for entry in entries],
            "shapes": [entry.shape for entry in entries],
            "group_name": group,
            "load_format": "flattened_bucket",
            "flush_cache": False,
            "selector": "target",
        }
        await calls.post("/update_weights_from_distributed", body, limit_s)

    async def end(self, calls: Calls, label: str, limit_s: float) -> None:
        """It serves what it has received under `label`, with nothing kept of older weights."""
        await calls.post(END, {}, limit_s)
        await flush_and_label(calls, label, limit_s)

    async def leave(self, calls: Calls, group: str) -> None:
        """Its part of the group is over."""
        await calls.post("/destroy_weights_update_group", {"group_name": group})


async def flush_and_label(calls: Calls, label: str, limit_s: float) -> None:
    """Empties the prefix cache of a server that has taken new weights, and gives these their label.

    The scheduler may still hold the last batch of requests that have ended, so the server waits for it. Raises
    ServerBusy where it takes longer than FLUSH_S: the server has no label of ours then, and is given the weights anew.
    """
    try:
        await calls.post(f"/flush_cache?timeout={FLUSH_S}", {}, limit_s)
    except ServerRefuses as refused:
        raise ServerBusy(str(refused)) from None
    await calls.post("/update_weight_version", {"new_version": label, "abort_all_requests": False}, limit_s)


# What servers of a kind understand: samples to draw, and new weights.


@dataclass(frozen=True)
class ServerDescription:
    """What a server says of itself; None: it says nothing."""

    model: str
    """What requests call its model."""
    max_context_tokens: int | None = None
    num_ranks: int | None = None
    """That would join an update group; None: it can have none."""


class ServerProtocol(Protocol):
    """Of servers of one kind; it has no state. Raises as `Calls` does."""

    name: str
    ways: Sequence[str]
    """By which its weights can be changed: those of http.weights (folder, group), and delta, by folders of what changed
    since a version, as server/rltrain_delta_files.py has them."""
    broadcasts: SGLangBroadcasts | None
    """For way group; None: it has no such."""

    async def describe(self, calls: Calls) -> ServerDescription: ...

    def request(
        self, drawing: Drawing, sampling: SamplingParams, described: ServerDescription
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


# SGLang's own protocol: token ids in, token ids and log-probs out, each response with the version of its weights.

FROM_DISK = "/update_weights_from_disk"
SGLANG_HOW = (
    "start it with rltrain's plugin for SGLang, of the same rltrain: PYTHONPATH=<rltrain>/rollout/servers/in_sglang, "
    "or have weight_sync.delta: null, so that it is given whole checkpoints"
)
NO_SUCH_ROUTE = (404, 405)


class SGLangProtocol:
    """Implements `ServerProtocol`."""

    name = "sglang"
    ways: Sequence[str] = ("folder", "group", "delta")
    broadcasts: SGLangBroadcasts | None = SGLangBroadcasts()

    async def describe(self, calls: Calls) -> ServerDescription:
        info = await calls.get("/server_info")
        model = await calls.get("/model_info")
        context = info.get("context_length") or info.get("max_req_input_len")
        num_ranks = info.get("tp_size") if info.get("pp_size") == info.get("dp_size") == 1 else None
        return ServerDescription(str(model.get("model_path")), context, num_ranks)

    def request(
        self, drawing: Drawing, sampling: SamplingParams, described: ServerDescription
    ) -> tuple[str, Mapping[str, Any]]:
        body = {
            "rid": drawing.name,
            "input_ids": [*drawing.sample.context],
            "sampling_params": sampling_fields(drawing.sample, drawing.limit, sampling, seeded=True),
            "return_logprob": True,
            "stream": True,
        }
        return "/generate", body

    def take(self, drawing: Drawing, event: Mapping[str, Any]) -> str | None:
        if "error" in event:
            raise ServerRefuses(f"/generate: {event['error']}", 400)
        meta = event["meta_info"]
        drawn = meta.get("output_token_logprobs") or ()
        drawing.add([entry[1] for entry in drawn], [entry[0] for entry in drawn], meta["completion_tokens"])
        if meta["finish_reason"] is not None:
            drawing.end = str(meta["finish_reason"]["type"])
        versions = {str(span["version"]) for span in meta.get("weight_versions") or ()} or {meta["weight_version"]}
        return str(versions.pop()) if len(versions) == 1 else f"several: {', '.join(sorted(map(str, versions)))}"

    async def withdraw(self, calls: Calls, names: Sequence[str]) -> bool:
        for name in names:
            await calls.post("/abort_request", {"rid": name, "abort_all": False})
        return True

    async def version(self, calls: Calls) -> str | None:
        found = (await calls.get("/model_info")).get("weight_version")
        return None if found is None else str(found)

    async def prepare_for_weights(self, calls: Calls, way: str) -> str | None:
        if way == "folder":
            return await without_route(calls, FROM_DISK)
        if (await self.describe(calls)).num_ranks is None:
            return f"it has pipeline stages or replicas (pp_size, dp_size), which take no weights by way of a {way}"
        return await without_route(calls, JOIN) if way == "group" else await _without_plugin(calls)

    async def load_from_disk(self, calls: Calls, folder: str, label: str, limit_s: float) -> None:
        await calls.post(FROM_DISK, {"model_path": folder, "load_format": "auto", "flush_cache": False}, limit_s)
        await flush_and_label(calls, label, limit_s)


async def _without_plugin(calls: Calls) -> str | None:
    """Why it takes no deltas; None where it does."""
    states: Any = (await calls.get("/server_info")).get("internal_states") or ({},)
    why = without_deltas(states[0])
    return None if why is None else f"{why}; {SGLANG_HOW}"


def without_deltas(told: Mapping[str, Any]) -> str | None:
    """Why a server that tells this of itself takes no deltas; None where it does."""
    found, own = told.get(form.FORMAT_KEY), form.FORMAT
    return None if found == own else f"it takes deltas of format {found}; expected {own}, that of this rltrain"


async def without_route(calls: Calls, path: str) -> str | None:
    """Why nothing can be posted to `path`; None where it can: an empty body is refused there, and changes nothing."""
    try:
        await calls.post(path, {})
    except ServerRefuses as refused:
        return f"it has no {path}" if refused.status in NO_SUCH_ROUTE else None
    return None


# OpenAI's completions, of servers that return token ids with them; weights from disk where they answer as SGLang.

MODELS = "/v1/models"


class OpenAIProtocol:
    """Implements `ServerProtocol`."""

    name = "openai"
    tells_version = "/model_info"
    """Where a server says which weights it has."""
    ways: Sequence[str] = ("folder", "delta")
    broadcasts: SGLangBroadcasts | None = None

    async def describe(self, calls: Calls) -> ServerDescription:
        model = (await calls.get(MODELS))["data"][0]
        return ServerDescription(str(model["id"]), model.get("max_model_len"))

    def request(
        self, drawing: Drawing, sampling: SamplingParams, described: ServerDescription
    ) -> tuple[str, Mapping[str, Any]]:
        return "/v1/completions", self.body(drawing, sampling, described) | {"seed": drawing.sample.seed}

    def body(self, drawing: Drawing, sampling: SamplingParams, described: ServerDescription) -> dict[str, Any]:
        return {
            "model": described.model,
            "prompt": [*drawing.sample.context],
            "max_tokens": drawing.num_left,
            "temperature": 0.0 if sampling.is_greedy(drawing.sample) else sampling.temperature,
            "top_p": sampling.top_p,
            "stop_token_ids": [*sampling.stop_token_ids],
            "ignore_eos": True,  # else its own end-of-text tokens count beside the job's
            "stop": [*sampling.stop],
            "logprobs": 1,
            "return_token_ids": True,
            "stream": True,
            **({"top_k": sampling.top_k} if sampling.top_k else {}),
        }

    def take(self, drawing: Drawing, event: Mapping[str, Any]) -> str | None:
        if "error" in event:
            raise ServerRefuses(f"/v1/completions: {event['error']}", 400)
        for choice in event["choices"]:
            tokens = choice.get("token_ids")
            logprobs = (choice.get("logprobs") or {}).get("token_logprobs") or []
            if tokens is None and (choice.get("text") or logprobs):
                raise ServerRefuses(
                    "/v1/completions: its answer has no token_ids, which it was asked for by return_token_ids; "
                    "expected a server that returns them, so that nothing is encoded again",
                    400,
                )
            drawing.add(tokens or [], logprobs)
            drawing.end = choice.get("finish_reason") or drawing.end
        version = event.get("weight_version")
        return None if version is None else str(version)

    async def withdraw(self, calls: Calls, names: Sequence[str]) -> bool:
        """Such servers end what nobody reads any more."""
        return False

    async def version(self, calls: Calls) -> str | None:
        try:
            found = (await calls.get(self.tells_version)).get("weight_version")
        except ServerRefuses as refused:
            if refused.status in NO_SUCH_ROUTE:
                return None
            raise
        return None if found is None else str(found)

    async def prepare_for_weights(self, calls: Calls, way: str) -> str | None:
        if await self.version(calls) is None:
            return "it has no /model_info that tells a weight_version, so nobody could know which weights it has"
        if way == "delta" and (why := without_deltas(await calls.get(self.tells_version))) is not None:
            return f"{why}; have weight_sync.delta: null, so that it is given whole checkpoints"
        return await without_route(calls, FROM_DISK)

    async def load_from_disk(self, calls: Calls, folder: str, label: str, limit_s: float) -> None:
        await calls.post(FROM_DISK, {"model_path": folder, "weight_version": label}, limit_s)


# vLLM's completions and its routes for reinforcement learning, which it has with VLLM_SERVER_DEV_MODE=1.

PAUSE = "/pause?mode=abort&clear_cache=true"
VLLM_HOW = 'start it with VLLM_SERVER_DEV_MODE=1 and --weight-transfer-config \'{"backend": "disk"}\''


class VLLMProtocol(OpenAIProtocol):
    """Implements `ServerProtocol`. Seeds are not sent: with them every row of a batch is drawn on its own."""

    name = "vllm"
    tells_version = "/weight_info"
    ways: Sequence[str] = ("folder",)

    def request(
        self, drawing: Drawing, sampling: SamplingParams, described: ServerDescription
    ) -> tuple[str, Mapping[str, Any]]:
        whole_text = {"include_stop_str_in_output": True, "skip_special_tokens": False}
        return "/v1/completions", {**self.body(drawing, sampling, described), **whole_text}

    async def prepare_for_weights(self, calls: Calls, way: str) -> str | None:
        try:
            await calls.get(self.tells_version)
            await calls.post("/init_weight_transfer_engine", {"init_info": {}})
        except (ServerRefuses, ServerGone) as problem:
            return f"{problem}; {VLLM_HOW}"
        return None

    async def load_from_disk(self, calls: Calls, folder: str, label: str, limit_s: float) -> None:
        await calls.post(PAUSE, {}, limit_s)
        try:
            await calls.post("/start_weight_update", {}, limit_s)
            await calls.post("/update_weights", {"update_info": {"path": folder}}, limit_s)
            await calls.post("/finish_weight_update", {"weight_version": label}, limit_s)
        finally:
            await calls.post("/resume", {}, limit_s)
