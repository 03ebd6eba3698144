"""Which of the syncs of a destination send everything, and which what changed."""

from dataclasses import dataclass, field
from enum import Enum

DENSE_SHARE = 0.9
"""Of the bytes that were compared: where as much is sent, comparing them has saved nothing."""

FIRST_REST, LONGEST_REST = 4, 64
"""Syncs that send everything and remember nothing, once remembering was in vain: each time twice as many."""


class DeltaTurn(Enum):
    """PLAIN sends everything and remembers nothing of it, WHOLE sends and remembers everything."""

    PLAIN = "plain"
    WHOLE = "whole"
    CHANGES = "changes"


@dataclass
class DeltaTurns:
    """The same on all ranks that join the syncs.

    `full_every`: syncs from one that sends everything to the next. Every `check_every`-th sync of changes is compared
    with its source (0: none), the first of all is, and behind one that differed all are.
    """

    full_every: int
    check_every: int = 0
    compares: bool = field(default=False, init=False)
    """Whether both sides are to be compared behind the present sync."""
    _remembers: bool = field(default=False, init=False)
    _since_full: int = field(default=0, init=False)
    _num_changes: int = field(default=0, init=False)
    _rest: int = field(default=0, init=False)
    """Syncs that are still to send everything, uncompared."""
    _last_rest: int = field(default=0, init=False)
    _trusted: bool = field(default=True, init=False)

    def next(self, *, lost: bool) -> DeltaTurn:
        """A sync begins; `lost`: some rank's destination is not what the last one left. `finished` follows, unless it
        failed."""
        if lost and self._remembers and not self._since_full:
            self._give_up()
        turn = self._turn(lost)
        self._remembers, self.compares = False, False
        if turn is DeltaTurn.CHANGES:
            due = self.check_every and (self._num_changes + 1) % self.check_every == 0
            self.compares = bool(due) or self._num_changes == 0 or not self._trusted
            self._num_changes += 1
        return turn

    def finished(self, turn: DeltaTurn, sent_share: float = 0.0) -> None:
        """`sent_share`: of the bytes that a sync of changes compared, what it sent; 1 where it compared none."""
        self._remembers = turn is not DeltaTurn.PLAIN
        self._since_full = self._since_full + 1 if turn is DeltaTurn.CHANGES else 0
        self._rest -= turn is DeltaTurn.PLAIN
        if turn is not DeltaTurn.CHANGES:
            return
        if sent_share >= DENSE_SHARE:
            self._give_up()
        else:
            self._last_rest = 0

    def differed(self) -> None:
        """What a sync of changes left differs from its source."""
        self._trusted = False

    def _give_up(self) -> None:
        """Remembering was in vain: for some syncs, each time twice as many, everything is sent as without it."""
        self._rest = self._last_rest = min(max(2 * self._last_rest, FIRST_REST), LONGEST_REST)

    def _turn(self, lost: bool) -> DeltaTurn:
        if self._rest > 0:
            return DeltaTurn.PLAIN
        due = self._since_full + 1 >= self.full_every
        return DeltaTurn.WHOLE if lost or due or not self._remembers else DeltaTurn.CHANGES
