"""The protocols of inference servers: requests for samples, and new weights, for SGLang, vLLM and OpenAI's API."""

import asyncio
import time
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Protocol

import torch

from rltrain.checkpoint.safetensors_file import TensorEntry
from rltrain.config.rollout import Sampling
from rltrain.rollout.delta_form import form
from rltrain.rollout.engine import SamplingParams
from rltrain.rollout.servers.calls import Calls, ServerBusy, ServerGone, ServerRefuses
from rltrain.rollout.servers.remote_engine import Drawing
from rltrain.rollout.servers.server_images import wrong_length
from rltrain.rollout.servers.update_groups import (
    Broadcasts,
    StoreGroup,
    UniqueIdGroup,
    UpdateGroup,
    names_types_shapes,
)

# SGLang's update groups: weights by broadcasts, inside an update session of the server.

JOIN = "/init_weights_update_group"
BEGIN, END = "/begin_weight_update", "/end_weight_update"
FLUSH, FLUSH_S = "/flush_cache", 30.0
"""Path of a flush, and the seconds that a server may take to drop ended requests."""
_FLUSH_AGAIN_S = 0.1


class SGLangBroadcasts:
    """SGLang's calls for weights over a process group. See `Broadcasts`.

    The server is not paused between `begin` and `end`. It has no requests from this rank then, and each call waits for
    requests from others.
    """

    def refusal(self, device: torch.device) -> str | None:
        """Returns None: a group is of NCCL on a GPU, else of gloo."""
        return None

    def group(self, peer: str, num_ranks: int, device: torch.device, timeout_s: float) -> UpdateGroup:
        return StoreGroup(peer, num_ranks, device, timeout_s)

    async def join(self, calls: Calls, group: UpdateGroup, limit_s: float) -> None:
        await calls.post(JOIN, await group.invitation(), limit_s)

    async def begin(self, calls: Calls, limit_s: float) -> None:
        try:
            await calls.post(BEGIN, {"selector": "target"})
        except ServerRefuses:
            await calls.post(END, {})
            await calls.post(BEGIN, {"selector": "target"})

    async def receive(self, calls: Calls, group: str, entries: Sequence[TensorEntry], limit_s: float) -> None:
        names, types, shapes = names_types_shapes(entries)
        body = {
            "names": names,
            "dtypes": types,
            "shapes": shapes,
            "group_name": group,
            "load_format": "flattened_bucket",
            "flush_cache": False,
            "selector": "target",
        }
        await calls.post("/update_weights_from_distributed", body, limit_s)

    async def end(self, calls: Calls, label: str, limit_s: float) -> None:
        await calls.post(END, {}, limit_s)
        await flush_and_label(calls, label, limit_s)

    async def leave(self, calls: Calls, group: str) -> None:
        await calls.post("/destroy_weights_update_group", {"group_name": group})


async def flush_and_label(calls: Calls, label: str, limit_s: float) -> None:
    """Empties the prefix cache of an SGLang server with new weights, and then sets the label of these weights.

    Each of the two requests may take `limit_s` seconds. Raises as `flushed` does. The server then keeps its old label,
    so rltrain takes it out of service until it has been given the weights again.
    """
    await flushed(calls, limit_s)
    await calls.post("/update_weight_version", {"new_version": label, "abort_all_requests": False}, limit_s)


async def flushed(calls: Calls, limit_s: float = FLUSH_S) -> None:
    """Empties the prefix cache of an SGLang server once it is idle.

    A server refuses with status 400 while its scheduler counts a request. That lasts some moments after the request's
    last event, or after an abort. It also refuses while another flush waits. So this asks again for up to FLUSH_S
    seconds, and then raises ServerGone. A single request may take `limit_s` seconds. Other errors are those of `Calls`.
    """
    deadline = time.monotonic() + FLUSH_S
    while True:
        left_s = max(0.0, deadline - time.monotonic())
        try:
            await calls.post(f"{FLUSH}?timeout={min(left_s, limit_s / 2):.1f}", {}, limit_s)
            return
        except ServerRefuses as refused:
            if refused.status != HTTPStatus.BAD_REQUEST:
                raise
            if time.monotonic() + _FLUSH_AGAIN_S > deadline:
                raise ServerGone(f"{calls.name} is not idle after {FLUSH_S:g} s without requests: {refused}") from None
        await asyncio.sleep(_FLUSH_AGAIN_S)


# The interface of a protocol.

ADAPTER = "rltrain-"
"""Beginning of the names of adapters at servers. The label of the weights follows, so every version has its own
name."""


class Adapters(Protocol):
    """The calls for low-rank adapters that a server keeps apart from its base. They raise as `Calls` does."""

    async def refusal(self, calls: Calls, rank: int) -> str | None:
        """Returns the reason if the server takes no adapters of this rank, else None."""
        ...

    async def load(self, calls: Calls, base: str | None, folder: str, label: str, limit_s: float) -> None:
        """Has the server load the checkpoint folder `base` (None: it keeps its base), then PEFT's files in `folder` in
        place of earlier adapters, and serve both as `label`, with an empty prefix cache."""
        ...


@dataclass(frozen=True)
class ServerDescription:
    """A server's description of itself. None means that the server does not report the value."""

    model: str
    """Name of the model in requests."""
    max_context_tokens: int | None = None
    num_ranks: int | None = None
    """Number of the server's ranks in an update group. None if the server cannot join one."""


class ServerProtocol(Protocol):
    """A protocol, without state, for servers of one kind. Its methods raise as `Calls` does."""

    name: str
    ways: Sequence[str]
    """Names of the supported ways to change weights. "folder" and "group" are values of http.weights. "delta" is a
    folder of changes since an earlier version, in the format of in_sglang/rltrain_delta_files.py. "adapters" is a
    folder of the base, and one of its adapters for every version."""
    broadcasts: Broadcasts | None
    """Calls for the way "group". None if the protocol has no such way."""
    adapters: Adapters | None
    """Calls for the way "adapters". None if the protocol has no such way."""
    takes_images: bool
    """Whether requests may have images with token ids."""

    async def describe(self, calls: Calls) -> ServerDescription:
        """Asks the server for its model and limits."""
        ...

    def request(
        self, drawing: Drawing, sampling: SamplingParams, described: ServerDescription, adapter: str | None
    ) -> tuple[str, Mapping[str, Any]]:
        """Returns the path and body of a POST that asks for a sample's response as a stream. `adapter` is the name of
        the adapters to use, or None."""
        ...

    def take(self, drawing: Drawing, event: Mapping[str, Any]) -> str | None:
        """Adds the tokens of an event to `drawing`. Returns the label of their weights, or None if the event has none.

        Raises ServerRefuses if the event is an error.
        """
        ...

    async def without_logprobs(self, calls: Calls, sampling: Sampling) -> str | None:
        """Returns the reason if the server does not return the log-probs of the tempered distribution before
        truncation, else None."""
        ...

    async def withdraw(self, calls: Calls, names: Sequence[str]) -> bool:
        """Ends these requests early. Returns whether the server then streams their remaining tokens."""
        ...

    async def version(self, calls: Calls) -> str | None:
        """Returns the label of the server's weights, or None if the server knows no label."""
        ...

    async def prepare_for_weights(self, calls: Calls, way: str, lora_rank: int = 0) -> str | None:
        """Prepares a server for its first update by `way`. Returns the reason if it cannot take one, else None.
        `lora_rank` is the rank of the adapters by way "adapters"."""
        ...

    async def load_from_disk(self, calls: Calls, folder: str, label: str, limit_s: float) -> None:
        """Has the server load `folder` and serve it as `label`, with an empty prefix cache. The folder has a
        checkpoint, or by way "delta" the changes since the server's version."""
        ...


@dataclass(frozen=True)
class Receiver:
    """A server that receives weights."""

    protocol: ServerProtocol
    calls: Calls


# SGLang's own protocol: token ids in, token ids and log-probs out. Each response has the version of its weights.

GENERATE, FROM_DISK = "/generate", "/update_weights_from_disk"
PROGRESS_TOKENS = 64
"""Tokens between two progress events of a response."""
SGLANG_HOW = (
    "start it with this rltrain's plugin for SGLang (PYTHONPATH=<rltrain>/rollout/servers/in_sglang), "
    "or have weight_sync.delta: null, to send it whole checkpoints"
)
NO_SUCH_ROUTE = (404, 405)


class SGLangAdapters:
    """SGLang's calls for adapters. See `Adapters`."""

    async def refusal(self, calls: Calls, rank: int) -> str | None:
        info = await calls.get("/server_info")
        how = f"start it with --enable-lora --max-lora-rank {rank} --lora-target-modules all"
        if not info.get("enable_lora"):
            return f"it takes no adapters; {how}"
        if info["dp_size"] > 1:
            return f"it has dp_size {info['dp_size']}; adapters need 1"
        return _too_small(info["max_lora_rank"] or 0, rank, how)

    async def load(self, calls: Calls, base: str | None, folder: str, label: str, limit_s: float) -> None:
        for earlier in await _served_adapters(calls):
            await calls.post("/unload_lora_adapter", {"lora_name": earlier}, limit_s)
        if base is not None:
            await calls.post(FROM_DISK, {"model_path": base, "load_format": "auto", "flush_cache": False}, limit_s)
        await calls.post("/load_lora_adapter", {"lora_name": ADAPTER + label, "lora_path": folder}, limit_s)
        await flush_and_label(calls, label, limit_s)


async def _served_adapters(calls: Calls) -> list[str]:
    """Returns the names of the adapters at a server that rltrain has loaded."""
    names = [str(model["id"]) for model in (await calls.get(MODELS))["data"]]
    return [name for name in names if name.startswith(ADAPTER)]


def _too_small(largest: int, rank: int, how: str) -> str | None:
    return None if largest >= rank else f"it takes adapters up to rank {largest}, but model.lora.rank is {rank}; {how}"


class SGLangProtocol:
    """SGLang's native routes. See `ServerProtocol`."""

    name = "sglang"
    ways: Sequence[str] = ("folder", "group", "delta", "adapters")
    broadcasts: Broadcasts | None = SGLangBroadcasts()
    adapters: Adapters | None = SGLangAdapters()
    takes_images = True

    async def describe(self, calls: Calls) -> ServerDescription:
        info = await calls.get("/server_info")
        if (mode := info.get("disaggregation_mode")) not in (None, "null"):
            raise ServerRefuses(
                f"{calls.url} only serves one phase (disaggregation_mode {mode}); expected a server of both, without "
                "--disaggregation-mode",
                400,
            )
        model = await calls.get("/model_info")
        context = info.get("context_length") or info.get("max_req_input_len")
        num_ranks = info.get("tp_size") if info.get("pp_size") == info.get("dp_size") == 1 else None
        return ServerDescription(str(model.get("model_path")), context, num_ranks)

    def request(
        self, drawing: Drawing, sampling: SamplingParams, described: ServerDescription, adapter: str | None
    ) -> tuple[str, Mapping[str, Any]]:
        body = generate_body([drawing], sampling, seeded=True)
        one = ("rid", "input_ids", "image_data", "sampling_params")
        found = {name: value[0] if name in one else value for name, value in body.items()}
        return GENERATE, found | ({} if adapter is None else {"lora_path": adapter})

    def take(self, drawing: Drawing, event: Mapping[str, Any]) -> str | None:
        if "error" in event:
            raise ServerRefuses(f"{GENERATE}: {event['error']}", 400)
        meta = event["meta_info"]
        drawn = meta.get("output_token_logprobs") or ()
        drawing.add([entry[1] for entry in drawn], [entry[0] for entry in drawn], meta["completion_tokens"])
        if (reason := meta["finish_reason"]) is not None:
            drawing.meta, drawing.end, drawing.matched = meta, str(reason["type"]), reason.get("matched")
            problem = wrong_length(drawing.sample, meta.get("prompt_tokens")) if drawing.images else None
            if problem and drawing.end != "abort":
                raise ServerRefuses(problem, 400)
        spans = meta.get("weight_versions") or ()
        return the_version({str(span["version"]) for span in spans} or {str(meta["weight_version"])})

    async def without_logprobs(self, calls: Calls, sampling: Sampling) -> str | None:
        return None

    async def withdraw(self, calls: Calls, names: Sequence[str]) -> bool:
        await asyncio.gather(*(calls.post("/abort_request", {"rid": name, "abort_all": False}) for name in names))
        return True

    async def version(self, calls: Calls) -> str | None:
        found = (await calls.get("/model_info")).get("weight_version")
        return None if found is None else str(found)

    async def prepare_for_weights(self, calls: Calls, way: str, lora_rank: int = 0) -> str | None:
        if (store := (await calls.get("/server_info")).get("hicache_storage_backend")) is not None:
            return (
                f"its store of keys and values ({store}) would keep those of old weights; start it without "
                "--hicache-storage-backend"
            )
        if way == "adapters" and (why := await SGLangAdapters().refusal(calls, lora_rank)):
            return why
        if way in ("folder", "adapters"):
            return await without_route(calls, FROM_DISK)
        if (await self.describe(calls)).num_ranks is None:
            return f"it has pipeline stages or replicas; weights by way of a {way} need pp_size and dp_size 1"
        return await without_route(calls, JOIN) if way == "group" else await _without_plugin(calls)

    async def load_from_disk(self, calls: Calls, folder: str, label: str, limit_s: float) -> None:
        await calls.post(FROM_DISK, {"model_path": folder, "load_format": "auto", "flush_cache": False}, limit_s)
        await flush_and_label(calls, label, limit_s)


def generate_body(drawings: Sequence[Drawing], sampling: SamplingParams, *, seeded: bool) -> dict[str, Any]:
    """Returns the body of one /generate for all `drawings`. Events have their names."""
    samples, images = [drawing.sample for drawing in drawings], drawings[0].images
    return {
        "rid": [drawing.name for drawing in drawings],
        **(images.fields(samples) if images else {"input_ids": [[*sample.context] for sample in samples]}),
        "sampling_params": [_sampling_fields(drawing, sampling, seeded=seeded) for drawing in drawings],
        "return_logprob": True,
        "stream": True,
    }


def _sampling_fields(drawing: Drawing, sampling: SamplingParams, *, seeded: bool) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "temperature": 0.0 if sampling.is_greedy(drawing.sample) else sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,
        "max_new_tokens": drawing.num_left,
        "stop_token_ids": [*sampling.stop_token_ids],
        "ignore_eos": not sampling.stop_token_ids,
        "stop": [*sampling.stop],
        "no_stop_trim": True,
        "stream_interval": PROGRESS_TOKENS,
    }
    return fields | ({"sampling_seed": drawing.sample.seed} if seeded else {})


async def _without_plugin(calls: Calls) -> str | None:
    """Returns the reason if the server takes no deltas, else None."""
    states: Any = (await calls.get("/server_info")).get("internal_states") or ({},)
    why = without_deltas(states[0])
    return None if why is None else f"{why}; {SGLANG_HOW}"


def without_deltas(told: Mapping[str, Any]) -> str | None:
    """Returns the reason if a server with the status `told` takes no deltas, else None."""
    found, own = told.get(form.FORMAT_KEY), form.FORMAT
    return None if found == own else f"it takes deltas of format {found}; expected {own}, the format of this rltrain"


async def without_route(calls: Calls, path: str, missing: Collection[int] = NO_SUCH_ROUTE) -> str | None:
    """Returns the reason if `path` takes no POST, else None. Sends an empty body, which servers refuse unchanged.

    `missing` are the status codes of a server without the route.
    """
    try:
        await calls.post(path, {})
    except ServerRefuses as refused:
        return f"it has no {path}" if refused.status in missing else None
    return None


async def told_version(calls: Calls, path: str) -> str | None:
    """Returns the label of the weights that a server tells at `path`, or None if it tells none."""
    try:
        found = (await calls.get(path)).get("weight_version")
    except ServerRefuses as refused:
        if refused.status in NO_SUCH_ROUTE:
            return None
        raise
    return None if found is None else str(found)


def the_version(versions: Collection[str]) -> str:
    """Returns the one label of a response's weights. Several labels give a text that equals no label."""
    return next(iter(versions)) if len(versions) == 1 else f"several: {', '.join(sorted(versions))}"


# OpenAI's completions with token ids in the responses. Weights come from disk if the server has SGLang's routes for
# that.

MODELS = "/v1/models"


class OpenAIProtocol:
    """OpenAI's completions. See `ServerProtocol`."""

    name = "openai"
    ways: Sequence[str] = ("folder", "delta")
    broadcasts: Broadcasts | None = None
    adapters: Adapters | None = None
    takes_images = False

    async def describe(self, calls: Calls) -> ServerDescription:
        model = (await calls.get(MODELS))["data"][0]
        return ServerDescription(str(model["id"]), model.get("max_model_len"))

    def request(
        self, drawing: Drawing, sampling: SamplingParams, described: ServerDescription, adapter: str | None
    ) -> tuple[str, Mapping[str, Any]]:
        body = {
            "model": described.model,
            "prompt": [*drawing.sample.context],
            "max_tokens": drawing.num_left,
            "temperature": 0.0 if sampling.is_greedy(drawing.sample) else sampling.temperature,
            "top_p": sampling.top_p,
            "stop_token_ids": [*sampling.stop_token_ids],
            "ignore_eos": True,  # only the job's stop tokens end a response
            "stop": [*sampling.stop],
            "logprobs": 1,
            "return_token_ids": True,
            "stream": True,
            "seed": drawing.sample.seed,
            **({"top_k": sampling.top_k} if sampling.top_k else {}),
        }
        return "/v1/completions", body

    def take(self, drawing: Drawing, event: Mapping[str, Any]) -> str | None:
        if "error" in event:
            raise ServerRefuses(f"/v1/completions: {event['error']}", 400)
        for choice in event["choices"]:
            tokens = choice.get("token_ids")
            logprobs = (choice.get("logprobs") or {}).get("token_logprobs") or []
            if tokens is None and (choice.get("text") or logprobs):
                raise ServerRefuses(
                    "/v1/completions: the answer has no token_ids, though the request set return_token_ids. "
                    "Expected a server with this option, because tokens are never encoded again",
                    400,
                )
            drawing.add(tokens or [], logprobs)
            drawing.end = choice.get("finish_reason") or drawing.end
        version = event.get("weight_version")
        return None if version is None else str(version)

    async def without_logprobs(self, calls: Calls, sampling: Sampling) -> str | None:
        return None

    async def withdraw(self, calls: Calls, names: Sequence[str]) -> bool:
        """Returns False and sends nothing. Such servers end a request when its connection closes."""
        return False

    async def version(self, calls: Calls) -> str | None:
        return await told_version(calls, "/model_info")

    async def prepare_for_weights(self, calls: Calls, way: str, lora_rank: int = 0) -> str | None:
        if await self.version(calls) is None:
            return "it has no /model_info with a weight_version, so its weights could not be checked"
        if way == "delta" and (why := without_deltas(await calls.get("/model_info"))) is not None:
            return f"{why}; have weight_sync.delta: null, to send it whole checkpoints"
        return await without_route(calls, FROM_DISK)

    async def load_from_disk(self, calls: Calls, folder: str, label: str, limit_s: float) -> None:
        await calls.post(FROM_DISK, {"model_path": folder, "weight_version": label}, limit_s)


# vLLM's tokens in and tokens out, and its routes for reinforcement learning, as of release 0.32. The first exist with
# --enable-scale-out, the others with VLLM_SERVER_DEV_MODE=1.

VLLM_GENERATE = "/inference/v1/generate"
VLLM_REQUEST = "generate-tokens-"
"""Beginning of vLLM's names of requests, before the name in the request."""
VLLM_LEAST_LOGPROB = -9999.0
"""vLLM sends this number in place of log-probs that are not finite."""
VLLM_INFO_S = 300.0
"""Limit for vLLM's report of its settings. It runs pip and other programs for the first one."""
VLLM_HOW = "start vLLM 0.32 or newer with VLLM_SERVER_DEV_MODE=1 and --enable-scale-out"
VLLM_CONFIG = "/server_info?config_format=json"
NOT_ENABLED = (403, *NO_SUCH_ROUTE)


NCCL_HOW = 'start it with VLLM_SERVER_DEV_MODE=1 and --weight-transfer-config \'{"backend": "nccl"}\''
WORLD_SIZE = "/get_world_size"
INIT, START, FINISH = "/init_weight_transfer_engine", "/start_weight_update", "/finish_weight_update"
PAUSE, RESUME = "/pause?mode=abort&clear_cache=true", "/resume"
WHOLE_PART_BYTES = 2**62
"""Size of the server's buffer for packed tensors. Every part fits into it, so a part is one broadcast."""


class VLLMBroadcasts:
    """vLLM's calls for weights over NCCL: its weight transfer engine "nccl". See `Broadcasts`.

    The server is paused between `begin` and `end`. It stays paused if an update fails, because it then has parts of two
    versions.
    """

    def refusal(self, device: torch.device) -> str | None:
        if device.type == "cuda":
            return None
        return "vLLM receives broadcasts over NCCL only, which needs GPUs, and this rank has none"

    def group(self, peer: str, num_ranks: int, device: torch.device, timeout_s: float) -> UpdateGroup:
        return UniqueIdGroup(num_ranks, device, timeout_s)

    async def join(self, calls: Calls, group: UpdateGroup, limit_s: float) -> None:
        """Has the server join `group`, in the place of an earlier group. An earlier update ends, complete or not."""
        was_paused = (await calls.get("/is_paused"))["is_paused"]
        await calls.post(PAUSE, {}, limit_s)
        try:
            with suppress(ServerGone, ServerRefuses):  # an update is open
                await calls.post(START, {}, limit_s, alone=True)
            await calls.post(FINISH, {}, limit_s)  # vLLM forgets parts of a failed update only here
            await self.leave(calls, group.name)
            packing = {"packed": True, "packed_buffer_size_bytes": WHOLE_PART_BYTES, "packed_num_buffers": 1}
            await calls.post(INIT, {"init_info": {**await group.invitation(), **packing}}, limit_s)
        except BaseException:
            if not was_paused:
                with suppress(ServerGone, ServerRefuses):
                    await calls.post(RESUME, {})
            raise

    async def begin(self, calls: Calls, limit_s: float) -> None:
        await calls.post(PAUSE, {}, limit_s)
        await calls.post(START, {}, limit_s)

    async def receive(self, calls: Calls, group: str, entries: Sequence[TensorEntry], limit_s: float) -> None:
        names, types, shapes = names_types_shapes(entries)
        body = {"update_info": {"names": names, "dtype_names": types, "shapes": shapes}}
        await calls.post("/update_weights", body, limit_s)

    async def end(self, calls: Calls, label: str, limit_s: float) -> None:
        await calls.post(FINISH, {"weight_version": label}, limit_s)
        await calls.post(RESUME, {}, limit_s)

    async def leave(self, calls: Calls, group: str) -> None:
        await calls.post("/shutdown_weight_transfer_engine", {})


@asynccontextmanager
async def _new_weights(calls: Calls, label: str, limit_s: float) -> AsyncIterator[None]:
    """Pauses a server of vLLM with an empty prefix cache and no requests. After the block it has weights of `label` and
    runs again. It also runs again after an error, if it still can."""
    await calls.post(PAUSE, {}, limit_s)
    try:
        yield
        await calls.post("/update_weight_version", {"new_version": label}, limit_s)
    except (ServerGone, ServerBusy, ServerRefuses):
        with suppress(ServerGone, ServerBusy, ServerRefuses):
            await calls.post(RESUME, {})
        raise
    await calls.post(RESUME, {}, limit_s)


async def _reload(calls: Calls, folder: str, limit_s: float) -> None:
    """Has a server of vLLM load a checkpoint. Its engine ends if it cannot read the folder."""
    load = {"method": "reload_weights", "kwargs": {"weights_path": folder}}
    await calls.post("/collective_rpc", load, limit_s)


LOAD_ADAPTER, UNLOAD_ADAPTER = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


class VLLMAdapters:
    """vLLM's calls for adapters. See `Adapters`.

    Every version has its own name. A server with `load_inplace` would instead read the files again in every step.
    """

    async def refusal(self, calls: Calls, rank: int) -> str | None:
        how = f"start it with --enable-lora --max-lora-rank {rank} and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"
        found = (await vllm_config(calls))["lora_config"]
        if found is None:
            return f"it takes no adapters; {how}"
        if found["target_modules"] is not None:
            return f"it adapts only {found['target_modules']}; start it without --lora-target-modules"
        if lacks := await without_route(calls, LOAD_ADAPTER):
            return f"{lacks}; {how}"
        return _too_small(found["max_lora_rank"], rank, how)

    async def load(self, calls: Calls, base: str | None, folder: str, label: str, limit_s: float) -> None:
        served = await _served_adapters(calls)
        async with _new_weights(calls, label, limit_s):
            for earlier in served:
                await calls.post(UNLOAD_ADAPTER, {"lora_name": earlier}, limit_s)
            if base is not None:
                await _reload(calls, base, limit_s)
            await calls.post(LOAD_ADAPTER, {"lora_name": ADAPTER + label, "lora_path": folder}, limit_s)


async def vllm_config(calls: Calls) -> Any:
    """Returns the settings of a server of vLLM."""
    return (await calls.get(VLLM_CONFIG, VLLM_INFO_S))["vllm_config"]


async def without_nccl_engine(calls: Calls) -> str | None:
    """Returns the reason if a server of vLLM takes no weights over NCCL, else None."""
    config = await vllm_config(calls)
    if (num_replicas := config["parallel_config"]["data_parallel_size"]) > 1:
        return f"it has data_parallel_size {num_replicas}; weights by way of a group need 1"
    engine = (config["weight_transfer_config"] or {}).get("backend")
    return None if engine == "nccl" else f"its engine for weight transfers is {engine or 'missing'}; {NCCL_HOW}"


class VLLMProtocol:
    """vLLM's routes. See `ServerProtocol`. Sends no seeds, because vLLM samples rows with seeds one by one."""

    name = "vllm"
    ways: Sequence[str] = ("folder", "group", "adapters")
    broadcasts: Broadcasts | None = VLLMBroadcasts()
    adapters: Adapters | None = VLLMAdapters()
    takes_images = False

    async def describe(self, calls: Calls) -> ServerDescription:
        model = (await calls.get(MODELS))["data"][0]
        if why := await without_route(calls, VLLM_GENERATE, NOT_ENABLED):
            raise ServerRefuses(f"{calls.url} cannot be used: {why}; {VLLM_HOW}", 404)
        num_ranks = None
        with suppress(ServerRefuses):  # the route is missing without VLLM_SERVER_DEV_MODE
            num_ranks = (await calls.get(WORLD_SIZE))["world_size"]
        return ServerDescription(str(model["id"]), model.get("max_model_len"), num_ranks)

    def request(
        self, drawing: Drawing, sampling: SamplingParams, described: ServerDescription, adapter: str | None
    ) -> tuple[str, Mapping[str, Any]]:
        sampled = {
            "temperature": 0.0 if sampling.is_greedy(drawing.sample) else sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "max_tokens": drawing.num_left,
            "stop_token_ids": [*sampling.stop_token_ids],
            "ignore_eos": True,  # only the job's stop tokens end a response
            "stop": [*sampling.stop],
            "skip_special_tokens": False,
            "detokenize": bool(sampling.stop),
            "logprobs": 0,
            "stream_interval": PROGRESS_TOKENS,
        }
        body = {
            "request_id": drawing.name,
            "model": adapter or described.model,
            "token_ids": [*drawing.sample.context],
            "sampling_params": sampled,
            "stream": True,
        }
        return VLLM_GENERATE, body

    def take(self, drawing: Drawing, event: Mapping[str, Any]) -> str | None:
        if "error" in event:
            status = event["error"].get("code") or HTTPStatus.BAD_REQUEST
            told = f"{VLLM_GENERATE}: {event['error'].get('message')}"
            raise ServerGone(told) if status >= HTTPStatus.INTERNAL_SERVER_ERROR else ServerRefuses(told, status)
        versions: set[str] = set()
        for choice in event["choices"]:
            entries = (choice.get("logprobs") or {}).get("content") or ()
            found = [entry["logprob"] for entry in entries]
            drawing.add(choice.get("token_ids") or (), [None if one <= VLLM_LEAST_LOGPROB else one for one in found])
            drawing.end = choice.get("finish_reason") or drawing.end
            versions |= {str(span["version"]) for span in choice.get("weight_versions") or ()}
        return the_version(versions) if versions else None

    async def without_logprobs(self, calls: Calls, sampling: Sampling) -> str | None:
        if sampling.temperature == 1 and sampling.top_p == 1 and sampling.top_k == 0:
            return None  # the modes are equal then
        if sampling.temperature != 1 and (sampling.top_p < 1 or sampling.top_k > 0):
            return (
                "vLLM's log-probs are either those of temperature 1 or those after truncation; expected "
                "rollout.sampling.temperature 1, or top_p 1 and top_k 0"
            )
        found = (await vllm_config(calls))["model_config"]["logprobs_mode"]
        expected = "raw_logprobs" if sampling.temperature == 1 else "processed_logprobs"
        return None if found == expected else f"its log-probs are {found}; start it with --logprobs-mode {expected}"

    async def withdraw(self, calls: Calls, names: Sequence[str]) -> bool:
        await calls.post("/inference/v1/abort_requests", {"request_ids": [VLLM_REQUEST + name for name in names]})
        return True

    async def version(self, calls: Calls) -> str | None:
        return await told_version(calls, "/weight_info")

    async def prepare_for_weights(self, calls: Calls, way: str, lora_rank: int = 0) -> str | None:
        if await self.version(calls) is None:
            return f"it has no /weight_info; {VLLM_HOW}"
        if way == "group":
            return await without_nccl_engine(calls)
        if why := await without_route(calls, "/collective_rpc"):
            return f"{why}; {VLLM_HOW}"
        config = await vllm_config(calls)
        if config["parallel_config"]["is_moe_model"] and config["device_config"]["device"] == "cpu":
            return (
                "its model has experts, and vLLM's build for CPUs computes other results after a reload of such weights"
            )
        return await VLLMAdapters().refusal(calls, lora_rank) if way == "adapters" else None

    async def load_from_disk(self, calls: Calls, folder: str, label: str, limit_s: float) -> None:
        async with _new_weights(calls, label, limit_s):
            await _reload(calls, folder, limit_s)
