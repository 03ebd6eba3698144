"""The inputs of a run: read once per process, and identified in its checkpoints."""

import hashlib
import json
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

from rltrain.algorithms.registry import algorithm_of
from rltrain.config.schema import Config, PromptFile, Reward
from rltrain.data.demonstrations import Demonstrations, Preferences
from rltrain.data.images import ImageRules, ImageSource
from rltrain.data.prompt_order import RowOrder, prompt_order
from rltrain.data.prompt_rows import PromptRow
from rltrain.data.prompts import PromptDataset, SourceRows, load_prompts, repeated_within_a_step, report_dropped
from rltrain.data.row_index import IndexFolder
from rltrain.data.tokenizer import UNKNOWN_MODEL, ModelLimits, PromptEncoder, TextDecoder, load_encoder
from rltrain.models import Architecture
from rltrain.rewards.functions import labels_of
from rltrain.rewards.locating import source_file
from rltrain.runtime.grid import Grid
from rltrain.runtime.job_store import JobStore

# The prompt files of a run, read once per process for all of its roles.

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Prompts:
    """The training prompts with their order, and the prompts of every evaluation set.

    `training` is None if the algorithm does not generate.
    """

    decoder: TextDecoder
    encoder: PromptEncoder
    training: tuple[PromptDataset, RowOrder] | None
    evaluations: tuple[PromptDataset, ...]
    """Evaluation prompts, in the order of Config.evaluations."""
    keys: tuple[str, ...]
    """Config keys of the evaluation sets."""

    @property
    def train(self) -> PromptDataset:
        return self._of_training[0]

    @property
    def order(self) -> RowOrder:
        return self._of_training[1]

    @property
    def _of_training(self) -> tuple[PromptDataset, RowOrder]:
        assert self.training is not None, "only an algorithm that generates has training prompts"
        return self.training

    def report_rows(self, prompts_per_step: int) -> None:
        """Logs the unused rows of each file. Warns if a step has to use some rows several times."""
        train = [("data.train", self.train)] if self.training else []
        for key, dataset in (*train, *zip(self.keys, self.evaluations, strict=True)):
            report_dropped(key, dataset)
        repeated = repeated_within_a_step(len(self.train), prompts_per_step) if train else None
        if repeated:
            logger.warning(repeated)


def read_prompts(config: Config, indexes: IndexFolder | None = None, model: ModelLimits = UNKNOWN_MODEL) -> Prompts:
    """Reads the prompts of training and evaluations. Every rank numbers them alike.

    `indexes` and `model` are passed to load_prompts.
    """
    data, plans = config.data, config.evaluations
    encoder = load_encoder(config)

    def load(file: PromptFile, reward: Reward | None, key: str) -> PromptDataset:
        needs = labels_of(reward or config.reward)
        return load_prompts(file, data, encoder, needs=needs, config_key=key, indexes=indexes, model=model)

    training = None
    if algorithm_of(config).generates:
        train = load(data.train, None, "data.train")
        training = train, prompt_order(train, config)
    keys = tuple(plan.config_key for plan in plans)
    evaluations = tuple(load(plan.file, plan.reward, plan.config_key) for plan in plans)
    return Prompts(TextDecoder(encoder.tokenizer), encoder, training, evaluations, keys)


# The identity of a run's training rows, reward functions and chat template. Checkpoints record it. So a resumed run
# notices changes.

INDEX_FOLDER = "row_index"
"""A folder in output_dir."""
SAMPLED_PLACES, ROWS_PER_PLACE = 64, 4
"""Places in a source, and rows at each place. Their content identifies the source. The places are evenly spaced from
its first row to its last."""
CONTENT = tuple(field.name for field in fields(PromptRow) if field.name not in ("place", "number"))
"""The fields that identify a row in any file."""
Inputs = Mapping[str, Any]


class JobRows:
    """The rows of a job, read once per process for all of its roles."""

    def __init__(self, config: Config, job_store: JobStore, policy: Architecture) -> None:
        self.config, self.job_store = config, job_store
        self.model = ModelLimits(policy.vocab_size, policy.max_positions)
        self.first_step = 0
        """The step that takes the first row of data.train. It is later than step 0 if the run was resumed with other
        rows."""

    @property
    def training_data(self) -> Demonstrations | Preferences | None:
        """The training rows of an algorithm that does not generate, else None."""
        data = self._training_data
        if data is not None:
            data.first_step = self.first_step
        return data

    @cached_property
    def _training_data(self) -> Demonstrations | Preferences | None:
        return algorithm_of(self.config).training_data(self.indexes, self.model)

    @cached_property
    def prompts(self) -> Prompts:
        return read_prompts(self.config, self.indexes, self.model)

    @cached_property
    def indexes(self) -> IndexFolder:
        """Indexes of the rows that are not held in memory. They are in output_dir, for all nodes and for later jobs."""
        return IndexFolder(Path(self.config.output_dir, INDEX_FOLDER), self.job_store)

    @cached_property
    def images(self) -> ImageRules | None:
        """The rules of images, or None without model.vision."""
        return ImageRules.of(self.config)

    @property
    def training_rows(self) -> PromptDataset:
        """The rows of data.train."""
        data = self.training_data
        return self.prompts.train if data is None else data.datasets["data.train"]


def agreed_inputs(rows: JobRows, grids: Mapping[str, Grid]) -> Inputs:
    """Returns the identity of the run's inputs, or {} if the algorithm does not train.

    Ranks of the role with the training rows read them here. The first of them publishes the identity. Collective over:
    all ranks.
    """
    algorithm, job_store = algorithm_of(rows.config), rows.job_store
    if not algorithm.trains:
        return {}
    ranks = grids["rollout" if algorithm.generates else "actor"].ranks
    if job_store.world.rank in ranks:
        job_store.heartbeat.begin("reading data.train")
        dataset = rows.training_rows
        if job_store.world.rank == ranks[0]:
            job_store.put("inputs", identity(rows.config, dataset))
    found: Inputs = job_store.get("inputs", waiting_for="data.train to be read")
    return found


def identity(config: Config, dataset: PromptDataset) -> Inputs:
    """Returns the identity of a run's inputs as JSON values. Its paths are for messages and are not compared."""
    data, encoder = config.data, dataset.encoder
    weights = [source.weight for source in dataset.sources]
    template = [encoder.tokenizer.chat_template, encoder.template_options] if encoder.uses_template else None
    return {
        "rows": [_of_source(dataset, source) for source in dataset.sources],
        "paths": [_shown(part.path) for part in data.train.parts()],
        "order": {
            "weights": weights if len(weights) > 1 else None,
            "curriculum": data.curriculum and data.curriculum.model_dump(mode="json") | _difficulties(dataset),
            "solved_rate": data.solved_rate and "set",
        },
        "rewards": [_of_function(name) for name in config.reward.names] if algorithm_of(config).generates else [],
        "chat_template": template and digest(template),
    }


def data_changes(before: Inputs, now: Inputs) -> Iterator[str]:
    """Yields a line for each change of the training rows or of their order."""
    if before["rows"] != now["rows"]:
        yield f"data.train was {_rows(before)}, and is {_rows(now)}{_same_size(before, now)}"
    for name in now["order"]:
        if before["order"][name] != now["order"][name]:
            key = "the weights in data.train.sources" if name == "weights" else f"data.{name}"
            was, is_ = (json.dumps(inputs["order"][name]) for inputs in (before, now))
            yield f"{key}: was {was}, and is {is_}"


def other_changes(before: Inputs, now: Inputs) -> Iterator[str]:
    """Yields a line for each change of the reward functions or the chat template."""
    if before["rewards"] != now["rewards"]:
        yield f"the reward was {_rewards(before)}, and is {_rewards(now)}"
    if before["chat_template"] != now["chat_template"]:
        was, is_ = before["chat_template"] or "none", now["chat_template"] or "none"
        yield f"the chat template was {was}, and is {is_} (digests of its text and of data.chat_template_args)"


def digest(values: Any) -> str:
    text = json.dumps(values, sort_keys=True, default=str)
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:16]


def _of_source(dataset: PromptDataset, source: SourceRows) -> dict[str, Any]:
    rows = [dataset[source.first + row] for row in _sampled(source.num_rows)]
    content = [[_with_digests(getattr(row, name)) for name in CONTENT] for row in rows]
    return {"num_rows": source.num_rows, "sample": digest(content)}


def _with_digests(value: Any) -> Any:
    """Returns a field of a row with a digest of each image's file in the place of the image."""
    if isinstance(value, ImageSource):
        return hashlib.sha256(value.read()).hexdigest()
    if isinstance(value, Mapping):
        return {name: _with_digests(part) for name, part in value.items()}
    return [_with_digests(part) for part in value] if isinstance(value, list | tuple) else value


def _difficulties(dataset: PromptDataset) -> dict[str, str]:
    """Returns a digest of some of the numbers that a curriculum sorts by."""
    of_sources = ([float(one.difficulties[row]) for row in _sampled(one.num_rows)] for one in dataset.sources)
    return {"numbers": digest([*of_sources])}


def _sampled(num_rows: int) -> list[int]:
    last = max(num_rows - ROWS_PER_PLACE, 0)
    places = {last * place // (SAMPLED_PLACES - 1) for place in range(SAMPLED_PLACES)}
    return sorted({row for place in places for row in range(place, min(place + ROWS_PER_PLACE, num_rows))})


def _of_function(name: str) -> dict[str, Any]:
    """Returns the function's name, and under `file` the digest of a user function's source file."""
    path = source_file(name)
    return {"name": name, "file": path and hashlib.sha256(path.read_bytes()).hexdigest()[:16]}


def _shown(paths: Any) -> str:
    return paths if isinstance(paths, str) else ", ".join(paths)


def _rows(inputs: Inputs) -> str:
    sources = zip(inputs["paths"], inputs["rows"], strict=True)
    return " and ".join(f"{path} ({source['num_rows']:,} usable rows)" for path, source in sources)


def _same_size(before: Inputs, now: Inputs) -> str:
    """Returns a note of other content if the paths and numbers of rows do not show the change."""
    return " with other content" if _rows(before) == _rows(now) else ""


def _rewards(inputs: Inputs) -> str:
    functions = (f"{one['name']} (file {one['file']})" if one["file"] else one["name"] for one in inputs["rewards"])
    return ", ".join(functions) or "no function"
