"""The learning rate as a function of the optimizer step."""

import math

from rltrain.config import schema


def learning_rate(settings: schema.Optimizer, update: int, total_updates: int) -> float:
    """Rate for optimizer step number `update` (from 0) of `total_updates`.

    Rises linearly to `settings.lr`, reached with the last warm-up step; then constant, or falling towards
    `settings.min_lr`, which would be reached one step after the last.
    """
    if update < settings.warmup_steps:
        return settings.lr * (update + 1) / settings.warmup_steps
    if settings.decay == "constant":
        return settings.lr
    progress = min(1.0, (update - settings.warmup_steps) / max(1, total_updates - settings.warmup_steps))
    remaining = 1 - progress if settings.decay == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return settings.min_lr + (settings.lr - settings.min_lr) * remaining
