"""An engine's end of the environments of a rank."""

from collections.abc import Mapping
from typing import Any

from rltrain.environments.batch import Event, Failure
from rltrain.environments.encoding import decode_observation, decode_trajectory, encode_action
from rltrain.environments.interface import Action, Row
from rltrain.errors import EpisodeError
from rltrain.runtime.messages import Message, PeerLost, connect


class RemoteEnvironments:
    """Those that an EnvironmentService serves on `rank`, as `where` says. Nothing here blocks but the connecting."""

    def __init__(self, rank: int, where: Mapping[str, Any]) -> None:
        self.rank = rank
        self.going_on = frozenset(where["episodes"])
        """Episodes that go on from a checkpoint."""
        self.num_saved = 0
        """The number of the last checkpoint that they have come to."""
        self._connection = connect(where["host"], where["port"], where["token"])

    def begin(self, episode: int, row: Row, seed: int) -> None:
        self._send({"episode": episode, "row": dict(row), "seed": seed})

    def act(self, episode: int, action: Action) -> None:
        self._send({"episode": episode, "action": encode_action(action)})

    def claim(self, episode: int) -> None:
        """An episode that goes on is this engine's."""
        self._send({"episode": episode, "claimed": True})

    def save(self, number: int) -> None:
        """The engine has come to a checkpoint; they have as well when `num_saved` says so."""
        self._send({"save": number})

    def abandon(self, episode: int) -> None:
        self._send({"episode": episode})

    def events(self) -> list[Event]:
        """What has come since the last call."""
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
        return EpisodeError(f"the environments on rank {self.rank} cannot be reached any more: {error}")


def _decode_event(message: Message) -> Event:
    failure = message["failure"]
    return Event(
        **{
            **message,
            "observation": decode_observation(message["observation"]),
            "failure": Failure(**failure) if failure else None,
            "trajectories": tuple(decode_trajectory(trajectory) for trajectory in message["trajectories"]),
        }
    )
