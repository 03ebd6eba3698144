"""Conversations per second of the embedded engine, with and without what it keeps between their turns.

    OMP_NUM_THREADS=1 python tools/benchmarks/conversations.py [--repeats 5] [--turns 6] [--answer-tokens 64]

Both are the same conversations, drawn greedily turn after turn by a Qwen3 with random weights: a prompt, then turns of
16 tokens, each but the last followed by an answer. Each repeat times one after the other, by processor time, so that
other load on the machine meets both alike. Reported are medians; the last line is one JSON object.
"""

import argparse
import json
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch
import transformers

from rltrain.checkpoint.hf_reader import load_parameters
from rltrain.models import read_architecture
from rltrain.reshard.copy_table import allocate_parameters
from rltrain.rollout.embedded import EmbeddedEngine
from rltrain.rollout.engine import SamplingParams
from rltrain.rollout.layout import engine_layout
from rltrain.rollout.sample import Sample
from rltrain.runtime.grid import Grid

NUM_CONVERSATIONS, PROMPT_TOKENS, TURN_TOKENS, VOCAB_SIZE = 16, 256, 16, 1000


def load_engine(max_context_tokens: int) -> EmbeddedEngine:
    config = transformers.Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=max_context_tokens,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
        architecture = read_architecture(Path(folder))
        layout = engine_layout(architecture, Grid((0,)))
        parameters = allocate_parameters(layout, 0)
        load_parameters(Path(folder), layout, 0, parameters)
    return EmbeddedEngine(
        architecture,
        parameters,
        tp_group=None,
        max_running_requests=NUM_CONVERSATIONS,
        max_context_tokens=max_context_tokens,
        dtype=torch.float32,
    )


def converse(engine: EmbeddedEngine, turns: int, answer_tokens: int, *, kept: bool) -> float:
    """Seconds of processor time for all conversations."""
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(VOCAB_SIZE, (NUM_CONVERSATIONS, PROMPT_TOKENS), generator=generator).tolist()
    answers = torch.randint(VOCAB_SIZE, (turns, answer_tokens), generator=generator).tolist()
    sampling = SamplingParams(0.0, 1.0, 0, turns * (TURN_TOKENS + answer_tokens), ())
    start = time.process_time()
    samples = [Sample(i, tuple(prompt), i, goes_on=kept, turn_limit=TURN_TOKENS) for i, prompt in enumerate(prompts)]
    samples = engine.generate(samples, sampling)
    for turn in range(1, turns):
        limit = len(samples[0].tokens) + answer_tokens + TURN_TOKENS
        samples = [sample.observed(answers[turn], turn_limit=limit) for sample in samples]
        samples = engine.generate([replace(sample, goes_on=kept and turn < turns - 1) for sample in samples], sampling)
    return time.process_time() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--answer-tokens", type=int, default=64)
    arguments = parser.parse_args()
    turns, answer_tokens = arguments.turns, arguments.answer_tokens
    engine = load_engine(PROMPT_TOKENS + turns * (TURN_TOKENS + answer_tokens))
    seconds: dict[bool, list[float]] = {True: [], False: []}
    for repeat in range(arguments.repeats + 1):
        for kept, measured in seconds.items():
            taken = converse(engine, turns, answer_tokens, kept=kept)
            if repeat:  # the first round warms up
                measured.append(taken)
    with_kept, without = (statistics.median(seconds[kept]) for kept in (True, False))
    result = {
        "conversations": NUM_CONVERSATIONS,
        "turns": turns,
        "seconds_with_kept": round(with_kept, 3),
        "seconds_without": round(without, 3),
        "ratio": round(statistics.median(b / a for a, b in zip(*seconds.values(), strict=True)), 2),
    }
    print(f"{turns} turns: {with_kept:.2f} s with what was kept, {without:.2f} s without: {result['ratio']} times")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
