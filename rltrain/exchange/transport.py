"""Messages between any two ranks, over TCP connections that are made with the first one: host memory, no process group.

A rank connects to those alone that it has something for, or waits for. So nothing is there of a pair of ranks that have
nothing to tell each other, of which a job of N ranks has almost N² / 2, and who sends need not wait until the receiver
is there. A thread of its own carries everything: what arrives before it is asked for stays in memory here.
"""

import hmac
import json
import secrets
import selectors
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from zlib import crc32

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from rltrain.runtime.machine import JobThread
from rltrain.runtime.messages import family_of

# The two ends of a connection between two ranks: messages go one way, their receipts the other. Nothing here blocks.
#
# A connection begins with the token of the one that was called and the rank of the one that calls. A message is its
# tag, its length and a checksum of both, and its bytes; its receipt is its tag.

HELLO = struct.Struct("<32sQ")
HEADER = struct.Struct("<QQI")
RECEIPT = struct.Struct("<Q")
READ_BYTES = 2**22
"""Of one connection before the others have their turn."""
MOST_BYTES = 2**38
"""Of a message."""

Bytes = np.ndarray
"""[bytes] uint8."""


class LinkLost(ConnectionError):  # noqa: N818 - names what happened
    """The other side has closed the connection, or does not keep to the form."""


class Caller:
    """The end that has called `peer`: it sends messages, and hears which have been received."""

    def __init__(self, peer: int, address: tuple[str, int], token: str, rank: int) -> None:
        self.peer = peer
        self.socket = socket.socket(family_of(address[0]))
        self.socket.setblocking(False)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket.connect_ex(address)
        self._unsent: deque[memoryview] = deque([memoryview(HELLO.pack(token.encode(), rank))])
        self._heard = bytearray()

    @property
    def has_unsent(self) -> bool:
        return bool(self._unsent)

    def put(self, tag: int, parts: Sequence[memoryview]) -> None:
        """A message to be sent by `write`."""
        counts = struct.pack("<QQ", tag, sum(len(part) for part in parts))
        self._unsent += [memoryview(counts + struct.pack("<I", crc32(counts))), *(part for part in parts if len(part))]

    def write(self) -> None:
        """As far as the peer takes it. Raises LinkLost, also where nobody has answered the call."""
        try:
            while self._unsent:
                count = self.socket.sendmsg(islice(self._unsent, 8))
                while count:
                    part = self._unsent.popleft()
                    if count < len(part):
                        self._unsent.appendleft(part[count:])
                    count = max(0, count - len(part))
        except BlockingIOError:
            return
        except OSError as error:
            raise LinkLost(str(error)) from error

    def read(self) -> list[int]:
        """The tags of messages that the peer has received. Raises LinkLost."""
        self._heard += _received(self.socket)
        whole = len(self._heard) // RECEIPT.size * RECEIPT.size
        tags = [tag for (tag,) in RECEIPT.iter_unpack(bytes(self._heard[:whole]))]
        del self._heard[:whole]
        return tags


class Called:
    """The end that was called, by `peer` once that has said who it is."""

    def __init__(self, connection: socket.socket, token: str) -> None:
        self.peer: int | None = None
        self.socket = connection
        self.socket.setblocking(False)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._token = token.encode()
        self._receipts = bytearray()
        self._tag = 0
        self._buffer: Bytes = np.empty(HELLO.size, np.uint8)
        self._filled = 0
        self._filling: Callable[[], None] = self._know_peer
        self._complete: list[tuple[int, Bytes]] = []

    @property
    def has_unsent(self) -> bool:
        return bool(self._receipts)

    def read(self) -> list[tuple[int, Bytes]]:
        """(tag, bytes) of messages that are there as a whole. Raises LinkLost, once these have been given."""
        try:
            self._fill()
        except LinkLost:
            if not self._complete:
                raise
        complete, self._complete = self._complete, []
        return complete

    def _fill(self) -> None:
        left = READ_BYTES
        while left > 0:
            try:
                count = self.socket.recv_into(self._buffer.data[self._filled :])
            except BlockingIOError:
                return
            except OSError as error:
                raise LinkLost(str(error)) from error
            if not count:
                raise LinkLost("it was closed")
            self._filled, left = self._filled + count, left - count
            while self._filled == len(self._buffer):
                self._filling()

    def confirm(self, tag: int) -> None:
        """A receipt to be sent by `write`."""
        self._receipts += RECEIPT.pack(tag)

    def write(self) -> None:
        """As far as the peer takes it. Raises LinkLost."""
        try:
            while self._receipts:
                del self._receipts[: self.socket.send(self._receipts)]
        except BlockingIOError:
            return
        except OSError as error:
            raise LinkLost(str(error)) from error

    def _await(self, num_bytes: int, then: Callable[[], None]) -> None:
        self._buffer, self._filled, self._filling = np.empty(num_bytes, np.uint8), 0, then

    def _know_peer(self) -> None:
        token, rank = HELLO.unpack(self._buffer.data)
        if not hmac.compare_digest(token, self._token):
            raise LinkLost("who called does not know the token")
        self.peer = rank
        self._await(HEADER.size, self._take_header)

    def _take_header(self) -> None:
        self._tag, num_bytes, checksum = HEADER.unpack(self._buffer.data)
        if crc32(self._buffer[:-4].tobytes()) != checksum:
            raise LinkLost("the header of a message does not fit its checksum")
        if num_bytes > MOST_BYTES:
            raise LinkLost(f"a message of {num_bytes} bytes")
        self._await(num_bytes, self._take_message)

    def _take_message(self) -> None:
        self._complete.append((self._tag, self._buffer))
        self._await(HEADER.size, self._take_header)


def _received(connection: socket.socket) -> bytes:
    """What is there. Raises LinkLost."""
    try:
        found = connection.recv(2**16)
    except BlockingIOError:
        return b""
    except OSError as error:
        raise LinkLost(str(error)) from error
    if not found:
        raise LinkLost("it was closed")
    return found


LOOK_UP_S, LONGEST_LOOK_UP_S = 0.01, 1.0
"""Between two looks for the addresses of ranks that have not come yet: twice as long after each."""
READ, WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE


@dataclass(eq=False)
class InTransit:
    """A message on its way to or from `peer`; `message` [bytes] uint8 is one that has come."""

    peer: int
    tag: int
    is_done: bool = False
    message: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.uint8))


class Transport:
    """This rank's end. Calls come from one thread at a time.

    `address` is where this rank listens, on a port that the system chooses, for those that know its token; both are in
    `store`, where others look for them, from this one's thread by `background`, another connection to the same store.
    """

    def __init__(self, rank: int, address: str, store: dist.Store, background: dist.Store) -> None:
        self.rank = rank
        self._store = dist.PrefixStore("transport", background)
        self._token = secrets.token_hex(16)
        self._listener = socket.create_server((address, 0), family=family_of(address), backlog=4096)
        self._listener.setblocking(False)
        self._wakes, self._wake = socket.socketpair()
        self._wakes.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, READ)
        self._selector.register(self._wakes, READ)
        self._changed = threading.Condition()
        self._arrived: dict[tuple[int, int], Bytes] = {}
        self._expected: dict[tuple[int, int], InTransit] = {}
        self._lost: dict[int, str] = {}
        self._wanted: deque[tuple[InTransit, Sequence[memoryview] | None]] = deque()
        """What this rank's own thread asks for: a message to be sent, or (None) a connection to who is waited for."""
        self._callers: dict[int, Caller] = {}
        self._unknown: dict[int, list[tuple[InTransit, Sequence[memoryview] | None]]] = {}
        """What waits for the addresses of its peers."""
        self._unreceived: dict[tuple[int, int], InTransit] = {}
        self._look_up_at, self._look_up_s = 0.0, LOOK_UP_S
        self._is_closed = False
        place = json.dumps([address, self._listener.getsockname()[1], self._token])
        dist.PrefixStore("transport", store).set(str(rank), place)
        self._thread = JobThread(target=self._run, name="exchange", daemon=True)
        self._thread.start()

    def send(self, peer: int, tag: int, parts: Sequence[Tensor]) -> InTransit:
        """A message of these tensors' bytes, which stay as they are until it is done: received by the other side.

        `tag` is its own among all that ever go from this rank to `peer`. Does not wait.
        """
        delivery = InTransit(peer, tag)
        views = [part.numpy().data.cast("B") for part in parts if part.numel()]
        self._ask(delivery, views)
        return delivery

    def receive(self, peer: int, tag: int) -> InTransit:
        """The message of that tag, which is done once it has come. Does not wait."""
        delivery = InTransit(peer, tag)
        with self._changed:
            if (found := self._arrived.pop((peer, tag), None)) is not None:
                _complete(delivery, found)
                return delivery
            self._expected[peer, tag] = delivery
        self._ask(delivery, None)
        return delivery

    def wait(self, deliveries: Iterable[InTransit], seconds: float) -> bool:
        """Whether all are done, within so many seconds. Raises ConnectionError where the other side of one has gone."""
        pending = list(deliveries)

        def are_done() -> bool:
            pending[:] = [one for one in pending if not one.is_done]
            for one in pending:
                if one.peer in self._lost:
                    raise ConnectionError(f"rank {one.peer}: {self._lost[one.peer]}")
            return not pending

        with self._changed:
            return self._changed.wait_for(are_done, seconds)

    def close(self) -> None:
        """End all connections. What was sent must have been received, and what is awaited have come."""
        self._is_closed = True
        self._wake.send(b"\0")
        self._thread.join()
        for end in (self._wake, self._wakes):  # not before: the thread may have ended before it was woken
            end.close()

    def _ask(self, delivery: InTransit, message: Sequence[memoryview] | None) -> None:
        self._wanted.append((delivery, message))
        self._wake.send(b"\0")

    def _run(self) -> None:
        while not self._is_closed:
            for key, events in self._selector.select(self._look_up_s if self._unknown else None):
                if key.fileobj is self._listener:
                    self._accept()
                elif key.fileobj is self._wakes:
                    self._wakes.recv(2**16)
                else:
                    self._serve(key.data, events)
            while self._wanted:
                self._begin(*self._wanted.popleft())
            self._look_up()
        self._close()

    def _begin(self, delivery: InTransit, message: Sequence[memoryview] | None) -> None:
        caller, peer = self._callers.get(delivery.peer), delivery.peer
        if peer in self._lost:
            return
        if caller is None:
            self._unknown.setdefault(peer, []).append((delivery, message))
            self._look_up_s, self._look_up_at = LOOK_UP_S, 0.0
        elif message is not None:
            self._unreceived[peer, delivery.tag] = delivery
            caller.put(delivery.tag, message)
            self._serve(caller, WRITE)

    def _look_up(self) -> None:
        """Call those whose address is known by now."""
        if not self._unknown or time.monotonic() < self._look_up_at:
            return
        for peer in [peer for peer in self._unknown if self._store.check([str(peer)])]:
            host, port, token = json.loads(self._store.get(str(peer)))
            caller = self._callers[peer] = Caller(peer, (host, port), token, self.rank)
            self._selector.register(caller.socket, READ | WRITE, caller)
            for delivery, message in self._unknown.pop(peer):
                self._begin(delivery, message)
        self._look_up_s = min(2 * self._look_up_s, LONGEST_LOOK_UP_S)
        self._look_up_at = time.monotonic() + self._look_up_s

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:  # who called has gone again
            return
        called = Called(connection, self._token)
        self._selector.register(connection, READ, called)

    def _serve(self, link: Caller | Called, events: int) -> None:
        if link.socket.fileno() < 0:  # it was lost in this round
            return
        try:
            if isinstance(link, Called) and events & READ:
                self._take(link)
            if isinstance(link, Caller) and events & READ:
                self._note_receipts(link)
            link.write()
            self._selector.modify(link.socket, READ | (WRITE if link.has_unsent else 0), link)
        except LinkLost as error:
            self._lose(link, str(error))

    def _take(self, link: Called) -> None:
        for tag, message in link.read():
            assert link.peer is not None, "who has not said who it is has sent nothing"
            link.confirm(tag)
            with self._changed:
                delivery = self._expected.pop((link.peer, tag), None)
                if delivery is None:
                    self._arrived[link.peer, tag] = message
                else:
                    _complete(delivery, message)
                    self._changed.notify_all()

    def _note_receipts(self, link: Caller) -> None:
        tags = link.read()
        with self._changed:
            for tag in tags:
                if (delivery := self._unreceived.pop((link.peer, tag), None)) is not None:
                    delivery.is_done = True
            self._changed.notify_all()

    def _lose(self, link: Caller | Called, reason: str) -> None:
        """The other side has ended, or what calls is no rank of this job, of which nobody need know."""
        self._selector.unregister(link.socket)
        link.socket.close()
        if link.peer is not None:
            with self._changed:
                self._lost.setdefault(link.peer, reason)
                self._changed.notify_all()

    def _close(self) -> None:
        for key in list(self._selector.get_map().values()):
            if isinstance(key.fileobj, socket.socket) and key.fileobj is not self._wakes:
                key.fileobj.close()
        self._selector.close()


def _complete(delivery: InTransit, message: Bytes) -> None:
    delivery.message, delivery.is_done = torch.from_numpy(message), True
