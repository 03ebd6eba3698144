"""The tokens that models are compared on."""

from pathlib import Path

import torch

from rltrain.errors import DataError
from rltrain.tools.parity.states import Samples

SHORTEST = 2
"""A log-prob is of a token that follows another."""


def random_samples(count: int, length: int, vocab_size: int, seed: int = 0) -> Samples:
    generator = torch.Generator().manual_seed(seed)
    return tuple(tuple(torch.randint(vocab_size, (length,), generator=generator).tolist()) for _ in range(count))


def read_samples(file: Path, checkpoint: Path, limit: int) -> Samples:
    """One for each line of a file of texts, of at most `limit` tokens. DataError where there is none."""
    from transformers import AutoTokenizer

    try:
        lines = [line for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    except OSError as error:
        raise DataError(
            f"--texts {file}: cannot read it: {error.strerror}; expected a file of one text per line"
        ) from error
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    encoded = (tuple(tokenizer(line)["input_ids"][:limit]) for line in lines)
    samples = tuple(ids for ids in encoded if len(ids) >= SHORTEST)
    if not samples:
        raise DataError(f"--texts {file}: got no text of {SHORTEST} tokens or more; expected one text per line")
    return samples
