"""The loop of a generate task: decode steps of one engine until the groups of a chunk are done on some engine."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from rltrain.rollout.sample import SampleGroup
from rltrain.rollout.stream.completion_log import CompletionLog, Finished
from rltrain.rollout.stream.groups import PromptGroups
from rltrain.rollout.stream.guests import Mail
from rltrain.rollout.stream.in_flight_sync import InFlightSync, NoInFlightSync
from rltrain.rollout.stream.leader_decision import LeaderDecision, LeaderDecisions
from rltrain.rollout.stream.prompt_assignment import PromptAssignment
from rltrain.rollout.stream.rollout_state import Consumed, RolloutState
from rltrain.rollout.stream.selection import Selection
from rltrain.rollout.stream.stream_rules import StreamRules
from rltrain.runtime.heartbeat import Heartbeat
from rltrain.runtime.job_store import Waiter, poll


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
