"""Demonstrations, and pairs of responses, as Experience for algorithms that learn from given texts."""

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from rltrain.config import schema
from rltrain.data.experience import Experience, assign_groups
from rltrain.data.prompt_order import prompt_order
from rltrain.data.prompt_rows import Response
from rltrain.data.prompts import PromptDataset, load_sampled
from rltrain.data.row_index import IndexFolder
from rltrain.data.tokenizer import UNKNOWN_MODEL, ModelLimits, load_encoder

# Demonstrated responses as Experience, for algorithm: sft.


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


# Pairs of responses to one prompt, of which one was preferred, as Experience: for algorithms dpo and reward_model.


class Preferences:
    """The pairs of data.train, step by step, and all those of data.eval.

    A pair is a group of two samples: the chosen one, then the rejected one. Groups are dealt out as the exchange deals
    them out, by the length of their texts, so that nobody encodes what others train on.
    """

    def __init__(
        self, config: schema.Config, indexes: IndexFolder | None = None, model: ModelLimits = UNKNOWN_MODEL
    ) -> None:
        """`indexes` and `model` as in load_prompts."""
        encoder, data = load_encoder(config), config.data
        files = {"data.train": data.train, "data.eval": data.eval}
        self.datasets = load_sampled(config, files, "pair", encoder, indexes, model)
        self.train = self.datasets["data.train"]
        self.order = prompt_order(self.train, config)
        self.first_step = 0
        """The one that takes the first rows."""
        self.pairs_per_step, self.num_mini_batches = config.batch.prompts_per_step, config.batch.mini_batches
        # Roles that share ranks and replicas ask for the same.
        self._of_step = lru_cache(maxsize=1)(self._load_step)
        self._held_out = lru_cache(maxsize=2)(self._load_held_out)

    def for_step(self, step: int, *, part: int = 0, num_parts: int = 1) -> Experience:
        """The step's pairs on replica `part` of `num_parts`."""
        return self._of_step(step, part, num_parts)

    def held_out(self, *, part: int = 0, num_parts: int = 1) -> Experience:
        """All pairs of data.eval on replica `part` of `num_parts`."""
        return self._held_out(part, num_parts)

    def group_sizes(self, step: int) -> Tensor:
        """[groups] for the exchange: how long the texts of each pair of a step are."""
        return _sizes(self.train, self.order.rows_for_step(step - self.first_step, self.pairs_per_step))

    def held_out_sizes(self) -> Tensor:
        """[groups] likewise, of the pairs of data.eval."""
        return _sizes(self.datasets["data.eval"], range(len(self.datasets["data.eval"])))

    def holders(self, sizes: Tensor, num_parts: int) -> Tensor:
        """[groups] the replica of `num_parts` that has each pair, of which `sizes` [groups] are the sizes."""
        return assign_groups(sizes, num_parts, self.num_mini_batches)

    def _load_step(self, step: int, part: int, num_parts: int) -> Experience:
        rows = self.order.rows_for_step(step - self.first_step, self.pairs_per_step)
        return self._load(self.train, rows, part, num_parts, first_sample=2 * step * self.pairs_per_step)

    def _load_held_out(self, part: int, num_parts: int) -> Experience:
        held_out = self.datasets["data.eval"]
        return self._load(held_out, range(len(held_out)), part, num_parts, first_sample=0)

    def _load(
        self, dataset: PromptDataset, rows: Sequence[int], part: int, num_parts: int, *, first_sample: int
    ) -> Experience:
        """Log-probs and policy versions are 0: nothing drew these tokens."""
        groups = torch.nonzero(self.holders(_sizes(dataset, rows), num_parts) == part).flatten()
        mine = [rows[group] for group in groups.tolist()]
        samples = [sample for row in mine for sample in dataset.samples(row)]
        ends = [dataset.limit.kept(learnt) for _, learnt in samples]
        tokens = [token for (ids, _), end in zip(samples, ends, strict=True) for token in ids[:end]]
        mask = [drawn for (_, learnt), end in zip(samples, ends, strict=True) for drawn in learnt[:end]]
        group_ids, side = groups.repeat_interleave(2), torch.tensor([0, 1]).repeat(len(mine))
        return Experience(
            sample_ids=first_sample + 2 * group_ids + side,
            group_ids=group_ids,
            prompt_ids=torch.tensor(mine, dtype=torch.int64).repeat_interleave(2),
            lengths=torch.tensor(ends).long(),
            truncated=torch.tensor([len(ids) > end for (ids, _), end in zip(samples, ends, strict=True)]).bool(),
            chosen=side == 0,
            margins=torch.tensor([dataset[row].margin for row in mine]).float().repeat_interleave(2),
            tokens=torch.tensor(tokens, dtype=torch.int64),
            response_mask=torch.tensor(mask, dtype=torch.bool),
            policy_version=torch.zeros(len(tokens), dtype=torch.int32),
            rollout_logprobs=torch.zeros(len(tokens)),
        )


def _sizes(dataset: PromptDataset, rows: Sequence[int]) -> Tensor:
    return torch.tensor([_num_characters(dataset, row) for row in rows], dtype=torch.int64)


def _num_characters(dataset: PromptDataset, row: int) -> int:
    """Of both samples."""
    pair = dataset[row]
    return 2 * len(dataset.prompt_text(row)) + _length(pair.response) + _length(pair.rejected)


def _length(response: Response) -> int:
    return len(response) if isinstance(response, str) else sum(len(str(message["content"])) for message in response)
