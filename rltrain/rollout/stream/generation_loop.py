"""The loop of a generate task: decode steps of one engine until the groups of a chunk are done on some engine."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from rltrain.liveness.heartbeat import Heartbeat
from rltrain.liveness.polling import poll
from rltrain.liveness.waiting import Waiter
from rltrain.rollout.sample import SampleGroup
from rltrain.rollout.stream.completion_log import CompletionLog, Finished
from rltrain.rollout.stream.groups import PromptGroups
from rltrain.rollout.stream.guests import Mail
from rltrain.rollout.stream.in_flight_sync import InFlightSync, NoInFlightSync
from rltrain.rollout.stream.leader_decision import LeaderDecision, LeaderDecisions
from rltrain.rollout.stream.prompt_assignment import PromptAssignment
from rltrain.rollout.stream.rollout_state import Consumed, RolloutState
from rltrain.rollout.stream.stream_rules import StreamRules


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
    ranks: Sequence[int]
    """Of all engines."""
    in_flight: InFlightSync | NoInFlightSync = NoInFlightSync()
    """New weights between decode steps."""
    drawn: dict[int, SampleGroup] = field(default_factory=dict)
    """Finished here and not yet handed over, by position."""
    consumed: Consumed = Consumed()
    """By all engines."""
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
        return RolloutState(self.consumed, self.groups.state(), tuple(self.drawn.values()))

    def resume(self, state: RolloutState) -> None:
        """Go on with this instead of from the beginning. Before the first run, on every rank of the engine."""
        self.consumed = state.consumed
        self.groups.resume(state.begun)
        for group in state.drawn:
            self._keep(group)

    def _step(self, mail: Mail | None) -> None:
        start = time.monotonic()
        for group in self.groups.step(mail):
            self._keep(group)
        self.longest_step_s = max(self.longest_step_s, time.monotonic() - start)
        self.heartbeat.advance()

    def _keep(self, group: SampleGroup) -> None:
        self.drawn[group.position] = group
        if self.decisions.is_leader:
            entry = Finished(group.position, group.num_tokens, group.num_response_tokens)
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
        decision = poll(self.waiter, lambda: self._look(step, chunk) or None, what, self.ranks)
        self.episodes_wait_s += (time.monotonic() - start) * bool(num_waiting)
        return decision

    def _look(self, step: int, chunk: int) -> LeaderDecision:
        if self.in_flight.is_due():
            return LeaderDecision(sync=True)
        if self.completion_log.is_full(*self.rules.entries_of(step, chunk)):
            return LeaderDecision(done=True)
        max_position = self.rules.max_position(step, self.groups.engine.policy_version)
        return LeaderDecision(
            claims=tuple(self.assignment.claim(self.groups.num_wanted, max_position)),
            answers=self.groups.answers(),
            mail=self.groups.mail(),
        )

    def _hand_over(self, step: int, chunk: int) -> tuple[list[Finished], list[SampleGroup]]:
        log, number = self.rules.entries_of(step, chunk)
        what = f"the completion_log of {log}, chunk {number}"
        finished = poll(self.waiter, lambda: self.completion_log.read(log, number), what, self.ranks)
        self.consumed = self.consumed.after(entry.position for entry in finished)
        return finished, [self.drawn.pop(entry.position) for entry in finished if entry.position in self.drawn]
