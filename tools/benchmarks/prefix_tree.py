"""Measures an actor's update and its log-probs with and without shared prefixes, side by side.

    torchrun --nproc-per-node 1 tools/benchmarks/prefix_tree.py [--hidden 256] [--layers 4] [--repeats 5] [--cases ...]

A case is "groups x samples x prompt + response". With the letter c before it, it is "conversations x turns x prompt +
response": one sample per turn, which leaves out the first half of earlier responses, their reasoning. A case prints
seconds of both ways, in turn, and the bytes that autograd keeps for backward. It also prints how much of the gain in
tokens is gained in seconds and in bytes. On a CPU they are seconds of the process, so that other load matters less. The
last line is one JSON object.
"""

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from train_step import architecture_of, join_ranks, parser, time_steps

from rltrain.algorithms.losses import likelihood_loss
from rltrain.config import schema
from rltrain.data.experience import Experience
from rltrain.runtime.grid import Grid
from rltrain.runtime.placement import group_lists
from rltrain.runtime.process_groups import ProcessGroups
from rltrain.training.megatron.backend import TrainableModel
from rltrain.training.megatron.model import build_model

CASES = ("8x16x16+26", "1x16x512+26", "1x16x512+512", "1x16x4096+26", "1x16x4096+512", "c4x8x16+64")


def samples_of(case: str, vocab_size: int) -> Experience:
    """Returns the samples of a case, with random tokens."""
    generator = torch.Generator().manual_seed(0)
    draw = partial(torch.randint, vocab_size, generator=generator)
    sizes, response = case.removeprefix("c").split("+")
    num_groups, num_samples, prompt = map(int, sizes.split("x"))
    texts, groups = [], []
    for group in range(num_groups):
        history = draw((prompt,))
        for _ in range(num_samples):
            turn = draw((int(response),))
            texts.append((len(history), torch.cat([history, turn])))
            groups.append(group)
            if case.startswith("c"):
                history = torch.cat([history, turn[len(turn) // 2 :], draw((prompt,))])
    lengths = torch.tensor([len(text) for _, text in texts])
    mask = torch.cat([torch.arange(len(text)) >= begin for begin, text in texts])
    numbers = torch.arange(len(texts))
    return Experience(
        sample_ids=numbers,
        group_ids=torch.tensor(groups),
        prompt_ids=torch.tensor(groups),
        lengths=lengths,
        truncated=torch.zeros(len(texts), dtype=torch.bool),
        tokens=torch.cat([text for _, text in texts]),
        response_mask=mask,
        policy_version=torch.zeros(len(mask), dtype=torch.int32),
        rollout_logprobs=torch.zeros(len(mask)),
    )


class KeptBytes:
    """Counts the bytes that autograd keeps for backward, each storage once and parameters not."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
        self.storages: dict[int, int] = {}

    def pack(self, kept: torch.Tensor) -> torch.Tensor:
        storage = kept.untyped_storage()
        if storage.data_ptr() not in self.parameters:
            self.storages[storage.data_ptr()] = storage.nbytes()
        return kept

    def of(self, step: Any) -> int:
        with torch.autograd.graph.saved_tensors_hooks(self.pack, lambda kept: kept):
            step()
        return sum(self.storages.values())


def measured(case: str, model: TrainableModel, arguments: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    samples = samples_of(case, arguments.vocab)

    def update(shared: bool) -> None:
        model.model.share_prefixes = shared
        model.train_batch(samples, likelihood_loss())

    def evaluation(shared: bool) -> None:
        model.model.share_prefixes = shared
        model.evaluate(samples, max_tokens=arguments.micro_batch_tokens)

    steps: dict[str, Callable[[], Any]] = {
        f"{name} {how}": partial(step, how == "shared")
        for name, step in (("update", update), ("log-probs", evaluation))
        for how in ("alone", "shared")
    }
    clock = time.process_time if device.type == "cpu" else time.perf_counter
    seconds = time_steps(steps, arguments.repeats, device, clock)
    kept = {how: KeptBytes(model.model).of(steps[f"update {how}"]) for how in ("alone", "shared")}
    model.model.share_prefixes = True
    batches = model.model.micro_batches(samples, arguments.micro_batch_tokens)
    of_tokens = samples.num_tokens / sum(batch.num_computed_tokens for batch in batches)
    gains = {name: seconds[f"{name} alone"] / seconds[f"{name} shared"] for name in ("update", "log-probs")}
    gains["bytes"] = kept["alone"] / kept["shared"]
    return {
        "case": case,
        "tokens": samples.num_tokens,
        "gain_of_tokens": round(of_tokens, 3),
        **{f"{name}_s": round(value, 5) for name, value in seconds.items()},
        **{f"{how}_bytes": value for how, value in kept.items()},
        **{f"gain_of_{name}": round(gain, 3) for name, gain in gains.items()},
        **{f"{name}_of_asked": round((gain - 1) / (of_tokens - 1), 3) for name, gain in gains.items()},
    }


def main() -> None:
    made = parser(__doc__.splitlines()[0])
    made.set_defaults(hidden=256, layers=4, ffn=768, vocab=4096, micro_batch_tokens=100_000, repeats=5)
    made.add_argument("--cases", nargs="+", default=CASES)
    arguments = made.parse_args()
    arguments.max_tokens = 1 << 14
    device = join_ranks()
    grid = Grid(tuple(range(dist.get_world_size())))
    groups = ProcessGroups(group_lists({"actor": grid}), backend=dist.get_backend(), timeout_s=600)
    model = build_model(
        architecture_of(arguments),
        grid,
        groups,
        model=schema.Model(path="", dtype=arguments.dtype),
        parallel=schema.Parallel(),
        device=device,
    )
    torch.manual_seed(0)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.02)
    settings = schema.Actor(micro_batch_tokens=arguments.micro_batch_tokens)
    trained = TrainableModel(model, settings, total_updates=10_000)
    found = []
    for case in arguments.cases:
        found.append(measured(case, trained, arguments, device))
        if dist.get_rank() == 0:
            print(json.dumps(found[-1]), flush=True)
    if dist.get_rank() == 0:
        print(json.dumps({"benchmark": "prefix_tree", "settings": vars(arguments), "cases": found}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
