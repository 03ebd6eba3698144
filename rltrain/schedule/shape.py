"""The shape of a run: what follows from the config for the order of tasks and for the batches that they work on."""

from dataclasses import dataclass

from rltrain.algorithms.registry import algorithm_of
from rltrain.config.schema import Config

DEFAULT_CHUNKS = 4


@dataclass(frozen=True)
class RunShape:
    """Numbers that several roles and the order of tasks share; `of` derives all of them."""

    lead: int
    """Steps by which generation is ahead of training. Weights are up to sync_every - 1 steps old when they come."""
    syncs_in_flight: bool
    """Whether engines take new weights between two decode steps."""
    draws_during_syncs: bool
    """Whether engines may have responses under way when weights come: in flight, or where partial rollouts go on."""
    shares_prompts: bool
    """Whether engines take prompts as they get free; otherwise which engine draws what is fixed beforehand."""
    num_chunks: int
    """Parts of a step that travel on their own."""
    samples_per_group: int
    """Samples of one prompt that are trained on."""
    greedy_per_group: int
    """Samples of one prompt that are drawn greedily beside them."""
    prompt_blocks: int
    """Blocks of prompts of which each mini-batch takes one; 1 where it takes samples of every prompt."""
    chunk_blocks: int
    """Of these blocks, how many lie in one chunk; 1 where a block takes several chunks."""
    first_actor_step: int
    """The first step in which the actor learns."""
    num_actor_updates: int
    """Optimizer steps of the actor in the whole run."""
    needs_actor_logprobs: bool
    """Whether the actor evaluates the samples before its first update."""
    accumulates_critic: bool
    """Whether gradients of a step's first chunks are made while its last ones decode."""
    accumulates_actor: bool
    """As for the critic, where advantages do not depend on chunks yet to come."""

    @classmethod
    def of(cls, config: Config) -> "RunShape":
        """Also of a config that is yet to be refused: its lead may then be below 0."""
        algorithm, schedule, batch = algorithm_of(config), config.schedule, config.batch
        pipelined = schedule.mode == "pipelined"
        lead = schedule.max_staleness + 1 - schedule.sync_every if schedule.mode == "asynchronous" else 0
        syncs_in_flight = lead > 0 and schedule.in_flight_sync
        num_chunks = schedule.chunks or (DEFAULT_CHUNKS if pipelined else 1)
        prompt_blocks = max(batch.mini_batches // algorithm.samples_per_group(), 1)
        accumulates = num_chunks > 1 and batch.mini_batches == 1
        return cls(
            lead=lead,
            syncs_in_flight=syncs_in_flight,
            draws_during_syncs=syncs_in_flight or schedule.partial_rollouts,
            shares_prompts=pipelined or syncs_in_flight,
            num_chunks=num_chunks,
            samples_per_group=algorithm.samples_per_group(),
            greedy_per_group=algorithm.greedy_samples_per_group(),
            prompt_blocks=prompt_blocks,
            chunk_blocks=max(prompt_blocks // num_chunks, 1),
            first_actor_step=algorithm.first_actor_step(),
            num_actor_updates=max(config.steps - algorithm.first_actor_step(), 1) * batch.mini_batches,
            needs_actor_logprobs=algorithm.needs_actor_logprobs(),
            accumulates_critic=accumulates,
            accumulates_actor=accumulates and not algorithm.needs_whole_step(),
        )
