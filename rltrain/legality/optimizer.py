"""What a config may ask for of the optimizers, and of activations on the host."""

from collections.abc import Iterator

from rltrain.config.models import RecomputedModule
from rltrain.config.schema import Config
from rltrain.legality.lora import lora_key
from rltrain.tasks.roles import trained_roles

EMPTIED: tuple[RecomputedModule, ...] = ("layernorm", "mla_up_proj")
"""Whose outputs' memory Megatron gives up, and fills anew before backward."""


def optimizer_problems(config: Config) -> Iterator[str]:
    """Sentences with the keys, the reason, and what is expected in their place."""
    for role in trained_roles():
        optimizer = getattr(config, role).optimizer
        if optimizer.name == "muon" and optimizer.cpu_offload:
            given = str(optimizer.cpu_offload).lower()
            yield (
                f"{role}.optimizer.cpu_offload: got {given} with {role}.optimizer.name muon, which "
                "makes whole matrices orthogonal, for which a host takes too long; expected false, with "
                f"{role}.optimizer.moments_dtype bfloat16 or {role}.offload true where memory is short, or name adamw"
            )
        if optimizer.name == "muon" and config.lora_of(role):
            yield (
                f"{role}.optimizer.name: got muon with {lora_key(role)}, whose matrices are factors of one; expected "
                "adamw"
            )
        if optimizer.name != "muon" and "muon" in optimizer.model_fields_set:
            yield (
                f"{role}.optimizer.muon: given with {role}.optimizer.name {optimizer.name}, which does not look at it; "
                "expected name muon, or the key to be left out"
            )
    yield from _activation_problems(config)


def _activation_problems(config: Config) -> Iterator[str]:
    emptied = [module for module in EMPTIED if config.model.recomputed.repeats(module)]
    if config.model.activation_offload and emptied:
        yield (
            f"model.activation_offload: got true with {', '.join(emptied)} in model.recompute.modules, which empty "
            "what they put out and fill it again where it lay; expected false, or other modules, or model.recompute: "
            "full"
        )
