"""Tokens per second of the embedded engine and of its rivals, side by side on one model.

    OMP_NUM_THREADS=1 python tools/benchmarks/rollout.py [--model DIR] [--repeats 9] [--slow-repeats 3]
        [--threads 1] [--sglang-python PATH]

The rivals are transformers' `generate` and its continuous batching and, where `--sglang-python` or
RLTRAIN_SGLANG_PYTHON names an interpreter that has it, an SGLang server. All get the same prompts and draw at
temperature 1 without truncation; the engine and SGLang also return every token's log-prob. Each repeat times one after
the other, so that other load on the machine meets all alike; continuous batching and SGLang take part in the first
--slow-repeats. Reported are medians, and the engine's ratio to the better of the two of transformers. Tokens after a
sequence's end are not counted. The last line is one JSON object.

Without --model a Qwen3 of the quickstart's size with random weights is made: there each token ends its sequence with a
probability near 1/15, so that lengths in the cases that stop there have a long tail.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Protocol

import torch
import transformers
from rollout_cases import CASES, MAX_CONTEXT_TOKENS, MAX_RUNNING, PROMPT_TOKENS, Case
from rollout_rivals import ContinuousBatching, Generate, SGLang

from rltrain.checkpoint.hf_reader import load_parameters
from rltrain.models import Architecture, read_architecture
from rltrain.reshard.copy_table import allocate_parameters
from rltrain.rollout.embedded import EmbeddedEngine
from rltrain.rollout.engine import SamplingParams
from rltrain.rollout.layout import engine_layout
from rltrain.rollout.sample import Sample
from rltrain.runtime.grid import Grid

DEFAULT_EOS = 0
SLOW = (ContinuousBatching.name, SGLang.name)


class Contestant(Protocol):
    name: str

    def begin(self, case: Case) -> None:
        """Set up what outlives a run, untimed."""
        ...

    def run(self, case: Case, prompts: torch.Tensor, seed: int) -> int:
        """Number of tokens generated."""
        ...

    def close(self) -> None: ...


def write_default_model(folder: Path) -> Path:
    config = transformers.Qwen3Config(
        vocab_size=15,
        hidden_size=64,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=DEFAULT_EOS,
        pad_token_id=DEFAULT_EOS,
    )
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder


class Embedded:
    """The embedded engine on the checkpoint at `path`."""

    name = "engine"

    def __init__(self, path: Path, architecture: Architecture) -> None:
        self._eos = architecture.eos_token_ids
        layout = engine_layout(architecture, Grid((0,)))
        parameters = allocate_parameters(layout, 0)
        load_parameters(path, layout, 0, parameters)
        self._engine = EmbeddedEngine(
            architecture,
            parameters,
            tp_group=None,
            max_running_requests=MAX_RUNNING,
            max_context_tokens=MAX_CONTEXT_TOKENS,
            dtype=torch.float32,
        )

    def begin(self, case: Case) -> None:
        pass

    def run(self, case: Case, prompts: torch.Tensor, seed: int) -> int:
        """Number of tokens generated."""
        requests = [Sample(i, tuple(row), seed=(seed << 32) + i) for i, row in enumerate(prompts.tolist())]
        sampling = SamplingParams(1.0, 1.0, 0, case.max_response_tokens, self._eos if case.stops else ())
        return sum(len(completion.tokens) for completion in self._engine.generate(requests, sampling))

    def close(self) -> None:
        pass


def draw_prompts(case: Case, architecture: Architecture) -> torch.Tensor:
    """[sequences, PROMPT_TOKENS] without end-of-sequence tokens."""
    generator = torch.Generator().manual_seed(0)
    eos = architecture.eos_token_ids
    allowed = torch.tensor([token for token in range(architecture.vocab_size) if token not in eos])
    shape = (case.num_sequences // case.samples_per_prompt, PROMPT_TOKENS)
    distinct = allowed[torch.randint(len(allowed), shape, generator=generator)]
    return distinct.repeat_interleave(case.samples_per_prompt, dim=0)


def tokens_per_s(contestant: Contestant, case: Case, prompts: torch.Tensor, seed: int) -> float:
    start = time.perf_counter()
    return contestant.run(case, prompts, seed) / (time.perf_counter() - start)


def measure(
    contestants: Sequence[Contestant], case: Case, prompts: torch.Tensor, repeats: int, slow_repeats: int
) -> dict[str, str | float]:
    samples: dict[str, list[float]] = {contestant.name: [] for contestant in contestants}
    for contestant in contestants:
        contestant.begin(case)
    for seed in range(repeats + 1):
        for contestant in contestants:
            if contestant.name in SLOW and seed > slow_repeats:
                continue
            speed = tokens_per_s(contestant, case, prompts, seed)
            if seed:  # the first round warms up
                samples[contestant.name].append(speed)
    medians = {name: statistics.median(speeds) for name, speeds in samples.items()}
    ratios = {
        "ratio_to_generate": medians["engine"] / medians["generate"],
        "ratio": medians["engine"] / max(medians["generate"], medians["continuous_batching"]),
    }
    return {
        "case": case.name,
        **{f"{name}_tokens_per_s": round(speed) for name, speed in medians.items()},
        **{name: round(ratio, 2) for name, ratio in ratios.items()},
    }


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="folder of a Hugging Face checkpoint")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--slow-repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--cases", default="", help="only those whose name contains this")
    parser.add_argument("--sglang-python", default=os.environ.get("RLTRAIN_SGLANG_PYTHON"))
    arguments = parser.parse_args()
    if min(arguments.repeats, arguments.slow_repeats) < 1:
        parser.error("--repeats and --slow-repeats are at least 1")
    if not any(arguments.cases in case.name for case in CASES):
        parser.error(f"--cases {arguments.cases!r} fits none of {[case.name for case in CASES]}")
    return arguments


def build(arguments: argparse.Namespace, folder: Path, architecture: Architecture, model: Path) -> list[Contestant]:
    reference = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    reference.generation_config.eos_token_id = None  # each case says what ends a sequence
    eos = architecture.eos_token_ids
    found: list[Contestant] = [
        Embedded(model, architecture),
        Generate(reference, eos),
        ContinuousBatching(reference, eos),
    ]
    if arguments.sglang_python:
        found.append(SGLang(arguments.sglang_python, model, folder / "sglang.log", MAX_CONTEXT_TOKENS, eos))
    return found


def main() -> None:
    arguments = parse_arguments()
    torch.set_num_threads(arguments.threads)
    transformers.logging.set_verbosity_error()
    results = []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        model = arguments.model or write_default_model(folder / "model")
        architecture = read_architecture(model)
        contestants = build(arguments, folder, architecture, model)
        for contestant in contestants:
            stack.callback(contestant.close)
        stack.enter_context(torch.inference_mode())
        for case in (case for case in CASES if arguments.cases in case.name):
            prompts = draw_prompts(case, architecture)
            result = measure(contestants, case, prompts, arguments.repeats, arguments.slow_repeats)
            results.append(result)
            speeds = "   ".join(f"{each.name} {result[f'{each.name}_tokens_per_s']:>7}" for each in contestants)
            print(f"{case.name:44s} {speeds}   {result['ratio']:>5}x", flush=True)
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    print(json.dumps({"threads": arguments.threads, "repeats": arguments.repeats, **versions, "cases": results}))


if __name__ == "__main__":
    main()
