"""SGLang's own protocol: token ids in, token ids and log-probs out, each response with the version of its weights."""

from collections.abc import Mapping, Sequence
from typing import Any

from rltrain.rollout.engine import SamplingParams
from rltrain.rollout.http.calls import Calls, ServerRefuses
from rltrain.rollout.http.drawing import Drawing
from rltrain.rollout.http.protocol import BroadcastProtocol, Described
from rltrain.rollout.http.sglang_broadcasts import JOIN, SGLangBroadcasts, flush_and_label
from rltrain.rollout.layout import form
from rltrain.rollout.sglang.inflight_requests import sampling_fields

FROM_DISK = "/update_weights_from_disk"
HOW = (
    "start it with rltrain's plugin for SGLang, of the same rltrain: PYTHONPATH=<rltrain>/rollout/sglang/server, or "
    "have weight_sync.delta: null, so that it is given whole checkpoints"
)
NO_SUCH_ROUTE = (404, 405)


class SGLangProtocol:
    """Implements `ServerProtocol`."""

    name = "sglang"
    ways: Sequence[str] = ("folder", "group", "delta")
    broadcasts: BroadcastProtocol | None = SGLangBroadcasts()

    async def describe(self, calls: Calls) -> Described:
        info = await calls.get("/server_info")
        model = await calls.get("/model_info")
        context = info.get("context_length") or info.get("max_req_input_len")
        num_ranks = info.get("tp_size") if info.get("pp_size") == info.get("dp_size") == 1 else None
        return Described(str(model.get("model_path")), context, num_ranks)

    def request(
        self, drawing: Drawing, sampling: SamplingParams, described: Described
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
    return None if why is None else f"{why}; {HOW}"


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
