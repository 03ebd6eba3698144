"""The config section data: files of rows."""

import re
from typing import Annotated, Any, Literal

from pydantic import Field

from rltrain.config.section import Count, HubName, Positive, Section, Share

Paths = str | Annotated[tuple[str, ...], Field(strict=False)]


class Rows(Section):
    """Which rows of files are taken, and which of their columns is what."""

    split: str | None = None
    """Of a data set's folder or a hub name that has several, train for instance."""
    subset: str | None = None
    """Likewise: what the hub calls a config or subset of a data set."""
    prompt_key: str = "prompt"
    """Column with a string, or with a list of chat messages."""
    label_key: str | None = "label"
    """null: the rows have no labels, and no reward function takes one."""
    response_key: str | None = "response"
    """Column with the demonstration, for algorithm: sft. null: the messages under prompt_key are whole conversations,
    and what is learnt are their assistant turns."""
    learnt_turns: Literal["all", "last"] = "all"
    """Of a whole conversation: every turn of the assistant, or the last one, to which all before it is the prompt."""
    chosen_key: str = "chosen"
    """dpo, reward_model: column with the preferred response, a string or a list of chat messages. Lists may be whole
    conversations, and then need no prompt: that is what both have in common at the beginning."""
    rejected_key: str = "rejected"
    """dpo, reward_model: column with the other one."""
    margin_key: str | None = None
    """reward_model: column with a number, by how much the preferred response should at least score higher."""
    tools_key: str | None = None
    """Column with the tools that the chat template writes into the prompt: a list of schemas as OpenAI has them, or
    such a list as JSON text. A row may have none."""
    system_key: str | None = None
    """Column with a text, the system's message of a prompt that begins with none. A row may have none."""
    max_rows: Count | None = None
    """The first usable rows; of `sources`, of each."""


class PromptSource(Rows):
    """One of several sources. What it does not say, the section around `sources` does."""

    path: Annotated[Paths, HubName("dataset")]
    """As data.train.path."""
    weight: Positive | None = None
    """Share of the prompts that are drawn from it, beside the other sources' weights. null for all of them: the rows
    are one set, of which every epoch has each row once."""
    name: str | None = None
    """What metrics and sample records call it. null: as its first file, folder or hub name is called."""

    @property
    def title(self) -> str:
        """`name`, or what it is by default."""
        if self.name is not None:
            return self.name
        first = self.path if isinstance(self.path, str) else next(iter(self.path), "")
        file = re.sub(r"@\[[^]]*\]$", "", first).rstrip("/").split("/")[-1]
        return re.sub(r"\W+", "_", file.split("@")[0].split(".")[0]).strip("_") or "all"


class PromptFile(Rows):
    """Rows of one or several files, by `path`, or of several sources, each with keys of its own."""

    path: Annotated[Paths | None, HubName("dataset")] = None
    """A file, a folder, a pattern such as data/*.parquet, or a list of them: JSONL (.gz, .bz2, .xz, .zst too), Parquet,
    Arrow, a data set saved by `datasets`. Rows 0 to 999 alone: "FILE@[0:1000]". Or a data set's hub name: OWNER/NAME,
    OWNER/NAME@REVISION."""
    sources: tuple[PromptSource, ...] = Field(default=(), strict=False)
    """In the place of `path` several, a list of {path, weight, name, ...}."""

    def parts(self) -> tuple[PromptSource, ...]:
        """The sources, each with all its keys; a `path` is the only one."""
        shared = {name: getattr(self, name) for name in Rows.model_fields if name in self.model_fields_set}
        if not self.sources:
            return (PromptSource(path=self.path or (), **shared),)
        return tuple(
            source.model_copy(update={name: shared[name] for name in shared.keys() - source.model_fields_set})
            for source in self.sources
        )


class Curriculum(Section):
    """The first steps go over the training rows from easy to hard."""

    key: str
    """Column with a number."""
    easy: Literal["low", "high"] = "low"
    """Whose rows come first: those of low numbers, such as levels, or of high ones, such as shares of right answers."""
    steps: Count
    """How many; in each the prompts are drawn from a window that slides over the rows, sorted by `key`. It has 1/steps
    of them, or as many as a step takes if that is more. Then all rows are drawn as without a curriculum."""


class SolvedRate(Section):
    """Prompts are drawn by how often the policy solves them: those that it never or always solves teach little."""

    low: Share = 0.1
    high: Share = 0.9
    """Between the two, both included, lies the estimated share of solved samples of the prompts that are drawn each
    time that their turn comes, as are those of which nothing is known."""
    outside: Share = 0.1
    """Of the times that the turn of another prompt comes, in how many it is drawn all the same."""
    memory: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Of the estimate before, what stays when samples of the prompt were scored once more. 0: the last ones alone."""
    solved_above: float = 0.5
    """A sample with a larger reward has solved its prompt."""
    retire_after: Count | None = None
    """A prompt that all samples solved so many times in a row is not drawn any more, unless nothing else is left."""


class Data(Section):
    train: PromptFile
    eval: PromptFile | None = None
    chat_template: Literal["auto", "never"] = "auto"
    """auto applies the tokenizer's chat template to message lists, and to plain prompts if the tokenizer has one."""
    chat_template_args: dict[str, Any] = Field(default_factory=dict)
    """Variables of the chat template, such as {enable_thinking: false}. Agents name theirs in their requests."""
    system_prompt: str | None = None
    shuffle: bool = True
    curriculum: Curriculum | None = None
    solved_rate: SolvedRate | None = None
    on_change: Literal["restart", "refuse"] = "restart"
    """Decides what happens when a run resumes from a checkpoint with other training rows. The content of the rows
    counts, not their path. restart: the run says so and begins with the first of the new rows. refuse: the run ends,
    also with another reward function or chat template. With restart a change of these is only reported."""
    max_prompt_tokens: Count = 1024
    """Rows with a longer prompt are left out and counted."""
    max_response_tokens: Count | None = None
    """sft, dpo, reward_model: tokens that a response may have, its end token included. Of a conversation the response
    is all after the first prompt. null: prompt and response may have as many tokens as the model has positions."""
    on_long_row: Literal["skip", "cut", "refuse"] = "skip"
    """Decides what happens to a row with a longer response. skip: it is left out and counted. cut: its response ends
    there, without an end token, and is counted. refuse: the job ends with its place."""
    on_bad_row: Literal["refuse", "skip"] = "refuse"
