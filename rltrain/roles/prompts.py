"""The prompt files of a run, read once per process however many roles of it use them."""

from dataclasses import dataclass
from pathlib import Path

from rltrain.config.schema import Config
from rltrain.data.order import Order
from rltrain.data.prompt_stream import prompt_order
from rltrain.data.prompts import Needs, PromptDataset, load_prompts, report_dropped
from rltrain.data.tokenizer import PromptEncoder, TextDecoder, load_tokenizer
from rltrain.rewards.registry import COMPARES_TEXT


@dataclass(frozen=True)
class Prompts:
    """Training prompts with the order they are used in, and the held-out ones if the config names any."""

    decoder: TextDecoder
    train: PromptDataset
    order: Order
    evaluation: PromptDataset | None

    def report_dropped(self) -> None:
        """Say which rows of the files are not used."""
        report_dropped("data.train", self.train)
        if self.evaluation is not None:
            report_dropped("data.eval", self.evaluation)


def read_prompts(config: Config) -> Prompts:
    """Every rank that calls this numbers the prompts alike."""
    data = config.data
    tokenizer = load_tokenizer(Path(config.model.path))
    encoder = PromptEncoder(tokenizer, data)
    needs: Needs = "label" if COMPARES_TEXT.isdisjoint(config.reward.names) else "plain label"
    train = load_prompts(data.train, data, encoder, needs=needs, config_key="data.train")
    evaluation = load_prompts(data.eval, data, encoder, needs=needs, config_key="data.eval") if data.eval else None
    return Prompts(TextDecoder(tokenizer), train, prompt_order(train, config), evaluation)
