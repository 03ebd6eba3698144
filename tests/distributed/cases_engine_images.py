"""The embedded engine with images under tensor parallelism: samples of each rank."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rltrain.rollout.embedded.block_cache import GatheredBlocks
from rltrain.rollout.engine import SamplingParams
from rltrain.runtime.grid import Grid
from rltrain.runtime.image_files import ImageStore
from tests.support.vision_engines import load_shares, mixed_samples, placed_in, start_engine, text

SAMPLING = SamplingParams(1.0, 1.0, 0, 48, ())


def converse(
    checkpoint: Path, store: ImageStore, grid: Grid, rank: int, group: dist.ProcessGroup | None, kv_tokens: int | None
) -> list[dict[str, Any]]:
    """Returns two turns of several conversations, with a further image in the second."""
    loaded = load_shares(checkpoint, grid, rank)
    engine, images = start_engine(loaded, store, tp=grid.tp, tp_group=group, kv_tokens=kv_tokens, max_context_tokens=96)
    samples = [replace(one, goes_on=True, turn_limit=8) for one in mixed_samples()]
    ids, placed = placed_in([text(2, 20), 13, text(3, 21)])
    done = engine.generate(samples, SAMPLING)
    shown = [one.observed(ids, placed, turn_limit=len(one.tokens) + len(ids) + 8) for one in done]
    done = engine.generate(shown, SAMPLING)
    assert images.metrics() == {"images/engine_encoded": 5}, "every rank encodes every image once"
    return [{"tokens": list(one.tokens), "logprobs": list(one.logprobs)} for one in done]


def converse_with_tensor_parallelism(checkpoints: list[str], store: str) -> list[list[dict[str, Any]]]:
    """Returns this rank's conversations with each checkpoint, in the store filled by the test's process."""
    rank = dist.get_rank()
    torch.manual_seed(rank)  # ranks must agree without help from torch's own generator
    GatheredBlocks.block_tokens = 4  # this process is the test's own
    grid = Grid(tuple(range(dist.get_world_size())), tp=dist.get_world_size())
    images = ImageStore(Path(store), rank + 1, keep_steps=1, cache_bytes=0)
    found = []
    for number, checkpoint in enumerate(checkpoints):
        tight = 160 if number == 0 else None
        found.append(converse(Path(checkpoint), images, grid, rank, dist.group.WORLD, tight))
    return found
