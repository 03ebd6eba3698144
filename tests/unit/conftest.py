"""Fixtures of several test files. They import their modules only on use."""

from pathlib import Path

import pytest

SPARSE_FAMILIES = (
    "qwen3_moe", "qwen3_moe_tied", "mixtral", "deepseek_v3", "moonlight", "qwen2_moe", "glm4_moe", "minimax_m2",
    "qwen3_next", "hy_v3", "gpt_oss",
)  # fmt: skip
"""Families with experts. The second does not normalise weights, the fourth has groups of experts and yarn."""


class _Checkpoints(dict[str, Path]):
    """Folders of tiny models by family, each written on the first request of a test."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __missing__(self, family: str) -> Path:
        from tests.support.rollout_models import write_checkpoint

        self[family] = write_checkpoint(self.folder / family, family)
        return self[family]


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return _Checkpoints(tmp_path_factory.mktemp("families"))


@pytest.fixture(scope="session")
def qwen3(checkpoints: dict[str, Path]) -> Path:
    return checkpoints["qwen3"]


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes blocks of keys and values so small that tiny samples have several."""
    from rltrain.rollout.embedded.block_cache import GatheredBlocks

    monkeypatch.setattr(GatheredBlocks, "block_tokens", 4)
