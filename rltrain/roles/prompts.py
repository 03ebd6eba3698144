"""The prompt files of a run, read once per process however many roles of it use them."""

import logging
from dataclasses import dataclass

from rltrain.algorithms.registry import algorithm_of
from rltrain.config.schema import Config
from rltrain.data.order import Order, prompt_order
from rltrain.data.prompts import PromptDataset, load_prompts, repeated_within_a_step, report_dropped
from rltrain.data.row_index import IndexFolder
from rltrain.data.tokenizer import UNKNOWN_MODEL, ModelLimits, PromptEncoder, TextDecoder, load_encoder
from rltrain.rewards.functions import labels_of

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Prompts:
    """Training prompts with the order they are used in, where any are answered, and those of every evaluation set."""

    decoder: TextDecoder
    encoder: PromptEncoder
    training: tuple[PromptDataset, Order] | None
    evaluations: tuple[PromptDataset, ...]
    """As Config.evaluations has them."""
    keys: tuple[str, ...]
    """Where these stand in the config."""

    @property
    def train(self) -> PromptDataset:
        return self._of_training[0]

    @property
    def order(self) -> Order:
        return self._of_training[1]

    @property
    def _of_training(self) -> tuple[PromptDataset, Order]:
        assert self.training is not None, "only an algorithm that generates has training prompts"
        return self.training

    def report_rows(self, prompts_per_step: int) -> None:
        """Say which rows of the files are not used, and whether a step has to use some several times."""
        train = [("data.train", self.train)] if self.training else []
        for key, dataset in (*train, *zip(self.keys, self.evaluations, strict=True)):
            report_dropped(key, dataset)
        repeated = repeated_within_a_step(len(self.train), prompts_per_step) if train else None
        if repeated:
            logger.warning(repeated)


def read_prompts(config: Config, indexes: IndexFolder | None = None, model: ModelLimits = UNKNOWN_MODEL) -> Prompts:
    """Every rank that calls this numbers the prompts alike. `indexes` and `model` as in load_prompts."""
    data, plans = config.data, config.evaluations
    encoder = load_encoder(config)
    training = None
    if algorithm_of(config).generates:
        train = load_prompts(
            data.train,
            data,
            encoder,
            needs=labels_of(config.reward),
            config_key="data.train",
            indexes=indexes,
            model=model,
        )
        training = train, prompt_order(train, config)
    evaluations = tuple(
        load_prompts(
            plan.file,
            data,
            encoder,
            needs=labels_of(plan.reward or config.reward),
            config_key=plan.config_key,
            indexes=indexes,
            model=model,
        )
        for plan in plans
    )
    keys = tuple(plan.config_key for plan in plans)
    return Prompts(TextDecoder(encoder.tokenizer), encoder, training, evaluations, keys)
