"""The loop of a generate task: decode steps of one engine until the groups of a chunk are done on some engine."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from rltrain.liveness.polling import poll
from rltrain.liveness.waiting import Waiter
from rltrain.rollout.sample import SampleGroup
from rltrain.rollout.stream.completion_log import CompletionLog, Finished
from rltrain.rollout.stream.groups import PromptGroups
from rltrain.rollout.stream.leader_decision import LeaderDecision, LeaderDecisions
from rltrain.rollout.stream.prompt_assignment import PromptAssignment
from rltrain.rollout.stream.rollout_state import Consumed, RolloutState


@dataclass(frozen=True)
class ChunkTarget:
    """What a generate task waits for: `chunk` of `log` to be full, with groups at positions below `max_position()`."""

    log: str
    chunk: int
    max_position: Callable[[], int]


@dataclass
class GenerationLoop:
    """One engine's part in drawing a stream of prompt groups, over many generate tasks.

    Before every decode step the engine looks at all that it knows itself; the clock only limits how often it asks what
    others have done. So one that is alone ends its tasks and begins its groups at the same decode steps in every run.

    `log_of(position)` names the log that a finished group is entered in. `sync_is_due()` and `sync()` take new weights
    between decode steps. `advance()` is called after each.
    """

    groups: PromptGroups
    deal: PromptAssignment
    completion_log: CompletionLog
    turns: LeaderDecisions
    waiter: Waiter
    ranks: Sequence[int]
    """Of all engines."""
    log_of: Callable[[int], str]
    sync_is_due: Callable[[], bool]
    sync: Callable[[], None]
    advance: Callable[[], None]
    drawn: dict[int, SampleGroup] = field(default_factory=dict)
    """Finished here and not yet handed over, by position."""
    consumed: Consumed = Consumed()
    """By all engines."""
    longest_step_s: float = 0.0
    """Of the decode steps since whoever reads it has set it to 0."""

    def run(self, chunk_target: ChunkTarget) -> tuple[list[Finished], list[SampleGroup]]:
        """(all groups of the chunk by position, those of them that this engine drew). Collective over: the engine."""
        self.groups.start(())
        while True:
            turn = self.turns.share(self._decide(chunk_target) if self.turns.is_leader else LeaderDecision())
            if turn.sync:
                self.sync()
            if turn.done:
                break
            if turn.claims:
                self.groups.start(turn.claims)
            self._step()
        return self._hand_over(chunk_target)

    def carried(self) -> RolloutState:
        """What is to go on elsewhere, or here: the next `run` does. Between two runs. Collective over: the engine."""
        return RolloutState(self.consumed, self.groups.carried(), tuple(self.drawn.values()))

    def resume(self, carried: RolloutState) -> None:
        """Go on with this instead of from the beginning. Before the first run, on every rank of the engine."""
        self.consumed = carried.consumed
        self.groups.resume(carried.begun)
        for group in carried.drawn:
            self._keep(group)

    def _step(self) -> None:
        start = time.monotonic()
        for group in self.groups.step():
            self._keep(group)
        self.longest_step_s = max(self.longest_step_s, time.monotonic() - start)
        self.advance()

    def _keep(self, group: SampleGroup) -> None:
        self.drawn[group.position] = group
        if self.turns.is_leader:
            entry = Finished(group.position, group.num_tokens, group.num_response_tokens)
            self.completion_log.add(self.log_of(group.position), entry)

    def _decide(self, chunk_target: ChunkTarget) -> LeaderDecision:
        """What to do now; with nothing left to decode, what to do as soon as there is something."""
        if self.groups.engine.num_unfinished:
            return self._look(chunk_target)
        what = f"the last groups of {chunk_target.log}, chunk {chunk_target.chunk}"
        return poll(self.waiter, lambda: self._look(chunk_target) or None, what, self.ranks)

    def _look(self, chunk_target: ChunkTarget) -> LeaderDecision:
        if self.sync_is_due():
            return LeaderDecision(sync=True)
        if self.completion_log.is_full(chunk_target.log, chunk_target.chunk):
            return LeaderDecision(done=True)
        return LeaderDecision(claims=tuple(self.deal.claim(self.groups.num_wanted, chunk_target.max_position())))

    def _hand_over(self, chunk_target: ChunkTarget) -> tuple[list[Finished], list[SampleGroup]]:
        what = f"the completion_log of {chunk_target.log}, chunk {chunk_target.chunk}"
        chunk = poll(
            self.waiter, lambda: self.completion_log.read(chunk_target.log, chunk_target.chunk), what, self.ranks
        )
        self.consumed = self.consumed.after(entry.position for entry in chunk)
        return chunk, [self.drawn.pop(entry.position) for entry in chunk if entry.position in self.drawn]
