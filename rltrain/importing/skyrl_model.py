"""Of SkyRL's keys those of adapters, of routers and of rounded experts."""

from rltrain.importing.adapters import set_adapters
from rltrain.importing.conversions import NOTHING, count, real, truth
from rltrain.importing.int4 import WEIGHTS
from rltrain.importing.skyrl_learning import ALG, ENGINE, T
from rltrain.importing.translation import SourceKeys, Translation

REPLAY = T + "policy.megatron_config.moe_enable_routing_replay"
INT4 = T + "policy.model.fake_int4_qat."
SMALLEST = {7.0: -7.0, 7.5: -8.0}
"""INT4's smallest integer by the divisor of scales."""
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


def set_fake_quantization(keys: SourceKeys, out: Translation) -> None:
    """The weights that SkyRL's trainer rounds are those of a checkpoint beside the engines' in INT4."""
    given = keys.under(INT4)
    if not truth(given.get("enabled", False)):
        return
    divisor = real(given.get("scale_divisor", 7.5))
    out.set("model.fake_quantization.group_size", count(given.get("group_size", 32)), INT4 + "group_size")
    out.set("model.fake_quantization.scale_divisor", divisor, INT4 + "scale_divisor")
    smallest = real(given.get("q_min", -8))
    if smallest != SMALLEST.get(divisor):
        out.differs(INT4 + "q_min", smallest, "with a scale_divisor of 7.5 it is -8 here, and with one of 7 it is -7")
    if not truth(given.get("symmetric", True)):
        out.differs(INT4 + "symmetric", False, "groups have a scale here and no zero point")
    path = given.get("bf16_base_path")
    if path in NOTHING:
        out.notes.append(WEIGHTS)
    else:
        out.set("model.path", str(path), INT4 + "bf16_base_path: what the trainer loads")
