"""Connects a program without a network to one port of the machine's loopback.

A socket stays in the network namespace of its creation. So process 1 of the sandbox opens a listening socket and sends
it to the keeper outside. The keeper accepts the program's connections and relays their bytes to the same port of the
machine.
"""

import array
import fcntl
import select
import socket
import struct

LOOPBACK = "127.0.0.1"
MAX_CONNECTIONS = 256
BUFFER_BYTES = 65536
READ_FLAGS, WRITE_FLAGS = 0x8913, 0x8914
"""Requests to ioctl for the flags of a network interface."""
INTERFACE_UP = 1
ENDED = select.POLLHUP | select.POLLERR


def start_loopback() -> None:
    """Starts the loopback of this process's network namespace."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = struct.pack("16sh22x", b"lo", 0)
        flags = struct.unpack("16sh22x", fcntl.ioctl(any_socket, READ_FLAGS, request))[1]
        fcntl.ioctl(any_socket, WRITE_FLAGS, struct.pack("16sh22x", b"lo", flags | INTERFACE_UP))


def hand_over_listener(port: int, keeper: socket.socket) -> None:
    """Sends `keeper` a socket that listens at `port` in the sandbox. Called in the sandbox, before or after the
    loopback is up."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("", port))  # the loopback has its only addresses
        listener.listen(MAX_CONNECTIONS)
        descriptors = array.array("i", [listener.fileno()])
        keeper.sendmsg([b"l"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, descriptors)])


class _End:
    """One of the two sockets of a connection, and its unsent bytes."""

    def __init__(self, connected: socket.socket) -> None:
        self.socket = connected
        self.other: _End = self
        self.unsent = b""
        self.has_ended = False
        """True if nothing more can be received."""
        self.is_shut = False
        """True if nothing more will be sent."""
        self.is_watched = False

    @property
    def events(self) -> int:
        reads = not self.has_ended and len(self.other.unsent) < BUFFER_BYTES
        return (select.POLLIN if reads else 0) | (select.POLLOUT if self.unsent else 0)

    def move(self, events: int) -> bool:
        """Receives and sends as much as possible. Returns False if the connection is lost."""
        try:
            if events & (select.POLLIN | ENDED) and not self.has_ended:
                self._receive()
            if self.unsent:
                self.unsent = self.unsent[self.socket.send(self.unsent) :]
            for end in (self, self.other):
                end.shut_if_all_is_sent()
        except BlockingIOError:
            return True
        except OSError:
            return False
        return True

    def _receive(self) -> None:
        received = self.socket.recv(BUFFER_BYTES)
        self.other.unsent += received
        self.has_ended = not received

    def shut_if_all_is_sent(self) -> None:
        if self.other.has_ended and not self.unsent and not self.is_shut:
            self.is_shut = True
            self.socket.shutdown(socket.SHUT_WR)


class Relay:
    """Relays connections, outside the sandbox. The caller polls, and passes the results to `handle`."""

    def __init__(self, keeper: socket.socket, port: int) -> None:
        """Waits for the sandbox's listening socket. Raises OSError if the sandbox ends instead."""
        _, ancillary, _, _ = keeper.recvmsg(1, socket.CMSG_SPACE(struct.calcsize("i")))
        if not ancillary:
            raise ConnectionError("the sandbox ended before it opened its port")
        self._listener = socket.socket(fileno=array.array("i", ancillary[0][2])[0])
        self._listener.setblocking(False)
        self._port = port
        self._poll = select.poll()
        self._ends: dict[int, _End] = {}

    def watch(self, poll: select.poll) -> None:
        self._poll = poll
        poll.register(self._listener, select.POLLIN)

    def handle(self, descriptor: int, events: int) -> None:
        if descriptor == self._listener.fileno():
            self._accept()
        elif end := self._ends.get(descriptor):
            if end.move(events) and not (end.is_shut and end.other.is_shut):
                self._watch(end)
            else:
                self._close(end)

    def _accept(self) -> None:
        try:
            inner, _ = self._listener.accept()
        except OSError:  # the program gave up
            return
        if len(self._ends) >= 2 * MAX_CONNECTIONS:
            inner.close()  # the program's connection ends at once
            return
        outer = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        ends = [_End(inner), _End(outer)]
        for end, other in zip(ends, reversed(ends), strict=True):
            end.socket.setblocking(False)
            end.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            end.other = other
            self._ends[end.socket.fileno()] = end
        outer.connect_ex((LOOPBACK, self._port))  # an error appears at the first receive
        self._watch(ends[0])

    def _watch(self, end: _End) -> None:
        """Updates the polled events. A socket without events is unregistered, because poll always reports the end of
        its connection."""
        for either in (end, end.other):
            if either.events:
                self._poll.register(either.socket, either.events)
            elif either.is_watched:
                self._poll.unregister(either.socket)
            either.is_watched = bool(either.events)

    def _close(self, end: _End) -> None:
        for either in (end, end.other):
            if either.is_watched:
                self._poll.unregister(either.socket)
            del self._ends[either.socket.fileno()]
            either.socket.close()
