"""Checks that span several config keys: without a world, and against the grids and the model's architecture.

Every refusal names the keys, the values given and what would be accepted; all refusals come in one message.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Protocol

from rltrain.config.roles import NOT_YET, nearest, required_roles, role_names, split_roles, usable_roles
from rltrain.config.schema import Config, Parallel
from rltrain.errors import ConfigError, PlacementError

MIN_SAMPLES_PER_GROUP = 2


class GridSizes(Protocol):
    """What the checks read of rltrain.cluster.grid.Grid."""

    @property
    def ranks(self) -> tuple[int, ...]: ...
    @property
    def tp(self) -> int: ...
    @property
    def pp(self) -> int: ...
    @property
    def dp(self) -> int: ...


class ModelSizes(Protocol):
    """What the checks read of rltrain.models.Architecture."""

    @property
    def num_layers(self) -> int: ...
    @property
    def num_heads(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def ffn_hidden_size(self) -> int: ...
    @property
    def max_positions(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def num_experts(self) -> int: ...
    @property
    def mla(self) -> object | None: ...


def check_config(config: Config) -> None:
    """Refuse what cannot work in any world. ConfigError; PlacementError if only the placed roles are at fault."""
    placement = list(_role_problems(config))
    others = [
        *_parallel_problems(config),
        *_batch_problems(config),
        *_length_problems(config),
        *_training_problems(config),
        *_checkpoint_problems(config),
    ]
    _raise_if_any(placement, PlacementError if not others else ConfigError, others)


def check_against_architecture(
    config: Config, grids: Mapping[str, GridSizes], architectures: Mapping[str, ModelSizes]
) -> None:
    """Refuse models that cannot be trained, grids that do not divide the model or the batch, and texts longer than a
    model takes. `architectures` are by role, that of model.path under actor. ConfigError."""
    problems = list(_data_parallel_problems(config, grids))
    for role in ("actor", "critic", "reference", "rollout"):
        if role in grids:
            problems += _model_problems(config, role, architectures)
            problems += _grid_problems(config.parallel_of(role)[1], grids[role], architectures[role])
    _raise_if_any(problems, ConfigError)


def _raise_if_any(problems: Iterable[str], error: type[ConfigError], more: Iterable[str] = ()) -> None:
    messages = list(dict.fromkeys([*problems, *more]))
    if len(messages) == 1:
        raise error(messages[0])
    if messages:
        raise error(f"{len(messages)} mistakes in the config:\n" + "\n".join(f"  {message}" for message in messages))


def _role_problems(config: Config) -> Iterator[str]:
    placed = [(key, role) for key in config.placement for role in split_roles(key)]
    usable = [role for role in role_names() if role in usable_roles(config)]
    for key, role in placed:
        if role in NOT_YET:
            yield f"placement.{key}: role {role} cannot be placed: {NOT_YET[role]}"
        elif role not in role_names():
            closest = nearest(role, usable)
            hint = f"the nearest valid role is {closest}" if closest else f"expected one of {', '.join(usable)}"
            yield f"placement.{key}: unknown role {role!r}; {hint}"
        elif role not in usable:
            yield (
                f"placement.{key}: role {role} has nothing to do in algorithm {config.algorithm}"
                f"{_without_evaluation(config)}; expected only {', '.join(usable)}"
            )
    names = {role for _, role in placed}
    for role in required_roles(config):
        if role not in names:
            yield f"placement.{role}: the role is not placed, but {_need(config, role)}; expected {role}: ranks"


def _without_evaluation(config: Config) -> str:
    return " without data.eval" if config.algorithm == "sft" and config.data.eval is None else ""


def _need(config: Config, role: str) -> str:
    if role == "reference":
        return f"loss.kl.coef {config.loss.kl.coef} needs it"
    if config.algorithm == "sft" and role != "actor":
        return "data.eval needs it"
    return f"algorithm {config.algorithm} needs it"


def _parallel_problems(config: Config) -> Iterator[str]:
    sections = {"actor": config.actor.parallel, "rollout": config.rollout.parallel}
    for role, own in (("critic", config.critic.parallel), ("reference", config.reference.parallel)):
        if own is not None:
            sections[role] = own
    for role, parallel in sections.items():
        key = f"{role}.parallel"
        if parallel.cp > 1:
            yield f"{key}.cp: got {parallel.cp}; expected 1: context parallelism needs Transformer Engine's attention"
        if parallel.ep > 1:
            yield f"{key}.ep: got {parallel.ep}; expected 1: only mixture-of-experts families have experts to share out"
        if role == "rollout":
            yield from _engine_problems(key, parallel)
        elif parallel.sequence_parallel and parallel.tp == 1:
            yield f"{key}.sequence_parallel: got true with {key}.tp 1; expected false, or a tp of at least 2"


def _engine_problems(key: str, parallel: Parallel) -> Iterator[str]:
    if parallel.pp > 1:
        yield f"{key}.pp: got {parallel.pp}; expected 1: the embedded engine has no pipeline stages"
    if parallel.sequence_parallel:
        yield f"{key}.sequence_parallel: got true; expected false: only training splits sequences"


def _batch_problems(config: Config) -> Iterator[str]:
    batch = config.batch
    samples = config.samples_per_group
    if samples % batch.mini_batches and batch.mini_batches % samples:
        yield (
            f"batch.mini_batches: got {batch.mini_batches} with {samples} samples per prompt; expected a number that "
            f"divides {samples}, or a multiple of it"
        )
    elif batch.prompts_per_step % config.prompt_blocks:
        yield (
            f"batch.prompts_per_step: got {batch.prompts_per_step}; expected a multiple of {config.prompt_blocks}: "
            f"batch.mini_batches {batch.mini_batches} with {samples} samples per prompt take so many blocks of prompts"
        )
    if config.algorithm == "grpo" and batch.samples_per_prompt < MIN_SAMPLES_PER_GROUP:
        yield (
            f"batch.samples_per_prompt: got {batch.samples_per_prompt}; expected at least {MIN_SAMPLES_PER_GROUP}: "
            "algorithm grpo compares the samples of a prompt, and the advantage of a single one is 0"
        )


def _longest_text(config: Config) -> tuple[int, str]:
    """(tokens, the sum in words) of the longest prompt and response together."""
    prompt, response = config.data.max_prompt_tokens, config.rollout.sampling.max_response_tokens
    words = f"data.max_prompt_tokens {prompt} + rollout.sampling.max_response_tokens {response} = {prompt + response}"
    return prompt + response, words


def _length_problems(config: Config) -> Iterator[str]:
    longest, sizes = _longest_text(config)
    used = any("rollout" in split_roles(key) for key in config.placement)
    if used and config.rollout.max_context_tokens < longest:
        yield f"rollout.max_context_tokens: got {config.rollout.max_context_tokens}; expected at least {sizes}"


def _training_problems(config: Config) -> Iterator[str]:
    if config.algorithm != "sft" and config.rollout.sampling.temperature == 0:
        yield (
            f"rollout.sampling.temperature: got 0; expected above 0: algorithm {config.algorithm} learns from "
            "differing samples, and greedy ones are equal"
        )
    if config.evaluation.stop_at is not None and config.data.eval is None:
        yield (
            f"evaluation.stop_at: got {config.evaluation.stop_at} without data.eval; expected held-out prompts in "
            "data.eval, or null"
        )
    for role, optimizer in (("actor", config.actor.optimizer), ("critic", config.critic.optimizer)):
        if optimizer.min_lr > optimizer.lr:
            yield (
                f"{role}.optimizer.min_lr: got {optimizer.min_lr}; expected at most {role}.optimizer.lr {optimizer.lr}"
            )
    if config.algorithm == "ppo" and config.critic.critic_warmup_steps >= config.steps:
        yield (
            f"critic.critic_warmup_steps: got {config.critic.critic_warmup_steps} of {config.steps} steps (config key "
            "steps); expected fewer, so that the actor learns too"
        )


def _checkpoint_problems(config: Config) -> Iterator[str]:
    interval, sync_every = config.checkpoint.save_interval, config.schedule.sync_every
    if interval % sync_every:
        yield (
            f"checkpoint.save_interval: got {interval}; expected a multiple of schedule.sync_every {sync_every}: a "
            "checkpoint has the actor's weights, not the older ones that engines have between two weight syncs"
        )


def _model_problems(config: Config, role: str, architectures: Mapping[str, ModelSizes]) -> Iterator[str]:
    architecture = architectures[role]
    path, key = config.checkpoint_of(role)
    found = f"{key}: the model in {path} has"
    expected = "expected a dense one (llama, mistral, qwen2, qwen3): neither the trainer nor the embedded engine has"
    if architecture.num_experts:
        yield f"{found} {architecture.num_experts} experts in a layer; {expected} layers of experts"
    if architecture.mla is not None:
        yield f"{found} latent attention; {expected} it"
    if architecture.vocab_size < architectures["actor"].vocab_size:
        yield (
            f"{found} a vocabulary of {architecture.vocab_size}; expected at least the "
            f"{architectures['actor'].vocab_size} of model.path, whose tokens it is to evaluate"
        )
    longest, sizes = _longest_text(config)
    if longest > architecture.max_positions:
        yield (
            f"{sizes}, but the model in {key} ({path}) has {architecture.max_positions} positions; expected a sum "
            "of at most that"
        )


def _data_parallel_problems(config: Config, grids: Mapping[str, GridSizes]) -> Iterator[str]:
    """Every replica needs a prompt group in each of its batches."""
    batch = config.batch
    for role, grid in grids.items():
        groups, of = batch.prompts_per_step, f"batch.prompts_per_step {batch.prompts_per_step}"
        if role in ("actor", "critic"):
            groups //= config.prompt_blocks
            of += f" in {config.prompt_blocks} blocks for mini-batches" if config.prompt_blocks > 1 else ""
        if groups < grid.dp:
            yield (
                f"placement.{role}: {len(grid.ranks)} ranks make {grid.dp} data-parallel replicas, but {of} gives "
                f"{groups} prompts to share out; expected at least {grid.dp} prompts, or fewer ranks"
            )


def _grid_problems(key: str, grid: GridSizes, architecture: ModelSizes) -> Iterator[str]:
    for name, size in (
        ("attention heads", architecture.num_heads),
        ("feed-forward units", architecture.ffn_hidden_size),
    ):
        if size % grid.tp:
            yield f"{key}.tp: got {grid.tp}, which does not divide the model's {size} {name}"
    num_kv_heads = architecture.num_kv_heads
    if num_kv_heads % grid.tp and grid.tp % num_kv_heads:
        yield (
            f"{key}.tp: got {grid.tp}; expected a divisor or a multiple of the model's {num_kv_heads} key-value heads"
        )
    if architecture.num_layers % grid.pp:
        stages = [n for n in range(1, architecture.num_layers + 1) if architecture.num_layers % n == 0]
        yield (
            f"{key}.pp: got {grid.pp}, which does not divide the model's {architecture.num_layers} layers; "
            f"expected one of {', '.join(map(str, stages))}"
        )
