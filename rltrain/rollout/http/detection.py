"""Which protocol a server speaks: as the config says, or as the server says itself."""

from rltrain.rollout.http.calls import Calls, ServerRefuses
from rltrain.rollout.http.openai import MODELS, OpenAIProtocol
from rltrain.rollout.http.protocol import ServerProtocol
from rltrain.rollout.http.sglang import SGLangProtocol
from rltrain.rollout.http.vllm import VLLMProtocol

PROTOCOLS: dict[str, ServerProtocol] = {
    protocol.name: protocol for protocol in (SGLangProtocol(), VLLMProtocol(), OpenAIProtocol())
}


async def protocol_of(calls: Calls, named: str) -> ServerProtocol:
    """`named`, of rollout.protocol; auto: by whom the server's models are owned, as it lists them. Raises as `Calls`
    does."""
    if named != "auto":
        return PROTOCOLS[named]
    try:
        listed = (await calls.get(MODELS))["data"]
    except ServerRefuses as refused:
        raise ServerRefuses(f"{refused}; name what it speaks in rollout.protocol", refused.status) from None
    return PROTOCOLS.get(str(listed[0].get("owned_by")), PROTOCOLS["openai"])
