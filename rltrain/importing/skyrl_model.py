"""Of SkyRL's keys those of adapters and of routers."""

from rltrain.importing.adapters import set_adapters
from rltrain.importing.conversions import count, truth
from rltrain.importing.skyrl_learning import ALG, ENGINE, T
from rltrain.importing.translation import SourceKeys, Translation

REPLAY = T + "policy.megatron_config.moe_enable_routing_replay"
RETURNED = ENGINE + "enable_return_routed_experts"
MEGATRON = {
    "tensor_model_parallel_size": "tp",
    "pipeline_model_parallel_size": "pp",
    "context_parallel_size": "cp",
    "expert_model_parallel_size": "ep",
    "expert_tensor_parallel_size": "etp",
}


def slices_of(keys: SourceKeys) -> int:
    """Ranks that share out a sequence."""
    if str(keys.get(T + "strategy", "fsdp")) == "megatron":
        return count(keys.get(T + "policy.megatron_config.context_parallel_size", 1))
    return count(keys.get(T + "policy.sequence_parallel_size", 1))


def set_lora(keys: SourceKeys, out: Translation, prefix: str, kind: str | None, section: str = "model.lora") -> None:
    """`prefix` is that of the adapters' keys, and `kind` the key of Megatron's kinds of them; None: FSDP trains."""
    names = {"rank": "rank", "alpha": "alpha", "dropout": "dropout", "targets": "target_modules"}
    names |= {"exclude": "exclude_modules", "init": "init_method"}
    given = {here: keys.get(prefix + name) for here, name in names.items()}
    own = kind and keys.get(kind)
    set_adapters({**given, "type": own}, out, prefix, 16, kind is not None, section)


def set_critic_lora(keys: SourceKeys, out: Translation) -> None:
    if keys.get(ALG + "advantage_estimator") == "gae":
        set_lora(keys, out, T + "critic.model.lora.", None, "critic.lora")


def set_router_replay(keys: SourceKeys, out: Translation) -> None:
    replays, returned = truth(keys.get(REPLAY, False)), truth(keys.get(RETURNED, False))
    if replays:
        out.set("model.router_replay", "rollout", REPLAY)
    elif returned:
        out.leave(RETURNED, returned, "nothing replays what the engine chose")
