"""Of SkyRL's keys those of adapters and of routers."""

from rltrain.importing.adapters import set_adapters
from rltrain.importing.conversions import NOTHING, count, truth
from rltrain.importing.skyrl_learning import ALG, ENGINE, T
from rltrain.importing.translation import SourceKeys, Translation

REPLAY = T + "policy.megatron_config.moe_enable_routing_replay"
RETURNED = ENGINE + "enable_return_routed_experts"


def slices_of(keys: SourceKeys) -> int:
    """Ranks that share out a sequence."""
    if str(keys.get(T + "strategy", "fsdp")) == "megatron":
        return count(keys.get(T + "policy.megatron_config.context_parallel_size", 1))
    return count(keys.get(T + "policy.sequence_parallel_size", 1))


def set_lora(keys: SourceKeys, out: Translation, megatron: bool) -> None:
    prefix = T + "policy.model.lora."
    names = {"rank": "rank", "alpha": "alpha", "dropout": "dropout", "targets": "target_modules"}
    names |= {"exclude": "exclude_modules", "init": "init_method"}
    given = {here: keys.get(prefix + name) for here, name in names.items()}
    kind = keys.get(T + "policy.megatron_config.lora_config.lora_type")
    set_adapters({**given, "type": kind if megatron else None}, out, prefix, 16, megatron)
    rank = keys.get(T + "critic.model.lora.rank", 0)
    if keys.get(ALG + "advantage_estimator") == "gae" and rank not in NOTHING and count(rank):
        out.differs(T + "critic.model.lora.rank", rank, "a critic is trained whole")


def set_router_replay(keys: SourceKeys, out: Translation) -> None:
    replays, returned = truth(keys.get(REPLAY, False)), truth(keys.get(RETURNED, False))
    if replays:
        out.set("model.router_replay", "rollout", REPLAY)
    elif returned:
        out.leave(RETURNED, returned, "nothing replays what the engine chose")
