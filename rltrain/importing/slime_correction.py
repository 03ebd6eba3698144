"""slime's weights for what the engine drew by other arithmetic: its own, and those of its example of MIS."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from rltrain.importing.conversions import NOTHING, real, truth
from rltrain.importing.translation import SourceKeys, Translation, UntranslatableError

FUNCTION, FILE = "custom-tis-function-path", "custom-config-path"
ICEPOP = ".loss.icepop_function"
MIS = ".mis.compute_mis_weights_with_cp"
KNOWN = {
    *("use_tis", "use_rs", "tis_level", "rs_level", "tis_mode", "tis_lower_bound", "tis_upper_bound"),
    *("rs_lower_bound", "rs_upper_bound", "rs_veto_threshold", "tis_batch_normalize"),
}
LEVELS = ("token", "sequence", "geometric")
UNBOUNDED = 1e9
"""No ratio is above; the example cuts them at exp(20)."""


def set_correction(keys: SourceKeys, out: Translation) -> None:
    """After the KL and the entropy, whose terms leave out what the example rejects."""
    function = str(keys.get(FUNCTION, ""))
    if function.endswith(MIS):
        _set_by_example(_options(keys), keys, out)
    elif truth(keys.get("use-tis", False)):
        out.set("loss.correction.high", real(keys.get("tis-clip", 2.0)), "use-tis, tis-clip")
        if real(keys.get("tis-clip-low", 0)):
            out.set("loss.correction.low", real(keys.get("tis-clip-low")), "tis-clip-low")
        if function.endswith(ICEPOP):
            out.set("loss.correction.method", "icepop", FUNCTION)
        elif function:
            out.differs(FUNCTION, function, "weights here are those of loss.correction: docs/policy_losses.md")
    if "use-opsm" in keys:
        out.set("loss.correction.opsm_delta", real(keys.get("opsm-delta", 1e-4)), "use-opsm, opsm-delta")


def _options(keys: SourceKeys) -> Mapping[str, Any]:
    """What the file of the example says; it is found from the script's folder and its parents."""
    named = keys.get(FILE)
    near = keys.folder.resolve()
    found = [folder / str(named) for folder in (near, *near.parents) if (folder / str(named)).is_file()]
    if named is None or not found:
        raise UntranslatableError(f"--{FILE}: {named} is not to be found, which says how {FUNCTION} weighs")
    options = yaml.safe_load(found[0].read_text(encoding="utf-8")) or {}
    if not isinstance(options, dict):
        raise UntranslatableError(f"--{FILE}: expected keys with values in {Path(str(named)).name}")
    return options


def _set_by_example(options: Mapping[str, Any], keys: SourceKeys, out: Translation) -> None:
    for name in sorted({*options} - KNOWN):
        out.differs(f"{FILE}: {name}", options[name], "nothing here stands for it")
    if not truth(options.get("use_tis", keys.get("use-tis", False))):
        return
    level, mode = str(options.get("tis_level")), str(options.get("tis_mode"))
    if level not in LEVELS or mode not in ("truncate", "clip", "mask"):
        raise UntranslatableError(f"--{FILE}: tis_level {level}, tis_mode {mode} are none of the example's")
    high = real(options.get("tis_upper_bound"))
    low = _bound(options, "tis_lower_bound", 1 / high)
    out.set("loss.correction.high", high, "tis_upper_bound")
    if mode != "truncate":
        out.set("loss.correction.low", low, "tis_lower_bound")
    if mode == "mask":
        out.set("loss.correction.method", "icepop", "tis_mode: mask")
    if level != "token":
        out.set("loss.correction.level", level, "tis_level")
    if truth(options.get("tis_batch_normalize", False)):
        _normalize(level, mode, out)
    if truth(options.get("use_rs", False)):
        _set_masks(options, low, high, out)


def _normalize(level: str, mode: str, out: Translation) -> None:
    if mode == "mask":
        out.differs("tis_batch_normalize", True, "the mean there has weights that are left out, and here has not")
    elif level == "geometric":
        raise UntranslatableError("tis_batch_normalize is of tokens or sequences in the example")
    out.set("loss.correction.normalize", "mini_batch", "tis_batch_normalize")
    out.notes.append("tis_batch_normalize: the mean is of a rank's micro-batch there, and of the mini-batch here")


def _set_masks(options: Mapping[str, Any], low: float, high: float, out: Translation) -> None:
    """What is rejected has no gradient there, and stays in the divisors."""
    level = str(options.get("rs_level"))
    if level not in LEVELS:
        raise UntranslatableError(f"--{FILE}: rs_level {level} is none of the example's")
    bounds = {"low": _bound(options, "rs_lower_bound", low), "high": _bound(options, "rs_upper_bound", high)}
    masks = [{"level": level, **bounds}]
    if options.get("rs_veto_threshold") not in NOTHING:
        veto = {"low": real(options["rs_veto_threshold"]), "high": UNBOUNDED}
        masks.append({"level": "every_token", **veto})
    out.set("loss.correction.masks", masks, "use_rs, rs_*")
    out.set("loss.correction.rejected", "weight_0", "use_rs: divisors are of all tokens")
    if out.get("loss.entropy_coef") or out.get("loss.kl.coef"):
        out.differs("use_rs", True, "what it rejects is out of the terms of entropy and KL too, and here it is not")


def _bound(options: Mapping[str, Any], name: str, otherwise: float) -> float:
    return otherwise if options.get(name) in NOTHING else real(options[name])
