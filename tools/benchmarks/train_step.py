"""Measures seconds per optimizer step of rltrain's actor and of the same step in bare megatron-core, side by side.

    torchrun --nproc-per-node 2 tools/benchmarks/train_step.py [--tp 2] [--sequences 128] [--repeats 15] ...

Both train equal copies of one model on the same samples. "bare" calls megatron-core directly. It uses its GPTModel with
these layers, its DDP, optimizer and schedule, and its fused cross-entropy, on a batch packed beforehand. "rltrain" is
TrainableModel.train_batch with the SFT loss. It also packs, computes entropies and reduces metrics over ranks. Each
repeat times both and alternates their order, so other load on the machine affects both alike. Medians of the slowest
rank are reported. The last line is one JSON object. The default size is the quickstart's.
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.fusions.fused_cross_entropy import fused_vocab_parallel_cross_entropy
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel.schedules import forward_backward_no_pipelining

from rltrain.algorithms.losses import likelihood_loss
from rltrain.config import schema
from rltrain.data.experience import Experience
from rltrain.models import Architecture
from rltrain.runtime.grid import Grid
from rltrain.runtime.placement import group_lists
from rltrain.runtime.process_groups import ProcessGroups
from rltrain.training.megatron.backend import TrainableModel
from rltrain.training.megatron.model import LanguageModel, build_model

LEARNING_RATE = 1e-4


def parser(description: str) -> argparse.ArgumentParser:
    """Returns a parser with the sizes of the model and of its samples."""
    made = argparse.ArgumentParser(description=description)
    for name, default in {
        "sequences": 128,
        "min-tokens": 30,
        "max-tokens": 42,
        "micro-batch-tokens": 16384,
        "hidden": 64,
        "layers": 2,
        "heads": 4,
        "kv-heads": 2,
        "ffn": 256,
        "vocab": 15,
        "repeats": 15,
    }.items():
        made.add_argument(f"--{name}", type=int, default=default)
    made.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    return made


def parse_arguments() -> argparse.Namespace:
    made = parser(__doc__.splitlines()[0])
    made.add_argument("--tp", type=int, default=2)
    return made.parse_args()


def architecture_of(arguments: argparse.Namespace) -> Architecture:
    return Architecture(
        family="qwen3",
        num_layers=arguments.layers,
        hidden_size=arguments.hidden,
        num_heads=arguments.heads,
        num_kv_heads=arguments.kv_heads,
        head_dim=arguments.hidden // arguments.heads,
        ffn_hidden_size=arguments.ffn,
        vocab_size=arguments.vocab,
        tied_embeddings=False,
        qkv_bias=False,
        qk_norm=True,
        norm_eps=1e-6,
        rope_theta=10000.0,
        rope_scaling=None,
        max_positions=arguments.max_tokens,
        eos_token_ids=(0,),
    )


def make_experience(arguments: argparse.Namespace, seed: int) -> Experience:
    """Returns samples of random lengths and tokens. All tokens except each sample's first one count as response."""
    generator = torch.Generator().manual_seed(seed)
    num_samples = arguments.sequences
    lengths = torch.randint(arguments.min_tokens, arguments.max_tokens + 1, (num_samples,), generator=generator)
    num_tokens = int(lengths.sum())
    response_mask = torch.ones(num_tokens, dtype=torch.bool)
    response_mask[lengths.cumsum(0) - lengths] = False
    return Experience(
        sample_ids=torch.arange(num_samples),
        group_ids=torch.arange(num_samples),
        prompt_ids=torch.arange(num_samples),
        lengths=lengths,
        truncated=torch.zeros(num_samples, dtype=torch.bool),
        tokens=torch.randint(arguments.vocab, (num_tokens,), generator=generator),
        response_mask=response_mask,
        policy_version=torch.zeros(num_tokens, dtype=torch.int32),
        rollout_logprobs=torch.zeros(num_tokens),
    )


class BareStep:
    """A step of Megatron's own parts, assembled as in its examples. Losses are averages over this rank's response
    tokens."""

    def __init__(self, model: LanguageModel, experience: Experience, micro_batch_tokens: int) -> None:
        groups = model.pg_collection
        sharded = groups.dp_cp.size() > 1
        settings = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=sharded)
        self.ddp = DistributedDataParallel(model.config, settings, model.chunks[0], pg_collection=groups)
        self.optimizer = get_megatron_optimizer(
            OptimizerConfig(
                lr=LEARNING_RATE,
                clip_grad=1.0,
                bf16=model.config.bf16,
                params_dtype=model.config.params_dtype,
                use_distributed_optimizer=sharded,
            ),
            [self.ddp],
            use_gloo_process_groups=False,
            pg_collection=groups,
        )
        model.config.finalize_model_grads_func = finalize_model_grads
        self.groups = groups
        self.batches = [
            (
                batch,
                model.sequences(batch.segments),
                batch.padded_tokens.roll(-1)[None],
                batch.experience.response_mask.roll(-1).float(),
            )
            for batch in model.micro_batches(experience, micro_batch_tokens)
        ]

    def __call__(self) -> float:
        self.ddp.zero_grad_buffer()
        self.optimizer.zero_grad()
        kept = forward_backward_no_pipelining(
            forward_step_func=self._forward,
            data_iterator=iter(self.batches),
            model=self.ddp,
            num_microbatches=len(self.batches),
            seq_length=0,
            micro_batch_size=1,
            pg_collection=self.groups,
        )
        self.optimizer.step()
        return float(sum(loss for loss, _ in kept) / sum(count for _, count in kept))

    def _forward(self, iterator: Any, model: DistributedDataParallel) -> tuple[torch.Tensor, Callable[..., Any]]:
        batch, sequences, labels, mask = next(iterator)
        logits = model(
            input_ids=batch.padded_tokens[None], position_ids=None, attention_mask=None, packed_seq_params=sequences
        )

        def loss(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, Any]:
            losses = fused_vocab_parallel_cross_entropy(logits.float(), labels, self.groups.tp)
            total, count = (losses[0, : batch.num_tokens] * mask).sum(), mask.sum()
            return total, count.int(), (total.detach().clone(), count)

        return logits, loss


def time_steps(
    steps: dict[str, Callable[[], Any]],
    repeats: int,
    device: torch.device,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, float]:
    """Returns the median seconds of `clock` on the slowest rank for each step, after two warm-up rounds."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for repeat in range(repeats + 2):
        for name in sorted(steps, reverse=repeat % 2 == 1):
            dist.barrier()
            start = clock()
            steps[name]()
            if device.type == "cuda":
                torch.cuda.synchronize()
            elapsed = torch.tensor([clock() - start], device=device)
            dist.all_reduce(elapsed, dist.ReduceOp.MAX)
            seconds[name].append(float(elapsed))
    return {name: statistics.median(values[2:]) for name, values in seconds.items()}


def copy_of(model: LanguageModel, make: Callable[[], LanguageModel]) -> LanguageModel:
    copy = make()
    with torch.no_grad():
        for target, source in zip(copy.parameters(), model.parameters(), strict=True):
            target.copy_(source)
    return copy


def join_ranks() -> torch.device:
    """Joins the ranks and returns this rank's device. Each rank computes on one thread. Collective over: all ranks."""
    torch.set_num_threads(1)
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo")
    return device


def main() -> None:
    arguments = parse_arguments()
    device = join_ranks()
    grid = Grid(tuple(range(dist.get_world_size())), tp=arguments.tp)
    groups = ProcessGroups(group_lists({"actor": grid}), backend=dist.get_backend(), timeout_s=120)
    architecture = architecture_of(arguments)

    def make() -> LanguageModel:
        return build_model(
            architecture,
            grid,
            groups,
            model=schema.Model(path="", dtype=arguments.dtype),
            parallel=schema.Parallel(tp=arguments.tp),
            device=device,
        )

    model, place = make(), grid.coordinates(dist.get_rank())
    torch.manual_seed(place.tp)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.02)
    experience = make_experience(arguments, seed=place.dp)
    bare = BareStep(copy_of(model, make), experience, arguments.micro_batch_tokens)
    settings = schema.Actor(
        optimizer=schema.Optimizer(lr=LEARNING_RATE), micro_batch_tokens=arguments.micro_batch_tokens
    )
    trainable = TrainableModel(model, settings, total_updates=arguments.repeats)
    seconds = time_steps(
        {"bare": bare, "rltrain": lambda: trainable.train_batch(experience, likelihood_loss())},
        arguments.repeats,
        device,
    )
    if dist.get_rank() == 0:
        report(arguments, grid, seconds, experience.num_tokens * grid.dp, device)
    dist.destroy_process_group()


def report(
    arguments: argparse.Namespace, grid: Grid, seconds: dict[str, float], num_tokens: int, device: torch.device
) -> None:
    for name, value in seconds.items():
        print(f"{name:8s} {1e3 * value:9.1f} ms per step {num_tokens / value:12.0f} tokens/s")
    result = {
        "benchmark": "train_step",
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "tp": grid.tp,
        "dp": grid.dp,
        "tokens_per_step": num_tokens,
        "rltrain_s": round(seconds["rltrain"], 6),
        "bare_s": round(seconds["bare"], 6),
        "rltrain_over_bare": round(seconds["rltrain"] / seconds["bare"], 4),
        "settings": vars(arguments),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
