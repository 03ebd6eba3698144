"""One call of `generate`: continuous batching of its requests over the slots of a KV cache."""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rltrain.errors import DivergenceError
from rltrain.rollout.embedded.kv_cache import DecodeAttention, KvCache, PrefillAttention
from rltrain.rollout.embedded.model import EngineModel
from rltrain.rollout.embedded.sampling import draw, random_streams
from rltrain.rollout.embedded.stop_strings import StopStrings
from rltrain.rollout.engine import Completion, Request, SamplingParams

_PREFILL_TOKENS = 8192
"""Padded prompt tokens of one prefill pass; bounds its activations. A longer prompt stands alone."""
_ADMIT_FRACTION = 8
"""New requests enter once 1/8 of the slots are free: one prefill then serves several."""

# Rows of the slot state.
_REQUEST, _TOKEN, _POSITION, _DRAWN, _LIMIT, _STREAM = range(6)


@dataclass(frozen=True)
class _Step:
    """What one decode step drew: request numbers, tokens and log-probs, one entry per running slot."""

    requests: Tensor
    tokens: Tensor
    logprobs: Tensor


class Generation:
    """Running requests fill slots 0 .. num_running - 1 of the cache and of `_state` [6, slots] int64.

    `_TOKEN` is the next token to feed, `_POSITION` where it stands, `_DRAWN` how many response tokens exist, `_LIMIT`
    how many may. A request enters with its prompt cached but for the last token, which the next decode step feeds: so
    all sampling happens in one place.
    """

    def __init__(
        self,
        model: EngineModel,
        cache: KvCache,
        requests: Sequence[Request],
        sampling: SamplingParams,
        stop_strings: StopStrings | None,
        *,
        num_slots: int,
        max_context_tokens: int,
    ) -> None:
        self._model, self._cache, self._requests, self._sampling = model, cache, requests, sampling
        self._stop_strings = stop_strings
        self._max_context_tokens = max_context_tokens
        self._device = cache.keys.device
        self._stop_tokens = torch.tensor(sampling.stop_token_ids, dtype=torch.int64, device=self._device)
        self._waiting = deque(range(len(requests)))
        self._num_slots = num_slots
        self._num_running = 0
        self._num_positions = 0
        self._state = torch.zeros(6, self._num_slots, dtype=torch.int64, device=self._device)
        self._running_requests = self._state[_REQUEST, :0]
        self._stopped = torch.zeros(len(requests), dtype=torch.bool, device=self._device)
        self._steps: list[_Step] = []

    def run(self, policy_version: int) -> list[Completion]:
        """Decode until every request is done. Collective over: the engine's tensor-parallel group."""
        while self._waiting or self._num_running:
            if self._should_admit():
                self._admit()
            self._decode_step()
        return self._completions(policy_version)

    def _should_admit(self) -> bool:
        num_free = self._num_slots - self._num_running
        num_wanted = min(len(self._waiting), max(1, self._num_slots // _ADMIT_FRACTION))
        return 0 < num_wanted <= num_free

    def _admit(self) -> None:
        """Fill the free slots with waiting requests and cache their prompts."""
        first = self._num_running
        num_new = min(self._num_slots - first, len(self._waiting))
        admitted = [self._waiting.popleft() for _ in range(num_new)]
        self._num_running += num_new
        self._write_state(first, admitted)
        longest = max(len(self._requests[number].prompt) for number in admitted)
        self._num_positions = max(self._num_positions, longest - 1)
        self._cache.reserve(self._num_positions)
        self._prefill(first, admitted)

    def _write_state(self, first: int, admitted: Sequence[int]) -> None:
        requests = [self._requests[number] for number in admitted]
        rows = [
            admitted,
            [request.prompt[-1] for request in requests],
            [len(request.prompt) - 1 for request in requests],
            [0] * len(requests),
            [self._response_limit(request) for request in requests],
        ]
        new = self._state[:, first : self._num_running]
        new[:_STREAM] = torch.tensor(rows, dtype=torch.int64, device=self._device)
        new[_STREAM] = random_streams([request.seed for request in requests], self._device)
        self._running_requests = self._state[_REQUEST, : self._num_running].clone()

    def _response_limit(self, request: Request) -> int:
        return min(self._sampling.max_response_tokens, self._max_context_tokens - len(request.prompt))

    def _prefill(self, first_slot: int, admitted: Sequence[int]) -> None:
        """Cache all but the last token of the prompts, each distinct prompt computed once."""
        slots_of: dict[tuple[int, ...], list[int]] = {}
        for slot, number in enumerate(admitted, start=first_slot):
            slots_of.setdefault(self._requests[number].prompt[:-1], []).append(slot)
        for heads in _prefill_passes(head for head in slots_of if head):
            width = len(heads[-1])
            padded = [[*head, *[0] * (width - len(head))] for head in heads]
            tokens = torch.tensor(padded, dtype=torch.int64, device=self._device).view(-1)
            positions = torch.arange(width, device=self._device).repeat(len(heads))
            slots = [(slot, row) for row, head in enumerate(heads) for slot in slots_of[head]]
            attention = PrefillAttention(self._cache, torch.tensor(slots, device=self._device), width)
            self._model.fill_cache(tokens, positions, attention)

    def _decode_step(self) -> None:
        """Feed every running slot's token and draw its next one."""
        state = self._state[:, : self._num_running]
        self._num_positions += 1
        self._cache.reserve(self._num_positions)
        attention = DecodeAttention(self._cache, self._model.num_heads, state[_POSITION], self._num_positions)
        logits = self._model.logits(self._model.forward(state[_TOKEN], state[_POSITION], attention))
        tokens, logprobs = draw(logits, state[_STREAM], state[_DRAWN], self._sampling)
        self._steps.append(_Step(self._running_requests, tokens, logprobs))
        state[_TOKEN] = tokens
        state[_POSITION : _DRAWN + 1] += 1
        stopped = self._stops(tokens)
        finished = torch.logical_or(stopped, state[_DRAWN] >= state[_LIMIT])
        finished_slots = finished.nonzero()[:, 0]
        if len(finished_slots):
            self._stopped[self._running_requests[finished_slots]] = stopped[finished_slots]
            self._retire(finished, finished_slots)

    def _stops(self, tokens: Tensor) -> Tensor:
        """[running] whether the token just drawn ends its response."""
        stopped = (tokens[:, None] == self._stop_tokens).any(-1)
        if self._stop_strings is not None:
            matched = self._stop_strings.append(self._running_requests.tolist(), tokens.tolist())
            stopped.logical_or_(torch.tensor(matched, device=self._device))
        return stopped

    def _retire(self, finished: Tensor, finished_slots: Tensor) -> None:
        """Free the finished slots by moving the last running ones into them."""
        num_left = self._num_running - len(finished_slots)
        destinations = finished_slots[finished_slots < num_left]
        if len(destinations):
            sources = num_left + (~finished[num_left:]).nonzero()[:, 0]
            self._state[:, destinations] = self._state[:, sources]
            self._cache.move(sources, destinations, self._num_positions)
        self._num_running = num_left
        self._running_requests = self._state[_REQUEST, :num_left].clone()
        self._num_positions = int(self._state[_POSITION, :num_left].max()) if num_left else 0

    def _completions(self, policy_version: int) -> list[Completion]:
        requests = torch.cat([step.requests for step in self._steps])
        order = requests.argsort(stable=True)
        tokens = torch.cat([step.tokens for step in self._steps])[order].tolist()
        logprobs = torch.cat([step.logprobs for step in self._steps])[order]
        if not bool(torch.isfinite(logprobs).all()):
            raise DivergenceError(
                f"The rollout policy (version {policy_version}) gives log-probs that are not finite: its weights have "
                "diverged or were never loaded. Lower actor.optimizer.lr, or check model.path."
            )
        values = logprobs.tolist()
        ends = requests.bincount(minlength=len(self._requests)).cumsum(0).tolist()
        starts = [0, *ends[:-1]]
        return [
            Completion(
                id=request.id,
                tokens=tokens[start:end],
                logprobs=values[start:end],
                policy_versions=[policy_version] * (end - start),
                finish_reason="stop" if stopped else "length",
            )
            for request, start, end, stopped in zip(self._requests, starts, ends, self._stopped.tolist(), strict=True)
        ]


def _prefill_passes(heads: Iterable[tuple[int, ...]]) -> list[list[tuple[int, ...]]]:
    """`heads` from short to long, in parts that fit one prefill pass each."""
    passes: list[list[tuple[int, ...]]] = []
    for head in sorted(heads, key=len):
        if passes and (len(passes[-1]) + 1) * len(head) <= _PREFILL_TOKENS:
            passes[-1].append(head)
        else:
            passes.append([head])
    return passes
