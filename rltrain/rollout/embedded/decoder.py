"""One decode step as work on memory that stays where it is, so that it can be recorded and replayed."""

from functools import partial

import torch
from torch import Tensor

from rltrain.rollout.embedded.kv_cache import rounded
from rltrain.rollout.embedded.model import EngineModel
from rltrain.rollout.embedded.recording import Record, Recordings
from rltrain.rollout.embedded.sampling import Draw
from rltrain.rollout.embedded.slots import PLACE, POSITION, Slots
from rltrain.rollout.engine import SamplingParams

_RECORDED_SIZES = 2
"""Of numbers of slots, from each power of two up to the next."""


class Decoder:
    """Decode steps on the first of the slots: with `record`, on few numbers of slots and positions, recorded."""

    def __init__(self, model: EngineModel, slots: Slots, draw: Draw, record: Record | None) -> None:
        self._model, self._slots, self._draw = model, slots, draw
        self._stop_tokens: dict[tuple[int, ...], Tensor] = {}
        self._recordings = Recordings(record) if record else None

    def step(self, num_running: int, num_positions: int, sampling: SamplingParams) -> None:
        """Feed the running slots' tokens, which stand below `num_positions`, and draw the next ones.

        Collective over: the engine's tensor-parallel group.
        """
        num_slots = num_running
        if self._recordings:
            num_slots = min(rounded(num_running, _RECORDED_SIZES), self._slots.num_slots)
            num_positions = self._slots.cache.recorded_length(num_positions)
        self._slots.reserve(num_slots, num_positions, num_used=num_running)
        step = partial(self._run, num_slots, num_positions, sampling, self._stops(sampling))
        if self._recordings is None:
            step()
        else:
            self._recordings.expire((*self._slots.addresses(), *self._model.addresses()))
            self._recordings.run((num_slots, num_positions, sampling), step)

    def forget(self) -> None:
        """Drop what is recorded, and its memory."""
        if self._recordings:
            self._recordings.forget()

    def _run(self, num_slots: int, num_positions: int, sampling: SamplingParams, stop_tokens: Tensor) -> None:
        slots = self._slots
        state = slots.state[:, :num_slots]
        fed, positions, num_drawn, places, limits, streams = state.unbind()
        attention = slots.cache.decode_attention(positions, num_positions)
        logits = self._model.logits(self._model.forward(fed, positions, attention))
        tokens, logprobs = self._draw(logits, streams, num_drawn, sampling)
        slots.transcript.write(places, tokens, logprobs)
        fed.copy_(tokens)
        state[POSITION : PLACE + 1].add_(slots.increments[:, :num_slots])
        stopped, failed, finished = (flags[:num_slots] for flags in (slots.stopped, slots.failed, slots.finished))
        torch.any(tokens[:, None] == stop_tokens, -1, out=stopped)
        torch.logical_not(logprobs.isfinite(), out=failed)
        torch.logical_or(stopped | failed, num_drawn >= limits, out=finished)

    def _stops(self, sampling: SamplingParams) -> Tensor:
        """The stop tokens, where recorded steps find them again."""
        ids = sampling.stop_token_ids
        if ids not in self._stop_tokens:
            self._stop_tokens[ids] = torch.tensor(ids, dtype=torch.int64, device=self._slots.state.device)
        return self._stop_tokens[ids]
