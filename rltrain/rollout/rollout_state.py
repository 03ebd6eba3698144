"""The rollout's part of a checkpoint, and the row of each position in the stream of prompt groups."""

import json
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain, islice
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from rltrain.checkpoint.run_files import Contents
from rltrain.data.prompt_order import Outcomes, RowOrder, SolvedRateOrder
from rltrain.errors import CheckpointError
from rltrain.models.vision import PlacedImage
from rltrain.rollout.sample import RecordedRouting, Sample, SampleGroup, Status
from rltrain.runtime.job_store import Waiter, poll, poll_s

# State of the stream of prompt groups in a checkpoint, and its distribution to any number of engines.

FORMAT = "rollout 7"
TOKEN_FIELDS = {
    "tokens": torch.int64,
    "logprobs": torch.float64,
    "policy_versions": torch.int64,
    "loss_mask": torch.bool,
}
"""Fields of a sample with one entry per token of the response."""
PROMPT_FIELDS = {"prompt": torch.int64}
"""The prompt of a sample. Samples of one row can have different prompts if environments make them."""
TURN_FIELDS = {"turns": torch.int64, "turn_rewards": torch.float64}
"""Fields of a sample with one entry per turn."""
NUM_NUMBERS = 12
"""Numbers per sample, stored as one row."""
NO_LIMIT = NO_PARENT = -1
ROUTING, IMAGES = "routed_experts", "images"
NUM_IMAGE_NUMBERS = 5
"""Numbers per image of a sample: place, key and grid. Pixels are not saved."""


@dataclass(frozen=True)
class Consumed:
    """The consumed positions of the stream. Their groups have been handed over or dropped. All other positions are
    open.

    All positions less than `below` are consumed, position `below` is open, and further consumed positions are in
    `beyond`.
    """

    below: int = 0
    beyond: frozenset[int] = frozenset()
    num_dropped: int = 0

    def __len__(self) -> int:
        return self.below + len(self.beyond)

    def __contains__(self, position: int) -> bool:
        return position < self.below or position in self.beyond

    @property
    def num_handed_over(self) -> int:
        return len(self) - self.num_dropped

    def after(self, positions: Iterable[int], dropped: Collection[int] = ()) -> "Consumed":
        """Returns the set with `positions` handed over and `dropped` dropped as well."""
        below, beyond = self.below, self.beyond.union(positions, dropped)
        while below in beyond:
            below += 1
        num_dropped = self.num_dropped + len(dropped)
        return Consumed(below, frozenset(position for position in beyond if position > below), num_dropped)

    def without(self, positions: Collection[int]) -> "Consumed":
        """Returns the set with these handed-over positions open again."""
        below = min((self.below, *positions))
        beyond = self.beyond.union(range(below, self.below)).difference(positions)
        return replace(self, below=below, beyond=beyond)

    def open_position(self, number: int) -> int:
        """Returns the open position with `number` open positions before it."""
        return self.below + number + bisect_right(self._open_before, number)

    def num_open_before(self, position: int) -> int:
        """Returns the number of open positions before an open one."""
        return position - self.below - bisect_left(self._sorted_beyond, position)

    @cached_property
    def _sorted_beyond(self) -> list[int]:
        return sorted(self.beyond)

    @cached_property
    def _open_before(self) -> list[int]:
        """For each position in `beyond`, in ascending order, the number of open positions before it."""
        return [position - self.below - number for number, position in enumerate(self._sorted_beyond)]


@dataclass(frozen=True)
class RolloutState:
    """The state of one engine between two of its tasks.

    It has the started groups, the finished groups not yet handed over, and the positions consumed by all engines
    together. With selection of groups, `records` has the data of finished groups that count, by position. `unseen` has
    positions dropped by this engine and not yet in `consumed`.
    """

    consumed: Consumed = Consumed()
    ahead: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    """Consumed positions handed over for the last steps, by step. Training may not have reached these."""
    begun: tuple[SampleGroup, ...] = ()
    drawn: tuple[SampleGroup, ...] = ()
    records: Mapping[int, str] = field(default_factory=dict)
    unseen: tuple[int, ...] = ()

    def trained_before(self, step: int) -> "RolloutState":
        """Returns the state for a run that generates all groups from `step` on again. Dropped groups stay dropped."""
        again = {position for of, positions in self.ahead.items() if of >= step for position in positions}
        return RolloutState(self.consumed.without(again), unseen=self.unseen)

    def contents(self) -> Contents:
        """Returns the contents of a file: one row of numbers per group and per sample, and all tokens concatenated."""
        groups = [*self.begun, *self.drawn]
        samples = [sample for group in groups for sample in group.samples]
        tensors = {
            "consumed": _integers([self.consumed.below, self.consumed.num_dropped, *sorted(self.consumed.beyond)]),
            "ahead": _integers([n for step, of in self.ahead.items() for position in of for n in (step, position)]),
            "records": torch.tensor([*json.dumps([*self.records.items()]).encode()], dtype=torch.uint8),
            "unseen": _integers(self.unseen),
            "groups": _integers([n for g in groups for n in (g.position, g.row, len(g.samples))]),
            "samples": _integers([n for sample in samples for n in _numbers(sample)]),
        }
        for name, dtype in (PROMPT_FIELDS | TOKEN_FIELDS | TURN_FIELDS).items():
            tensors[name] = torch.tensor([value for s in samples for value in getattr(s, name)], dtype=dtype)
        tensors |= _routing_tensors(samples)
        tensors[IMAGES] = _integers([n for s in samples for i in s.images for n in (i.begin, i.key, *i.grid)])
        return Contents(tensors, {"format": FORMAT})

    @classmethod
    def from_contents(cls, contents: Contents) -> "RolloutState":
        """Decodes the result of `contents`. Raises CheckpointError if it has another format."""
        found = contents.metadata.get("format")
        if found != FORMAT:
            raise CheckpointError(
                f"The rollout's state in a checkpoint has format {found!r}; expected {FORMAT!r}. Continue with "
                "the version of rltrain that saved it, or start over with checkpoint.resume: none."
            )
        below, num_dropped, *beyond = contents.tensors["consumed"].tolist()
        groups = [*_read_groups(contents.tensors)]
        ahead: dict[int, tuple[int, ...]] = {}
        for step, position in contents.tensors["ahead"].view(-1, 2).tolist():
            ahead[step] = (*ahead.get(step, ()), position)
        return cls(
            Consumed(below, frozenset(beyond), num_dropped),
            ahead,
            tuple(group for group in groups if not group.is_finished),
            tuple(group for group in groups if group.is_finished),
            dict(json.loads(bytes(contents.tensors["records"].tolist()))),
            tuple(contents.tensors["unseen"].tolist()),
        )


@dataclass(frozen=True)
class EngineStart:
    """The starting state of one engine.

    The engine first takes the `returned` positions. They are below `next_position` and no engine has started them.
    Positions from `next_position` on are assigned to engines as usual.
    """

    state: RolloutState = RolloutState()
    next_position: int = 0
    returned: tuple[int, ...] = ()

    @classmethod
    def at(cls, position: int) -> "EngineStart":
        """Returns the start with all groups below `position` handed over and nothing else started."""
        return cls(RolloutState(Consumed(position)), position)


def share_out(saved: Sequence[RolloutState], num_engines: int) -> list[EngineStart]:
    """Distributes the saved states of len(saved) engines to `num_engines` engines. Returns one start per engine.

    The group at position p goes to engine p mod num_engines, as in StaticAssignment. With an equal number of engines
    each gets its own state back. Raises CheckpointError if the states cannot be from one run and one step.
    """
    if len({(state.consumed, *sorted(state.ahead.items())) for state in saved}) != 1:
        raise _damaged(f"{len(saved)} engines that disagree on the groups handed over")
    consumed = saved[0].consumed.after((), [position for state in saved for position in state.unseen])
    records = {position: record for state in saved for position, record in state.records.items()}
    begun = sorted(chain.from_iterable(state.begun for state in saved), key=lambda group: group.position)
    drawn = [*chain.from_iterable(state.drawn for state in saved)]
    found = Counter(group.position for group in (*begun, *drawn))
    twice = sorted(position for position, count in found.items() if count > 1 or position in consumed)
    if twice:
        raise _damaged(f"the groups at positions {twice} more than once")
    next_position = max([consumed.below - 1, *consumed.beyond, *found]) + 1
    returned = [p for p in range(consumed.below, next_position) if p not in consumed and p not in found]
    return [
        EngineStart(
            RolloutState(
                consumed,
                saved[0].ahead,
                tuple(group for group in begun if group.position % num_engines == engine),
                tuple(group for group in drawn if group.position % num_engines == engine),
                {position: record for position, record in records.items() if position % num_engines == engine},
            ),
            next_position,
            tuple(position for position in returned if position % num_engines == engine),
        )
        for engine in range(num_engines)
    ]


def _damaged(what: str) -> CheckpointError:
    return CheckpointError(
        f"The rollout's state in the checkpoint holds {what}; expected the files of one checkpoint, one per engine. "
        "Name another checkpoint by checkpoint.resume."
    )


def _numbers(sample: Sample) -> tuple[int, ...]:
    """Returns a sample's row of numbers. The inverse is `_read_sample`."""
    limit = NO_LIMIT if sample.turn_limit is None else sample.turn_limit
    lengths = (len(sample.prompt), len(sample.tokens), len(sample.turns), len(sample.turn_rewards))
    parent = NO_PARENT if sample.parent is None else sample.parent
    routed = len(sample.routing) if sample.routing else 0
    num_images = len(sample.images)
    return sample.id, sample.seed, sample.status, limit, sample.goes_on, parent, routed, num_images, *lengths


def _read_sample(row: Sequence[int], values: Mapping[str, Iterator[Any]]) -> Sample:
    """Reads one sample. `values` are iterators over each field, positioned at this sample."""
    number, seed, status, limit, goes_on, parent, routed, num_images, num_prompt, num_tokens, *num_turns = row
    lengths = {"prompt": num_prompt} | dict.fromkeys(TOKEN_FIELDS, num_tokens)
    lengths |= dict(zip(TURN_FIELDS, num_turns, strict=True))
    fields: dict[str, Any] = {name: tuple(islice(values[name], length)) for name, length in lengths.items()}
    return Sample(
        number,
        seed=seed,
        status=Status(status),
        turn_limit=None if limit == NO_LIMIT else limit,
        goes_on=bool(goes_on),
        parent=None if parent == NO_PARENT else parent,
        routing=RecordedRouting(np.stack([*islice(values[ROUTING], routed)])) if routed else None,
        images=tuple(PlacedImage(begin, key, (t, h, w)) for begin, key, t, h, w in islice(values[IMAGES], num_images)),
        **fields,
    )


def _read_groups(tensors: Mapping[str, Tensor]) -> Iterator[SampleGroup]:
    values = {name: iter(tensors[name].tolist()) for name in (*PROMPT_FIELDS, *TOKEN_FIELDS, *TURN_FIELDS)}
    values[ROUTING] = iter(tensors[ROUTING].numpy())
    values[IMAGES] = iter(tensors[IMAGES].view(-1, NUM_IMAGE_NUMBERS).tolist())
    rows = iter(tensors["samples"].view(-1, NUM_NUMBERS).tolist())
    for position, row, num_samples in tensors["groups"].view(-1, 3).tolist():
        samples = tuple(_read_sample(numbers, values) for numbers in islice(rows, num_samples))
        yield SampleGroup(position, row, samples)


def _routing_tensors(samples: Sequence[Sample]) -> dict[str, Tensor]:
    """Returns the recorded experts of all samples with routing, concatenated, shape [tokens, layers, top_k]."""
    found = [sample.routing.experts for sample in samples if sample.routing]
    return {ROUTING: torch.from_numpy(np.concatenate(found)) if found else torch.zeros(0, 0, 0, dtype=torch.int8)}


def _integers(values: Iterable[int]) -> Tensor:
    return torch.tensor([*values], dtype=torch.int64)


# Outcomes of training prompts, sent by role reward to the engines.


class OutcomeLog:
    """Outcomes of steps in the shared store. An entry is deleted after `num_readers` ranks have read it."""

    def __init__(self, store: dist.Store, num_readers: int) -> None:
        self.store = dist.PrefixStore("outcomes", store)
        self.num_readers = num_readers

    def put(self, step: int, outcomes: Outcomes) -> None:
        """Stores all outcomes of a step. Called by one rank."""
        self.store.set(f"step {step}", json.dumps([[row, *counts] for row, counts in outcomes.items()]))

    def has(self, step: int) -> bool:
        return bool(self.store.check([f"step {step}"]))

    def read(self, step: int) -> Outcomes:
        """Returns the outcomes of a step. Only valid after `has` is True, once per rank."""
        text = self.store.get(f"step {step}")
        self._count_reader(f"step {step}")
        return {row: (solved, drawn) for row, solved, drawn in json.loads(text)}

    def agree(self, window: int, step: int) -> int:
        """Returns the step of the generate task that fixes the order of prompts in a window of the stream.

        `window` is the window's number, and `step` the step of this rank's current generate task. The result on every
        rank is the `step` of the first rank to ask. Each rank asks once per window. It does not wait for other ranks.
        """
        agreed = int(self.store.compare_set(f"window {window}", "", str(step)))
        self._count_reader(f"window {window}")
        return agreed

    def _count_reader(self, key: str) -> None:
        if self.store.add(f"{key}/read", 1) == self.num_readers:
            self.store.delete_key(key)
            self.store.delete_key(f"{key}/read")


# The row of training prompts at each position of the stream, equal on all ranks of the rollout.

Serve = Callable[[], None] | None


class FixedRows:
    """Rows that depend on the position alone. The first row is at position `first`. All ranks get equal rows at any
    time."""

    def __init__(self, order: RowOrder, first: int = 0) -> None:
        self.order, self.first = order, first

    def begin(self, step: int, consumed: Consumed, done: Consumed, serve: Serve) -> None:
        """Does nothing, because the rows do not depend on the generate task. It has the arguments of
        `SolvedRateRows.begin`."""

    def row(self, position: int) -> int:
        return self.order.row(position - self.first)

    def metrics(self) -> dict[str, float]:
        return {}

    def state(self) -> Contents | None:
        return None


class SolvedRateRows:
    """Rows chosen by how often their prompts are solved.

    The stream is ordered in windows of one step's positions. A window is ordered when any engine starts the first of
    its positions, in the generate task of some step g. It uses the outcomes of all steps up to g - lead - 1. In every
    order training has passed these steps by then. Ranks agree on g through the store, and each rank computes the rest
    alone.
    """

    def __init__(
        self, order: SolvedRateOrder, log: OutcomeLog, *, lead: int, scoring: int, waiter: Waiter, first_window: int
    ) -> None:
        """`scoring` is the rank that stores outcomes. The stream begins with window `first_window`."""
        self.order, self.log, self.lead, self.scoring, self.waiter = order, log, lead, scoring, waiter
        self.order.begin_at(first_window)
        self.step = first_window
        self.num_read = first_window
        """Outcomes of earlier steps have been read, or never existed."""
        self.unheeded: dict[int, Outcomes] = {}
        """Outcomes already read and not yet used for a window, by step."""

    def begin(self, step: int, consumed: Consumed, done: Consumed, serve: Serve) -> None:
        """Begins the generate task of `step`. `consumed` are the positions consumed by all engines together.

        Rows at positions in `done` will not be requested again.
        """
        self.step = step
        self._read_before(step - self.lead, serve)
        begun = max((consumed.below - 1, *consumed.beyond))
        self._draw_through(begun // self.order.per_window)
        self.order.forget_before(done.below // self.order.per_window)

    def row(self, position: int) -> int:
        self._draw_through(position // self.order.per_window)
        return self.order.row(position)

    def metrics(self) -> dict[str, float]:
        return self.order.rates.metrics()

    def _draw_through(self, window: int) -> None:
        while self.order.next_window <= window:
            end = self.log.agree(self.order.next_window, self.step) - self.lead
            self._read_before(end, None)  # available, since a rank ahead of this one has read it
            for step in sorted(step for step in self.unheeded if step < end):
                self.order.learn(self.unheeded.pop(step))
            self.order.draw()

    def _read_before(self, end: int, serve: Serve) -> None:
        while self.num_read < end:
            what = f"the rewards of step {self.num_read}"
            every_s = poll_s(self.log.num_readers)
            poll(self.waiter, lambda: self.log.has(self.num_read) or None, what, [self.scoring], serve, every_s)
            self.unheeded[self.num_read] = self.log.read(self.num_read)
            self.num_read += 1

    def state(self) -> Contents | None:
        """Returns the state for `resume`: tensors [rows] of the outcomes, and the ordered windows [windows,
        per_window]."""
        order = self.order
        windows = np.array([*order.windows.values()], np.int64).reshape(-1, order.per_window)
        unheeded = {step: [[row, *counts] for row, counts in of.items()] for step, of in self.unheeded.items()}
        tensors = {
            "rates": torch.from_numpy(order.rates.rates.copy()),
            "streaks": torch.from_numpy(order.rates.streaks.copy()),
            "places": torch.tensor(order.places),
            "windows": torch.from_numpy(windows),
            "window_numbers": torch.tensor([*order.windows], dtype=torch.int64),
            "next": torch.tensor([order.next_window, self.num_read]),
            "unheeded": torch.tensor([*json.dumps(unheeded).encode()], dtype=torch.uint8),
        }
        return Contents(tensors, {})

    def resume(self, saved: Sequence[Contents]) -> None:
        """Continues from the states of a run's engines. The engine with the most windows knows everything known to the
        others.

        Raises CheckpointError if the states are for other rows.
        """
        tensors: Mapping[str, torch.Tensor] = max((one.tensors for one in saved), key=lambda of: int(of["next"][0]))
        order, rates = self.order, self.order.rates
        num_rows, num_places = len(tensors["rates"]), len(tensors["places"])
        if num_rows != len(rates.rates) or num_places != len(order.places):
            raise CheckpointError(
                f"The checkpoint has solved rates of {num_rows} rows in {num_places} sources, but data.train has "
                f"{len(rates.rates)} rows in {len(order.places)} sources. Continue with the same data, or remove "
                "data.solved_rate."
            )
        rates.rates, rates.streaks = tensors["rates"].numpy().copy(), tensors["streaks"].numpy().copy()
        order.places = tensors["places"].tolist()
        unheeded = json.loads(bytes(tensors["unheeded"].tolist()))
        self.unheeded = {int(step): {row: (s, n) for row, s, n in of} for step, of in unheeded.items()}
        next_window, self.num_read = tensors["next"].tolist()
        numbers, windows = tensors["window_numbers"].tolist(), tensors["windows"].numpy()
        order.windows = dict(zip(numbers, windows, strict=True))
        order.next_window = next_window


RowStream = FixedRows | SolvedRateRows
