"""The loop of a generate task, and how engines share prompts and agree on what is done."""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from rltrain.rollout.episodes import Observed
from rltrain.rollout.groups import Mail, PromptGroups, Selection
from rltrain.rollout.in_flight_sync import InFlightSync, NoInFlightSync
from rltrain.rollout.rollout_state import Consumed, RolloutState
from rltrain.rollout.sample import SampleGroup
from rltrain.runtime.group_messages import broadcast_bytes
from rltrain.runtime.heartbeat import Heartbeat
from rltrain.runtime.job_store import Waiter, poll, poll_s

# What the ranks of one engine do next: decided by the first of them, the leader, and told to the others.


@dataclass(frozen=True)
class LeaderDecision:
    """Before the next decode step: take new weights, end the task, start these groups, go on after these answers and
    with these turns that are asked for from outside, count these finished groups or drop them."""

    sync: bool = False
    done: bool = False
    claims: tuple[int, ...] = ()
    answers: tuple[Observed, ...] = ()
    kept: tuple[int, ...] = ()
    """Finished groups that count, by position."""
    dropped: tuple[int, ...] = ()
    """Likewise those that do not."""
    mail: Mail | None = None
    """None: a decode step has nothing to do for whoever is outside."""

    def __bool__(self) -> bool:
        """Whether there is anything to do."""
        positions = any((self.claims, self.answers, self.kept, self.dropped))
        return self.sync or self.done or positions or self.mail is not None

    def record(self) -> list[Any]:
        """For JSON."""
        mail = None if self.mail is None else self.mail.record()
        answers = [answer.record() for answer in self.answers]
        return [self.sync, self.done, self.claims, answers, self.kept, self.dropped, mail]

    @classmethod
    def of_record(cls, record: list[Any]) -> "LeaderDecision":
        sync, done, claims, answers, kept, dropped, mail = record
        return cls(
            sync,
            done,
            tuple(claims),
            tuple(map(Observed.of_record, answers)),
            tuple(kept),
            tuple(dropped),
            None if mail is None else Mail.of_record(mail),
        )


class LeaderDecisions:
    """Shares the leader's decisions over `group`, the engine's ranks on gloo; None where the engine has one rank."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.is_leader = group is None or group.rank() == 0

    def share(self, decision: LeaderDecision) -> LeaderDecision:
        """The leader's decision, on every rank. Collective over: the engine's ranks."""
        if self.group is None:
            return decision
        told = broadcast_bytes(json.dumps(decision.record()).encode() if decision else b"", self.group)
        return LeaderDecision.of_record(json.loads(told)) if told else LeaderDecision()


# Which groups of a stream of prompts make up a step, and which of them may be begun for it.


@dataclass(frozen=True)
class StreamRules:
    """The first step takes the groups at the first per_step positions that are open in `done`, the next step those at
    the next open ones, and so on. Where all steps share one log, a step takes the next per_step groups to get done,
    whichever they are. A step is handed over in num_chunks equal chunks.
    """

    num_groups: int
    """Of the whole stream that count."""
    per_step: int
    num_chunks: int = 1
    shared_log: str | None = None
    """Its name, where steps share one."""
    done: Consumed = Consumed()
    """The positions that the run begins with: their groups belong to the steps before the first one."""
    lead: int = 0
    """Steps by which training may be behind what is drawn."""
    num_ahead: int = 0
    """How many groups behind those of a step may be begun during it."""
    max_staleness: int | None = None
    """They may if weights are so fresh that the next step could begin, which allows this much; None: always."""

    @property
    def first_step(self) -> int:
        return self.done.num_handed_over // self.per_step

    @property
    def per_chunk(self) -> int:
        return self.per_step // self.num_chunks

    @property
    def chunks_per_log(self) -> int:
        if self.shared_log is None:
            return self.num_chunks
        return (self.num_groups // self.per_step - self.first_step) * self.num_chunks

    def log_of(self, position: int) -> str:
        """The log that the group at `position` is entered in when it is done."""
        return self._log(self.first_step + self.done.num_open_before(position) // self.per_step)

    def entries_of(self, step: int, chunk: int) -> tuple[str, int]:
        """Where the groups of a chunk are entered: which log, and which chunk of it."""
        return self._log(step), chunk if self.shared_log is None else (step - self.first_step) * self.num_chunks + chunk

    def max_position(self, step: int, policy_version: int | None, num_dropped: int = 0) -> int:
        """The first position that may not be begun during this step, with weights of this version, after so many
        groups that were begun and do not count."""
        max_begun = (step + 1 - self.first_step) * self.per_step
        if self.max_staleness is None or self._is_fresh(policy_version, step + 1 - self.max_staleness):
            max_begun += self.num_ahead
        max_begun = min(max_begun, self.num_groups - self.first_step * self.per_step)
        return self.done.open_position(max_begun + num_dropped)

    @staticmethod
    def _is_fresh(policy_version: int | None, least: int) -> bool:
        return policy_version is not None and policy_version >= least

    def _log(self, step: int) -> str:
        return self.shared_log or f"step {step}"


# Which engine draws which prompt group. A group is named by its position in the stream of all prompts of the run.


class StaticAssignment:
    """Position p goes to engine p mod num_engines, whatever the engines' speed: all of them at once, to be queued.

    A run that goes on does so at `start`, its engines beginning with positions before it that were `returned`.
    """

    def __init__(self, engine: int, num_engines: int, start: int = 0, returned: Sequence[int] = ()) -> None:
        self.num_engines = num_engines
        self.next = start + (engine - start) % num_engines
        self.returned = [*returned]

    def claim(self, room: int, max_position: int) -> list[int]:
        """Positions below `max_position` for this engine alone, which has room for so many more groups."""
        dealt = range(self.next, max_position, self.num_engines)
        self.next += len(dealt) * self.num_engines
        claimed = [position for position in self.returned if position < max_position]
        self.returned = [position for position in self.returned if position >= max_position]
        return [*claimed, *dealt]


class SharedAssignment:
    """Engines take the next position from a counter in the store whenever they have room: fast ones take more.

    A run that goes on does so at `start`, this engine beginning with positions before it that were `returned`.
    """

    def __init__(self, store: dist.Store, start: int = 0, returned: Sequence[int] = ()) -> None:
        self.store = dist.PrefixStore("deal", store)
        self.start = start
        self.held = [*returned]
        """For this engine alone, and yet to be claimed: the last one lay beyond the max_position when it was taken."""

    def claim(self, room: int, max_position: int) -> list[int]:
        """As `StaticAssignment`, no more than there is room for."""
        claimed: list[int] = []
        while len(claimed) < room:
            if not self.held:
                self.held = [self._take()]
            if self.held[0] >= max_position:
                break
            claimed.append(self.held.pop(0))
        return claimed

    def _take(self) -> int:
        return self.start + int(self.store.add("next", 1)) - 1


PromptAssignment = StaticAssignment | SharedAssignment
"""One engine's share."""


# The order in which prompt groups get done, over all engines: numbers drawn from a counter in the shared store.


@dataclass(frozen=True)
class Finished:
    """One prompt group that some engine has completed."""

    position: int
    """Its place in the stream of all prompts of the run."""
    num_tokens: int
    """Of all its samples, prompts included."""
    num_response_tokens: int
    engine: int
    """The number of the one that has it."""
    dropped: tuple[int, ...] = ()
    """Positions of groups that its engine has dropped since the one before."""


class CompletionLog:
    """A log per name; every `per_chunk` entries of it are a chunk, which any rank can read once it is full.

    Engines that finish groups at the same time agree on who is first by one counter per log. A chunk's entry is
    deleted once `num_readers` ranks have read it, and with the last of `chunks_per_log` the counter, which nobody looks
    at any more.
    """

    def __init__(self, store: dist.Store, per_chunk: int, num_readers: int, chunks_per_log: int) -> None:
        self.store = dist.PrefixStore("completion_log", store)
        self.per_chunk = per_chunk
        self.num_readers = num_readers
        self.chunks_per_log = chunks_per_log
        self.poll_s = poll_s(num_readers)
        self._num_known: dict[str, int] = {}
        """Per log, the entries that this rank knows of: all of them, where nobody else makes any."""
        self._last_look = 0.0

    def add(self, log: str, finished: Finished) -> None:
        """Append to the log."""
        self._num_known[log] = self.store.add(f"{log}/count", 1)
        number = self._num_known[log] - 1
        of_group = (finished.position, finished.num_tokens, finished.num_response_tokens, finished.engine)
        entry = ":".join(map(str, (*of_group, *finished.dropped))) + ";"
        self.store.append(f"{log}/{number // self.per_chunk}", entry)  # type: ignore[attr-defined]

    def is_full(self, log: str, chunk: int) -> bool:
        """Whether the chunk's last number has been drawn: known at once where this rank drew it or a later one, found
        in the store, which is looked into every `poll_s` at most, where another did."""
        wanted, now = (chunk + 1) * self.per_chunk, time.monotonic()
        if self._num_known.get(log, 0) < wanted and now - self._last_look >= self.poll_s:
            self._last_look = now
            self._num_known[log] = self.store.add(f"{log}/count", 0)
        return self._num_known.get(log, 0) >= wanted

    def read(self, log: str, chunk: int) -> list[Finished] | None:
        """The groups of a full chunk by position, once per rank; None while an engine has yet to write its entry."""
        if not self.store.check([f"{log}/{chunk}"]):
            return None
        text = self.store.get(f"{log}/{chunk}").decode()
        entries = [_read(entry) for entry in text.split(";")[:-1]]
        if len(entries) < self.per_chunk:
            return None
        if self._is_last(chunk):
            self._num_known.pop(log, None)
        self._forget_when_all_have_read(log, chunk)
        return sorted(entries, key=lambda finished: finished.position)

    def _forget_when_all_have_read(self, log: str, chunk: int) -> None:
        if self.store.add(f"{log}/{chunk}/read", 1) < self.num_readers:
            return
        self.store.delete_key(f"{log}/{chunk}")
        self.store.delete_key(f"{log}/{chunk}/read")
        if self._is_last(chunk):
            self.store.delete_key(f"{log}/count")

    def _is_last(self, chunk: int) -> bool:
        return chunk == self.chunks_per_log - 1


def _read(entry: str) -> Finished:
    position, num_tokens, num_response_tokens, engine, *dropped = map(int, entry.split(":"))
    return Finished(position, num_tokens, num_response_tokens, engine, tuple(dropped))


# The loop of a generate task: decode steps of one engine until the groups of a chunk are done on some engine.


@dataclass
class GenerationLoop:
    """One engine's part in drawing a stream of prompt groups, over many generate tasks.

    Before every decode step the engine looks at all that it knows itself; the clock only limits how often it asks what
    others have done. So one that is alone ends its tasks and begins its groups at the same decode steps in every run.
    """

    groups: PromptGroups
    assignment: PromptAssignment
    completion_log: CompletionLog
    decisions: LeaderDecisions
    waiter: Waiter
    heartbeat: Heartbeat
    rules: StreamRules
    engine: int
    """The number of this one."""
    ranks: Sequence[int]
    """Of all engines."""
    in_flight: InFlightSync | NoInFlightSync = NoInFlightSync()
    """New weights between decode steps."""
    selection: Selection | None = None
    """Which finished groups count; None: all."""
    drawn: dict[int, SampleGroup] = field(default_factory=dict)
    """Those that count and were not yet handed over, by position."""
    consumed: Consumed = Consumed()
    """By all engines."""
    ahead: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """The positions handed over for the last steps, by step. Training may not have reached these."""
    longest_step_s: float = 0.0
    """Of the decode steps since whoever reads it has set it to 0."""
    episodes_wait_s: float = 0.0
    """Likewise: how long the engine had nothing to decode, while samples waited for their episodes."""

    def run(self, step: int, chunk: int) -> tuple[list[Finished], list[SampleGroup]]:
        """(all groups of the chunk by position, those of them that this engine drew). Collective over: the engine."""
        self.groups.start(())
        while True:
            decision = self.decisions.share(self._decide(step, chunk) if self.decisions.is_leader else LeaderDecision())
            if decision.sync:
                self.in_flight.join()
            if decision.done:
                break
            if self.selection is not None and (decision.kept or decision.dropped):
                for group in self.selection.apply(decision.kept, decision.dropped):
                    self._count(group)
                continue
            if decision.claims:
                self.groups.start(decision.claims)
            for group in self.groups.answer(decision.answers):
                self._keep(group)
            self._step(decision.mail)
        return self._hand_over(step, chunk)

    def state(self) -> RolloutState:
        """What is to go on elsewhere, or here: the next `run` does. Between two runs. Collective over: the engine."""
        if self.groups.episodes is not None:
            answers = LeaderDecision(answers=tuple(self.groups.episodes.settle()))
            for group in self.groups.answer(self.decisions.share(answers).answers):
                self._keep(group)
        begun, drawn = self.groups.state(), tuple(self.drawn.values())
        if self.selection is None:
            return RolloutState(self.consumed, dict(self.ahead), begun, drawn)
        drawn += tuple(self.selection.undecided.values())
        records, unseen = dict(self.selection.records), self.selection.unseen
        return RolloutState(self.consumed, dict(self.ahead), begun, drawn, records, unseen)

    @property
    def done(self) -> Consumed:
        """Returns the consumed positions that stay so in a run that goes on from here under another schedule."""
        return self.consumed.without([position for positions in self.ahead.values() for position in positions])

    def resume(self, state: RolloutState) -> None:
        """Go on with this instead of from the beginning. Before the first run, on every rank of the engine."""
        self.consumed, self.ahead = state.consumed, dict(state.ahead)
        self.groups.resume(state.begun)
        for group in state.drawn:
            if group.position in state.records:
                self._count(group)
            else:
                self._keep(group)
        if self.selection is not None:
            self.selection.records = dict(state.records)

    def _step(self, mail: Mail | None) -> None:
        start = time.monotonic()
        for group in self.groups.step(mail):
            self._keep(group)
        self.longest_step_s = max(self.longest_step_s, time.monotonic() - start)
        self.heartbeat.advance()

    def _keep(self, group: SampleGroup) -> None:
        """It is finished."""
        if self.selection is None:
            self._count(group)
        else:
            self.selection.undecided[group.position] = group

    def _count(self, group: SampleGroup) -> None:
        self.drawn[group.position] = group
        dropped = () if self.selection is None else self.selection.tell(group.position)
        if self.decisions.is_leader:
            entry = Finished(group.position, group.num_tokens, group.num_response_tokens, self.engine, dropped)
            self.completion_log.add(self.rules.log_of(group.position), entry)

    def _decide(self, step: int, chunk: int) -> LeaderDecision:
        """What to do now; with nothing left to decode, what to do as soon as there is something."""
        decision = self._look(step, chunk)
        if decision or self.groups.engine.num_unfinished:
            return decision
        log, number = self.rules.entries_of(step, chunk)
        what, start = f"the last groups of {log}, chunk {number}", time.monotonic()
        num_waiting = len(self.groups.waiting)
        if num_waiting:
            what = f"{num_waiting} episodes, and {what}"
        if self.selection is not None and self.selection.undecided:
            what = f"the rewards of {len(self.selection.undecided)} prompt groups, and {what}"
        decision = poll(self.waiter, lambda: self._look(step, chunk) or None, what, self.ranks)
        self.episodes_wait_s += (time.monotonic() - start) * bool(num_waiting)
        return decision

    def _look(self, step: int, chunk: int) -> LeaderDecision:
        if self.in_flight.is_due():
            return LeaderDecision(sync=True)
        if self.completion_log.is_full(*self.rules.entries_of(step, chunk)):
            return LeaderDecision(done=True)
        num_dropped = 0
        if self.selection is not None:
            kept, dropped = self.selection.decide(step)
            if kept or dropped:
                return LeaderDecision(kept=kept, dropped=dropped)
            num_dropped = self.selection.drops.total
        max_position = self.rules.max_position(step, self.groups.engine.policy_version, num_dropped)
        return LeaderDecision(
            claims=tuple(self.assignment.claim(self.groups.num_wanted, max_position)),
            answers=self.groups.answers(),
            mail=self.groups.mail(),
        )

    def _hand_over(self, step: int, chunk: int) -> tuple[list[Finished], list[SampleGroup]]:
        log, number = self.rules.entries_of(step, chunk)
        what = f"the completion_log of {log}, chunk {number}"
        every_s = self.completion_log.poll_s
        finished = poll(self.waiter, lambda: self.completion_log.read(log, number), what, self.ranks, every_s=every_s)
        if self.selection is not None:
            self.selection.hand_over(entry.position for entry in finished)
        dropped = [position for entry in finished for position in entry.dropped]
        positions = [entry.position for entry in finished]
        self.consumed = self.consumed.after(positions, dropped)
        self.ahead[step] = (*self.ahead.get(step, ()), *positions)
        self.ahead = {of: handed for of, handed in self.ahead.items() if of > step - self.rules.lead}
        return finished, [self.drawn.pop(entry.position) for entry in finished if entry.position in self.drawn]
