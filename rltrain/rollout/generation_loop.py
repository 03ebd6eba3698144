"""The loop of a generate task. Engines share prompts and agree on the finished groups."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch.distributed as dist
from pydantic import TypeAdapter

from rltrain.rollout.engine_feed import Mail
from rltrain.rollout.episodes import Observed
from rltrain.rollout.groups import PromptGroups, Selection
from rltrain.rollout.in_flight_sync import InFlightSync, NoInFlightSync
from rltrain.rollout.rollout_state import Consumed, RolloutState
from rltrain.rollout.sample import SampleGroup
from rltrain.runtime.group_messages import broadcast_json
from rltrain.runtime.heartbeat import Heartbeat
from rltrain.runtime.job_store import Waiter, poll, poll_s

# Decisions of an engine's leader, its first rank. The leader shares them with the engine's other ranks.


@dataclass(frozen=True)
class LeaderDecision:
    """The actions of an engine before its next decode step.

    With `sync` it joins a weight sync, with `done` it ends the task. It starts the groups `claims`, gives `answers` to
    waiting samples, accepts the external turns of `mail`, and keeps or drops finished groups.
    """

    sync: bool = False
    done: bool = False
    claims: tuple[int, ...] = ()
    answers: tuple[Observed, ...] = ()
    kept: tuple[int, ...] = ()
    """Positions of finished groups that count."""
    dropped: tuple[int, ...] = ()
    """Positions of finished groups that do not count."""
    mail: Mail | None = None
    """Requests from outside. None if a decode step need not handle any."""

    def __bool__(self) -> bool:
        """Returns whether there is anything to do."""
        positions = any((self.claims, self.answers, self.kept, self.dropped))
        return self.sync or self.done or positions or self.mail is not None


_AS_JSON = TypeAdapter(LeaderDecision)


class LeaderDecisions:
    """Broadcasts the leader's decisions over `group`, the gloo group of the engine's ranks, or None for a single
    rank."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.is_leader = group is None or group.rank() == 0

    def share(self, decision: LeaderDecision) -> LeaderDecision:
        """Returns the leader's decision on every rank. Collective over: the engine's ranks."""
        if self.group is None:
            return decision
        told = broadcast_json(_AS_JSON.dump_python(decision, mode="json") if decision else None, self.group)
        return LeaderDecision() if told is None else _AS_JSON.validate_python(told)


# Rules for the groups of a step.


@dataclass(frozen=True)
class StreamRules:
    """Determines the groups of each step, and the groups that may be started during it.

    Without a shared log, a step takes the groups at the next `per_step` positions that are open in `done`. With a
    shared log, it takes the next `per_step` groups to finish, at any position. A step is handed over in `num_chunks`
    equal chunks.
    """

    num_groups: int
    """Number of groups of the whole stream that count."""
    per_step: int
    num_chunks: int = 1
    shared_log: str | None = None
    """Name of the log shared by all steps. None if each step has its own."""
    done: Consumed = Consumed()
    """Positions consumed before the run begins. Their groups belong to the steps before its first one."""
    lead: int = 0
    """Steps by which training may be behind generation."""
    num_ahead: int = 0
    """Number of groups of later steps that may be started during a step."""
    max_staleness: int | None = None
    """Groups of later steps may only start with weights fresh enough for the next step at this staleness. None:
    always."""

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
        """Returns the name of the log for the group at `position`."""
        return self._log(self.first_step + self.done.num_open_before(position) // self.per_step)

    def entries_of(self, step: int, chunk: int) -> tuple[str, int]:
        """Returns (log, chunk of that log) of the groups of a step's chunk."""
        return self._log(step), chunk if self.shared_log is None else (step - self.first_step) * self.num_chunks + chunk

    def max_position(self, step: int, policy_version: int | None, num_dropped: int = 0) -> int:
        """Returns the first position that may not be started during `step`.

        `policy_version` is the version of the engine's weights. `num_dropped` groups were started and do not count.
        """
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


# Assignment of prompt groups to engines. A group is named by its position in the stream of all prompts of the run.


class StaticAssignment:
    """Assigns position p to engine p mod num_engines, regardless of speed. All allowed positions are claimed at once.

    A resumed run continues at `start`. Its engines first take the earlier positions `returned`.
    """

    def __init__(self, engine: int, num_engines: int, start: int = 0, returned: Sequence[int] = ()) -> None:
        self.num_engines = num_engines
        self.next = start + (engine - start) % num_engines
        self.returned = [*returned]

    def claim(self, room: int, max_position: int) -> list[int]:
        """Returns new positions below `max_position` for this engine. `room` is ignored, because extra groups wait in
        the queue."""
        dealt = range(self.next, max_position, self.num_engines)
        self.next += len(dealt) * self.num_engines
        claimed = [position for position in self.returned if position < max_position]
        self.returned = [position for position in self.returned if position >= max_position]
        return [*claimed, *dealt]


class SharedAssignment:
    """Assigns positions from a counter in the store. An engine with free room takes the next one, so fast engines take
    more.

    A resumed run continues at `start`. This engine first takes the earlier positions `returned`.
    """

    def __init__(self, store: dist.Store, start: int = 0, returned: Sequence[int] = ()) -> None:
        self.store = dist.PrefixStore("deal", store)
        self.start = start
        self.held = [*returned]
        """Positions taken but not yet claimed. The last one may have been at or above `max_position` at the time."""

    def claim(self, room: int, max_position: int) -> list[int]:
        """Returns new positions below `max_position` for this engine, at most `room` of them."""
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
"""One engine's share of the prompt groups."""


# The order in which all engines finish prompt groups, numbered by a counter in the shared store.


@dataclass(frozen=True)
class Finished:
    """One finished prompt group of any engine."""

    position: int
    """Its place in the stream of all prompts of the run."""
    num_tokens: int
    """Tokens of all its samples, prompts included. Replicas are balanced by them."""
    num_response_tokens: int
    engine: int
    """Number of its engine."""
    dropped: tuple[int, ...] = ()
    """Positions of the groups dropped by its engine since its previous finished group."""


class CompletionLog:
    """Named logs of finished groups. Every `per_chunk` entries form a chunk, readable by any rank once it is full.

    One counter per log orders groups that several engines finish at the same time. The ranks of all engines add
    entries, and all of these `num_readers` ranks read them. A chunk's entry is deleted after all have read it. The
    counter is deleted with the last of `chunks_per_log` chunks.
    """

    def __init__(self, store: dist.Store, per_chunk: int, num_readers: int, chunks_per_log: int) -> None:
        self.store = dist.PrefixStore("completion_log", store)
        self.per_chunk = per_chunk
        self.num_readers = num_readers
        self.chunks_per_log = chunks_per_log
        self.poll_s = poll_s(num_readers)
        self._num_known: dict[str, int] = {}
        """For each log, the number of entries known to this rank. It is exact if no other rank adds entries."""
        self._last_look = 0.0

    def add(self, log: str, finished: Finished) -> None:
        """Appends a finished group to a log."""
        self._num_known[log] = self.store.add(f"{log}/count", 1)
        number = self._num_known[log] - 1
        of_group = (finished.position, finished.num_tokens, finished.num_response_tokens, finished.engine)
        entry = ":".join(map(str, (*of_group, *finished.dropped))) + ";"
        self.store.append(f"{log}/{number // self.per_chunk}", entry)  # type: ignore[attr-defined]

    def is_full(self, log: str, chunk: int) -> bool:
        """Returns whether all entries of the chunk have been numbered.

        This rank's own entries count at once. The store is asked for those of other ranks, if there are any, at most
        every `poll_s` seconds.
        """
        wanted, now = (chunk + 1) * self.per_chunk, time.monotonic()
        may_be_full = self._num_known.get(log, 0) < wanted and self.num_readers > 1
        if may_be_full and now - self._last_look >= self.poll_s:
            self._last_look = now
            self._num_known[log] = self.store.add(f"{log}/count", 0)
        return self._num_known.get(log, 0) >= wanted

    def read(self, log: str, chunk: int) -> list[Finished] | None:
        """Returns the groups of a full chunk by position, or None while an engine has yet to write its entry.

        Each rank reads a chunk once.
        """
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


# The loop of a generate task. It decodes on one engine until all groups of a chunk are finished on any engine.


@dataclass
class GenerationLoop:
    """One engine's part in generating a stream of prompt groups, over many generate tasks.

    The engine checks its own state before every decode step. The clock only limits how often it asks for the state of
    other engines. A single engine therefore starts groups and ends tasks at the same decode steps in every run.
    """

    groups: PromptGroups
    assignment: PromptAssignment
    completion_log: CompletionLog
    decisions: LeaderDecisions
    waiter: Waiter
    heartbeat: Heartbeat
    rules: StreamRules
    engine: int
    """Number of this engine."""
    ranks: Sequence[int]
    """Ranks of all engines."""
    in_flight: InFlightSync | NoInFlightSync = NoInFlightSync()
    """Weight syncs between decode steps."""
    selection: Selection | None = None
    """Selects the finished groups that count. None if all count."""
    prepare: Callable[[Sequence[int]], None] | None = None
    """Called on the engine's first rank with the positions of groups before they start."""
    shares_prefixes: bool = False
    """Whether models compute tokens that samples of a group begin with alike only once. Then they count once."""
    drawn: dict[int, SampleGroup] = field(default_factory=dict)
    """Finished groups that count and have not been handed over, by position."""
    consumed: Consumed = Consumed()
    """Positions consumed by all engines together."""
    ahead: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """Positions handed over for the last `lead` steps, by step. Training may not have reached these."""
    longest_step_s: float = 0.0
    """Longest decode step since a reader last set this to 0, in seconds."""
    episodes_wait_s: float = 0.0
    """Time without samples to decode while episodes were awaited, since a reader last set this to 0, in seconds."""

    def run(self, step: int, chunk: int) -> tuple[list[Finished], list[SampleGroup]]:
        """Generates until a chunk is complete. Returns (all groups of the chunk by position, the groups of this
        engine).

        Collective over: the engine's ranks.
        """
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
        """Returns the state from which another engine, or the next `run` here, continues. Call it between two runs.

        Collective over: the engine's ranks.
        """
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
    def unshipped(self) -> list[SampleGroup]:
        """Groups of this engine that are started and not handed over."""
        undecided = () if self.selection is None else self.selection.undecided.values()
        return [*self.groups.begun.values(), *self.drawn.values(), *undecided]

    @property
    def done(self) -> Consumed:
        """Consumed positions that a run resumed under another schedule does not generate again."""
        return self.consumed.without([position for positions in self.ahead.values() for position in positions])

    def resume(self, state: RolloutState) -> None:
        """Continues from a saved state. Call it before the first run, on every rank of the engine."""
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
        if self.selection is None:
            self._count(group)
        else:
            self.selection.undecided[group.position] = group

    def _count(self, group: SampleGroup) -> None:
        self.drawn[group.position] = group
        dropped = () if self.selection is None else self.selection.tell(group.position)
        if self.decisions.is_leader:
            num_tokens = group.num_distinct_tokens if self.shares_prefixes else group.num_tokens
            entry = Finished(group.position, num_tokens, group.num_response_tokens, self.engine, dropped)
            self.completion_log.add(self.rules.log_of(group.position), entry)

    def _decide(self, step: int, chunk: int) -> LeaderDecision:
        """Returns the next decision of the leader. Waits for one if the engine has nothing to decode."""
        decision = self._look(step, chunk)
        if decision or self.groups.engine.num_unfinished:
            return decision
        log, number = self.rules.entries_of(step, chunk)
        what, start = f"the last prompt groups of {log}, chunk {number}", time.monotonic()
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
        claims = tuple(self.assignment.claim(self.groups.num_wanted, max_position))
        if claims and self.prepare is not None:
            self.prepare(claims)
        return LeaderDecision(
            claims=claims,
            answers=self.groups.answers(),
            mail=self.groups.mail(),
        )

    def _hand_over(self, step: int, chunk: int) -> tuple[list[Finished], list[SampleGroup]]:
        log, number = self.rules.entries_of(step, chunk)
        what = f"the list of finished prompt groups of {log}, chunk {number}"
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
