"""Turns of an endpoint on an engine: the side of whoever steps it."""

from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace

from rltrain.endpoint.mailbox import EngineMailbox
from rltrain.errors import DataError
from rltrain.rollout.engine import Engine, SamplingParams
from rltrain.rollout.groups import Mail, Turn
from rltrain.rollout.sample import Sample, Status
from rltrain.rollout.stop_strings import StopStrings, Tokenizer

PULSE_STEPS = 4
"""Decode steps between two looks at what running turns have drawn: their stop strings, and what is told of them."""
SLICE_STEPS = 64
"""Decode steps after which turns of other sampling, where some wait, have theirs."""


@dataclass
class _StopSearch:
    """Looks for a turn's stop strings in the tokens that it draws, each once."""

    strings: StopStrings
    recent: deque[int]
    num_seen: int
    """Response tokens, those before the turn included."""

    def end_of(self, sample: Sample) -> int | None:
        """How many response tokens there are once a string is complete."""
        while self.num_seen < len(sample.tokens):
            token = sample.tokens[self.num_seen]
            self.num_seen += 1
            if self.strings.append([self.recent], [token])[0]:
                return self.num_seen
        return None


@dataclass
class _Entry:
    """A turn that was taken from the mailbox, and how far it has come when it was last off the engine."""

    turn: Turn
    sample: Sample
    search: _StopSearch | None


@dataclass
class EngineFeed:
    """Implements `Guests`: the turns of a mailbox on `engine`, beside whatever else it draws.

    Before every decode step call `begin_step` with the `mail`, after it `end_step` with what the step returned; all by
    the engine's one thread. Where somebody suspends the engine in between, `take_back` what was this feed's of it: it
    goes on at the next `begin_step`. An engine draws with one SamplingParams at a time. Where others wait, turns take
    turns by decode steps: so everybody gets on, and what is drawn does not depend on the clock. Whatever else is on the
    engine must have the sampling of the turns.

    All ranks of an engine have one, and begin a step with equal mail. The mailbox is the first one's, which alone looks
    for stop strings of turns: what it finds ended it gives up for the others in its next mail.
    """

    engine: Engine
    tokenizer: Tokenizer
    mailbox: EngineMailbox | None = None
    """None: this is not the engine's first rank."""
    slice_steps: int = SLICE_STEPS
    _waiting: dict[SamplingParams, deque[_Entry]] = field(default_factory=dict)
    """Not on the engine, by sampling; those that are served next come first."""
    _running: dict[int, _Entry] = field(default_factory=dict)
    _sampling: SamplingParams | None = None
    """Of what runs."""
    _cut: set[int] = field(default_factory=set)
    """Turns that have been delivered, and that the engine has yet to be rid of."""
    _num_steps: int = 0
    _slice_end: int = 0

    @property
    def num_turns(self) -> int:
        """Taken from the mailbox and not ended."""
        return len(self._running) + sum(map(len, self._waiting.values()))

    def mail(self) -> Mail | None:
        """As `Guests` says."""
        assert self.mailbox is not None, "the engine's first rank is asked"
        come = self.mailbox.take()
        mail = replace(come, given_up=come.given_up | self._cut)
        self._cut.clear()
        return mail if mail or self.num_turns else None

    def begin_step(self, mail: Mail) -> None:
        """Give the engine what it is to draw."""
        if mail.given_up:
            self._drop(mail.given_up)
        if mail.forgotten:
            self.engine.forget(mail.forgotten)
        for turn in mail.turns:
            self._waiting.setdefault(turn.sampling, deque()).append(self._entry(turn))
        others = any(sampling != self._sampling for sampling in self._waiting)
        if self._running and others and self._num_steps >= self._slice_end:
            self.take_back(self.engine.withdraw(self._running.keys()))
        if not self._running and self._waiting:
            self._sampling = next(iter(self._waiting))
            self._slice_end = self._num_steps + self.slice_steps
        if self._sampling is not None and self._sampling in self._waiting:
            self._submit(self._waiting.pop(self._sampling), self._sampling)

    def end_step(self, finished: Iterable[Sample]) -> list[Sample]:
        """Deliver the turns that are among `finished`; those that are not this feed's."""
        self._num_steps += 1
        own, foreign = [], []
        for sample in finished:
            entry = self._running.pop(sample.id, None)
            if entry is None:
                foreign.append(sample)
            elif sample.id not in self._cut:
                own.append(_ended(entry, sample) or sample)
        if self.mailbox is not None:
            if own:
                self.mailbox.deliver(own)
            if self._num_steps % PULSE_STEPS == 0:
                self._look(self.mailbox)
        return foreign

    def fail_running(self) -> None:
        """The engine has given up all that ran, since none of it was finite: deliver it as failed."""
        lost, self._running = self._running, {}
        if self.mailbox is not None:
            entries = (entry for number, entry in lost.items() if number not in self._cut)
            self.mailbox.deliver([replace(entry.sample, status=Status.FAILED) for entry in entries])

    def take_back(self, samples: Iterable[Sample]) -> list[Sample]:
        """The engine has given these back unfinished; those that are not this feed's."""
        back, foreign = deque[_Entry](), []
        for sample in samples:
            entry = self._running.pop(sample.id, None)
            if entry is None:
                foreign.append(sample)
            else:
                entry.sample = sample
                back.append(entry)
        if back:
            assert self._sampling is not None
            newer = self._waiting.pop(self._sampling, deque())
            self._waiting[self._sampling] = back + newer
        return foreign

    def _submit(self, entries: Collection[_Entry], sampling: SamplingParams) -> None:
        try:
            self.engine.submit([entry.sample for entry in entries], sampling)
        except (DataError, ValueError) as error:  # one of them alone can be refused, and none has been queued
            if len(entries) == 1:
                if self.mailbox is not None:
                    self.mailbox.fail({entry.sample.id: error for entry in entries})
                return
            for entry in entries:
                self._submit([entry], sampling)
            return
        self._running |= {entry.sample.id: entry for entry in entries}

    def _drop(self, numbers: Collection[int]) -> None:
        running = [number for number in numbers if self._running.pop(number, None) is not None]
        if running:
            self.engine.withdraw(running)
        for sampling, entries in [*self._waiting.items()]:
            left = deque(entry for entry in entries if entry.sample.id not in numbers)
            if left:
                self._waiting[sampling] = left
            else:
                del self._waiting[sampling]

    def _look(self, mailbox: EngineMailbox) -> None:
        """Tell what is watched, and end what has drawn a stop string of its own."""
        going_on_here = [(n, entry) for n, entry in self._running.items() if n not in self._cut]
        looked_at = [n for n, entry in going_on_here if entry.turn.is_watched or entry.search is not None]
        going_on, ended = [], []
        for sample in self.engine.progress(looked_at) if looked_at else ():
            if (cut := _ended(self._running[sample.id], sample)) is not None:
                ended.append(cut)
            elif self._running[sample.id].turn.is_watched:
                going_on.append(sample)
        if ended:
            self._cut.update(sample.id for sample in ended)
            mailbox.deliver(ended)
        mailbox.report(going_on)

    def _entry(self, turn: Turn) -> _Entry:
        search = None
        if turn.stop and self.mailbox is not None:
            strings = StopStrings(self.tokenizer, turn.stop)
            search = _StopSearch(strings, strings.recent(()), len(turn.sample.tokens))
        return _Entry(turn, turn.sample, search)


def _ended(entry: _Entry, sample: Sample) -> Sample | None:
    """`sample` as one of its turn's own stop strings ends it; None where it has drawn none of them."""
    end = entry.search.end_of(sample) if entry.search is not None else None
    if end is None:
        return None
    return sample.first(end).drawn((), (), (), Status.STOPPED)
