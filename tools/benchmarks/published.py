"""Steps that NeMo-RL has published for H100s, and training alone that Megatron Bridge has, beside what rltrain's
estimates give for the same jobs.

    python tools/benchmarks/published.py

Published: NVIDIA-NeMo/RL, docs/about/performance-summary.md. Sizes, batches and mean sequence lengths are those of its
table for v0.4, steps those of v0.4 and, where it is known, of v0.6. Assumed: prompts of 160 tokens, the longest
response as long as the sequence allows, full recomputation, SGLang as the engine, micro-batches of one longest
sequence, and nothing but the efficiencies of rltrain/planning/hardware.py.

Training alone: NVIDIA-NeMo/Megatron-Bridge, docs/performance-summary.md, 25.11 on DGX-H100, with its sizes, but not
interleaved where layers do not divide. It was in FP8, of which the estimate knows nothing; tokens were spread evenly
over the experts, as they are taken to be here. Prints two tables in Markdown.
"""

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY))

from model_shapes import deepseek_v3, qwen3_30b_a3b, qwen3_32b, qwen3_235b_a22b  # noqa: E402

from rltrain.config.schema import Config  # noqa: E402
from rltrain.models import Architecture  # noqa: E402
from rltrain.planning.hardware import GPUS  # noqa: E402
from rltrain.planning.memory import largest, rank_memories  # noqa: E402
from rltrain.planning.planned import (  # noqa: E402
    PlannedJob,
    Workload,  # noqa: E402
    plan_job,
)
from rltrain.planning.step_time import Clock  # noqa: E402
from rltrain.planning.task_time import TrainingTime  # noqa: E402
from rltrain.runtime.placement import resolve_placement  # noqa: E402

PROMPT_TOKENS = 160
SAMPLES_PER_PROMPT = 32
RANKS_PER_NODE = 8
H100 = GPUS["h100"]


@dataclass(frozen=True)
class Published:
    """`ahead`: training is one step behind generation, which has half of the GPUs for itself. Steps in seconds."""

    name: str
    model: Callable[[], Architecture]
    num_gpus: int
    max_tokens: int
    mean_tokens: float
    samples: int
    generation_tp: int
    training: dict[str, int]
    steps_s: dict[str, float]
    ahead: bool = False


RUNS = (
    Published("Qwen3-32B", qwen3_32b, 32, 4096, 3206, 2048, 4, {"tp": 4, "pp": 4}, {"v0.4": 393}),
    Published("Qwen3-32B", qwen3_32b, 64, 4096, 3207, 2048, 4, {"tp": 4, "pp": 4}, {"v0.4": 215}, ahead=True),
    Published("Qwen3-30B-A3B", qwen3_30b_a3b, 32, 4096, 3154, 2048, 4, {"tp": 2, "ep": 8}, {"v0.4": 225, "v0.6": 192}),
    Published(
        "Qwen3-30B-A3B", qwen3_30b_a3b, 32, 4096, 3158, 2048, 2, {"ep": 8, "pp": 2}, {"v0.4": 244, "v0.6": 152}, True
    ),
    Published("DeepSeek-V3", deepseek_v3, 256, 1536, 745, 512, 32, {"ep": 16, "pp": 16}, {"v0.4": 154, "v0.6": 134}),
    Published(
        "DeepSeek-V3", deepseek_v3, 512, 1536, 744, 512, 32, {"ep": 16, "pp": 16}, {"v0.4": 77.9, "v0.6": 64.1}, True
    ),
)


def planned(run: Published) -> PlannedJob:
    half = run.num_gpus // 2
    together = {"actor, rollout, reward": "all"}
    apart = {"actor": f"0-{half - 1}", "rollout, reward": f"{half}-{run.num_gpus - 1}"}
    config = Config.model_validate(
        {
            "steps": 10,
            "placement": apart if run.ahead else together,
            "model": {"path": run.name, "recompute": "full"},
            "data": {"train": {"path": "-"}, "max_prompt_tokens": 512},
            "actor": {"parallel": run.training, "micro_batch_tokens": run.max_tokens},
            "rollout": {
                "engine": "sglang",
                "parallel": {"tp": run.generation_tp},
                "sampling": {"max_response_tokens": run.max_tokens - 512},
                "max_context_tokens": run.max_tokens,
                "max_running_requests": run.samples,
            },
            "batch": {
                "prompts_per_step": run.samples // SAMPLES_PER_PROMPT,
                "samples_per_prompt": SAMPLES_PER_PROMPT,
                "mini_batches": run.samples // 512,
            },
            "schedule": {"mode": "asynchronous", "max_staleness": 1} if run.ahead else {},
        }
    )
    placement = resolve_placement(config.placement, run.num_gpus, RANKS_PER_NODE)
    architecture = run.model()
    return plan_job(config, placement, dict.fromkeys(["actor", *placement.roles], architecture), RANKS_PER_NODE)


@dataclass(frozen=True)
class PreTraining:
    """`tokens_per_s` of a GPU, as published. Sequences have 4096 tokens."""

    name: str
    model: Callable[[], Architecture]
    num_gpus: int
    samples: int
    micro_batch: int
    training: dict[str, int | bool]
    dtype: str
    tokens_per_s: float


SEQUENCE_TOKENS = 4096
EVEN = H100.model_copy(update={"efficiency": H100.efficiency.model_copy(update={"expert_imbalance": 1.0})})
PRE_TRAINING = (
    PreTraining(
        "Qwen3-30B-A3B", qwen3_30b_a3b, 16, 512, 2, {"pp": 2, "vpp": 24, "ep": 8}, "FP8", 5275
    ),
    PreTraining(
        "Qwen3-235B-A22B", qwen3_235b_a22b, 256, 2048, 1,
        {"tp": 2, "pp": 8, "ep": 32, "etp": 1, "sequence_parallel": True}, "FP8", 1575,
    ),
)  # fmt: skip


def tokens_per_s(run: PreTraining) -> float:
    """Of a GPU, foretold."""
    config = Config.model_validate(
        {
            "algorithm": "sft",
            "steps": 10,
            "placement": {"actor": "all"},
            "model": {"path": run.name},
            "data": {
                "train": {"path": "-"},
                "max_prompt_tokens": 1,
                "max_response_tokens": SEQUENCE_TOKENS - 1,
            },
            "actor": {"parallel": run.training, "micro_batch_tokens": run.micro_batch * SEQUENCE_TOKENS},
            "batch": {"prompts_per_step": run.samples, "samples_per_prompt": 1, "mini_batches": 1},
        }
    )
    placement = resolve_placement(config.placement, run.num_gpus, RANKS_PER_NODE)
    job = plan_job(config, placement, {"actor": run.model()}, RANKS_PER_NODE)
    time = TrainingTime(job, "actor", EVEN, Workload(1, SEQUENCE_TOKENS - 1, SEQUENCE_TOKENS - 1))
    return run.samples * SEQUENCE_TOKENS / (time.accumulating(1.0) + time.optimizer_steps()) / run.num_gpus


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter).parse_args()
    _print_steps()
    print("\n| model | H100s | published, tokens/s/GPU | foretold in bf16 |\n|---|---|---|---|")
    for run in PRE_TRAINING:
        print(f"| {run.name} | {run.num_gpus} | {run.tokens_per_s:g} ({run.dtype}) | {tokens_per_s(run):.0f} |")


def _print_steps() -> None:
    print(
        "| model | H100s | order | published, s a step | foretold, s a step | of it generate, log-probs, train | peak |"
    )
    print("|---|---|---|---|---|---|---|")
    for run in RUNS:
        job = planned(run)
        workload = Workload(PROMPT_TOKENS, run.mean_tokens - PROMPT_TOKENS, run.max_tokens - 512)
        step = Clock(job, H100, workload).step()
        tasks = {task: seconds for (task, _), seconds in step.tasks.items()}
        parts = ", ".join(f"{tasks[name]:.0f}" for name in ("generate", "actor_logprobs", "update"))
        published = ", ".join(f"{seconds:g} ({version})" for version, seconds in run.steps_s.items())
        peak = largest(rank_memories(job, H100)).peak.total / 1e9
        order = "one step ahead" if run.ahead else "step by step"
        cells = [run.name, str(run.num_gpus), order, published, f"{step.step_s:.0f}", parts, f"{peak:.0f} GB"]
        print(f"| {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
