"""A reward that takes its time, for tools/benchmarks/orders.py."""

import time


def slow(prompt: str, response: str, label: str, *, seconds: float) -> float:
    """1 for a response of even length, after `seconds`."""
    time.sleep(seconds)
    return float(len(response) % 2 == 0)
