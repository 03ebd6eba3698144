"""Demonstrated responses as Experience, for algorithm: sft."""

from collections.abc import Sequence
from pathlib import Path

import torch

from rltrain.config import schema
from rltrain.data.experience import Experience
from rltrain.data.prompt_stream import prompt_order
from rltrain.data.prompts import PromptDataset, load_prompts
from rltrain.data.tokenizer import PromptEncoder, eos_token_id, load_tokenizer


class Demonstrations:
    """The demonstrations of data.train, step by step."""

    def __init__(self, config: schema.Config) -> None:
        tokenizer = load_tokenizer(Path(config.model.path))
        encoder = PromptEncoder(tokenizer, config.data)
        self.dataset = load_prompts(config.data.train, config.data, encoder, needs="response", config_key="data.train")
        self.eos_token_id = eos_token_id(tokenizer)
        self.order = prompt_order(self.dataset, config)
        self.prompts_per_step = config.batch.prompts_per_step
        self.max_response_tokens = config.rollout.sampling.max_response_tokens

    def for_step(self, step: int, *, part: int = 0, num_parts: int = 1) -> Experience:
        """Every num_parts-th demonstration of the step, from `part` on; the parts together are the step's batch."""
        positions = range(part, self.prompts_per_step, num_parts)
        rows = self.order.rows_for_step(step, self.prompts_per_step)
        return load_sft_batch(
            self.dataset,
            [rows[position] for position in positions],
            sample_ids=[step * self.prompts_per_step + position for position in positions],
            group_ids=positions,
            eos_token_id=self.eos_token_id,
            max_response_tokens=self.max_response_tokens,
        )


def load_sft_batch(
    dataset: PromptDataset,
    rows: Sequence[int],
    *,
    sample_ids: Sequence[int],
    group_ids: Sequence[int],
    eos_token_id: int,
    max_response_tokens: int,
) -> Experience:
    """Samples of prompt, response and end-of-sequence token, with response_mask on the latter two.

    A response of more than `max_response_tokens`, its end-of-sequence token counted, is cut there and ends without
    one. Log-probs and policy versions are 0: nothing drew these tokens.
    """
    responses = dataset.encoder.encode_responses([dataset[row].response for row in rows])
    tokens: list[int] = []
    mask: list[bool] = []
    lengths, truncated = [], []
    for row, encoded in zip(rows, responses, strict=True):
        ended = encoded if encoded[-1:] == [eos_token_id] else [*encoded, eos_token_id]
        response, prompt = ended[:max_response_tokens], dataset.prompt_tokens(row)
        tokens += [*prompt, *response]
        mask += [False] * len(prompt) + [True] * len(response)
        lengths.append(len(prompt) + len(response))
        truncated.append(len(response) < len(ended))
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
