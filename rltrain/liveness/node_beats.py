"""Beats of a node's ranks, gathered by its first one: a call of the store for all of them, and a look for the end.

In a job of thousands the store's server would otherwise spend a seventh of its processor on what every rank says and
asks once a second. Ranks of a node speak over loopback, which no rank waits at: whoever the first one has not confirmed
lately says and asks for itself, as where that one has ended, is stopped or cannot be reached.
"""

import hmac
import json
import secrets
import socket
import threading
import time
from collections.abc import Callable

import torch.distributed as dist

from rltrain.cluster.world import LOOPBACK, World
from rltrain.liveness.ending import NEAR
from rltrain.liveness.heartbeat import INTERVAL_S, Beat, Board

GATHERED_FROM = 512
"""Ranks of a job in which beats are gathered: the store of a smaller one has little to do."""
CONFIRMED_FOR_S = 2.5 * INTERVAL_S
"""So long a rank relies on the last word of its node's first one, and that one on its own last look."""
LOOK_S = 0.2
MOST_BYTES = 60_000
"""Of a datagram."""
TOKEN_BYTES = 16
CONFIRMED, ENDS = b"confirmed", b"ends"


class OwnBeats:
    """A rank that speaks for itself, and asks for itself. `store` is for calls from threads: World.background."""

    def __init__(self, store: dist.Store) -> None:
        self.store, self.board = store, Board(store)

    def put(self, beat: Beat) -> None:
        """Publish it. By the heartbeat's thread."""
        self.board.put(beat)

    def job_ends(self) -> bool:
        """Whether a rank ends the job, or is about to. By the watchdog's thread."""
        return bool(self.store.check([NEAR]))

    def wait(self, over: threading.Event, seconds: float) -> bool:
        """Until the next look: whether it is `over`."""
        return over.wait(seconds)


class Gatherer(OwnBeats):
    """The first rank of a node: it puts the others' beats with its own, and passes on that the job ends."""

    def __init__(self, node: int, store: dist.Store, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(store)
        self._clock = clock
        self._token = secrets.token_bytes(TOKEN_BYTES)
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind((LOOPBACK, 0))
        self._socket.setblocking(False)
        self._looked_at = float("-inf")
        self._addresses: dict[int, tuple[str, int]] = {}
        """Of the node's other ranks, as far as they have spoken."""
        store.set(_key(node), json.dumps([self._socket.getsockname()[1], self._token.hex()]))

    def put(self, beat: Beat) -> None:
        gathered = self._gathered()
        self.board.put_lines({beat.rank: Board.line(beat)} | gathered)
        if beat.finished:  # one that finishes too may have put its last beat before an older one that came by here
            self.job_ends()
            if last := self._gathered():
                self.board.put_lines(last)
        if self._clock() - self._looked_at < CONFIRMED_FOR_S:
            self._say(CONFIRMED, [*gathered])

    def job_ends(self) -> bool:
        ends = super().job_ends()
        self._looked_at = self._clock()
        if ends:
            self._say(ENDS, [*self._addresses])
        return ends

    def _gathered(self) -> dict[int, str]:
        """Rank -> the line of its last beat, of those that have come since the last call."""
        found: dict[int, str] = {}
        while True:
            try:
                message, address = self._socket.recvfrom(MOST_BYTES)
            except BlockingIOError:
                return found
            if hmac.compare_digest(message[:TOKEN_BYTES], self._token):
                rank, _, line = message[TOKEN_BYTES:].decode().partition(" ")
                found[int(rank)] = line
                self._addresses[int(rank)] = address

    def _say(self, word: bytes, ranks: list[int]) -> None:
        for rank in ranks:
            try:
                self._socket.sendto(self._token + word, self._addresses[rank])
            except OSError:  # it hears nothing, and speaks for itself
                continue


class Gathered(OwnBeats):
    """Any other rank of a node."""

    def __init__(self, node: int, store: dist.Store, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(store)
        self._node, self._clock = node, clock
        self._token: bytes | None = None
        """None: nothing is known of the first rank yet."""
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        self._confirmed_at = float("-inf")
        self._ends = False
        self._hearing = threading.Lock()

    def put(self, beat: Beat) -> None:
        line = Board.line(beat)
        self._pass_on(f"{beat.rank} {line}".encode())
        if beat.finished or not self._is_confirmed():
            self.board.put(beat)

    def job_ends(self) -> bool:
        confirmed = self._is_confirmed()
        return self._ends or (not confirmed and super().job_ends())

    def wait(self, over: threading.Event, seconds: float) -> bool:
        until, knew = time.monotonic() + seconds, self._ends
        while (knew or not self._ends) and (left := until - time.monotonic()) > 0:
            if over.wait(min(left, LOOK_S)):
                return True
            self._is_confirmed()
        return over.is_set()

    def _pass_on(self, message: bytes) -> None:
        if self._token is None:
            if not self.store.check([_key(self._node)]):
                return
            port, token = json.loads(self.store.get(_key(self._node)))
            self._token = bytes.fromhex(token)
            self._socket.connect((LOOPBACK, port))
        if len(message) + len(self._token) <= MOST_BYTES:
            try:
                self._socket.send(self._token + message)
            except OSError:  # the first rank has ended, or does not read
                self._confirmed_at = float("-inf")

    def _is_confirmed(self) -> bool:
        """Whether the first rank has lately said that it spoke and asked for this one."""
        with self._hearing:
            while self._token is not None:
                try:
                    message = self._socket.recv(MOST_BYTES)
                except BlockingIOError:
                    break
                except OSError:  # it has ended
                    self._confirmed_at = float("-inf")
                    break
                if hmac.compare_digest(message[:TOKEN_BYTES], self._token):
                    self._ends = self._ends or message[TOKEN_BYTES:] == ENDS
                    self._confirmed_at = self._clock()
            return self._clock() - self._confirmed_at < CONFIRMED_FOR_S


def beats_of(world: World) -> OwnBeats:
    """How this rank's beats come to the store."""
    if world.size < GATHERED_FROM or world.ranks_per_node == 1:
        return OwnBeats(world.background)
    return (Gathered if world.local_rank else Gatherer)(world.node, world.background)


def _key(node: int) -> str:
    return f"node_beats/{node}"
