"""Low-rank adapters of other trainers: verl's and SkyRL's keys name them as PEFT or as Megatron-Bridge does."""

from collections.abc import Mapping
from typing import Any

from rltrain.importing.conversions import NOTHING, count, real
from rltrain.importing.translation import Translation

MEGATRON_TARGETS = {
    "linear_qkv": ("q_proj", "k_proj", "v_proj"),
    "linear_proj": ("o_proj",),
    "linear_fc1": ("gate_proj", "up_proj"),
    "linear_fc2": ("down_proj",),
}
ALL = ("all-linear", "all")
KNOWN = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
SHARED = (
    "Megatron-Bridge's adapters of q, k, v, and of gate and up, share one A; here each has its own, as in PEFT's files"
)


def set_adapters(
    given: Mapping[str, Any], out: Translation, prefix: str, alpha: float, megatron: bool, section: str = "model.lora"
) -> None:
    """Into the config's `section`. `given`: rank, alpha, targets, exclude, dropout, init, type, path, those that the
    source has; `alpha` is the source's default. `prefix` names them in messages. A rank of 0 is no adapters."""
    rank = given.get("rank")
    if rank in NOTHING or not count(rank):
        return
    out.set(f"{section}.rank", count(rank), prefix + "rank")
    out.set(f"{section}.alpha", real(given["alpha"] if given.get("alpha") not in NOTHING else alpha), prefix + "alpha")
    _set_targets(given, out, prefix, section)
    dropout = given.get("dropout")
    if dropout not in NOTHING and real(dropout):
        out.set(f"{section}.dropout", real(dropout), prefix + "dropout")
    if given.get("init") not in (*NOTHING, "kaiming"):
        out.differs(prefix + "init_method", given["init"], "A is drawn uniformly here, as kaiming and PEFT draw it")
    if given.get("type") not in (*NOTHING, "lora", "canonical_lora"):
        out.differs(prefix + "type", given["type"], "adapters here are of the kind lora")
    if given.get("path") not in NOTHING:
        out.set(f"{section}.path", str(given["path"]), prefix + "path: PEFT's files")
    if megatron and given.get("type") != "canonical_lora":
        out.notes.append(SHARED)


def _set_targets(given: Mapping[str, Any], out: Translation, prefix: str, section: str) -> None:
    targets = given.get("targets")
    excluded = given.get("exclude")
    if excluded not in (*NOTHING, []) and "visual" not in str(excluded):
        out.differs(prefix + "exclude_modules", excluded, f"write the others as {section}.targets")
    if targets in NOTHING or targets in ALL or targets in ([], *([one] for one in ALL)):
        return
    names = [targets] if isinstance(targets, str) else [*targets]
    found = [one for name in names for one in MEGATRON_TARGETS.get(str(name), (str(name),))]
    if set(found) - set(KNOWN):
        out.differs(prefix + "target_modules", targets, f"matrices with adapters are some of {', '.join(KNOWN)}")
    elif set(found) != set(KNOWN):
        out.set(f"{section}.targets", found, prefix + "target_modules")
