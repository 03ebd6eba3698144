"""The experts that an SGLang server says it routed the tokens of a request to."""

import base64
import binascii
from dataclasses import dataclass
from typing import Any

import numpy as np

from rltrain.errors import EngineError
from rltrain.models import Architecture
from rltrain.models.routing_shape import RoutingShape

_SENT_AS = np.dtype("<i4")


@dataclass(frozen=True)
class ServerRouting:
    """How a server of a model writes routing down: base64 of [tokens, layers, top_k] int32, in which layers without
    experts have a place too. Its last token is the one before the last that was drawn, which nothing has fed.
    """

    num_layers: int
    sparse_layers: tuple[int, ...]
    """Those that have experts."""
    num_experts: int
    shape: RoutingShape

    @classmethod
    def of(cls, architecture: Architecture) -> "ServerRouting":
        """ValueError where the model has no experts."""
        sparse = tuple(layer for layer, has_experts in enumerate(architecture.sparse_layers) if has_experts)
        return cls(architecture.num_layers, sparse, architecture.num_experts, RoutingShape.of(architecture))

    def not_recorded(self, num_tokens: int) -> np.ndarray:
        """[tokens, layers with experts, top_k]."""
        return self.shape.unknown(num_tokens).numpy()

    def decoded(self, sent: str, num_tokens: int) -> np.ndarray:
        """[tokens, layers with experts, top_k] as RecordedRouting has them.

        Raises EngineError for anything but the experts of `num_tokens` tokens.
        """
        sizes = (num_tokens, self.num_layers, self.shape.top_k)
        try:
            numbers = np.frombuffer(base64.b64decode(sent, validate=True), dtype=_SENT_AS).reshape(sizes)
        except (binascii.Error, ValueError) as error:
            raise EngineError(
                f"SGLang returned {len(sent)} characters as routed_experts of {num_tokens} tokens; expected base64 of "
                f"{' x '.join(map(str, sizes))} int32 (tokens x layers x experts per token): {error}. Its config.json "
                "must be the one in model.path; leave out sglang.args that change the model."
            ) from error
        experts = numbers[:, list(self.sparse_layers)]
        if experts.size and not 0 <= experts.min() <= experts.max() < self.num_experts:
            raise EngineError(
                f"SGLang returned experts {experts.min()} to {experts.max()} of tokens; expected 0 to "
                f"{self.num_experts - 1}. Leave out sglang.args that add or move experts."
            )
        if self.shape.top_k > 1 and (experts[..., 0] == experts[..., 1]).any():
            raise EngineError(
                "SGLang returned the same expert twice for a token, as it does where the kernels that route do not "
                "tell what they chose. Name others in rollout.sglang.args.moe_runner_backend (triton), or set "
                "model.router_replay to recompute or off."
            )
        return experts.astype(self.not_recorded(0).dtype)


@dataclass(frozen=True)
class RequestedRouting:
    """What requests that are sent together ask for: the routing of the tokens from `start` on."""

    server: ServerRouting
    start: int

    @property
    def fields(self) -> dict[str, Any]:
        """Of a /generate."""
        return {"return_routed_experts": True, "routed_experts_start_len": self.start}

    def rows(self, sent: str | None, begin: int, end: int, num_fed: int) -> np.ndarray:
        """[tokens, layers with experts, top_k] of the tokens from `begin` to `end`, of a request that has fed
        `num_fed`. Nothing was recorded where nothing is `sent`."""
        if sent is None:
            return self.server.not_recorded(end - begin)
        return self.server.decoded(sent, max(0, num_fed - self.start))[begin - self.start : end - self.start]
