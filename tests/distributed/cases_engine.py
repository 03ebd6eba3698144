"""The embedded engine under tensor parallelism: samples of each rank in a 4-rank job."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rltrain.models import read_architecture
from rltrain.rollout.embedded import EmbeddedEngine
from rltrain.rollout.embedded.block_cache import GatheredBlocks
from rltrain.rollout.engine import SamplingParams
from rltrain.rollout.sample import Sample
from rltrain.runtime.grid import Grid
from tests.support.rollout_models import load_engine, ragged_requests, requests_of_one_system

SAMPLINGS = (
    SamplingParams(0.0, 1.0, 0, 8, (3,)),
    SamplingParams(1.0, 1.0, 0, 8, (3, 4, 5)),
    SamplingParams(0.8, 0.9, 10, 8, (3, 4, 5)),
)


def engine_completions(
    path: Path, grid: Grid, rank: int, group: dist.ProcessGroup | None, *, interrupted: bool = False
) -> list[dict[str, list[Any] | str]]:
    """Returns completions of every sampling mode, of conversations, and of prompts that begin alike, with fewer slots
    than requests.

    With `interrupted` generation is suspended, in a tight KV budget that differs between ranks.
    """
    limits = {"max_context_tokens": 32, "kv_tokens": 60 + 8 * (rank % grid.tp)} if interrupted else {}
    limits |= {"max_running_requests": 5, "record_routing": read_architecture(path).moe is not None}
    engine, _ = load_engine(path, grid=grid, rank=rank, tp_group=group, **limits)
    draw = draw_interrupted if interrupted else lambda engine, sampling: engine.generate(ragged_requests(), sampling)
    results = []
    for sampling in SAMPLINGS:
        completions = draw(engine, sampling)
        if sampling is SAMPLINGS[-1]:
            completions += converse(engine, sampling, kept=interrupted)
            completions += engine.generate(requests_of_one_system(4, 2, system_tokens=9), sampling)
        results += [
            {"tokens": list(done.tokens), "logprobs": list(done.logprobs), "status": int(done.status)}
            | ({"experts": done.routing.experts.tolist()} if done.routing is not None else {})
            for done in completions
        ]
    metrics = engine.cache_metrics()
    if interrupted:
        assert metrics["rollout/preemptions"] > 0 < metrics["rollout/kv_reused_tokens"]
        assert metrics["rollout/context_prefix_tokens"] > 0
    return results


def converse(engine: EmbeddedEngine, sampling: SamplingParams, *, kept: bool) -> list[Sample]:
    """Returns two turns of several conversations. `kept` says whether keys and values may be kept between them."""
    sampling = replace(sampling, max_response_tokens=14)
    samples = [replace(sample, goes_on=kept) for sample in ragged_requests(6)]
    once = engine.generate([replace(sample, turn_limit=4) for sample in samples], sampling)
    return engine.generate([done.observed((7, 9, 11), turn_limit=len(done.tokens) + 7) for done in once], sampling)


def draw_interrupted(engine: EmbeddedEngine, sampling: SamplingParams) -> list[Sample]:
    """Generates the same requests as `generate`, but suspended after some steps, with new requests in between."""
    requests = ragged_requests()
    engine.submit(requests[:6], sampling)
    completions = [done for _ in range(4) for done in engine.step()]
    engine.submit(requests[6:], sampling)
    completions += [done for _ in range(3) for done in engine.step()]
    completions += engine.generate(engine.suspend(), sampling)
    return sorted(completions, key=lambda done: done.id)


def generate_with_tensor_parallelism(engines: list[tuple[int, int, str, bool]]) -> list[list[dict[str, Any]]]:
    """Returns this rank's completions on every engine.

    An engine is given by its number of ranks, shares of experts, checkpoint, and whether it is interrupted.
    """
    torch.manual_seed(dist.get_rank())  # ranks must agree without help from torch's own generator
    GatheredBlocks.block_tokens = 4  # this process is the test's own
    world = tuple(range(dist.get_world_size()))
    sizes = sorted({size for size, *_ in engines})
    groups = {size: {ranks: dist.new_group(ranks) for ranks in Grid(world, tp=size).lists("tp")} for size in sizes}
    results = []
    for size, ep, path, interrupted in engines:
        mine = next(group for ranks, group in groups[size].items() if dist.get_rank() in ranks)
        grid = Grid(world, tp=size, ep=ep, etp=size // ep)
        results.append(engine_completions(Path(path), grid, dist.get_rank(), mine, interrupted=interrupted))
    return results
