"""Vision-language models sharded over two ranks have transformers' log-probs and gradients."""

from pathlib import Path

import pytest

from tests.distributed.cases_vision_fsdp import WAYS
from tests.support.marks import slow_but
from tests.support.worlds import Ranks, made_once, reports, run_case

QUICK = ("uneven", "text_on_one_rank", "nothing_on_one_rank", "cp2")
TOLERANCE = 1e-4


@made_once
def quick_world(folder: Path) -> Ranks:
    return run_case("cases_vision_fsdp:comparisons", 2, folder=folder, names=[*QUICK])


@made_once
def slow_world(folder: Path) -> Ranks:
    return run_case(
        "cases_vision_fsdp:comparisons", 2, folder=folder, names=[name for name in WAYS if name not in QUICK]
    )


@pytest.mark.parametrize("name", slow_but(WAYS, *QUICK))
def test_log_probs_and_gradients_are_those_of_transformers(ranks: Ranks, name: str) -> None:
    found = reports(ranks, name)
    assert len(found) == 2
    for of_rank in found:
        assert of_rank["logprobs"] < TOLERANCE
        assert max(of_rank["gradients"].values()) < TOLERANCE
        assert any("visual" in parameter for parameter in of_rank["gradients"])


def test_no_rank_runs_the_tower_without_images(ranks: Ranks) -> None:
    assert [of_rank["of_text"] for of_rank in reports(ranks, "uneven")] == [[], []]


def test_images_with_kept_features_are_not_encoded_again(ranks: Ranks) -> None:
    """Then the first rank encodes blank images, because the second gathers its shards."""
    first, second = reports(ranks, "kept")
    assert [first["encoded"], second["encoded"]] == [[4, 0, 0], [0, 4, 0]]
    assert max(first["logprobs"], second["logprobs"]) < TOLERANCE
