"""What roles have in common that draw responses: engines, and the evaluation sets that they answer."""

from collections.abc import Callable, Iterable
from zlib import crc32

from rltrain.algorithms.registry import algorithm_of
from rltrain.config.schema import Sampling
from rltrain.data.experience import Experience
from rltrain.data.prompts import PromptDataset
from rltrain.data.tokenizer import TextDecoder
from rltrain.models import Architecture
from rltrain.roles.episode_sessions import Conversations, EpisodeSessions
from rltrain.roles.role import Job, Role
from rltrain.rollout.build import build_engine
from rltrain.rollout.engine import EngineSite, SamplingParams
from rltrain.rollout.generation_loop import (
    CompletionLog,
    Finished,
    GenerationLoop,
    LeaderDecisions,
    PromptAssignment,
    StaticAssignment,
    StreamRules,
)
from rltrain.rollout.groups import PromptGroups, Selection
from rltrain.rollout.in_flight_sync import InFlightSync, NoInFlightSync
from rltrain.rollout.sample import Sample, SampleGroup, request_seed
from rltrain.schedule.memory_plan import leaving_roles


def engine_site(
    role: Role, ranks: tuple[int, ...], architecture: Architecture, tokenizer: TextDecoder, **modes: bool
) -> EngineSite:
    """Returns the place on this rank of the role's engine, which has these `ranks` and EngineSite's `modes`."""
    job, offload = role.job, role.job.offloads
    return EngineSite(
        config=role.config,
        world=job.world,
        ranks=ranks,
        grid=role.grid,
        groups=job.groups,
        architecture=architecture,
        tokenizer=tokenizer,
        job_store=job.job_store,
        leaves=role.name in leaving_roles(offload),
        others=tuple(name for name in offload if name != role.name),
        role=role.name,
        **modes,
    )


def sampling_params(sampling: Sampling, stop_token_ids: Iterable[int]) -> SamplingParams:
    """Returns how an engine draws by a section of the config."""
    return SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        max_response_tokens=sampling.max_response_tokens,
        stop_token_ids=tuple(stop_token_ids),
        stop=sampling.stop,
    )


class DrawingRole(Role):
    """One engine per data-parallel replica."""

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self.engine_ranks = self.grid.replica(self.dp)
        self.decisions = LeaderDecisions(job.groups.cpu[self.engine_ranks] if self.grid.tp > 1 else None)
        self.sessions = EpisodeSessions(job, is_leader=self.decisions.is_leader)
        hosted = build_engine(self.site(), self.leave)
        self.engine, self.parts, self.engine_metrics = hosted.engine, hosted.parts, hosted.metrics

    def site(self) -> EngineSite:
        return engine_site(
            self,
            self.engine_ranks,
            self.job.architecture,
            self.job.rows.prompts.decoder,
            draws_during_syncs=self.draws_during_syncs,
            updates_together=self.updates_together,
            weights_change=algorithm_of(self.config).trains,
        )

    @property
    def updates_together(self) -> bool:
        """Whether all engines of the role get an update before any gets the next one."""
        return False

    @property
    def draws_during_syncs(self) -> bool:
        """Whether the engine's weights may change while it has responses under way."""
        raise NotImplementedError

    def has_room(self) -> bool:
        """Whether weights may come now that are not yet due."""
        return True

    def take_in_flight(self, in_flight: InFlightSync) -> None:
        """Before the first task: syncs that come while this rank draws."""
        raise NotImplementedError

    def leave(self) -> None:
        """Give up keys and values."""
        self.engine.release_cache()

    def close(self) -> None:
        """End what the engine has outside of this process."""
        self.sessions.close()
        self.engine.close()

    def draw_set(
        self, step: int, number: int, in_flight: InFlightSync | NoInFlightSync
    ) -> tuple[list[Finished], list[SampleGroup]]:
        """Draw the samples of evaluation set `number`: by the same random numbers in every evaluation. All of its
        groups, and those that this engine drew. Collective over: this engine's ranks."""
        plan, dataset = self.config.evaluations[number], self.job.rows.prompts.evaluations[number]
        num_prompts, num_samples, sampling = len(dataset), plan.samples_per_prompt, self.sampling_params(plan.sampling)
        conversations = self.sessions.evaluation(plan, dataset, self.engine, sampling)
        draw = crc32(plan.name.encode())
        loop = self.generation_loop(
            sampling,
            num_samples,
            lambda position: self.group(dataset, num_samples, draw, position, position),
            conversations,
            StaticAssignment(self.dp, self.grid.dp),
            StreamRules(num_prompts, per_step=num_prompts, shared_log=f"evaluation {plan.name} {step}"),
            in_flight,
        )
        finished, drawn = loop.run(0, 0)
        self.sessions.ended()
        return finished, drawn

    def generation_loop(
        self,
        sampling: SamplingParams,
        num_samples: int,
        group_at: Callable[[int], SampleGroup],
        conversations: Conversations,
        assignment: PromptAssignment,
        rules: StreamRules,
        in_flight: InFlightSync | NoInFlightSync = NoInFlightSync(),  # noqa: B008 - it has no state
        selection: Selection | None = None,
    ) -> GenerationLoop:
        groups = PromptGroups(
            self.engine,
            sampling,
            group_at,
            num_samples=num_samples,
            episodes=conversations.episodes,
            max_turn_tokens=self.config.env.max_turn_tokens,
            guests=conversations.guests,
        )
        return GenerationLoop(
            groups,
            assignment,
            CompletionLog(self.job.world.store, rules.per_chunk, len(self.grid.ranks), rules.chunks_per_log),
            self.decisions,
            self.job.waiter,
            self.job.heartbeat,
            rules,
            engine=self.dp,
            ranks=[rank for rank in self.grid.ranks if rank not in self.engine_ranks],
            in_flight=in_flight,
            selection=selection,
        )

    def group(self, dataset: PromptDataset, num_samples: int, draw: int, row: int, position: int) -> SampleGroup:
        """One of the row's prompt, of which nothing is drawn; another number `draw` stands for other samples of it."""
        prompt = dataset.prompt_tokens(row)
        samples = tuple(
            Sample(position * num_samples + number, prompt, request_seed(self.config.seed, draw, row, number))
            for number in range(num_samples)
        )
        return SampleGroup(position, row, samples)

    def sampling_params(self, sampling: Sampling) -> SamplingParams:
        eos = self.job.architecture.eos_token_ids
        ends = self.job.rows.prompts.encoder.end_tokens | self.sessions.end_tokens
        others = ends.union(sampling.stop_token_ids).difference(eos)
        return sampling_params(sampling, (*eos, *sorted(others)))

    def count_operations(self, experience: Experience) -> None:
        """Of what this engine drew."""
        self.job.operations.add(
            self.job.architecture, experience.lengths.tolist(), len(self.engine_ranks), backward=False
        )
