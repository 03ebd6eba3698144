"""Tokens per second of the embedded engine and of transformers' `generate`, side by side on one model.

    python tools/benchmarks/rollout.py [--model DIR] [--repeats 9] [--threads 1]

Both get the same prompts and draw at temperature 1 without truncation; the engine also returns every token's log-prob.
Each repeat times the engine and then `generate`, so that other load on the machine meets both alike; reported are
medians. Tokens after a sequence's end are not counted. The last line is one JSON object.

Without --model a Qwen3 of the quickstart's size with random weights is made: there each token ends its sequence with a
probability near 1/15, so that lengths in the cases that stop there have a long tail.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers

from rltrain.checkpoint.hf import load_parameters
from rltrain.cluster.grid import Grid
from rltrain.reshard.families import read_architecture
from rltrain.rollout.embedded import EmbeddedEngine, allocate_parameters
from rltrain.rollout.engine import Request, SamplingParams
from rltrain.rollout.layout import engine_layout

PROMPT_TOKENS = 8
MAX_RUNNING = 256
DEFAULT_EOS = 0


@dataclass(frozen=True)
class Case:
    """`samples_per_prompt` neighbours share a prompt; `stops` lets sequences end at the end-of-sequence tokens."""

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


class Bench:
    """Both generators on the checkpoint at `path`."""

    def __init__(self, path: Path) -> None:
        self.architecture = read_architecture(path)
        self.eos = self.architecture.eos_token_ids
        self.model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        self.model.generation_config.eos_token_id = None  # each case says what ends a sequence
        layout = engine_layout(self.architecture, Grid((0,)))
        parameters = allocate_parameters(layout, 0, dtype=torch.float32)
        load_parameters(path, layout, 0, parameters)
        self.engine = EmbeddedEngine(
            self.architecture,
            parameters,
            tp_group=None,
            max_running_requests=MAX_RUNNING,
            max_context_tokens=PROMPT_TOKENS + max(case.max_response_tokens for case in CASES),
            dtype=torch.float32,
        )

    def prompts(self, case: Case) -> torch.Tensor:
        """[sequences, PROMPT_TOKENS] without end-of-sequence tokens."""
        generator = torch.Generator().manual_seed(0)
        allowed = torch.tensor([t for t in range(self.architecture.vocab_size) if t not in self.eos])
        shape = (case.num_sequences // case.samples_per_prompt, PROMPT_TOKENS)
        distinct = allowed[torch.randint(len(allowed), shape, generator=generator)]
        return distinct.repeat_interleave(case.samples_per_prompt, dim=0)

    def run_engine(self, case: Case, prompts: torch.Tensor, seed: int) -> int:
        """Number of tokens generated."""
        rows = prompts.tolist()
        requests = [Request(i, tuple(row), seed=(seed << 32) + i) for i, row in enumerate(rows)]
        sampling = SamplingParams(1.0, 1.0, 0, case.max_response_tokens, self.eos if case.stops else ())
        return sum(len(completion.tokens) for completion in self.engine.generate(requests, sampling))

    def run_transformers(self, case: Case, prompts: torch.Tensor, seed: int) -> int:
        """Number of tokens generated, at most as many sequences at once as the engine runs."""
        torch.manual_seed(seed)
        return sum(self._generate_batch(case, batch) for batch in prompts.split(MAX_RUNNING))

    def _generate_batch(self, case: Case, prompts: torch.Tensor) -> int:
        sequences = self.model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            max_new_tokens=case.max_response_tokens,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            eos_token_id=list(self.eos) if case.stops else None,
            pad_token_id=self.eos[0] if self.eos else 0,
        )
        responses = sequences[:, prompts.shape[1] :]
        if not case.stops:
            return responses.numel()
        ended = torch.isin(responses, torch.tensor(self.eos)).cumsum(-1)
        return int((ended.cumsum(-1) <= 1).sum())


def tokens_per_s(run: Callable[[Case, torch.Tensor, int], int], case: Case, prompts: torch.Tensor, seed: int) -> float:
    start = time.perf_counter()
    return run(case, prompts, seed) / (time.perf_counter() - start)


def measure(bench: Bench, case: Case, repeats: int) -> dict[str, str | float]:
    prompts = bench.prompts(case)
    runs = {"engine": bench.run_engine, "transformers": bench.run_transformers}
    samples: dict[str, list[float]] = {name: [] for name in runs}
    for seed in range(repeats + 1):
        for name, run in runs.items():
            speed = tokens_per_s(run, case, prompts, seed)
            if seed:  # the first round warms up
                samples[name].append(speed)
    engine, reference = (statistics.median(samples[name]) for name in runs)
    return {
        "case": case.name,
        "engine_tokens_per_s": round(engine),
        "transformers_tokens_per_s": round(reference),
        "ratio": round(engine / reference, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="folder of a Hugging Face checkpoint")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    transformers.logging.set_verbosity_error()
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(arguments.model or write_default_model(Path(folder)))
    results = []
    with torch.inference_mode():
        for case in CASES:
            results.append(measure(bench, case, arguments.repeats))
            result = results[-1]
            print(
                f"{result['case']:44s} engine {result['engine_tokens_per_s']:>8} tokens/s   "
                f"transformers {result['transformers_tokens_per_s']:>8}   {result['ratio']:>5}x",
                flush=True,
            )
    print(
        json.dumps(
            {
                "threads": arguments.threads,
                "repeats": arguments.repeats,
                "torch": torch.__version__,
                "transformers": transformers.__version__,
                "cases": results,
            }
        )
    )


if __name__ == "__main__":
    main()
