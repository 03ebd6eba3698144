"""The checkpoint's tokenizer, prompts as token ids, and the chat messages and tools of rows."""

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
from rltrain.data.chat_template import RenderError, ends_of_turns, text_of
from rltrain.data.image_parts import images_of, with_sources, written
from rltrain.data.images import Context, ImageRules, ImageSource
from rltrain.data.rows import BadRow, Struct
from rltrain.errors import CheckpointError, ConfigError, DataError
from rltrain.runtime.json_text import parse_json, read_json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


# Chat messages and tools in rows.

Message = dict[str, Any]
"""A chat message: "role", "content" and fields of KEPT if present. The content is a text. In runs that see it may be a
list of parts of types text and image. A part of type image has an ImageSource under "image"."""
AS_GIVEN = ("arguments", "parameters")
"""In an object under one of these keys a null is kept as a value. Nulls of a Struct are left out."""
UNUSABLE_IMAGES = "unusable images"
"""The name under which rows with such images are counted."""
KEPT = ("name", "tool_calls", "tool_call_id", "reasoning_content")


def parse_messages(value: Sequence[Any], key: str, images_in: Path | None = None) -> list[Message]:
    """Returns the chat messages of a row. Raises BadRow for invalid messages, and for messages that no chat template
    could write.

    Messages may have images if `images_in` is given. It is the folder of relative paths. Places for images without an
    image have None under "image".
    """
    return [_parse_message(message, key, images_in) for message in value]


def _parse_message(message: Any, key: str, images_in: Path | None) -> Message:
    if isinstance(message, dict) and isinstance(message.get("role"), str):
        kept = {name: _without_nulls(message[name]) for name in KEPT if message.get(name)}
        content, calls = message.get("content"), kept.get("tool_calls")
        is_content = isinstance(content, str | list) or (content is None and calls is not None)
        if is_content and (calls is None or _are_calls(calls)):
            try:
                return {"role": message["role"], "content": _content(message["role"], content, images_in), **kept}
            except DataError as error:
                if images_in is not None:
                    raise BadRow(f"cannot be shown: {error} (under {key!r})", UNUSABLE_IMAGES) from None
                raise BadRow(f"has {error} under {key!r}") from None
    raise BadRow(
        f"has the chat message {shown(message)} under {key!r}; expected role and content, both texts, or instead of "
        "content tool_calls, a list of {function: {name, arguments}}"
    )


def _content(role: str, content: Any, images_in: Path | None) -> Any:
    if images_in is None or not isinstance(content, list):
        return text_of(content)
    parts = with_sources({"role": role, "content": content}, images_in)["content"]
    return text_of(parts) if role == "assistant" else parts


def _are_calls(calls: Any) -> bool:
    return isinstance(calls, list) and all(
        isinstance(call, dict)
        and isinstance(call.get("function"), dict)
        and isinstance(call["function"].get("name"), str)
        for call in calls
    )


def parse_tools(value: Any, key: str) -> str:
    """Returns the JSON text of a list of tools, or "" if the row has none.

    In a list of objects, fields with null are left out. Nulls within `parameters` are kept unless a Struct has them.
    """
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
    """Returns a value without null fields. `as_given` is True for a value under a key of AS_GIVEN."""
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
"""Number of tool sets with a cached format."""
Prompt = str | Sequence[Message]


@dataclass(frozen=True)
class ModelLimits:
    """The sizes in a model's config.json. None if the file is unknown."""

    vocab_size: int | None = None
    max_positions: int | None = None


UNKNOWN_MODEL = ModelLimits()


def load_tokenizer(path: Path, config_key: str = "model.path") -> "PreTrainedTokenizerBase":
    """Loads the tokenizer of a Hugging Face checkpoint folder. Reads only local files and runs no code from them.

    `config_key` is the folder's key, for messages. Raises CheckpointError if the folder has no usable tokenizer.
    """
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
    """Returns the token that ends a response. Raises CheckpointError if the tokenizer has none."""
    token_id = tokenizer.eos_token_id
    if not isinstance(token_id, int):
        raise CheckpointError("model.path: the tokenizer has no eos_token; set it in tokenizer_config.json")
    return token_id


def end_token_ids(path: Path, config_key: str = "model.path") -> frozenset[int]:
    """Returns the tokens that end a turn according to the checkpoint's generation_config.json, or else its config.json.

    Chat checkpoints name more tokens there than their tokenizer's eos_token. Raises CheckpointError if a file cannot be
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
    """Returns the prompt for reward functions: the text itself, or the messages' contents joined by blank lines. An
    image is written as <image>."""
    if isinstance(prompt, str):
        return prompt
    return "\n\n".join(
        written(message["content"]) for message in prompt if message["content"] or "tool_calls" not in message
    )


def load_encoder(config: schema.Config) -> "PromptEncoder":
    """Returns the encoder of the model's prompts. Raises CheckpointError if the model's files cannot be read."""
    path = Path(config.model.path)
    is_scored = config.algorithm == "reward_model"  # role reward_model looks for the tokenizer's eos_token
    ends, images = end_token_ids(path), ImageRules.of(config)
    return PromptEncoder(load_tokenizer(path), config.data, ends, ends_with_eos=is_scored, images=images)


class PromptEncoder:
    """The encoder of prompts as token ids. It uses the tokenizer's chat template if data.chat_template is "auto"."""

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        data: schema.Data,
        named_ends: Collection[int] = (),
        *,
        ends_with_eos: bool = False,
        images: ImageRules | None = None,
    ) -> None:
        """`named_ends` are the end tokens named in the checkpoint's files.

        With `ends_with_eos` a written response ends with the tokenizer's eos_token, even if the chat template has
        another end. Without `images` prompts have no images.
        """
        self.tokenizer, self.named_ends, self.ends_with_eos = tokenizer, named_ends, ends_with_eos
        self.images = images
        self.system_prompt = data.system_prompt
        self.uses_template = data.chat_template == "auto" and tokenizer.chat_template is not None
        if self.system_prompt is not None and not self.uses_template:
            raise ConfigError(f"data.system_prompt is set, but {self.without_template}; remove data.system_prompt")
        self.template_options = data.chat_template_args
        self.chat = self._format(()) if self.uses_template else None
        self._refuse_unknown_options()
        self._formats: dict[str, ChatFormat] = {}
        self._overhead_tokens = len(self.encode([{"role": "user", "content": ""}] if self.uses_template else "").ids)

    def _refuse_unknown_options(self) -> None:
        for name in self.template_options:
            if self.chat is None:
                raise ConfigError(f"data.chat_template_args: got {name}, but {self.without_template}; expected none")
            if name not in self.chat.template.source:
                raise ConfigError(
                    f"data.chat_template_args: got {name}, but the checkpoint's chat template has no such variable"
                )

    @property
    def without_template(self) -> str:
        """The reason why prompts are not formatted as chats, for messages."""
        if self.tokenizer.chat_template is None:
            return "the checkpoint's tokenizer has no chat template"
        return "data.chat_template is never"

    @cached_property
    def num_ids(self) -> int:
        """The tokenizer's largest id plus one."""
        return max(self.tokenizer.get_vocab().values()) + 1

    @cached_property
    def placeholder(self) -> str | None:
        """The template's text for an image, or None in runs that do not see. Raises CheckpointError if the tokenizer
        lacks it."""
        if self.images is None:
            return None
        placeholder = self.tokenizer.convert_ids_to_tokens(self.images.image_token)
        if not isinstance(placeholder, str):
            raise CheckpointError(
                f"model.path: the tokenizer has no token {self.images.image_token}, the image_token_id of config.json; "
                "expected the tokenizer of the same model"
            )
        return placeholder

    def fingerprint(self) -> str:
        """Returns a hash of everything that determines a prompt's number of tokens."""
        tokenizer = self.tokenizer
        fast = getattr(tokenizer, "backend_tokenizer", None)
        decisive = (
            importlib.metadata.version("transformers"),
            type(tokenizer).__name__,
            sorted(tokenizer.get_vocab().items()) if fast is None else fast.to_str(),
            repr(sorted(tokenizer.init_kwargs.items(), key=lambda item: item[0])),
            *(self.uses_template, tokenizer.chat_template, self.system_prompt, self.template_options),
            *(sorted(self.named_ends), self.ends_with_eos),
            *(() if self.images is None else (repr(self.images),)),
        )
        return hashlib.sha256(json.dumps(decisive, default=str).encode(errors="surrogatepass")).hexdigest()

    def encode(self, prompt: Prompt, tools: str = "") -> Context:
        """Returns token ids of `prompt` up to the start of the response, with its images.

        Message lists and `tools` need a chat template. `tools` is the JSON text of a list. Raises DataError if the
        prompt cannot be encoded.
        """
        if not self.uses_template:
            return Context(self._plain(prompt, tools))
        return self.format_with(tools).prompt(self.messages(prompt))

    def num_tokens(self, prompt: Prompt, tools: str = "") -> int:
        """Returns the number of ids that `encode` would return. Of images it reads headers alone."""
        if not self.uses_template:
            return len(self._plain(prompt, tools))
        return self.format_with(tools).num_tokens(self.messages(prompt))

    def _plain(self, prompt: Prompt, tools: str) -> tuple[int, ...]:
        if not isinstance(prompt, str) or tools:
            raise DataError(f"a prompt is a list of chat messages or has tools, but {self.without_template}")
        ids = tuple(self.tokenizer(prompt)["input_ids"])
        return ids if self.images is None else self.images.place(ids, ()).ids

    def messages(self, prompt: Prompt) -> list[Message]:
        """Returns the first messages of a conversation. data.system_prompt comes first if the prompt has no system
        message."""
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        if self.system_prompt is not None and messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": self.system_prompt})
        return messages

    def format_with(self, tools: str) -> ChatFormat:
        """Returns the chat format with `tools`. Raises ConfigError if the template does not write them."""
        assert self.chat is not None, "it is called only with a chat template"
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
        ends, images = self.named_ends, self.images
        return ChatFormat(self.tokenizer, tools=tools, template_options=options, end_tokens=ends, images=images)

    @cached_property
    def end_tokens(self) -> frozenset[int]:
        """The tokens that end the model's turn."""
        return ends_of_turns(self.tokenizer, self.named_ends, self.chat.template if self.chat else None)

    @property
    def response_end(self) -> int:
        """The token that ends a response from a file. Raises CheckpointError if there is none."""
        last = self.chat.end.last if self.chat and not self.ends_with_eos else None
        return eos_token_id(self.tokenizer) if last is None else last

    def encode_responses(self, responses: Sequence[str]) -> list[list[int]]:
        """Returns the token ids of each response as the continuation of a prompt."""
        return list(self.tokenizer(list(responses), add_special_tokens=False)["input_ids"]) if responses else []

    def length_bound(self, prompt: Prompt, tools: str = "") -> int:
        """Returns an upper bound on the tokens of `prompt`, without encoding it.

        No tokenizer makes more tokens than UTF-8 bytes. If the template writes more than texts and images, the bound
        is sys.maxsize. Of images it reads the headers. Raises DataError if one cannot be read.
        """
        messages = [] if isinstance(prompt, str) else prompt
        if tools or any(len(message) > 2 for message in messages):
            return sys.maxsize
        num_texts = 1 if isinstance(prompt, str) else len(prompt)
        num_texts += sum(len(message["content"]) for message in messages if isinstance(message["content"], list))
        of_texts = len(prompt_text(prompt).encode(errors="surrogatepass")) + num_texts * self._overhead_tokens
        return of_texts + (self._bound_of_images(images_of(messages)) if self.images else 0)

    def _bound_of_images(self, images: Sequence[ImageSource]) -> int:
        """Returns an upper bound on the tokens of images in a prompt, with the template's marks around them."""
        if not images or self.images is None:
            return 0
        around = self._around_an_image
        num_digits = len(str(len(images)))  # a template may number them
        return sum(self.images.num_tokens(image) + around + num_digits for image in images)

    @cached_property
    def _around_an_image(self) -> int:
        """Number of tokens of a prompt with nothing but an image, or sys.maxsize if the template refuses it."""
        assert self.chat is not None, "only messages have images"
        try:
            shown: list[Message] = [{"role": "user", "content": [{"type": "image"}]}]
            return len(self.chat.template.encode(self.chat.template.render(shown)))
        except RenderError:
            return sys.maxsize

    def response_bound(self, response: Prompt, tools: str = "") -> int:
        """Returns an upper bound on the tokens of `response` and its end, like `length_bound`."""
        return len(response.encode()) + 1 if isinstance(response, str) else self.length_bound(response, tools)


class TextDecoder:
    """The decoder of response tokens. The text has no special tokens."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        self.tokenizer = tokenizer

    def decode(self, tokens: Sequence[int], /) -> str:
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=True))

    def spelled(self, tokens: Sequence[int], /) -> str:
        """Returns the text with its special tokens, as the model gets it."""
        return str(self.tokenizer.decode(list(tokens)))
