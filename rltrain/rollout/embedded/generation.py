"""Continuous batching: admission of waiting samples, prefill of their contexts, and their way through the slots."""

import sys
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count, islice
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from rltrain.errors import DivergenceError
from rltrain.rollout.embedded.decoder import NO_STREAM, Array, Decoder, HostCopy, Slots, random_streams
from rltrain.rollout.embedded.image_features import Admitted, EngineImages, Shown, delta, keyed
from rltrain.rollout.embedded.kv_cache import Entered, Head, KvCache, PrefillAttention, Suffix, uploaded
from rltrain.rollout.embedded.model import EngineModel
from rltrain.rollout.engine import START_FRACTION, SamplingParams, StopStrings, response_limit
from rltrain.rollout.sample import Sample, Status
from rltrain.rollout.workspace import PASS_TOKENS

# Prefill of the contexts of starting samples, without their last tokens.

_PASS_SCORES = 1 << 22
"""Limit of (padded token, attended position) pairs in one pass over suffixes. It bounds the scores of one head."""
_PASS_READ_TOKENS = 1 << 16
"""Limit of the cached tokens that a pass over several suffixes reads. It bounds the copies of their keys and values."""


def fill_cache(
    model: EngineModel, cache: KvCache, entered: Entered, device: torch.device, admitted: Admitted | None = None
) -> None:
    """Computes the keys and values of `entered` samples, each distinct head once.

    With `admitted`, for models with images, their tokens are keyed (see `keyed`). Collective over: the engine's
    tensor-parallel group.
    """
    for heads in head_passes(entered.heads):
        lengths = [len(head) for head in heads]
        width = lengths[-1]
        attention = cache.prefill_attention([entered.heads[head] for head in heads], lengths, width)
        if admitted is None:
            positions = torch.arange(width, device=device).repeat(len(heads))
            model.fill_cache(_padded(heads, width, device), positions, attention)
        else:
            spans = [(entered.heads[head][0][0], 0, len(head)) for head in heads]
            model.fill_cache(*_with_images(admitted, heads, spans, width, attention))
    for suffixes in suffix_passes(entered.suffixes):
        width = max(len(suffix.tokens) for suffix in suffixes)
        attention = cache.suffix_attention(suffixes, width)
        rows = [suffix.tokens for suffix in suffixes]
        if admitted is None:
            ends = uploaded([(suffix.first, suffix.end - 1) for suffix in suffixes], device)
            positions = torch.minimum(ends[:, :1] + torch.arange(width, device=device), ends[:, 1:])
            model.fill_cache(_padded(rows, width, device), positions.view(-1), attention)
        else:
            spans = [(suffix.slot, suffix.first, suffix.end) for suffix in suffixes]
            model.fill_cache(*_with_images(admitted, rows, spans, width, attention))


def _with_images(
    admitted: Admitted,
    rows: Sequence[tuple[int, ...]],
    spans: Sequence[tuple[int, int, int]],
    width: int,
    attention: PrefillAttention,
) -> tuple[Tensor, Tensor, PrefillAttention, Shown | None]:
    """Returns the arguments of EngineModel.fill_cache for keyed `rows`. `spans` are their (slot, first place, end)."""
    images = admitted.images
    shown = images.shown(rows, width)
    if shown is not None:  # the embeddings of image tokens are replaced
        rows = [tuple(max(token, 0) for token in row) for row in rows]
    return _padded(rows, width, images.device), admitted.positions(spans, width), attention, shown


def head_passes(heads: Iterable[Head]) -> list[list[Head]]:
    """Returns the heads with tokens, from short to long, in groups for one pass each."""
    passes: list[list[Head]] = []
    for head in sorted((head for head in heads if head), key=len):
        if passes and (len(passes[-1]) + 1) * len(head) <= PASS_TOKENS:
            passes[-1].append(head)
        else:
            passes.append([head])
    return passes


def suffix_passes(suffixes: Iterable[Suffix]) -> list[list[Suffix]]:
    """Returns the suffixes with tokens, round by round and from short to long, in groups for one pass each.

    A suffix too long for a pass is cut into pieces, computed one after the other.
    """
    passes: list[list[Suffix]] = []
    ordered = sorted((s for s in suffixes if s.tokens), key=lambda suffix: (suffix.round, len(suffix.tokens)))
    for piece in (piece for suffix in ordered for piece in _pieces(suffix)):
        last = passes[-1][-1] if passes else piece
        if last.slot != piece.slot and last.round == piece.round and _fits_one_pass([*passes[-1], piece]):
            passes[-1].append(piece)
        else:
            passes.append([piece])
    return passes


def _pieces(suffix: Suffix) -> Iterator[Suffix]:
    size = max(1, min(PASS_TOKENS, _PASS_SCORES // suffix.end))
    for start in range(0, len(suffix.tokens), size):
        yield suffix._replace(first=suffix.first + start, tokens=suffix.tokens[start : start + size])


def _fits_one_pass(suffixes: Sequence[Suffix]) -> bool:
    num_tokens = len(suffixes) * max(len(suffix.tokens) for suffix in suffixes)
    longest = max(suffix.end for suffix in suffixes)
    return (
        num_tokens <= PASS_TOKENS
        and num_tokens * longest <= _PASS_SCORES
        and len(suffixes) * longest <= _PASS_READ_TOKENS
    )


def _padded(rows: Sequence[tuple[int, ...]], width: int, device: torch.device) -> Tensor:
    """Returns the rows padded to `width` and concatenated, shape [rows * width]."""
    padded = np.zeros((len(rows), width), dtype=np.int64)
    for number, row in enumerate(rows):
        padded[number, : len(row)] = row
    return uploaded(padded, device).view(-1)


# Continuous batching of samples with equal `SamplingParams` in the slots of a KV cache.


@dataclass(slots=True)
class _Running:
    """A running sample as submitted, with the host's data about it. No field changes with every token."""

    sample: Sample
    number: int
    """Larger for samples that started later."""
    context: tuple[int, ...]
    """The sample's context, stored to build the tuple only once."""
    column: int
    """Column of the transcript."""
    first_step: int
    """First decode step that generates a token for it."""
    recent: deque[int] | None
    """The last tokens of its turn, if stop strings are used."""
    routed: Tensor | None = None
    """Experts of processed tokens beyond the sample's routing, set when they are requested."""
    end_step: int | None = None
    """End of its decode steps (exclusive). None while it runs. A step launched before this was known gives it more."""
    status: Status = Status.PENDING

    @property
    def goes_on(self) -> bool:
        """Whether its keys and values are kept after its turn."""
        return self.sample.goes_on and self.status != Status.FAILED

    def position(self, step: int) -> int:
        """Returns the position of its input token in a decode step."""
        return len(self.context) - 1 + step - self.first_step


class _Launched(NamedTuple):
    """A step whose results the host has not read, with the samples and columns of its slots."""

    running: list[_Running]
    columns: Array
    results: HostCopy


class Generation:
    """Waiting and running samples of one engine. It alone uses the slots while it exists.

    Running samples fill the first slots in the order of `_running`. A sample enters with its context cached except for
    the last token. The next decode step processes that token, so all sampling happens in one place. Each step generates
    one token per running sample, so step numbers identify tokens.

    The results of a step are read after `slots.ahead` further steps have been launched. Admission and the ends of
    samples then take the host's time while the device works. A sample may have ended before the step in flight. The
    result of that step for it is dropped, and its new keys and values are erased before the memory has another owner.
    The device works in the order of launches, so later work finds the memory erased.

    A sample to be continued after its turn leaves its slot, and its keys and values are parked in the cache. When it
    returns, only the tokens after them are computed.

    If the cache has no room for the next tokens, the samples that started last are preempted. They wait in front of all
    others and later continue like suspended samples. So the oldest sample always makes progress.
    """

    def __init__(
        self,
        model: EngineModel,
        slots: Slots,
        decoder: Decoder,
        sampling: SamplingParams,
        stop_strings: StopStrings | None,
        max_context_tokens: int,
        images: EngineImages | None = None,
    ) -> None:
        slots.clear()
        slots.cache.forget_prompts()  # so results do not depend on what the engine generated before
        self.sampling = sampling
        self._model, self._slots, self._decoder, self._stop_strings = model, slots, decoder, stop_strings
        self._max_context_tokens, self._images = max_context_tokens, images
        self._device = slots.state.device
        self._unfinished: dict[int, Sample] = {}  # by id, in the order of submission
        self._waiting: deque[Sample] = deque()
        self._running: list[_Running] = []  # replaced and never changed, since steps in flight refer to it
        self._seats: Array = np.zeros((3, 0), dtype=np.int64)
        """For each running sample its column, its position minus the step, and the end of its steps by its length."""
        self._in_flight: deque[_Launched] = deque()
        self._ended: list[_Running] = []  # still in the transcript
        self._finished: list[Sample] = []
        self._numbers = count()
        self._num_positions = 0
        self._num_steps = 0
        """Number of launched steps."""
        self._num_read = 0
        """Number of steps with their results read."""
        self._last_step = 0
        """End of the steps (exclusive) of the running samples by their length."""
        self._crowded_step = 0
        """No running sample needs more room before this step."""
        self.is_crowded = False
        """Whether samples wait that have slots but no room for keys and values."""
        self._versions: list[tuple[int, int]] = []  # (first decode step, policy version), one entry per change

    @property
    def num_unfinished(self) -> int:
        return len(self._unfinished)

    @property
    def unfinished_ids(self) -> Collection[int]:
        return self._unfinished.keys()

    def submit(self, samples: Sequence[Sample]) -> None:
        """Queues samples that `check_samples` has accepted."""
        if parked := self._slots.cache.parked:
            for sample in samples:
                parked.expect(self._keyed(sample))
        self._unfinished |= {sample.id: sample for sample in samples}
        self._waiting.extend(samples)

    def step(self, policy_version: int) -> list[Sample]:
        """Admits waiting samples, makes one decode step and returns the finished samples.

        Collective over: the engine's tensor-parallel group.
        """
        self._advance(policy_version)
        return self._take_finished()

    def run(self, policy_version: int) -> list[Sample]:
        """Steps until nothing is left. Collective over: the engine's tensor-parallel group."""
        while self._waiting or self._running:
            self._advance(policy_version)
        return self._take_finished()

    def unfinished(self) -> list[Sample]:
        """Returns all unfinished samples in the order of submission, each with its tokens so far.

        The results of a step in flight are dropped. A sample that continues draws the same token again.
        """
        self._clean_after_drop()
        self._take_routing(range(len(self._running)))
        return list((self._unfinished | {sample.id: sample for sample in self._read(self._running)}).values())

    def progress(self, ids: Collection[int]) -> list[Sample]:
        """Returns the running samples with these ids, each with its tokens so far."""
        slots = [slot for slot, running in enumerate(self._running) if running.sample.id in ids]
        self._take_routing(slots)
        return list(self._read([self._running[slot] for slot in slots]))

    def withdraw(self, ids: Collection[int]) -> list[Sample]:
        """Removes the unfinished samples with these ids. Returns them in the order of submission with their tokens so
        far."""
        self._read_ended()
        slots = [slot for slot, running in enumerate(self._running) if running.sample.id in ids]
        if slots:
            self._clean_after_drop()
        self._take_routing(slots)
        self._unfinished |= {sample.id: sample for sample in self._leave(slots)}
        self._waiting = deque(sample for sample in self._waiting if sample.id not in ids)
        if not self._running:
            self._read_steps(0)
        return [self._unfinished.pop(number) for number in [*self._unfinished] if number in ids]

    def wait(self) -> None:
        """Waits until the device has done the steps in flight."""
        for launched in self._in_flight:
            launched.results.wait()

    def _advance(self, policy_version: int) -> None:
        if self._num_steps >= self._crowded_step:
            self._make_room()
        num_new = self._num_admitted(policy_version)
        if num_new:
            self._admit(num_new, policy_version)
        is_needed = self._num_steps < self._last_step  # if not, all running samples end by length
        if is_needed:
            if not self._versions or self._versions[-1][1] != policy_version:
                self._versions.append((self._num_steps, policy_version))
            self._launch()
        self._read_steps(self._slots.ahead if is_needed else 0)
        if not self._running:
            self._read_steps(0)

    def _num_admitted(self, policy_version: int) -> int:
        """Returns the number of waiting samples to start now."""
        num_running = len(self._running)
        num_free = self._slots.num_slots - num_running
        num_wanted = min(len(self._waiting), max(1, self._slots.num_slots // START_FRACTION))
        self.is_crowded = False
        if not 0 < num_wanted <= num_free:
            return 0
        candidates = [self._keyed(sample) for sample in islice(self._waiting, num_free)]
        num_new = self._slots.cache.num_admissible(candidates, num_wanted, num_running, policy_version)
        self.is_crowded = num_new < len(candidates)
        return num_new

    def _make_room(self) -> None:
        """Makes room for the tokens of the next step. Samples that started last are preempted as long as any finds no
        room."""
        cache, step = self._slots.cache, self._num_steps
        staying = sorted(range(len(self._running)), key=lambda slot: self._running[slot].number)
        leaving: list[int] = []
        num_done, self._crowded_step = 0, sys.maxsize
        while num_done < len(staying):
            slot = staying[num_done]
            position = self._running[slot].position(step)
            room = cache.extend(slot, position)
            if room > position:
                self._crowded_step = min(self._crowded_step, step + room - position)
                num_done += 1
            elif self._in_flight:  # samples may have ended in it and leave room
                self._read_steps(0)
                self._make_room()
                return
            else:
                leaving.append(staying.pop())
                self._take_routing(leaving[-1:])
                cache.free(leaving[-1], leaving[-1] + 1)
        if leaving:
            self._preempt(leaving)

    def _preempt(self, slots: Sequence[int]) -> None:
        """Puts the samples of these slots back in front of the queue, so that the last one comes first."""
        for sample in self._leave(slots):
            self._unfinished[sample.id] = sample
            self._waiting.appendleft(sample)
        self._slots.num_preempted += len(slots)

    def _leave(self, slots: Sequence[int]) -> list[Sample]:
        """Removes the samples of these slots from the running ones, and returns them with their tokens so far."""
        leaving = [self._running[slot] for slot in slots]
        for running in leaving:
            running.end_step = self._num_read
        self._slots.transcript.give_back([running.column for running in leaving])
        self._erase(slots)
        self._compact(sorted(slots))
        return list(self._read(leaving))

    def _admit(self, num_new: int, policy_version: int) -> None:
        """Starts the first waiting samples in free slots and caches their contexts."""
        self._read_ended()
        first = len(self._running)
        columns = self._slots.transcript.take(num_new)
        admitted = [self._start(self._waiting.popleft(), column) for column in columns]
        limits = [response_limit(each.sample, self.sampling, self._max_context_tokens) for each in admitted]
        seats = [
            (each.column, each.position(0), each.first_step + limit - len(each.sample.tokens))
            for each, limit in zip(admitted, limits, strict=True)
        ]
        self._seat([*self._running, *admitted], np.concatenate([self._seats, np.array(seats).T], 1))
        self._slots.cache.reserve(first + num_new, self._num_positions, num_used=first)
        self._write_state(first, admitted, limits)
        cache, samples = self._slots.cache, [running.sample for running in admitted]
        entered = cache.enter(first, [self._keyed(sample) for sample in samples], policy_version)
        self._slots.head_tokens.add(sum(len(running.context) - 1 for running in admitted), entered)
        seen = Admitted(self._images, first, samples) if self._images else None
        fill_cache(self._model, cache, entered, self._device, seen)
        self._crowded_step = 0

    def _keyed(self, sample: Sample) -> Sample:
        """Returns the sample as the cache knows it, with names of its images among its tokens."""
        return keyed(sample, self._images.merge) if self._images else sample

    def _start(self, sample: Sample, column: int) -> _Running:
        recent = self._stop_strings.recent(sample.turn_tokens) if self._stop_strings else None
        return _Running(sample, next(self._numbers), sample.context, column, self._num_steps, recent)

    def _seat(self, running: list[_Running], seats: Array) -> None:
        """Takes these samples for the running ones."""
        self._running, self._seats = running, seats
        _, offsets, ends = seats
        self._num_positions = int(offsets.max()) + self._num_steps if running else 0
        self._last_step = int(ends.max()) if running else 0

    def _write_state(self, first: int, admitted: Sequence[_Running], limits: list[int]) -> None:
        samples = [running.sample for running in admitted]
        streams = random_streams([sample.seed for sample in samples], torch.device("cpu")).tolist()
        rows = [
            [running.context[-1] for running in admitted],
            [len(running.context) - 1 for running in admitted],
            [len(sample.tokens) for sample in samples],
            limits,
            [delta(sample, self._images.merge) if self._images else 0 for sample in samples],
            [
                NO_STREAM if self.sampling.greedy and self.sampling.is_greedy(sample) else stream
                for sample, stream in zip(samples, streams, strict=True)
            ],
        ]
        self._slots.fill(first, rows)

    def _launch(self) -> None:
        """Launches a step that processes the token of every running slot and generates its next one."""
        self._num_positions += 1
        self._decoder.step(len(self._running), self._num_positions, self.sampling)
        self._num_steps += 1
        self._in_flight.append(_Launched(self._running, self._seats[0], self._slots.results.send()))

    def _read_steps(self, num_left: int) -> None:
        """Reads the results of steps until only `num_left` are in flight, and ends the samples that they finished.

        Raises DivergenceError if all samples of a step failed.
        """
        while len(self._in_flight) > num_left:
            running, columns, results = self._in_flight.popleft()
            results.wait()
            tokens, logprobs, flags = (of_slots[..., : len(running)] for of_slots in results.arrays)
            self._slots.transcript.write(self._num_read, columns, tokens, logprobs)
            self._num_read += 1
            stopped, failed, finished = flags
            if self._stop_strings is not None:
                matched = self._matched(self._stop_strings, running, tokens.tolist())
                stopped, finished = stopped | matched, finished | matched
            slots = [slot for slot in finished.nonzero()[0].tolist() if running[slot].end_step is None]
            if slots and failed.all():
                [version] = self._policy_versions(self._num_read - 1, self._num_read)
                raise DivergenceError(
                    f"The rollout policy (version {version}) gives log-probs that are not finite in every running "
                    "response: its weights have diverged or were never loaded. Lower actor.optimizer.lr, or check "
                    "model.path."
                )
            if slots:
                self._retire(running, slots, stopped[slots].tolist(), failed[slots].tolist())

    def _matched(self, stop_strings: StopStrings, running: Sequence[_Running], tokens: Sequence[int]) -> Array:
        """Returns for each sample of a step whether its new token completes a stop string, shape [running]."""
        slots = [slot for slot, each in enumerate(running) if each.end_step is None]
        recent = [known for slot in slots if (known := running[slot].recent) is not None]
        matched = np.zeros(len(running), dtype=bool)
        matched[slots] = stop_strings.append(recent, [tokens[slot] for slot in slots])
        return matched

    def _retire(
        self, running: Sequence[_Running], finished: list[int], stopped: list[bool], failed: list[bool]
    ) -> None:
        """Ends the samples that the last step read had in its `finished` slots.

        `stopped` marks samples ended by a stop token or string, `failed` samples with non-finite logits.
        """
        ending = [running[slot] for slot in finished]
        for each, ended, without in zip(ending, stopped, failed, strict=True):
            each.end_step = self._num_read - without  # the last token of a failed sample is meaningless
            each.status = Status.FAILED if without else Status.STOPPED if ended else Status.TRUNCATED
        self._ended += ending
        slots = finished
        if running is not self._running:  # samples have moved since that step
            numbers = {each.number for each in ending}
            slots = [slot for slot, each in enumerate(self._running) if each.number in numbers]
        self._take_routing(slots)
        self._erase(slots)
        self._park([slot for slot in slots if self._running[slot].goes_on])
        self._compact(slots)
        if any(failed):
            self._make_finite()

    def _make_finite(self) -> None:
        """Removes NaN that failed samples have stored. A mask would not hide it from later owners of the memory."""
        self._slots.cache.forget_prompts()
        for tensor in self._slots.cache.tensors():
            tensor.nan_to_num_(0.0, 0.0, 0.0)

    def _clean_after_drop(self) -> None:
        """Makes the cache finite if a sample failed in a step in flight. Its results are about to be dropped."""
        self.wait()
        if any(launched.results.arrays[2][1, : len(launched.running)].any() for launched in self._in_flight):
            self._make_finite()

    def _erase(self, slots: Sequence[int]) -> None:
        """Erases what a step in flight stores for samples that leave these slots. It may be NaN."""
        if self._in_flight and slots:
            last = self._num_steps - 1
            self._slots.cache.erase(slots, [self._running[slot].position(last) for slot in slots])

    def _take_routing(self, slots: Iterable[int]) -> None:
        """Copies the routing of these slots from the cache before it is gone."""
        if self._model.routing_shape is None:
            return
        for slot in slots:
            running = self._running[slot]
            known = len(running.sample.routing) if running.sample.routing else 0
            end = self._num_read if running.end_step is None else running.end_step
            running.routed = self._slots.cache.routed(slot, known, running.position(end))

    def _park(self, slots: Sequence[int]) -> None:
        """Keeps the keys and values of the samples that ended a turn in these slots."""
        if slots:
            for slot, sample in zip(slots, self._read([self._running[slot] for slot in slots]), strict=True):
                self._slots.cache.park(slot, self._keyed(sample))

    def _compact(self, finished: Sequence[int]) -> None:
        """Frees the `finished` slots by moving the last running samples into them."""
        num_running, num_left = len(self._running), len(self._running) - len(finished)
        gone = set(finished)
        destinations = [slot for slot in finished if slot < num_left]
        sources = [slot for slot in range(num_left, num_running) if slot not in gone]
        seats, left = self._seats[:, :num_left].copy(), self._running[:num_left]
        if destinations:
            for source, destination in zip(sources, destinations, strict=True):
                seats[:, destination] = self._seats[:, source]
                left[destination] = self._running[source]
            self._slots.move(sources, destinations, self._num_positions)
        self._slots.free(num_left, num_running)
        self._seat(left, seats)

    def _take_finished(self) -> list[Sample]:
        """Returns the finished samples not returned before."""
        self._read_ended()
        finished, self._finished = self._finished, []
        return finished

    def _read_ended(self) -> None:
        """Finishes the ended samples and frees their columns of the transcript."""
        if not self._ended:
            return
        ended, self._ended = self._ended, []
        for sample in self._read(ended):
            self._finished.append(sample)
            del self._unfinished[sample.id]
        self._slots.transcript.give_back([running.column for running in ended])

    def _read(self, wanted: Sequence[_Running]) -> Iterator[Sample]:
        """Yields each sample with all of its tokens, from before and from here."""
        ends = [self._num_read if running.end_step is None else running.end_step for running in wanted]
        spans = [(running.column, running.first_step, end) for running, end in zip(wanted, ends, strict=True)]
        drawn = self._slots.transcript.read(spans)
        for running, end, (tokens, logprobs) in zip(wanted, ends, drawn, strict=True):
            versions = self._policy_versions(running.first_step, end)
            sample = running.sample.drawn(tokens, logprobs, versions, running.status)
            yield sample if running.routed is None else sample.routed(running.routed.cpu().numpy())

    def _policy_versions(self, first_step: int, end_step: int) -> list[int]:
        """Returns the policy version of every decode step from `first_step` up to `end_step`."""
        versions: list[int] = []
        end = end_step
        for start, version in reversed(self._versions):
            versions = [version] * (end - max(start, first_step)) + versions
            if start <= first_step:
                break
            end = min(end, start)
        return versions
