"""Of verl's keys those of adapters and of routers."""

from rltrain.importing.adapters import set_adapters
from rltrain.importing.conversions import count, truth
from rltrain.importing.megatron_optimizer import megatron_options, set_megatron_optimizer
from rltrain.importing.translation import SourceKeys, Translation

REPLAYS = {"R2": "recompute", "R3": "rollout"}
REPLAY = "actor_rollout_ref.actor.megatron.router_replay.mode"
RETURNED = "actor_rollout_ref.rollout.enable_rollout_routing_replay"


def is_megatron(keys: SourceKeys) -> bool:
    strategy = str(keys.get("actor_rollout_ref.actor.strategy", keys.get("model_engine", "dp")))
    return "megatron" in strategy + str(keys.get("--config-name", ""))


def slices_of(keys: SourceKeys) -> int:
    """Ranks that share out a sequence."""
    actor = "actor_rollout_ref.actor."
    if is_megatron(keys):
        return count(keys.get(actor + "megatron.context_parallel_size", 1))
    names = (actor + "fsdp_config.ulysses_sequence_parallel_size", actor + "ulysses_sequence_parallel_size")
    return count(keys.first(*names, default=1)[1])


def set_lora(keys: SourceKeys, out: Translation, prefix: str, megatron: bool, section: str = "model.lora") -> None:
    """FSDP has `lora_rank` and the like, Megatron a section `lora`, whose alpha is 32 by default instead of 16."""
    names = {"rank": "rank", "alpha": "alpha"}
    given = {here: keys.first(f"{prefix}lora_{name}", f"{prefix}lora.{name}")[1] for here, name in names.items()}
    given["targets"] = keys.first(prefix + "target_modules", prefix + "lora.target_modules")[1]
    given["exclude"] = keys.first(prefix + "exclude_modules", prefix + "lora.exclude_modules")[1]
    given["path"] = keys.first(prefix + "lora_adapter_path", prefix + "lora.adapter_path")[1]
    given["dropout"] = keys.get(prefix + "lora.dropout")
    given["type"] = keys.get(prefix + "lora.type")
    init = keys.get(prefix + "lora.lora_A_init_method", "xavier" if megatron else None)
    set_adapters({**given, "init": init}, out, prefix + "lora.", 32 if megatron else 16, megatron, section)


def set_router_replay(keys: SourceKeys, out: Translation) -> None:
    """R2: training visits the experts of the pass of the old log-probs. R3: those that the engine chose."""
    mode = str(keys.get(REPLAY, "disabled"))
    returned = truth(keys.get(RETURNED, False))
    if mode in REPLAYS:
        out.set("model.router_replay", REPLAYS[mode], REPLAY)
    elif mode != "disabled":
        out.differs(REPLAY, mode, f"modes here are those of {', '.join(REPLAYS)}")
    elif returned:
        out.leave(RETURNED, returned, "nothing replays what the engine chose")


def set_kind_of_optimizer(keys: SourceKeys, out: Translation, prefix: str) -> None:
    """`optimizer` is a class of torch's, or Megatron's name; what Megatron alone has stands in a section of its own."""
    own = prefix + "override_optimizer_config."
    given = {"optimizer": keys.get(prefix + "optimizer", "adam"), **megatron_options(keys, own)}
    set_megatron_optimizer(given, out, own)
