"""The checkpoint's tokenizer, prompts as token ids, and the messages and tools that rows hold."""

import hashlib
import importlib.metadata
import json
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rltrain.config import schema
from rltrain.data.chat_format import ChatFormat
from rltrain.data.chat_template import ends_of_turns, text_of
from rltrain.data.rows import BadRow, Struct
from rltrain.errors import CheckpointError, ConfigError, DataError
from rltrain.runtime.json_text import parse_json, read_json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


# Chat messages and tools as rows hold them.

Message = dict[str, Any]
"""One chat message: "role", "content" as a text and, where they apply, KEPT."""
AS_GIVEN = ("arguments", "parameters")
"""In an object under one of these a null is a value like others, unless the object is a Struct."""
KEPT = ("name", "tool_calls", "tool_call_id", "reasoning_content")


def parse_messages(value: Sequence[Any], key: str) -> list[Message]:
    """Raises BadRow for what is no message, or says nothing that a chat template could write."""
    return [_parse_message(message, key) for message in value]


def _parse_message(message: Any, key: str) -> Message:
    if isinstance(message, dict) and isinstance(message.get("role"), str):
        kept = {name: _without_nulls(message[name]) for name in KEPT if message.get(name)}
        content, calls = message.get("content"), kept.get("tool_calls")
        is_content = isinstance(content, str | list) or (content is None and calls is not None)
        if is_content and (calls is None or _are_calls(calls)):
            try:
                return {"role": message["role"], "content": text_of(content), **kept}
            except DataError as error:
                raise BadRow(f"has {error} under {key!r}") from None
    raise BadRow(
        f"has the chat message {shown(message)} under {key!r}; expected role and content, both texts, and in the place "
        "of content perhaps tool_calls, a list of {function: {name, arguments}}"
    )


def _are_calls(calls: Any) -> bool:
    return isinstance(calls, list) and all(
        isinstance(call, dict)
        and isinstance(call.get("function"), dict)
        and isinstance(call["function"].get("name"), str)
        for call in calls
    )


def parse_tools(value: Any, key: str) -> str:
    """Returns the JSON text of a list of tools; empty where the row has none. Of a list of objects fields that are null
    are left out, except for those within `parameters` that no Struct has."""
    tools = value
    if isinstance(value, str) and value.strip():
        try:
            tools = parse_json(value)
        except ValueError as error:
            raise BadRow(f"has {shown(value)} under {key!r}, which is not JSON: {error}") from None
    elif value is not None and value != "":
        tools = _without_nulls(value)
    if not tools:
        return ""
    if isinstance(tools, list) and all(isinstance(tool, dict) and _is_named(tool) for tool in tools):
        return json.dumps(tools, ensure_ascii=False, separators=(",", ":"))
    raise BadRow(f"has {shown(value)} under {key!r}; expected tools: a list of {{type, function: {{name, ...}}}}")


def _is_named(tool: Mapping[str, Any]) -> bool:
    function = tool.get("function", tool)
    return isinstance(function, Mapping) and isinstance(function.get("name"), str)


def _without_nulls(value: Any, *, as_given: bool = False) -> Any:
    """Returns a value without fields that are null. `as_given`: it stands under one of AS_GIVEN."""
    if isinstance(value, Mapping):
        keeps_nulls = as_given and not isinstance(value, Struct)
        return {
            name: _without_nulls(part, as_given=as_given or name in AS_GIVEN)
            for name, part in value.items()
            if keeps_nulls or part is not None
        }
    return [_without_nulls(part, as_given=as_given) for part in value] if isinstance(value, list) else value


def shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


# The checkpoint's tokenizer, and prompts as token ids.

MAX_FORMATS = 64
"""Sets of tools whose formats are kept."""
Prompt = str | Sequence[Message]


@dataclass(frozen=True)
class ModelLimits:
    """What a model has room for, by its config.json. None: its config.json is not known."""

    vocab_size: int | None = None
    max_positions: int | None = None


UNKNOWN_MODEL = ModelLimits()


def load_tokenizer(path: Path, config_key: str = "model.path") -> "PreTrainedTokenizerBase":
    """The tokenizer of a Hugging Face checkpoint folder. Reads local files only and runs none of their code.
    `config_key` is the key that names the folder, for messages."""
    from transformers import AutoTokenizer

    if not path.is_dir():
        raise CheckpointError(f"{config_key}: there is no folder {str(path)!r} (relative paths start at {Path.cwd()})")
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except Exception as error:
        raise CheckpointError(
            f"{config_key}: {str(path)!r} holds no usable tokenizer ({type(error).__name__}: {error}); "
            "expected tokenizer.json and tokenizer_config.json beside the weights"
        ) from error
    return tokenizer


def eos_token_id(tokenizer: "PreTrainedTokenizerBase") -> int:
    """The token that ends a response. Raises CheckpointError where the tokenizer names none."""
    token_id = tokenizer.eos_token_id
    if not isinstance(token_id, int):
        raise CheckpointError("model.path: the tokenizer has no eos_token; set it in tokenizer_config.json")
    return token_id


def end_token_ids(path: Path, config_key: str = "model.path") -> frozenset[int]:
    """Returns the tokens that end a turn by the checkpoint's generation_config.json, or, where that names none, by its
    config.json.

    Chat checkpoints name more than their tokenizer's eos_token there. Raises CheckpointError for a file that cannot be
    read.
    """
    for file in (path / "generation_config.json", path / "config.json"):
        if not file.is_file():
            continue
        try:
            values = read_json(file)
            value = values.get("eos_token_id", (values.get("text_config") or {}).get("eos_token_id"))
        except (OSError, ValueError, AttributeError) as error:
            raise CheckpointError(f"{config_key}: cannot read {file}: {error}; expected a JSON object") from error
        if value is None:
            continue
        named = value if isinstance(value, list) else [value]
        if not all(type(token) is int for token in named):
            raise CheckpointError(
                f"{config_key}: {file} has eos_token_id {value!r}; expected a token id or a list of them"
            )
        return frozenset(named)
    return frozenset()


def prompt_text(prompt: Prompt) -> str:
    """The prompt as reward functions see it: the text itself, or the messages' contents joined by blank lines."""
    if isinstance(prompt, str):
        return prompt
    return "\n\n".join(message["content"] for message in prompt if message["content"] or "tool_calls" not in message)


def load_encoder(config: schema.Config) -> "PromptEncoder":
    """Returns the encoder of the model's prompts. Raises CheckpointError for files that cannot be read."""
    path = Path(config.model.path)
    is_scored = config.algorithm == "reward_model"  # role reward_model looks for the tokenizer's own token
    return PromptEncoder(load_tokenizer(path), config.data, end_token_ids(path), ends_with_eos=is_scored)


class PromptEncoder:
    """Turns prompts into token ids, by the tokenizer's chat template where data.chat_template says so."""

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        data: schema.Data,
        named_ends: Collection[int] = (),
        *,
        ends_with_eos: bool = False,
    ) -> None:
        """`named_ends` are the end tokens that the checkpoint's files name.

        With `ends_with_eos` a written response ends with the tokenizer's eos_token, whatever the chat template has.
        """
        self.tokenizer, self.named_ends, self.ends_with_eos = tokenizer, named_ends, ends_with_eos
        self.system_prompt = data.system_prompt
        self.uses_template = data.chat_template == "auto" and tokenizer.chat_template is not None
        if self.system_prompt is not None and not self.uses_template:
            raise ConfigError(f"data.system_prompt is set, but {self.without_template}; remove data.system_prompt")
        self.template_options = data.chat_template_args
        self.chat = self._format(()) if self.uses_template else None
        self._refuse_unknown_options()
        self._formats: dict[str, ChatFormat] = {}
        self._overhead_tokens = len(self.encode([{"role": "user", "content": ""}] if self.uses_template else ""))

    def _refuse_unknown_options(self) -> None:
        for name in self.template_options:
            if self.chat is None:
                raise ConfigError(f"data.chat_template_args: got {name}, but {self.without_template}; expected none")
            if name not in self.chat.template.source:
                raise ConfigError(
                    f"data.chat_template_args: got {name}, a variable that the checkpoint's chat template does not "
                    "look at; expected those that it has"
                )

    @property
    def without_template(self) -> str:
        """Why prompts are not formatted as a chat, for messages."""
        if self.tokenizer.chat_template is None:
            return "the checkpoint's tokenizer has no chat template"
        return "data.chat_template is never"

    @cached_property
    def num_ids(self) -> int:
        """The largest id of the tokenizer, and one."""
        return max(self.tokenizer.get_vocab().values()) + 1

    def fingerprint(self) -> str:
        """Of all that decides how many tokens a prompt has."""
        tokenizer = self.tokenizer
        fast = getattr(tokenizer, "backend_tokenizer", None)
        decisive = (
            importlib.metadata.version("transformers"),
            type(tokenizer).__name__,
            sorted(tokenizer.get_vocab().items()) if fast is None else fast.to_str(),
            repr(sorted(tokenizer.init_kwargs.items(), key=lambda item: item[0])),
            *(self.uses_template, tokenizer.chat_template, self.system_prompt, self.template_options),
            *(sorted(self.named_ends), self.ends_with_eos),
        )
        return hashlib.sha256(json.dumps(decisive, default=str).encode(errors="surrogatepass")).hexdigest()

    def encode(self, prompt: Prompt, tools: str = "") -> tuple[int, ...]:
        """Token ids of `prompt` up to where the response begins. Message lists and `tools`, JSON text of a list of
        them, need a chat template."""
        if not self.uses_template:
            if not isinstance(prompt, str) or tools:
                raise DataError(f"a prompt is a list of chat messages or has tools, but {self.without_template}")
            return tuple(self.tokenizer(prompt)["input_ids"])
        return self.format_with(tools).prompt(self.messages(prompt))

    def messages(self, prompt: Prompt) -> list[Message]:
        """`prompt` as a conversation's first messages, data.system_prompt before them if they have none."""
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        if self.system_prompt is not None and messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": self.system_prompt})
        return messages

    def format_with(self, tools: str) -> ChatFormat:
        """The chat format that shows `tools`. ConfigError where the template does not write them."""
        assert self.chat is not None, "without a template nobody asks"
        if not tools:
            return self.chat
        if tools not in self._formats:
            chat = self._format(json.loads(tools))
            chat.require_tools()
            if len(self._formats) == MAX_FORMATS:
                self._formats.clear()
            self._formats[tools] = chat
        return self._formats[tools]

    def _format(self, tools: Sequence[Mapping[str, Any]]) -> ChatFormat:
        options = self.template_options
        return ChatFormat(self.tokenizer, tools=tools, template_options=options, end_tokens=self.named_ends)

    @cached_property
    def end_tokens(self) -> frozenset[int]:
        """The tokens that end what the model says."""
        return ends_of_turns(self.tokenizer, self.named_ends, self.chat.template if self.chat else None)

    @property
    def response_end(self) -> int:
        """The token that ends a response which somebody wrote down. Raises CheckpointError where there is none."""
        last = self.chat.end.last if self.chat and not self.ends_with_eos else None
        return eos_token_id(self.tokenizer) if last is None else last

    def encode_responses(self, responses: Sequence[str]) -> list[list[int]]:
        """Token ids of each response, as they would continue a prompt."""
        return list(self.tokenizer(list(responses), add_special_tokens=False)["input_ids"]) if responses else []

    def length_bound(self, prompt: Prompt, tools: str = "") -> int:
        """At least the tokens of `prompt`, without encoding it: no tokenizer makes more tokens than UTF-8 bytes. Where
        the template writes more than texts there is no such bound."""
        if tools or any(len(message) > 2 for message in ([] if isinstance(prompt, str) else prompt)):
            return sys.maxsize
        num_messages = 1 if isinstance(prompt, str) else len(prompt)
        return len(prompt_text(prompt).encode(errors="surrogatepass")) + num_messages * self._overhead_tokens

    def response_bound(self, response: Prompt, tools: str = "") -> int:
        """At least the tokens of `response` and of what ends it, as `length_bound`."""
        return len(response.encode()) + 1 if isinstance(response, str) else self.length_bound(response, tools)


class TextDecoder:
    """Turns response tokens into text without special tokens."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        self.tokenizer = tokenizer

    def decode(self, tokens: Sequence[int], /) -> str:
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=True))

    def spelled(self, tokens: Sequence[int], /) -> str:
        """Returns the text with its special tokens, as a model is shown it."""
        return str(self.tokenizer.decode(list(tokens)))
