"""Demonstrations and pairs of responses as Experience, for algorithms that learn from given texts."""

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from rltrain.config import schema
from rltrain.data.experience import Experience, assign_groups
from rltrain.data.pairs import Response
from rltrain.data.prompt_order import prompt_order
from rltrain.data.prompt_rows import Encoded
from rltrain.data.prompts import Needs, PromptDataset, load_sampled
from rltrain.data.row_index import IndexFolder
from rltrain.data.tokenizer import UNKNOWN_MODEL, ModelLimits, load_encoder
from rltrain.models.rope_positions import image_fields

TOKEN_CHARACTERS = 4
"""Characters of a text that take about as long as a token of an image."""


class GivenTexts:
    """The rows of data.train with their responses, step by step, and the rows of data.eval."""

    needs: Needs
    """The data of a row in addition to its prompt."""

    def __init__(
        self, config: schema.Config, indexes: IndexFolder | None = None, model: ModelLimits = UNKNOWN_MODEL
    ) -> None:
        """`indexes` and `model` are passed to load_prompts."""
        files = {"data.train": config.data.train, "data.eval": config.data.eval if self._evaluates(config) else None}
        self.datasets = load_sampled(config, files, self.needs, load_encoder(config), indexes, model)
        self.train = self.datasets["data.train"]
        self.order = prompt_order(self.train, config)
        self.first_step = 0
        """The step that takes the first rows."""
        self.prompts_per_step, self.num_mini_batches = config.batch.prompts_per_step, config.batch.mini_batches
        # Roles with the same ranks and replicas ask for the same samples.
        self._of_step = lru_cache(maxsize=1)(self._load_step)
        self._held_out = lru_cache(maxsize=2)(self._load_held_out)

    def for_step(self, step: int, *, part: int = 0, num_parts: int = 1) -> Experience:
        """Returns the step's samples on replica `part` of `num_parts`. The parts together are the step's batch."""
        return self._of_step(step, part, num_parts)

    def held_out(self, *, part: int = 0, num_parts: int = 1) -> Experience:
        """Returns the samples of data.eval on replica `part` of `num_parts`."""
        return self._held_out(part, num_parts)

    def rows_of(self, step: int) -> list[int]:
        return self.order.rows_for_step(step - self.first_step, self.prompts_per_step)

    def _evaluates(self, config: schema.Config) -> bool:
        """Returns whether data.eval is read."""
        return True

    def _load_step(self, step: int, part: int, num_parts: int) -> Experience:
        return self._load(self.train, self.rows_of(step), part, num_parts, first_row=step * self.prompts_per_step)

    def _load_held_out(self, part: int, num_parts: int) -> Experience:
        held_out = self.datasets["data.eval"]
        return self._load(held_out, range(len(held_out)), part, num_parts, first_row=0)

    def _load(
        self, dataset: PromptDataset, rows: Sequence[int], part: int, num_parts: int, *, first_row: int
    ) -> Experience:
        """Returns this part's samples of `rows`. `first_row` is the position of the first row in the stream."""
        raise NotImplementedError


def _experience(dataset: PromptDataset, rows: Sequence[int], **of_samples: Tensor) -> Experience:
    """Returns all samples of `rows`, with the fields `of_samples`.

    A sample with more tokens than `dataset.limit` is cut, and ends without an end-of-sequence token. Log-probs and
    policy versions are 0, because no model generated these tokens.
    """
    samples = [sample for row in rows for sample in dataset.samples(row)]
    ends = [dataset.limit.kept(learnt, images) for _, learnt, images in samples]
    tokens = [token for (ids, *_), end in zip(samples, ends, strict=True) for token in ids[:end]]
    mask = [drawn for (_, learnt, _), end in zip(samples, ends, strict=True) for drawn in learnt[:end]]
    rules = dataset.encoder.images
    return Experience(
        **of_samples,
        **({} if rules is None else _of_images(samples, ends, rules.merge)),
        lengths=torch.tensor(ends, dtype=torch.int64),
        truncated=torch.tensor(
            [len(ids) > end for (ids, *_), end in zip(samples, ends, strict=True)], dtype=torch.bool
        ),
        tokens=torch.tensor(tokens, dtype=torch.int64),
        response_mask=torch.tensor(mask, dtype=torch.bool),
        policy_version=torch.zeros(len(tokens), dtype=torch.int32),
        rollout_logprobs=torch.zeros(len(tokens)),
    )


def _of_images(samples: Sequence[Encoded], ends: Sequence[int], merge: int) -> dict[str, Tensor]:
    """Returns the fields of images of samples that are cut at `ends`."""
    keys, positions = torch.zeros(sum(ends), dtype=torch.int64), torch.zeros(sum(ends), 3, dtype=torch.int32)
    begin = 0
    for (_, _, images), end in zip(samples, ends, strict=True):
        kept = [image for image in images if image.begin < end]
        of_tokens, of_rope = image_fields(end, kept, merge)
        keys[begin : begin + end] = torch.from_numpy(of_tokens)
        positions[begin : begin + end] = torch.from_numpy(of_rope)
        begin += end
    return {"image_keys": keys, "rope_positions": positions}


class Demonstrations(GivenTexts):
    """The demonstrations of algorithm sft. A part has every num_parts-th row.

    data.eval is read only if evaluations compute its loss.
    """

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
    """Returns samples of prompt, response and end-of-sequence token. response_mask is True on the latter two.

    In a conversation everything after the first prompt is the response, and the mask is True on the assistant's turns.
    """
    ids = {"sample_ids": sample_ids, "group_ids": group_ids, "prompt_ids": rows}
    return _experience(
        dataset, rows, **{name: torch.tensor([*numbers], dtype=torch.int64) for name, numbers in ids.items()}
    )


class Preferences(GivenTexts):
    """The pairs of responses of algorithms dpo and reward_model. One response of a pair is preferred.

    A pair is a group of two samples: the chosen one, then the rejected one. Groups are assigned to replicas as in the
    exchange, by the length of their texts. So each replica encodes only its share.
    """

    needs = "pair"

    def __init__(
        self, config: schema.Config, indexes: IndexFolder | None = None, model: ModelLimits = UNKNOWN_MODEL
    ) -> None:
        super().__init__(config, indexes, model)
        self.prompt_copies = 2 if config.actor.share_prefixes is False else 1
        """How often a pair's prompt is computed."""

    def group_sizes(self, step: int) -> Tensor:
        """Returns the characters of each pair of a step, shape [groups], for the exchange."""
        return self._sizes(self.train, self.rows_of(step))

    def held_out_sizes(self) -> Tensor:
        """Returns the characters of each pair of data.eval, shape [groups]."""
        return self._sizes(self.datasets["data.eval"], range(len(self.datasets["data.eval"])))

    def holders(self, sizes: Tensor, num_parts: int) -> Tensor:
        """Returns the replica of each pair among `num_parts`, shape [groups]. `sizes` are the sizes of the pairs, shape
        [groups]."""
        return assign_groups(sizes, num_parts, self.num_mini_batches)

    def _load(
        self, dataset: PromptDataset, rows: Sequence[int], part: int, num_parts: int, *, first_row: int
    ) -> Experience:
        groups = torch.nonzero(self.holders(self._sizes(dataset, rows), num_parts) == part).flatten()
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

    def _sizes(self, dataset: PromptDataset, rows: Sequence[int]) -> Tensor:
        return torch.tensor([self._num_characters(dataset, row) for row in rows], dtype=torch.int64)

    def _num_characters(self, dataset: PromptDataset, row: int) -> int:
        """Returns the number of characters to compute for a pair. Images count like texts of as many tokens."""
        pair, rules = dataset[row], dataset.encoder.images
        of_prompt = len(dataset.prompt_text(row))
        if rules is not None:
            of_prompt += TOKEN_CHARACTERS * sum(rules.num_tokens(image) for image in pair.images)
        return self.prompt_copies * of_prompt + _length(pair.response) + _length(pair.rejected)


def _length(response: Response) -> int:
    return len(response) if isinstance(response, str) else sum(len(str(message["content"])) for message in response)
