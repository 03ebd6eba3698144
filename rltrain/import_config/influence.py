"""Decides the fate of every key of a source: translated, without influence for a checked reason, or refused.

A key is translated if the import differs without it. All other keys are sorted out by `settle`. Some of the refused
ones are settings of an environment or a reward that only the source has. `open_holes` leaves such a part open instead.
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

from rltrain.config.loader import HOLE
from rltrain.errors import ConfigError
from rltrain.import_config.translation import (
    NOTHING,
    Leftover,
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
NO_COUNTERPART = "it has no counterpart here"
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
    learning: tuple[str, ...] | None = None
    """Beginnings of keys that are never settings of a hole. None: no key without a rule is one."""
    attached: tuple[str, ...] = ()
    """Beginnings of the sections of prompts and generation. Empty for a trainer whose keys have no sections."""


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
    is_off = value in EMPTY and known.get(key) is False
    same = (
        is_off
        or (key in known and equal(value, known[key]))
        or (key in keys.assumed and equal(value, keys.assumed[key]))
    )
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
        sort_out_override(key, value, out, hole_of(key, value, rules))


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


def sort_out_override(key: str, value: Any, out: Translation, hole: str | None = None) -> None:
    """Sorts out an unread key. An override of config.json is harmless if config.json already has the value. Any other
    key is a difference."""
    overridden = overridden_key(key)
    if overridden is None:
        out.differs(key, value, NO_COUNTERPART, hole)
    elif says(out.get("model.path"), overridden, value):
        out.leave(key, value, "config.json of model.path has the same value")
    elif only_positions(out.get("model.path"), overridden):
        out.leave(key, value, "without scaling of RoPE it changes no number; the dry run checks the context length")
    else:
        out.differs(
            key, value, f"set {'.'.join(overridden)} in config.json of model.path instead; every part of a run reads it"
        )


# Holes: parts that only the source has. They stay open in the config, which is refused until they are written.

ENVIRONMENT, REWARD, ROWS = "env.function", "reward.function", "data.train.path"
PROGRAM = "the program's part"
"""The hole of an unknown program: its environment if it has settings of one, else its reward."""
ATTACHED = "a setting of an open environment"
"""The hole of a key that belongs to the environment if that is open, and is refused otherwise."""
WRITTEN: dict[str, str] = {
    ENVIRONMENT: 'the environment of the source, as "file.py:name" (docs/environments.md); it also gives the reward',
    REWARD: 'the reward of the source, as "file.py:function" (docs/rewards.md)',
    ROWS: "the file of prompts, with one row for each; the source names none or makes them itself",
}
"""What is expected in place of each hole."""


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


OF_ENVIRONMENTS = _words(
    "agent agents agentic agentloop agentlightning tool tools toolcall env envs environment environments turn turns "
    "multiturn retriever retrieval search interaction interactions observation observations obs sandbox "
    "browser simulator mcp gym workflow terminal endpoint"
)
OF_REWARDS = _words("reward rewards rm prm verifier judge grader score scores")
"""Words in the names of keys that are settings of an environment, or of a reward."""
OF_PROMPTS = _words("prompt prompts template preprocessor dataset")
"""Words of flags that belong to an open environment, in a trainer without sections."""
LEARNT = _words(
    "normalization normalize advantage advantages baseline estimator loss kl grad gradient optimizer entropy clip "
    "gamma lora mask masking weight weights coef coeff filter postprocess post partitions padding whiten ratio"
)
"""Words in names of keys that change what is learned."""
OF_SIZES = _words(
    "n num size sizes batch length len tokens temperature top seed shuffle rate sample samples repeat max min k p "
    "epochs steps"
)
"""Words of keys that change what is sampled."""


def hole_of(key: str, value: Any, rules: KeyRules) -> str | None:
    """Returns the hole of a key without counterpart, by the words of its name. None if it belongs to none."""
    words = {*re.split(r"[._-]+", key.lower())}
    if rules.learning is None or words & LEARNT or (rules.learning and key.startswith(rules.learning)):
        return None
    own = key not in defaults_of(rules.source)
    if not rules.attached and not own:
        return None
    if words & OF_ENVIRONMENTS:
        return ENVIRONMENT
    if words & OF_REWARDS:
        return REWARD
    is_attached = key.startswith(rules.attached) if rules.attached else words & OF_PROMPTS
    return ATTACHED if is_attached and own and isinstance(value, bool | str) and not words & OF_SIZES else None


TO_COMPLETE = "give its module and class"
"""Words in the origin of a name that the source does not have."""
BY_ROW = "the data_source of a row"
"""Origin of a reward that the source selects by row, and does not name."""


def open_holes(out: Translation) -> None:
    """Moves the differences that are settings of an environment or a reward to `out.holes`. That part stays open."""
    if out.get("algorithm") != "sft":
        _open_part(out)
        _open_rows(out)


def _open_part(out: Translation) -> None:
    """Opens the environment, or only the reward."""
    asked = {one.hole for one in out.differences} - {None, ATTACHED, ROWS}
    if not asked:
        return
    if ENVIRONMENT not in asked and "reward_model" in out.placed:
        return
    path = ENVIRONMENT if ENVIRONMENT in asked else REWARD
    kinds = asked | ({ATTACHED, ROWS} if path == ENVIRONMENT else set())
    settings = [one for one in out.differences if one.hole in kinds]
    out.differences = [one for one in out.differences if one.hole not in kinds]
    given = [f"{REWARD}s", "reward.options", "reward.score_key"]
    if path == ENVIRONMENT:
        settings += _replaced(out, ENVIRONMENT)
        given += [REWARD] if asked & {REWARD, PROGRAM} or not _is_named(out, REWARD) else []
    else:
        given.append(REWARD)
    if REWARD in given:
        settings += [one for name in given for one in _replaced(out, name)]
    out.holes[path] = settings
    out.set(path, HOLE, "--allow-holes")
    if path == ENVIRONMENT:
        _place_environment(out)


def _names(out: Translation, path: str) -> bool:
    """Returns whether a path is set. Several files of prompts are another key."""
    return out.get(path) not in (*NOTHING, []) or (path == ROWS and "data.train.sources" in out.settings)


def _open_rows(out: Translation) -> None:
    """Opens the file of prompts if the source names none."""
    if not _names(out, ROWS):
        out.holes[ROWS] = [one for one in out.differences if one.hole == ROWS]
        out.differences = [one for one in out.differences if one.hole != ROWS]
        out.set(ROWS, HOLE, "--allow-holes")


def _is_named(out: Translation, path: str) -> bool:
    """Returns whether the source names a function of its own there, and the user need not complete the name."""
    origin = out.settings[path].origin if path in out.settings else ""
    is_selected = TO_COMPLETE in origin or BY_ROW in origin
    return any(sign in str(out.get(path)) for sign in (":", "/")) and not is_selected


def _replaced(out: Translation, path: str) -> list[Leftover]:
    """Removes a config key. Returns its value for the list of a hole, if the source names it."""
    is_named = path not in (REWARD, ENVIRONMENT) or _is_named(out, path)
    setting = out.settings.pop(path, None)
    return [Leftover(path, setting.value, f"named by {setting.origin}")] if setting is not None and is_named else []


def _place_environment(out: Translation) -> None:
    """Places the open environment on the ranks of the reward, which it gives unless the source names a function."""
    if REWARD not in out.settings:
        out.set(REWARD, "environment", "--allow-holes: the environment gives the reward")
    if "env" not in out.placed:
        out.place(["env"], out.placed["reward"], "--allow-holes")
    if "env.max_turns" not in out.settings:
        out.notes.append(f"env.max_turns is {out.get('env.max_turns')}: set the source's limit of turns")


REQUIRED = {"model.path": "checkpoint", ROWS: "file of prompts"}
"""Keys that every run needs, with what they name."""


def ask_for_missing(out: Translation, unset: str) -> None:
    """Raises ConfigError if the source does not name what every run needs. `unset` tells variables without a value."""
    for path, what in REQUIRED.items():
        if not _names(out, path):
            opened = ", or leave it open with --allow-holes" if path == ROWS else ""
            raise ConfigError(f"{path}: the source names no {what}; expected it by --set {path}=PATH{opened}{unset}")


def refuse_differences(out: Translation) -> None:
    """Raises ConfigError with all keys that would silently change results."""
    if not out.differences:
        return
    found = "\n".join(f"  {one.key}: {one.value!r}: {one.reason}" for one in out.differences)
    held = [one for one in out.differences if one.hole is not None]
    opened = "an environment or a reward of the source's own"
    is_held = any(one.hole not in (ATTACHED, ROWS) for one in held)
    hint = f". {len(held)} of them belong to {opened}: with --allow-holes it stays open" if is_held else ""
    raise ConfigError(
        f"{len(out.differences)} keys of {out.framework} change results and have no counterpart here:\n{found}\n"
        f"Remove them from the source, or import the rest with --allow-differences{hint}"
    )
