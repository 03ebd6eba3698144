"""What all routes of the endpoint share."""

import json
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rltrain.data.chat_format import ChatFormat
from rltrain.endpoint.chat_messages import checked
from rltrain.endpoint.limits import Limits
from rltrain.endpoint.opening import ChatOpening, IdsOpening, TextOpening
from rltrain.endpoint.refused import invalid
from rltrain.endpoint.sampling_rules import SamplingRules
from rltrain.endpoint.sessions import Sessions
from rltrain.endpoint.token_text import TokenText
from rltrain.errors import ConfigError, DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rltrain.endpoint.control import EngineControl

KEPT_FORMATS = 64
"""Chat formats of different tools."""


@dataclass
class Service:
    """`model` is the name that answers carry, whatever name requests give. `answers_passers_by`: whoever may open
    sessions may send requests outside of any as well, of which nothing is recorded."""

    sessions: Sessions
    rules: SamplingRules
    limits: Limits
    tokenizer: "PreTrainedTokenizerBase"
    model: str
    answers_passers_by: bool
    control: "EngineControl | None" = None
    """None: nobody may change what the engine serves."""
    end_tokens: Collection[int] = ()
    """What ends a turn in chats, beside what the tokenizer and its template say."""

    def __post_init__(self) -> None:
        self.tokens = TokenText(self.tokenizer)
        self._formats: OrderedDict[str, ChatFormat] = OrderedDict()

    def weight_version(self, policy_versions: Sequence[int]) -> dict[str, str]:
        """A field of answers: what the weights are called that drew these tokens."""
        if self.control is None or not policy_versions:
            return {}
        return {"weight_version": ", ".join(dict.fromkeys(map(self.control.label, policy_versions)))}

    def chat(
        self, given: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], options: Mapping[str, Any]
    ) -> ChatOpening:
        """Raises Refused where the checkpoint has no chats, or none like this."""
        if self.tokenizer.chat_template is None:
            raise invalid("this checkpoint's tokenizer has no chat template; send a text to /v1/completions")
        messages = checked(given)
        if not messages:
            raise invalid("messages: got none that says anything; expected at least one", "messages")
        if messages[-1].get("role") == "assistant":
            raise invalid("messages: the last one is the assistant's; expected one that it is to answer", "messages")
        key = json.dumps([list(tools), dict(options)], sort_keys=True)
        made = self._formats.get(key) or self._format(tools, options)
        self._formats[key] = made
        self._formats.move_to_end(key)
        if len(self._formats) > KEPT_FORMATS:
            self._formats.popitem(last=False)
        return ChatOpening(messages, (*tools, dict(options)), made)

    def _format(self, tools: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> ChatFormat:
        """Raises Refused where the checkpoint's template has no place for the tools."""
        try:
            made = ChatFormat(self.tokenizer, tools=tools, template_options=options, end_tokens=self.end_tokens)
            made.require_tools()
        except (ConfigError, DataError) as error:
            raise invalid(f"tools: {error}", "tools") from error
        return made

    def prompt(self, given: str | Sequence[int]) -> TextOpening | IdsOpening:
        if isinstance(given, str):
            return TextOpening(given, self.tokens)
        return IdsOpening(tuple(given), self.tokens)
