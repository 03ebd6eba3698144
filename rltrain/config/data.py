"""The config section data: files of rows."""

from typing import Literal

from rltrain.config.section import Count, Section


class PromptFile(Section):
    path: str
    """JSONL or Parquet."""
    prompt_key: str = "prompt"
    """Column with a string, or with a list of chat messages."""
    label_key: str | None = "label"
    """null: the rows have no labels, and no reward function takes one."""
    response_key: str = "response"
    """Column with the demonstration, for algorithm: sft."""
    chosen_key: str = "chosen"
    """dpo, reward_model: column with the preferred response, a string or a list of chat messages. Lists may be whole
    conversations, and then need no prompt: that is what both have in common at the beginning."""
    rejected_key: str = "rejected"
    """dpo, reward_model: column with the other one."""
    margin_key: str | None = None
    """reward_model: column with a number, by how much the preferred response should at least score higher."""
    max_rows: Count | None = None


class Data(Section):
    train: PromptFile
    eval: PromptFile | None = None
    chat_template: Literal["auto", "never"] = "auto"
    """auto applies the tokenizer's chat template to message lists, and to plain prompts if the tokenizer has one."""
    system_prompt: str | None = None
    shuffle: bool = True
    max_prompt_tokens: Count = 1024
    on_bad_row: Literal["refuse", "skip"] = "refuse"
