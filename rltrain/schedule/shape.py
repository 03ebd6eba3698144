"""The shape of a run: numbers derived from the config for the order of tasks and for their batches."""

from dataclasses import dataclass

from rltrain.algorithms.registry import algorithm_of
from rltrain.config.schema import Batch, Config

DEFAULT_CHUNKS = 4


@dataclass(frozen=True)
class RunShape:
    """Numbers shared by several roles and the order of tasks. `of` derives them from the config."""

    lead: int
    """Steps by which generation is ahead of training. New weights arrive with an age of up to sync_every - 1 steps."""
    syncs_in_flight: bool
    """Whether engines take new weights between two decode steps."""
    draws_during_syncs: bool
    """Whether engines may have running responses when weights arrive, by in-flight syncs or partial rollouts."""
    shares_prompts: bool
    """Whether engines share a queue of prompts. Otherwise each prompt's engine is fixed in advance."""
    replays_rollout: bool
    """Whether the engines' choices of experts are sent with the samples."""
    sees: bool
    """Whether samples have images, by model.vision."""
    selects_groups: bool
    """Whether finished groups are selected by their rewards."""
    num_chunks: int
    """Number of chunks of a step. Each chunk is sent separately."""
    from_pairs: bool
    """Whether training and evaluations use pairs of responses. Pairs are never split."""
    samples_per_group: int
    """Number of samples per prompt in training."""
    greedy_per_group: int
    """Number of greedily generated samples per prompt in addition to these."""
    prompt_blocks: int
    """Number of equal blocks of prompts of a step. Each mini-batch takes samples of one block. 1 if it takes samples of
    every prompt."""
    chunk_blocks: int
    """Number of these blocks in one chunk. 1 if a block takes several chunks."""
    first_actor_step: int
    """The first step in which the actor learns."""
    updates_per_step: int
    """Optimizer steps of a role in a step in which it learns: one per mini-batch and epoch."""
    num_actor_updates: int
    """Optimizer steps of the actor in the whole run."""
    longest_response: int | None
    """Limit of tokens per response in training. None if only the model's positions limit it."""
    needs_actor_logprobs: bool
    """Whether the actor computes log-probs of the samples before its first update."""
    accumulates_critic: bool
    """Whether the critic computes gradients of a step's first chunks before its last chunks are generated."""
    accumulates_actor: bool
    """The same for the actor. False if advantages or loss weights of a chunk depend on later chunks."""

    @classmethod
    def of(cls, config: Config) -> "RunShape":
        """Derives the shape of a config. The config may still be invalid. Then the lead can be negative."""
        algorithm, schedule, batch = algorithm_of(config), config.schedule, config.batch
        pipelined = schedule.mode == "pipelined"
        ahead = min(schedule.max_staleness + 1 - schedule.sync_every, config.steps)
        lead = ahead if schedule.mode == "asynchronous" else 0
        syncs_in_flight = lead > 0 and schedule.in_flight_sync
        num_chunks = schedule.chunks or (DEFAULT_CHUNKS if pipelined else 1)
        samples = 1 if algorithm.from_pairs else algorithm.samples_per_group()
        prompt_blocks = prompt_blocks_of(batch, samples) or 1
        updates_per_step = batch.mini_batches * batch.epochs
        accumulates = num_chunks > 1 and updates_per_step == 1
        needs_whole_step = algorithm.needs_whole_step() or config.loss.correction.normalize is not None
        return cls(
            lead=lead,
            syncs_in_flight=syncs_in_flight,
            draws_during_syncs=syncs_in_flight or schedule.partial_rollouts,
            shares_prompts=pipelined or syncs_in_flight,
            replays_rollout=config.model.router_replay == "rollout",
            sees=config.model.vision is not None,
            selects_groups=batch.dynamic_sampling is not None,
            num_chunks=num_chunks,
            from_pairs=algorithm.from_pairs,
            samples_per_group=algorithm.samples_per_group(),
            greedy_per_group=algorithm.greedy_samples_per_group(),
            prompt_blocks=prompt_blocks,
            chunk_blocks=max(prompt_blocks // num_chunks, 1),
            first_actor_step=algorithm.first_actor_step(),
            updates_per_step=updates_per_step,
            num_actor_updates=max(config.steps - algorithm.first_actor_step(), 1) * updates_per_step,
            longest_response=algorithm.longest_response(),
            needs_actor_logprobs=algorithm.needs_actor_logprobs(),
            accumulates_critic=accumulates,
            accumulates_actor=accumulates and not needs_whole_step,
        )


def prompt_blocks_of(batch: Batch, samples_per_group: int) -> int | None:
    """Returns the smallest number of equal blocks of prompts such that every block has the same number of mini-batches.

    The mini-batches of a block share its groups by samples. With `mini_batches_by: prompts` there is one block per
    mini-batch. Returns None if no number works.
    """
    first = batch.mini_batches if batch.mini_batches_by == "prompts" else 1
    for blocks in range(first, min(batch.mini_batches, batch.prompts_per_step) + 1):
        parts, rest = divmod(batch.mini_batches, blocks)
        if not rest and batch.prompts_per_step % blocks == 0 and samples_per_group % parts == 0:
            return blocks
    return None
