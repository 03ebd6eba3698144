"""The requests of an engine's first rank at its server, and the results' way to the other ranks."""

import base64
import binascii
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from queue import Empty
from typing import Any, TypeVar

import numpy as np
import torch.distributed as dist

from rltrain.errors import DivergenceError, EngineError, EngineLost
from rltrain.models import Architecture
from rltrain.models.routing_shape import RoutingShape
from rltrain.rollout.engine import SamplingParams, StopCut, Tokenizer, response_limit, stop_cut
from rltrain.rollout.sample import Sample, Status
from rltrain.rollout.servers.calls import SEE_LOG, Client, StreamFailure
from rltrain.rollout.servers.remote_engine import DivergenceWatch, Drawing, count_finite
from rltrain.rollout.servers.server_images import ServerImages, wrong_length
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


# One sample at the server: its request and its response.

PROGRESS_TOKENS = 64
"""Tokens between two progress events of a response."""


@dataclass
class InflightRequest(Drawing):
    """A sample as sent to the server. The weights may change while its tokens are generated."""

    routing: RequestedRouting | None = None
    """The requested routing, or None."""
    meta: Mapping[str, Any] = field(default_factory=dict)
    """The server's meta_info of the final event."""

    def take(self, event: Mapping[str, Any], version: int) -> None:
        """Adds the tokens and log-probs of an event to the response.

        The event's `completion_tokens` is the total number of response tokens so far. The tokens and log-probs of the
        event are the last of these. `version` is the server's current policy version. If it is still the version of
        the request, all tokens so far are certain.
        """
        meta = event["meta_info"]
        total = meta["completion_tokens"]
        values = [entry[0] for entry in meta.get("output_token_logprobs") or ()]
        for known, new in ((self.tokens, event["output_ids"]), (self.logprobs, values)):
            known[total - len(new) : total] = new
        if version == self.version:
            self.num_certain = min(len(self.tokens), len(self.logprobs))
        if meta["finish_reason"] is not None:
            self.meta, self.end = meta, meta["finish_reason"]["type"]

    def check_length(self) -> None:
        """Raises EngineError if the server's context has another length. Then it has resized or lost images."""
        if self.end != "abort" and (problem := wrong_length(self.sample, self.meta.get("prompt_tokens"))):
            raise EngineError(problem)

    def ended(self, sampling: SamplingParams, cut: StopCut | None) -> Sample:
        """Returns the ended sample, as `Drawing.ended` does. Raises EngineError if the response is inconsistent."""
        if not len(self.tokens) == len(self.logprobs) == self.meta["completion_tokens"]:
            raise EngineError(
                f"SGLang returned {len(self.tokens)} tokens and {len(self.logprobs)} log-probs for sample "
                f"{self.sample.id}; expected {self.meta['completion_tokens']} of both. Leave out sglang.args that "
                "change what it returns."
            )
        if self.meta["finish_reason"].get("matched") == "NaN happened":
            return self._drawn(count_finite(self.logprobs), Status.FAILED)
        return super().ended(sampling, cut)

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
        if self.routing is not None and sent is None and self.meta["finish_reason"]["type"] != "abort":
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

    def _status(self, sampling: SamplingParams) -> Status:
        """Returns the status. It is pending if the server ended the sample for another reason, such as a foreign
        end-of-text token."""
        reason, num_before = self.meta["finish_reason"], len(self.sample.tokens)
        matched = reason.get("matched")
        if reason["type"] == "stop" and (matched in sampling.stop_token_ids or matched in sampling.stop):
            return Status.STOPPED
        if num_before + len(self.tokens) >= self.limit:
            return Status.TRUNCATED
        if reason["type"] == "length" and not self.tokens:
            raise EngineError(
                f"SGLang ended sample {self.sample.id} after {num_before} tokens of the {self.limit} that its "
                "response may have. Expected memory for at least one whole response: raise mem_fraction_static in "
                "sglang.args of its role, or lower its max_context_tokens."
            )
        return Status.PENDING


def sampling_fields(sample: Sample, limit: int, sampling: SamplingParams, *, seeded: bool) -> dict[str, Any]:
    """Returns SGLang's `sampling_params` of a sample with at most `limit` response tokens."""
    fields: dict[str, Any] = {
        "temperature": 0.0 if sampling.is_greedy(sample) else sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,
        "max_new_tokens": limit - len(sample.tokens),
        "stop_token_ids": [*sampling.stop_token_ids],
        "ignore_eos": not sampling.stop_token_ids,
        "stop": [*sampling.stop],
        "no_stop_trim": True,
        "stream_interval": PROGRESS_TOKENS,
    }
    return fields | ({"sampling_seed": sample.seed} if seeded else {})


def generate_body(
    flights: Mapping[str, InflightRequest],
    sampling: SamplingParams,
    *,
    cache_key: str,
    seeded: bool,
    adapter: str | None = None,
    images: ServerImages | None = None,
) -> dict[str, Any]:
    """Returns the body of one /generate for all `flights`, by their names in events.

    All of them request the same routing. `adapter` is the name of the server's adapters, or None. `images` are those of
    the samples, or None if they have none.
    """
    routing = next(iter(flights.values())).routing
    samples = [flight.sample for flight in flights.values()]
    return {
        "rid": [*flights],
        **(images.fields(samples) if images else {"input_ids": [[*sample.context] for sample in samples]}),
        "sampling_params": [
            sampling_fields(flight.sample, flight.limit, sampling, seeded=seeded) for flight in flights.values()
        ],
        "extra_key": cache_key,
        "return_logprob": True,
        "stream": True,
        **(routing.fields if routing else {}),
        **({"lora_path": adapter} if adapter else {}),
    }


# The session of the engine's first rank: the queue, running requests, and finished samples.

_STREAM_SAMPLES = 64
"""Most samples of one stream. The server scans all of them at every event."""
_ABORT_AGAIN_S = 0.25
"""Time before an abort is repeated. Requests not yet at the server's scheduler miss an abort."""
_ABORT_ALL = ("/abort_request", {"abort_all": True, "rid": ""})


class ServerSession:
    """The samples of an engine at its server.

    Sends no more samples than the server runs at once. So exactly the waiting samples get the newest weights. The
    server shares keys and values only between samples of the same `begin_version`. With `routing` samples return with
    the experts of each token. All requests use the adapters named `adapter`. `images` are those of samples, with
    model.vision.
    """

    def __init__(
        self,
        client: Client,
        *,
        num_slots: int,
        max_context_tokens: int,
        hang_timeout_s: float,
        seeded: bool,
        routing: ServerRouting | None = None,
        adapter: str | None = None,
        images: ServerImages | None = None,
    ) -> None:
        self._client, self._routing, self._adapter, self._images = client, routing, adapter, images
        self._num_slots, self._max_context_tokens = num_slots, max_context_tokens
        self._hang_timeout_s, self._seeded = hang_timeout_s, seeded
        self._sampling: SamplingParams | None = None
        self._cut: StopCut | None = None
        self._queue: deque[Sample] = deque()
        self._flights: dict[str, InflightRequest] = {}
        self._done: list[Sample] = []
        """Finished samples for the next step."""
        self._ended: dict[Sample, Sample] = {}
        """Samples that finished while they were suspended, by the shortened sample given back for each."""
        self._is_aborting = False
        self._divergence = DivergenceWatch()
        self._names = count()
        self._version, self._epoch = 0, 0
        self._alive_s = time.monotonic()

    def begin_version(self, version: int) -> None:
        """Declares that the server has the weights of `version`."""
        self._version, self._epoch = version, self._epoch + 1
        self._alive_s = time.monotonic()

    def submit(self, samples: Sequence[Sample], sampling: SamplingParams, tokenizer: Tokenizer | None) -> None:
        """Queues `samples`. Those that finished while they were suspended are done at once."""
        if sampling != self._sampling:
            self._sampling, self._cut = sampling, stop_cut(sampling.stop, tokenizer)
        for sample in samples:
            if (ended := self._ended.pop(sample, None)) is not None:
                self._done.append(ended)
            else:
                self._queue.append(sample)

    def step(self, wait_s: float) -> list[Sample]:
        """Fills free slots and returns the samples finished since the last step. Waits up to `wait_s` for the first
        one.

        Raises EngineLost if the server is gone or produces nothing, and EngineError if it refuses a request.
        """
        self.send()
        deadline = time.monotonic() + wait_s
        while self._receive(max(0.0, deadline - time.monotonic()) if not self._done else 0.0):
            pass
        self._check_progress()
        self.send()
        done, self._done = self._done, []
        return done

    def send(self) -> None:
        """Sends queued samples to free slots."""
        num_free = self._num_slots - len(self._flights)
        while num_free > 0 and self._queue:
            assert self._sampling is not None
            samples = [self._queue.popleft() for _ in range(min(num_free, len(self._queue), _STREAM_SAMPLES))]
            routing = self._requested_routing(samples)
            flights = {
                f"{self._epoch}.{name}": self._flight(sample, routing)
                for sample, name in zip(samples, self._names, strict=False)
            }
            if not self._flights:
                self._alive_s = time.monotonic()
            self._flights |= flights
            self._client.generate(
                generate_body(
                    flights,
                    self._sampling,
                    cache_key=str(self._epoch),
                    seeded=self._seeded,
                    adapter=self._adapter,
                    images=self._images,
                )
            )
            num_free -= len(samples)

    def receive(self) -> None:
        """Processes all events that have arrived."""
        while self._receive(0.0):
            pass

    def suspend(self) -> list[Sample]:
        """Aborts all requests and returns all unfinished samples with their tokens.

        Raises as `step` does, and EngineLost if an aborted request does not end in time.
        """
        deadline = time.monotonic() + self._hang_timeout_s
        self._is_aborting = True
        try:
            while self._flights:
                self._client.call(*_ABORT_ALL)
                again = time.monotonic() + _ABORT_AGAIN_S
                while self._flights and (left := again - time.monotonic()) > 0:
                    self._receive(left)
                if self._flights and time.monotonic() > deadline:
                    raise EngineLost(
                        f"{len(self._flights)} aborted requests have not come back from the SGLang server within "
                        f"{self._hang_timeout_s:g} s"
                    )
        finally:
            self._is_aborting = False
        return self.give_back()

    def progress(self, ids: Collection[int]) -> list[Sample]:
        """Returns these samples with their known tokens if they are running."""
        return [flight.known() for flight in self._flights.values() if flight.sample.id in ids]

    def lose_server(self) -> None:
        """Queues the running samples again with their known tokens, after the server was lost."""
        flights, self._flights = self._flights, {}
        self._queue.extendleft(flight.known() for flight in reversed(flights.values()))

    def give_back(self) -> list[Sample]:
        """Returns all queued samples, and the finished ones without their last token. Empties both lists."""
        # The caller may continue the sample on another engine, so one token must remain to be generated.
        shorter = {sample.first(len(sample.tokens) - 1): sample for sample in self._done}
        self._ended |= shorter
        given = [*self._queue, *shorter]
        self._queue.clear()
        self._done.clear()
        return given

    def forget(self) -> None:
        """Drops all unfinished samples, here and at the server."""
        self._queue.clear()
        self._done.clear()
        flights, self._flights = self._flights, {}
        if flights:
            self._client.call(*_ABORT_ALL)

    def _flight(self, sample: Sample, routing: RequestedRouting | None) -> InflightRequest:
        assert self._sampling is not None
        limit = response_limit(sample, self._sampling, self._max_context_tokens)
        return InflightRequest(sample, limit, self._version, routing=routing)

    def _requested_routing(self, samples: Sequence[Sample]) -> RequestedRouting | None:
        """Returns the common request for routing, from the first token without routing in any of the samples."""
        if self._routing is None:
            return None
        return RequestedRouting(self._routing, min(len(sample.routing or ()) for sample in samples))

    def _receive(self, wait_s: float) -> bool:
        """Processes one event of the server. Returns False if none arrives within `wait_s`."""
        try:
            item = self._client.inbox.get(timeout=wait_s) if wait_s > 0 else self._client.inbox.get_nowait()
        except Empty:
            return False
        if isinstance(item, StreamFailure):
            raise item.error
        if "error" in item:
            raise EngineError(f"SGLang refused a request: {item['error']}. {SEE_LOG}")
        meta = item["meta_info"]
        flight = self._flights.get(meta["id"])
        if flight is not None:
            flight.take(item, self._version)
            if meta["finish_reason"] is not None:
                del self._flights[meta["id"]]
                if self._images is not None:
                    flight.check_length()
                self._end(flight)
        return True

    def _end(self, flight: InflightRequest) -> None:
        assert self._sampling is not None
        sample = flight.ended(self._sampling, self._cut)
        version = sample.policy_versions[-1] if len(sample.tokens) > len(flight.sample.tokens) else flight.version
        self._divergence.ended(sample, version, len(self._flights))
        if sample.is_finished:
            self._done.append(sample)
            return
        if flight.end == "abort" and not self._is_aborting:
            message = flight.meta["finish_reason"].get("message")
            raise EngineError(
                f"SGLang gave up sample {sample.id} after {len(sample.tokens)} tokens: {message}. {SEE_LOG}"
            )
        self._queue.appendleft(sample)

    def _check_progress(self) -> None:
        silent_s = time.monotonic() - max(self._client.last_event_s, self._alive_s)
        if self._flights and silent_s > self._hang_timeout_s:
            raise EngineLost(
                f"the SGLang server has {len(self._flights)} requests and has sent no token for {silent_s:.0f} s"
            )
