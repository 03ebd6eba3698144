"""Profiles an update and decode steps of a Qwen3-0.6B with random weights: seconds, memory, launches and kernels.

    torchrun --standalone --nproc-per-node 1 tools/benchmarks/gpu_profile.py [--samples 64] [--tokens 576]

An update trains on `samples` of `tokens` tokens, in micro-batches of 8192 and in a single one. The embedded engine then
generates for 64 and for 256 samples, eight of a prompt. "first" and "later" are seconds of whole calls. Kernels, their
seconds and launches are those of torch's profiler in a further update or call. On a CPU a small model shows that the
program runs, and operators take the place of kernels. The last line is one JSON object.
"""

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import train_step
from torch.profiler import ProfilerActivity, profile

from rltrain.algorithms.losses import likelihood_loss
from rltrain.config import schema
from rltrain.models import Architecture, read_architecture
from rltrain.models.flops import forward_flops
from rltrain.planning.options import SHIPPED
from rltrain.reshard.copy_table import allocate_parameters
from rltrain.rollout.embedded import EmbeddedEngine
from rltrain.rollout.embedded.block_tables import GB, KvBudget
from rltrain.rollout.engine import SamplingParams
from rltrain.rollout.layout import engine_layout
from rltrain.rollout.sample import Sample
from rltrain.runtime.grid import Grid
from rltrain.runtime.placement import group_lists
from rltrain.runtime.process_groups import ProcessGroups
from rltrain.training.megatron.backend import TrainableModel
from rltrain.training.megatron.model import build_model

MICRO_BATCH_TOKENS = 8192
SAMPLES_OF_PROMPT = 8
PROMPT_TOKENS = 64
REPEATS = 4
PROFILED_STEPS = 128
SHOWN = 20
"""Kernels shown, those with most seconds."""
KV_CACHE_GB = {64: 20.0, 256: 40.0}
"""GB of keys and values by the number of samples."""


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def seconds_of(run: Callable[[], Any], device: torch.device) -> float:
    synchronize(device)
    begin = time.perf_counter()
    run()
    synchronize(device)
    return time.perf_counter() - begin


def profiled(title: str, run: Callable[[], Any], device: torch.device) -> dict[str, float]:
    """Prints the kernels with most seconds, and returns the seconds and launches of all."""
    on_gpu = device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with profile(activities=activities) as recorded:
        seconds_of(run, device)
    of_device = torch.autograd.DeviceType.CUDA if on_gpu else torch.autograd.DeviceType.CPU
    events = [event for event in recorded.key_averages() if event.device_type == of_device]
    seconds = {
        event.key: event.self_device_time_total / 1e6 if on_gpu else event.self_cpu_time_total / 1e6 for event in events
    }
    found = {"kernels_s": sum(seconds.values()), "launches": sum(event.count for event in events)}
    print(f"{title}: {1e3 * found['kernels_s']:.1f} ms in {found['launches']} launches")
    for event in sorted(events, key=lambda event: -seconds[event.key])[:SHOWN]:
        print(f"  {1e3 * seconds[event.key]:9.2f} ms {event.count:7}x {event.key[:100]}")
    return found


def profile_updates(
    architecture: Architecture, model: schema.Model, arguments: argparse.Namespace, device: torch.device
) -> dict[str, Any]:
    """Returns the figures of an update by the tokens of its micro-batches."""
    grid = Grid((0,))
    groups = ProcessGroups(group_lists({"actor": grid}), backend=dist.get_backend(), timeout_s=120)
    sizes = argparse.Namespace(
        sequences=arguments.samples,
        min_tokens=arguments.tokens,
        max_tokens=arguments.tokens,
        vocab=architecture.vocab_size,
    )
    experience = train_step.make_experience(sizes, seed=0)
    flops = forward_flops(architecture).training(experience.lengths.tolist())
    found = {}
    for micro_batch_tokens in (MICRO_BATCH_TOKENS, experience.num_tokens):
        built = build_model(architecture, grid, groups, model=model, parallel=schema.Parallel(), device=device)
        for parameter in built.parameters():
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=0.02)
        settings = schema.Actor(
            optimizer=schema.Optimizer(lr=1e-6), micro_batch_tokens=micro_batch_tokens, share_prefixes=False
        )
        trainable = TrainableModel(built, settings, total_updates=REPEATS + 2)
        update = partial(trainable.train_batch, experience, likelihood_loss())
        update()
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        seconds = sorted(seconds_of(update, device) for _ in range(REPEATS))[REPEATS // 2]
        of_update = {
            "update_s": seconds,
            "tokens_per_s": experience.num_tokens / seconds,
            "flops_per_s": flops / seconds,
        }
        if device.type == "cuda":
            of_update["peak_bytes"] = torch.cuda.max_memory_allocated()
        of_update |= profiled(f"update in micro-batches of {micro_batch_tokens} tokens", update, device)
        found[str(micro_batch_tokens)] = of_update
    return found


def generate(engine: EmbeddedEngine, vocab_size: int, count: int, num_tokens: int) -> None:
    """Generates `num_tokens` tokens for each of `count` samples."""
    prompts = torch.randint(1, vocab_size, (count, PROMPT_TOKENS), generator=torch.Generator().manual_seed(0)).tolist()
    samples = [Sample(i, tuple(prompts[i // SAMPLES_OF_PROMPT]), seed=i) for i in range(count)]
    engine.generate(samples, SamplingParams(1.0, 1.0, 0, num_tokens, ()))


def profile_decoding(
    architecture: Architecture, dtype: torch.dtype, arguments: argparse.Namespace, device: torch.device
) -> dict[str, Any]:
    """Returns the figures of generation by the number of samples."""
    layout = engine_layout(architecture, Grid((0,)), dtype=str(dtype).removeprefix("torch."))
    parameters = allocate_parameters(layout, 0, device=device)
    for parameter in parameters.values():
        torch.nn.init.normal_(parameter, std=0.02) if parameter.dim() > 1 else parameter.fill_(1)
    found = {}
    num_tokens = arguments.tokens - PROMPT_TOKENS
    for count, budget_gb in KV_CACHE_GB.items():
        engine = EmbeddedEngine(
            architecture,
            parameters,
            tp_group=None,
            max_running_requests=count,
            max_context_tokens=arguments.tokens,
            dtype=dtype,
            device=device,
            kv_budget=KvBudget(budget_gb, partial(int, budget_gb * GB)),
        )
        run = partial(generate, engine, architecture.vocab_size, count)
        first, *later = [seconds_of(partial(run, num_tokens), device) for _ in range(3)]
        of_count = {"first_s": first, "later_s": min(later), "step_s": min(later) / num_tokens}
        steps = min(num_tokens, PROFILED_STEPS)
        of_count |= profiled(f"{steps} steps of {count} samples, {engine.decodes_by}", partial(run, steps), device)
        found[str(count)] = of_count
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=576)
    arguments = parser.parse_args()
    device = train_step.join_ranks()
    architecture, model = read_architecture(SHIPPED / "Qwen3-0.6B"), schema.Model(path="", dtype="bfloat16")
    if device.type == "cpu":
        architecture, model = read_architecture(SHIPPED / "quickstart"), schema.Model(path="", dtype="float32")
    result = {
        "benchmark": "gpu_profile",
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "updates": profile_updates(architecture, model, arguments, device),
        "decoding": profile_decoding(architecture, getattr(torch, model.dtype), arguments, device),
    }
    print(json.dumps(result))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
