"""The base of trained roles: a model, the batch of a step, and a check that replicas agree."""

import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from rltrain.checkpoint.run_files import Contents
from rltrain.config import schema
from rltrain.config.schema import Config
from rltrain.data.experience import Experience, join, mini_batch_of
from rltrain.errors import ReplicaError
from rltrain.reshard.checksums import checksum_of
from rltrain.reshard.layout import Layout
from rltrain.roles.role import Job, Role
from rltrain.schedule.shape import RunShape
from rltrain.training.backend import training_backend
from rltrain.training.trainable import LOSS_SCALE, OVERFLOWED, RATIO, SKIPPED, TOO_FAR, RoleModel

# A step's samples on one replica of a trained role. They come in chunks and are used in mini-batches.


class StepBatch:
    """The chunks of a step, in the order of arrival. Within the step, the groups of chunk c follow those of chunk c -
    1."""

    def __init__(self, config: Config) -> None:
        self.config, self.shape = config, RunShape.of(config)
        self.chunks: dict[int, Experience] = {}
        self.mini_batch = torch.empty(0)
        """Mini-batch of each sample of the last `take`, shape [samples]."""

    def add(self, chunk: int, experience: Experience) -> None:
        """Adds a chunk. Chunk 0 begins a new step and discards all earlier chunks."""
        if chunk == 0:
            self.chunks = {}
        self.chunks[chunk] = experience

    def take(self) -> Experience:
        """Returns all chunks as one experience, with group ids counted within the step. The batch
        is empty afterwards."""
        chunks, self.chunks = sorted(self.chunks.items()), {}
        parts = [part.with_fields(group_ids=self._groups_of(chunk, part)) for chunk, part in chunks]
        self.mini_batch = torch.cat([self._mini_batch_of(part) for part in parts])
        return join(parts)

    def mini_batches(self, experience: Experience) -> list[Experience]:
        """Returns the samples of the last `take` as one mini-batch per optimizer step. Every pass has all of them, in
        the same order."""
        batch = self.config.batch
        numbers = range(batch.mini_batches)
        return [experience.select(torch.nonzero(self.mini_batch == i).flatten()) for i in numbers] * batch.epochs

    def _groups_of(self, chunk: int, experience: Experience) -> torch.Tensor:
        """Returns group ids counted within the step, shape [samples]."""
        return experience.group_ids + chunk * (self.config.batch.prompts_per_step // self.shape.num_chunks)

    def _mini_batch_of(self, experience: Experience) -> torch.Tensor:
        batch, samples = self.config.batch, self.shape.samples_per_group
        return mini_batch_of(
            experience.group_ids, batch.prompts_per_step, samples, batch.mini_batches, self.shape.prompt_blocks
        )


def summarize(updates: list[dict[str, float]], first_only: frozenset[str] = frozenset()) -> dict[str, float]:
    """Returns a step's metrics, combined from the metrics of its optimizer steps.

    Names ending in _max get the maximum, others the mean. Names in `first_only` get the value of the first optimizer
    step. Skipped and overflowed steps are counted. Skipped steps have values that are not finite, so they are left out
    unless all steps were skipped.
    """
    made = [update for update in updates if not update[SKIPPED]] or updates
    summary = {}
    for name in made[0]:
        values = [update[name] for update in made]
        summary[name] = max(values) if name.endswith("_max") else sum(values) / len(values)
        if name in first_only:
            summary[name] = values[0]
    counts = (name for name in (SKIPPED, OVERFLOWED, TOO_FAR) if name in made[0])
    return summary | {name: sum(update[name] for update in updates) for name in counts}


# The check that replicas of a trained model still hold equal values. It names the rank at fault.


@dataclass(frozen=True)
class OddRank:
    """A rank with other values of `parameter` than its replicas `others`.

    If `is_alone`, most replicas agree with each other. Otherwise it is unknown which side is wrong.
    """

    rank: int
    parameter: str
    others: tuple[int, ...]
    is_alone: bool

    def __str__(self) -> str:
        ranks = f"rank{'s' * (len(self.others) > 1)} {', '.join(map(str, self.others))}"
        if self.is_alone:
            return f"rank {self.rank} holds other values of {self.parameter} than {ranks}, which agree"
        return f"rank {self.rank} and {ranks} hold different values of {self.parameter}, and either may be wrong"


class ReplicaCheck:
    """A comparison of checksums between ranks with equal parts of a role's model, every so many steps."""

    def __init__(self, every: int, role: str, rank: int, group: dist.ProcessGroup) -> None:
        """`every` is the number of steps between checks; 0 means never. `group` has the role's ranks and uses host
        memory."""
        self._every, self._role, self._rank, self._group = every, role, rank, group

    def check(self, step: int, model: RoleModel) -> None:
        """Runs after the updates of `step`. Raises ReplicaError on all ranks if replicas differ. Collective over: the
        role's ranks."""
        if not self._every or (step + 1) % self._every:
            return
        for layout, tensors in held_by(model):
            if odd := self._odd_rank(layout, tensors):
                raise ReplicaError(
                    f"step {step}: replicas of the {self._role} are no longer equal (checks.replicas): {odd}. A GPU, "
                    "or its host's memory or network, gives wrong numbers: remove the host and start the job again. "
                    "This step is not saved. Checkpoints saved since the last comparison may be wrong too; "
                    "checkpoint.resume selects an earlier one."
                )

    def _odd_rank(self, layout: Layout, tensors: Mapping[str, Tensor]) -> OddRank | None:
        names = [[name for name, _ in layout.on(rank).parameters] for rank in layout.ranks]
        mine = names[layout.ranks.index(self._rank)]
        sums = torch.zeros(max(map(len, names)), dtype=torch.int64)
        sums[: len(mine)] = torch.tensor([checksum_of(tensors[name].contiguous()) for name in mine], dtype=torch.int64)
        told = [torch.empty_like(sums) for _ in layout.ranks]
        dist.all_gather(told, sums, group=self._group)
        return find_odd_rank(layout.ranks, layout.parts, names, [one.tolist() for one in told])


def held_by(model: RoleModel) -> Iterator[tuple[Layout, Mapping[str, Tensor]]]:
    """Yields the layouts of a model with this rank's tensors."""
    yield model.layout, model.parameters
    if model.adapted:
        yield model.adapted.layout, model.adapted.parameters


def find_odd_rank(
    ranks: Sequence[int], parts: Sequence[int], names: Sequence[Sequence[str]], sums: Sequence[Sequence[int]]
) -> OddRank | None:
    """Returns the first difference between ranks with the same part of the model, or None if all agree.

    `names` and `sums` are by rank, in the order of `ranks`. A rank's sums follow the order of its names. Any further
    sums are padding.
    """
    for part in dict.fromkeys(parts):
        members = [index for index, of_rank in enumerate(parts) if of_rank == part]
        for number, name in enumerate(names[members[0]]):
            counts = Counter(sums[index][number] for index in members)
            if len(counts) == 1:
                continue
            (usual, most), (_, next_most) = counts.most_common(2)
            odd = next(index for index in reversed(members) if sums[index][number] != usual)
            agreeing = [ranks[index] for index in members if sums[index][number] == usual]
            return OddRank(ranks[odd], name, tuple(agreeing), is_alone=most > next_most)
    return None


# The base class of trained roles: a model with its optimizer, and its state in checkpoints.

logger = logging.getLogger(__name__)


class TrainedRole(Role):
    """A role with a trained model.

    `model` starts from the role's checkpoint. In a resumed run it starts from the saved training state.
    """

    def __init__(self, job: Job, settings: schema.Trained, *, total_updates: int) -> None:
        """Collective over: the role's ranks."""
        super().__init__(job)
        state = job.resumed.files(self.name) if job.resumed else None
        self.model = training_backend(job.config, self.name).trained_model(
            job.model_site(self.name), settings, total_updates=total_updates, state=state
        )
        self.parts = self.model.parts
        group = job.groups.cpu[self.grid.ranks]
        self.replicas = ReplicaCheck(job.config.checks.replicas, self.name, job.world.rank, group)

    def warn_of_skipped(self, step: int, updates: Sequence[Mapping[str, float]]) -> None:
        """Warns on the role's leader about optimizer steps without effect."""
        if self.job.world.rank != self.leader:
            return
        overflowed = sum(bool(update.get(OVERFLOWED)) for update in updates)
        if overflowed:
            logger.warning(
                "step %d: gradients of %d of the %s's %d optimizer steps overflowed in float16; they changed only "
                "the loss scale, now %g (%s.optimizer.loss_scale)",
                *(step, overflowed, self.name, len(updates), updates[-1][LOSS_SCALE], self.name),
            )
        far = [update[RATIO] for update in updates if update.get(TOO_FAR)]
        if far:
            logger.warning(
                "step %d: %d of the %s's %d optimizer steps had a mean ratio up to %g and changed nothing "
                "(on_divergence.max_ratio %g)",
                *(step, len(far), self.name, len(updates), max(far), self.config.on_divergence.max_ratio),
            )
        skipped = sum(bool(update[SKIPPED]) for update in updates) - overflowed - len(far)
        if skipped:
            logger.warning(
                "step %d: %d of the %s's %d optimizer steps had a loss or a gradient norm that was not finite, and "
                "changed nothing (on_divergence.max_skipped %d)",
                *(step, skipped, self.name, len(updates), self.config.on_divergence.max_skipped),
            )

    def save_state(self) -> Mapping[str, Contents]:
        """Returns this rank's share of weights and optimizer state. The next call overwrites the same memory."""
        return {f"rank_{self.job.world.rank:05d}.safetensors": self.model.save_state()}

    def take_copying_s(self) -> float:
        return self.model.take_copying_s()
