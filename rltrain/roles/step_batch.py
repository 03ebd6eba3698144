"""A step's samples on one replica of a training role: they come in chunks and are used in mini-batches."""

import torch

from rltrain.config.schema import Config
from rltrain.data.experience import Experience, join, mini_batch_of
from rltrain.schedule.shape import RunShape
from rltrain.training.backend import OVERFLOWED, SKIPPED


class StepBatch:
    """Chunks in the order of arrival. In a step chunk c's groups follow those of chunk c - 1."""

    def __init__(self, config: Config) -> None:
        self.config, self.shape = config, RunShape.of(config)
        self.chunks: dict[int, Experience] = {}
        self.mini_batch = torch.empty(0)
        """[samples] of each sample that was taken last."""

    def add(self, chunk: int, experience: Experience) -> None:
        """Chunk 0 begins a step, whatever became of the one before."""
        if chunk == 0:
            self.chunks = {}
        self.chunks[chunk] = experience

    def take(self) -> Experience:
        """All chunks as one, whose group ids are the groups' places in the step; the next step begins with none."""
        chunks, self.chunks = sorted(self.chunks.items()), {}
        parts = [part.with_fields(group_ids=self._groups_of(chunk, part)) for chunk, part in chunks]
        self.mini_batch = torch.cat([self._mini_batch_of(part) for part in parts])
        return join(parts)

    def mini_batches(self, experience: Experience) -> list[Experience]:
        """The samples that were taken last, a mini-batch for each of the step's optimizer steps: all of them, in one
        order, in each pass."""
        batch = self.config.batch
        numbers = range(batch.mini_batches)
        return [experience.select(torch.nonzero(self.mini_batch == i).flatten()) for i in numbers] * batch.epochs

    def _groups_of(self, chunk: int, experience: Experience) -> torch.Tensor:
        """[samples] their places in the step."""
        return experience.group_ids + chunk * (self.config.batch.prompts_per_step // self.shape.num_chunks)

    def _mini_batch_of(self, experience: Experience) -> torch.Tensor:
        batch, samples = self.config.batch, self.shape.samples_per_group
        return mini_batch_of(
            experience.group_ids, batch.prompts_per_step, samples, batch.mini_batches, self.shape.prompt_blocks
        )


def summarize(updates: list[dict[str, float]], first_only: frozenset[str] = frozenset()) -> dict[str, float]:
    """A step's metrics from those of its optimizer steps: maxima for names ending in _max, means for the others, what
    only the first can tell from that, and how many were skipped.

    What skipped ones say is not finite, and is left out unless there are no others.
    """
    made = [update for update in updates if not update[SKIPPED]] or updates
    summary = {}
    for name in made[0]:
        values = [update[name] for update in made]
        summary[name] = max(values) if name.endswith("_max") else sum(values) / len(values)
        if name in first_only:
            summary[name] = values[0]
    counts = (name for name in (SKIPPED, OVERFLOWED) if name in made[0])
    return summary | {name: sum(update[name] for update in updates) for name in counts}
