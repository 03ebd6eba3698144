"""Whether a template can be continued, found out at the start by small conversations."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from rltrain.chat.assistant_turn import REASONING_MARKS
from rltrain.chat.increments import CALL_ID, OPENING, Increments, tool_names
from rltrain.chat.template import ChatTemplate, RenderError
from rltrain.environments.interface import Message
from rltrain.errors import ConfigError, DataError

Verdict = Literal["exact", "appended", "refused"]
"""exact: what is appended is what the template would make of the whole conversation. appended: it is what was drawn
and given, but the template would render earlier turns otherwise. refused: the template has no place for the message."""

EXCERPT_CHARS = 40


@dataclass(frozen=True)
class Continuability:
    """What follows a turn of the model: messages of the user, results of tools."""

    user: Verdict
    tool: Verdict
    differences: tuple[str, ...]
    """What the template would render otherwise in the whole conversation, in words."""
    refusals: tuple[str, ...]

    def require(self, *roles: Literal["user", "tool"]) -> None:
        """Raises ConfigError where messages of `roles` cannot follow a turn of the model."""
        verdicts = {"user": self.user, "tool": self.tool}
        if refused := [role for role in roles if verdicts[role] == "refused"]:
            raise ConfigError(
                f"a conversation cannot go on by messages of role {', '.join(refused)}: {'; '.join(self.refusals)}. "
                "Expected a chat template that takes them after the model's turn: have the environment answer by "
                "messages of another role (a text is one of the user), or give the checkpoint's tokenizer another "
                "chat_template"
            )

    @property
    def notice(self) -> str | None:
        """One message for whoever starts the job; None: there is nothing to tell."""
        if not self.differences:
            return None
        return (
            "conversations go on from what was drawn and given; the chat template, rendered anew, would change "
            "what stands before: " + "; ".join(self.differences)
        )


def find_out(template: ChatTemplate, increments: Increments) -> Continuability:
    """Continues small conversations and compares them with what the template makes of the whole."""
    probe = _Probe(template, increments)
    user = [*probe.compare(_user_conversations(template, probe.opening))]
    tool = [*probe.compare(_tool_conversations(template, probe.opening))]
    refusals = tuple(result.words for result in (*user, *tool) if result.verdict == "refused")
    differences = {result.words: result.about for result in (*tool, *user) if result.verdict == "appended"}
    words = tuple(f"{about} ({words})" for words, about in differences.items())
    return Continuability(_worst(user), _worst(tool), words, refusals)


def require_tools(template: ChatTemplate) -> None:
    """Raises ConfigError where the template does not write the tools that it was given."""
    names = Counter(tool_names(template.tools))
    bare = _opening(ChatTemplate(template.tokenizer, (), template.options)) if names else ""
    shown = _opening(template) if names else ""
    if any(shown.count(name) < bare.count(name) + number for name, number in names.items()):
        raise ConfigError(
            "the checkpoint's chat template does not write the tools that it is given, so the model would not know "
            "of them; expected a template with tools. Give none and describe them in the prompt, or use a "
            "checkpoint whose template has them"
        )


def _opening(template: ChatTemplate) -> str:
    """A short prompt; empty where the template refuses it."""
    try:
        return template.render([OPENING])
    except RenderError:
        return ""


@dataclass(frozen=True)
class _Result:
    verdict: Verdict
    about: str = ""
    words: str = ""


def _worst(results: Sequence[_Result]) -> Verdict:
    verdicts = {result.verdict for result in results}
    return "refused" if "refused" in verdicts else "appended" if "appended" in verdicts else "exact"


@dataclass(frozen=True)
class _Dialogue:
    """A prompt, and turns of the model each with what answers it."""

    about: str
    prompt: tuple[Message, ...]
    steps: tuple[tuple[Message, tuple[Message, ...]], ...]


def _reasoning(template: ChatTemplate, prompt: str) -> Iterator[str]:
    """What may stand before answers of a model that goes on from `prompt`: nothing, or the marks of its reasoning."""
    marks = next(((opening, closing) for opening, closing in REASONING_MARKS if closing in template.source), None)
    if marks is None or not prompt.rstrip().endswith(marks[0]):
        yield ""
    if marks is not None and not prompt.rstrip().endswith(marks[1]):
        yield f"{marks[0]}\nthought\n{marks[1]}\n\n"


def _user_conversations(template: ChatTemplate, prompt: str) -> Iterator[_Dialogue]:
    for reasoning in _reasoning(template, prompt):
        steps = tuple(
            (
                {"role": "assistant", "content": f"{reasoning}answer{number}"},
                ({"role": "user", "content": f"asks{number}"},),
            )
            for number in range(2)
        )
        system = {"role": "system", "content": "rules"}
        yield _Dialogue("the system prompt or earlier turns", (system, OPENING), steps)
        yield _Dialogue("reasoning of earlier turns" if reasoning else "earlier turns", (OPENING,), steps)


def _tool_conversations(template: ChatTemplate, prompt: str) -> Iterator[_Dialogue]:
    name = next(iter(tool_names(template.tools)), "tool")
    call = {"id": CALL_ID, "type": "function", "function": {"name": name, "arguments": {"argument": "x"}}}
    result = {"role": "tool", "tool_call_id": CALL_ID, "name": name, "content": "result"}
    for reasoning in _reasoning(template, prompt):
        calling = {"role": "assistant", "content": reasoning, "tool_calls": [call]}
        about = "reasoning of turns with tool calls" if reasoning else "turns with tool calls"
        yield _Dialogue(about, (OPENING,), ((calling, (result,)), (calling, (result,))))


class _Probe:
    def __init__(self, template: ChatTemplate, increments: Increments) -> None:
        self._template = template
        self._increments = increments
        self.opening = _opening(template)

    def compare(self, dialogues: Iterator[_Dialogue]) -> Iterator[_Result]:
        for dialogue in dialogues:
            try:
                prompt = self._template.render(dialogue.prompt)
            except RenderError:
                continue  # no such prompt in this template, with a system prompt for instance
            try:
                yield self._verdict(dialogue, prompt)
            except DataError as error:
                yield _Result("refused", dialogue.about, str(error))
                return

    def _verdict(self, dialogue: _Dialogue, appended: str) -> _Result:
        after_turns = [self._increments.following(answer) for _, answer in dialogue.steps]
        messages = list(dialogue.prompt)
        for (turn, answer), following in zip(dialogue.steps, after_turns, strict=True):
            messages += [turn, *answer]
            try:
                whole = self._template.render(messages)
            except RenderError as error:
                return _Result("appended", dialogue.about, f"refused as a whole: {error}")
            if not whole.startswith(appended):
                return _Result("appended", dialogue.about, _first_difference(whole, appended))
            drawn = whole[len(appended) : len(whole) - len(following)]
            if not whole.endswith(following) or not _says(drawn, turn, appended):
                written = _excerpt(whole[len(appended) :])
                return _Result("appended", dialogue.about, f"a turn {_excerpt(str(turn['content']))} becomes {written}")
            appended = whole
        return _Result("exact")


def _says(drawn: str, turn: Message, prompt: str) -> bool:
    """Whether `drawn` is `turn` as a model writes it that goes on from `prompt`, which may have begun its reasoning."""
    content, prompt = str(turn["content"]).strip(), prompt.rstrip()
    begun = next((size for size in range(len(content), 0, -1) if prompt.endswith(content[:size])), 0)
    said = content[begun:].strip()
    return said in drawn if turn.get("tool_calls") else said == drawn.strip()


def _first_difference(whole: str, appended: str) -> str:
    place = next((i for i, (a, b) in enumerate(zip(whole, appended, strict=False)) if a != b), len(whole))
    begin = max(0, place - EXCERPT_CHARS // 3)
    return f"{_excerpt(appended[begin:])} becomes {_excerpt(whole[begin:])}"


def _excerpt(text: str) -> str:
    return repr(text[:EXCERPT_CHARS] + ("..." if len(text) > EXCERPT_CHARS else ""))
