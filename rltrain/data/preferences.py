"""Pairs of responses to one prompt, of which one was preferred, as Experience: for algorithms dpo and reward_model."""

import logging
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from rltrain.config import schema
from rltrain.data.assignment import assign_groups
from rltrain.data.experience import Experience
from rltrain.data.order import PromptOrder
from rltrain.data.preference_rows import PreferenceRow, Turn, load_preferences
from rltrain.data.tokenizer import PromptEncoder, eos_token_id, load_tokenizer
from rltrain.errors import DataError

logger = logging.getLogger(__name__)

Encoded = tuple[list[int], list[bool]]
"""A response's token ids, and which of them the model would have drawn."""


class Preferences:
    """The pairs of data.train, step by step, and all those of data.eval.

    A pair is a group of two samples: the chosen one, then the rejected one. Groups are dealt out as the exchange deals
    them out, by the length of their texts, so that nobody encodes what others train on.
    """

    def __init__(self, config: schema.Config) -> None:
        tokenizer = load_tokenizer(Path(config.model.path))
        encoder, data = PromptEncoder(tokenizer, config.data), config.data
        self.encoder = PairEncoder(encoder, eos_token_id(tokenizer), config.rollout.sampling.max_response_tokens)
        self.train, train_dropped = load_preferences(data.train, data, encoder, config_key="data.train")
        self.dropped = {"data.train": train_dropped}
        self.held_out_rows: list[PreferenceRow] = []
        if data.eval is not None:
            self.held_out_rows, self.dropped["data.eval"] = load_preferences(
                data.eval, data, encoder, config_key="data.eval"
            )
        self.order = PromptOrder(len(self.train), seed=config.seed, shuffle=data.shuffle)
        self.pairs_per_step, self.num_mini_batches = config.batch.prompts_per_step, config.batch.mini_batches
        # Roles that share ranks and replicas ask for the same.
        self._of_step = lru_cache(maxsize=1)(self._load_step)
        self._held_out = lru_cache(maxsize=2)(self._load_held_out)

    def report_dropped(self) -> None:
        """Say which rows of the files are not used."""
        for key, dropped in self.dropped.items():
            if dropped.num_bad or dropped.num_too_long:
                logger.warning("%s: %s", key, dropped)

    def for_step(self, step: int, *, part: int = 0, num_parts: int = 1) -> Experience:
        """The step's pairs on replica `part` of `num_parts`."""
        return self._of_step(step, part, num_parts)

    def held_out(self, *, part: int = 0, num_parts: int = 1) -> Experience:
        """All pairs of data.eval on replica `part` of `num_parts`."""
        return self._held_out(part, num_parts)

    def group_sizes(self, step: int) -> Tensor:
        """[groups] for the exchange: how long the texts of each pair of a step are."""
        return _sizes(self._rows(step))

    def held_out_sizes(self) -> Tensor:
        """[groups] likewise, of the pairs of data.eval."""
        return _sizes(self.held_out_rows)

    def _rows(self, step: int) -> list[PreferenceRow]:
        return [self.train[row] for row in self.order.rows_for_step(step, self.pairs_per_step)]

    def _load_step(self, step: int, part: int, num_parts: int) -> Experience:
        return self._load(self._rows(step), part, num_parts, first_sample=2 * step * self.pairs_per_step)

    def _load_held_out(self, part: int, num_parts: int) -> Experience:
        return self._load(self.held_out_rows, part, num_parts, first_sample=0)

    def _load(self, rows: Sequence[PreferenceRow], part: int, num_parts: int, *, first_sample: int) -> Experience:
        replicas = assign_groups(_sizes(rows), num_parts, self.num_mini_batches)
        groups = torch.nonzero(replicas == part).flatten()
        return self.encoder.encode([rows[group] for group in groups.tolist()], groups, first_sample)


def _sizes(rows: Sequence[PreferenceRow]) -> Tensor:
    return torch.tensor([row.size for row in rows], dtype=torch.int64)


class PairEncoder:
    """Rows as samples of prompt and response, cut at `max_response_tokens`. Every turn of a response ends with the
    end-of-sequence token, which so is a sample's last one where nothing is cut."""

    def __init__(self, encoder: PromptEncoder, eos_token_id: int, max_response_tokens: int) -> None:
        self.encoder, self.eos_token_id, self.max_response_tokens = encoder, eos_token_id, max_response_tokens

    def encode(self, rows: Sequence[PreferenceRow], groups: Tensor, first_sample: int) -> Experience:
        """`groups` [rows] are the pairs' places among those of the step, `first_sample` is the step's first sample id.

        Log-probs and policy versions are 0: nothing drew these tokens.
        """
        responses = [response for row in rows for response in (row.chosen, row.rejected)]
        prompts = [self.encoder.encode(row.prompt) for row in rows]
        tokens: list[int] = []
        mask: list[bool] = []
        lengths, truncated = [], []
        for number, (ids, drawn) in enumerate(self._encoded(responses, [row.origin for row in rows for _ in "cr"])):
            prompt = prompts[number // 2]
            tokens += [*prompt, *ids[: self.max_response_tokens]]
            mask += [False] * len(prompt) + drawn[: self.max_response_tokens]
            lengths.append(len(prompt) + min(len(ids), self.max_response_tokens))
            truncated.append(len(ids) > self.max_response_tokens)
        sides, group_ids = torch.tensor([0, 1]).repeat(len(rows)), groups.repeat_interleave(2)
        return Experience(
            sample_ids=first_sample + 2 * group_ids + sides,
            group_ids=group_ids,
            prompt_ids=torch.tensor([row.number for row in rows], dtype=torch.int64).repeat_interleave(2),
            lengths=torch.tensor(lengths, dtype=torch.int64),
            truncated=torch.tensor(truncated, dtype=torch.bool),
            chosen=sides == 0,
            margins=torch.tensor([row.margin for row in rows], dtype=torch.float32).repeat_interleave(2),
            tokens=torch.tensor(tokens, dtype=torch.int64),
            response_mask=torch.tensor(mask, dtype=torch.bool),
            policy_version=torch.zeros(len(tokens), dtype=torch.int32),
            rollout_logprobs=torch.zeros(len(tokens)),
        )

    def _encoded(self, responses: Sequence[Sequence[Turn]], origins: Sequence[str]) -> list[Encoded]:
        said = iter(self.encoder.encode_responses([turn.said for response in responses for turn in response]))
        found = []
        for response, origin in zip(responses, origins, strict=True):
            ids: list[int] = []
            drawn: list[bool] = []
            for turn in response:
                encoded = next(said)
                ended = encoded if encoded[-1:] == [self.eos_token_id] else [*encoded, self.eos_token_id]
                answer = self._answer(ended, turn, origin)
                ids += [*ended, *answer]
                drawn += [True] * len(ended) + [False] * len(answer)
            found.append((ids, drawn))
        return found

    def _answer(self, ended: Sequence[int], turn: Turn, origin: str) -> tuple[int, ...]:
        """What follows a turn of the model up to its next one."""
        if not turn.answered_by:
            return ()
        assert self.encoder.chat is not None, "rows with messages are refused where there is no template"
        try:
            return self.encoder.chat.continuation(ended, turn.answered_by)
        except DataError as error:
            raise DataError(f"{origin}: {error}") from error
