"""A job to be estimated: what follows from its config, the shares of its ranks, and lengths of its texts."""

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from math import lcm, prod

from rltrain.config.schema import Config
from rltrain.errors import ConfigError
from rltrain.models import Architecture
from rltrain.models.checkpoint_model import local_mechanisms
from rltrain.models.experts import is_expert
from rltrain.models.of_roles import reference_is_actors_base, reference_uses_actor_modules
from rltrain.models.table import item_bytes
from rltrain.reshard.megatron_layout import chunks_of, megatron_layout
from rltrain.rollout.layout import engine_layout, engine_of
from rltrain.runtime.grid import Grid
from rltrain.runtime.placement import Placement, group_lists, role_grids
from rltrain.schedule.iterations import steady_order
from rltrain.schedule.order import Order
from rltrain.schedule.shape import RunShape
from rltrain.tasks.roles import device_roles, served_roles, trained_roles

# How long the texts of a run are taken to be, on which its seconds depend.

MEAN_OF_LONGEST = 0.5
"""What a mean length is taken to be of the longest one allowed, where nobody says more."""


def longest_response(config: Config) -> int:
    """Returns how many tokens the longest response has that is trained on. Where the config has no limit these are what
    a prompt, or a pair of them, leaves of a micro-batch."""
    shape = RunShape.of(config)
    at_once = config.actor.micro_batch_tokens // (2 if shape.from_pairs else 1)
    return shape.longest_response or max(at_once - config.data.max_prompt_tokens, 1)


@dataclass(frozen=True)
class Workload:
    """Tokens: means over the samples of a step, and the longest response among them."""

    prompt: float
    response: float
    longest_response: float

    @property
    def sample(self) -> float:
        return self.prompt + self.response

    @classmethod
    def of(cls, config: Config, prompt: float | None = None, response: float | None = None) -> "Workload":
        """What is given, and half of what the config allows where nothing is. ConfigError where that is exceeded."""
        longest = longest_response(config)
        return cls(
            prompt=_mean("--prompt-tokens", prompt, config.data.max_prompt_tokens),
            response=_mean("--response-tokens", response, longest),
            longest_response=longest,
        )


def _mean(option: str, given: float | None, limit: int) -> float:
    if given is not None and not 0 < given <= limit:
        raise ConfigError(f"option {option}: got {given:g}; expected more than 0 and at most the limit {limit}")
    return limit * MEAN_OF_LONGEST if given is None else given


# What of a model lies on a rank: layers of its pipeline stage, and elements of its parameters.

PARAMETER_ALIGNMENT = 64
"""Elements: where Megatron's distributed optimizer lets a parameter begin in its buffers."""
BUFFER_ALIGNMENT = 128


@dataclass(frozen=True)
class Elements:
    """Sizes of a rank's parameters, those of experts apart, which other ranks share."""

    dense: tuple[int, ...]
    experts: tuple[int, ...] = ()

    @property
    def total(self) -> int:
        return sum(self.dense) + sum(self.experts)


def layers_of_chunks(architecture: Architecture, grid: Grid, stage: int) -> tuple[tuple[bool, ...], ...]:
    """[chunks of the stage][layers of the chunk]: which have experts."""
    sparse = architecture.sparse_layers
    return tuple(tuple(sparse[layer] for layer in chunk.layers) for chunk in chunks_of(architecture, grid)[stage])


def layers_of_stage(architecture: Architecture, grid: Grid, stage: int) -> tuple[bool, ...]:
    """[layers of the stage]: which have experts."""
    return tuple(sparse for chunk in layers_of_chunks(architecture, grid, stage) for sparse in chunk)


def trained_elements(architecture: Architecture, grid: Grid, stage: int) -> Elements:
    """Parameters on a rank of a pipeline stage, by the layout that training has."""
    return _trained(architecture, one_replica(grid), stage)


def one_replica(grid: Grid) -> Grid:
    """The smallest grid whose ranks hold what this one's do, with every expert once."""
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
    """Of the parameters on a rank of an engine."""
    parameters = engine_layout(architecture, Grid(tuple(range(tp)), tp=tp, ep=ep)).on(0).parameters
    return sum(prod(shape) for _, shape in parameters)


@lru_cache(maxsize=1024)
def served_bytes(architecture: Architecture, tp: int, dtype: str, fp8: bool, ep: int = 1) -> int:
    """Of the same parameters in engines of `dtype`."""
    return engine_of(architecture, Grid(tuple(range(tp)), tp=tp, ep=ep), dtype=dtype, fp8=fp8).held_bytes(0)


def expert_data_parallel(grid: Grid) -> int:
    """Ranks that hold the same experts."""
    return len(grid.ranks) // (grid.pp * grid.ep * (grid.etp or grid.tp))


def in_buffers(sizes: tuple[int, ...], replicas: int) -> int:
    """Elements of the flat buffer that Megatron's distributed optimizer keeps parameters in, to be cut among
    `replicas`."""
    if not sizes:
        return 0
    end = 0
    for size in sizes:
        end = -(-end // PARAMETER_ALIGNMENT) * PARAMETER_ALIGNMENT + size
    multiple = lcm(replicas, BUFFER_ALIGNMENT)
    return -(-end // multiple) * multiple


# A job that is to be estimated, with what follows for it from its config; ranks that are alike are taken together.


@dataclass(frozen=True)
class Kind:
    """Ranks that hold the same and do the same: those of one pipeline stage in each of the roles that they host."""

    roles: tuple[str, ...]
    stages: tuple[tuple[str, int], ...]
    """(role, stage) of roles with something on the device."""

    @property
    def device_roles(self) -> tuple[str, ...]:
        return tuple(role for role, _ in self.stages)


@dataclass(frozen=True, eq=False)
class PlannedJob:
    """`architectures` are by role, that of model.path under actor. Nothing is asked of what may be trained today: a
    config of which `rltrain.planning.validation` refuses the model can be estimated all the same."""

    config: Config
    placement: Placement
    grids: Mapping[str, Grid]
    architectures: Mapping[str, Architecture]
    ranks_per_node: int

    @cached_property
    def order(self) -> Order:
        return steady_order(self.config, self.placement)

    @cached_property
    def shape(self) -> RunShape:
        return RunShape.of(self.config)

    @cached_property
    def guests(self) -> frozenset[str]:
        """Roles whose weights take the place of the actor's."""
        guest = reference_uses_actor_modules(self.config, self.grids, self.architectures)
        return frozenset(["reference"] if guest else [])

    @cached_property
    def sharing(self) -> frozenset[str]:
        """Roles whose model is the actor without its adapters."""
        shares = reference_is_actors_base(self.config, self.grids, self.architectures)
        return frozenset(["reference"] if shares else [])

    @cached_property
    def kinds(self) -> dict[Kind, tuple[int, ...]]:
        """With their ranks, ascending; idle ranks are of no kind."""
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
        """[rank] of several ranks each, that it takes part in."""
        lists = group_lists(self.grids)
        return Counter(rank for ranks in lists if len(ranks) > 1 for rank in ranks)

    @property
    def item_bytes(self) -> int:
        """Of an element of the weights."""
        return item_bytes(self.config.model.dtype)

    @property
    def residual_bytes(self) -> int:
        """Of an element of the residual stream."""
        return item_bytes(self.config.model.residual)

    @property
    def logit_bytes(self) -> int:
        return item_bytes(self.config.model.head)

    def has_local_layers(self, role: str) -> bool:
        """Whether Megatron's own layers train or evaluate a role's model, where Transformer Engine is installed too."""
        model = self.config.model
        adapted = model.lora is not None and role == "actor"
        local = model.transformer_impl == "local" or model.dtype == "float32"
        return local or adapted or bool(local_mechanisms(self.architectures[role]))

    @property
    def attends_packed(self) -> bool:
        """Whether one kernel takes the sequences of a micro-batch as they lie: none does in float32."""
        return self.config.model.dtype != "float32"

    def runs_elsewhere(self, role: str) -> bool:
        """Whether somebody else runs the engines of a role that has such: nothing of them is on its ranks."""
        return role in served_roles() and self.config.served(role).engine == "http"

    def adapter_bytes_of(self, role: str) -> int:
        """Of low-rank adapters that a rank of an engine of the role's has beside the weights."""
        lora, grid = self.config.model.lora, self.grids[role]
        if lora is None or not self.config.keeps_adapters_apart(role):
            return 0
        adapted = self.architectures["actor"].adapted(lora.rank, lora.targets)
        return served_bytes(adapted, grid.tp, self.config.model.dtype, False, grid.ep)

    def served_bytes_of(self, role: str) -> int:
        """Of the weights on a rank of an engine of the role's."""
        is_fp8, grid = self.config.served(role).dtype == "fp8", self.grids[role]
        return served_bytes(self.architectures[role], grid.tp, self.config.model.dtype, is_fp8, grid.ep)

    @property
    def longest_tokens(self) -> int:
        """Of a prompt and its response."""
        return self.config.data.max_prompt_tokens + longest_response(self.config)

    @property
    def samples_per_step(self) -> int:
        return self.config.batch.prompts_per_step * self.shape.samples_per_group

    def samples_per_replica(self, role: str) -> int:
        """Of one step, on the replica with most: of roles that learn what they learn from, of others all there is."""
        prompts = -(-self.config.batch.prompts_per_step // self.grids[role].dp)
        others = 0 if role in trained_roles() else self.shape.greedy_per_group
        return prompts * (self.shape.samples_per_group + others)

    def micro_batch_tokens(self, role: str) -> int:
        """At most in one micro-batch of a role, on all ranks of context parallelism together: a longer sequence, or
        pair of them, stands alone, and a replica may not have as many."""
        all_tokens = self.samples_per_replica(role) * self.longest_tokens
        together = self.longest_tokens * (2 if self.shape.from_pairs else 1)
        return min(max(self.micro_batch_limit(role), together), all_tokens)

    def micro_batch_limit(self, role: str) -> int:
        """What micro_batch_tokens of a role comes to on all ranks of context parallelism."""
        return int(getattr(self.config, role).micro_batch_tokens) * self.grids[role].cp

    def micro_batch_rows(self, role: str) -> int:
        """Of its tokens those that one rank computes."""
        return -(-self.micro_batch_tokens(role) // self.grids[role].cp)

    def num_micro_batches(self, role: str) -> int:
        """Of one optimizer step, where all sequences are as long as they may be."""
        tokens = self.samples_per_replica(role) * self.longest_tokens // self.config.batch.mini_batches
        return max(1, -(-tokens // self.micro_batch_tokens(role)))


def plan_job(
    config: Config, placement: Placement, architectures: Mapping[str, Architecture], ranks_per_node: int
) -> PlannedJob:
    """PlacementError where a role's sizes do not divide its ranks."""
    return PlannedJob(config, placement, role_grids(config, placement), architectures, ranks_per_node)
