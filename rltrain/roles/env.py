"""Role env: environments that answer the rollout's turns."""

import json
from collections.abc import Callable, Mapping
from typing import Literal

import torch

from rltrain.checkpoint.run_files import Contents, read_contents
from rltrain.environments.batch import EnvironmentFactory, EpisodeLimits
from rltrain.environments.engine_service import EnvironmentService
from rltrain.environments.host import EnvironmentHost
from rltrain.errors import ConfigError
from rltrain.offload.memory_parts import MemoryPart
from rltrain.roles.role import Job, Role
from rltrain.runtime.job_store import poll_s
from rltrain.tasks.roles import trained_roles

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
