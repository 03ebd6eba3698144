"""Episodes of agents, which draw their turns at an endpoint: what was drawn in an agent's session is its sample."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rltrain.data.experience import SIBLINGS_APART
from rltrain.endpoint.app import EndpointServer
from rltrain.endpoint.opening import RecordedSession
from rltrain.endpoint.session import Opened
from rltrain.environments.agent import SESSION
from rltrain.environments.batch import Event
from rltrain.rollout.episodes import Answer, EnvironmentEpisodes, Unusable, Waiting, with_shared_reward
from rltrain.rollout.sample import Sample, SampleGroup, Status

FIRST_TURN_ID = 2**50
"""Of the samples that an endpoint draws: above those of the stream of prompts."""


class AgentEpisodes(EnvironmentEpisodes):
    """`server` serves the engine that these episodes are of. An agent's run cannot cross a checkpoint: it begins
    anew."""

    def __init__(
        self, server: EndpointServer, recorded: dict[str, RecordedSession], *arguments: Any, **settings: Any
    ) -> None:
        """`recorded` has the sessions that have ended, by id; the server's thread writes it."""
        super().__init__(*arguments, **settings)
        self.server, self.recorded = server, recorded
        self._sessions: dict[int, Opened] = {}
        """By episode."""

    def begin(self, group: SampleGroup, samples: Sequence[Sample]) -> None:
        for sample in samples:
            self._sessions[self.number_of(sample.id)] = self.server.open_session(seed=sample.seed)
        super().begin(group, samples)

    def goes_on(self, sample: Sample) -> bool:
        return False

    def settle(self) -> list[Answer]:
        return []

    def _row(self, row: int, episode: int) -> dict[str, Any]:
        opened = self._sessions[episode]
        session = {"url": f"{self.server.url}/sessions/{opened.id}", "token": opened.token}
        return {**self.row_at(row), SESSION: session}

    def _what_follows(self, waiting: Waiting, event: Event) -> Answer:
        opened, failed = self._sessions.pop(event.episode), event.failure is not None
        status = Status.FAILED if failed else None
        reward = event.reward if event.info.get("rewarded") else None
        self.server.end_session(opened.id, "its agent failed" if failed else "its agent ended", status, reward)
        session = self.recorded.pop(opened.id, None)
        if failed:
            return Answer(waiting.sample.id, Status.FAILED)
        if session is None or not session.trajectories:
            raise Unusable("its agent has asked for no turn to the end")
        return Answer(
            waiting.sample.id,
            session.trajectories[0].sample.status,
            trajectories=_of_episode(session, waiting.sample.episode),
        )


def _of_episode(session: RecordedSession, episode: int) -> tuple[Sample, ...]:
    """The session's trajectories under ids of the episode, each worth what the whole session was."""
    ids = {one.sample.id: episode + k * SIBLINGS_APART for k, one in enumerate(session.trajectories)}
    samples = [
        replace(
            one.sample,
            id=ids[one.sample.id],
            parent=None if one.parent is None else ids.get(one.parent),
            status=Status.STOPPED if one.sample.status == Status.PENDING else one.sample.status,
        )
        for one in session.trajectories
    ]
    return tuple(with_shared_reward(samples, session.reward or 0.0))
