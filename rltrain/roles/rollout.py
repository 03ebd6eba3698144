"""The rollout: engines that draw responses from the policy."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch

from rltrain.algorithms.registry import algorithm_of
from rltrain.checkpoint.run.files import Contents, read_contents
from rltrain.data.prompts import PromptDataset
from rltrain.errors import CheckpointError
from rltrain.exchange.exchange import Shipment
from rltrain.liveness.polling import poll
from rltrain.residency.memory_plan import DEVICE_ROLES, leaving_roles
from rltrain.roles.role import Job, Metrics, Role
from rltrain.rollout.build import build_engine
from rltrain.rollout.engine import Request, SamplingParams
from rltrain.rollout.refusals import response_limit
from rltrain.rollout.site import EngineSite
from rltrain.rollout.stream.completion_log import CompletionLog, Finished
from rltrain.rollout.stream.generation_loop import ChunkTarget, GenerationLoop
from rltrain.rollout.stream.groups import FinishedGroup, Prompt, PromptGroups
from rltrain.rollout.stream.in_flight_sync import InFlightSync
from rltrain.rollout.stream.leader_decision import LeaderDecisions
from rltrain.rollout.stream.packing import pack_groups
from rltrain.rollout.stream.prompt_assignment import PromptAssignment, SharedAssignment, StaticAssignment
from rltrain.rollout.stream.rollout_state import Hand, RolloutState, deal
from rltrain.rollout.stream.seeds import request_seed

GREEDY = {"temperature": 0.0, "top_p": 1.0, "top_k": 0}


class Rollout(Role):
    """One engine per data-parallel replica.

    Prompt groups are numbered by their position in the run's stream of prompts, of which step k takes the
    batch.prompts_per_step from position k * prompts_per_step on; with partial rollouts, the next as many to get done.
    """

    name = "rollout"

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self.engine_ranks = self.grid.replica(self.dp)
        hosted = build_engine(self._site(), self.leave)
        self.engine, self.parts = hosted.engine, hosted.parts
        self.in_flight: InFlightSync | None = None
        """Set where weights may change between decode steps."""
        self.turns = LeaderDecisions(job.groups.cpu[self.engine_ranks] if self.grid.tp > 1 else None)
        hand = self._hand()
        self.first_generated = len(hand.carried.consumed) // self.config.batch.prompts_per_step
        """The first step that this process draws responses for."""
        self.training = self._training(hand)
        self._check(hand.carried)
        self.step_start_s = 0.0
        self.step_response_tokens = 0
        if job.world.rank == self.leader:
            job.prompts.report_dropped()

    def _site(self) -> EngineSite:
        job = self.job
        offload = {role: job.offload_of(role) for role in job.placement.hosts(job.world.rank) if role in DEVICE_ROLES}
        return EngineSite(
            config=self.config,
            world=job.world,
            ranks=self.engine_ranks,
            grid=self.grid,
            groups=job.groups,
            architecture=job.architecture,
            tokenizer=job.prompts.decoder,
            job_store=job.job_store,
            leaves="rollout" in leaving_roles(offload),
        )

    def leave(self) -> None:
        """Give up keys and values. Responses that are unfinished go on from their tokens when the rollout is back."""
        self.training.groups.suspend()
        self.engine.release_cache()

    def close(self) -> None:
        """End what the engine has outside of this process."""
        self.engine.close()

    def save_state(self) -> Mapping[str, Contents]:
        """What of the stream of prompts is unfinished or not yet handed over, on each engine's first rank.

        Nothing where the rollout is there for evaluations alone. Where a checkpoint is saved the order lets no weight
        sync come in between.
        """
        if not algorithm_of(self.config).generates:
            return {}
        carried = self.training.carried()
        return {f"engine_{self.dp:05d}.safetensors": carried.contents()} if self.turns.is_leader else {}

    def generate(self, step: int, chunk: int) -> Metrics:
        """Draw a chunk of the step's responses from the training prompts. Collective over: this engine's ranks."""
        if chunk == 0:
            self.step_start_s, self.step_response_tokens = time.perf_counter(), 0
            self.training.longest_step_s = 0.0
        self._enter(step, chunk)
        chunk_target = ChunkTarget(*self._log(step, chunk), max_position=partial(self._horizon, step))
        finished, drawn = self.training.run(chunk_target)
        self._ship("samples", step, chunk, finished, drawn)
        self.step_response_tokens += sum(group.num_response_tokens for group in finished)
        if chunk < self.job.shape.num_chunks - 1:
            return {}
        seconds = time.perf_counter() - self.step_start_s
        return {
            "perf/rollout_tokens_per_s": self.step_response_tokens / seconds,
            "rollout/response_tokens": self.step_response_tokens,
            "perf/decode_step_max_s": self.training.longest_step_s,
        }

    def generate_evaluation(self, step: int, chunk: int) -> None:
        """Decode every held-out prompt greedily. Collective over: this engine's ranks."""
        evaluation = self.job.prompts.evaluation
        assert evaluation is not None, "the order evaluates only where data.eval is set"
        self.training.groups.suspend()
        num_prompts, log = len(evaluation), f"evaluation {step}"
        drawing = self._drawing(
            PromptGroups(
                self.engine,
                self._sampling_params(GREEDY),
                partial(self._prompt, evaluation, 1, lambda position: (step, position)),
                num_samples=1,
            ),
            StaticAssignment(self.dp, self.grid.dp),
            per_chunk=num_prompts,
            chunks_per_log=1,
            log_of=lambda position: log,
        )
        self._ship(
            "evaluation_samples", step, chunk, *drawing.run(ChunkTarget(log, 0, max_position=lambda: num_prompts))
        )

    def _hand(self) -> Hand:
        """What this engine begins with: of what was saved, on however many engines, its share."""
        resumed = self.job.resumed
        saved = resumed.files(self.name) if resumed and resumed.continues else []
        if not saved:
            return Hand.at(self.job.first_step * self.config.batch.prompts_per_step)
        return deal([RolloutState.from_contents(read_contents(path)) for path in saved], self.grid.dp)[self.dp]

    def _training(self, hand: Hand) -> GenerationLoop:
        """The stream of training prompts, from `hand` on."""
        batch, sampling = self.config.batch, self.config.rollout.sampling
        prompts, per_step = self.job.prompts, self.config.batch.prompts_per_step
        prompt_deal: PromptAssignment = StaticAssignment(self.dp, self.grid.dp, hand.next_position, hand.returned)
        if self.job.shape.shares_prompts:
            prompt_deal = SharedAssignment(self.job.world.store, hand.next_position, hand.returned)
        drawing = self._drawing(
            PromptGroups(
                self.engine,
                self._sampling_params(sampling.model_dump(include={"temperature", "top_p", "top_k"})),
                partial(
                    self._prompt,
                    prompts.train,
                    batch.samples_per_prompt,
                    lambda position: (position // per_step, prompts.order.row(position)),
                ),
                num_samples=batch.samples_per_prompt,
            ),
            prompt_deal,
            per_chunk=per_step // self.job.shape.num_chunks,
            chunks_per_log=None if self.config.schedule.partial_rollouts else self.job.shape.num_chunks,
            log_of=lambda position: self._log(position // per_step, 0)[0],
        )
        drawing.resume(hand.carried)
        return drawing

    def _drawing(
        self,
        groups: PromptGroups,
        deal: PromptAssignment,
        *,
        per_chunk: int,
        chunks_per_log: int | None,
        log_of: Callable[[int], str],
    ) -> GenerationLoop:
        return GenerationLoop(
            groups,
            deal,
            CompletionLog(self.job.world.store, per_chunk, len(self.grid.ranks), chunks_per_log),
            self.turns,
            self.job.waiter,
            ranks=[rank for rank in self.grid.ranks if rank not in self.engine_ranks],
            log_of=log_of,
            sync_is_due=lambda: self.in_flight is not None and self.in_flight.is_due(),
            sync=lambda: self.in_flight.join() if self.in_flight else None,
            advance=self.job.heartbeat.advance,
        )

    def _enter(self, step: int, chunk: int) -> None:
        """Ranks of an engine meet before its first decode step: their leader may still have a sync to join."""
        if self.in_flight is None or self.turns.group is None:
            return
        in_flight = self.in_flight
        in_flight.enter()
        poll(
            self.job.waiter,
            lambda: in_flight.leader_has_entered() or None,
            f"generate[{step}.{chunk}] of its engine",
            self.engine_ranks[:1],
            serve=in_flight.join_before_leader_enters,
        )

    def _log(self, step: int, chunk: int) -> tuple[str, int]:
        """Where the groups of a chunk are entered: which log, and which chunk of it."""
        if self.config.schedule.partial_rollouts:
            return "run", (step - self.first_generated) * self.job.shape.num_chunks + chunk
        return f"step {step}", chunk

    def _check(self, carried: RolloutState) -> None:
        """CheckpointError where this run cannot go on with what was carried over."""
        job, batch, limits = self.job, self.config.batch, self.config.rollout
        num_steps, rest = divmod(len(carried.consumed), batch.prompts_per_step)
        if rest or not job.first_step <= num_steps <= job.first_step + self.job.shape.lead:
            raise CheckpointError(
                f"The checkpoint holds a rollout that had handed over {len(carried.consumed)} prompts by step "
                f"{job.first_step}; expected batch.prompts_per_step {batch.prompts_per_step} for each step, at most "
                f"{self.job.shape.lead} steps ahead. Go on with the batch and schedule that it was saved with."
            )
        for group in carried.begun:
            requests = group.prompt.requests
            if len(requests) != batch.samples_per_prompt:
                raise CheckpointError(
                    f"The checkpoint holds unfinished prompts of {len(requests)} samples each; expected "
                    f"{batch.samples_per_prompt}. Set batch.samples_per_prompt to {len(requests)}."
                )
            for request in requests:
                limit = response_limit(request, self.training.groups.sampling, limits.max_context_tokens)
                if request.drawn and len(request.drawn.tokens) >= limit:
                    raise CheckpointError(
                        f"The checkpoint holds an unfinished response of {len(request.drawn.tokens)} tokens; expected "
                        f"fewer than {limit}. Set rollout.sampling.max_response_tokens and rollout.max_context_tokens "
                        "to what they were when it was saved."
                    )

    def _horizon(self, step: int) -> int:
        """The first position that may not be begun during this step's generate."""
        config, per_step = self.config, self.config.batch.prompts_per_step
        max_position = (step + 1) * per_step
        if config.schedule.partial_rollouts:
            max_position += math.ceil(config.schedule.oversampling * per_step)
        elif self.job.shape.syncs_in_flight and self._is_fresh_enough_for(step + 1):
            max_position += per_step  # slots that this step's last responses leave idle
        return min(max_position, config.steps * per_step)

    def _is_fresh_enough_for(self, step: int) -> bool:
        version = self.engine.policy_version
        return version is not None and version >= step - self.config.schedule.max_staleness

    def _prompt(
        self, dataset: PromptDataset, num_samples: int, at: Callable[[int], tuple[int, int]], position: int
    ) -> Prompt:
        """The requests of the group at `position`, for which `at` gives step and row."""
        step, row = at(position)
        prompt = dataset.prompt_tokens(row)
        requests = tuple(
            Request(position * num_samples + sample, prompt, request_seed(self.config.seed, step, row, sample))
            for sample in range(num_samples)
        )
        return Prompt(position, row, requests)

    def _ship(
        self, transfer: str, step: int, chunk: int, finished: Sequence[Finished], drawn: Sequence[FinishedGroup]
    ) -> None:
        """Leave what this engine drew to be sent; groups are numbered by their place among those of the chunk."""
        number = {group.position: index for index, group in enumerate(finished)}
        experience = pack_groups(drawn, [number[group.position] for group in drawn])
        group_tokens = torch.tensor([group.num_tokens for group in finished])
        self.shipments[transfer, step, chunk] = Shipment(experience.columns(), group_tokens)

    def _sampling_params(self, how: Mapping[str, float]) -> SamplingParams:
        sampling = self.config.rollout.sampling
        return SamplingParams(
            temperature=how["temperature"],
            top_p=how["top_p"],
            top_k=int(how["top_k"]),
            max_response_tokens=sampling.max_response_tokens,
            stop_token_ids=self.job.architecture.eos_token_ids,
            stop=sampling.stop,
        )
