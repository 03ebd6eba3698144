"""Turns that somebody asks an engine for from outside, beside the groups that it draws."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from rltrain.rollout.engine import GreedyPlaces, SamplingParams
from rltrain.rollout.sample import Sample


@dataclass(frozen=True)
class Turn:
    """A pending sample whose next turn is to be drawn. Those that are under way at one time have distinct ids."""

    sample: Sample
    sampling: SamplingParams
    stop: tuple[str, ...] = ()
    """Strings of the request's own that end the turn, beside those of `sampling`. They are looked for in what the turn
    draws alone, and the tokens that spell one are part of the turn."""
    is_watched: bool = False
    """Whether its progress is to be told."""

    def record(self) -> dict[str, Any]:
        """For JSON."""
        return {**vars(self), "sample": self.sample.record(), "sampling": asdict(self.sampling)}

    @classmethod
    def of_record(cls, record: dict[str, Any]) -> "Turn":
        sampling: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in record["sampling"].items()
        }
        greedy = sampling.pop("greedy")
        places = None if greedy is None else GreedyPlaces(**greedy)
        return cls(
            Sample.of_record(record["sample"]),
            SamplingParams(**sampling, greedy=places),
            tuple(record["stop"]),
            record["is_watched"],
        )


@dataclass(frozen=True)
class Mail:
    """What was asked for since the last decode step. Equal on all ranks of the engine."""

    turns: tuple[Turn, ...] = ()
    given_up: frozenset[int] = frozenset()
    """Ids of samples whose turns came earlier, and that nobody waits for any more."""
    forgotten: frozenset[int] = frozenset()
    """Ids of samples that have no further turn."""

    def __bool__(self) -> bool:
        return bool(self.turns or self.given_up or self.forgotten)

    def record(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "turns": [turn.record() for turn in self.turns],
            "given_up": sorted(self.given_up),
            "forgotten": sorted(self.forgotten),
        }

    @classmethod
    def of_record(cls, record: dict[str, Any]) -> "Mail":
        return cls(
            tuple(Turn.of_record(turn) for turn in record["turns"]),
            frozenset(record["given_up"]),
            frozenset(record["forgotten"]),
        )


class Guests(Protocol):
    """Such turns on one engine. Its ranks make equal calls in one order, but for `mail`, which is the first one's."""

    def mail(self) -> Mail | None:
        """What has come since the last call, for the next decode step; None where that has nothing of theirs to do."""
        ...

    def begin_step(self, mail: Mail) -> None:
        """Before a decode step: give the engine what there is."""
        ...

    def end_step(self, finished: Iterable[Sample]) -> list[Sample]:
        """After it: take theirs of what has finished; the others."""
        ...

    def take_back(self, samples: Iterable[Sample]) -> list[Sample]:
        """The engine was suspended: take theirs of what it gave back; the others."""
        ...
