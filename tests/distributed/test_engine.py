"""Tokens and log-probs do not depend on tensor and expert parallelism, even with more ranks than KV heads.

Nor do they depend on interruptions, KV budgets, and cached keys and values between the turns of conversations.
"""

from pathlib import Path

import pytest

from rltrain.runtime.grid import Grid
from tests.distributed.cases_engine import engine_completions
from tests.support.family_checkpoints import OTHER_DENSE
from tests.support.marks import slow_but
from tests.support.rollout_models import write_checkpoint
from tests.support.worlds import run_case

TIED = ("llama", "mixtral")
ENGINES = [(4, 2, "qwen3_moe")]
"""Ranks of an engine, shares of its experts, and family. The dense checkpoints have two KV heads: with four ranks each
head is held twice."""
WITHIN = {"qwen3_5": 1e-4, "qwen3_next": 1e-4}
"""Delta nets normalise the outputs of heads. Tiny outputs consist mostly of rounding errors."""
INTERRUPTED, ALSO_INTERRUPTED = [(2, 2, "deepseek_v3")], [(4, 1, "qwen3")]


WITH_EXPERTS = ("qwen3_moe", "mixtral", "deepseek_v3", "moonlight", "qwen2_moe", "glm4_moe", "minimax_m2", "qwen3_next")
WITH_EXPERTS += ("hy_v3", "gpt_oss")
WITH_BIASES = ("llama_mlp_bias_dynamic", "qwen3_window_bias")
"""Biases are cut or held by one rank alone. Other variants differ in parts present on every rank."""
IN_FOUR = [(4, 2, "minimax_m2"), (4, 2, "gpt_oss")]
SPARSE = [(2, 1 + number % 2, family) for number, family in enumerate(WITH_EXPERTS)]
SPARSE += IN_FOUR
DENSE = [
    (2, 1, "llama"),
    (2, 1, "qwen3"),
    (4, 1, "qwen2"),
    *((2, 1, family) for family in (*OTHER_DENSE, *WITH_BIASES)),
]


FEW, MANY = (ENGINES, INTERRUPTED), (SPARSE + DENSE, ALSO_INTERRUPTED)
Engines = list[tuple[int, int, str]]


@pytest.mark.parametrize(("whole", "interrupted"), slow_but((FEW, MANY), FEW), ids=["few", "many"])
def test_tensor_parallel_engines_equal_a_single_rank(tmp_path: Path, whole: Engines, interrupted: Engines) -> None:
    families = {family for *_, family in [*whole, *interrupted]}
    paths = {family: write_checkpoint(tmp_path / family, family, tied=family in TIED) for family in families}
    engines = [(*sizes, str(paths[family]), False) for *sizes, family in whole]
    engines += [(*sizes, str(paths[family]), True) for *sizes, family in interrupted]
    by_rank = run_case("cases_engine:generate_with_tensor_parallelism", engines=engines)
    single = {family: engine_completions(path, Grid((0,)), 0, None) for family, path in paths.items()}
    for results in by_rank:
        for generated, (*_, family) in zip(results, [*whole, *interrupted], strict=True):
            for done, reference in zip(generated, single[family], strict=True):
                for what in ("tokens", "status", "experts"):
                    assert done.get(what) == reference.get(what)
                assert done["logprobs"] == pytest.approx(reference["logprobs"], abs=WITHIN.get(family, 3e-5))
    assert all(results == by_rank[0] for results in by_rank)
