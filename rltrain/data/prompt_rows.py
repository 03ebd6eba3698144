"""One row of a prompt file: its contents, its samples as ids, and whether it can be used."""

import json
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from rltrain.config import schema
from rltrain.data.assistant_turn import REASONING_MARKS
from rltrain.data.chat_format import ChatFormat, Conversation
from rltrain.data.chat_template import RenderError
from rltrain.data.image_parts import MARK as IMAGE_MARK
from rltrain.data.image_parts import VIDEO_MARK, images_of, with_images, written
from rltrain.data.images import VIDEO_CURE, ImageRules, ImageSource, is_given, looks_like_an_image, source_of
from rltrain.data.pairs import parse_pair
from rltrain.data.rows import BadRow, FileRow, KeysOfRows, Row, RowFile, look_up
from rltrain.data.tokenizer import (
    UNKNOWN_MODEL,
    UNUSABLE_IMAGES,
    Message,
    ModelLimits,
    Prompt,
    PromptEncoder,
    parse_messages,
    parse_tools,
    shown,
)
from rltrain.errors import DataError
from rltrain.models.vision import PlacedImage
from rltrain.runtime.json_text import is_finite

# One parsed row of a prompt file.

Needs = Literal["label", "plain label", "response", "pair"]
VIDEOS_KEY = "videos"
"""The column of verl's rows with videos."""


@dataclass(frozen=True, slots=True)
class PromptRow:
    """A row with the fields that its dataset needs. Other fields are empty.

    `label` is set if the dataset needs labels and has them. `response` is set if it needs responses, and `rejected` too
    if it needs pairs.
    """

    prompt: Prompt
    label: str
    response: str | Sequence[Message]
    """A text, or a conversation's messages after the prompt. The first and the last message are the assistant's."""
    tools: str
    """JSON text of the prompt's tools, or ""."""
    place: str
    """The beginning of `origin`. Rows of a file share it, because there may be millions of them."""
    number: int
    rejected: str | Sequence[Message] = ""
    """In a pair the response that was not preferred. `response` is the preferred one."""
    margin: float = 0.0
    """In a pair the margin by which `response` should outscore `rejected`."""

    @property
    def origin(self) -> str:
        """File and line, for messages."""
        return f"{self.place}{self.number}"

    @property
    def images(self) -> tuple[ImageSource, ...]:
        """The images of the prompt, then those of the responses. Raises DataError if a part has none."""
        texts = (self.prompt, self.response, self.rejected)
        return tuple(image for text in texts if not isinstance(text, str) for image in images_of(text))


@dataclass(frozen=True)
class RowParser:
    """A parser of the rows of one source."""

    source: schema.PromptSource
    encoder: PromptEncoder
    needs: Needs
    difficulty_key: str | None = None
    model: ModelLimits = UNKNOWN_MODEL
    """Limits of the model that is trained or evaluated."""

    @property
    def keys(self) -> KeysOfRows:
        """The keys that the parser looks up."""
        source = self.source
        columns: tuple[str | None, ...] = (source.label_key,)
        if self.needs == "response":
            columns = (source.response_key,)
        elif self.needs == "pair":
            columns = (source.chosen_key, source.rejected_key, source.margin_key)
        keys = (source.prompt_key, *columns, source.tools_key, source.system_key, self.difficulty_key)
        of_images = (source.images_key, VIDEOS_KEY if self._sees else None)
        return KeysOfRows.of(*({key for key in part if key is not None} for part in (keys, of_images)))

    @property
    def _sees(self) -> bool:
        """Whether rows may have images."""
        return self.encoder.images is not None and self.encoder.uses_template

    def parse(self, values: Row | BadRow, place: str, number: int) -> PromptRow:
        """Returns the row of these values. `place` and `number` together are its origin. Raises BadRow."""
        if isinstance(values, BadRow):
            raise values
        source = self.source
        tools = "" if source.tools_key is None else self._tools(values, source.tools_key)
        folder = Path(place).parent if self._sees else None
        parse, fill = partial(self._prompt, images_in=folder), partial(self._with_images, values=values, folder=folder)
        if self.needs == "pair":
            pair = parse_pair(values, source, parse, fill)
            return PromptRow(pair.prompt, "", pair.chosen, tools, place, number, pair.rejected, pair.margin)
        prompt = fill(parse(look_up(values, source.prompt_key), source.prompt_key))
        if source.system_key is not None:
            prompt = self._with_system(prompt, values, source.system_key)
        label = ""
        response: str | Sequence[Message] = ""
        if self.needs == "response" and source.response_key is not None:
            response = _parse_response(look_up(values, source.response_key), source.response_key)
        elif self.needs == "response":
            prompt, response = split_conversation(prompt, source.prompt_key, source.learnt_turns)
        else:
            label = self._label(values)
        return PromptRow(prompt, label, response, tools, place, number)

    def difficulty(self, values: Row | BadRow) -> float:
        """Returns the difficulty that a curriculum sorts by, or 0 without a curriculum. Raises BadRow."""
        if self.difficulty_key is None or isinstance(values, BadRow):
            return 0.0
        value = look_up(values, self.difficulty_key)
        if isinstance(value, (bool, int, float, Decimal)) and math.isfinite(value):
            return float(value)
        raise BadRow(f"has {shown(value)} under {self.difficulty_key!r}; expected a number (data.curriculum.key)")

    def _prompt(self, value: Any, key: str, images_in: Path | None = None) -> Prompt:
        if isinstance(value, str) and value:
            return value
        if not isinstance(value, list) or not value:
            raise BadRow(f"has {shown(value)} under {key!r}; expected a text or a list of chat messages, not empty")
        if not self.encoder.uses_template:
            raise BadRow(f"has chat messages under {key!r}, but {self.encoder.without_template}; expected a text")
        return parse_messages(value, key, images_in)

    def _with_images(self, prompt: Prompt, values: Row, folder: Path | None) -> Prompt:
        """Returns the prompt with the images of images_key at their places. `folder` has the row's file."""
        key = self.source.images_key
        if key is None or (key not in values and "." not in key):
            return prompt
        try:
            column = look_up(values, key)
        except BadRow as problem:
            if problem.is_missing:
                return prompt
            raise
        given = column if isinstance(column, list | tuple) else [column] if is_given(column) else []
        if self.encoder.images is None:
            if any(map(looks_like_an_image, given)):
                raise BadRow(
                    f"has images under {key!r}; expected model.vision, which shows them, or images_key null, which "
                    "leaves them out",
                    UNUSABLE_IMAGES,
                )
            return prompt
        if folder is None and given:
            raise BadRow(f"has images under {key!r}, but {self.encoder.without_template}; expected none")
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        if is_given(values.get(VIDEOS_KEY) or None) and any(VIDEO_MARK in written(m["content"]) for m in messages):
            raise BadRow(f"has videos under {VIDEOS_KEY!r}; {VIDEO_CURE}", "videos")
        try:
            shown = with_images(messages, [source_of(image, folder or Path()) for image in given])
        except DataError as error:
            raise BadRow(f"cannot be shown: {error} (images_key: {key!r})", UNUSABLE_IMAGES) from None
        return prompt if isinstance(prompt, str) and not given else shown

    def _with_system(self, prompt: Prompt, values: Row, key: str) -> Prompt:
        try:
            said = look_up(values, key)
        except BadRow:
            return prompt
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [*prompt]
        if not said or messages[0]["role"] == "system":
            return prompt
        if not isinstance(said, str) or not self.encoder.uses_template:
            raise BadRow(f"has {shown(said)} under {key!r}; expected a text, and a chat template that writes it")
        return [{"role": "system", "content": said}, *messages]

    def _tools(self, values: Row, key: str) -> str:
        try:
            value = look_up(values, key)
        except BadRow:
            return ""
        tools = sys.intern(parse_tools(value, key))  # many rows share them
        if tools and not self.encoder.uses_template:
            raise BadRow(f"has tools under {key!r}, but {self.encoder.without_template}; expected none")
        return tools

    def _label(self, values: Row) -> str:
        key = self.source.label_key
        if key is None:
            return ""
        try:
            label = look_up(values, key)
        except BadRow as problem:
            raise BadRow(f"{problem} (rows without labels: label_key null)", problem.reason) from None
        if self.needs == "plain label" and isinstance(label, (list, dict)):
            raise BadRow(
                f"has {shown(label)} under {key!r}, which the reward function would compare as JSON text; "
                f"expected a text, a number or a truth value (a field of an object: label_key {key}.FIELD)"
            )
        return _parse_label(label, key)


def split_conversation(
    prompt: Prompt, key: str, learnt: Literal["all", "last"] = "all"
) -> tuple[list[Message], list[Message]]:
    """Returns the messages before the assistant's first trained turn, and the rest up to its last
    turn. Raises BadRow."""
    if isinstance(prompt, str):
        raise BadRow(
            f"has a text under {key!r}; expected a list of chat messages with turns of the assistant, since "
            "response_key is null"
        )
    places = [place for place, message in enumerate(prompt) if message["role"] == "assistant"]
    if not places or not places[0]:
        raise BadRow(
            f"has messages of roles {', '.join(message['role'] for message in prompt)} under {key!r}; expected one of "
            "the user first, and turns of the assistant after it"
        )
    if any(after - before == 1 for before, after in zip(places, places[1:], strict=False)):
        raise BadRow(f"has two turns of the assistant one after the other under {key!r}; expected one between them")
    begin = places[0] if learnt == "all" else places[-1]
    return [*prompt[:begin]], [*prompt[begin : places[-1] + 1]]


def _parse_label(value: Any, key: str) -> str:
    """Returns a label as text. Texts stay unchanged, and other values are written as JSON."""
    if isinstance(value, str):
        return value
    if isinstance(value, Decimal):
        return str(value)
    if isinstance(value, (bool, int, float, list, dict)) and is_finite(value):
        try:
            return json.dumps(value, ensure_ascii=False)
        except TypeError as error:
            raise BadRow(f"has a label under {key!r} that JSON cannot write: {error}") from error
    raise BadRow(f"has {shown(value)} under {key!r}; expected a label: a text, a finite number, a truth value or JSON")


def _parse_response(value: Any, key: str) -> str:
    if isinstance(value, str) and value:
        return value
    raise BadRow(f"has {shown(value)} under {key!r}; expected the demonstrated response: a text, not empty")


# Given conversations as ids, with a mask of the trained tokens.


def demonstrate(chat: ChatFormat, messages: Sequence[Message]) -> Conversation:
    """Returns the record of an engine as if its model had generated the assistant's turns of `messages`.

    Each turn is the template's text of it as a last turn, up to its end token. Between turns is the text that the
    template appends. Each piece is encoded alone, like prompts and answers of a rollout. `messages` begin with another
    role, end with a turn of the assistant, and have others between two of its turns. Raises DataError if the template
    has no place for one of them.
    """
    ids: list[int] = []
    turns: list[tuple[int, int]] = []
    images: list[PlacedImage] = []
    for text, told in _pieces(chat, messages):
        begin, piece = len(ids), chat.placed(chat.template.encode(text), told or ())
        ids += piece.ids
        images += piece.images_from(begin)
        if told is None:
            turns.append((begin, len(ids)))
    return Conversation(chat, tuple(ids), tuple(turns), tuple(messages), tuple(images))


def _pieces(chat: ChatFormat, messages: Sequence[Message]) -> Iterator[tuple[str, Sequence[Message] | None]]:
    """Yields (text, its messages or None for a turn of the assistant) in the order of the conversation."""
    places = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
    try:
        yield chat.template.render(messages[: places[0]]), messages[: places[0]]
        for place, following in pairwise([*places, len(messages)]):
            answers = messages[place + 1 : following]
            behind = chat.following(answers) if answers else ""
            said, is_ended = _turn(chat, messages[: place + 1])
            if is_ended:
                yield said, None
                behind = _behind_the_end(chat, behind)
            else:
                end, behind = _next_mark(chat, behind or _behind_last(chat, messages[place]))
                yield said + end, None
            if answers:
                yield behind, answers
    except RenderError as error:
        roles = ", ".join(str(message["role"]) for message in messages)
        raise DataError(f"the chat template refuses messages of roles {roles}: {error}") from error


def _turn(chat: ChatFormat, messages: Sequence[Message]) -> tuple[str, bool]:
    """Returns the last of `messages` up to its end token, and whether the template writes such a token."""
    asked = chat.template.render(messages[:-1])
    whole = chat.template.render(messages, generation_prompt=False)
    said = whole.removeprefix(asked) if whole.startswith(asked) else _continued(chat, asked, messages[-1])
    ends = [said.rfind(end) + len(end) for end in _end_texts(chat) if end in said]
    return (said[: max(ends)], True) if ends else (said, False)


def _behind_last(chat: ChatFormat, turn: Message) -> str:
    """Returns the text that the template would write after a conversation's last turn."""
    role = "tool" if turn.get("tool_calls") else "user"
    try:
        return chat.following([{"role": role, "content": "."}])
    except DataError:
        return ""


def _next_mark(chat: ChatFormat, behind: str) -> tuple[str, str]:
    """Returns the end of a turn without an end token in the template, and the text that then follows.

    The end is the mark of the next message if this is one of the model's end tokens. Otherwise it is the tokenizer's
    eos_token.
    """
    for end in _end_texts(chat):
        if behind.lstrip().startswith(end):
            return end, behind.lstrip().removeprefix(end)
    return str(chat.tokenizer.eos_token or ""), _behind_the_end(chat, behind)


def _continued(chat: ChatFormat, asked: str, message: Message) -> str:
    """Returns the text of a turn after a prompt that opens the reasoning, if the template leaves reasoning out of
    turns.

    Raises DataError if the turn cannot be written after this prompt.
    """
    content = str(message["content"])
    for opening, closing in REASONING_MARKS:
        thought = message.get("reasoning_content")
        if asked.rstrip().endswith(opening) and not message.get("tool_calls"):
            if thought is not None:
                content = f"{thought}\n{closing}\n\n{content}"
            if closing in content:
                return content.removeprefix(opening).lstrip("\n")
    raise DataError(
        f"the chat template ends the prompt with {asked[-40:]!r}, but renders the turn {content[:40]!r} differently; "
        "expected a turn that begins with its reasoning if the template opens it, and without tool calls"
    )


def _behind_the_end(chat: ChatFormat, following: str) -> str:
    """Returns `following` without the closing of the turn before it. The closing is trained with that turn."""
    ends = [following.index(end) + len(end) for end in _end_texts(chat) if end in following]
    return following[min(ends) :] if ends else following


def _end_texts(chat: ChatFormat) -> list[str]:
    ends = sorted(chat.end.tokens & chat.end.added)
    return [str(text) for text in chat.tokenizer.convert_ids_to_tokens(ends)]


# The samples of a row as ids: a prompt and a response, the trained tokens, and the limit of their length.

Encoded = tuple[Sequence[int], Sequence[bool], tuple[PlacedImage, ...]]
"""(ids of a sample, mask of its trained tokens, its images)"""


@dataclass(frozen=True)
class SampleLimit:
    """A limit on the tokens of a sample. None means no limit."""

    response_tokens: int | None = None
    """data.max_response_tokens."""
    sample_tokens: int | None = None
    """The model's number of positions."""
    merge: int = 1
    """Height and width of a token of an image in patches."""

    @classmethod
    def of(cls, data: schema.Data, model: ModelLimits, images: ImageRules | None) -> "SampleLimit":
        return cls(data.max_response_tokens, model.max_positions, 1 if images is None else images.merge)

    def kept(self, learnt: Sequence[bool], images: Sequence[PlacedImage] = ()) -> int:
        """Returns the number of a sample's tokens within the limit. It keeps an image whole or not at all."""
        ends = [len(learnt)]
        if self.response_tokens is not None:
            ends.append(learnt.index(True) + self.response_tokens)
        if self.sample_tokens is not None:
            ends.append(self.sample_tokens)
        end = min(ends)
        cut = (image.begin for image in images if image.begin < end < image.begin + image.num_tokens(self.merge))
        return next(cut, end)

    def holds(self, prompt_tokens: int, response_tokens: int) -> bool:
        """Returns whether a sample with at most these numbers of tokens is within the limit."""
        most = self.response_tokens, self.sample_tokens
        found = response_tokens, prompt_tokens + response_tokens
        return all(limit is None or number <= limit for number, limit in zip(found, most, strict=True))

    def problem(self, learnt: Sequence[bool]) -> str:
        """Returns the problem of a sample beyond the limit, in words for the user."""
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
    """Returns the sample of the row's prompt and `response`. The assistant's turns in `response` are trained.

    Raises DataError if the chat template has no place for a message, or if an image cannot be used any more.
    """
    try:
        return _encoded(row, response, encoder)
    except DataError as error:
        raise DataError(f"{row.origin}: {error}") from error


def _encoded(row: PromptRow, response: str | Sequence[Message], encoder: PromptEncoder) -> Encoded:
    if not isinstance(response, str):
        prompt_messages = encoder.messages(row.prompt)
        record = demonstrate(encoder.format_with(row.tools), [*prompt_messages, *response])
        num_asked = sum(message["role"] == "assistant" for message in prompt_messages)
        begin = record.turns[num_asked][0]
        return record.ids, [place >= begin and drawn for place, drawn in enumerate(record.drawn_mask)], record.images
    prompt, (ids,) = encoder.encode(row.prompt, row.tools), encoder.encode_responses([response])
    end = encoder.response_end
    ended = ids if ids[-1:] == [end] else [*ids, end]
    return [*prompt.ids, *ended], [False] * len(prompt.ids) + [True] * len(ended), prompt.images


def responses_of(row: PromptRow) -> tuple[str | Sequence[Message], ...]:
    """Returns the responses to train on: both of a pair, none of a row with only a label."""
    return tuple(response for response in (row.response, row.rejected) if response)


def texts_of(row: PromptRow) -> Iterator[str]:
    """Yields the texts of a row: its prompt and responses, or the contents of their messages."""
    for part in (row.prompt, row.response, row.rejected):
        yield from (part,) if isinstance(part, str) else (written(message["content"]) for message in part)


def long_samples(
    row: PromptRow, encoder: PromptEncoder, limit: SampleLimit, max_prompt_tokens: int
) -> Iterator[Encoded]:
    """Yields the row's samples beyond `limit`. A sample clearly within it is not encoded."""
    responses = responses_of(row)
    prompt_bound = min(encoder.length_bound(row.prompt, row.tools), max_prompt_tokens) if responses else 0
    for response in responses:
        if not limit.holds(prompt_bound, encoder.response_bound(response, row.tools)):
            sample = encoded(row, response, encoder)
            if limit.kept(*sample[1:]) < len(sample[1]):
                yield sample


def refuse_unknown_ids(row: PromptRow, encoder: PromptEncoder, model: ModelLimits) -> None:
    """Raises BadRow if a text of the row has an id without an embedding in the model."""
    if model.vocab_size is None or encoder.num_ids <= model.vocab_size:
        return
    samples = [encoded(row, response, encoder)[0] for response in responses_of(row)]
    for ids in [encoder.encode(row.prompt, row.tools).ids, *samples]:
        if (beyond := next((token for token in ids if token >= model.vocab_size), None)) is not None:
            spelling = encoder.tokenizer.convert_ids_to_tokens(beyond)
            raise BadRow(
                f"has the token {spelling!r} of id {beyond}, and the model in model.path has ids 0 to "
                f"{model.vocab_size - 1}. Resize the model's embeddings for tokens added to its tokenizer "
                "(resize_token_embeddings of transformers), or use texts without such tokens",
                reason="a token id unknown to the model",
            )


# The usable rows of a source, and counts of the others by reason.

MAX_KEPT_PROBLEMS = 5


@dataclass
class DroppedRows:
    """The counts of rows that are not used, or used with a cut response."""

    bad: Counter[str] = field(default_factory=Counter)
    """Rows skipped under data.on_bad_row: skip, by reason."""
    num_too_long: int = 0
    """Prompts with more than data.max_prompt_tokens. data.on_bad_row does not apply to them."""
    num_long: int = 0
    """Rows dropped because of a long response, under data.on_long_row: skip."""
    num_cut: int = 0
    """Used rows with a cut response, under data.on_long_row: cut."""
    problems: list[str] = field(default_factory=list)
    """Problems of the first few bad rows."""

    @property
    def num_bad(self) -> int:
        return self.bad.total()

    def __bool__(self) -> bool:
        return self.num_left_out + self.num_cut > 0

    @property
    def num_left_out(self) -> int:
        return self.num_bad + self.num_too_long + self.num_long

    @property
    def cut(self) -> str:
        """The number of rows with a cut response, in words."""
        return f"{self.num_cut} of them with a cut response"

    def __str__(self) -> str:
        return "".join((self.counts, *(f"\n  {problem}" for problem in self.problems)))

    @property
    def counts(self) -> str:
        """Numbers of rows by reason, in words."""
        reasons = ", ".join(f"{reason}: {number}" for reason, number in self.bad.most_common())
        bad = f"{self.num_bad} bad rows skipped{f' ({reasons})' if reasons else ''}"
        long = f", {self.num_long} responses too long" if self.num_long else ""
        cut = f"; {self.num_cut} of the used rows have a cut response" if self.num_cut else ""
        return f"{bad}, {self.num_too_long} prompts too long{long}{cut}"

    def add(self, other: "DroppedRows") -> None:
        """Adds the counts of later rows."""
        self.bad += other.bad
        self.num_too_long += other.num_too_long
        self.num_long += other.num_long
        self.num_cut += other.num_cut
        self.problems = [*self.problems, *other.problems][:MAX_KEPT_PROBLEMS]

    def note_bad(self, problem: str, reason: str) -> None:
        self.bad[reason] += 1
        if len(self.problems) < MAX_KEPT_PROBLEMS:
            self.problems.append(problem)


UsableRow = tuple[RowFile, int, PromptRow, float, Row]
"""(file, place in the file, row, difficulty, values)"""


class RowChecker:
    """A check of the rows of one source. `key` is the source's config key."""

    def __init__(self, parser: RowParser, data: schema.Data, key: str) -> None:
        self.parser, self.data, self.key = parser, data, key
        self.limit = SampleLimit.of(data, parser.model, parser.encoder.images)
        self.dropped = DroppedRows()
        self.num_usable = 0
        self.has_tools = False

    def usable(self, rows: Iterable[FileRow], num_before: Callable[[], int] = lambda: 0) -> Iterator[UsableRow]:
        """Yields the usable rows in their order, up to max_rows, and counts the others.

        `num_before` is called for messages, and its result added to the number of a row. Raises DataError for a bad
        row, unless data.on_bad_row is skip.
        """
        parser = self.parser
        for file, number, place, values in rows:
            if self.num_usable == parser.source.max_rows:
                return
            try:
                row = parser.parse(values, file.prefix, number)
                difficulty = parser.difficulty(values)
                self._check_images(row)
                too_long = _is_too_long(row, parser.encoder, self.data.max_prompt_tokens)
                problem = None if too_long else self._check_samples(row)
            except BadRow as bad:
                self._leave_out(f"{file.prefix}{number + num_before()}", bad)
                continue
            if too_long:
                self.dropped.num_too_long += 1
            elif problem is None or self._keeps_long_row(f"{file.prefix}{number + num_before()}", problem):
                assert not isinstance(values, BadRow), "it was parsed"
                self.num_usable += 1
                self.has_tools = self.has_tools or bool(row.tools)
                yield file, place, row, difficulty, values

    def _check_images(self, row: PromptRow) -> None:
        """Raises BadRow if an image of the row cannot be used, or if a text has the placeholder of images."""
        if (rules := self.parser.encoder.images) is None:
            return
        try:
            for image in row.images:
                rules.check(image, fully=self.data.images.check == "full")
        except DataError as error:
            raise BadRow(f"cannot be shown: {error}", UNUSABLE_IMAGES) from error
        if (mark := self.parser.encoder.placeholder) and any(mark in text for text in texts_of(row)):
            raise BadRow(
                f"cannot be shown: a text has {mark!r}, which the chat template writes for images; expected texts "
                f"without it, and {IMAGE_MARK} for images under images_key",
                UNUSABLE_IMAGES,
            )

    def _check_samples(self, row: PromptRow) -> str | None:
        """Returns why a sample of the row is too long, or None. Raises BadRow."""
        encoder = self.parser.encoder
        try:
            refuse_unknown_ids(row, encoder, self.parser.model)
            long = next(long_samples(row, encoder, self.limit, self.data.max_prompt_tokens), None)
        except DataError as error:
            raise BadRow(f"cannot be encoded: {str(error).removeprefix(f'{row.origin}: ')}") from error
        return None if long is None else self.limit.problem(long[1])

    def _keeps_long_row(self, origin: str, problem: str) -> bool:
        """Returns whether data.on_long_row lets a row with a long response be used. Raises DataError if it refuses such
        rows."""
        if self.data.on_long_row == "refuse":
            raise DataError(
                f"{origin}: in the row {problem} ({self.key}; to leave such rows out: data.on_long_row=skip; to cut "
                "their responses: data.on_long_row=cut)"
            )
        cuts = self.data.on_long_row == "cut"
        self.dropped.num_cut += cuts
        self.dropped.num_long += not cuts
        return cuts

    def _leave_out(self, origin: str, problem: BadRow) -> None:
        if self.data.on_bad_row == "refuse":
            raise DataError(
                f"{origin}: the row {problem} ({self.key}; to leave such rows out: data.on_bad_row=skip)"
            ) from None
        self.dropped.note_bad(f"{origin}: the row {problem}", problem.reason)


def refuse_unusable_source(checker: RowChecker, *, num_usable: int, has_tools: bool, dropped: DroppedRows) -> None:
    """Raises DataError if no row of the checker's source is usable, or if none has the tools of tools_key.

    The other arguments are results over all rows of the source, found by this checker or by others.
    """
    source, data, key = checker.parser.source, checker.data, checker.key
    if source.tools_key is not None and num_usable and not has_tools:
        raise DataError(
            f"{key}.tools_key: no usable row has tools under {source.tools_key!r}; expected the column that has them, "
            "or null"
        )
    if not num_usable:
        limits = f"data.max_prompt_tokens: {data.max_prompt_tokens}"
        if dropped.num_long and data.max_response_tokens:
            limits += f", data.max_response_tokens: {data.max_response_tokens}"
        raise DataError(f"{key}: {source.path!r} has no usable row ({limits}): {dropped}")


def _is_too_long(row: PromptRow, encoder: PromptEncoder, most: int) -> bool:
    """Returns whether the prompt has more than `most` tokens. It is encoded only if this is necessary."""
    if encoder.length_bound(row.prompt, row.tools) <= most:
        return False
    try:
        return encoder.num_tokens(row.prompt, row.tools) > most
    except DataError as error:
        raise BadRow(f"cannot be encoded: {error}") from error
