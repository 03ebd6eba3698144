"""Role env: environments that answer the rollout's turns, and an engine's episodes in them and of agents."""

import json
import logging
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from rltrain.checkpoint.run_files import Contents, read_contents
from rltrain.config.evaluation import EvaluationPlan
from rltrain.data.chat_format import ChatFormat
from rltrain.data.columns import RowColumns, read_columns
from rltrain.data.experience import SIBLINGS_APART
from rltrain.data.images import Context
from rltrain.data.prompts import PromptDataset
from rltrain.environments.agent import SESSION
from rltrain.environments.batch import EnvironmentFactory, EpisodeEvent, EpisodeLimits
from rltrain.environments.engine_service import EnvironmentService, RemoteEnvironments
from rltrain.environments.host import EnvironmentHost
from rltrain.errors import ConfigError
from rltrain.offload.memory_parts import MemoryPart
from rltrain.roles.role import Job, Role
from rltrain.rollout.engine import Engine, SamplingParams
from rltrain.rollout.engine_feed import EngineFeed, EngineMailbox
from rltrain.rollout.episodes import (
    ChatTurns,
    EnvironmentEpisodes,
    Episodes,
    Observed,
    PlainText,
    TurnLimits,
    Unusable,
    Waiting,
    with_shared_reward,
)
from rltrain.rollout.sample import Sample, SampleGroup, Status
from rltrain.runtime.job_store import poll, poll_s
from rltrain.tasks.roles import trained_roles

if TYPE_CHECKING:  # the web stack is imported only with an agent
    from rltrain.endpoint.app import EndpointServer
    from rltrain.endpoint.opening import RecordedSession
    from rltrain.endpoint.request_images import RequestImages
    from rltrain.endpoint.session import Opened

logger = logging.getLogger(__name__)

# The role of environments.

DRAWN = "environments/drawn"
"""The store's key for the number of generate tasks ended by engines, summed over all engines."""


def place_of(rank: int) -> str:
    """Returns the store's key for the address of a rank's environments."""
    return f"environments/{rank}"


class SimulatorPart(MemoryPart):
    """The device memory of environments in separate processes. They free it and allocate it again themselves."""

    def __init__(self, offload: Callable[[], None], onload: Callable[[], None]) -> None:
        super().__init__(tuple)
        self._offload, self._onload = offload, onload

    def leave(self, *, drop: bool = False) -> None:
        super().leave(drop=drop)
        self._offload()

    def fill(self, *, rewritten: bool = False) -> None:
        super().fill(rewritten=rewritten)
        self._onload()


class EnvRole(Role):
    """The role of environments. They run in separate processes, and a thread serves them.

    They step while an engine decodes, on this rank or another. In a generate task, a rank without other work waits
    until all responses are generated.
    """

    name = "env"

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self.service = EnvironmentService(self._host, job.world.address, num_engines=job.grids["rollout"].dp)
        environments = self.service.call(EnvironmentHost.describe)
        place = {**self.service.where(), "tools": environments.tools, "episodes": self._go_on()}
        job.job_store.put(place_of(job.world.rank), place)
        self.parts = {"simulators": SimulatorPart(self._tell("offload"), self._tell("onload"))}
        if self.config.env.offload and not environments.offloaded:
            raise ConfigError(
                f"env.offload is true, but env.function {self.config.env.function} lacks offload() or onload(). "
                "Add both, or set env.offload to false."
            )
        self.num_checkpoints = 0
        self.num_tasks = 0
        """Generate tasks that this rank has reached."""

    def generate(self, step: int, chunk: int) -> None:
        """Waits until the rollout has generated the chunk. Environments answer meanwhile.

        A rank that also trains does not wait if the rollout generates ahead of training. Its environments answer at any
        time.
        """
        self._await_engines(f"generate[{step}.{chunk}]")

    def generate_evaluation(self, step: int, chunk: int) -> None:
        """Waits like `generate`, for held-out rows."""
        self._await_engines(f"generate_evaluation[{step}]")

    def save_state(self) -> Mapping[str, Contents]:
        """Returns the unfinished episodes of environments that can be saved, or nothing if `env.agent` is set.

        Waits until all engines have reached this checkpoint too.
        """
        if self.config.env.agent is not None:
            return {}  # an agent's runs would have to end first, but they need the waiting engine
        self.num_checkpoints += 1
        number = self.num_checkpoints
        engines = self.job.grids["rollout"].ranks
        saved = self.wait_for(lambda: self.service.take_saved(number), "the engines, to save episodes", engines)
        text = torch.frombuffer(bytearray(json.dumps(saved).encode()), dtype=torch.uint8)
        return {f"rank_{self.job.world.rank:05d}.safetensors": Contents({"episodes": text}, {})}

    def close(self) -> None:
        """Ends the environments' processes."""
        self.service.close()

    def _go_on(self) -> list[int]:
        """Restores this rank's share of the saved episodes. Returns the ids of episodes that can continue."""
        resumed = self.job.resumed
        files = resumed.files(self.name) if resumed and resumed.continues else []
        mine = files[self.grid.ranks.index(self.job.world.rank) :: len(self.grid.ranks)]
        texts = [bytes(read_contents(file).tensors["episodes"].tolist()) for file in mine]
        saved = [batch for text in texts for batch in json.loads(text)]
        lost = set(self.service.call(lambda host: host.resume(saved)))
        return [episode for batch in saved for episode in batch["live"] if episode not in lost]

    def _tell(self, what: Literal["offload", "onload"]) -> Callable[[], None]:
        return lambda: self.service.call(lambda host: host.tell_all(what))

    def _host(self) -> EnvironmentHost:
        settings = self.config.env
        return EnvironmentHost(
            self._factory(),
            num_workers=settings.num_workers,
            batch_size=settings.batch_size,
            limits=EpisodeLimits(
                step_s=settings.step_timeout_s, episode_s=settings.episode_timeout_s, turns=settings.max_turns
            ),
            on_event=self.job.heartbeat.advance,
        )

    def _factory(self) -> EnvironmentFactory:
        config, sampling, agent = self.config, self.config.rollout.sampling, self.config.env.agent
        function, options, rows = config.env.function, config.env.options, config.data.train.parts()[0]
        if agent is not None:
            function, options = "agent", agent.model_dump(mode="json")
            options["limits"] = {
                "wall_s": config.env.step_timeout_s,
                "cpu_s": config.env.step_timeout_s,
                **agent.limits,
            }
        assert function is not None, "the role is placed with an environment only"
        return EnvironmentFactory(
            function,
            options,
            prompt_key=rows.prompt_key,
            label_key=rows.label_key or "",
            model_path=config.model.path,
            sampling={
                "max_new_tokens": config.env.max_turn_tokens or sampling.max_response_tokens,
                **sampling.model_dump(include={"temperature", "top_p", "stop"}),
            },
            batch_size=config.env.batch_size,
            gpus=self.job.world.visible_gpus([self.job.world.rank]),
        )

    def _await_engines(self, what: str) -> None:
        self.num_tasks += 1
        if self.job.shape.lead and self._trains:
            return
        rollout = self.job.grids["rollout"]
        wanted, store, every_s = self.num_tasks * rollout.dp, self.job.world.store, poll_s(len(self.grid.ranks))
        self.wait_for(lambda: store.add(DRAWN, 0) >= wanted or None, f"{what} of the engines", rollout.ranks, every_s)

    @property
    def _trains(self) -> bool:
        return not set(trained_roles()).isdisjoint(self.job.placement.hosts(self.job.world.rank))


# An engine's connections to the ranks of role env.


@dataclass(frozen=True)
class Conversations:
    """The sources of an engine's conversations: the episodes of its samples, and turns requested by agents."""

    episodes: Episodes | None = None
    guests: EngineFeed | None = None


class EpisodeSessions:
    """The rollout's access to environments. Without role env it does nothing.

    Training and evaluations have separate connections, so neither reads the answers to the other.
    """

    def __init__(self, job: Job, *, is_leader: bool) -> None:
        self.job, self.is_leader = job, is_leader
        self._connections: list[RemoteEnvironments] = []
        self._servers: list[tuple[EndpointServer, EngineMailbox]] = []
        self._evaluations: dict[str, Conversations] = {}
        """Conversations by name of the evaluation set."""
        env = job.placement.ranks("env") if "env" in job.placement.roles else ()
        self._places = {
            rank: job.job_store.get(place_of(rank), waiting_for=f"the environments of rank {rank}") for rank in env
        }
        self._tools = next(iter(self._places.values()))["tools"] if env else ()
        """Tools that the chat template describes to the model."""
        self._chat = self._chat_format() if env else None
        self.step = 0
        """The step of the present task."""
        self._images: list[RequestImages] = []
        """The images of the requests to each server."""

    def begin(self, step: int) -> None:
        """Begins a task of `step`. Holds the images of the agents' open sessions until its end."""
        self.step = step
        for images in self._images:
            images.hold_again()

    @property
    def end_tokens(self) -> frozenset[int]:
        """The chat template's tokens for the end of a turn, in addition to the checkpoint's."""
        return self._chat.end_tokens if self._chat else frozenset()

    def evaluation(
        self, plan: EvaluationPlan, dataset: PromptDataset, engine: Engine, sampling: SamplingParams
    ) -> Conversations:
        """Returns the conversations of a held-out set. They are the same objects in every evaluation."""
        if plan.name not in self._evaluations:
            self._evaluations[plan.name] = self.conversations(dataset, engine, sampling, plan)
        return self._evaluations[plan.name]

    def ended(self) -> None:
        """Reports that this engine has ended a generate task. Ranks of role env wait for all engines to do so."""
        if self._places and self.is_leader:
            self.job.world.store.add(DRAWN, 1)

    def close(self) -> None:
        for server, mailbox in self._servers:
            mailbox.close("the job ends")
            server.stop()
        for connection in self._connections:
            connection.close()

    def conversations(
        self, dataset: PromptDataset, engine: Engine, sampling: SamplingParams, plan: EvaluationPlan | None = None
    ) -> Conversations:
        """Returns the conversations of an evaluation's prompts, or of training prompts if `plan` is None."""
        if not self._places:
            return Conversations()
        if not self.is_leader:
            going_on = frozenset(number for place in self._places.values() for number in place["episodes"])
            return Conversations(Episodes(going_on), self._feed(engine))
        connections = [RemoteEnvironments(rank, place) for rank, place in self._places.items()]
        self._connections += connections
        turn_format = ChatTurns(self._chat, dataset.encoder.system_prompt) if self._chat else PlainText(dataset.encoder)
        limits = self._limits(sampling.max_response_tokens)
        arguments = (connections, turn_format, limits, self._rows(dataset, plan).__getitem__)
        settings: dict[str, Any] = {
            "wait_for": lambda come, what: poll(self.job.waiter, come, what, [*self._places]),
            "number_of": (lambda sample: -1 - sample) if plan else (lambda sample: sample),
            "overlaps": self.job.config.env.overlap,
            "keep_images": self._keep_images,
        }
        if self._tools:
            settings["own_prompt"] = lambda row: dataset[row].prompt
        if self.job.config.env.agent is None:
            return Conversations(EnvironmentEpisodes(*arguments, **settings))
        return self._of_agents(dataset, engine, sampling, plan is not None, arguments, settings)

    def _keep_images(self, context: Context) -> None:
        """Decodes the images of an observation, and holds them for this rank until the end of the step."""
        assert self.job.decoder is not None, "images are placed with model.vision only"
        sources = dict.fromkeys(context.sources, "an observation")
        self.job.decoder.hold([image.key for image in context.images], lambda: sources, self.step)

    def _feed(self, engine: Engine, mailbox: EngineMailbox | None = None) -> EngineFeed | None:
        """Returns the turns requested by agents, or None without an agent. Only the engine's first rank has a
        `mailbox`."""
        if self.job.config.env.agent is None:
            return None
        return EngineFeed(engine, self.job.rows.prompts.decoder, mailbox)

    def _of_agents(
        self,
        dataset: PromptDataset,
        engine: Engine,
        sampling: SamplingParams,
        is_evaluation: bool,
        arguments: tuple[Any, ...],
        settings: dict[str, Any],
    ) -> Conversations:
        """Starts a server in front of the engine and returns the conversations of its agents."""
        from rltrain.endpoint.app import EndpointServer, EndpointSettings
        from rltrain.endpoint.request_images import MAX_BODY_BYTES
        from rltrain.endpoint.requests import RequestLimits, SamplingRules

        config, endpoint = self.job.config, self.job.config.rollout.endpoint
        images = self._of_requests()
        limits = RequestLimits(
            max_context_tokens=config.rollout.max_context_tokens,
            vocab_size=self.job.architecture.vocab_size,
            max_sessions=endpoint.max_sessions,
            max_session_turns=config.env.max_turns,
            session_timeout_s=config.env.episode_timeout_s,
        )
        if images is not None:
            limits = replace(limits, max_body_bytes=MAX_BODY_BYTES)
        mailbox = EngineMailbox(limits.max_turns)
        recorded: dict[str, RecordedSession] = {}
        engine_number = self.job.grids["rollout"].coordinates(self.job.world.rank).dp
        server = EndpointServer(
            mailbox,
            dataset.encoder.tokenizer,
            EndpointSettings(
                SamplingRules(sampling, endpoint.sampling),
                limits,
                model=Path(config.model.path).name,
                token=secrets.token_urlsafe(32),
                host=endpoint.host,
                port=endpoint.port + engine_number if endpoint.port and not is_evaluation else 0,
                first_sample_id=FIRST_TURN_ID,
                end_tokens=dataset.encoder.end_tokens,
            ),
            on_end=lambda session: recorded.update({session.id: session}),
            images=images,
        )
        server.start()
        self._servers.append((server, mailbox))
        episodes = AgentEpisodes(server, recorded, images, *arguments, **settings)
        return Conversations(episodes, self._feed(engine, mailbox))

    def _of_requests(self) -> "RequestImages | None":
        """Returns the images of requests to a server, or None without model.vision."""
        from rltrain.endpoint.request_images import RequestImages

        if self.job.images is None or self.job.rows.images is None:
            return None
        images = RequestImages(self.job.images, self.job.rows.images, lambda: self.step)
        self._images.append(images)
        return images

    def _rows(self, dataset: PromptDataset, plan: EvaluationPlan | None) -> RowColumns:
        """Returns the rows with all columns of the file."""
        file, key = (plan.file, plan.config_key) if plan else (self.job.config.data.train, "data.train")
        return read_columns(dataset, file, config_key=key, required={}, every=True)

    def _chat_format(self) -> ChatFormat | None:
        """Returns the chat format, or None without a chat template.

        Raises ConfigError if the checkpoint's template cannot continue conversations.
        """
        job, encoder = self.job, self.job.rows.prompts.encoder
        if not encoder.uses_template:
            return None
        tools = self._tools
        ends, options = encoder.named_ends, encoder.template_options
        chat = ChatFormat(
            encoder.tokenizer, tools=tools, end_tokens=ends, template_options=options, images=encoder.images
        )
        chat.require_tools()
        chat.continuability.require(*(("user", "tool") if tools else ("user",)))
        if chat.continuability.notice and job.world.rank == job.leader_of("rollout"):
            logger.warning(chat.continuability.notice)
        return chat

    def _limits(self, max_response_tokens: int) -> TurnLimits:
        config = self.job.config
        return TurnLimits(
            max_turns=config.env.max_turns,
            max_prompt_tokens=config.data.max_prompt_tokens,
            max_response_tokens=max_response_tokens,
            max_context_tokens=config.rollout.max_context_tokens,
            vocab_size=self.job.architecture.vocab_size,
        )


# Episodes of agents. They request turns at an endpoint, and the tokens of an agent's session become its sample.

FIRST_TURN_ID = 2**50
"""First id of samples generated at an endpoint. It is above all ids of the prompt stream."""


class AgentEpisodes(EnvironmentEpisodes):
    """The episodes of agents at `server`. An agent's run cannot cross a checkpoint. It begins again after one."""

    def __init__(
        self,
        server: "EndpointServer",
        recorded: "dict[str, RecordedSession]",
        images: "RequestImages | None",
        *arguments: Any,
        **settings: Any,
    ) -> None:
        """`recorded` has the ended sessions by id. The server's thread writes it. `images` are those of requests."""
        super().__init__(*arguments, **settings)
        self.server, self.recorded, self.images = server, recorded, images
        self._sessions: dict[int, Opened] = {}
        """Open sessions by episode."""

    def begin(self, group: SampleGroup, samples: Sequence[Sample]) -> None:
        for sample in samples:
            self._sessions[self.number_of(sample.id)] = self.server.open_session(seed=sample.seed)
        super().begin(group, samples)

    def goes_on(self, sample: Sample) -> bool:
        return False

    def settle(self) -> list[Observed]:
        return []

    def _row(self, row: int, episode: int) -> dict[str, Any]:
        opened = self._sessions[episode]
        session = {"url": f"{self.server.url}/sessions/{opened.id}", "token": opened.token}
        return {**self.row_at(row), SESSION: session}

    def _what_follows(self, waiting: Waiting, event: EpisodeEvent) -> Observed:
        opened, failed = self._sessions.pop(event.episode), event.failure is not None
        status = Status.FAILED if failed else None
        reward = event.reward if event.info.get("rewarded") else None
        self.server.end_session(opened.id, "its agent failed" if failed else "its agent ended", status, reward)
        session = self.recorded.pop(opened.id, None)
        if self.images is not None:
            self.images.forget(opened.id)
        if failed:
            return Observed(waiting.sample.id, Status.FAILED)
        if session is None or not session.trajectories:
            raise Unusable("its agent has requested no complete turn")
        return Observed(
            waiting.sample.id,
            session.trajectories[0].sample.status,
            trajectories=_of_episode(session, waiting.sample.episode),
        )


def _of_episode(session: "RecordedSession", episode: int) -> tuple[Sample, ...]:
    """Returns the session's trajectories with ids of the episode. Each has the reward of the whole session."""
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
