"""One decode step: slots, draws by the Gumbel maximum, recorded graphs, and what was drawn."""

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from itertools import accumulate
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from rltrain.rollout.embedded.kv_cache import KvCache, rounded
from rltrain.rollout.embedded.model import EngineModel
from rltrain.rollout.engine import SamplingParams

# Random numbers that depend only on a sample's seed, the position in its response and a counter.

POSITION_STEP = 0x9E3779B97F4A7C15 - (1 << 64)
"""The golden ratio's fraction of 2**64, by which SplitMix64 advances."""
COUNTER_STEP = 0x91E10DA5C79E7B1D - (1 << 64)
"""The square of the plastic ratio's fraction of 2**64. No two (position, counter) pairs of a response coincide: below
2**20 positions, counters would have to be 2**42 apart."""
MULTIPLIER_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
MULTIPLIER_2 = 0x94D049BB133111EB - (1 << 64)
UNIFORM_BITS = (1 << 63 | 1) - (1 << 64)
"""Set in a mixed number, they leave an odd negative one between -2**63 and -1."""
UNIFORM_SCALE = 2.0**-63 * (1 - 2.0**-24)
"""Of such a number, as float32, this makes one below 0 and not below -1 + 2**-24."""
NO_STREAM = -(1 << 63)
"""Marks a row that is drawn greedily. A seed's own stream begins there with a probability of 2**-64."""


def mix64(values: Tensor) -> Tensor:
    """The splitmix64 finaliser on int64 tensors (wrapping arithmetic, shifts made logical by masks)."""
    values = _multiplied(values)
    return values ^ _shift_right(values, 31)


def _multiplied(values: Tensor) -> Tensor:
    """The finaliser but for its last step, which leaves the upper 31 bits as they are."""
    values = (values ^ _shift_right(values, 30)).mul_(MULTIPLIER_1)
    return values.bitwise_xor_(_shift_right(values, 27)).mul_(MULTIPLIER_2)


def _shift_right(values: Tensor, bits: int) -> Tensor:
    return (values >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def random_streams(seeds: list[int], device: torch.device) -> Tensor:
    """[len(seeds)] int64: where each sample's sequence of random numbers starts."""
    signed = [((seed + (1 << 63)) % (1 << 64)) - (1 << 63) for seed in seeds]
    return mix64(torch.tensor(signed, dtype=torch.int64, device=device))


def log_uniforms(streams: Tensor, positions: Tensor, counters: Tensor) -> Tensor:
    """Returns the logarithms of uniform numbers between 0 and 1 as float32, each finite and below 0, one per element.

    All arguments are int64 and broadcast. The uniform numbers are equal on every device; the logarithm may round
    otherwise. It keeps its precision near 0, where large uniform numbers lie.
    """
    state = torch.add(streams, positions, alpha=POSITION_STEP) + counters * COUNTER_STEP
    return _multiplied(state).bitwise_or_(UNIFORM_BITS).float().mul_(UNIFORM_SCALE).log1p_()


# Draws tokens from logits by the Gumbel maximum, with the random numbers of random_streams.
#
# Each token has a uniform number of its own. The token whose log(number) / weight is largest is drawn: each token with
# the probability that its weight has of the total. Rounding changes the token at a near tie alone, while the edges of
# a
# cumulative sum move with it. The largest is taken of blocks of tokens first, then of the tokens in that block: so a
# draw
# makes a number per block, not one per token.

BLOCK_TOKENS = 128
FIRST_BLOCK = 1 << 32
"""The counter of the first block's number. Those of tokens are below."""

Draw = Callable[[Tensor, Tensor, Tensor, SamplingParams], tuple[Tensor, Tensor]]
"""Has the arguments and the results of `draw`."""


def draw(logits: Tensor, streams: Tensor, positions: Tensor, sampling: SamplingParams) -> tuple[Tensor, Tensor]:
    """Returns one token per row of `logits` [rows, vocab] float32, and its log-prob; both [rows].

    `streams` and `positions` [rows] int64 name the random numbers. A row is greedy where its stream is NO_STREAM and
    `sampling` has greedy samples among others. Log-probs are those of the tempered distribution before truncation, of
    temperature 1 where it is 0. A row that is not finite gives some token, and a log-prob that is not finite.
    """
    if sampling.temperature == 0:
        tokens = logits.argmax(-1, keepdim=True)
        return tokens[:, 0], torch.log_softmax(logits, -1).gather(-1, tokens)[:, 0]
    probabilities = torch.softmax(logits if sampling.temperature == 1 else logits / sampling.temperature, -1)
    of_rows = streams[:, None], positions[:, None]
    if not truncates(sampling):
        tokens = race(probabilities, *of_rows)
    else:
        kept, ids = truncate(probabilities, sampling.top_p, sampling.top_k)
        if kept.shape[1] <= BLOCK_TOKENS:
            tokens = ids.gather(-1, _largest(kept, *of_rows, ids))
        else:
            tokens = race(torch.zeros_like(probabilities).scatter_(-1, ids, kept), *of_rows)
    if sampling.greedy is not None:
        tokens = torch.where(streams[:, None] == NO_STREAM, logits.argmax(-1, keepdim=True), tokens)
    return tokens[:, 0], probabilities.gather(-1, tokens)[:, 0].log_()


def race(weights: Tensor, streams: Tensor, positions: Tensor) -> Tensor:
    """Returns [rows, 1] tokens, each with a probability proportional to its row of `weights` [rows, vocab].

    `streams` and `positions` are [rows, 1]. A row that holds NaN gives a place of one.
    """
    rows, vocab = weights.shape
    if vocab <= BLOCK_TOKENS:
        return _largest(weights, streams, positions, torch.arange(vocab, device=weights.device))
    blocks = F.pad(weights, (0, -vocab % BLOCK_TOKENS)) if vocab % BLOCK_TOKENS else weights
    blocks = blocks.view(rows, -1, BLOCK_TOKENS)
    numbers = torch.arange(blocks.shape[1], device=weights.device)
    block = _largest(blocks.sum(-1), streams, positions, numbers + FIRST_BLOCK)
    tokens = block * BLOCK_TOKENS + torch.arange(BLOCK_TOKENS, device=weights.device)
    within = blocks.gather(1, block[:, :, None].expand(-1, -1, BLOCK_TOKENS))[:, 0]
    return tokens.gather(-1, _largest(within, streams, positions, tokens))


def _largest(weights: Tensor, streams: Tensor, positions: Tensor, counters: Tensor) -> Tensor:
    """Returns [rows, 1] places of the largest log(number) / weight."""
    return log_uniforms(streams, positions, counters).div_(weights).argmax(-1, keepdim=True)


def truncates(sampling: SamplingParams) -> bool:
    """Returns whether tokens are left out of the draw."""
    return bool(sampling.top_k) or sampling.top_p < 1


def truncate(probabilities: Tensor, top_p: float, top_k: int) -> tuple[Tensor, Tensor]:
    """Returns kept probabilities (others 0) in descending order, and their token ids; both [rows, at most vocab].

    The `top_k` most likely tokens stay (0: all), then the fewest of these that reach `top_p` of their joint mass.
    """
    num_kept = min(top_k, probabilities.shape[-1]) if top_k else probabilities.shape[-1]
    if top_k:
        ordered, ids = torch.topk(probabilities, num_kept, dim=-1)
    else:
        ordered, ids = torch.sort(probabilities, dim=-1, descending=True, stable=True)
    if top_p < 1:
        cumulative = ordered.cumsum(-1)
        before = F.pad(cumulative[:, :-1], (1, 0))
        ordered = ordered.masked_fill(before >= top_p * cumulative[:, -1:], 0)
    return ordered, ids


def draw_by_kernel(
    logits: Tensor, streams: Tensor, positions: Tensor, sampling: SamplingParams
) -> tuple[Tensor, Tensor]:
    """Returns what `draw` returns. A Triton kernel reads the logits once where all tokens take part."""
    if truncates(sampling) and sampling.temperature > 0:
        return draw(logits, streams, positions, sampling)
    from rltrain.rollout.embedded.triton_kernels import draw_rows  # not without Triton

    return draw_rows(logits, streams, positions, sampling.temperature)


def choose_draw(device: torch.device) -> tuple[Draw, str]:
    """Returns the fastest draw that works on `device`, and why the kernel is not used where a GPU could have it."""
    if device.type != "cuda":
        return draw, ""
    try:
        wrong = num_differences(device)
    except Exception as refusal:  # whatever a version, a GPU, a compiler or a driver has against it
        return draw, f"{type(refusal).__name__}: {refusal}".split("\n")[0]
    return (draw, f"it draws {wrong} of 64 tokens otherwise") if wrong else (draw_by_kernel, "")


@torch.inference_mode()
def num_differences(device: torch.device) -> int:
    """Returns how many of 64 draws the kernel makes otherwise than `draw`. Raises whatever the kernel does."""
    rows, sampling = 64, SamplingParams(0.7, 1.0, 0, 1, ())
    logits = torch.randn(rows, 3000, generator=torch.Generator().manual_seed(0)).mul_(3).to(device)
    streams, positions = random_streams([*range(rows)], device), torch.arange(rows, device=device)
    found, expected = (function(logits, streams, positions, sampling) for function in (draw_by_kernel, draw))
    differ = (found[0] != expected[0]) | ((found[1] - expected[1]).abs() < 1e-3).logical_not_()
    return int(differ.sum())


# Steps that are recorded once and replayed, which saves the host's work of launching each of their kernels.

Record = Callable[[Callable[[], None]], Callable[[], None]]
"""Makes of a step, without executing it, what does the same on the same memory: a replay."""

_MAX_REPLAYS = 256
"""Each takes memory of its own for its list of kernels."""


class Recordings:
    """A step is named by all that shapes it. It runs as it is at first, which prepares what it needs of libraries and
    communicators; the second time it is recorded, and replayed from then on."""

    def __init__(self, record: Record) -> None:
        self._record = record
        self._addresses: tuple[int, ...] = ()
        self._seen: set[Hashable] = set()
        self._replays: dict[Hashable, Callable[[], None]] = {}

    def expire(self, addresses: tuple[int, ...]) -> None:
        """Forget all recordings unless `addresses`, of the memory that they use, are as they were."""
        if addresses != self._addresses:
            self.forget()
            self._addresses = addresses

    def run(self, name: Hashable, step: Callable[[], None]) -> None:
        """Do what `step` does."""
        if name not in self._seen:
            self._seen.add(name)
            step()
            return
        if name not in self._replays:
            if len(self._replays) == _MAX_REPLAYS:
                del self._replays[next(iter(self._replays))]
            self._replays[name] = self._record(step)
        self._replays[name]()

    def forget(self) -> None:
        """Drop the recordings. What was seen was prepared, and need not be again."""
        self._replays.clear()


def recorder(device: torch.device, group: dist.ProcessGroup | None) -> Record | None:
    """CUDA graphs; None on CPU, which launches nothing, and where gloo would take the host into every step."""
    if device.type != "cuda" or (group is not None and dist.get_backend(group) != "nccl"):
        return None
    return CudaGraphs()


class CudaGraphs:
    """Records CUDA graphs, which share the memory of their intermediate results: they never run at one time.

    A pool ends with its last graph, and torch refuses to record into one that has ended while anything still lies in
    it, as cuBLAS's workspace does. So the first graph of all, and the first after the last one is gone, gets a new one.
    """

    def __init__(self) -> None:
        self._graphs: WeakSet[torch.cuda.CUDAGraph] = WeakSet()
        self._pool: Any = None

    def __call__(self, step: Callable[[], None]) -> Callable[[], None]:
        if not self._graphs:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        # Other threads of this process may go on using the device meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            step()
        self._graphs.add(graph)
        return graph.replay


# What the running responses have drawn, kept on the device until somebody reads it.


class Transcript:
    """Tokens and log-probs [capacity, num_columns], a column per response: row p holds what feeding position p drew.

    A response keeps its column while it moves between the slots of the cache, and its places while capacity grows.
    One more column, that no response has, is for what nobody will read.
    """

    def __init__(self, num_columns: int, device: torch.device) -> None:
        self._num_columns = num_columns + 1
        self._tokens = torch.zeros(0, dtype=torch.int64, device=device)  # both flat, as `write` needs them
        self._logprobs = torch.zeros(0, dtype=torch.float32, device=device)
        self.nowhere = num_columns
        """A place of the column that nobody reads."""
        self.clear()

    def clear(self) -> None:
        """Free all columns."""
        self._free = list(range(self.nowhere))[::-1]

    def reserve(self, capacity: int) -> None:
        """Make room for positions below `capacity`, keeping what is there."""
        size = capacity * self._num_columns
        if size > len(self._tokens):
            self._tokens, self._logprobs = _grown(self._tokens, size), _grown(self._logprobs, size)

    @property
    def stride(self) -> int:
        """From a place to that of the column's next position."""
        return self._num_columns

    def release(self) -> None:
        """Give the memory back."""
        self._tokens, self._logprobs = self._tokens.new_empty(0), self._logprobs.new_empty(0)

    def addresses(self) -> tuple[int, int]:
        """Where tokens and log-probs lie now."""
        return self._tokens.data_ptr(), self._logprobs.data_ptr()

    def take(self, num_columns: int) -> list[int]:
        """Free columns, for as many responses."""
        return [self._free.pop() for _ in range(num_columns)]

    def give_back(self, columns: Sequence[int]) -> None:
        """Free the columns of responses that are done."""
        self._free += columns

    def place(self, position: int, column: int) -> int:
        """Where `write` puts what feeding `position` draws; the next position is `stride` further."""
        return position * self._num_columns + column

    def write(self, places: Tensor, tokens: Tensor, logprobs: Tensor) -> None:
        """Note what was drawn at each place: all [running]."""
        self._tokens.index_copy_(0, places, tokens)
        self._logprobs.index_copy_(0, places, logprobs)

    def read(self, spans: Sequence[tuple[int, int, int]]) -> list[tuple[list[int], list[float]]]:
        """Tokens and log-probs, on the host, of each span: its column, its first position and how many."""
        counts = [count for _, _, count in spans]
        starts = [self.place(first, column) for column, first, _ in spans]
        ends = [*accumulate(counts)]
        # Place n of all that is wanted is `stride` after place n - 1, but where a span starts.
        bases = [start - (end - n) * self.stride for start, end, n in zip(starts, ends, counts, strict=True)]
        per_span = torch.tensor([bases, counts], dtype=torch.int64, device=self._tokens.device)
        wanted = torch.arange(sum(counts), device=per_span.device).mul_(self.stride)
        wanted += per_span[0].repeat_interleave(per_span[1], output_size=len(wanted))
        tokens, logprobs = (buffer.index_select(0, wanted).tolist() for buffer in (self._tokens, self._logprobs))
        return [(tokens[end - n : end], logprobs[end - n : end]) for end, n in zip(ends, counts, strict=True)]


def _grown(buffer: Tensor, size: int) -> Tensor:
    grown = buffer.new_empty(size)
    grown[: len(buffer)] = buffer
    return grown


# All that a decode step reads and writes besides weights: it outlives sessions, so that recorded steps can too.

# Rows of the state.
TOKEN, POSITION, DRAWN, PLACE, LIMIT, STREAM = range(6)


class Slots:
    """Running responses fill slots 0 .. num_running - 1 of the cache and of `state` [6, slots] int64.

    `TOKEN` is the next token to feed, `POSITION` where it stands, `DRAWN` how many response tokens exist, `LIMIT` how
    many may, `PLACE` where the transcript notes the next one, `STREAM` where the random numbers start. An idle slot may
    take part in a step: it feeds the same token to position 0 again and again, and nobody reads what it draws.
    """

    def __init__(self, cache: KvCache, num_slots: int, device: torch.device) -> None:
        self.cache = cache
        self.num_slots = num_slots
        self.transcript = Transcript(num_slots, device)
        self.state = torch.zeros(6, num_slots, dtype=torch.int64, device=device)
        self.increments = torch.zeros(3, num_slots, dtype=torch.int64, device=device)
        """What a step adds to POSITION, DRAWN and PLACE."""
        self.stopped, self.failed, self.finished = torch.zeros(3, num_slots, dtype=torch.bool, device=device)
        """Of the last step: whose token was a stop token, whose logits were not finite, and whose response ends for
        either or for its length."""
        self.num_preempted = 0
        """Samples that had to wait again since somebody set it to 0."""
        idle = [0, 0, 0, self.transcript.nowhere, 1, 0]
        self._idle_state = torch.tensor(idle, device=device)[:, None]
        self.clear()

    def clear(self) -> None:
        """All slots are idle."""
        self.transcript.clear()
        self.free(0, self.num_slots)

    def release(self) -> None:
        """Give the memory back that grows with the context."""
        self.cache.release()
        self.transcript.release()

    def reserve(self, num_slots: int, num_positions: int, *, num_used: int) -> None:
        """Make room for `num_positions` in each of `num_slots`, of which the first `num_used` keep what they hold."""
        self.cache.reserve(num_slots, num_positions, num_used=num_used)
        self.transcript.reserve(self.cache.capacity)

    def fill(self, first: int, rows: Sequence[Sequence[int]], streams: Tensor) -> None:
        """Start responses from slot `first` on: `rows` are their TOKEN to LIMIT."""
        new = slice(first, first + len(streams))
        self.state[:STREAM, new] = torch.tensor(rows, dtype=torch.int64, device=streams.device)
        self.state[STREAM, new] = streams
        self.increments[:2, new] = 1
        self.increments[2, new] = self.transcript.stride

    def move(self, sources: Sequence[int], destinations: Sequence[int], num_positions: int) -> None:
        """Copy slots `sources` over slots `destinations`, up to `num_positions`."""
        to, by = torch.tensor([destinations, sources], device=self.state.device)
        self.state.index_copy_(1, to, self.state.index_select(1, by))
        self.cache.move(sources, destinations, num_positions)

    def free(self, first: int, end: int) -> None:
        """Slots from `first` up to `end` are idle from now on."""
        self.state[:, first:end] = self._idle_state
        self.increments[:, first:end] = 0
        self.cache.free(first, end)

    def addresses(self) -> tuple[int, ...]:
        """Where everything lies now, and how: equal as long as a recorded step is valid."""
        return *self.cache.addresses(), *self.transcript.addresses()


# One decode step as work on memory that stays where it is, so that it can be recorded and replayed.

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
