"""Measures tokens per second of the embedded engine and of transformers' `generate`, side by side on one model.

    OMP_NUM_THREADS=1 python tools/benchmarks/rollout.py [--model DIR] [--repeats 9] [--threads 1] [--cases TEXT]

Both get the same prompts and sample at temperature 1 without truncation. The engine also returns every token's
log-prob. Each repeat times them in turn, so other load on the machine affects both alike. Medians are reported, and the
engine's ratio to `generate`. Tokens after a sequence's end are not counted. The last line is one JSON object.

Without --model a Qwen3 of the quickstart's size with random weights is made. Each of its tokens ends the sequence with
a probability near 1/15. So lengths have a long tail in the cases with stop tokens.
"""

import argparse
import json
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from rltrain.checkpoint.hf_reader import load_parameters
from rltrain.models import Architecture, read_architecture
from rltrain.reshard.copy_table import allocate_parameters
from rltrain.rollout.embedded import EmbeddedEngine
from rltrain.rollout.engine import SamplingParams
from rltrain.rollout.layout import engine_layout
from rltrain.rollout.sample import Sample
from rltrain.runtime.grid import Grid

DEFAULT_EOS = 0
PROMPT_TOKENS = 8
MAX_RUNNING = 256


@dataclass(frozen=True)
class Case:
    """A case. `samples_per_prompt` neighbours share a prompt. With `stops` sequences end at end-of-sequence tokens."""

    name: str
    num_sequences: int
    max_response_tokens: int
    samples_per_prompt: int = 1
    stops: bool = False


CASES = (
    Case("64 sequences of 26 tokens", 64, 26),
    Case("256 sequences of 26 tokens", 256, 26),
    Case("256 sequences of 26 tokens, 16 per prompt", 256, 26, samples_per_prompt=16),
    Case("256 sequences of long-tailed length", 256, 96, stops=True),
    Case("1024 sequences of long-tailed length", 1024, 96, stops=True),
)
MAX_CONTEXT_TOKENS = PROMPT_TOKENS + max(case.max_response_tokens for case in CASES)


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

    def run(self, case: Case, prompts: torch.Tensor, seed: int) -> int:
        """Returns the number of generated tokens."""
        requests = [Sample(i, tuple(row), seed=(seed << 32) + i) for i, row in enumerate(prompts.tolist())]
        sampling = SamplingParams(1.0, 1.0, 0, case.max_response_tokens, self._eos if case.stops else ())
        return sum(len(completion.tokens) for completion in self._engine.generate(requests, sampling))


class Generate:
    """transformers' `generate`, with at most as many parallel sequences as the engine."""

    name = "generate"

    def __init__(self, path: Path, architecture: Architecture) -> None:
        self._eos = architecture.eos_token_ids
        self._model: Any = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        self._model.generation_config.eos_token_id = None  # each case says what ends a sequence

    def run(self, case: Case, prompts: Tensor, seed: int) -> int:
        """Returns the number of generated tokens."""
        torch.manual_seed(seed)
        return sum(self._generate(case, batch) for batch in prompts.split(MAX_RUNNING))

    def _generate(self, case: Case, prompts: Tensor) -> int:
        sequences = self._model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            max_new_tokens=case.max_response_tokens,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            eos_token_id=list(self._eos) if case.stops else None,
            pad_token_id=self._eos[0] if self._eos else 0,
        )
        responses = sequences[:, prompts.shape[1] :]
        if not case.stops:
            return responses.numel()
        ended = torch.isin(responses, torch.tensor(self._eos)).cumsum(-1)
        return int((ended.cumsum(-1) <= 1).sum())


def draw_prompts(case: Case, architecture: Architecture) -> torch.Tensor:
    """Returns prompts without end-of-sequence tokens, [sequences, PROMPT_TOKENS]."""
    generator = torch.Generator().manual_seed(0)
    eos = architecture.eos_token_ids
    allowed = torch.tensor([token for token in range(architecture.vocab_size) if token not in eos])
    shape = (case.num_sequences // case.samples_per_prompt, PROMPT_TOKENS)
    distinct = allowed[torch.randint(len(allowed), shape, generator=generator)]
    return distinct.repeat_interleave(case.samples_per_prompt, dim=0)


def measure(engine: Embedded, rival: Generate, case: Case, prompts: Tensor, repeats: int) -> dict[str, str | float]:
    samples: dict[str, list[float]] = {engine.name: [], rival.name: []}
    for seed in range(repeats + 1):
        for contestant in (engine, rival):
            start = time.perf_counter()
            speed = contestant.run(case, prompts, seed) / (time.perf_counter() - start)
            if seed:  # the first round warms up
                samples[contestant.name].append(speed)
    medians = {name: statistics.median(speeds) for name, speeds in samples.items()}
    return {
        "case": case.name,
        **{f"{name}_tokens_per_s": round(speed) for name, speed in medians.items()},
        "ratio": round(medians[engine.name] / medians[rival.name], 2),
    }


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="folder of a Hugging Face checkpoint")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--cases", default="", help="run only cases with this text in their name")
    arguments = parser.parse_args()
    if arguments.repeats < 1:
        parser.error("--repeats must be at least 1")
    if not any(arguments.cases in case.name for case in CASES):
        parser.error(f"--cases {arguments.cases!r} fits none of {[case.name for case in CASES]}")
    return arguments


@torch.inference_mode()
def main() -> None:
    arguments = parse_arguments()
    torch.set_num_threads(arguments.threads)
    transformers.logging.set_verbosity_error()
    results = []
    with tempfile.TemporaryDirectory() as folder:
        model = arguments.model or write_default_model(Path(folder, "model"))
        architecture = read_architecture(model)
        engine, rival = Embedded(model, architecture), Generate(model, architecture)
        for case in (case for case in CASES if arguments.cases in case.name):
            results.append(measure(engine, rival, case, draw_prompts(case, architecture), arguments.repeats))
            print("   ".join(f"{name} {value}" for name, value in results[-1].items()), flush=True)
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    print(json.dumps({"threads": arguments.threads, "repeats": arguments.repeats, **versions, "cases": results}))


if __name__ == "__main__":
    main()
