"""Small tokenizers with the special tokens and chat formats of real model families.

The templates in tests/support/chat_templates are written for these tests. Each keeps the parts of its family's template
that are hard to continue and shortens the wording.
"""

from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from rltrain.data.chat_format import ChatFormat

TEMPLATES = Path(__file__).parent / "chat_templates"

CORPUS = (
    "The answer to the question is 42, and the result of the tool was an error.\n\n",
    '{"name": "add", "arguments": {"a": 1, "b": 2}}\n[{"content": "the result"}]\n\n\n',
    "<think>\nThe user asks the model, so the model thinks.\n</think>\n\nThe answer, there.\n",
    "def add(a, b):\n    return a + b\n\nprint(add(1, 2))  # 3\n",
)
MERGES = 300
WORDS = r"\s*[\r\n]+|\s?\p{L}+|\p{N}|\s?[^\s\p{L}\p{N}]+|\s+"
"""Line feeds stay together, as in these families' tokenizers: the last ones of a prompt do not belong to the answer."""

ADD: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds two numbers.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    },
}
SEARCH: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "Searches.",
        "parameters": {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]},
    },
}
TOOLS = (ADD, SEARCH)


@dataclass(frozen=True)
class Family:
    """The tokens and settings that the template of a family needs."""

    special: tuple[str, ...]
    eos: str
    bos: str | None = None
    visible: tuple[str, ...] = ()
    """Added tokens that decoding keeps."""
    end_tokens: tuple[str, ...] = ()
    """End tokens of generation_config.json in addition to the tokenizer's eos_token."""
    takes: tuple[str, ...] = ("user", "tool")
    """Roles of the messages allowed after a turn of the model."""
    parallel_calls: bool = True
    options: dict[str, Any] = field(default_factory=dict)


CHATML = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TAGS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")

FAMILIES = {
    "qwen2_5": Family(CHATML, "<|im_end|>", visible=TAGS[:4], end_tokens=("<|endoftext|>",)),
    "qwen3": Family(CHATML, "<|im_end|>", visible=TAGS, end_tokens=("<|endoftext|>",)),
    "qwen3_coder": Family(CHATML, "<|im_end|>", visible=TAGS, end_tokens=("<|endoftext|>",)),
    "llama3_1": Family(
        (
            *("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>"),
            *("<|eot_id|>", "<|eom_id|>", "<|python_tag|>"),
        ),
        "<|eot_id|>",
        "<|begin_of_text|>",
        end_tokens=("<|end_of_text|>", "<|eom_id|>"),
        parallel_calls=False,
    ),
    "mistral_nemo": Family(
        (
            *("<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
            *("[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[TOOL_CALLS]"),
        ),
        "</s>",
        "<s>",
    ),
    "gemma3": Family(("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"), "<eos>", "<bos>", takes=("user",)),
    "deepseek_r1": Family(
        ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"),
        "<｜end▁of▁sentence｜>",
        "<｜begin▁of▁sentence｜>",
        visible=(
            *("<｜User｜>", "<｜Assistant｜>", "<think>", "</think>", "<｜tool▁sep｜>"),
            *("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"),
            *("<｜tool▁outputs▁begin｜>", "<｜tool▁outputs▁end｜>", "<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>"),
        ),
    ),
    "phi4": Family(("<|endoftext|>", "<|im_start|>", "<|im_sep|>", "<|im_end|>"), "<|im_end|>"),
    "smollm3": Family(CHATML, "<|im_end|>", visible=TAGS),
}


@cache
def _trained() -> str:
    tokenizer = Tokenizer(models.BPE())
    words = pre_tokenizers.Split(Regex(WORDS), behavior="isolated")
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, letters])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=len(alphabet) + MERGES, initial_alphabet=sorted(alphabet), show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS * 2, trainer)
    return str(tokenizer.to_str())


@cache
def tokenizer_of(name: str) -> PreTrainedTokenizerFast:
    """Returns the family's tokenizer: bytes, some merges, and the special tokens of its template."""
    family = FAMILIES[name]
    tokenizer = Tokenizer.from_str(_trained())
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in family.special])
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in family.visible])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=family.bos,
        eos_token=family.eos,
        chat_template=(TEMPLATES / f"{name}.jinja").read_text(),
    )


def format_of(name: str, tools: tuple[dict[str, Any], ...] = (), **options: Any) -> ChatFormat:
    tokenizer = tokenizer_of(name)
    ends = [tokenizer.convert_tokens_to_ids(token) for token in FAMILIES[name].end_tokens]
    return ChatFormat(tokenizer, tools=tools, template_options=options, end_tokens=ends)
