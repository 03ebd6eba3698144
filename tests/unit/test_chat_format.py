"""What a template writes after a turn of the model, by family: closings, answers, and where the next turn begins."""

from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from rltrain.data.chat_format import ChatFormat
from rltrain.errors import ConfigError, DataError
from tests.chat_families import ADD, FAMILIES, TOOLS, format_of, tokenizer_of

USER = ({"role": "user", "content": "And now?"},)


def result(content: str, call_id: str = "call00001") -> dict[str, Any]:
    return {"role": "tool", "name": "add", "tool_call_id": call_id, "content": content}


def ids(chat: ChatFormat, text: str) -> tuple[int, ...]:
    return chat.template.encode(text)


def continued(chat: ChatFormat, turn: str, *messages: Any) -> str:
    return str(chat.tokenizer.decode(chat.continuation(ids(chat, turn), messages)))


CLOSING_AND_USER = {
    "qwen2_5": ("<|im_end|>", "\n<|im_start|>user\nAnd now?<|im_end|>\n<|im_start|>assistant\n"),
    "qwen3": ("<|im_end|>", "\n<|im_start|>user\nAnd now?<|im_end|>\n<|im_start|>assistant\n"),
    "qwen3_coder": ("<|im_end|>", "\n<|im_start|>user\nAnd now?<|im_end|>\n<|im_start|>assistant\n"),
    "llama3_1": (
        "<|eot_id|>",
        "<|start_header_id|>user<|end_header_id|>\n\nAnd now?<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
    ),
    "mistral_nemo": ("</s>", "[INST]And now?[/INST]"),
    "gemma3": ("<end_of_turn>", "\n<start_of_turn>user\nAnd now?<end_of_turn>\n<start_of_turn>model\n"),
    "deepseek_r1": ("<｜end▁of▁sentence｜>", "<｜User｜>And now?<｜Assistant｜><think>\n"),
    "phi4": ("<|im_end|>", "<|im_start|>user<|im_sep|>And now?<|im_end|><|im_start|>assistant<|im_sep|>"),
    "smollm3": ("<|im_end|>", "\n<|im_start|>user\nAnd now?<|im_end|>\n<|im_start|>assistant\n"),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_turn_gets_what_it_lacks_of_its_closing(family: str) -> None:
    closing, following = CLOSING_AND_USER[family]
    chat = format_of(family)
    assert continued(chat, f"4{closing}", *USER) == following
    assert continued(chat, "4", *USER) == closing + following, "a limit cut it"
    for other in (*FAMILIES[family].end_tokens, FAMILIES[family].eos):
        assert continued(chat, f"4{other}", *USER) == following, "another end token of the model's stands for it"


RESULTS = {
    "qwen2_5": (
        "<|im_end|>",
        "\n<|im_start|>user\n<tool_response>\n3\n</tool_response>\n<tool_response>\n7\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n",
    ),
    "qwen3": (
        "<|im_end|>",
        "\n<|im_start|>user\n<tool_response>\n3\n</tool_response>\n<tool_response>\n7\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n",
    ),
    "qwen3_coder": (
        "<|im_end|>",
        "\n<|im_start|>user\n<tool_response>\n3\n</tool_response>\n<tool_response>\n7\n</tool_response>\n<|im_end|>\n"
        "<|im_start|>assistant\n",
    ),
    "llama3_1": (
        "<|eom_id|>",
        '<|start_header_id|>ipython<|end_header_id|>\n\n"3"<|eot_id|>'
        '<|start_header_id|>ipython<|end_header_id|>\n\n"7"<|eot_id|>'
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
    ),
    "mistral_nemo": (
        "</s>",
        '[TOOL_RESULTS]{"content": "3", "call_id": "call00001"}[/TOOL_RESULTS]'
        '[TOOL_RESULTS]{"content": "7", "call_id": "call00002"}[/TOOL_RESULTS]',
    ),
    "deepseek_r1": (
        "<｜end▁of▁sentence｜>",
        "<｜tool▁outputs▁begin｜><｜tool▁output▁begin｜>3<｜tool▁output▁end｜>"
        "<｜tool▁output▁begin｜>7<｜tool▁output▁end｜><｜tool▁outputs▁end｜>",
    ),
}


@pytest.mark.parametrize("family", RESULTS)
def test_results_of_tools_follow_a_turn_together(family: str) -> None:
    closing, following = RESULTS[family]
    chat = format_of(family, TOOLS)
    assert continued(chat, f"calls{closing}", result("3"), result("7", "call00002")) == following


def test_a_result_that_does_not_name_its_call_is_given_an_id() -> None:
    chat = format_of("mistral_nemo", TOOLS)
    following = continued(chat, "calls</s>", {"role": "tool", "content": "3"})
    assert following == '[TOOL_RESULTS]{"content": "3", "call_id": "call00000"}[/TOOL_RESULTS]'


def test_what_follows_is_encoded_by_itself() -> None:
    """The turn ends in the first half of a token; the template goes on with the other half."""
    chat = ChatFormat(tokenizer_with("{% for m in messages %}{{ m.content }}\n\n{% endfor %}"))
    newline, both = ids(chat, "\n"), ids(chat, "\n\n")
    assert len(newline) == len(both) == 1 and newline != both
    following = chat.continuation(newline, USER)
    assert following == ids(chat, "\n\nAnd now?\n\n"), "nothing of the turn was decoded"


def tokenizer_with(template: str, eos: str = "<|im_end|>") -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer_of("phi4").backend_tokenizer, eos_token=eos, chat_template=template
    )


def test_a_closing_of_several_tokens() -> None:
    source = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_sep|><|im_end|>\n{% endfor %}"
    chat = ChatFormat(tokenizer_with(source))
    following = "\n<|im_start|>And now?<|im_sep|><|im_end|>\n"
    assert chat.end_tokens == set(ids(chat, "<|im_end|>")), "an engine goes on behind the first of them"
    assert continued(chat, "4<|im_sep|><|im_end|>", *USER) == following
    assert continued(chat, "4<|im_end|>", *USER) == following
    assert continued(chat, "4", *USER) == "<|im_sep|><|im_end|>" + following


def test_turns_that_are_ended_by_what_begins_the_next_message() -> None:
    """GLM's models end a turn by the next message's first token, which tells a user from a tool."""
    source = (
        "{% for m in messages %}{{ {'user': '<|im_start|>', 'tool': '<|im_sep|>'}[m.role] | default('<|im_end|>')}}"
    )
    chat = ChatFormat(tokenizer_with(source + "{{ m.content }}{% endfor %}", eos="<|endoftext|>"))
    ends = ids(chat, "<|im_start|><|im_sep|>")
    chat = ChatFormat(chat.tokenizer, end_tokens=ends)
    assert chat.end_tokens == {*ends, *ids(chat, "<|endoftext|>")}
    assert continued(chat, "4<|im_start|>", *USER) == "And now?"
    assert continued(chat, "4<|im_sep|>", result("3")) == "3"
    assert continued(chat, "4<|im_sep|>", *USER) == "<|im_start|>And now?", "it expected a tool"


@pytest.mark.parametrize(
    ("family", "tools", "options", "user", "tool"),
    [
        ("qwen2_5", TOOLS, {}, "exact", "exact"),
        ("qwen3_coder", TOOLS, {}, "exact", "exact"),
        ("llama3_1", (ADD,), {}, "exact", "exact"),
        ("phi4", (), {}, "exact", "exact"),
        ("smollm3", TOOLS, {}, "exact", "exact"),
        ("qwen3", TOOLS, {}, "appended", "exact"),
        ("qwen3", TOOLS, {"enable_thinking": False}, "appended", "appended"),
        ("mistral_nemo", (), {}, "appended", "exact"),
        ("mistral_nemo", TOOLS, {}, "appended", "exact"),
        ("deepseek_r1", TOOLS, {}, "appended", "appended"),
        ("gemma3", (), {}, "exact", "refused"),
    ],
)
def test_what_each_template_allows(family: str, tools: Any, options: dict[str, Any], user: str, tool: str) -> None:
    found = format_of(family, tools, **options).continuability
    assert (found.user, found.tool) == (user, tool), found
    assert (found.notice is not None) == ("appended" in (user, tool))


def test_the_notice_says_what_the_template_would_render_otherwise() -> None:
    notice = format_of("qwen3").continuability.notice or ""
    assert "reasoning of earlier turns" in notice and "<think>" in notice
    notice = format_of("mistral_nemo", TOOLS).continuability.notice or ""
    assert "earlier turns" in notice and "[AVAILABLE_TOOLS]" in notice


def test_a_template_that_cannot_go_on_is_refused_by_what_it_says() -> None:
    found = format_of("gemma3").continuability
    found.require("user")
    with pytest.raises(ConfigError, match="role tool: .*roles must alternate.*have the environment answer"):
        found.require("user", "tool")
    with pytest.raises(DataError, match="refuses messages of roles tool"):
        format_of("gemma3").continuation((1,), [result("3")])


def test_tools_that_the_template_does_not_write_are_refused() -> None:
    for tools in (TOOLS, [named("user")]):  # of which the template writes the word, but not the tool
        with pytest.raises(ConfigError, match="does not write the tools"):
            format_of("phi4", tools).require_tools()
    format_of("phi4").require_tools()
    format_of("qwen2_5", [*TOOLS, named("user")]).require_tools()


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}}}}


@pytest.mark.parametrize("family", ["deepseek_r1", "smollm3"])
def test_messages_that_the_template_moves_to_the_front_are_refused(family: str) -> None:
    with pytest.raises(DataError, match="role system after the model's turn"):
        format_of(family).continuation((1,), [{"role": "system", "content": "New rules."}, *USER])


def test_a_template_that_does_not_write_the_models_turns_is_refused() -> None:
    chat = ChatFormat(tokenizer_with("{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"))
    assert chat.continuability.user == "refused"
    with pytest.raises(ConfigError, match="does not write what the model said"):
        chat.continuability.require("user")


def test_no_messages_are_no_answer() -> None:
    with pytest.raises(DataError, match="no message follows"):
        format_of("qwen3").continuation((1,), [])


def test_calls_of_a_prompt_are_given_as_the_template_takes_them() -> None:
    """OpenAI's clients write arguments as text; most templates want an object, DeepSeek's the text."""
    call = {"id": "call00001", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "1 + 1?"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        result("1"),
    ]
    for family in RESULTS:
        text = format_of(family, TOOLS).template.render(messages)
        assert "1 + 1?" in text and '"a' in text.replace("<parameter=a>\n1", '"a'), family
        assert '\\"a' not in text, family


def test_a_text_that_contains_the_placeholder_is_no_trouble() -> None:
    chat = format_of("qwen2_5")
    message = {"role": "user", "content": "rltrainsturn rltrainsturnx"}
    expected = "\n<|im_start|>user\nrltrainsturn rltrainsturnx<|im_end|>\n<|im_start|>assistant\n"
    assert continued(chat, "4<|im_end|>", message) == expected
