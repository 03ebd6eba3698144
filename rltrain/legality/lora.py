"""Low-rank adapters: what they may be asked for with, and on which matrices of a model."""

from collections.abc import Iterator, Mapping

from rltrain.config.models import Lora
from rltrain.config.schema import Config
from rltrain.errors import listed
from rltrain.models import Architecture
from rltrain.models.canonical import adaptable_table
from rltrain.models.lora import adapters_of, targets_in
from rltrain.tasks.roles import trained_roles


def lora_problems(config: Config) -> Iterator[str]:
    """In any world."""
    yield from _apart_problems(config)
    if config.critic.lora is not None and config.critic.lora.path is not None:
        yield (
            f"critic.lora.path: got {config.critic.lora.path}; expected null: a critic begins from the checkpoint "
            "critic.path, which may have adapters merged"
        )
    if config.model.lora is None:
        return
    if config.model.moe.bias_update_rate:
        yield (
            f"model.moe.bias_update_rate: got {config.model.moe.bias_update_rate} with model.lora; expected 0: routers "
            "are part of the base, which stays as it is"
        )


def _apart_problems(config: Config) -> Iterator[str]:
    """With adapters that engines keep beside their base."""
    if config.weight_sync.adapters != "apart":
        return
    if config.model.lora is None:
        yield "weight_sync.adapters: got apart without model.lora; expected merged, since there are no adapters"
        return
    if config.rollout.engine == "http":
        yield (
            "weight_sync.adapters: got apart with rollout.engine http, whose servers get weights merged; expected "
            "merged, or rollout.engine: embedded or sglang"
        )
    if config.weight_sync.delta is not None:
        yield (
            "weight_sync.delta: got a section with weight_sync.adapters apart, of which a sync sends the adapters "
            "alone, and all of these change; expected null, or weight_sync.adapters: merged"
        )


def lora_key(role: str) -> str:
    """Where the config says which adapters a role's model learns."""
    return "model.lora" if role == "actor" else f"{role}.lora"


def adapted_model_problems(config: Config, architectures: Mapping[str, Architecture]) -> Iterator[str]:
    """With the models that learn adapters, by role."""
    for role in trained_roles():
        if (lora := config.lora_of(role)) and role in architectures:
            yield from _problems_of_model(lora_key(role), lora, architectures[role])
            if role == "actor":
                yield from _served_expert_problems(config, lora, architectures[role])


def _problems_of_model(key: str, lora: Lora, model: Architecture) -> Iterator[str]:
    if model.unlisted:
        yield (
            f"{key}: got adapters for {model.family}, a family without a table, of whose matrices rltrain does not "
            "know which are to have one; expected null"
        )
        return
    known = targets_in(adaptable_table(model))
    if lora.targets is not None and (not lora.targets or set(lora.targets) - set(known)):
        yield f"{key}.targets: got {[*lora.targets]}; expected null, or some of {listed(known)}"


def _served_expert_problems(config: Config, lora: Lora, model: Architecture) -> Iterator[str]:
    if config.rollout.engine != "sglang" or not config.keeps_adapters_apart("rollout") or model.moe is None:
        return
    sparse = adapters_of(adaptable_table(model), lora.targets).sparse
    if sparse is not None and sparse.experts:
        yield (
            "weight_sync.adapters: got apart with rollout.engine sglang and adapters of experts, which SGLang adds by "
            "kernels that this was not tried with; expected merged, rollout.engine: embedded, or model.lora.targets "
            "of attention alone"
        )
