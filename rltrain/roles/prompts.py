"""The prompt files of a run, read once per process however many roles of it use them."""

from dataclasses import dataclass
from pathlib import Path

from rltrain.algorithms.registry import algorithm_of
from rltrain.config.schema import Config
from rltrain.data.order import Order, PromptOrder
from rltrain.data.prompt_stream import prompt_order
from rltrain.data.prompts import Needs, PromptDataset, load_prompts, report_dropped
from rltrain.data.tokenizer import PromptEncoder, TextDecoder, load_tokenizer
from rltrain.rewards.registry import COMPARES_TEXT


@dataclass(frozen=True)
class Prompts:
    """Training prompts with the order they are used in, and the held-out ones if the config names any."""

    decoder: TextDecoder
    train: PromptDataset
    """Of an algorithm that draws no responses to training prompts, the held-out ones: its rows may be no prompts."""
    order: Order
    evaluation: PromptDataset | None

    def report_dropped(self) -> None:
        """Say which rows of the files are not used."""
        if self.train is not self.evaluation:
            report_dropped("data.train", self.train)
        if self.evaluation is not None:
            report_dropped("data.eval", self.evaluation)


def read_prompts(config: Config) -> Prompts:
    """Every rank that calls this numbers the prompts alike."""
    data = config.data
    tokenizer = load_tokenizer(Path(config.model.path))
    encoder = PromptEncoder(tokenizer, data)
    needs: Needs = "label" if COMPARES_TEXT.isdisjoint(config.reward.names) else "plain label"
    evaluation = load_prompts(data.eval, data, encoder, needs=needs, config_key="data.eval") if data.eval else None
    if algorithm_of(config).generates or evaluation is None:
        train = load_prompts(data.train, data, encoder, needs=needs, config_key="data.train")
        return Prompts(TextDecoder(tokenizer), train, prompt_order(train, config), evaluation)
    order = PromptOrder(len(evaluation), seed=config.seed, shuffle=data.shuffle)
    return Prompts(TextDecoder(tokenizer), evaluation, order, evaluation)
