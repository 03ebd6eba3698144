"""Demonstrated responses as Experience, for algorithm: sft."""

from collections.abc import Sequence
from functools import lru_cache

import torch

from rltrain.config import schema
from rltrain.data.experience import Experience
from rltrain.data.index_making import IndexFolder
from rltrain.data.prompt_stream import prompt_order
from rltrain.data.prompts import PromptDataset, load_sampled
from rltrain.data.tokenizer import UNKNOWN_MODEL, ModelLimits, load_encoder


class Demonstrations:
    """The demonstrations of data.train, step by step, and those of data.eval where an evaluation is their loss."""

    def __init__(
        self, config: schema.Config, indexes: IndexFolder | None = None, model: ModelLimits = UNKNOWN_MODEL
    ) -> None:
        """`indexes` and `model` as in load_prompts."""
        encoder, data = load_encoder(config), config.data
        files = {"data.train": data.train, "data.eval": data.eval if config.scores_held_out else None}
        self.datasets = load_sampled(config, files, "response", encoder, indexes, model)
        self.dataset = self.datasets["data.train"]
        self.order = prompt_order(self.dataset, config)
        self.first_step = 0
        """The one that takes the first rows."""
        self.prompts_per_step = config.batch.prompts_per_step
        self._held_out = lru_cache(maxsize=1)(self._load_held_out)

    def for_step(self, step: int, *, part: int = 0, num_parts: int = 1) -> Experience:
        """Every num_parts-th demonstration of the step, from `part` on; the parts together are the step's batch."""
        positions = range(part, self.prompts_per_step, num_parts)
        rows = self.order.rows_for_step(step - self.first_step, self.prompts_per_step)
        return load_sft_batch(
            self.dataset,
            [rows[position] for position in positions],
            sample_ids=[step * self.prompts_per_step + position for position in positions],
            group_ids=positions,
        )

    def held_out(self, *, part: int = 0, num_parts: int = 1) -> Experience:
        """Every num_parts-th demonstration of data.eval, from `part` on."""
        return self._held_out(part, num_parts)

    def _load_held_out(self, part: int, num_parts: int) -> Experience:
        held_out = self.datasets["data.eval"]
        rows = range(part, len(held_out), num_parts)
        return load_sft_batch(held_out, rows, sample_ids=rows, group_ids=rows)


def load_sft_batch(
    dataset: PromptDataset,
    rows: Sequence[int],
    *,
    sample_ids: Sequence[int],
    group_ids: Sequence[int],
) -> Experience:
    """Samples of prompt, response and end-of-sequence token, with response_mask on the latter two; of a conversation
    the response is all behind its first prompt, and the mask is on the assistant's turns.

    A sample of more tokens than `dataset.limit` allows is cut there, and ends without an end-of-sequence token.
    Log-probs and policy versions are 0: nothing drew these tokens.
    """
    tokens: list[int] = []
    mask: list[bool] = []
    lengths, truncated = [], []
    for row in rows:
        [(whole, learnt)] = dataset.samples(row)
        end = dataset.limit.kept(learnt)
        tokens += whole[:end]
        mask += learnt[:end]
        lengths.append(end)
        truncated.append(len(whole) > end)
    return Experience(
        sample_ids=torch.tensor(list(sample_ids), dtype=torch.int64),
        group_ids=torch.tensor(list(group_ids), dtype=torch.int64),
        prompt_ids=torch.tensor(list(rows), dtype=torch.int64),
        lengths=torch.tensor(lengths, dtype=torch.int64),
        truncated=torch.tensor(truncated, dtype=torch.bool),
        tokens=torch.tensor(tokens, dtype=torch.int64),
        response_mask=torch.tensor(mask, dtype=torch.bool),
        policy_version=torch.zeros(len(tokens), dtype=torch.int32),
        rollout_logprobs=torch.zeros(len(tokens)),
    )
