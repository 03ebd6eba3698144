"""Weights and rejections for what the engine drew, of slime's example and of verl, by examples written by hand."""

from pathlib import Path
from typing import Any

import pytest

from rltrain.errors import UserError
from rltrain.import_config.translation import Translation
from tests.unit.test_import_features import config_of, found_of

EXAMPLE = "--use-tis --custom-tis-function-path my.mis.compute_mis_weights_with_cp --custom-config-path weights.yaml "
VERL = "algorithm.rollout_correction."
TRUNCATE = "tis_level: token\ntis_mode: truncate\ntis_lower_bound: 0.4\ntis_upper_bound: 3.0\n"


def of_example(options: str, folder: Path, monkeypatch: pytest.MonkeyPatch, more: str = "") -> Translation:
    """The file lies above the folder of the command."""
    (folder / "weights.yaml").write_text(options)
    (folder / "runs").mkdir()
    monkeypatch.chdir(folder / "runs")
    return found_of("slime", EXAMPLE + more)


def test_slimes_example_weighs_normalizes_and_rejects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bounds that a rejection lacks are those of the weights; what it finds stays in the divisors."""
    rejects = "use_rs: true\nrs_level: geometric\nrs_upper_bound: 1.1\nrs_veto_threshold: 0.001\n"
    found = of_example(TRUNCATE + rejects + "tis_batch_normalize: true\n", tmp_path, monkeypatch)
    assert not found.differences and any("tis_batch_normalize" in note for note in found.notes)
    correction = config_of(found, tmp_path).loss.correction
    assert (correction.method, correction.level, correction.low, correction.high) == ("tis", "token", 0, 3)
    assert (correction.normalize, correction.rejected) == ("mini_batch", "weight_0")
    assert [(one.level, one.low, one.high) for one in correction.masks] == [
        ("geometric", 0.4, 1.1),
        ("every_token", 0.001, 1e9),
    ]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("tis_level: sequence\ntis_mode: clip\ntis_upper_bound: 4.0\n", ("tis", "sequence", 0.25, 4)),
        ("tis_level: token\ntis_mode: mask\ntis_lower_bound: 0.5\ntis_upper_bound: 5.0\n", ("icepop", "token", 0.5, 5)),
    ],
)
def test_modes_of_slimes_example(
    options: str, expected: tuple[Any, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    correction = config_of(of_example(options, tmp_path, monkeypatch), tmp_path).loss.correction
    assert (correction.method, correction.level, correction.low, correction.high) == expected


@pytest.mark.parametrize(
    ("options", "more", "reason"),
    [
        (TRUNCATE + "own: 3\n", "", "own: 3: nothing here stands for it"),
        (TRUNCATE + "use_rs: true\nrs_level: token\n", "--entropy-coef 0.1", "out of the terms of entropy and KL too"),
        ("tis_level: token\ntis_mode: mask\ntis_upper_bound: 5.0\ntis_batch_normalize: true\n", "", "left out"),
        ("tis_level: turn\ntis_mode: mask\ntis_upper_bound: 5.0\n", "", "tis_level turn, tis_mode mask are none"),
    ],
)
def test_what_the_example_does_otherwise_is_refused(
    options: str, more: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UserError, match=reason):
        of_example(options, tmp_path, monkeypatch, more)


def test_what_only_the_examples_file_says_is_asked_for() -> None:
    with pytest.raises(UserError, match="weights.yaml is not to be found"):
        found_of("slime", EXAMPLE)


def test_slimes_icepop_and_functions_of_ones_own(tmp_path: Path) -> None:
    weighs = "--use-tis --tis-clip 5 --tis-clip-low 0.5 --custom-tis-function-path "
    correction = config_of(found_of("slime", weighs + "slime.loss.icepop_function"), tmp_path).loss.correction
    assert (correction.method, correction.low, correction.high) == ("icepop", 0.5, 5)
    with pytest.raises(UserError, match="weights here are those of loss.correction"):
        found_of("slime", weighs + "mine.weigh")


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ("", {"old_logprobs": "actor", "policy": "clip", "normalize": "step"}),
        (
            f" {VERL}bypass_mode=true {VERL}loss_type=reinforce",
            {"old_logprobs": "rollout", "policy": "reinforce", "normalize": "mini_batch"},
        ),
    ],
)
def test_verls_normalized_weights(more: str, expected: dict[str, str], tmp_path: Path) -> None:
    """verl has the mean of the step, or of the present log-probs, which a step's start does not know."""
    normalized = f"{VERL}rollout_is=sequence {VERL}rollout_is_batch_normalize=true"
    loss = config_of(found_of("verl", normalized + more), tmp_path).loss
    found = {"old_logprobs": loss.old_logprobs, "policy": loss.policy, "normalize": loss.correction.normalize}
    assert found == expected and loss.correction.level == "sequence"
