"""The config section `data`: the files of rows and the order of prompts."""

import re
from typing import Annotated, Any, Literal

from pydantic import Field

from rltrain.config.section import Count, HubName, NonNegative, Positive, Section, Share

Paths = str | Annotated[tuple[str, ...], Field(strict=False)]


class Rows(Section):
    """The rows to take from the files, and the meaning of their columns."""

    split: str | None = None
    """Split to read from a data set's folder or hub name, for example train. Needed if it has several."""
    subset: str | None = None
    """Subset to read from a data set's folder or hub name. The hub also calls it a config. Needed if it has several."""
    prompt_key: str = "prompt"
    """Column with the prompt: a string or a list of chat messages."""
    label_key: str | None = "label"
    """Column with the label for the reward function. `null`: the rows have no labels, and no reward function takes
    one."""
    response_key: str | None = "response"
    """sft: column with the demonstration. `null`: the messages under prompt_key are whole conversations. Training then
    uses the assistant's turns."""
    learnt_turns: Literal["all", "last"] = "all"
    """The trained turns of a whole conversation. `all`: every turn of the assistant. `last`: the last turn, with
    everything before it as the prompt."""
    chosen_key: str = "chosen"
    """dpo, reward_model: column with the preferred response, a string or a list of chat messages. If both columns hold
    whole conversations, no prompt column is needed. The prompt is then their common beginning."""
    rejected_key: str = "rejected"
    """dpo, reward_model: column with the rejected response."""
    margin_key: str | None = None
    """reward_model: column with a number, the smallest difference wanted between the scores of a pair."""
    tools_key: str | None = None
    """Column with the tools for the chat template: a list of schemas in OpenAI's format, or such a list as JSON text.
    The value of a row may be null."""
    images_key: str | None = "images"
    """Column with the images of a row, with model.vision: paths, data URLs, bytes, or {bytes, path}. Relative paths
    start at the folder of the row's file. Their places are `<image>` in texts or parts of type image. Without places
    they come first. Rows without this column have images only in message parts. `null`: as if no row had it."""
    system_key: str | None = None
    """Column with the text of a system message. It is used for prompts without one. The value of a row may be null."""
    max_rows: Count | None = None
    """Number of usable rows to take, from the beginning. With `sources` the limit holds for each source. `null`: all
    rows."""


class PromptSource(Rows):
    """One of several sources of prompts. Missing keys are taken from the section around `sources`."""

    path: Annotated[Paths, HubName("dataset")]
    """Files or a hub name, in the form of data.train.path."""
    weight: Positive | None = None
    """Share of prompts to draw from this source, relative to the weights of the other sources. If all weights are null,
    the rows form one set and each epoch has every row once."""
    name: str | None = None
    """Name in metrics and sample records. `null`: the name of the first file, folder or hub data set."""

    @property
    def title(self) -> str:
        """Returns `name`, or else the name of the first file, folder or hub data set."""
        if self.name is not None:
            return self.name
        first = self.path if isinstance(self.path, str) else next(iter(self.path), "")
        file = re.sub(r"@\[[^]]*\]$", "", first).rstrip("/").split("/")[-1]
        return re.sub(r"\W+", "_", file.split("@")[0].split(".")[0]).strip("_") or "all"


class PromptFile(Rows):
    """Rows from one or several files (`path`), or from several sources with separate keys (`sources`)."""

    path: Annotated[Paths | None, HubName("dataset")] = None
    """A file, a folder, a pattern such as data/*.parquet, or a list of them. Formats: JSONL (also .gz, .bz2, .xz,
    .zst), Parquet, Arrow and data sets saved by `datasets`. "FILE@[0:1000]" takes rows 0 to 999 alone. A data set on
    the hub is OWNER/NAME or OWNER/NAME@REVISION."""
    sources: tuple[PromptSource, ...] = Field(default=(), strict=False)
    """Several sources instead of `path`: a list of {path, weight, name, ...}."""

    def parts(self) -> tuple[PromptSource, ...]:
        """Returns the sources with all their keys filled in. A `path` is returned as a single source."""
        shared = {name: getattr(self, name) for name in Rows.model_fields if name in self.model_fields_set}
        if not self.sources:
            return (PromptSource(path=self.path or (), **shared),)
        return tuple(
            source.model_copy(update={name: shared[name] for name in shared.keys() - source.model_fields_set})
            for source in self.sources
        )


class Curriculum(Section):
    """Orders the training rows from easy to hard during the first steps."""

    key: str
    """Column with a number for the difficulty of a row."""
    easy: Literal["low", "high"] = "low"
    """Values of easy rows. `low`: small numbers are easy, for example levels. `high`: large numbers are easy, for
    example shares of right answers."""
    steps: Count
    """Number of steps with the curriculum. Prompts are drawn from a window over the rows sorted by `key`, sliding from
    easy to hard. The window holds 1/steps of the rows, and at least one step's prompts. Later steps draw from all rows.
    """


class SolvedRate(Section):
    """Draws prompts by their estimated solve rate. Prompts with a rate near 0 or 1 teach little."""

    low: Share = 0.1
    """Lower bound of the solve rate, see `high`."""
    high: Share = 0.9
    """Bounds of the solve rate, both included. Prompts between them and prompts without an estimate are drawn every
    time their turn comes."""
    outside: Share = 0.1
    """Probability of drawing any other prompt when its turn comes."""
    memory: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Weight of the previous estimate when new samples of a prompt are scored. `0`: only the newest samples count."""
    solved_above: float = 0.5
    """A sample solves its prompt if its reward is above this."""
    retire_after: Count | None = None
    """Number of times in a row with all samples solved before a prompt is retired. A retired prompt is drawn only if no
    other prompt is left. `null`: never."""


class Images(Section):
    """Sizes of images, and the files with their pixels on every node."""

    max_pixels: Count | None = None
    """Most pixels of an image. Larger images are scaled down. `null`: the limit of the checkpoint's image processor."""
    min_pixels: Count | None = None
    """Fewest pixels of an image. Smaller images are scaled up. `null`: the limit of the checkpoint's image processor.
    """
    folder: str | None = None
    """Folder of a node for decoded images. `null`: /dev/shm if it has room for them, else the folder for temporary
    files."""
    cache_gb: NonNegative = 4.0
    """Space for decoded images that no sample uses at the moment, in GB of 10^9 bytes per node."""
    check: Literal["header", "full"] = "header"
    """Check of the images of rows before training. `header`: the beginning and the end of every file. `full`: every
    image is decoded once."""


class Data(Section):
    """Training and evaluation rows, the chat template, and limits of lengths."""

    train: PromptFile
    eval: PromptFile | None = None
    chat_template: Literal["auto", "never"] = "auto"
    """`auto`: applies the tokenizer's chat template to message lists, and to plain prompts if the tokenizer has a
    template. `never`: uses no template."""
    chat_template_args: dict[str, Any] = Field(default_factory=dict)
    """Variables of the chat template, such as {enable_thinking: false}. Agents send their own in their requests."""
    system_prompt: str | None = None
    """System message for prompts without one. It needs a chat template. `null`: none."""
    images: Images = Images()
    shuffle: bool = True
    """Shuffles the rows in every epoch, by `seed`. `false`: the rows keep their order."""
    curriculum: Curriculum | None = None
    solved_rate: SolvedRate | None = None
    on_change: Literal["restart", "refuse"] = "restart"
    """Decides what happens if a run resumes from a checkpoint with different training rows. Only the content of the
    rows counts, not their path. `restart`: the run reports it and begins with the first new row. `refuse`: the run
    ends. It also ends for a different reward function or chat template. With restart these are only reported."""
    max_prompt_tokens: Count = 1024
    """Most tokens of a prompt. Rows with a longer prompt are left out and counted."""
    max_response_tokens: Count | None = None
    """sft, dpo, reward_model: most tokens of a response, with its end token. The response of a conversation is
    everything after the first prompt. `null`: prompt and response may fill the positions of the model."""
    on_long_row: Literal["skip", "cut", "refuse"] = "skip"
    """Decides what happens to a row with a longer response. `skip`: the row is left out and counted. `cut`: the
    response is shortened without an end token, and counted. `refuse`: the job ends and names the row."""
    on_bad_row: Literal["refuse", "skip"] = "refuse"
    """Decides what happens to an unusable row, such as a row without its prompt column. `refuse`: the job ends and
    names the row. `skip`: the row is left out and counted."""
