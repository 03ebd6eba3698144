"""Point-to-point messages between ranks over TCP, from and to host memory, without process groups.

A rank connects to a peer with the first message to it, or the first wait for it. Pairs of ranks without messages need
no connection; a job of N ranks has almost N² / 2 such pairs. A sender need not wait until the receiver is ready. One
thread carries all messages. Messages that arrive early stay in memory until they are requested.
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

# The two ends of a connection. Messages go one way, receipts the other. Nothing here blocks.
#
# The caller first sends the token of the called rank and its own rank. A message is its tag, its length, a checksum of
# both, and its bytes. A receipt is the tag.

HELLO = struct.Struct("<32sQ")
HEADER = struct.Struct("<QQI")
RECEIPT = struct.Struct("<Q")
READ_BYTES = 2**22
"""Bytes read from one connection before the others get their turn."""
MOST_BYTES = 2**38
"""Largest message in bytes."""

Bytes = np.ndarray
"""uint8, shape [bytes]."""


class LinkLost(ConnectionError):  # noqa: N818 - names what happened
    """Raised if the peer closed the connection or sent malformed data."""


class Caller:
    """The calling end of a connection to `peer`. It sends messages and reads receipts."""

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
        """Queues a message to be sent by `write`."""
        counts = struct.pack("<QQ", tag, sum(len(part) for part in parts))
        self._unsent += [memoryview(counts + struct.pack("<I", crc32(counts))), *(part for part in parts if len(part))]

    def write(self) -> None:
        """Sends as much as the peer accepts. Raises LinkLost if the connection is lost or was never accepted."""
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
        """Returns the tags of the messages received by the peer. Raises LinkLost."""
        self._heard += _received(self.socket)
        whole = len(self._heard) // RECEIPT.size * RECEIPT.size
        tags = [tag for (tag,) in RECEIPT.iter_unpack(bytes(self._heard[:whole]))]
        del self._heard[:whole]
        return tags


class Called:
    """The called end of a connection. `peer` is None until the caller has sent its rank."""

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
        """Returns (tag, bytes) of the complete messages. Raises LinkLost, but only after it has returned these."""
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
                raise LinkLost("the connection was closed")
            self._filled, left = self._filled + count, left - count
            while self._filled == len(self._buffer):
                self._filling()

    def confirm(self, tag: int) -> None:
        """Queues a receipt to be sent by `write`."""
        self._receipts += RECEIPT.pack(tag)

    def write(self) -> None:
        """Sends as much as the peer accepts. Raises LinkLost."""
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
            raise LinkLost("the caller sent a wrong token")
        self.peer = rank
        self._await(HEADER.size, self._take_header)

    def _take_header(self) -> None:
        self._tag, num_bytes, checksum = HEADER.unpack(self._buffer.data)
        if crc32(self._buffer[:-4].tobytes()) != checksum:
            raise LinkLost("the header of a message does not match its checksum")
        if num_bytes > MOST_BYTES:
            raise LinkLost(f"a message has {num_bytes} bytes; expected at most {MOST_BYTES}")
        self._await(num_bytes, self._take_message)

    def _take_message(self) -> None:
        self._complete.append((self._tag, self._buffer))
        self._await(HEADER.size, self._take_header)


def _received(connection: socket.socket) -> bytes:
    """Returns the available bytes. Raises LinkLost."""
    try:
        found = connection.recv(2**16)
    except BlockingIOError:
        return b""
    except OSError as error:
        raise LinkLost(str(error)) from error
    if not found:
        raise LinkLost("the connection was closed")
    return found


LOOK_UP_S, LONGEST_LOOK_UP_S = 0.01, 1.0
"""Seconds between two lookups of addresses of ranks not ready yet. The pause doubles each time, up to the longest."""
READ, WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE


@dataclass(eq=False)
class InTransit:
    """A message on its way to or from `peer`. `message` [bytes] uint8 is set when a message has arrived."""

    peer: int
    tag: int
    is_done: bool = False
    message: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.uint8))


class Transport:
    """This rank's end of all connections. Calls must come from one thread at a time.

    The rank listens at `address`, on a port chosen by the system. Callers must know its token. Address, port and token
    are published in `store`. The background thread looks up peers through `background`, a second connection to the same
    store.
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
        """Requests to the background thread: a message to send, or None to only connect to an awaited peer."""
        self._callers: dict[int, Caller] = {}
        self._unknown: dict[int, list[tuple[InTransit, Sequence[memoryview] | None]]] = {}
        """Requests waiting for the addresses of their peers."""
        self._unreceived: dict[tuple[int, int], InTransit] = {}
        self._answers: dict[tuple[int, int], tuple[InTransit, Answer]] = {}
        self._look_up_at, self._look_up_s = 0.0, LOOK_UP_S
        self._is_closed = False
        place = json.dumps([address, self._listener.getsockname()[1], self._token])
        dist.PrefixStore("transport", store).set(str(rank), place)
        self._thread = JobThread(target=self._run, name="exchange", daemon=True)
        self._thread.start()

    def send(self, peer: int, tag: int, parts: Sequence[Tensor]) -> InTransit:
        """Sends the bytes of these tensors without waiting. Do not change the tensors until the other side has received
        them.

        `tag` must be unique among all messages ever sent from this rank to `peer`.
        """
        delivery = InTransit(peer, tag)
        self._ask(delivery, _views(parts))
        return delivery

    def receive(self, peer: int, tag: int) -> InTransit:
        """Requests the message with this tag without waiting. The result is done once the message has arrived."""
        delivery = InTransit(peer, tag)
        with self._changed:
            if (found := self._arrived.pop((peer, tag), None)) is not None:
                _complete(delivery, found)
                return delivery
            self._expected[peer, tag] = delivery
        self._ask(delivery, None)
        return delivery

    def answer(self, peer: int, tag: int, answer: "Answer", reply_tag: int) -> InTransit:
        """Answers the message with `tag`, without waiting. The result is done once the peer has received the answer.

        The background thread calls `answer` with the message when it arrives, and sends the result with `reply_tag`.
        """
        delivery = InTransit(peer, reply_tag)
        with self._changed:
            found = self._arrived.pop((peer, tag), None)
            if found is None:
                self._answers[peer, tag] = delivery, answer
        if found is not None:
            self._ask(delivery, _views(answer(torch.from_numpy(found))))
        return delivery

    def wait(self, deliveries: Iterable[InTransit], seconds: float) -> bool:
        """Waits up to `seconds` and returns whether all are done. Raises ConnectionError if a peer has disconnected."""
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
        """Closes all connections. Everything sent must have been received, and everything awaited must have arrived."""
        self._is_closed = True
        self._wake.send(b"\0")
        self._thread.join()
        for end in (self._wake, self._wakes):  # closed here, since the thread may end before the wake-up is sent
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
        """Connects to the peers with a known address."""
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
        except OSError:  # the caller has disconnected again
            return
        called = Called(connection, self._token)
        self._selector.register(connection, READ, called)

    def _serve(self, link: Caller | Called, events: int) -> None:
        if link.socket.fileno() < 0:  # lost earlier in this round
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
            assert link.peer is not None, "only an identified peer can have sent messages"
            link.confirm(tag)
            with self._changed:
                awaited = self._answers.pop((link.peer, tag), None)
                delivery = self._expected.pop((link.peer, tag), None)
                if delivery is not None:
                    _complete(delivery, message)
                    self._changed.notify_all()
                elif awaited is None:
                    self._arrived[link.peer, tag] = message
            if awaited is not None:
                reply, answer = awaited
                self._begin(reply, _views(answer(torch.from_numpy(message))))

    def _note_receipts(self, link: Caller) -> None:
        tags = link.read()
        with self._changed:
            for tag in tags:
                if (delivery := self._unreceived.pop((link.peer, tag), None)) is not None:
                    delivery.is_done = True
            self._changed.notify_all()

    def _lose(self, link: Caller | Called, reason: str) -> None:
        """Drops a lost connection. Callers that never identified themselves are not reported, because they are no
        ranks of this job."""
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


Answer = Callable[[Tensor], Sequence[Tensor]]
"""Returns the parts of the answer to a message [bytes] uint8."""


def _views(parts: Sequence[Tensor]) -> list[memoryview]:
    return [part.numpy().data.cast("B") for part in parts if part.numel()]


def _complete(delivery: InTransit, message: Bytes) -> None:
    delivery.message, delivery.is_done = torch.from_numpy(message), True
