"""What an engine may be asked to serve, and over which ranks."""

from collections.abc import Iterator

from rltrain.config.schema import Config
from rltrain.legality.mechanisms import served_mechanism_problems
from rltrain.models import Architecture
from rltrain.models.architecture import FAMILIES
from rltrain.runtime.grid import Grid


def served_model_problems(config: Config, role: str, grid: Grid, architecture: Architecture) -> Iterator[str]:
    """Of the model of an engine of `role`; what servers that somebody else runs can serve is theirs to say."""
    if config.served(role).engine == "http":
        return
    if architecture.unlisted:
        path, key = config.checkpoint_of(role)
        yield (
            f"{key}: the model in {path} is of family {architecture.family}, which backend fsdp trains and no engine "
            f"of rltrain serves, so that role {role} cannot draw from it; expected a model of {', '.join(FAMILIES)}, "
            "or an algorithm without a rollout: sft, dpo, reward_model"
        )
        return
    parallel_key = config.parallel_of(role)[1]
    is_sglang = config.served(role).engine == "sglang"
    if is_sglang and architecture.mla is not None:
        path, key = config.checkpoint_of(role)
        yield (
            f"{role}.engine: got sglang, but the model in {path} ({key}) has latent attention, which rltrain has "
            "served by its own alone; expected embedded"
        )
    yield from served_mechanism_problems(config, role, grid, architecture)
    if architecture.moe is None:
        if grid.ep > 1:
            yield f"{parallel_key}.ep: got {grid.ep}; expected 1: the model has no experts to share out"
        return
    if is_sglang and grid.ep > 1:
        yield (
            f"{parallel_key}.ep: got {grid.ep} with {role}.engine sglang; expected 1: its servers cut every expert "
            "over all of their ranks"
        )
    yield from _share_problems(parallel_key, grid, architecture)


def _share_problems(key: str, grid: Grid, architecture: Architecture) -> Iterator[str]:
    moe = architecture.moe
    assert moe is not None
    if architecture.num_experts % grid.ep:
        yield f"{key}.ep: got {grid.ep}, which does not divide the {architecture.num_experts} experts of the model"
    cut = grid.tp // grid.ep
    if moe.ffn_hidden_size % cut:
        yield (
            f"{key}.tp: got {grid.tp} with {key}.ep {grid.ep}, which cuts each expert in {cut}; expected a divisor of "
            f"its {moe.ffn_hidden_size} units, or a larger ep"
        )
