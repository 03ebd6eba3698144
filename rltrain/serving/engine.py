"""The embedded engine on a Hugging Face checkpoint, in a process that trains nothing."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from rltrain.checkpoint.hf import load_parameters
from rltrain.data.tokenizer import TextDecoder
from rltrain.errors import ConfigError
from rltrain.models import read_architecture
from rltrain.models.checkpoint_model import positions_of
from rltrain.models.config_file import ConfigReader
from rltrain.models.table import item_bytes
from rltrain.rollout.embedded import EmbeddedEngine, allocate_parameters
from rltrain.rollout.embedded.block_tables import budget_of
from rltrain.rollout.layout import engine_layout
from rltrain.rollout.workspace import PASS_TOKENS, workspace
from rltrain.runtime.grid import Grid

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class EngineSettings:
    checkpoint: Path
    dtype: str
    """float32, bfloat16, float16; auto: the checkpoint's."""
    device: torch.device
    max_context_tokens: int
    max_running_requests: int
    kv_cache_gb: float | str = "auto"


def load_engine(settings: EngineSettings, tokenizer: "PreTrainedTokenizerBase") -> EmbeddedEngine:
    """On the whole checkpoint. Raises UserError where it cannot be served."""
    architecture = read_architecture(settings.checkpoint, "--checkpoint")
    dtype = dtype_of(settings)
    grid = Grid((0,))
    layout = engine_layout(architecture, grid, dtype=dtype)
    parameters = allocate_parameters(layout, 0, device=settings.device)
    load_parameters(settings.checkpoint, layout, 0, parameters, config_key="--checkpoint")
    needed = workspace(
        architecture,
        grid,
        num_running=settings.max_running_requests,
        prefill_tokens=max(PASS_TOKENS, settings.max_context_tokens),
        item_bytes=item_bytes(dtype),
    )
    return EmbeddedEngine(
        architecture,
        parameters,
        tp_group=None,
        max_running_requests=settings.max_running_requests,
        max_context_tokens=settings.max_context_tokens,
        dtype=getattr(torch, dtype),
        device=settings.device,
        tokenizer=TextDecoder(tokenizer),
        kv_budget=budget_of(settings.kv_cache_gb, settings.device, needed.generating),
    )


def longest_context(checkpoint: Path, asked: int | None) -> int:
    """`asked`, which the checkpoint's positions must allow; by default all of them, but no more than DEFAULT."""
    architecture = read_architecture(checkpoint, "--checkpoint")
    if asked is not None and asked > architecture.max_positions:
        raise ConfigError(
            f"--max-context-tokens: got {asked}, but the checkpoint has {positions_of(architecture)}; expected at most "
            "that"
        )
    return asked or min(architecture.max_positions, DEFAULT_CONTEXT_TOKENS)


DEFAULT_CONTEXT_TOKENS = 8192


def dtype_of(settings: EngineSettings) -> str:
    """Of the weights."""
    if settings.dtype != "auto":
        return settings.dtype
    config = ConfigReader(settings.checkpoint / "config.json", config_key="--checkpoint").values
    named = config.get("dtype") or config.get("torch_dtype") or "float32"
    return str(named).removeprefix("torch.")
