"""Fully sharded training of other trainers, which is `backend: fsdp` here where that can do what is asked for."""

from rltrain.importing import model_file
from rltrain.importing.batches import cut_fully_sharded
from rltrain.importing.conversions import NOTHING, count, truth
from rltrain.importing.translation import SourceKeys, Translation
from rltrain.planning.validation_models import UNTOLD_FAMILIES

NAMES = ("dp", "fsdp", "fsdp1", "fsdp2")
"""verl's and SkyRL's names of torch's FSDP."""
WITH_LOGITS = 16384
"""Tokens of a micro-batch where the source made logits in chunks. What is learned does not depend on it."""
BIASED_ROUTERS = ("deepseek_v3", "kimi_k2", "glm4_moe", "glm4_moe_lite", "minimax_m2", "hy_v3")
EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts")


def set_fully_sharded(keys: SourceKeys, out: Translation, key: str, name: str, slices: int, section: str) -> None:
    """How the actor is sharded, and its reference with it.

    `slices` share out a sequence; `section` is the prefix of FSDP's own keys. Megatron takes its place where adapters,
    sequences that are cut or routers that replay are asked of experts, or sequences that are cut of gated delta nets,
    as `backend: fsdp` refuses these."""
    own = {name: keys.get(section + name) for name in ("fsdp_size", "reshard_after_forward")}
    out.set("actor.parallel.cp", slices, "sequences are shared out by heads")
    reason = _refused(out, name, slices)
    if reason:
        cut_fully_sharded(out, key, name)
        out.notes.append(f"{key} {name}: Megatron trains, as backend fsdp does not take {reason}")
        return
    out.set("actor.backend", "fsdp", f"{key} {name}")
    size, ranks = own["fsdp_size"], _ranks_of_actor(out)
    if size not in NOTHING and 0 < count(size) < ranks and ranks % count(size) == 0:
        out.set("actor.fsdp.replicas", ranks // count(size), f"{section}fsdp_size {size} of {ranks} ranks")
    if own["reshard_after_forward"] not in NOTHING and not truth(own["reshard_after_forward"]):
        out.set("actor.fsdp.reshard_after_forward", False, section + "reshard_after_forward")
    chunk = out.settings.pop("model.logits_chunk_tokens", None)
    if chunk is not None:
        out.leave(chunk.origin, chunk.value, "transformers makes a micro-batch's logits at once: of memory alone")
        if out.get("actor.micro_batch_tokens") > WITH_LOGITS:
            origin = f"in the place of {chunk.origin}: a micro-batch's logits exist at once"
            out.set("actor.micro_batch_tokens", WITH_LOGITS, origin)


def _refused(out: Translation, name: str, slices: int) -> str | None:
    """What of the model or the config `backend: fsdp` does not take; None: nothing that can be told here."""
    if name not in NAMES:
        return f"the strategy {name}"
    replicas = _ranks_of_actor(out) // slices
    prompts = out.get("batch.prompts_per_step") // out.get("batch.mini_batches")
    if replicas > prompts:
        return f"more ranks ({replicas}) than a mini-batch has prompts ({prompts})"
    model = model_file.language_model(out.get("model.path"))
    if model.get("topk_method") == "noaux_tc" or model.get("model_type") in BIASED_ROUTERS:
        return "experts that are chosen by a bias"
    if model.get("model_type") in UNTOLD_FAMILIES:
        return "a family whose attention in transformers is not told which tokens are of one sample"
    if slices > 1 and model_file.has_delta_nets(out.get("model.path")):
        return "slices of sequences with gated delta nets"
    asked = {
        "adapters": "model.lora.rank" in out.settings,
        "slices of sequences": slices > 1,
        "replayed routers": out.get("model.router_replay") not in ("off", None),
    }
    found = [what for what, given in asked.items() if given]
    if found and any(model.get(experts) for experts in EXPERTS):
        return f"{' and '.join(found)} with experts"
    return None


def _ranks_of_actor(out: Translation) -> int:
    for path, setting in out.settings.items():
        if "actor" in path.removeprefix("placement.").split(", ") and path.startswith("placement."):
            first, _, last = str(setting.value).partition("-")
            return int(last or first) - int(first) + 1
    return 1
