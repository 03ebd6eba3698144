"""The shape of a run: what follows from the config for the order of tasks and for the batches that they work on."""

from dataclasses import dataclass

from rltrain.algorithms.registry import algorithm_of
from rltrain.config.schema import Batch, Config

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
    replays_rollout: bool
    """Whether the experts that engines chose travel with the samples."""
    selects_groups: bool
    """Whether finished groups count only once their rewards are known, and not all of them."""
    num_chunks: int
    """Parts of a step that travel on their own."""
    from_pairs: bool
    """Whether training and evaluations are on pairs, which are never cut in two."""
    samples_per_group: int
    """Samples of one prompt that are trained on."""
    greedy_per_group: int
    """Samples of one prompt that are drawn greedily beside them."""
    prompt_blocks: int
    """Equal runs of prompts, of one of which each mini-batch takes samples; 1 where it takes some of every prompt."""
    chunk_blocks: int
    """Of these blocks, how many lie in one chunk; 1 where a block takes several chunks."""
    first_actor_step: int
    """The first step in which the actor learns."""
    updates_per_step: int
    """Optimizer steps of a role in a step in which it learns: one per mini-batch and pass over them."""
    num_actor_updates: int
    """Optimizer steps of the actor in the whole run."""
    longest_response: int | None
    """Tokens of a response that is trained on. None: the model's positions alone limit it."""
    needs_actor_logprobs: bool
    """Whether the actor evaluates the samples before its first update."""
    accumulates_critic: bool
    """Whether gradients of a step's first chunks are made while its last ones decode."""
    accumulates_actor: bool
    """As for the critic, where neither advantages nor weights depend on chunks yet to come."""

    @classmethod
    def of(cls, config: Config) -> "RunShape":
        """Also of a config that is yet to be refused: its lead may then be below 0."""
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
    """The fewest equal blocks of prompts such that each has an equal number of the mini-batches, which share its groups
    out by samples; as many as there are mini-batches where these are to take whole prompts. None: there is none."""
    first = batch.mini_batches if batch.mini_batches_by == "prompts" else 1
    for blocks in range(first, min(batch.mini_batches, batch.prompts_per_step) + 1):
        parts, rest = divmod(batch.mini_batches, blocks)
        if not rest and batch.prompts_per_step % blocks == 0 and samples_per_group % parts == 0:
            return blocks
    return None
