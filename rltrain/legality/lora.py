"""Low-rank adapters: what they may be asked for with, and on which matrices of a model."""

from collections.abc import Iterator

from rltrain.config.schema import Config
from rltrain.models import Architecture
from rltrain.models.canonical import table_of
from rltrain.models.lora import targets_in


def lora_problems(config: Config) -> Iterator[str]:
    """In any world."""
    if config.model.lora is None:
        return
    if config.algorithm == "reward_model":
        yield (
            "model.lora: got adapters with algorithm reward_model, whose head of scores would stay as it begins, at "
            "zero; expected null"
        )
    if config.model.moe.bias_update_rate:
        yield (
            f"model.moe.bias_update_rate: got {config.model.moe.bias_update_rate} with model.lora; expected 0: routers "
            "are part of the base, which stays as it is"
        )
    if config.model.transformer_impl == "transformer_engine":
        yield (
            "model.transformer_impl: got transformer_engine with model.lora, whose adapters are beside Megatron's own "
            "layers; expected auto or local"
        )


def adapted_model_problems(config: Config, actor: Architecture) -> Iterator[str]:
    """With the model that model.path names."""
    lora = config.model.lora
    if lora is None:
        return
    if actor.mla is not None:
        yield f"model.lora: got adapters for {actor.family}, whose latent attention has none here; expected null"
        return
    if config.backend_of("actor") == "fsdp" and (actor.moe or actor.unlisted):
        why = "has experts" if actor.moe else "is of a family without a table"
        yield (
            f"model.lora: got adapters with actor.backend fsdp, and the model {why}; expected null, or backend megatron"
        )
        return
    known = targets_in(table_of(actor))
    if lora.targets is not None and (not lora.targets or set(lora.targets) - set(known)):
        yield f"model.lora.targets: got {[*lora.targets]}; expected null, or some of {', '.join(known)}"
