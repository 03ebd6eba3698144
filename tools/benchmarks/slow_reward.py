"""Slow reward functions for tools/benchmarks/orders.py."""

import time
import zlib


def slow(prompt: str, response: str, label: str, *, seconds: float) -> float:
    """Returns 1 for a response of even length, else 0, after `seconds`."""
    time.sleep(seconds)
    return float(len(response) % 2 == 0)


def uneven(prompt: str, response: str, label: str, *, seconds: float, share: float) -> float:
    """Scores as `slow` does, but delays only this share of all prompts."""
    is_slow = zlib.crc32(prompt.encode()) % 1000 < 1000 * share
    return slow(prompt, response, label, seconds=seconds if is_slow else 0.0)
