"""Messages between two ranks outside of collectives: JSON lines over TCP, from ranks that know the server's token.

A reader takes at most MAX_MESSAGE_BYTES from a peer at a time. A writer keeps bytes until the peer takes them. So
neither side waits for the other to read.
"""

import hmac
import json
import logging
import selectors
import socket
from collections.abc import Iterator
from typing import Any

from rltrain.errors import StallError

# Sockets for IPv4 and IPv6 addresses.


def family_of(host: str) -> socket.AddressFamily:
    """Returns the family of an address given as text."""
    return socket.AF_INET6 if ":" in host else socket.AF_INET


logger = logging.getLogger(__name__)

Message = dict[str, Any]

MAX_MESSAGE_BYTES = 64 * 2**20
READ_BYTES = 1 << 16
CONNECT_S = 60.0


class PeerLost(ConnectionError):  # noqa: N818 - names what happened; never shown to users
    """The other side has closed the connection, or has sent an invalid message."""


class Connection:
    """One end of a connection. No method blocks."""

    def __init__(self, peer: socket.socket) -> None:
        peer.setblocking(False)
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket = peer
        self._received = bytearray()
        self._unsent = bytearray()

    @property
    def has_unsent(self) -> bool:
        return bool(self._unsent)

    def send(self, message: Message) -> None:
        """Sends as much as the peer takes. The rest follows with the next `send` or `flush`. Raises PeerLost."""
        self._unsent += json.dumps(message, separators=(",", ":")).encode() + b"\n"
        self.flush()

    def flush(self) -> None:
        """Sends as much of the remaining bytes as the peer takes. Raises PeerLost."""
        while self._unsent:
            try:
                count = self.socket.send(self._unsent)
            except BlockingIOError:
                return
            except OSError as error:
                raise PeerLost(str(error)) from error
            del self._unsent[:count]

    def receive(self) -> list[Message]:
        """Returns the messages received since the last call. Raises PeerLost."""
        self.flush()
        while True:
            try:
                chunk = self.socket.recv(READ_BYTES)
            except BlockingIOError:
                break
            except OSError as error:
                raise PeerLost(str(error)) from error
            if not chunk:
                raise PeerLost("it was closed")
            self._received += chunk
            if len(self._received) > MAX_MESSAGE_BYTES and b"\n" not in chunk:
                raise PeerLost(f"a message of more than {MAX_MESSAGE_BYTES} bytes")
        return [*self._complete()]

    def _complete(self) -> Iterator[Message]:
        *lines, rest = self._received.split(b"\n")
        self._received = bytearray(rest)
        for line in lines:
            try:
                message = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise PeerLost(f"no JSON: {error}") from error
            if not isinstance(message, dict):
                raise PeerLost("a message that is no object")
            yield message

    def close(self) -> None:
        self.socket.close()


def connect(host: str, port: int, token: str) -> Connection:
    """Connects to a MessageServer and identifies with `token`. Raises StallError if the server does not answer."""
    try:
        peer = socket.create_connection((host, port), timeout=CONNECT_S)
    except OSError as error:
        raise StallError(f"no answer from {host}:{port} within {CONNECT_S:g} s: {error}") from error
    connection = Connection(peer)
    connection.send({"token": token})
    return connection


class MessageServer:
    """Accepts connections at `address`, on a port chosen by the system.

    It drops a peer without `token` in its first message, and a peer with invalid messages.
    """

    def __init__(self, address: str, token: str) -> None:
        self._token = token.encode()
        self._listener = socket.create_server((address, 0), family=family_of(address))
        self._listener.setblocking(False)
        self._peers: dict[int, Connection] = {}
        self._known: set[int] = set()
        self._next = 0
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ, None)

    @property
    def port(self) -> int:
        return int(self._listener.getsockname()[1])

    def receive(self, seconds: float) -> list[tuple[int, Message]]:
        """Returns (peer, message) of all received messages. Waits for the first one for at most `seconds`."""
        received: list[tuple[int, Message]] = []
        for key, _ in self._selector.select(seconds):
            if key.data is None:
                self._accept()
            else:
                received += [(key.data, message) for message in self._messages_of(key.data)]
        return received

    def send(self, peer: int, message: Message) -> None:
        """Sends to a connected peer. A message to a lost peer is dropped."""
        connection = self._peers.get(peer)
        if connection is None:
            return
        try:
            connection.send(message)
        except PeerLost as error:
            self._drop(peer, str(error))
            return
        self._watch(peer)

    def close(self) -> None:
        for peer in [*self._peers]:
            self._forget(peer)
        self._selector.close()
        self._listener.close()

    def _accept(self) -> None:
        try:
            peer, _ = self._listener.accept()
        except OSError:  # the peer has already left
            return
        self._peers[self._next] = Connection(peer)
        self._selector.register(peer, selectors.EVENT_READ, self._next)
        self._next += 1

    def _messages_of(self, peer: int) -> list[Message]:
        try:
            messages = self._peers[peer].receive()
        except PeerLost as error:
            self._drop(peer, str(error))
            return []
        self._watch(peer)
        if messages and peer not in self._known:
            given = str(messages.pop(0).get("token", "")).encode(errors="replace")
            if not hmac.compare_digest(given, self._token):
                self._forget(peer)
                return []
            self._known.add(peer)
        return messages

    def _watch(self, peer: int) -> None:
        """Waits for room to write only if bytes are left to send."""
        connection = self._peers[peer]
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.has_unsent else 0)
        self._selector.modify(connection.socket, events, peer)

    def _drop(self, peer: int, reason: str) -> None:
        if peer in self._known:
            logger.debug("a connection was lost: %s", reason)  # normal at a job's end
        self._forget(peer)

    def _forget(self, peer: int) -> None:
        connection = self._peers.pop(peer)
        self._known.discard(peer)
        self._selector.unregister(connection.socket)
        connection.close()
