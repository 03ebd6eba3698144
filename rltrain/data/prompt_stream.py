"""The order of a run's training prompts, as its config asks for."""

import numpy as np

from rltrain.config import schema
from rltrain.data.curriculum import CurriculumOrder
from rltrain.data.mixing import Mix
from rltrain.data.order import Order, PromptOrder
from rltrain.data.prompts import Difficulties, PromptDataset


def prompt_order(dataset: PromptDataset, config: schema.Config) -> Order:
    """Of the rows of data.train, which `dataset` has."""
    weights = [source.weight for source in dataset.sources if source.weight is not None]
    if not weights or len(dataset.sources) == 1:
        of_sources = [source.difficulties for source in dataset.sources]
        difficulties = of_sources[0] if len(of_sources) == 1 else np.concatenate(of_sources)
        return _of_rows(len(dataset), difficulties, config, 1.0, ())
    orders = [
        _of_rows(source.num_rows, source.difficulties, config, weight / sum(weights), (number,))
        for number, (source, weight) in enumerate(zip(dataset.sources, weights, strict=True))
    ]
    firsts = [source.first for source in dataset.sources]
    return Mix(orders, firsts, weights, seed=config.seed, shuffle=config.data.shuffle)


def _of_rows(
    num_rows: int, difficulties: Difficulties, config: schema.Config, share: float, stream: tuple[int, ...]
) -> Order:
    """Of rows of which a step takes about `share` of its prompts."""
    seed, shuffle, curriculum = config.seed, config.data.shuffle, config.data.curriculum
    order = PromptOrder(num_rows, seed=seed, shuffle=shuffle, stream=stream)
    if curriculum is None:
        return order
    return CurriculumOrder(
        difficulties if curriculum.easy == "low" else -difficulties,
        steps=curriculum.steps,
        per_step=max(1, round(config.batch.prompts_per_step * share)),
        seed=seed,
        shuffle=shuffle,
        then=order,
    )
