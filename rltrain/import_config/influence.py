"""Decides the fate of every key of a source: translated, without influence for a checked reason, or refused.

A key is translated if the import differs without it. All other keys are sorted out by `settle`.
"""

import json
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

from rltrain.import_config.translation import (
    NOTHING,
    SourceKeys,
    Translation,
    UntranslatableError,
    only_positions,
    overridden_key,
    says,
    truth,
)

DEFAULTS = Path(__file__).with_name("source_defaults.json")
"""The other trainers' own keys and defaults. "${...}" is a default that follows other keys or the user's home."""
EMPTY: tuple[Any, ...] = (*NOTHING, [], {})
OFF = (*EMPTY, False, "False", "false")

Condition = Callable[[Translation], bool]


def _unset(path: str) -> Condition:
    """Returns the condition that a config key is not set, or set to nothing."""
    return lambda out: not out.get(path)


def _unplaced(role: str) -> Condition:
    return lambda out: role not in out.placed


def _other_loss(*policies: str) -> Condition:
    return lambda out: out.get("loss.policy") not in policies


CONDITIONS: dict[str, Condition] = {
    "no critic": _unplaced("critic"),
    "no reference": _unplaced("reference"),
    "no reward model": _unplaced("reward_model"),
    "no teacher": _unplaced("teacher"),
    "the teacher replaces the loss": lambda out: out.get("teacher.where") == "loss",
    "no adapters": lambda out: not any(path.endswith("lora.rank") for path in out.settings),
    "no penalty": _unset("loss.kl.coef"),
    "no penalty in the reward": lambda out: not out.get("loss.kl.coef") or out.get("loss.kl.where") != "reward",
    "no penalty in the loss": lambda out: not out.get("loss.kl.coef") or out.get("loss.kl.where") == "reward",
    "the coefficient of the penalty is fixed": lambda out: "loss.kl.adaptive" not in out.settings,
    "no entropy term": _unset("loss.entropy_coef"),
    "no penalty for long responses": lambda out: "advantages.overlong_penalty" not in out.settings,
    "no selection of groups": lambda out: "batch.dynamic_sampling.filter" not in out.settings,
    "no correction of weights": lambda out: not any(path.startswith("loss.correction.") for path in out.settings),
    "no evaluation": lambda out: not {"data.eval.path", "evaluation.sets"} & {*out.settings},
    "evaluation is greedy": lambda out: "evaluation.sets" not in out.settings,
    "no environment": lambda out: "env.function" not in out.settings,
    "no images": lambda out: not any(path.startswith("model.vision") for path in out.settings),
    "not asynchronous": lambda out: out.get("schedule.mode") != "asynchronous",
    "not the loss clip": _other_loss("clip"),
    "not the loss clip_cov": _other_loss("clip_cov"),
    "not the loss kl_cov": _other_loss("kl_cov"),
    "not the loss sapo": _other_loss("sapo"),
    "not the loss cispo": _other_loss("cispo"),
    "not the loss dppo": _other_loss("dppo"),
    "a loss without the clip": _other_loss("clip", "gspo", "geometric_mean", "clip_cov", "kl_cov", "cispo", "dppo"),
    "not the algorithm ppo": lambda out: out.get("algorithm") != "ppo",
    "no discounts": lambda out: out.get("algorithm") not in ("ppo", "reinforce_plus_plus", "own"),
    "advantages without a deviation": lambda out: out.get("algorithm") not in ("grpo", "gdpo", "pass_at_k"),
    "the run ends by its epochs": lambda out: not out.steps_given,
    "steps are given": lambda out: out.steps_given,
    "supervised training": lambda out: out.get("algorithm") == "sft",
}
"""Reasons that hold for some runs only, each with its check."""


@dataclass(frozen=True)
class KeyRules:
    """The table of a source for keys that are not translated. `harmless` has reasons by pattern."""

    harmless: Mapping[str, tuple[str, ...]]
    source: str
    """Name in the file of defaults."""
    conditions: Mapping[str, Condition] = field(default_factory=dict)
    """Further conditions of this run."""
    switches: tuple[str, ...] = ()
    """Keys without influence while they are off, of a trainer without a list of defaults."""


def by_pattern(told: str) -> dict[str, tuple[str, ...]]:
    """Returns the reasons for every pattern of keys. `told` has lines of the form "reason: pattern pattern ...".
    Indented lines continue the line before. "a.{b,c}" means two patterns."""
    reasons: dict[str, tuple[str, ...]] = {}
    for reason, _, patterns in (group.rpartition(": ") for group in re.split(r"\n(?! )", told.strip())):
        for prefix, _, names in (pattern.partition("{") for pattern in patterns.split()):
            for name in names.removesuffix("}").split(","):
                reasons[prefix + name] = (*reasons.get(prefix + name, ()), reason)
    return reasons


@cache
def defaults_of(source: str) -> dict[str, Any]:
    """Returns the keys of another trainer with their defaults. Empty for a trainer whose configs are complete."""
    found: dict[str, dict[str, Any]] = json.loads(DEFAULTS.read_text(encoding="utf-8"))
    return found.get(source, {})


def sort_out(keys: SourceKeys, out: Translation, rules: KeyRules) -> None:
    """Settles the keys that no rule read. Keys that were read without effect are settled later, by the same `rules`."""
    out.rules = rules
    for key, value in keys.left().items():
        settle(key, value, out, keys)


def settle(key: str, value: Any, out: Translation, keys: SourceKeys) -> None:
    """Adds an untranslated key to the leftovers, with a reason that holds for this run, or else to the differences."""
    rules: KeyRules = out.rules
    known = defaults_of(rules.source)
    same = (key in known and equal(value, known[key])) or (key in keys.assumed and equal(value, keys.assumed[key]))
    if same:
        out.leave(key, value, f"the default of {out.framework}")
    elif key in keys.tree.defaults and equal(value, keys.tree.defaults[key]):
        out.leave(key, value, f"the default of the tree of {out.framework} beside the script")
    elif (reason := _reason(key, out, rules)) is not None:
        out.leave(key, value, reason)
    elif key in rules.switches and value in OFF:
        out.leave(key, value, "off")
    elif key not in known and value in EMPTY:
        out.leave(key, value, f"null, and no key of {out.framework}'s own")
    else:
        sort_out_override(key, value, out)


def _reason(key: str, out: Translation, rules: KeyRules) -> str | None:
    """Returns the first reason of a matching pattern that holds."""
    conditions = {**CONDITIONS, **rules.conditions}
    for pattern, reasons in rules.harmless.items():
        if fnmatchcase(key, pattern):
            for reason in reasons:
                if reason not in conditions or conditions[reason](out):
                    return reason
    return None


def equal(first: Any, second: Any) -> bool:
    """Returns whether two values of a source mean the same. Numbers may be texts, and null may be written in words."""
    if first in EMPTY or second in EMPTY:
        return first in EMPTY and second in EMPTY
    if isinstance(first, list) or isinstance(second, list):
        lists = [one if isinstance(one, list) else [one] for one in (first, second)]
        return len(lists[0]) == len(lists[1]) and all(map(equal, *lists))
    for convert in (float, truth):
        with suppress(TypeError, ValueError, UntranslatableError):
            return convert(first) == convert(second)
    return str(first) == str(second)


def sort_out_override(key: str, value: Any, out: Translation) -> None:
    """Sorts out an unread key. An override of config.json is harmless if config.json already has the value. Any other
    key is a difference."""
    overridden = overridden_key(key)
    if overridden is None:
        out.differs(key, value, "it has no counterpart here")
    elif says(out.get("model.path"), overridden, value):
        out.leave(key, value, "config.json of model.path has the same value")
    elif only_positions(out.get("model.path"), overridden):
        out.leave(key, value, "without scaling of RoPE it changes no number; the dry run checks the context length")
    else:
        out.differs(
            key, value, f"set {'.'.join(overridden)} in config.json of model.path instead; every part of a run reads it"
        )
