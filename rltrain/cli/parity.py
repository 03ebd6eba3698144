"""Compares the models of the trainer, the engine and transformers on the same tokens, stage by stage."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from rltrain.checkpoint.hf_reader import load_parameters
from rltrain.config import schema
from rltrain.data.experience import Experience
from rltrain.data.images import ImageRules, source_of
from rltrain.errors import CheckpointError, DataError
from rltrain.models import Architecture, read_architecture
from rltrain.models.config_file import ConfigReader
from rltrain.models.rope_positions import image_fields, rope_positions
from rltrain.models.table import EMBEDDING, FINAL_NORM, LOGITS, LOGPROBS, stages_of_layer
from rltrain.models.vision import PlacedImage
from rltrain.models.vision_tower import patches_of
from rltrain.reshard.copy_table import allocate_parameters
from rltrain.rollout.embedded.block_tables import GB
from rltrain.rollout.embedded.image_features import EngineImages, ImageLimits, Shown, keyed, tower_of
from rltrain.rollout.embedded.kv_cache import CacheShape
from rltrain.rollout.embedded.model import EngineModel
from rltrain.rollout.embedded.parameters import TensorParallel
from rltrain.rollout.embedded.slot_cache import SlotCache
from rltrain.rollout.layout import engine_layout
from rltrain.rollout.sample import Sample
from rltrain.runtime.grid import Grid
from rltrain.runtime.image_files import ImageStore
from rltrain.runtime.placement import group_lists
from rltrain.runtime.process_groups import ProcessGroups

# Outputs of a model for some samples at every stage.

Samples = tuple[tuple[int, ...], ...]
"""Token ids of each sample, two or more."""
States = dict[str, Tensor]
"""Values by stage in fp32 on the host, shape [tokens, values]. All samples are concatenated. Log-probs have shape
[tokens] and belong to the next token, with 0 for a sample's last token."""
Run = Callable[["Checked", Samples], States]


@dataclass(frozen=True)
class Checked:
    """A checkpoint and its settings. `model` has its folder and data types."""

    model: schema.Model
    device: str
    images: "Pictures | None" = None
    """The images of the samples, for a model with section vision."""

    @property
    def path(self) -> Path:
        return Path(self.model.path)

    @property
    def architecture(self) -> Architecture:
        """The architecture, with the vision tower if there are images. Raises CheckpointError if it cannot be read."""
        return read_architecture(self.path, sees=self.images is not None)


class Notes:
    """Collects the outputs of stages over several calls."""

    def __init__(self) -> None:
        self._values: dict[str, list[Tensor]] = {}

    def add(self, stage: str, hidden: Tensor | tuple[Tensor, ...]) -> None:
        """Adds an output of shape [..., values]. From a tuple it takes the first tensor."""
        values = hidden[0] if isinstance(hidden, tuple) else hidden
        self._values.setdefault(stage, []).append(values.detach().flatten(0, -2).float().cpu().clone())

    def watch(self, embedding: Any, layers: Iterable[tuple[Any, Any]], final_norm: Any) -> None:
        """Registers hooks that collect the outputs of modules in every forward pass. `layers` are pairs of a layer and
        the norm before its MLP."""
        embedding.register_forward_hook(lambda module, given, made: self.add(EMBEDDING, made))
        for index, (layer, norm) in enumerate(layers):
            attention, mlp = stages_of_layer(index)
            norm.register_forward_pre_hook(lambda module, given, stage=attention: self.add(stage, given[0]))
            layer.register_forward_hook(lambda module, given, made, stage=mlp: self.add(stage, made))
        final_norm.register_forward_hook(lambda module, given, made: self.add(FINAL_NORM, made))

    def watch_inputs(self, decoder: Any) -> None:
        """Collects the inputs of Megatron's decoder as embeddings, in the place of those without images."""
        decoder.register_forward_pre_hook(
            lambda module, given, settings: self._replace(EMBEDDING, settings["hidden_states"]), with_kwargs=True
        )

    def _replace(self, stage: str, hidden: Tensor) -> None:
        self._values[stage].pop()
        self.add(stage, hidden)

    def watch_decoder(self, decoder: Any) -> None:
        """Calls `watch` with the modules of transformers."""
        layers = [(layer, layer.post_attention_layernorm) for layer in decoder.layers]
        self.watch(decoder.embed_tokens, layers, decoder.norm)

    def watch_seeing_decoder(self, decoder: Any) -> None:
        """Does so for a model with images. transformers shows them between its modules, so inputs are collected."""
        layers = decoder.layers
        names = [EMBEDDING, *(stages_of_layer(index)[1] for index in range(len(layers)))]
        for stage, module in zip(names, [*layers, decoder.norm], strict=True):
            module.register_forward_pre_hook(lambda module, given, stage=stage: self.add(stage, given[0]))
        for index, layer in enumerate(layers):
            stage = stages_of_layer(index)[0]
            norm = layer.post_attention_layernorm
            norm.register_forward_pre_hook(lambda module, given, stage=stage: self.add(stage, given[0]))
        decoder.norm.register_forward_hook(lambda module, given, made: self.add(FINAL_NORM, made))

    def states(self, samples: Samples) -> States:
        """Returns the collected values, with log-probs computed from the logits."""
        states = {stage: torch.cat(values) for stage, values in self._values.items()}
        return {**states, LOGPROBS: next_token_logprobs(states[LOGITS], samples)}


def stages(num_layers: int) -> list[str]:
    """Returns the names of the stages, in the order of a forward pass."""
    of_layers = [stage for index in range(num_layers) for stage in stages_of_layer(index)]
    return [EMBEDDING, *of_layers, FINAL_NORM, LOGITS, LOGPROBS]


def next_token_logprobs(logits: Tensor, samples: Samples) -> Tensor:
    """Returns log-probs of shape [tokens] from logits of shape [tokens, vocabulary] for all samples."""
    parts = []
    for of_sample, tokens in zip(logits.split([len(sample) for sample in samples]), samples, strict=True):
        labels = of_sample.new_tensor(tokens[1:]).long()[:, None]
        parts += [of_sample[:-1].log_softmax(-1).gather(1, labels)[:, 0], of_sample.new_zeros(1)]
    return torch.cat(parts)


# The differences between two models at every stage.

THRESHOLDS = {"float32": 1e-4, "bfloat16": 5e-2, "float16": 1e-2}
"""Largest relative difference from rounding alone, in models of usual depth, by model.dtype."""


@dataclass(frozen=True)
class Difference:
    """The difference between two models at one stage."""

    stage: str
    relative: float
    """Norm of the difference over the norm of the first model's values. Not finite if some values are not."""
    largest: float
    token: int
    """Index of the token with the largest difference, over all concatenated samples."""


@dataclass(frozen=True)
class LogprobDifference:
    """Differences of the log-probs of tokens given the tokens before."""

    mean: float
    largest: float
    kl: float
    """Estimated KL of the second model from the first, as in checks.max_kl, for tokens sampled by the second."""


def differences(first: States, second: States, stages: Sequence[str]) -> list[Difference]:
    """Returns the differences for `stages` in both models, in the same order."""
    return [_difference(stage, first[stage], second[stage]) for stage in stages if stage in first and stage in second]


def first_beyond(found: Sequence[Difference], threshold: float) -> Difference | None:
    """Returns the first stage with a larger or non-finite difference, or None."""
    return next((one for one in found if not one.relative <= threshold), None)


def logprob_difference(first: States, second: States, samples: Samples) -> LogprobDifference:
    """Returns the difference of log-probs over all tokens with a token before them."""
    follows = torch.cat([torch.arange(len(sample)) < len(sample) - 1 for sample in samples])
    log_ratio = (first[LOGPROBS] - second[LOGPROBS])[follows]
    distance = log_ratio.abs()
    kl = torch.expm1(log_ratio) - log_ratio
    return LogprobDifference(float(distance.mean()), float(distance.max()), float(kl.mean()))


def _difference(stage: str, first: Tensor, second: Tensor) -> Difference:
    by_token = (first - second).abs().view(len(first), -1).amax(1)
    norm = float(first.norm())
    relative = float((first - second).norm()) / (norm or 1.0)
    return Difference(stage, relative, float(by_token.max()), int(by_token.argmax()))


# Images at the beginning of the samples.


@dataclass(frozen=True)
class Pictures:
    """The images of some samples, `placed` for each of them. `store` has their pixels."""

    placed: tuple[tuple[PlacedImage, ...], ...]
    rules: ImageRules
    store: ImageStore


def with_images(samples: Samples, files: Sequence[Path], checkpoint: Path, folder: Path) -> tuple[Samples, Pictures]:
    """Returns the samples with an image at the beginning of each, in turn one of `files`. Their pixels are put into
    `folder`.

    Placeholders among the tokens of the samples become other tokens. Raises DataError if an image cannot be read, and
    CheckpointError if the checkpoint is of no vision-language model.
    """
    rules = ImageRules.read(checkpoint, schema.Images(), "CHECKPOINT")
    marks = ConfigReader(checkpoint / "config.json", config_key="CHECKPOINT").values
    try:
        before, after = (int(marks[f"vision_{mark}_token_id"]) for mark in ("start", "end"))
    except KeyError as error:
        raise CheckpointError(
            f"{checkpoint / 'config.json'} has no {error.args[0]}; expected the id of a token"
        ) from None
    store, shown, placed = ImageStore(folder, 0, keep_steps=0, cache_bytes=0), [], []
    for index, sample in enumerate(samples):
        source = source_of(str(files[index % len(files)]))
        image = rules.placed(source, 1)
        store.put(image.key, rules.decoded(source), 0)
        text = (after if token == rules.image_token else token for token in sample)
        shown.append((before, *[rules.image_token] * image.num_tokens(rules.merge), after, *text))
        placed.append((image,))
    return tuple(shown), Pictures(tuple(placed), rules, store)


# The embedded engine's model, decoding token by token.


class Decoding:
    """The engine on a checkpoint. Raises UserError if the checkpoint cannot be read or served."""

    def __init__(self, checked: Checked, max_positions: int) -> None:
        architecture, settings = checked.architecture, checked.model
        device, dtype = torch.device(checked.device), getattr(torch, settings.dtype)
        layout = engine_layout(architecture, Grid((0,)), dtype=settings.dtype)
        parameters = allocate_parameters(layout, 0, device=device)
        load_parameters(checked.path, layout, 0, parameters, config_key="--checkpoint")
        self.device, self.dtype, self.max_positions = device, dtype, max_positions
        self.pictures = checked.images
        self.images = None if checked.images is None else _images_of(checked, checked.images, parameters, device)
        self.vocab_size = architecture.vocab_size
        self.model = EngineModel(
            architecture,
            parameters,
            {},
            TensorParallel(None),
            max_positions,
            dtype,
            device,
            residual_dtype=getattr(torch, settings.residual),
            head_dtype=getattr(torch, settings.head),
        )

    @torch.inference_mode()
    def run(self, samples: Samples) -> States:
        """Returns the states for all samples. They are decoded together, one token per step. Shorter samples repeat
        their last token."""
        model, longest = self.model, max(len(sample) for sample in samples)
        sizes = (model.num_attention_layers, model.attention_shape, len(samples), self.max_positions)
        cache = SlotCache(CacheShape(*sizes, self.dtype, self.device, states=model.state_shape))
        cache.reserve(len(samples), longest, num_used=0)
        collected: dict[str, list[torch.Tensor]] = {}
        model.observe = lambda stage, values: collected.setdefault(stage, []).append(values.float().cpu().clone())
        seen_at = self._seen_at(samples)
        for position in range(longest):
            fed = torch.tensor([sample[min(position, len(sample) - 1)] for sample in samples], device=self.device)
            positions = torch.full_like(fed, position)
            rotated_by, shown = seen_at(position)
            hidden = model.forward(fed, rotated_by, cache.decode_attention(positions, position + 1), shown)
            model.observe(LOGITS, model.logits(hidden)[:, : self.vocab_size])
        states = {stage: _end_to_end(steps, samples) for stage, steps in collected.items()}
        return {**states, LOGPROBS: next_token_logprobs(states[LOGITS], samples)}

    def _seen_at(self, samples: Samples) -> Callable[[int], tuple[Tensor, Shown | None]]:
        """Returns a function of a place in the samples. It returns the positions for rotary embeddings and the image
        tokens there."""
        pictures, images = self.pictures, self.images
        if pictures is None or images is None:
            return lambda place: (torch.full((len(samples),), place, device=self.device), None)
        merge, pairs = images.merge, [*zip(samples, pictures.placed, strict=True)]
        positions = [torch.from_numpy(rope_positions(len(ids), placed, merge)).long() for ids, placed in pairs]
        named = [keyed(Sample(id=0, prompt=ids, seed=0, images=placed), merge).prompt for ids, placed in pairs]

        def at(place: int) -> tuple[Tensor, Shown | None]:
            rows = [(ids[min(place, len(ids) - 1)],) for ids in named]
            of_samples = [of_sample[:, min(place, of_sample.shape[1] - 1)] for of_sample in positions]
            return torch.stack(of_samples, 1).to(self.device), images.shown(rows, 1)

        return at


def _images_of(
    checked: Checked, pictures: Pictures, parameters: dict[str, Tensor], device: torch.device
) -> EngineImages:
    vision, settings = checked.architecture.vision, checked.model.vision
    assert vision is not None and settings is not None, "a model with images has a tower and its settings"
    tower = tower_of(vision, checked.path, parameters, {}, device)
    limits = ImageLimits(settings.max_patches, settings.engine_cache_gb * GB)
    return EngineImages(vision, tower, pictures.store, (pictures.rules.mean, pictures.rules.std), limits, device)


def run_engine(checked: Checked, samples: Samples) -> States:
    """Returns the states of the embedded engine."""
    return Decoding(checked, max(len(sample) for sample in samples)).run(samples)


def _end_to_end(steps: Sequence[torch.Tensor], samples: Samples) -> torch.Tensor:
    """Concatenates values of every position, shape [samples, values], to [tokens, values]."""
    by_sample = torch.stack(list(steps), dim=1)
    return torch.cat([by_sample[index, : len(sample)] for index, sample in enumerate(samples)])


# The tokens for the comparison.

SHORTEST = 2
"""Fewest tokens of a sample. A log-prob needs a token before it."""


def random_samples(count: int, length: int, vocab_size: int, seed: int = 0) -> Samples:
    """Returns `count` samples of `length` random token ids."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(tuple(torch.randint(vocab_size, (length,), generator=generator).tolist()) for _ in range(count))


def read_samples(file: Path, checkpoint: Path, limit: int) -> Samples:
    """Returns one sample for each line of a file of texts, cut to `limit` tokens. Raises DataError if there is none."""
    from transformers import AutoTokenizer

    try:
        lines = [line for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    except OSError as error:
        raise DataError(
            f"--texts {file}: cannot read it: {error.strerror}; expected a file of one text per line"
        ) from error
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    encoded = (tuple(tokenizer(line)["input_ids"][:limit]) for line in lines)
    samples = tuple(ids for ids in encoded if len(ids) >= SHORTEST)
    if not samples:
        raise DataError(f"--texts {file}: no line has {SHORTEST} tokens or more; expected one text per line")
    return samples


# The trainer's model (Megatron) on one rank.

GRID = Grid((0,))
TIMEOUT_S = 60.0


def run_trainer(checked: Checked, samples: Samples) -> States:
    """Returns the states for all samples, packed into one micro-batch as in training, in a world of one rank. Raises
    UserError if the checkpoint cannot be read or trained."""
    device = torch.device(checked.device)
    architecture = checked.architecture
    with world_of_one(device) as backend:
        from rltrain.training.megatron.model import build_model, local_parameters

        model = build_model(
            architecture,
            GRID,
            ProcessGroups(group_lists({"actor": GRID}), backend=backend, timeout_s=TIMEOUT_S),
            model=checked.model,
            parallel=schema.Parallel(),
            device=device,
            sight=_sight_of(checked),
        ).eval()
        load_parameters(checked.path, model.layout, 0, local_parameters(model), config_key="--checkpoint")
        (chunk,) = model.chunks
        notes, decoder = Notes(), cast(Any, chunk.decoder)
        layers = [(layer, layer.pre_mlp_layernorm) for layer in decoder.layers]
        notes.watch(chunk.embedding, layers, decoder.final_layernorm)
        tokens = torch.tensor([token for sample in samples for token in sample], device=device)
        sequences = model.sequences([len(sample) for sample in samples])
        with torch.no_grad():
            if checked.images is not None:
                _show(_packed(checked.images, samples, device), model, sequences)
                notes.watch_inputs(decoder)
            given = {"position_ids": None, "attention_mask": None, "packed_seq_params": sequences}
            logits = model.logits_of(chunk(input_ids=tokens[None], **given)[0])
            notes.add(LOGITS, logits[:, : architecture.vocab_size])
        return notes.states(samples)


def _sight_of(checked: Checked) -> Any:
    from rltrain.training.tower_pass import Sight

    if checked.images is None:
        return None
    assert checked.model.vision is not None, "a model with images has settings of its tower"
    rules = checked.images.rules
    return Sight(checked.path, rules.mean, rules.std, checked.model.vision, checked.images.store)


def _packed(pictures: Pictures, samples: Samples, device: torch.device) -> Any:
    """Returns all samples as a micro-batch of training."""
    from rltrain.training.packing import pack

    merge = pictures.rules.merge
    fields = [image_fields(len(ids), placed, merge) for ids, placed in zip(samples, pictures.placed, strict=True)]
    experience = Experience(
        group_ids=torch.zeros(len(samples), dtype=torch.int64),
        lengths=torch.tensor([len(ids) for ids in samples]),
        tokens=torch.tensor([token for ids in samples for token in ids]),
        image_keys=torch.cat([torch.from_numpy(keys) for keys, _ in fields]),
        rope_positions=torch.cat([torch.from_numpy(positions) for _, positions in fields]),
    )
    (batch,) = pack(experience, experience.num_tokens, device=device)
    return batch


def _show(batch: Any, model: Any, sequences: Any) -> None:
    """Adds the images of a micro-batch to its sequences, as in training."""
    from rltrain.training.megatron.tower import IMAGES, ROPE_POSITIONS

    vars(sequences)[ROPE_POSITIONS] = batch.experience.rope_positions.T
    vars(sequences)[IMAGES] = model.tower_pass([batch], trains=False).shown(0, partial(model.rows_of_tokens, batch))


@contextmanager
def world_of_one(device: torch.device) -> Iterator[str]:
    """Creates a process group of one rank and yields its backend. Raises RuntimeError if torch.distributed is already
    initialised."""
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield backend
    finally:
        dist.destroy_process_group()


# The model of transformers, sample by sample without a cache.


def run_transformers(checked: Checked, samples: Samples) -> States:
    """Returns the states of transformers' model. It computes in model.dtype throughout, as it has no wider residual
    stream."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    # Only eager attention has soft caps. Other implementations silently leave them out.
    kind: Any = AutoModelForCausalLM if checked.images is None else AutoModelForImageTextToText
    dtype = getattr(torch, checked.model.dtype)
    model: Any = kind.from_pretrained(checked.path, dtype=dtype, attn_implementation="eager")
    model.to(checked.device).eval()
    notes = Notes()
    if checked.images is None:
        notes.watch_decoder(model.model)
    else:
        notes.watch_seeing_decoder(model.model.language_model)
    with torch.no_grad():
        for index, sample in enumerate(samples):
            shown = {} if checked.images is None else _shown_to_transformers(checked, checked.images, index, sample)
            ids = torch.tensor([sample], device=checked.device)
            notes.add(LOGITS, model(ids, use_cache=False, **shown).logits)
    return notes.states(samples)


def _shown_to_transformers(
    checked: Checked, pictures: Pictures, index: int, sample: tuple[int, ...]
) -> dict[str, Tensor]:
    vision, device = checked.architecture.vision, torch.device(checked.device)
    assert vision is not None, "a model with images has a tower"
    mean, std = (torch.tensor(colour, device=device) for colour in (pictures.rules.mean, pictures.rules.std))
    pixels = [torch.from_numpy(pictures.store.pixels(image.key)).to(device) for image in pictures.placed[index]]
    patches, grids = patches_of(vision, pixels, mean, std)
    marks = torch.tensor([sample], device=device) == vision.image_token
    return {"pixel_values": patches, "image_grid_thw": grids, "mm_token_type_ids": marks.int()}


# The trainer's model of backend fsdp on one rank. It is the model of transformers.

SHARDED_GRID = Grid((0,), copies=1)


def run_sharded(checked: Checked, samples: Samples) -> States:
    """Returns the states for all samples, packed into one micro-batch as in training, in a world of one rank. Raises
    UserError if the checkpoint cannot be read or trained."""
    device = torch.device(checked.device)
    with world_of_one(device) as backend:
        from rltrain.training.fsdp_attention import SEQUENCES
        from rltrain.training.fsdp_model import ShardedModel

        model = ShardedModel(
            checked.architecture,
            SHARDED_GRID,
            ProcessGroups(group_lists({"actor": SHARDED_GRID}), backend=backend, timeout_s=TIMEOUT_S),
            folder=checked.path,
            model=checked.model,
            fsdp=schema.Fsdp(),
            device=device,
            trains=False,
            sight=_sight_of(checked),
        )
        load_parameters(checked.path, model.layout, 0, dict(model.weights), config_key="--checkpoint")
        module: Any = model.module
        notes = Notes()
        if checked.images is None:
            notes.watch_decoder(module.language_model.model)
            tokens = torch.tensor([token for sample in samples for token in sample], device=device)
            sequences = model.sequences([len(sample) for sample in samples])
            given = {"input_ids": tokens[None], "position_ids": sequences.positions[None], SEQUENCES: sequences}
            with torch.no_grad():
                notes.add(LOGITS, model.logits_of(module(use_cache=False, **given)[0])[:, :])
        else:
            from rltrain.training.fsdp_vision import shown_in

            notes.watch_seeing_decoder(module.language_model.model.language_model)
            batch = _packed(checked.images, samples, device)
            with torch.no_grad():
                shown = shown_in(model.tower_pass([batch], trains=False), 0, batch, model.share)
                notes.add(LOGITS, model.logits_of(model.outputs(batch, shown))[:, :])
    return notes.states(samples)
