"""OpenAI's completions, of servers that return token ids with them; weights from disk where they answer as SGLang."""

from collections.abc import Mapping, Sequence
from typing import Any

from rltrain.rollout.engine import SamplingParams
from rltrain.rollout.http.calls import Calls, ServerRefuses
from rltrain.rollout.http.drawing import Drawing
from rltrain.rollout.http.protocol import BroadcastProtocol, Described
from rltrain.rollout.http.sglang import FROM_DISK, NO_SUCH_ROUTE, without_deltas, without_route

MODELS = "/v1/models"


class OpenAIProtocol:
    """Implements `ServerProtocol`."""

    name = "openai"
    tells_version = "/model_info"
    """Where a server says which weights it has."""
    ways: Sequence[str] = ("folder", "delta")
    broadcasts: BroadcastProtocol | None = None

    async def describe(self, calls: Calls) -> Described:
        model = (await calls.get(MODELS))["data"][0]
        return Described(str(model["id"]), model.get("max_model_len"))

    def request(
        self, drawing: Drawing, sampling: SamplingParams, described: Described
    ) -> tuple[str, Mapping[str, Any]]:
        return "/v1/completions", self.body(drawing, sampling, described) | {"seed": drawing.sample.seed}

    def body(self, drawing: Drawing, sampling: SamplingParams, described: Described) -> dict[str, Any]:
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
