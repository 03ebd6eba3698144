"""Models of Transformer Engine's modules, which a stand-in has and which refuses what it refuses, train as those of
Megatron's own do: latent attention and groups of heads, sequences that ranks share out, experts over DeepEP."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from tests.forked.popen import PYTHON_PATH, REPOSITORY

LATENT, GROUPS = "deepseek_v3", "qwen3_moe"
CASES = {
    "latent tp2": LATENT,
    "latent pp2 cp2 ep2": LATENT,
    "latent tp2 cp2 ep4 etp1": LATENT,
    "latent tp2 cp2 etp2 by heads": LATENT,
    "latent tp2 ep2 deepep": LATENT,
    "further pp2 cp2 ep2": "further",
    "further of dense tp2 pp2": "further of dense",
    "yarn tp2 pp2": "yarn",
    "yarn cp2": "yarn",
    "latent linear tp2 ep2": "latent linear",
    "moonlight tp2 cp2 ep2": "moonlight",
    "groups tp4": GROUPS,
    "groups cp2 ep4 deepep": GROUPS,
    "groups pp2 cp2 ep2 by heads": GROUPS,
    "rounded ep2 etp2": "rounded",
}
RELATIVE, ABSOLUTE, TOLD = 1e-5, 1e-6, 1e-4


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("transformer_engine_training")
    path = os.pathsep.join((str(REPOSITORY / "tests/stand_ins"), PYTHON_PATH))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "tests/transformer_engine_ranks.py", str(folder)],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-8000:]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(4)]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_steps_and_log_probs_are_those_of_megatrons_own_modules(case: str, ranks: list[dict[str, Any]]) -> None:
    alone, found = ranks[0][CASES[case]], [rank[case] for rank in ranks if case in rank]
    assert len(found) > 1
    for report in found:
        for step, wanted in zip(report["steps"], alone["steps"], strict=True):
            assert step == pytest.approx(wanted, rel=RELATIVE, abs=ABSOLUTE)
        assert report["told"] == pytest.approx(alone["told"], abs=TOLD)


@pytest.mark.slow
def test_rounded_experts_tell_other_than_those_that_are_not(ranks: list[dict[str, Any]]) -> None:
    assert ranks[0]["rounded"]["told"] != pytest.approx(ranks[0][GROUPS]["told"], abs=10 * TOLD)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "theirs", "ours"),
    [
        ("odd heads", "No dot product attention backend", "keys and values have 20 and 16; set it to auto or local"),
        ("one key head by heads", "requires num_heads % cp_size == 0", "1 key-value heads of a tensor-parallel rank"),
    ],
)
def test_what_it_refuses_is_refused_before(case: str, theirs: str, ours: str, ranks: list[dict[str, Any]]) -> None:
    for rank in (0, 1):
        found = ranks[rank][case]
        assert theirs in found["transformer_engine"] and ours in found["rltrain"]
