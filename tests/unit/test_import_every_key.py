"""Every key of a source is translated, has no influence for a reason, or is refused. Keys are drawn from the other
trainers' own defaults."""

import random
from typing import Any

import pytest

from rltrain.errors import ConfigError
from rltrain.import_config import skyrl, verl
from rltrain.import_config.influence import CONDITIONS, by_pattern, defaults_of, equal
from rltrain.import_config.translation import SourceKeys
from tests.unit.test_import_features import SKYRL, SLIME, TEXTS, VERL, found_of

DRAWN = 12
GIVEN = {
    "slime": {word.removeprefix("--") for word in SLIME.split() if word.startswith("--")},
    "verl": {word.partition("=")[0] for word in VERL.split()},
    "skyrl": {word.partition("=")[0] for word in SKYRL.split()},
}
SEED = 20_261_128


def changed(value: Any) -> Any:
    """Returns another value than a default, of the same kind if possible."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value * 2 + 1
    return ["another"] if isinstance(value, list) else "another"


def text_of(framework: str, key: str, value: Any) -> str:
    if framework == "slime":
        return f"--{key}" if value is True else f"--{key} {value}"
    shown = str(value).lower() if isinstance(value, bool) else str(value).replace("'", "")
    return f"{key}={shown}"


def drawn(framework: str) -> list[tuple[str, str, Any]]:
    defaults = {
        key: value for key, value in defaults_of(framework).items() if value != {} and key not in GIVEN[framework]
    }
    keys = random.Random(SEED).sample(sorted(defaults), DRAWN)
    return [(framework, key, changed(defaults[key])) for key in keys]


@pytest.mark.parametrize(("framework", "key", "value"), [one for name in TEXTS for one in drawn(name)])
def test_a_changed_key_is_translated_left_with_one_reason_or_refused(framework: str, key: str, value: Any) -> None:
    try:
        found = found_of(framework, text_of(framework, key, value))
    except ConfigError:
        return
    reasons = [one.reason for one in found.leftovers if one.key == key]
    is_translated = found.meaning != found_of(framework, "").meaning
    assert is_translated or len(reasons) == 1, "the key vanished, or has several reasons"


@pytest.mark.parametrize("framework", ["verl", "skyrl"])
def test_a_default_that_is_written_out_changes_nothing(framework: str) -> None:
    """Only values that follow from others may become explicit."""
    simple = {key: value for key, value in defaults_of(framework).items() if isinstance(value, bool | float)}
    keys = random.Random(SEED).sample(sorted(simple.keys() - GIVEN[framework]), 40)
    plain = {path: one.value for path, one in found_of(framework, "").settings.items()}
    told = found_of(framework, " ".join(text_of(framework, key, simple[key]) for key in keys))
    values = {path: one.value for path, one in told.settings.items()}
    assert {path: values.get(path) for path in plain} == plain


UNCHECKED = {"logs only", "checkpoint files only", "no Ray", "settings of Hydra"}
"""Reasons that hold for all keys of a section in every run."""
OF_ENGINES = (
    "torch_profiler",
    "rate_limit",
    "router_init",
    "kv_transfer",
    "kernel_",
    "speculative",
    "delta_weight_sync",
)


@pytest.mark.parametrize("table", [verl.HARMLESS, verl.CRITIC_HARMLESS, skyrl.HARMLESS])
def test_a_whole_section_is_left_out_only_by_a_check(table: dict[str, tuple[str, ...]]) -> None:
    checks = {*CONDITIONS, *verl.conditions(SourceKeys({}), False), *skyrl.conditions(SourceKeys({}))}
    for pattern in (pattern for pattern in table if pattern.endswith("*")):
        unchecked = {*table[pattern]} - checks - UNCHECKED
        assert not unchecked or any(part in pattern for part in OF_ENGINES), pattern


def test_reasons_come_in_order_and_hold_or_not() -> None:
    table = by_pattern("no critic: critic.*\nspeed only: critic.a")
    assert table == {"critic.*": ("no critic",), "critic.a": ("speed only",)}
    assert "no critic" in reason_of("verl", "critic.ppo_epochs=3")
    with pytest.raises(ConfigError, match="critic.ppo_epochs: 3: it has no counterpart"):
        found_of("verl", "algorithm.adv_estimator=gae critic.ppo_epochs=3")


def reason_of(framework: str, text: str) -> str:
    key = text.partition("=")[0].removeprefix("--")
    return next(one.reason for one in found_of(framework, text).leftovers if one.key == key)


@pytest.mark.parametrize(
    ("first", "second", "same"),
    [("0", 0.0, True), ("on", True, True), ([], None, True), (["a"], "a", True), ("a", "b", False), (1, "x", False)],
)
def test_values_are_compared_as_they_are_meant(first: Any, second: Any, same: bool) -> None:
    assert equal(first, second) is same
