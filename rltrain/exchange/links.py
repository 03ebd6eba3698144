"""The two ends of a connection between two ranks: messages go one way, their receipts the other. Nothing here blocks.

A connection begins with the token of the one that was called and the rank of the one that calls. A message is its tag,
its length and a checksum of both, and its bytes; its receipt is its tag.
"""

import hmac
import socket
import struct
from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice
from zlib import crc32

import numpy as np

from rltrain.runtime.messages import family_of

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
