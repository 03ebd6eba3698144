"""Sending and receiving the messages of one round after another.

A round is first expected, then started once it is packed; what arrived is taken by unpacking it. All ranks start the
rounds in the same order.
"""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping

from rltrain.errors import SyncError
from rltrain.reshard.execute.device_streams import DeviceStream, Event
from rltrain.reshard.plan.steps import Message, StageSteps


class Wire(ABC):
    """The transfers of one stage on `rank`, by work in `stream`.

    `bytes_sent` counts by peer what was handed to the transport, `bytes_received` what there was room for. `spans` are,
    once the stage is over, from when messages were handed over to when those that this rank receives, or else those
    that it sends, were through.

    Where messages may be shorter than the steps say, one for each peer in a round, `shortened` gives one that is to
    leave as long as it is, and `lengths` makes of those that leave to each peer those that come from each. That is
    collective over all ranks of the reshard, so it is only called by wires that must know, and in every round.
    """

    shortened: Callable[[Message], Message] | None = None
    lengths: Callable[[Mapping[int, int]], Mapping[int, int]] | None = None

    def __init__(self, steps: StageSteps, rank: int, stream: DeviceStream) -> None:
        self.steps, self.rank, self.stream = steps, rank, stream
        self.bytes_sent: Counter[int] = Counter()
        self.bytes_received = 0
        self.spans: list[tuple[Event, Event]] = []

    @abstractmethod
    def expect(self, number: int, free: Event | None) -> None:
        """Be ready to receive round `number`, whose buffer is `free` from that event on (None: now)."""

    @abstractmethod
    def start(self, number: int, packed: Event) -> None:
        """Send round `number`, whose messages are `packed` from that event on, and receive what was expected."""

    @abstractmethod
    def left(self, number: int) -> Event:
        """When the messages that round `number` sends have left their buffer."""

    @abstractmethod
    def arrived(self, number: int) -> Event:
        """When the messages that round `number` receives are in their buffer."""

    @abstractmethod
    def taken(self, number: int, unpacked: Event) -> None:
        """Those that round `number` receives are `unpacked` from that event on."""

    @abstractmethod
    def finish(self) -> Event:
        """When all that remains has left and arrived; after the rounds."""

    def leaving(self, number: int) -> list[Message]:
        """The messages that round `number`, which is packed, sends."""
        messages = self.steps.sends[number]
        return messages if self.shortened is None else [self.shortened(message) for message in messages]

    def count_sent(self, messages: list[Message]) -> None:
        for message in messages:
            self.bytes_sent[message.peer] += message.num_bytes

    def count_received(self, messages: list[Message]) -> None:
        self.bytes_received += sum(message.num_bytes for message in messages)

    def round(self, number: int) -> str:
        """How messages for people name it."""
        return f"round {number + 1} of {self.steps.num_rounds}"

    def failed(self, what: str, error: RuntimeError | str) -> SyncError:
        """In place of an `error` of the transport, one that says what this rank was about."""
        return SyncError(
            f"rank {self.rank} could not {what} in stage {self.steps.kind.name} of a reshard: {error}. Look for "
            "what ended or holds up the other rank: its own message comes first in the log. How long a rank waits "
            "for another is config key timeouts.no_progress_s"
        )
