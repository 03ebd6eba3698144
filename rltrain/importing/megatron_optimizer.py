"""Megatron's keys of the optimizer's kind, types and place, which slime, verl and SkyRL hand on."""

from collections.abc import Mapping
from typing import Any

from rltrain.importing.conversions import NOTHING, count, real, truth
from rltrain.importing.translation import SourceKeys, Translation

ADAM = ("adam", "adamw")
BFLOAT16 = ("bf16", "bfloat16", "torch.bfloat16")
SCALE = 0.2
"""By which Muon's updates are as large as AdamW's, Liu et al. 2025, arXiv:2502.16982: rltrain's factor."""

OPTIONS = (
    "optimizer",
    "optimizer_cpu_offload",
    "optimizer_offload_fraction",
    "exp_avg_dtype",
    "exp_avg_sq_dtype",
    "muon_momentum",
    "muon_use_nesterov",
    "muon_num_ns_steps",
    "muon_scale_mode",
    "muon_extra_scale_factor",
)


def megatron_options(keys: SourceKeys, prefix: str, dashes: bool = False) -> dict[str, Any]:
    """Those of `OPTIONS` that the source gives below `prefix`, or as flags with dashes."""
    names = {option: prefix + (option.replace("_", "-") if dashes else option) for option in OPTIONS}
    return {option: keys.get(name) for option, name in names.items() if name in keys}


def set_megatron_optimizer(given: Mapping[str, Any], out: Translation, prefix: str, momentum: float = 0.95) -> None:
    """`given` has Megatron's names with underscores; `momentum` is the source's default of Muon's."""
    here = "actor.optimizer."
    if truth(given.get("optimizer_cpu_offload", False)):
        share = given.get("optimizer_offload_fraction")
        part = 1.0 if share in NOTHING else real(share)
        out.set(here + "cpu_offload", True if part >= 1 else part, prefix + "optimizer_cpu_offload")
    moments = [str(given.get(name, "fp32")).lower() for name in ("exp_avg_dtype", "exp_avg_sq_dtype")]
    if all(one in BFLOAT16 for one in moments):
        out.set(here + "moments_dtype", "bfloat16", prefix + "exp_avg_dtype, exp_avg_sq_dtype")
    elif any(one not in ("fp32", "float32", "torch.float32") for one in moments):
        out.differs(prefix + "exp_avg_dtype", ", ".join(moments), "both moments have one type here, fp32 or bf16")
    name = str(given.get("optimizer", "adam")).lower()
    if name in ("muon", "dist_muon"):
        _set_muon(given, out, prefix, momentum)
    elif name not in ADAM:
        out.differs(prefix + "optimizer", name, "optimizers here are adamw and muon")


def _set_muon(given: Mapping[str, Any], out: Translation, prefix: str, momentum: float) -> None:
    here = "actor.optimizer."
    out.set(here + "name", "muon", prefix + "optimizer")
    out.set(here + "muon.momentum", real(given.get("muon_momentum", momentum)), prefix + "muon_momentum")
    nesterov = truth(given.get("muon_use_nesterov", False))
    out.set(here + "muon.nesterov", nesterov, prefix + "muon_use_nesterov")
    out.set(here + "muon.newton_schulz_steps", count(given.get("muon_num_ns_steps", 5)), prefix + "muon_num_ns_steps")
    factor, mode = real(given.get("muon_extra_scale_factor", 1.0)), str(given.get("muon_scale_mode", "spectral"))
    if factor != SCALE or mode != "spectral":
        reason = f"updates are {SCALE} sqrt(max(rows, columns)) here: spectral with a factor of {SCALE}"
        out.differs(prefix + "muon_scale_mode, muon_extra_scale_factor", f"{mode}, {factor}", reason)
