"""The workloads of tools/benchmarks/rollout.py."""

from dataclasses import dataclass

PROMPT_TOKENS = 8
MAX_RUNNING = 256


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
MAX_CONTEXT_TOKENS = PROMPT_TOKENS + max(case.max_response_tokens for case in CASES)
