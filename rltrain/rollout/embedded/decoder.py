"""Decode steps: their slots, sampling by the Gumbel maximum, recorded graphs, and their results on the host."""

from collections import deque
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any
from weakref import WeakSet

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from rltrain.rollout.embedded.kv_cache import HeadTokens, KvCache, rounded, uploaded
from rltrain.rollout.embedded.layers import LayerKernels
from rltrain.rollout.embedded.model import EngineModel
from rltrain.rollout.engine import SamplingParams

Array = np.ndarray[Any, Any]

# Random numbers that depend only on a sample's seed, the position in its response and a counter.

POSITION_STEP = 0x9E3779B97F4A7C15 - (1 << 64)
"""2**64 times the fraction of the golden ratio. SplitMix64 advances by this."""
COUNTER_STEP = 0x91E10DA5C79E7B1D - (1 << 64)
"""2**64 times the fraction of the squared plastic ratio. No two (position, counter) pairs of a response coincide: with
fewer than 2**20 positions, their counters would have to differ by 2**42."""
MULTIPLIER_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
MULTIPLIER_2 = 0x94D049BB133111EB - (1 << 64)
UNIFORM_BITS = (1 << 63 | 1) - (1 << 64)
"""Bits set in a mixed number. The result is an odd negative number between -2**63 and -1."""
UNIFORM_SCALE = 2.0**-63 * (1 - 2.0**-24)
"""Factor that maps such a number, as float32, to a value below 0 and at least -1 + 2**-24."""
NO_STREAM = -(1 << 63)
"""Marks a greedy row. The stream of a seed has this value with probability 2**-64."""


def mix64(values: Tensor) -> Tensor:
    """Applies the splitmix64 finaliser to int64 tensors, with wrapping arithmetic. Masks make the shifts logical."""
    values = _multiplied(values)
    return values ^ _shift_right(values, 31)


def _multiplied(values: Tensor) -> Tensor:
    """Applies the finaliser without its last step, which does not affect the upper 31 bits."""
    values = (values ^ _shift_right(values, 30)).mul_(MULTIPLIER_1)
    return values.bitwise_xor_(_shift_right(values, 27)).mul_(MULTIPLIER_2)


def _shift_right(values: Tensor, bits: int) -> Tensor:
    return (values >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def random_streams(seeds: list[int], device: torch.device) -> Tensor:
    """Returns the start of each sample's sequence of random numbers, int64, shape [len(seeds)]."""
    signed = [((seed + (1 << 63)) % (1 << 64)) - (1 << 63) for seed in seeds]
    return mix64(torch.tensor(signed, dtype=torch.int64, device=device))


def log_uniforms(streams: Tensor, positions: Tensor, counters: Tensor) -> Tensor:
    """Returns the logarithms of uniform numbers between 0 and 1 as float32, each finite and below 0, one per element.

    All arguments are int64 and broadcast. The uniform numbers are equal on every device, but the rounding of the
    logarithm may differ. It stays precise near 0, the logarithm of large uniform numbers.
    """
    state = torch.add(streams, positions, alpha=POSITION_STEP) + counters * COUNTER_STEP
    return _multiplied(state).bitwise_or_(UNIFORM_BITS).float().mul_(UNIFORM_SCALE).log1p_()


# Sampling of tokens from logits by the Gumbel maximum, with the random numbers above.
#
# Each token gets a uniform number. The token with the largest log(number) / weight is sampled, with a probability
# proportional to its weight. Rounding changes the result only near a tie. With a cumulative sum it would shift all
# edges. Blocks of tokens compete first, then the tokens of the best block. So a row needs a number per block, not per
# token.

BLOCK_TOKENS = 128
FIRST_BLOCK = 1 << 32
"""Counter of the first block's number. Counters of tokens are lower."""

Draw = Callable[[Tensor, Tensor, Tensor, SamplingParams], tuple[Tensor, Tensor]]
"""A function with the arguments and results of `draw`."""


def draw(logits: Tensor, streams: Tensor, positions: Tensor, sampling: SamplingParams) -> tuple[Tensor, Tensor]:
    """Samples one token per row of `logits` [rows, vocab]. Returns (tokens, log-probs), both of shape [rows].

    `streams` and `positions` [rows] int64 select the random numbers. A row with stream NO_STREAM is greedy if
    `sampling` has greedy samples among others. Log-probs are those of the tempered distribution before truncation, at
    temperature 1 if it is 0. A row with non-finite values gives an arbitrary token and a non-finite log-prob.
    """
    logits = logits.float()
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
    """Samples tokens with probabilities proportional to `weights` [rows, vocab]. Returns shape [rows, 1].

    `streams` and `positions` have shape [rows, 1]. A row with NaN gives the index of a NaN.
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
    """Returns the index of the largest log(number) / weight in each row, shape [rows, 1]."""
    return log_uniforms(streams, positions, counters).div_(weights).argmax(-1, keepdim=True)


def truncates(sampling: SamplingParams) -> bool:
    """Returns whether top-k or top-p excludes tokens."""
    return bool(sampling.top_k) or sampling.top_p < 1


def truncate(probabilities: Tensor, top_p: float, top_k: int) -> tuple[Tensor, Tensor]:
    """Returns the kept probabilities (0 elsewhere), sorted descending, and their token ids, both [rows, at most vocab].

    The `top_k` most likely tokens are kept (0: all). Of these, the fewest that reach `top_p` of their joint mass are
    kept.
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
    """Returns the result of `draw`. Without truncation it uses a Triton kernel that reads the logits once."""
    if truncates(sampling) and sampling.temperature > 0:
        return draw(logits, streams, positions, sampling)
    from rltrain.rollout.embedded.triton_kernels import draw_rows  # needs Triton

    return draw_rows(logits, streams, positions, sampling.temperature)


def choose_draw(device: torch.device) -> tuple[Draw, str]:
    """Returns (the fastest working draw on `device`, the reason against the kernel on a GPU or an empty string)."""
    if device.type != "cuda":
        return draw, ""
    try:
        wrong = num_differences(device)
    except Exception as refusal:  # any failure of a version, GPU, compiler or driver
        return draw, f"{type(refusal).__name__}: {refusal}".split("\n")[0]
    return (draw, f"it samples {wrong} of 64 tokens differently") if wrong else (draw_by_kernel, "")


@torch.inference_mode()
def num_differences(device: torch.device) -> int:
    """Returns the number of tokens, out of 64, on which the kernel differs from `draw`. Raises any error of the
    kernel."""
    rows, sampling = 64, SamplingParams(0.7, 1.0, 0, 1, ())
    logits = torch.randn(rows, 3000, generator=torch.Generator().manual_seed(0)).mul_(3).to(device)
    streams, positions = random_streams([*range(rows)], device), torch.arange(rows, device=device)
    found, expected = (function(logits, streams, positions, sampling) for function in (draw_by_kernel, draw))
    differ = (found[0] != expected[0]) | ((found[1] - expected[1]).abs() < 1e-3).logical_not_()
    return int(differ.sum())


# Recorded steps. Replaying them saves the launches of their kernels by the host.

Record = Callable[[Callable[[], None]], Callable[[], None]]
"""A function that records a step without executing it. It returns a replay of the step on the same memory."""

_MAX_REPLAYS = 256
"""Limit of recordings, because each needs memory for its list of kernels."""


class Recordings:
    """Recorded steps by name. The name must determine everything that shapes the step.

    The first run is not recorded. It initializes libraries and communicators. The second run records the step, and all
    further ones replay it.
    """

    def __init__(self, record: Record) -> None:
        self._record = record
        self._addresses: tuple[int, ...] = ()
        self._seen: set[Hashable] = set()
        self._replays: dict[Hashable, Callable[[], None]] = {}

    def expire(self, addresses: tuple[int, ...]) -> None:
        """Drops all recordings if `addresses`, those of the memory they use, have changed."""
        if addresses != self._addresses:
            self.forget()
            self._addresses = addresses

    def run(self, name: Hashable, step: Callable[[], None]) -> None:
        """Executes the step, by a replay if possible."""
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
        """Drops the recordings. Steps seen before need no further preparation."""
        self._replays.clear()


def recorder(device: torch.device, group: dist.ProcessGroup | None) -> Record | None:
    """Returns a recorder of CUDA graphs. Returns None on a CPU, or if gloo needs the host in every step."""
    if device.type != "cuda" or (group is not None and dist.get_backend(group) != "nccl"):
        return None
    return CudaGraphs()


class CudaGraphs:
    """Records CUDA graphs. They share memory for intermediate results, because they never run at the same time.

    A memory pool ends with its last graph. Torch refuses to record into an ended pool while it still has allocations,
    such as the workspace of cuBLAS. So a new pool is made whenever no graph is left.
    """

    def __init__(self) -> None:
        self._graphs: WeakSet[torch.cuda.CUDAGraph] = WeakSet()
        self._pool: Any = None

    def __call__(self, step: Callable[[], None]) -> Callable[[], None]:
        if not self._graphs:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        # Other threads of this process may keep using the device meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            step()
        self._graphs.add(graph)
        return graph.replay


# Results of steps, copied to the host, and the generated tokens there.

_RESULT_BYTES = 8 + 4 + 3
"""Bytes of a slot's results: a token, its log-prob and three flags."""


class HostCopy:
    """A copy of results on the host. It follows the work launched before it, and holds nothing until `wait`."""

    def __init__(self, source: Tensor) -> None:
        self._source = source
        self.on_host = torch.empty_like(source, device="cpu", pin_memory=source.is_cuda)
        self.arrays: Any = tuple(field.numpy() for field in _fields(self.on_host))
        """Tokens, log-probs and flags of all slots (see Results)."""
        self._arrived = torch.cuda.Event() if source.is_cuda else None

    def send(self) -> None:
        """Starts the copy."""
        self.on_host.copy_(self._source, non_blocking=True)
        if self._arrived is not None:
            self._arrived.record()

    def wait(self) -> None:
        """Waits until the copy is complete, and with it all work launched before it."""
        if self._arrived is not None:
            self._arrived.synchronize()


def _fields(memory: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns views of the results of all slots: tokens, log-probs, and flags [3, slots]."""
    num_slots = len(memory) // _RESULT_BYTES
    tokens, logprobs, flags = memory.split([num_slots * 8, num_slots * 4, num_slots * 3])
    return tokens.view(torch.int64), logprobs.view(torch.float32), flags.view(torch.bool).view(3, num_slots)


class Results:
    """Results of the last step for all slots, and copies of those that the host has not read.

    `tokens` [slots] int64 and `logprobs` [slots] float32 are those generated. `flags` [3, slots] are `stopped`, a stop
    token was generated, `failed`, the logits were not finite, and `finished`, the response ended for either reason or
    by its length. At most `ahead` steps are launched before the results of a step are read.
    """

    def __init__(self, num_slots: int, device: torch.device, ahead: int) -> None:
        memory = torch.zeros(num_slots * _RESULT_BYTES, dtype=torch.uint8, device=device)
        self.tokens, self.logprobs, self.flags = _fields(memory)
        self._copies = deque(HostCopy(memory) for _ in range(ahead + 1))

    def send(self) -> HostCopy:
        """Starts a copy to the host. It is overwritten by the copy of the step after the next `ahead` ones."""
        self._copies.rotate()
        self._copies[0].send()
        return self._copies[0]


class Transcript:
    """Tokens and log-probs on the host, shape [num_rows, num_columns], with one column per response.

    A step writes one row, and after the last row it is the turn of the first. A response has fewer than `num_rows`
    steps. So none of its rows is overwritten before its column is free, not even by a step after its end.
    """

    def __init__(self, num_rows: int, num_columns: int) -> None:
        self._shape = num_rows, num_columns
        self.release()
        self.clear()

    def clear(self) -> None:
        """Frees all columns."""
        self._free = list(range(self._shape[1]))[::-1]

    def release(self) -> None:
        """Frees the memory. Rows take memory once they are written."""
        self._tokens: Array = np.empty(self._shape, dtype=np.int32)
        self._logprobs: Array = np.empty(self._shape, dtype=np.float32)

    def take(self, num_columns: int) -> list[int]:
        """Takes free columns for new responses."""
        return [self._free.pop() for _ in range(num_columns)]

    def give_back(self, columns: Sequence[int]) -> None:
        """Frees the columns of finished responses."""
        self._free += columns

    def write(self, step: int, columns: Array, tokens: Array, logprobs: Array) -> None:
        """Stores what a step generated for the responses in `columns`. The last three arguments have one shape."""
        row = step % self._shape[0]
        self._tokens[row, columns] = tokens
        self._logprobs[row, columns] = logprobs

    def read(self, spans: Sequence[tuple[int, int, int]]) -> list[tuple[list[int], list[float]]]:
        """Returns the tokens and log-probs of each span (column, first step, end of steps)."""
        if not spans:
            return []
        columns, firsts, stops = np.array(spans).T
        counts = stops - firsts
        ends = counts.cumsum()
        rows = (np.arange(ends[-1]) + np.repeat(firsts - ends + counts, counts)) % self._shape[0]
        places = rows, np.repeat(columns, counts)
        tokens, logprobs = self._tokens[places].tolist(), self._logprobs[places].tolist()
        cuts = [slice(end - count, end) for end, count in zip(ends.tolist(), counts.tolist(), strict=True)]
        return [(tokens[cut], logprobs[cut]) for cut in cuts]


# State of decode steps other than weights. It outlives a generation, so recorded steps stay valid.

# Rows of the state. triton_kernels.py has the same numbers.
TOKEN, POSITION, DRAWN, LIMIT, DELTA, STREAM = range(6)


class Slots:
    """Slots of running responses. They fill slots 0 .. num_running - 1 of the cache and of `state` [6, slots] int64.

    `TOKEN` is the next input token and `POSITION` its position. `DRAWN` is the number of response tokens and `LIMIT`
    their limit. `DELTA` is the position for rotary embeddings minus `POSITION`. `STREAM` is the start of the random
    numbers. Idle slots may take part in a step. They repeat the same token at position 0, and their output is ignored.
    """

    def __init__(
        self, cache: KvCache, num_slots: int, max_context_tokens: int, device: torch.device, ahead: int | None = None
    ) -> None:
        self.cache = cache
        self.num_slots = num_slots
        self.ahead = int(device.type == "cuda" and cache.allows_ahead) if ahead is None else ahead
        """Number of steps launched before the results of a step are read, 0 or 1."""
        self.transcript = Transcript(max_context_tokens, num_slots)
        self.results = Results(num_slots, device, self.ahead)
        self.state = torch.zeros(STREAM + 1, num_slots, dtype=torch.int64, device=device)
        self.increments = torch.zeros(num_slots, dtype=torch.int64, device=device)
        """Increments of POSITION and DRAWN per step: 1, and 0 for idle slots."""
        self.num_preempted = 0
        """Number of preempted samples since a reader last set this to 0."""
        self.head_tokens = HeadTokens()
        self._idle_state = torch.zeros_like(self.state)
        self._idle_state[LIMIT] = 1
        self.clear()

    def clear(self) -> None:
        """Makes all slots idle."""
        self.transcript.clear()
        self.free(0, self.num_slots)

    def release(self) -> None:
        """Frees the memory that grows with the context."""
        self.cache.release()
        self.transcript.release()

    def fill(self, first: int, rows: Sequence[Sequence[int]]) -> None:
        """Starts responses in slots from `first` on. `rows` are their state rows."""
        new = slice(first, first + len(rows[0]))
        self.state[:, new] = uploaded(rows, self.state.device)
        self.increments[new] = 1

    def move(self, sources: Sequence[int], destinations: Sequence[int], num_positions: int) -> None:
        """Copies slots `sources` to slots `destinations`, up to `num_positions`."""
        to, by = uploaded([destinations, sources], self.state.device)
        self.state.index_copy_(1, to, self.state.index_select(1, by))
        self.cache.move(sources, destinations, num_positions)

    def take(self, tokens: Tensor, logprobs: Tensor, stop_tokens: Tensor, kernels: LayerKernels | None) -> None:
        """Stores the results of a step in the first slots and moves these on."""
        state, increments, results = self.state[:, : len(tokens)], self.increments[: len(tokens)], self.results
        stopped, failed, finished = results.flags[:, : len(tokens)].unbind()
        if kernels is not None:
            flags, drawn = (stopped, failed, finished), (results.tokens, results.logprobs)
            kernels.finish_step(tokens, logprobs, stop_tokens, state, increments, flags, drawn)
            return
        fed, _, num_drawn, limits, *_ = state.unbind()
        results.tokens[: len(tokens)] = tokens
        results.logprobs[: len(tokens)] = logprobs
        fed.copy_(tokens)
        state[POSITION : DRAWN + 1].add_(increments)
        torch.any(tokens[:, None] == stop_tokens, -1, out=stopped)
        torch.logical_not(logprobs.isfinite(), out=failed)
        torch.logical_or(stopped | failed, num_drawn >= limits, out=finished)

    def free(self, first: int, end: int) -> None:
        """Makes the slots from `first` up to `end` idle."""
        self.state[:, first:end] = self._idle_state[:, first:end]
        self.increments[first:end] = 0
        self.cache.free(first, end)


# One decode step on memory with constant addresses, so it can be recorded and replayed.

_RECORDED_SIZES = 2
"""Recorded sizes (numbers of slots) between two powers of two."""


class Decoder:
    """Makes decode steps on the first slots. With `record` the numbers of slots and positions are rounded up to a few
    sizes, so that recorded steps can be reused."""

    def __init__(self, model: EngineModel, slots: Slots, draw: Draw, record: Record | None) -> None:
        self._model, self._slots, self._draw = model, slots, draw
        self._stop_tokens: dict[tuple[int, ...], Tensor] = {}
        self._recordings = Recordings(record) if record else None

    def step(self, num_running: int, num_positions: int, sampling: SamplingParams) -> None:
        """Generates the next token of every running slot. Their tokens are at positions below `num_positions`.

        Collective over: the engine's tensor-parallel group.
        """
        num_slots = num_running
        if self._recordings:
            num_slots = min(rounded(num_running, _RECORDED_SIZES), self._slots.num_slots)
            num_positions = self._slots.cache.recorded_length(num_positions)
        self._slots.cache.reserve(num_slots, num_positions, num_used=num_running)
        step = partial(self._run, num_slots, num_positions, sampling, self._stops(sampling))
        if self._recordings is None:
            step()
        else:
            self._recordings.expire((*self._slots.cache.addresses(), *self._model.addresses()))
            self._recordings.run((num_slots, num_positions, sampling), step)

    def forget(self) -> None:
        """Drops the recorded steps and their memory."""
        if self._recordings:
            self._recordings.forget()

    def _run(self, num_slots: int, num_positions: int, sampling: SamplingParams, stop_tokens: Tensor) -> None:
        slots = self._slots
        state = slots.state[:, :num_slots]
        fed, positions, num_drawn, _, deltas, streams = state.unbind()
        attention = slots.cache.decode_attention(positions, num_positions)
        rotated_by = positions + deltas if self._model.sees else positions
        logits = self._model.logits(self._model.forward(fed, rotated_by, attention))
        tokens, logprobs = self._draw(logits, streams, num_drawn, sampling)
        slots.take(tokens, logprobs, stop_tokens, self._model.kernels)

    def _stops(self, sampling: SamplingParams) -> Tensor:
        """Returns the stop tokens as a tensor with a constant address, as needed by recorded steps."""
        ids = sampling.stop_token_ids
        if ids not in self._stop_tokens:
            self._stop_tokens[ids] = torch.tensor(ids, dtype=torch.int64, device=self._slots.state.device)
        return self._stop_tokens[ids]
