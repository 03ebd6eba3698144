"""vLLM's completions and its routes for reinforcement learning, which it has with VLLM_SERVER_DEV_MODE=1."""

from collections.abc import Mapping, Sequence
from typing import Any

from rltrain.rollout.engine import SamplingParams
from rltrain.rollout.http.calls import Calls, ServerGone, ServerRefuses
from rltrain.rollout.http.drawing import Drawing
from rltrain.rollout.http.openai import OpenAIProtocol
from rltrain.rollout.http.protocol import Described

PAUSE = "/pause?mode=abort&clear_cache=true"
HOW = 'start it with VLLM_SERVER_DEV_MODE=1 and --weight-transfer-config \'{"backend": "disk"}\''


class VLLMProtocol(OpenAIProtocol):
    """Implements `ServerProtocol`. Seeds are not sent: with them every row of a batch is drawn on its own."""

    name = "vllm"
    tells_version = "/weight_info"
    ways: Sequence[str] = ("folder",)

    def request(
        self, drawing: Drawing, sampling: SamplingParams, described: Described
    ) -> tuple[str, Mapping[str, Any]]:
        whole_text = {"include_stop_str_in_output": True, "skip_special_tokens": False}
        return "/v1/completions", {**self.body(drawing, sampling, described), **whole_text}

    async def prepare_for_weights(self, calls: Calls, way: str) -> str | None:
        try:
            await calls.get(self.tells_version)
            await calls.post("/init_weight_transfer_engine", {"init_info": {}})
        except (ServerRefuses, ServerGone) as problem:
            return f"{problem}; {HOW}"
        return None

    async def load_from_disk(self, calls: Calls, folder: str, label: str, limit_s: float) -> None:
        await calls.post(PAUSE, {}, limit_s)
        try:
            await calls.post("/start_weight_update", {}, limit_s)
            await calls.post("/update_weights", {"update_info": {"path": folder}}, limit_s)
            await calls.post("/finish_weight_update", {"weight_version": label}, limit_s)
        finally:
            await calls.post("/resume", {}, limit_s)
