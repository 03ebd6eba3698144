"""Rewards that take their time, for tools/benchmarks/orders.py."""

import time
import zlib


def slow(prompt: str, response: str, label: str, *, seconds: float) -> float:
    """1 for a response of even length, after `seconds`."""
    time.sleep(seconds)
    return float(len(response) % 2 == 0)


def uneven(prompt: str, response: str, label: str, *, seconds: float, share: float) -> float:
    """As `slow`, for this share of all prompts; others are scored at once."""
    is_slow = zlib.crc32(prompt.encode()) % 1000 < 1000 * share
    return slow(prompt, response, label, seconds=seconds if is_slow else 0.0)
