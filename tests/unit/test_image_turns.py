"""Images in later turns of conversations, and the templates that place them."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rltrain.config import schema
from rltrain.data.chat_format import ChatFormat, Conversation
from rltrain.data.images import ImageRules, ImageSource
from rltrain.data.tokenizer import PromptEncoder, load_tokenizer
from rltrain.errors import CheckpointError, DataError
from tests.support.image_rows import (
    FILES,
    URLS,
    Load,
    Processor,
    checkpoint,
    expected_ids,
    folder,
    image,
    load,
    processor,
    said,
    spans,
    text,
    user,
)
from tests.support.vision_checkpoints import MERGE

PLAIN = """
{%- for message in messages -%}
{%- if loop.first and message.role != 'system' -%}{{ '<|im_start|>system\nHelp.<|im_end|>\n' }}{%- endif -%}
{{ '<|im_start|>' + message.role + '\n' }}
{%- if message.content is string -%}{{ message.content }}
{%- else -%}
{%- set shown = namespace(count=0) -%}
{%- for part in message.content -%}
{%- if part.type == 'image' or 'image' in part -%}
{%- set shown.count = shown.count + 1 -%}
{%- if add_vision_id -%}{{ 'Picture ' ~ shown.count ~ ': ' }}{%- endif -%}
<|vision_start|><|image_pad|><|vision_end|>
{%- elif 'text' in part -%}{{ part.text }}{%- endif -%}
{%- endfor -%}
{%- endif -%}
{{ '<|im_end|>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}
"""
WITH_TOOLS = """
{%- macro content_of(message) -%}
{%- if message.content is string -%}{{ message.content }}
{%- else -%}
{%- for part in message.content or [] -%}
{%- if part.type == 'image' -%}<|vision_start|><|image_pad|><|vision_end|>{%- else -%}{{ part.text }}{%- endif -%}
{%- endfor -%}
{%- endif -%}
{%- endmacro -%}
{%- if tools -%}{{ '<|im_start|>system\n' + tools | tojson + '<|im_end|>\n' }}{%- endif -%}
{%- for message in messages -%}
{%- if message.role == 'tool' -%}
{{ '<|im_start|>user\n(' + content_of(message) + ')<|im_end|>\n' }}
{%- else -%}
{{ '<|im_start|>' + message.role + '\n' + content_of(message) }}
{%- for call in message.tool_calls or [] -%}
{{ '<tool_call>{"name": "' + call.function.name + '", "arguments": ' }}
{{ call.function.arguments | tojson + '}</tool_call>' }}
{%- endfor -%}
{{ '<|im_end|>\n' }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}
"""
"""Templates in the manner of Qwen2.5-VL and Qwen3-VL."""
LOOK: dict[str, Any] = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}

__all__ = ["checkpoint", "folder", "load", "processor"]


def format_with(checkpoint: Path, template: str, *, tools: Sequence[dict[str, Any]] = (), **options: Any) -> ChatFormat:
    tokenizer = load_tokenizer(checkpoint)
    tokenizer.chat_template = template
    images = ImageRules.read(checkpoint, schema.Images())
    return ChatFormat(tokenizer, tools=tools, template_options=options, images=images)


def raw(name: str) -> dict[str, Any]:
    """Returns a part of type image as a client sends it."""
    return {"type": "image_url", "image_url": {"url": URLS[name]}}


@pytest.mark.parametrize("template", [PLAIN, WITH_TOOLS], ids=["plain", "with tools"])
@pytest.mark.parametrize("answer", ["user", "tool"])
def test_later_turns_show_images_as_the_whole_conversation_does(
    checkpoint: Path, processor: Processor, template: str, answer: str
) -> None:
    chat = format_with(checkpoint, template)
    first = [{"role": "system", "content": "Look."}, user(raw("wide"), text("Which?"))]
    second = [{"role": answer, "content": [text("here"), raw("tall"), raw("square"), text("?")]}]
    begun = Conversation.begin(chat, first)
    followed = begun.drawn(chat.template.encode("b<|im_end|>")).observed(second)
    messages = [
        first[0],
        user(image("wide"), text("Which?")),
        said("b"),
        {"role": answer, "content": [text("here"), image("tall"), image("square"), text("?")]},
    ]
    reference = Processor(processor.image_processor, chat.tokenizer, None, chat_template=template)
    assert followed.ids == expected_ids(reference, *messages)
    assert [(one.begin, one.num_tokens(MERGE)) for one in followed.images] == spans(followed.ids)
    rules = chat.images
    assert rules is not None
    names = ("wide", "tall", "square")
    assert [one.key for one in followed.images] == [rules.placed(ImageSource(None, FILES[n]), 0).key for n in names]
    continued = chat.continuation(begun.drawn(chat.template.encode("b<|im_end|>")).last_turn, second)
    assert continued.images[0].begin == followed.images[1].begin - len(followed.ids) + len(continued.ids)
    assert [source.read() for source in continued.sources] == [FILES["tall"], FILES["square"]]
    assert chat.num_tokens(messages_with(second[0], first)) == len(chat.prompt(messages_with(second[0], first)).ids)


def messages_with(last: dict[str, Any], first: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [*first, said("b"), last]


def test_a_tool_shows_an_image_after_a_call(checkpoint: Path) -> None:
    chat = format_with(checkpoint, WITH_TOOLS, tools=[LOOK])
    result = {"role": "tool", "tool_call_id": "call00001", "content": [raw("square"), text("seen")]}
    call = '<tool_call>{"name": "look", "arguments": {}}</tool_call>'
    shown = Conversation.begin(chat, [user(text("Look"))]).drawn(chat.template.encode(f"{call}<|im_end|>"))
    followed = shown.observed([result])
    assert [one.num_tokens(MERGE) for one in followed.images] == [16]
    assert "(<|vision_start|>" in str(chat.tokenizer.decode(followed.ids))
    assert chat.continuability.tool == "exact"


def test_clients_continue_a_conversation_with_the_same_images_in_another_form(checkpoint: Path, folder: Path) -> None:
    chat = format_with(checkpoint, PLAIN)
    begun = Conversation.begin(chat, [user({"type": "image", "path": str(folder / "wide.png")}, text("Which?"))])
    record = begun.drawn(chat.template.encode("b<|im_end|>"))
    new = user(raw("tall"), text("And?"))
    same = [user(raw("wide"), text("Which?")), said("b"), new]
    assert chat.extends(record, same) == (new,)
    others = [user(raw("tall"), text("Which?")), user(text("Which?")), user(raw("wide"), raw("wide"), text("Which?"))]
    for other in others:
        assert chat.extends(record, [other, said("b"), new]) is None


def test_numbered_images_are_refused_after_a_turn(checkpoint: Path) -> None:
    chat = format_with(checkpoint, PLAIN, add_vision_id=True)
    begun = Conversation.begin(chat, [user(raw("wide"), raw("tall"))])
    assert "Picture 2: " in str(chat.tokenizer.decode(begun.ids))
    record = begun.drawn(chat.template.encode("b<|im_end|>"))
    assert record.observed([user(text("go on"))]).images == begun.images
    with pytest.raises(DataError, match=r"data\.chat_template_args\.add_vision_id"):
        record.observed([user(raw("tall"))])


def test_a_template_without_a_place_for_images_is_refused(load: Load, checkpoint: Path, folder: Path) -> None:
    blind = "{% for m in messages %}{{ m.content if m.content is string else m.content[-1].text }}{% endfor %}"
    with pytest.raises(DataError, match="1 images, but 0 places for images; expected as many of both: a chat template"):
        format_with(checkpoint, blind).prompt([user(raw("wide"), text("?"))])


def test_a_tokenizer_without_the_placeholder_is_refused(checkpoint: Path) -> None:
    data = schema.Data(train=schema.PromptFile(path="t"))
    images = replace(ImageRules.read(checkpoint, data.images), image_token=10_000)
    encoder = PromptEncoder(load_tokenizer(checkpoint), data, images=images)
    with pytest.raises(CheckpointError, match=r"no token 10000, the image_token_id of config\.json"):
        assert encoder.placeholder
