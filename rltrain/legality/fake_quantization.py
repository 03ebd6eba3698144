"""What model.fake_quantization may be asked for."""

from collections.abc import Iterator, Mapping

from rltrain.algorithms.registry import algorithm_of
from rltrain.config.models import OF_POLICY, FakeQuantization
from rltrain.config.schema import Config
from rltrain.models import Architecture
from rltrain.runtime.grid import Grid
from rltrain.tasks.roles import served_roles

KEY = "model.fake_quantization"
GIVEN = f"{KEY}: got a section"


def fake_quantization_problems(config: Config) -> Iterator[str]:
    """In any world: sentences with the key, the reason, and what is expected in its place."""
    if config.model.fake_quantization is None:
        return
    for role in (role for role in served_roles() if role in OF_POLICY and role in config.placed_roles):
        if config.served(role).dtype == "fp8":
            yield (
                f"{GIVEN} with {config.engine_key(role, 'dtype')} fp8, which would round the rounded weights again; "
                "expected either alone"
            )
    if config.rollout.engine == "http" and not algorithm_of(config).trains:
        yield (
            f"{GIVEN} with rollout.engine http, whose servers load the checkpoint themselves; expected null, or "
            "rollout.engine: embedded or sglang"
        )
    recomputed = config.model.recomputed
    if config.model.activation_offload and (recomputed.granularity != "full" or recomputed.layers is not None):
        yield (
            f"model.activation_offload: got true with {KEY}, whose rounded weights would go to the host and back with "
            "what layers leave; expected false, or model.recompute: full"
        )
    yield from _adapter_problems(config)


def _adapter_problems(config: Config) -> Iterator[str]:
    """With low-rank adapters, which are added to the rounded base and are not rounded themselves."""
    if config.model.lora is None:
        return
    if config.weight_sync.adapters == "apart":
        yield (
            f"weight_sync.adapters: got apart with {KEY}; expected merged: engines get the rounded base with the "
            "adapters in one"
        )
    if config.reference.refresh_every:
        yield (
            f"reference.refresh_every: got {config.reference.refresh_every} with {KEY} and model.lora; expected 0: the "
            "reference would round what adapters add too"
        )


def fake_quantization_problems_of_models(
    config: Config, grids: Mapping[str, Grid], architectures: Mapping[str, Architecture]
) -> Iterator[str]:
    """As above, of the placed models. Role inference is in `grids` where it is not the actor itself."""
    settings = config.model.fake_quantization
    if settings is None:
        return
    if architectures["actor"].moe is None:
        yield f"{GIVEN}; expected null: the model in {config.model.path} has no experts, which alone are rounded"
        return
    if config.model.lora and "inference" in grids:
        yield (
            f"{GIVEN} with model.lora and role inference, whose ranks would round what adapters add too; expected "
            "either alone, or no inference in placement"
        )
    loads = not algorithm_of(config).trains
    for role in (role for role in OF_POLICY if role in grids and architectures[role].moe):
        if role not in served_roles() or loads:
            yield from _cut_groups(config, settings, role, grids[role], architectures[role])


def _cut_groups(
    config: Config, settings: FakeQuantization, role: str, grid: Grid, architecture: Architecture
) -> Iterator[str]:
    """Of rows of experts' matrices, which groups are to fill on every rank. What engines get of a trained model is
    rounded before it is cut for them."""
    moe, size, key = architecture.moe, settings.group_size, config.parallel_of(role)[1]
    assert moe is not None
    if architecture.hidden_size % size:
        yield (
            f"{KEY}.group_size: got {size}; expected a divisor of {architecture.hidden_size}, the hidden size of the "
            f"model of role {role}"
        )
    is_engine = role in served_roles()
    num_ranks = grid.tp // grid.ep if is_engine else 1 if grid.is_sharded else grid.etp or grid.tp
    share = moe.ffn_hidden_size // num_ranks
    if share % size:
        cut = f", cut over {num_ranks} ranks" if num_ranks > 1 else ""
        remedy = f", or experts on fewer ranks ({key}.{'ep' if is_engine else 'etp'})" if num_ranks > 1 else ""
        yield (
            f"{KEY}.group_size: got {size}; expected a divisor of {share}, the rows of an expert's last matrix in role "
            f"{role}{cut}{remedy}"
        )
