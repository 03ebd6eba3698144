"""Demonstrations, and pairs of responses, as Experience for algorithms that learn from given texts."""

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from rltrain.config import schema
from rltrain.data.experience import Experience, assign_groups
from rltrain.data.prompt_order import prompt_order
from rltrain.data.prompt_rows import Response
from rltrain.data.prompts import Needs, PromptDataset, load_sampled
from rltrain.data.row_index import IndexFolder
from rltrain.data.tokenizer import UNKNOWN_MODEL, ModelLimits, load_encoder


class GivenTexts:
    """Rows of data.train with responses, step by step, and those of data.eval."""

    needs: Needs
    """What a row has beside its prompt."""

    def __init__(
        self, config: schema.Config, indexes: IndexFolder | None = None, model: ModelLimits = UNKNOWN_MODEL
    ) -> None:
        """`indexes` and `model` as in load_prompts."""
        files = {"data.train": config.data.train, "data.eval": config.data.eval if self._evaluates(config) else None}
        self.datasets = load_sampled(config, files, self.needs, load_encoder(config), indexes, model)
        self.train = self.datasets["data.train"]
        self.order = prompt_order(self.train, config)
        self.first_step = 0
        """The one that takes the first rows."""
        self.prompts_per_step, self.num_mini_batches = config.batch.prompts_per_step, config.batch.mini_batches
        # Roles that share ranks and replicas ask for the same.
        self._of_step = lru_cache(maxsize=1)(self._load_step)
        self._held_out = lru_cache(maxsize=2)(self._load_held_out)

    def for_step(self, step: int, *, part: int = 0, num_parts: int = 1) -> Experience:
        """The step's on replica `part` of `num_parts`; the parts together are the step's batch."""
        return self._of_step(step, part, num_parts)

    def held_out(self, *, part: int = 0, num_parts: int = 1) -> Experience:
        """All of data.eval on replica `part` of `num_parts`."""
        return self._held_out(part, num_parts)

    def rows_of(self, step: int) -> list[int]:
        return self.order.rows_for_step(step - self.first_step, self.prompts_per_step)

    def _evaluates(self, config: schema.Config) -> bool:
        """Whether data.eval is read."""
        return True

    def _load_step(self, step: int, part: int, num_parts: int) -> Experience:
        return self._load(self.train, self.rows_of(step), part, num_parts, first_row=step * self.prompts_per_step)

    def _load_held_out(self, part: int, num_parts: int) -> Experience:
        held_out = self.datasets["data.eval"]
        return self._load(held_out, range(len(held_out)), part, num_parts, first_row=0)

    def _load(
        self, dataset: PromptDataset, rows: Sequence[int], part: int, num_parts: int, *, first_row: int
    ) -> Experience:
        """Of `rows`, which stand in the stream from `first_row` on, those that are this part's."""
        raise NotImplementedError


def _experience(dataset: PromptDataset, rows: Sequence[int], **of_samples: Tensor) -> Experience:
    """All samples of `rows`, and what else is known of each. A sample of more tokens than `dataset.limit` allows is cut
    there, and ends without an end-of-sequence token.

    Log-probs and policy versions are 0: nothing drew these tokens.
    """
    samples = [sample for row in rows for sample in dataset.samples(row)]
    ends = [dataset.limit.kept(learnt) for _, learnt in samples]
    tokens = [token for (ids, _), end in zip(samples, ends, strict=True) for token in ids[:end]]
    mask = [drawn for (_, learnt), end in zip(samples, ends, strict=True) for drawn in learnt[:end]]
    return Experience(
        **of_samples,
        lengths=torch.tensor(ends, dtype=torch.int64),
        truncated=torch.tensor([len(ids) > end for (ids, _), end in zip(samples, ends, strict=True)], dtype=torch.bool),
        tokens=torch.tensor(tokens, dtype=torch.int64),
        response_mask=torch.tensor(mask, dtype=torch.bool),
        policy_version=torch.zeros(len(tokens), dtype=torch.int32),
        rollout_logprobs=torch.zeros(len(tokens)),
    )


class Demonstrations(GivenTexts):
    """For algorithm: sft. Those of data.eval are there where an evaluation is their loss. A part has every num_parts-th
    one."""

    needs = "response"

    def _evaluates(self, config: schema.Config) -> bool:
        return config.scores_held_out

    def _load(
        self, dataset: PromptDataset, rows: Sequence[int], part: int, num_parts: int, *, first_row: int
    ) -> Experience:
        places = range(part, len(rows), num_parts)
        return load_sft_batch(
            dataset,
            [rows[place] for place in places],
            sample_ids=[first_row + place for place in places],
            group_ids=places,
        )


def load_sft_batch(
    dataset: PromptDataset, rows: Sequence[int], *, sample_ids: Sequence[int], group_ids: Sequence[int]
) -> Experience:
    """Samples of prompt, response and end-of-sequence token, with response_mask on the latter two; of a conversation
    the response is all behind its first prompt, and the mask is on the assistant's turns."""
    ids = {"sample_ids": sample_ids, "group_ids": group_ids, "prompt_ids": rows}
    return _experience(
        dataset, rows, **{name: torch.tensor([*numbers], dtype=torch.int64) for name, numbers in ids.items()}
    )


class Preferences(GivenTexts):
    """For algorithms dpo and reward_model: pairs of responses to one prompt, of which one was preferred.

    A pair is a group of two samples: the chosen one, then the rejected one. Groups are dealt out as the exchange deals
    them out, by the length of their texts, so that nobody encodes what others train on.
    """

    needs = "pair"

    def group_sizes(self, step: int) -> Tensor:
        """[groups] for the exchange: how long the texts of each pair of a step are."""
        return _sizes(self.train, self.rows_of(step))

    def held_out_sizes(self) -> Tensor:
        """[groups] likewise, of the pairs of data.eval."""
        return _sizes(self.datasets["data.eval"], range(len(self.datasets["data.eval"])))

    def holders(self, sizes: Tensor, num_parts: int) -> Tensor:
        """[groups] the replica of `num_parts` that has each pair, of which `sizes` [groups] are the sizes."""
        return assign_groups(sizes, num_parts, self.num_mini_batches)

    def _load(
        self, dataset: PromptDataset, rows: Sequence[int], part: int, num_parts: int, *, first_row: int
    ) -> Experience:
        groups = torch.nonzero(self.holders(_sizes(dataset, rows), num_parts) == part).flatten()
        mine = [rows[group] for group in groups.tolist()]
        group_ids, side = groups.repeat_interleave(2), torch.tensor([0, 1]).repeat(len(mine))
        return _experience(
            dataset,
            mine,
            sample_ids=2 * first_row + 2 * group_ids + side,
            group_ids=group_ids,
            prompt_ids=torch.tensor(mine, dtype=torch.int64).repeat_interleave(2),
            chosen=side == 0,
            margins=torch.tensor([dataset[row].margin for row in mine]).float().repeat_interleave(2),
        )


def _sizes(dataset: PromptDataset, rows: Sequence[int]) -> Tensor:
    return torch.tensor([_num_characters(dataset, row) for row in rows], dtype=torch.int64)


def _num_characters(dataset: PromptDataset, row: int) -> int:
    """Of both samples."""
    pair = dataset[row]
    return 2 * len(dataset.prompt_text(row)) + _length(pair.response) + _length(pair.rejected)


def _length(response: Response) -> int:
    return len(response) if isinstance(response, str) else sum(len(str(message["content"])) for message in response)
