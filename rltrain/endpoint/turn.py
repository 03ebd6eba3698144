"""What a server of requests asks of whoever holds an engine: to draw turns of conversations."""

from collections.abc import Callable, Collection
from typing import Protocol

from rltrain.rollout.groups import Turn
from rltrain.rollout.sample import Sample

Progress = Callable[[Sample], None]
"""Is given the sample of a turn with what has been drawn of it so far."""


class EngineGone(Exception):  # noqa: N818 - names what happened
    """Nobody draws turns any more: the job ends, or the engine has failed. The message says why."""


class EngineBusy(Exception):  # noqa: N818
    """As many turns are under way as there may be."""


class Turns(Protocol):
    """Draws turns. All that a server of requests knows of engines."""

    async def draw(self, turn: Turn, progress: Progress | None = None) -> Sample:
        """The turn's sample when the turn has ended. Cancelling gives the turn up.

        Raises EngineGone and EngineBusy.
        """
        ...

    def forget(self, ids: Collection[int]) -> None:
        """The samples with these ids have no further turn: nothing need be kept for one."""
        ...
