"""The rollout: engines that sample responses from the policy."""

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from zlib import crc32

import torch

from rltrain.algorithms.registry import algorithm_of
from rltrain.checkpoint.run_files import Contents, read_contents
from rltrain.config.schema import Sampling
from rltrain.data.experience import Experience
from rltrain.data.prompts import PromptDataset
from rltrain.data.tokenizer import TextDecoder
from rltrain.errors import CheckpointError
from rltrain.exchange.exchange import Shipment
from rltrain.exchange.image_requests import image_tensors, put_images
from rltrain.models import Architecture
from rltrain.models.routing_shape import RoutingShape
from rltrain.offload.memory_parts import MemoryPart
from rltrain.roles.env import Conversations, EpisodeSessions
from rltrain.roles.prompt_images import PromptImages, keys_of_group
from rltrain.roles.role import Job, Metrics, Role
from rltrain.roles.scoring import RATES_FILES, GroupScoring, are_logged, training_rows
from rltrain.rollout.build import build_engine, serve_checkpoint
from rltrain.rollout.engine import EngineSite, GreedyPlaces, SamplingParams, response_limit
from rltrain.rollout.generation_loop import (
    CompletionLog,
    Finished,
    GenerationLoop,
    LeaderDecisions,
    PromptAssignment,
    SharedAssignment,
    StaticAssignment,
    StreamRules,
)
from rltrain.rollout.groups import DropCount, PromptGroups, Selection
from rltrain.rollout.in_flight_sync import InFlightSync, NoInFlightSync
from rltrain.rollout.rollout_state import Consumed, EngineStart, FixedRows, RolloutState, RowStream, share_out
from rltrain.rollout.sample import Sample, SampleGroup, pack_groups, request_seed
from rltrain.schedule.memory_plan import leaving_roles


def engine_site(
    role: Role, ranks: tuple[int, ...], architecture: Architecture, tokenizer: TextDecoder, **modes: bool
) -> EngineSite:
    """Returns the place of the role's engine on this rank. The engine spans `ranks`. `modes` are further fields of
    EngineSite."""
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
        images=job.images,
        **modes,
    )


def sampling_params(sampling: Sampling, stop_token_ids: Iterable[int]) -> SamplingParams:
    """Returns an engine's sampling parameters for a `sampling` section of the config."""
    return SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        max_response_tokens=sampling.max_response_tokens,
        stop_token_ids=tuple(stop_token_ids),
        stop=sampling.stop,
    )


class DrawingRole(Role):
    """The base class of roles with engines for the policy. Each data-parallel replica has one engine."""

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
        """Returns whether all engines of the role get an update before any engine gets the next one."""
        return False

    @property
    def draws_during_syncs(self) -> bool:
        """Returns whether the engine's weights may change while it has unfinished responses."""
        raise NotImplementedError

    def has_room(self) -> bool:
        """Returns whether the engine can take weights before they are due."""
        return True

    def take_in_flight(self, in_flight: InFlightSync) -> None:
        """Sets the weight syncs that this rank can join while it generates. Called before the first task."""
        raise NotImplementedError

    def leave(self) -> None:
        """Frees the KV cache."""
        self.engine.release_cache()

    def close(self) -> None:
        """Closes the sessions, and the engine with its resources outside this process."""
        self.sessions.close()
        self.engine.close()

    def draw_set(
        self, step: int, number: int, in_flight: InFlightSync | NoInFlightSync
    ) -> tuple[list[Finished], list[SampleGroup]]:
        """Generates the samples of evaluation set `number`, with the same random numbers in every evaluation.

        Returns all finished groups of the set, and the groups generated by this engine. Collective over: this engine's
        ranks.
        """
        plan, dataset = self.config.evaluations[number], self.job.rows.prompts.evaluations[number]
        num_prompts, num_samples, sampling = len(dataset), plan.samples_per_prompt, self.sampling_params(plan.sampling)
        conversations = self.sessions.evaluation(plan, dataset, self.engine, sampling)
        draw = crc32(plan.name.encode())
        self.sessions.begin(step)
        images = self.prompt_images(dataset, lambda position: position)
        if images is not None:
            images.begin(step, ())
        loop = self.generation_loop(
            sampling,
            num_samples,
            lambda position: self.group(dataset, num_samples, draw, position, position, images),
            conversations,
            StaticAssignment(self.dp, self.grid.dp),
            StreamRules(num_prompts, per_step=num_prompts, shared_log=f"evaluation {plan.name} {step}"),
            in_flight,
            images=images,
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
        images: PromptImages | None = None,
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
            prepare=None if images is None else images.prepare,
            shares_prefixes=self.config.actor.share_prefixes is not False,
        )

    def prompt_images(
        self,
        dataset: PromptDataset,
        row_at: Callable[[int], int],
        following: Callable[[Sequence[int]], Sequence[int]] = lambda positions: (),
    ) -> PromptImages | None:
        """Returns the images of an engine's prompts on its first rank, with model.vision."""
        if self.job.decoder is None or not self.decisions.is_leader:
            return None
        return PromptImages(self.job.decoder, dataset, row_at, following)

    def group(
        self,
        dataset: PromptDataset,
        num_samples: int,
        draw: int,
        row: int,
        position: int,
        images: PromptImages | None = None,
    ) -> SampleGroup:
        """Returns a prompt group of the row without any generated tokens.

        `draw` is part of the random seed: another value gives other samples of the same prompt.
        """
        prompt = dataset.context(row) if images is None else images.context(row)
        samples = tuple(
            Sample(
                position * num_samples + number,
                prompt.ids,
                request_seed(self.config.seed, draw, row, number),
                images=prompt.images,
            )
            for number in range(num_samples)
        )
        return SampleGroup(position, row, samples)

    def packed(
        self, finished: Sequence[Finished], drawn: Sequence[SampleGroup], routing: RoutingShape | None = None
    ) -> Experience:
        """Returns the groups `drawn` of a chunk, the one of the groups `finished`, as an Experience."""
        vision = self.job.architecture.vision
        merge = None if vision is None else vision.merge
        return pack_groups(drawn, [group.position for group in finished], routing, merge)

    def sampling_params(self, sampling: Sampling) -> SamplingParams:
        eos = self.job.architecture.eos_token_ids
        ends = self.job.rows.prompts.encoder.end_tokens | self.sessions.end_tokens
        others = ends.union(sampling.stop_token_ids).difference(eos)
        return sampling_params(sampling, (*eos, *sorted(others)))

    def count_operations(self, experience: Experience) -> None:
        """Adds the FLOPs and tokens of this engine's samples to the job's counts."""
        self.job.operations.add(
            self.job.architecture, experience.lengths.tolist(), len(self.engine_ranks), backward=False
        )


class RolloutRole(DrawingRole):
    """The role that generates responses to training prompts and evaluation sets.

    Prompt groups are numbered by their position in the run's stream of prompts. A step takes `batch.prompts_per_step`
    groups. Without partial rollouts they are the first groups not taken by an earlier step. With partial rollouts they
    are the next groups to finish.
    """

    name = "rollout"

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self.parts = {"base": MemoryPart(tuple), **self.parts}
        self.num_greedy = job.shape.greedy_per_group
        self.num_samples = job.shape.samples_per_group + self.num_greedy
        """Samples per training prompt. The greedy ones come last."""
        start = self._start()
        self.rows = training_rows(job) if algorithm_of(self.config).generates else None
        """The stream of training prompts, or None if the algorithm does not generate."""
        self.images: PromptImages | None = None
        """Images of the training prompts, on the engine's first rank only."""
        self.scoring: GroupScoring | None = None
        """Scores groups for dynamic sampling. Set on the engine's first rank only."""
        self.training = self._training(start)
        self.first_generated = self.training.rules.first_step
        """The first step with responses from this process."""
        self._check(start.state)
        self.step_start_s = 0.0
        self.step_response_tokens = 0
        if job.world.rank == self.leader:
            job.rows.prompts.report_rows(job.config.batch.prompts_per_step)

    @property
    def updates_together(self) -> bool:
        return True

    @property
    def draws_during_syncs(self) -> bool:
        return self.job.shape.draws_during_syncs

    def take_in_flight(self, in_flight: InFlightSync) -> None:
        self.training.in_flight = in_flight

    def select_groups_by(self, scoring: "GroupScoring") -> None:
        """Sets the scoring that selects groups and gives them rewards. Called before the first task, on the engine's
        first rank."""
        assert self.training.selection is not None, "batch.dynamic_sampling is set"
        self.scoring, self.training.selection.filter = scoring, scoring.verdicts

    def leave(self) -> None:
        """Frees the KV cache. Unfinished responses continue from their tokens once the rollout is back
        on the device."""
        self.training.groups.suspend()
        self.engine.release_cache()

    def save_state(self) -> Mapping[str, Contents]:
        """Returns the unfinished and undelivered part of the prompt stream, as files on each engine's first rank.

        Returns nothing if the rollout only generates evaluations. The order lets no weight sync happen while a
        checkpoint is saved.
        """
        if not algorithm_of(self.config).generates:
            return {}
        state = self.training.state()
        if not self.decisions.is_leader:
            return {}
        contents, images = state.contents(), self.job.images
        if images is not None and "env" in self.job.placement.roles:
            keys = {key for group in (*state.begun, *state.drawn) for key in keys_of_group(group)}
            contents = Contents({**contents.tensors, **image_tensors(images, keys)}, contents.metadata)
        files = {f"engine_{self.dp:05d}.safetensors": contents}
        rows = None if self.rows is None else self.rows.state()
        return files if rows is None else {**files, RATES_FILES.replace("*", f"{self.dp:05d}"): rows}

    def generate(self, step: int, chunk: int) -> Metrics:
        """Generates the responses of one chunk of the step's training prompts. Collective over: this engine's ranks."""
        self.sessions.begin(step)
        if chunk == 0:
            if self.images is not None:
                self.images.begin(step, self.training.unshipped)
            self.step_start_s, self.step_response_tokens = time.perf_counter(), 0
            self.training.longest_step_s = 0.0
            self._training_rows.begin(step, self.training.consumed, self.training.done, self.serve)
        if self.decisions.group is not None:
            self.training.in_flight.enter_together(self.job.waiter, f"generate[{step}.{chunk}]")
        finished, drawn = self.training.run(step, chunk)
        self.sessions.ended()
        self._ship("samples", step, chunk, finished, drawn)
        self.step_response_tokens += sum(group.num_response_tokens for group in finished)
        if chunk < self.job.shape.num_chunks - 1:
            return {}
        seconds = time.perf_counter() - self.step_start_s
        return {
            "perf/rollout_tokens_per_s": self.step_response_tokens / seconds,
            "perf/rollout_tokens_per_gpu_s": self.step_response_tokens / seconds / len(self.grid.ranks),
            "rollout/response_tokens": self.step_response_tokens,
            "perf/decode_step_max_s": self.training.longest_step_s,
            **self._episode_metrics(),
            **self._training_rows.metrics(),
            **self.engine_metrics(),
        }

    def generate_evaluation(self, step: int, chunk: int) -> None:
        """Generates the samples of evaluation set number `chunk`. Collective over: this engine's ranks."""
        self.training.groups.suspend()
        finished, drawn = self.draw_set(step, chunk, self.training.in_flight)
        self._ship("evaluation_samples", step, chunk, finished, drawn)

    def load_weights(self, step: int, chunk: int) -> None:
        """Loads the weights of `model.path` into the engine, as the version of the step. Collective over: this engine's
        ranks."""
        serve_checkpoint(self.engine, self.site(), step)

    def _episode_metrics(self) -> Metrics:
        episodes = self.training.groups.episodes
        if episodes is None:
            return {}
        wait_s, self.training.episodes_wait_s = self.training.episodes_wait_s, 0.0
        return {"perf/engine_waits_for_env_s": wait_s, **episodes.metrics()}

    def _start(self) -> EngineStart:
        """Returns this engine's share of the saved rollout state. The number of engines may have changed since it was
        saved."""
        resumed = self.job.resumed
        files = resumed.files(self.name) if resumed and not resumed.has_new_data else []
        found = [read_contents(file) for file in files if not file.path.match(RATES_FILES)]
        saved = [RolloutState.from_contents(contents) for contents in found]
        for contents in found if self.decisions.is_leader else ():
            put_images(self.job.images, contents.tensors, self.job.first_step)
        if not saved or resumed is None:
            return EngineStart.at(self.job.first_step * self.config.batch.prompts_per_step)
        if not resumed.continues:
            saved = [state.trained_before(resumed.step) for state in saved]
        return share_out(saved, self.grid.dp)[self.dp]

    def _training(self, start: EngineStart) -> GenerationLoop:
        """Builds the generation loop over the stream of training prompts, beginning at `start`."""
        prompts = self.job.rows.prompts
        assignment: PromptAssignment = StaticAssignment(self.dp, self.grid.dp, start.next_position, start.returned)
        if self.job.shape.shares_prompts:
            assignment = SharedAssignment(self.job.world.store, start.next_position, start.returned)
        greedy = GreedyPlaces(self.num_greedy, self.num_samples) if self.num_greedy else None
        sampling = replace(self.sampling_params(self.config.rollout.sampling), greedy=greedy)
        conversations = Conversations()
        if prompts.training is not None:
            conversations = self.sessions.conversations(prompts.train, self.engine, sampling)
            self.images = self.prompt_images(prompts.train, self._row_at, self._following)
        loop = self.generation_loop(
            sampling,
            self.num_samples,
            self._training_group,
            conversations,
            assignment,
            self._rules(start.state.consumed),
            selection=self._selection(),
            images=self.images,
        )
        loop.resume(start.state)
        return loop

    def _rules(self, done: Consumed) -> StreamRules:
        """Returns the rules by which a step takes groups from the stream of training prompts."""
        config, per_step, shape = self.config, self.config.batch.prompts_per_step, self.job.shape
        rules = StreamRules(config.steps * per_step, per_step, shape.num_chunks, done=done, lead=shape.lead)
        if config.schedule.partial_rollouts or shape.selects_groups:
            share = config.schedule.oversampling if config.schedule.partial_rollouts else 0.0
            num_ahead = math.ceil(share * per_step)
            return replace(rules, shared_log="run", num_ahead=num_ahead)
        if shape.syncs_in_flight:  # fills the slots left idle by a step's last responses
            return replace(rules, num_ahead=per_step, max_staleness=config.schedule.max_staleness)
        return rules

    def _selection(self) -> Selection | None:
        settings, per_step = self.config.batch.dynamic_sampling, self.config.batch.prompts_per_step
        if settings is None:
            return None
        limit = round((settings.max_drawn - 1) * per_step)
        return Selection(DropCount(self.job.world.store, limit, self.grid.dp))

    def _check(self, state: RolloutState) -> None:
        """Raises CheckpointError if this run cannot continue the saved rollout."""
        job, batch, limits = self.job, self.config.batch, self.config.rollout
        num_handed_over = state.consumed.num_handed_over
        num_steps, rest = divmod(num_handed_over, batch.prompts_per_step)
        if rest or not job.first_step <= num_steps <= job.first_step + self.job.shape.lead:
            raise CheckpointError(
                f"In the checkpoint the rollout has handed over {num_handed_over} prompts by step {job.first_step}; "
                f"expected batch.prompts_per_step {batch.prompts_per_step} for each step, at most "
                f"{self.job.shape.lead} steps ahead. Resume with the batch and schedule of the saved run."
            )
        for group in state.begun:
            num_samples = len({sample.episode for sample in group.samples})
            if num_samples != self.num_samples:
                raise CheckpointError(
                    f"The checkpoint has unfinished prompts of {num_samples} samples each; expected "
                    f"{self.num_samples}. Set batch.samples_per_prompt to "
                    f"{num_samples - self.num_greedy}."
                )
            for sample in group.pending:
                if sample.waits:
                    continue  # the answer to its last turn may end it
                limit = response_limit(sample, self.training.groups.sampling, limits.max_context_tokens)
                if len(sample.tokens) >= limit:
                    raise CheckpointError(
                        f"The checkpoint has an unfinished response of {len(sample.tokens)} tokens; expected "
                        f"fewer than {limit}. Set rollout.sampling.max_response_tokens and rollout.max_context_tokens "
                        "to their values in the saved run."
                    )

    @property
    def _training_rows(self) -> RowStream:
        assert self.rows is not None, "only an algorithm that generates has training prompts"
        return self.rows

    def _row_at(self, position: int) -> int:
        return self._training_rows.row(position)

    def _following(self, positions: Sequence[int]) -> Sequence[int]:
        """Returns positions that this engine will probably start after `positions`. There are none if their rows are
        unknown yet."""
        if not isinstance(self.rows, FixedRows):
            return ()
        per_step, last = self.config.batch.prompts_per_step, max(positions)
        end = self.config.steps * per_step
        if self.job.shape.shares_prompts:
            return range(last + 1, min(last + 1 + 2 * len(positions), end))
        return range(last + self.grid.dp, min(last + 1 + per_step, end), self.grid.dp)

    def _training_group(self, position: int) -> SampleGroup:
        """Returns the group at a position of the stream of training prompts."""
        step, row = position // self.config.batch.prompts_per_step, self._row_at(position)
        return self.group(self.job.rows.prompts.train, self.num_samples, step, row, position, self.images)

    def _ship(
        self, transfer: str, step: int, chunk: int, finished: Sequence[Finished], drawn: Sequence[SampleGroup]
    ) -> None:
        """Puts this engine's samples of a chunk into `shipments`, to be sent."""
        replayed = transfer == "samples" and self.job.shape.replays_rollout
        shape = RoutingShape.of(self.job.architecture) if replayed else None
        experience = self.packed(finished, drawn, shape)
        if transfer == "evaluation_samples" and experience.has("image_keys"):
            are_shown = are_logged(experience, self.config.evaluation.logged_prompts)
            keys = torch.where(are_shown.repeat_interleave(experience.lengths), experience.image_keys, 0)
            experience = experience.with_fields(image_keys=keys)  # other images need not travel
        selection = self.training.selection
        if transfer == "samples" and self.scoring is not None and selection is not None:
            records = [(group, selection.records.pop(group.position)) for group in drawn]
            experience = self.scoring.hand_over(step, chunk, experience, records)
        self.count_operations(experience)
        group_tokens = torch.tensor([group.num_tokens for group in finished])
        holders = torch.tensor([group.engine for group in finished])
        self.shipments[transfer, step, chunk] = Shipment(experience, group_tokens, holders)
