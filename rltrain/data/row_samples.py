"""The samples of a row as ids: a prompt and a response, with what of them is learnt, and how long they may be."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rltrain.chat.demonstration import demonstrate
from rltrain.config import schema
from rltrain.data.messages import Message
from rltrain.data.prompt_rows import PromptRow
from rltrain.data.rows import BadRow
from rltrain.data.tokenizer import ModelLimits, PromptEncoder
from rltrain.errors import DataError

Encoded = tuple[Sequence[int], Sequence[bool]]
"""(ids of a sample, which of them are learnt)"""


@dataclass(frozen=True)
class SampleLimit:
    """Holds how many tokens a sample may have. None: there is no limit."""

    response_tokens: int | None = None
    """data.max_response_tokens."""
    sample_tokens: int | None = None
    """The positions of the model."""

    @classmethod
    def of(cls, data: schema.Data, model: ModelLimits) -> "SampleLimit":
        return cls(data.max_response_tokens, model.max_positions)

    def kept(self, learnt: Sequence[bool]) -> int:
        """Returns how many tokens of a sample lie within the limit."""
        ends = [len(learnt)]
        if self.response_tokens is not None:
            ends.append(learnt.index(True) + self.response_tokens)
        if self.sample_tokens is not None:
            ends.append(self.sample_tokens)
        return min(ends)

    def holds(self, prompt_tokens: int, response_tokens: int) -> bool:
        """Returns whether a sample with at most so many tokens is within the limit."""
        most = self.response_tokens, self.sample_tokens
        found = response_tokens, prompt_tokens + response_tokens
        return all(limit is None or number <= limit for number, limit in zip(found, most, strict=True))

    def problem(self, learnt: Sequence[bool]) -> str:
        """Returns what is wrong with a sample that is not within the limit, in words for a user."""
        response = len(learnt) - learnt.index(True)
        if self.response_tokens is not None and response > self.response_tokens:
            return (
                f"the response has {response} tokens, its end token included; expected at most {self.response_tokens} "
                "(data.max_response_tokens)"
            )
        return (
            f"prompt and response have {len(learnt)} tokens; expected at most {self.sample_tokens}, as many as the "
            "model in model.path has positions"
        )


NO_LIMIT = SampleLimit()


def encoded(row: PromptRow, response: str | Sequence[Message], encoder: PromptEncoder) -> Encoded:
    """Returns the sample of the row's prompt and `response`, whose turns of the assistant are learnt.

    Raises DataError where the chat template has no place for a message.
    """
    if not isinstance(response, str):
        prompt_messages = encoder.messages(row.prompt)
        try:
            record = demonstrate(encoder.format_with(row.tools), [*prompt_messages, *response])
        except DataError as error:
            raise DataError(f"{row.origin}: {error}") from error
        num_asked = sum(message["role"] == "assistant" for message in prompt_messages)
        begin = record.turns[num_asked][0]
        return record.ids, [place >= begin and drawn for place, drawn in enumerate(record.drawn_mask)]
    prompt, (ids,) = encoder.encode(row.prompt, row.tools), encoder.encode_responses([response])
    end = encoder.response_end
    ended = ids if ids[-1:] == [end] else [*ids, end]
    return [*prompt, *ended], [False] * len(prompt) + [True] * len(ended)


def responses_of(row: PromptRow) -> tuple[str | Sequence[Message], ...]:
    """Returns the responses that are learnt from: of a pair both, of a row with a label alone none."""
    return tuple(response for response in (row.response, row.rejected) if response)


def long_samples(
    row: PromptRow, encoder: PromptEncoder, limit: SampleLimit, max_prompt_tokens: int
) -> Iterator[Encoded]:
    """Yields the row's samples that are not within `limit`. A sample that is clearly within it is not encoded."""
    responses = responses_of(row)
    prompt_bound = min(encoder.length_bound(row.prompt, row.tools), max_prompt_tokens) if responses else 0
    for response in responses:
        if not limit.holds(prompt_bound, encoder.response_bound(response, row.tools)):
            sample = encoded(row, response, encoder)
            if limit.kept(sample[1]) < len(sample[1]):
                yield sample


def refuse_unknown_ids(row: PromptRow, encoder: PromptEncoder, model: ModelLimits) -> None:
    """Raises BadRow where a text of the row has an id that the model has no embedding for."""
    if model.vocab_size is None or encoder.num_ids <= model.vocab_size:
        return
    samples = [encoded(row, response, encoder)[0] for response in responses_of(row)]
    for ids in [encoder.encode(row.prompt, row.tools), *samples]:
        if (beyond := next((token for token in ids if token >= model.vocab_size), None)) is not None:
            spelling = encoder.tokenizer.convert_ids_to_tokens(beyond)
            raise BadRow(
                f"has the token {spelling!r} of id {beyond}, and the model in model.path has ids 0 to "
                f"{model.vocab_size - 1}; expected a model whose embeddings were resized when tokens were added to its "
                "tokenizer (resize_token_embeddings of transformers), or texts without such tokens",
                reason="an id that the model does not have",
            )
