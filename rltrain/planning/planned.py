"""A job to be estimated: facts derived from its config, the contents of its ranks, and its text lengths."""

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from math import ceil, lcm, prod

from rltrain.config.models import RecomputedModule
from rltrain.config.schema import Config, SharePrefixes
from rltrain.errors import ConfigError
from rltrain.models import Architecture
from rltrain.models.checkpoint_model import local_mechanisms
from rltrain.models.experts import is_expert
from rltrain.models.of_roles import reference_is_actors_base, reference_uses_actor_modules
from rltrain.models.table import item_bytes
from rltrain.models.vision import Grid as ImageGrid
from rltrain.reshard.megatron_layout import chunks_of, megatron_layout
from rltrain.rollout.layout import by_names, engine_by_names, engine_layout, engine_of, staging_bytes
from rltrain.runtime.grid import Grid
from rltrain.runtime.placement import Placement, group_lists, role_grids
from rltrain.schedule.iterations import steady_order
from rltrain.schedule.order import Order
from rltrain.schedule.shape import RunShape
from rltrain.tasks.roles import device_roles, served_roles, trained_roles

# Assumed text lengths of a run. Its seconds depend on them.

MEAN_OF_LONGEST = 0.5
"""Assumed mean length as a share of the longest allowed length, if no option gives the mean."""


def longest_response(config: Config) -> int:
    """Returns the tokens of the longest response in training.

    If the config has no limit, this is the room that the longest prompt (or pair of prompts) leaves in a micro-batch.
    """
    shape = RunShape.of(config)
    at_once = config.actor.micro_batch_limit // (2 if shape.from_pairs else 1)
    return shape.longest_response or max(at_once - config.data.max_prompt_tokens, 1)


IMAGES_OF_PROMPT = 0.5
"""Assumed share of images in the tokens of a prompt, with model.vision."""


@dataclass(frozen=True)
class RowImages:
    """Images of `num_rows` rows for training. An image counts once in a row.

    `prompt_tokens` and `tokens` are means: tokens of a prompt, and tokens of a row's images. `most_tokens` are those of
    the row with the largest images. `grids` are all images. `largest` is the largest image in patches. It may be of a
    row for evaluations.
    """

    num_rows: int
    prompt_tokens: float
    tokens: float
    most_tokens: int
    grids: tuple[ImageGrid, ...]
    largest: int


@dataclass(frozen=True)
class Workload:
    """Text lengths in tokens: means over the samples of a step, and its longest response. `image_tokens` of a prompt
    are those of images. `images` are set if these were measured."""

    prompt: float
    response: float
    longest_response: float
    image_tokens: float = 0.0
    images: RowImages | None = None

    @property
    def sample(self) -> float:
        return self.prompt + self.response

    @classmethod
    def of(
        cls,
        config: Config,
        prompt: float | None = None,
        response: float | None = None,
        images: RowImages | None = None,
    ) -> "Workload":
        """Returns the given means, or else those of `images`, or half of the config's limits. Raises ConfigError if a
        mean exceeds its limit."""
        longest = longest_response(config)
        tokens = _mean("--prompt-tokens", prompt, config.data.max_prompt_tokens)
        if images is not None and prompt is None:
            tokens = images.prompt_tokens
        of_images = tokens * IMAGES_OF_PROMPT if config.model.vision else 0.0
        return cls(
            prompt=tokens,
            response=_mean("--response-tokens", response, longest),
            longest_response=longest,
            image_tokens=of_images if images is None else images.tokens,
            images=images,
        )


def _mean(option: str, given: float | None, limit: int) -> float:
    if given is not None and not 0 < given <= limit:
        raise ConfigError(f"option {option}: got {given:g}; expected more than 0 and at most the limit {limit}")
    return limit * MEAN_OF_LONGEST if given is None else given


# Prompts that samples share. A model computes them once (`share_prefixes`).

MIN_SHARED_TOKENS, LEAST_SAVED = 16, 0.1
"""The numbers of rltrain/training/prefix_tree.py."""


@dataclass(frozen=True)
class Computed:
    """The computed part of samples with a prompt and a response each."""

    share: float
    """Computed tokens relative to all tokens."""
    context: float
    """Mean number of positions that a computed token attends to."""
    together: float
    """Computed tokens of the samples that are never split between micro-batches."""

    @classmethod
    def of(
        cls, prompt: float, response: float, num_samples: int, limit: float, how: SharePrefixes, *, splits: bool = True
    ) -> "Computed":
        """Returns the computed part of the `num_samples` samples of a prompt, in micro-batches of `limit` tokens.

        A prompt is computed once in each of its micro-batches. Without `splits` the samples are in one. `how` is the
        role's share_prefixes.
        """
        sample = prompt + response
        fitting = num_samples if not splits else max(1, min(num_samples, int((limit - prompt) // response)))
        saved = prompt * (num_samples - 1) / (num_samples * sample)
        if how is False or prompt < MIN_SHARED_TOKENS or saved <= (LEAST_SAVED if how == "auto" else 0) or fitting == 1:
            return cls(1.0, sample / 2, sample if splits else num_samples * sample)
        again = num_samples - ceil(num_samples / fitting)
        tokens, computed = num_samples * sample, num_samples * sample - again * prompt
        attended = (num_samples * sample**2 - again * prompt**2) / 2
        return cls(computed / tokens, attended / computed, prompt + fitting * response)


# The contents of a rank: the layers of its pipeline stage, and the elements of its parameters.

PARAMETER_ALIGNMENT = 64
"""Alignment, in elements, of a parameter in the buffers of Megatron's distributed optimizer."""
BUFFER_ALIGNMENT = 128


@dataclass(frozen=True)
class Elements:
    """Numbers of elements of a rank's parameters. Experts are separate because other ranks share them."""

    dense: tuple[int, ...]
    experts: tuple[int, ...] = ()

    @property
    def total(self) -> int:
        return sum(self.dense) + sum(self.experts)


def layers_of_chunks(architecture: Architecture, grid: Grid, stage: int) -> tuple[tuple[bool, ...], ...]:
    """Returns, for each chunk of the stage and each of its layers, whether the layer has experts."""
    sparse = architecture.sparse_layers
    return tuple(tuple(sparse[layer] for layer in chunk.layers) for chunk in chunks_of(architecture, grid)[stage])


def layers_of_stage(architecture: Architecture, grid: Grid, stage: int) -> tuple[bool, ...]:
    """Returns, for each layer of the stage, whether it has experts."""
    return tuple(sparse for chunk in layers_of_chunks(architecture, grid, stage) for sparse in chunk)


def trained_elements(architecture: Architecture, grid: Grid, stage: int) -> Elements:
    """Returns the sizes of the parameters on a rank of a pipeline stage in training."""
    return _trained(architecture, one_replica(grid), stage)


def one_replica(grid: Grid) -> Grid:
    """Returns the smallest grid whose ranks have the same contents, with every expert once."""
    stage_ranks = lcm(grid.tp, grid.ep * (grid.etp or grid.tp))
    return replace(grid, ranks=tuple(range(grid.pp * stage_ranks)), cp=1)


@lru_cache(maxsize=4096)
def _trained(architecture: Architecture, grid: Grid, stage: int) -> Elements:
    layout = megatron_layout(architecture, grid, transformer_engine=True)
    parameters = layout.on(int(grid.array[stage].flat[0])).parameters
    return Elements(
        tuple(prod(shape) for name, shape in parameters if not is_expert(name)),
        tuple(prod(shape) for name, shape in parameters if is_expert(name)),
    )


@lru_cache(maxsize=1024)
def served_elements(architecture: Architecture, tp: int, ep: int = 1) -> int:
    """Returns the number of parameter elements on a rank of an engine."""
    parameters = engine_layout(architecture, Grid(tuple(range(tp)), tp=tp, ep=ep)).on(0).parameters
    return sum(prod(shape) for _, shape in parameters)


@lru_cache(maxsize=1024)
def served_bytes(architecture: Architecture, tp: int, dtype: str, fp8: bool, ep: int = 1) -> int:
    """Returns the bytes of these parameters in engines of `dtype`."""
    return engine_of(architecture, Grid(tuple(range(tp)), tp=tp, ep=ep), dtype=dtype, fp8=fp8).held_bytes(0)


@lru_cache(maxsize=1024)
def largest_parameter_bytes(
    architecture: Architecture, tp: int, dtype: str, fp8: bool, ep: int = 1, *, of_checkpoint: bool = False
) -> int:
    """Returns the bytes of the largest parameter on a rank of an engine, or of the largest tensor of a checkpoint."""
    if of_checkpoint:
        return engine_by_names(architecture, Grid((0,)), dtype=dtype, fp8=fp8).largest_bytes(0)
    return engine_of(architecture, Grid(tuple(range(tp)), tp=tp, ep=ep), dtype=dtype, fp8=fp8).largest_bytes(0)


def expert_data_parallel(grid: Grid) -> int:
    """Returns the number of ranks with the same experts."""
    return len(grid.ranks) // (grid.pp * grid.ep * (grid.etp or grid.tp))


def in_buffers(sizes: tuple[int, ...], replicas: int) -> int:
    """Returns the elements of the flat parameter buffer of Megatron's distributed optimizer, padded for `replicas`."""
    if not sizes:
        return 0
    end = 0
    for size in sizes:
        end = -(-end // PARAMETER_ALIGNMENT) * PARAMETER_ALIGNMENT + size
    multiple = lcm(replicas, BUFFER_ALIGNMENT)
    return -(-end // multiple) * multiple


# A job to be estimated. Equal ranks are estimated together.


@dataclass(frozen=True)
class Kind:
    """A kind of ranks with equal contents and work: the same roles, and the same pipeline stage in each."""

    roles: tuple[str, ...]
    stages: tuple[tuple[str, int], ...]
    """(role, stage) of roles with something on the device."""

    @property
    def device_roles(self) -> tuple[str, ...]:
        return tuple(role for role, _ in self.stages)


@dataclass(frozen=True, eq=False)
class PlannedJob:
    """A job to be estimated. `architectures` are by role. The actor's is the one of model.path.

    A config can be estimated even if `rltrain.planning.validation` refuses its model.
    """

    config: Config
    placement: Placement
    grids: Mapping[str, Grid]
    architectures: Mapping[str, Architecture]
    ranks_per_node: int
    measured: RowImages | None = None
    """Images of the rows that a dry run has read, with model.vision."""

    @property
    def images(self) -> RowImages | None:
        """The measured images, if the model is shown those of rows. Environments show others."""
        return None if "env" in self.placement.roles else self.measured

    @cached_property
    def order(self) -> Order:
        return steady_order(self.config, self.placement)

    @cached_property
    def shape(self) -> RunShape:
        return RunShape.of(self.config)

    @cached_property
    def guests(self) -> frozenset[str]:
        """Roles whose weights temporarily replace the actor's on the device."""
        guest = reference_uses_actor_modules(self.config, self.grids, self.architectures)
        return frozenset(["reference"] if guest else [])

    @cached_property
    def sharing(self) -> frozenset[str]:
        """Roles that use the actor's model without its adapters."""
        shares = reference_is_actors_base(self.config, self.grids, self.architectures)
        return frozenset(["reference"] if shares else [])

    @cached_property
    def kinds(self) -> dict[Kind, tuple[int, ...]]:
        """The kinds of ranks, each with its ranks in ascending order. Idle ranks have no kind."""
        roles: dict[int, list[str]] = defaultdict(list)
        stages: dict[int, list[tuple[str, int]]] = defaultdict(list)
        for role in self.placement.roles:
            grid = self.grids[role]
            for stage, ranks in enumerate(grid.array.reshape(grid.pp, -1).tolist()):
                for rank in ranks:
                    roles[rank].append(role)
                    if role in device_roles():
                        stages[rank].append((role, stage))
        kinds: dict[Kind, list[int]] = defaultdict(list)
        for rank in sorted(roles):
            kinds[Kind(tuple(roles[rank]), tuple(stages[rank]))].append(rank)
        return {kind: tuple(ranks) for kind, ranks in kinds.items()}

    @cached_property
    def num_communicators(self) -> Counter[int]:
        """Number of communicators of two or more ranks, by rank."""
        lists = group_lists(self.grids)
        return Counter(rank for ranks in lists if len(ranks) > 1 for rank in ranks)

    @property
    def item_bytes(self) -> int:
        """Bytes per element of the weights."""
        return item_bytes(self.config.model.dtype)

    @property
    def residual_bytes(self) -> int:
        """Bytes per element of the residual stream."""
        return item_bytes(self.config.model.residual)

    @property
    def logit_bytes(self) -> int:
        return item_bytes(self.config.model.head)

    def has_local_layers(self, role: str) -> bool:
        """Returns whether Megatron's own layers run a role's model although Transformer Engine is installed."""
        model = self.config.model
        adapted = model.lora is not None and role == "actor"
        local = model.transformer_impl == "local" or model.dtype == "float32"
        return local or adapted or bool(local_mechanisms(self.architectures[role]))

    def has_te_layers(self, role: str) -> bool:
        """Returns whether Transformer Engine's layers run a role's model."""
        return not (self.grids[role].is_sharded or self.has_local_layers(role))

    def repeats(self, role: str, module: RecomputedModule) -> bool:
        """Returns whether backward recomputes this part of every layer on its own."""
        return module in self.config.model.recomputed.chosen(transformer_engine=self.has_te_layers(role))

    def attends_locally(self, role: str) -> bool:
        """Returns whether Megatron's own attention runs. Under context parallelism it runs for shared prefixes too."""
        grid = self.grids[role]
        is_cut = grid.cp > 1 and not grid.is_sharded
        return self.has_local_layers(role) or (is_cut and self.computed_of_longest(role).share < 1)

    @property
    def attends_packed(self) -> bool:
        """Whether one attention kernel takes the packed sequences of a micro-batch. There is no such kernel for
        float32."""
        return self.config.model.dtype != "float32"

    def runs_elsewhere(self, role: str) -> bool:
        """Returns whether the role's engines are servers at URLs, so that nothing of them is on its ranks."""
        return role in served_roles() and self.config.served(role).engine == "http"

    def adapter_bytes_of(self, role: str) -> int:
        """Returns the bytes of separate low-rank adapters on a rank of the role's engine."""
        lora, grid = self.config.model.lora, self.grids[role]
        if lora is None or not self.config.keeps_adapters_apart(role):
            return 0
        adapted = self.architectures["actor"].adapted(lora.rank, lora.targets, vision=lora.vision)
        return served_bytes(adapted, grid.tp, self.config.model.dtype, False, grid.ep)

    def served_bytes_of(self, role: str) -> int:
        """Returns the bytes of the weights on a rank of the role's engine."""
        is_fp8, grid = self.config.served(role).dtype == "fp8", self.grids[role]
        return served_bytes(self.architectures[role], grid.tp, self.config.model.dtype, is_fp8, grid.ep)

    def in_transfer_bytes_of(self, role: str) -> int:
        """Returns the bytes of weights on their way to a server at once: staging_mb, or the largest parameter."""
        served, grid, architecture = self.config.served(role), self.grids[role], self.architectures[role]
        of_checkpoint, is_fp8 = served.engine == "http" or by_names(architecture), served.dtype == "fp8"
        largest = largest_parameter_bytes(
            architecture, grid.tp, self.config.model.dtype, is_fp8, grid.ep, of_checkpoint=of_checkpoint
        )
        return max(staging_bytes(served), largest)

    @property
    def longest_tokens(self) -> int:
        """Tokens of the longest prompt with the longest response."""
        return self.config.data.max_prompt_tokens + longest_response(self.config)

    @property
    def samples_per_step(self) -> int:
        return self.config.batch.prompts_per_step * self.shape.samples_per_group

    def samples_per_replica(self, role: str) -> int:
        """Returns the samples per step on the replica with the most. Trained roles skip greedy samples, other roles do
        not."""
        prompts = -(-self.config.batch.prompts_per_step // self.grids[role].dp)
        others = 0 if role in trained_roles() else self.shape.greedy_per_group
        return prompts * (self.shape.samples_per_group + others)

    def share_prefixes_of(self, role: str) -> SharePrefixes:
        """Returns whether a role's model computes the prompt of several samples once.

        An agent's episode has any number of samples with unknown contexts, so nothing of them is assumed to be shared.
        """
        return False if self.has_agents else self.config.share_prefixes_of(role)

    @property
    def has_agents(self) -> bool:
        return "env" in self.placement.roles and self.config.env.agent is not None

    def computed(self, role: str, prompt: float, response: float, *, trains: bool) -> Computed:
        """Returns the computed part of samples of these lengths. In training the samples of a prompt may be in several
        mini-batches."""
        shape = self.shape
        num_samples = shape.samples_per_group
        if trains:
            num_samples = max(1, num_samples * shape.prompt_blocks // self.config.batch.mini_batches)
        elif role not in trained_roles():
            num_samples += shape.greedy_per_group
        num_samples = 2 if shape.from_pairs else num_samples
        how, limit = self.share_prefixes_of(role), self.micro_batch_limit(role)
        # The layer for a further token also takes the next token, so a prompt's last row belongs to one response.
        ahead = int(trains and self.config.predicts(role))
        return Computed.of(prompt - ahead, response + ahead, num_samples, limit, how, splits=not shape.from_pairs)

    def computed_of_longest(self, role: str) -> Computed:
        """Returns the computed part of samples in training, or of a role that only evaluates, if all have the longest
        length."""
        prompt = self.config.data.max_prompt_tokens
        return self.computed(role, prompt, self.longest_tokens - prompt, trains=role in trained_roles())

    def micro_batch_tokens(self, role: str) -> int:
        """Returns the most computed tokens in one micro-batch of a role, summed over its context-parallel ranks.

        A longer sequence or pair forms a micro-batch by itself. A replica with few samples has fewer tokens.
        """
        computed = self.computed_of_longest(role)
        all_tokens = ceil(self.samples_per_replica(role) * self.longest_tokens * computed.share)
        together = ceil(computed.together) if self.shape.from_pairs else self.longest_tokens
        return min(max(self.micro_batch_limit(role), together), all_tokens)

    def micro_batch_limit(self, role: str) -> int:
        """Returns the role's `micro_batch_tokens`, summed over its context-parallel ranks."""
        return int(getattr(self.config, role).micro_batch_limit) * self.grids[role].cp

    def micro_batch_rows(self, role: str) -> int:
        """Returns the most tokens of a micro-batch on one rank."""
        return -(-self.micro_batch_tokens(role) // self.grids[role].cp)

    def num_micro_batches(self, role: str) -> int:
        """Returns the number of micro-batches per optimizer step if all sequences have the longest length."""
        all_tokens = self.samples_per_replica(role) * self.longest_tokens * self.computed_of_longest(role).share
        tokens = int(all_tokens) // self.config.batch.mini_batches
        return max(1, -(-tokens // self.micro_batch_tokens(role)))


def plan_job(
    config: Config,
    placement: Placement,
    architectures: Mapping[str, Architecture],
    ranks_per_node: int,
    measured: RowImages | None = None,
) -> PlannedJob:
    """Returns the job of a config. Raises PlacementError if a role's parallel sizes do not divide its ranks."""
    return PlannedJob(config, placement, role_grids(config, placement), architectures, ranks_per_node, measured)
