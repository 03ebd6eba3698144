"""The loop of a generate task: decode steps of one engine until the groups of a chunk are done on some engine."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from rltrain.cluster.polling import poll
from rltrain.cluster.tickets import Finished, Tickets
from rltrain.cluster.waiting import Patience
from rltrain.rollout.carried import Carried, HandedOver
from rltrain.rollout.dealing import Deal
from rltrain.rollout.groups import DrawnGroup, PromptGroups
from rltrain.rollout.turns import Turn, Turns


@dataclass(frozen=True)
class Quota:
    """What a generate task waits for: `chunk` of `log` to be full, with groups at positions below `horizon()`."""

    log: str
    chunk: int
    horizon: Callable[[], int]


@dataclass
class Drawing:
    """One engine's part in drawing a stream of prompt groups, over many generate tasks.

    Before every decode step the engine looks at all that it knows itself; the clock only limits how often it asks what
    others have done. So one that is alone ends its tasks and begins its groups at the same decode steps in every run.

    `log_of(position)` names the log that a finished group is entered in. `sync_is_due()` and `sync()` take new weights
    between decode steps. `advance()` is called after each.
    """

    groups: PromptGroups
    deal: Deal
    tickets: Tickets
    turns: Turns
    patience: Patience
    ranks: Sequence[int]
    """Of all engines."""
    log_of: Callable[[int], str]
    sync_is_due: Callable[[], bool]
    sync: Callable[[], None]
    advance: Callable[[], None]
    drawn: dict[int, DrawnGroup] = field(default_factory=dict)
    """Finished here and not yet handed over, by position."""
    handed_over: HandedOver = HandedOver()
    """By all engines."""
    longest_step_s: float = 0.0
    """Of the decode steps since whoever reads it has set it to 0."""

    def run(self, quota: Quota) -> tuple[list[Finished], list[DrawnGroup]]:
        """(all groups of the chunk by position, those of them that this engine drew). Collective over: the engine."""
        self.groups.start(())
        while True:
            turn = self.turns.share(self._decide(quota) if self.turns.is_leader else Turn())
            if turn.sync:
                self.sync()
            if turn.done:
                break
            if turn.claims:
                self.groups.start(turn.claims)
            self._step()
        return self._hand_over(quota)

    def carried(self) -> Carried:
        """What is to go on elsewhere, or here: the next `run` does. Between two runs. Collective over: the engine."""
        return Carried(self.handed_over, self.groups.carried(), tuple(self.drawn.values()))

    def resume(self, carried: Carried) -> None:
        """Go on with this instead of from the beginning. Before the first run, on every rank of the engine."""
        self.handed_over = carried.handed_over
        self.groups.resume(carried.begun)
        for group in carried.drawn:
            self._keep(group)

    def _step(self) -> None:
        start = time.monotonic()
        for group in self.groups.step():
            self._keep(group)
        self.longest_step_s = max(self.longest_step_s, time.monotonic() - start)
        self.advance()

    def _keep(self, group: DrawnGroup) -> None:
        self.drawn[group.position] = group
        if self.turns.is_leader:
            entry = Finished(group.position, group.num_tokens, group.num_response_tokens)
            self.tickets.add(self.log_of(group.position), entry)

    def _decide(self, quota: Quota) -> Turn:
        """What to do now; with nothing left to decode, what to do as soon as there is something."""
        if self.groups.engine.num_unfinished:
            return self._look(quota)
        what = f"the last groups of {quota.log}, chunk {quota.chunk}"
        return poll(self.patience, lambda: self._look(quota) or None, what, self.ranks)

    def _look(self, quota: Quota) -> Turn:
        if self.sync_is_due():
            return Turn(sync=True)
        if self.tickets.is_full(quota.log, quota.chunk):
            return Turn(done=True)
        return Turn(claims=tuple(self.deal.claim(self.groups.num_wanted, quota.horizon())))

    def _hand_over(self, quota: Quota) -> tuple[list[Finished], list[DrawnGroup]]:
        what = f"the tickets of {quota.log}, chunk {quota.chunk}"
        chunk = poll(self.patience, lambda: self.tickets.read(quota.log, quota.chunk), what, self.ranks)
        self.handed_over = self.handed_over.after(entry.position for entry in chunk)
        return chunk, [self.drawn.pop(entry.position) for entry in chunk if entry.position in self.drawn]
