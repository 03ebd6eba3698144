"""A step's samples on one replica of a training role: they come in chunks and are used in mini-batches."""

import torch

from rltrain.config.schema import Config
from rltrain.data.assignment import mini_batch_of
from rltrain.data.experience import Experience, join
from rltrain.schedule.shape import RunShape


class StepBatch:
    """Chunks in the order of arrival. Group ids count through the step: chunk c's follow those of chunk c - 1."""

    def __init__(self, config: Config) -> None:
        self.config, self.shape = config, RunShape.of(config)
        self.chunks: dict[int, Experience] = {}

    def add(self, chunk: int, experience: Experience) -> None:
        """Chunk 0 begins a step, whatever became of the one before."""
        if chunk == 0:
            self.chunks = {}
        groups_per_chunk = self.config.batch.prompts_per_step // self.shape.num_chunks
        self.chunks[chunk] = experience.with_fields(group_ids=experience.group_ids + chunk * groups_per_chunk)

    def take(self) -> Experience:
        """All chunks as one; the next step begins with none."""
        parts = [self.chunks[chunk].columns() for chunk in sorted(self.chunks)]
        self.chunks = {}
        return Experience(**join(parts))

    def mini_batches(self, experience: Experience) -> list[Experience]:
        """The step's samples by mini-batch."""
        batch = self.config.batch
        numbers = mini_batch_of(
            experience.group_ids, batch.prompts_per_step, self.shape.samples_per_group, batch.mini_batches
        )
        return [experience.select(torch.nonzero(numbers == i).flatten()) for i in range(batch.mini_batches)]


def summarize(updates: list[dict[str, float]], first_only: frozenset[str] = frozenset()) -> dict[str, float]:
    """A step's metrics from those of its mini-batches: maxima for names ending in _max, means for the others, and what
    only the first mini-batch can tell from that."""
    summary = {}
    for name in updates[0]:
        values = [update[name] for update in updates]
        summary[name] = max(values) if name.endswith("_max") else sum(values) / len(values)
        if name in first_only:
            summary[name] = values[0]
    return summary
