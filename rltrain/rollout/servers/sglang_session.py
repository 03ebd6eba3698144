"""The requests of an engine's first rank at its server, and the results' way to the other ranks."""

import base64
import binascii
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch.distributed as dist

from rltrain.errors import DivergenceError, EngineError, EngineLost
from rltrain.models import Architecture
from rltrain.models.routing_shape import RoutingShape
from rltrain.rollout.engine import SamplingParams
from rltrain.rollout.sample import Sample, Status
from rltrain.rollout.servers.calls import SEE_LOG, Calls
from rltrain.rollout.servers.protocols import GENERATE, SGLangProtocol, generate_body
from rltrain.rollout.servers.remote_engine import Drawing, DrawingServer, Requests
from rltrain.runtime.group_messages import broadcast_json

# Broadcasts from the engine's first rank to its others. They have no server, but make the same calls.

T = TypeVar("T")

ERRORS = {error.__name__: error for error in (EngineLost, EngineError, DivergenceError)}
"""Errors of the first rank that are raised on all ranks."""


class EngineBroadcast:
    """Broadcasts over `group`, the engine's ranks on gloo. None for an engine with one rank."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.is_first = group is None or group.rank() == 0

    def samples(self, action: Callable[[], Sequence[Sample]], known: Mapping[int, Sample]) -> list[Sample]:
        """Calls `action` on the first rank and returns its samples on every rank.

        `known` has all of these samples by id, in an earlier state. If `action` raises one of ERRORS, every rank raises
        it. Collective over: the engine's ranks.
        """
        samples, error = self._attempt(action)
        return self._shared(samples or (), error, known)

    def together(self, action: Callable[[], object]) -> None:
        """Calls `action` on the first rank, as `samples` does, and ignores its result. Collective over: the engine's
        ranks."""
        self.samples(lambda: (action(), ())[1], {})

    def wait(self, action: Callable[[Callable[[], None]], object], advance: Callable[[], None]) -> None:
        """Calls a long `action` on the first rank. Whenever it calls its argument, every rank calls `advance`.

        Collective over: the engine's ranks.
        """

        def advance_all() -> None:
            advance()
            broadcast_json(True, self.group)

        _, error = self._attempt(lambda: action(advance_all))
        while broadcast_json(False, self.group):
            advance()
        self._shared((), error, {})

    def _attempt(self, action: Callable[[], T]) -> tuple[T | None, Exception | None]:
        if not self.is_first:
            return None, None
        try:
            return action(), None
        except (*ERRORS.values(),) as error:
            return None, error

    def _shared(self, samples: Sequence[Sample], error: Exception | None, known: Mapping[int, Sample]) -> list[Sample]:
        """Returns the first rank's `samples` on every rank, or raises its `error` there."""
        if self.group is not None:
            kind = next((name for name, one in ERRORS.items() if isinstance(error, one)), None)
            kind, text, news = broadcast_json([kind, str(error), [_news(s, known[s.id]) for s in samples]], self.group)
            if not self.is_first:
                error = ERRORS[kind](text) if kind else None
                samples = [known[n].drawn(new, logprobs, of, Status(status)) for n, status, new, logprobs, of in news]
        if error is not None:
            raise error
        return [*samples]


def _news(sample: Sample, known: Sample) -> list[Any]:
    """Returns the additions to `known` as JSON values."""
    new = slice(len(known.tokens), None)
    return [sample.id, sample.status, sample.tokens[new], sample.logprobs[new], sample.policy_versions[new]]


# Expert routing, as an SGLang server reports it for the tokens of a request.

_SENT_AS = np.dtype("<i4")


@dataclass(frozen=True)
class ServerRouting:
    """The form in which a server reports routing: base64 of int32 [tokens, layers, top_k], with dense layers included.

    The last token generated has no entry, because it was never fed to the model.
    """

    num_layers: int
    sparse_layers: tuple[int, ...]
    """Numbers of the layers with experts."""
    num_experts: int
    shape: RoutingShape

    @classmethod
    def of(cls, architecture: Architecture) -> "ServerRouting":
        """Returns the form for a model. Raises ValueError if the model has no experts."""
        sparse = tuple(layer for layer, has_experts in enumerate(architecture.sparse_layers) if has_experts)
        return cls(architecture.num_layers, sparse, architecture.num_experts, RoutingShape.of(architecture))

    def not_recorded(self, num_tokens: int) -> np.ndarray:
        """Returns the marker of unknown routing, [tokens, layers with experts, top_k]."""
        return self.shape.unknown(num_tokens).numpy()

    def decoded(self, sent: str, num_tokens: int) -> np.ndarray:
        """Returns routing as RecordedRouting has it, [tokens, layers with experts, top_k].

        Raises EngineError if `sent` does not hold valid experts of `num_tokens` tokens.
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
                "SGLang returned the same expert twice for a token, because its routing kernels do not report their "
                "choice. Set rollout.sglang.args.moe_runner_backend to triton, or model.router_replay to recompute or "
                "off."
            )
        return experts.astype(self.not_recorded(0).dtype)


@dataclass(frozen=True)
class RequestedRouting:
    """A request for the routing of the tokens from `start` on, common to requests sent together."""

    server: ServerRouting
    start: int

    @property
    def fields(self) -> dict[str, Any]:
        """Fields of a /generate request."""
        return {"return_routed_experts": True, "routed_experts_start_len": self.start}

    def rows(self, sent: str | None, begin: int, end: int, num_fed: int) -> np.ndarray:
        """Returns the routing of tokens `begin` to `end`, [tokens, layers with experts, top_k].

        `num_fed` is the number of tokens that the request fed to the model. All entries are unknown if `sent` is None.
        """
        if sent is None:
            return self.server.not_recorded(end - begin)
        return self.server.decoded(sent, max(0, num_fed - self.start))[begin - self.start : end - self.start]


# The engine's samples at its server.

_SAMPLES_PER_STREAM = 64
"""Most samples of one stream. The server scans all of them at every event."""
_ABORT_ALL = ("/abort_request", {"abort_all": True, "rid": ""})
PROTOCOL = SGLangProtocol()


@dataclass
class OwnDrawing(Drawing):
    """A sample at an engine's own server. The weights may change while its tokens are generated."""

    routing: RequestedRouting | None = None
    """The requested routing, or None."""
    cache_key: str = ""
    """The server shares keys and values only between requests with the same key."""

    def _drawn(self, count: int, status: Status) -> Sample:
        """Returns the sample with its first `count` new tokens and their routing.

        Without an end no routing is recorded. Another request would feed the same tokens again, perhaps with other
        weights.
        """
        sent = self._routing_sent() if self.meta else None
        drawn = super()._drawn(count, status)
        begin, end = len(self.sample.routing or ()), len(drawn.context) - 1
        if self.routing is None or not count or begin >= end:
            return drawn
        num_fed = len(self.sample.context) + len(self.tokens) - 1
        return drawn.routed(self.routing.rows(sent, begin, end, num_fed))

    def _routing_sent(self) -> str | None:
        """Returns the routing from the server. None if it was not requested, or if the request was aborted before it
        ran."""
        sent: str | None = self.meta.get("routed_experts")
        if self.routing is not None and sent is None and self.end != "abort":
            raise EngineError(
                f"SGLang returned sample {self.sample.id} without routed_experts, which it was asked for. {SEE_LOG}"
            )
        return sent

    def _versions(self, count: int) -> list[int]:
        """Returns the versions of the first `count` tokens. Before the end all are of the version at sending."""
        if not self.meta:
            return super()._versions(count)
        num_drawn = len(self.tokens)
        spans = self.meta.get("weight_versions")
        versions: list[int] = []
        for span in spans or [{"version": self.meta["weight_version"], "start": 0, "end": num_drawn}]:
            if span["end"] > len(versions):
                versions += [int(span["version"])] * (min(span["end"], num_drawn) - len(versions))
        return versions[:count]


class OwnServer(DrawingServer):
    """An engine's own server. `seeded` sends the seeds of samples. All requests use the adapters named `adapter`."""

    def __init__(self, calls: Calls, *, seeded: bool, adapter: str | None) -> None:
        super().__init__(calls)
        self._seeded, self._adapter = seeded, adapter

    def request(self, drawings: Sequence[Drawing], sampling: SamplingParams) -> tuple[str, Mapping[str, Any]]:
        first = drawings[0]
        assert isinstance(first, OwnDrawing)
        body = {
            **generate_body(drawings, sampling, seeded=self._seeded),
            "extra_key": first.cache_key,
            **(first.routing.fields if first.routing else {}),
            **({"lora_path": self._adapter} if self._adapter else {}),
        }
        return GENERATE, body

    def take(self, drawing: Drawing, event: Mapping[str, Any]) -> None:
        """Adds the tokens of an event. If the server still has the weights of the request, all of them are certain. At
        the end the server reports the weights of each."""
        label = PROTOCOL.take(drawing, event)
        if drawing.end is not None or label == str(drawing.version):
            drawing.num_certain = len(drawing.tokens)

    async def withdraw(self, names: Sequence[str]) -> bool:
        """Ends all requests, because all of them are withdrawn together."""
        await self.calls.post(*_ABORT_ALL)
        return True


class OwnRequests(Requests):
    """The samples of an engine at its own server.

    Exactly the waiting samples get the newest weights, because no more are sent than the server runs at once. The
    server shares keys and values only between samples sent after the same `serve`. With `routing` samples return with
    the experts of each token. `ending` returns how the server's process ended, or None. `seeded` and `adapter` are
    those of `OwnServer`, `limits` those of `Requests`.
    """

    def __init__(
        self,
        *,
        role: str,
        hang_timeout_s: float,
        ending: Callable[[], str | None],
        seeded: bool = False,
        routing: ServerRouting | None = None,
        adapter: str | None = None,
        **limits: Any,
    ) -> None:
        # Silence is measured for the whole server, because streams are silent during a pause.
        super().__init__(
            withdraw_s=hang_timeout_s,
            stream_limit_s=None,
            where=f"{role}.sglang",
            hint=f". {SEE_LOG}",
            samples_per_stream=_SAMPLES_PER_STREAM,
            **limits,
        )
        self.lost: str | None = None
        """How the server was lost, or None."""
        self._hang_timeout_s, self._ending, self._routing = hang_timeout_s, ending, routing
        self._seeded, self._adapter = seeded, adapter
        self._server: OwnServer | None = None
        self._is_held, self._epoch = True, 0
        self._alive_s = time.monotonic()

    async def hold(self) -> None:
        """Sends nothing until `serve`. Running samples stay at the server."""
        self._is_held = True

    async def serve(self, calls: Calls, version: int) -> None:
        """Declares that the server has the weights of `version`."""
        self._server = self._server or OwnServer(calls, seeded=self._seeded, adapter=self._adapter)
        self._server.calls = calls
        self.version, self._epoch, self._is_held = version, self._epoch + 1, self.lost is not None
        self._alive_s = time.monotonic()
        self._dispatch()

    async def lose_server(self) -> None:
        """Queues the running samples again with their certain tokens, and ends all requests."""
        if self._server is not None:
            self._lose(self._server, "it is replaced")
        await self.stop()
        self.lost = None

    def check(self) -> None:
        """Raises EngineLost if the server is lost or produces nothing. Any thread may call it."""
        if (lost := self._ending() or self.lost) is not None:
            raise EngineLost(lost)
        last_s = self._alive_s if self._server is None else max(self._server.last_event_s, self._alive_s)
        silent_s = time.monotonic() - last_s
        if self._running and silent_s > self._hang_timeout_s:
            raise EngineLost(
                f"the SGLang server has {len(self._running)} requests and has sent no token for {silent_s:.0f} s"
            )

    def _free_server(self) -> DrawingServer | None:
        server = self._server
        return server if server is not None and len(server.drawings) < self._max_running_requests else None

    def _drawing(self, sample: Sample, limit: int) -> Drawing:
        return OwnDrawing(sample, limit, images=self._images)

    def _send(self, drawings: Sequence[Drawing], server: DrawingServer) -> None:
        if not self._running:
            self._alive_s = time.monotonic()
        # All samples of a request ask for routing from the first token that any of them lacks.
        first = min(len(drawing.sample.routing or ()) for drawing in drawings)
        for drawing in drawings:
            assert isinstance(drawing, OwnDrawing)
            drawing.cache_key = str(self._epoch)
            drawing.routing = None if self._routing is None else RequestedRouting(self._routing, first)
        super()._send(drawings, server)

    def _lose(self, server: DrawingServer, why: str) -> None:
        self.lost, server.problem, self._is_held = self.lost or why, why, True
        self._requeue(server)

    def _not_back(self, server: DrawingServer, why: str) -> None:
        self._lose(server, f"aborted requests of the SGLang server: {why}")

    def _wrong_end(self, drawing: Drawing, again: Drawing, why: str) -> EngineError | None:
        """Returns the error for a sample that SGLang gave up or has no memory for. A foreign end-of-text token is no
        error."""
        sample = again.sample
        if drawing.end == "abort":
            message = drawing.meta["finish_reason"].get("message")
            return EngineError(
                f"SGLang gave up sample {sample.id} after {len(sample.tokens)} tokens: {message}. {SEE_LOG}"
            )
        if drawing.end is None or len(sample.tokens) > len(drawing.sample.tokens):
            return None
        return EngineError(
            f"SGLang ended sample {sample.id} after {len(sample.tokens)} tokens of the {drawing.limit} that its "
            "response may have. Expected memory for at least one whole response: raise mem_fraction_static in "
            "sglang.args of its role, or lower its max_context_tokens."
        )
