"""Serves a rank's environments to engines over TCP. Has both ends."""

import secrets
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from dataclasses import asdict
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from rltrain.environments.batch import EpisodeEvent, EpisodeFailure, SavedBatch
from rltrain.environments.encoding import (
    decode_action,
    decode_observation,
    decode_trajectory,
    encode_action,
    encode_observation,
)
from rltrain.environments.host import EnvironmentHost
from rltrain.environments.interface import Action, Row
from rltrain.errors import EpisodeError
from rltrain.runtime.machine import JobThread
from rltrain.runtime.messages import Message, MessageServer, PeerLost, connect

# The server of a rank's environments. Engines on any rank begin episodes and receive their events.

LOOK_S = 0.002
"""Seconds between two checks for requests of engines, while episodes are running."""
IDLE_S = 0.05
LOOK_FOR_THREAD_S = 0.5
JOIN_S = 10.0

Result = TypeVar("Result")


class EnvironmentService:
    """Serves the host made by `build` from a thread that owns the host. So environments step while this rank is busy.

    An engine has at most one open request per episode and reads the answers between two decode steps. The server keeps
    unread answers.
    """

    def __init__(self, build: Callable[[], EnvironmentHost], address: str, num_engines: int) -> None:
        self.token = secrets.token_urlsafe(24)
        self.address = address
        self._build, self._num_engines = build, num_engines
        self._server = MessageServer(address, self.token)
        self._peers: dict[int, int] = {}
        """Connection of the engine, by episode."""
        self._unclaimed: list[EpisodeEvent] = []
        """Events of resumed episodes before their engine has claimed them."""
        self._savers: dict[int, set[int]] = {}
        """Engines waiting for a checkpoint, by its number."""
        self._saved: dict[int, list[SavedBatch]] = {}
        self._calls: SimpleQueue[Callable[[EnvironmentHost], None]] = SimpleQueue()
        self._failure: Exception | None = None
        self._is_closed = threading.Event()
        self._thread = JobThread(target=self._run, name="environments", daemon=True)
        self._thread.start()

    def where(self) -> dict[str, Any]:
        """Returns the address for `RemoteEnvironments`."""
        return {"host": self.address, "port": self._server.port, "token": self.token}

    def call(self, what: Callable[[EnvironmentHost], Result]) -> Result:
        """Calls `what` with the host in its thread, between two events, and waits for the result. Raises the exception
        of `what`."""
        future: Future[Result] = Future()

        def run(host: EnvironmentHost) -> None:
            try:
                future.set_result(what(host))
            except BaseException as error:  # raised in the caller
                future.set_exception(error)

        self._calls.put(run)
        while not future.done() and self._thread.is_alive():
            wait([future], LOOK_FOR_THREAD_S)
        if not future.done():
            raise self._failure or RuntimeError("the environments have been closed")
        return future.result()

    def take_saved(self, number: int) -> list[SavedBatch] | None:
        """Returns the episodes saved for checkpoint `number` and forgets them. They are saved when the last engine has
        reached the checkpoint. Returns None before that."""
        return self._saved.pop(number, None)

    def close(self) -> None:
        """Ends the environments and their processes."""
        self._is_closed.set()
        self._thread.join(JOIN_S)

    def _run(self) -> None:
        try:
            host = self._build()
        except Exception as error:  # raised at the first call
            self._failure = error
            return
        with host:
            while not self._is_closed.is_set():
                self._call_next(host)
                for peer, message in self._server.receive(LOOK_S if self._peers else IDLE_S):
                    self._take(host, peer, message)
                if self._peers:
                    self._send_events(host)
            self._server.close()

    def _call_next(self, host: EnvironmentHost) -> None:
        try:
            run = self._calls.get_nowait()
        except Empty:
            return
        run(host)

    def _take(self, host: EnvironmentHost, peer: int, message: Message) -> None:
        if "save" in message:
            self._save(host, peer, message["save"])
            return
        episode = message["episode"]
        if "row" in message:
            self._peers[episode] = peer
            host.begin(episode, message["row"], message["seed"])
        elif "claimed" in message:
            self._peers[episode] = peer
            self._unclaimed, events = [], self._unclaimed
            for event in events:
                self._send(event)
        elif episode not in self._peers:
            return  # it has ended, but the engine has not read that yet
        elif "action" in message:
            action = decode_action(message["action"])
            assert action is not None
            host.act(episode, action)
        else:
            del self._peers[episode]
            host.abandon(episode)

    def _save(self, host: EnvironmentHost, peer: int, number: int) -> None:
        """Saves the episodes once all engines have reached a checkpoint. Earlier events are sent first."""
        savers = self._savers.setdefault(number, set())
        savers.add(peer)
        if len(savers) < self._num_engines:
            return
        saved = host.save()
        self._send_events(host)
        for saver in self._savers.pop(number):
            self._server.send(saver, {"saved": number})
        self._saved[number] = saved

    def _send_events(self, host: EnvironmentHost) -> None:
        for event in host.events():
            self._send(event)

    def _send(self, event: EpisodeEvent) -> None:
        peer = self._peers.get(event.episode)
        if peer is None:
            self._unclaimed.append(event)
            return
        if event.done:
            del self._peers[event.episode]
        self._server.send(peer, encode_event(event))


def encode_event(event: EpisodeEvent) -> Message:
    return {
        **vars(event),
        "observation": encode_observation(event.observation),
        "info": dict(event.info),
        "failure": asdict(event.failure) if event.failure else None,
        "trajectories": [asdict(trajectory) for trajectory in event.trajectories],
    }


# The client in an engine.


class RemoteEnvironments:
    """The environments of an EnvironmentService on `rank`, at the address `where`. Only connecting can block."""

    def __init__(self, rank: int, where: Mapping[str, Any]) -> None:
        self.rank = rank
        self.going_on = frozenset(where["episodes"])
        """Episodes resumed from a checkpoint."""
        self.num_saved = 0
        """Number of the last checkpoint saved by the service."""
        self._connection = connect(where["host"], where["port"], where["token"])

    def begin(self, episode: int, row: Row, seed: int) -> None:
        self._send({"episode": episode, "row": dict(row), "seed": seed})

    def act(self, episode: int, action: Action) -> None:
        self._send({"episode": episode, "action": encode_action(action)})

    def claim(self, episode: int) -> None:
        """Claims a resumed episode for this engine."""
        self._send({"episode": episode, "claimed": True})

    def save(self, number: int) -> None:
        """Reports that this engine has reached checkpoint `number`. The service has saved it once `num_saved` is at
        least that."""
        self._send({"save": number})

    def abandon(self, episode: int) -> None:
        self._send({"episode": episode})

    def events(self) -> list[EpisodeEvent]:
        """Returns the events since the last call."""
        try:
            messages = self._connection.receive()
        except PeerLost as error:
            raise self._lost(error) from error
        self.num_saved = max([self.num_saved, *(message["saved"] for message in messages if "saved" in message)])
        return [_decode_event(message) for message in messages if "episode" in message]

    def close(self) -> None:
        self._connection.close()

    def _send(self, message: Message) -> None:
        try:
            self._connection.send(message)
        except PeerLost as error:
            raise self._lost(error) from error

    def _lost(self, error: PeerLost) -> EpisodeError:
        return EpisodeError(f"the environments on rank {self.rank} cannot be reached: {error}")


def _decode_event(message: Message) -> EpisodeEvent:
    failure = message["failure"]
    return EpisodeEvent(
        **{
            **message,
            "observation": decode_observation(message["observation"]),
            "failure": EpisodeFailure(**failure) if failure else None,
            "trajectories": tuple(decode_trajectory(trajectory) for trajectory in message["trajectories"]),
        }
    )
