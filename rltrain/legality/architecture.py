"""What a config may ask for with the models that it names, on the grids that its placement makes."""

from collections.abc import Iterator, Mapping

from rltrain.algorithms.registry import algorithm_of
from rltrain.cluster.grid import Grid
from rltrain.config.schema import Config
from rltrain.legality.problems import longest_text, refuse
from rltrain.models import Architecture
from rltrain.schedule.shape import RunShape
from rltrain.tasks.roles import DECLARED, device_roles, trained_roles


def check_against_architecture(
    config: Config, grids: Mapping[str, Grid], architectures: Mapping[str, Architecture]
) -> None:
    """Refuse models that cannot be trained, grids that do not divide the model or the batch, and texts longer than a
    model takes. `architectures` are by role, that of model.path under actor. ConfigError."""
    problems = list(_data_parallel_problems(config, grids))
    for role in grids:
        if role in device_roles():
            problems += _model_problems(config, role, architectures)
            problems += _grid_problems(config.parallel_of(role)[1], grids[role], architectures[role])
    refuse(problems)


def _model_problems(config: Config, role: str, architectures: Mapping[str, Architecture]) -> Iterator[str]:
    architecture = architectures[role]
    path, key = config.checkpoint_of(role)
    found = f"{key}: the model in {path} has"
    expected = "expected a dense one (llama, mistral, qwen2, qwen3): neither the trainer nor the embedded engine has"
    if architecture.num_experts:
        yield f"{found} {architecture.num_experts} experts in a layer; {expected} layers of experts"
    if architecture.mla is not None:
        yield f"{found} latent attention; {expected} it"
    if DECLARED[role].reads_text:
        yield from _context_problems(config, role, architecture)
        return
    if architecture.vocab_size < architectures["actor"].vocab_size:
        yield (
            f"{found} a vocabulary of {architecture.vocab_size}; expected at least the "
            f"{architectures['actor'].vocab_size} of model.path, whose tokens it is to evaluate"
        )
    longest, sizes = longest_text(config)
    if longest > architecture.max_positions:
        yield (
            f"{sizes}, but the model in {key} ({path}) has {architecture.max_positions} positions; expected a sum "
            "of at most that"
        )


def _context_problems(config: Config, role: str, architecture: Architecture) -> Iterator[str]:
    """Of an engine that reads other texts than the policy's samples."""
    if DECLARED[role].model == "served":
        longest = getattr(config, role).max_context_tokens
        if longest > architecture.max_positions:
            yield (
                f"{role}.max_context_tokens: got {longest}, but the model in {role}.path has "
                f"{architecture.max_positions} positions; expected at most that"
            )


def _data_parallel_problems(config: Config, grids: Mapping[str, Grid]) -> Iterator[str]:
    """Every replica needs a prompt group in each of its batches; an evaluation shares out what there is."""
    if not algorithm_of(config).trains:
        return
    batch, blocks = config.batch, RunShape.of(config).prompt_blocks
    for role, grid in grids.items():
        if DECLARED[role].beside_steps:
            continue
        groups, of = batch.prompts_per_step, f"batch.prompts_per_step {batch.prompts_per_step}"
        if role in trained_roles():
            groups //= blocks
            of += f" in {blocks} blocks for mini-batches" if blocks > 1 else ""
        if groups < grid.dp:
            yield (
                f"placement.{role}: {len(grid.ranks)} ranks make {grid.dp} data-parallel replicas, but {of} gives "
                f"{groups} prompts to share out; expected at least {grid.dp} prompts, or fewer ranks"
            )


def _grid_problems(key: str, grid: Grid, architecture: Architecture) -> Iterator[str]:
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
