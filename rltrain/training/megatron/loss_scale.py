"""Megatron's dynamic loss scale: what losses are multiplied by in fp16, so that small gradients do not become zero."""

import json
from typing import Any

from megatron.core.optimizer import MegatronOptimizer
from megatron.core.transformer.transformer_config import TransformerConfig

from rltrain.config import schema
from rltrain.training.backend import LOSS_SCALE, OVERFLOWED


def scaler_settings(settings: schema.LossScale) -> dict[str, Any]:
    """What Megatron's OptimizerConfig calls them."""
    return {
        "initial_loss_scale": settings.initial,
        "min_loss_scale": settings.minimum,
        "loss_scale_window": settings.window,
        "hysteresis": settings.hysteresis,
    }


class LossScale:
    """Of a model's optimizer. Of one that needs none, since its weights are not fp16, it says nothing.

    The optimizer divides gradients by it before it looks at them, and halves or doubles it: after gradients that
    overflowed, or a number of steps in which none did. All ranks of the role have the same.
    """

    def __init__(self, optimizer: MegatronOptimizer, config: TransformerConfig) -> None:
        self._scaler: Any = getattr(optimizer, "grad_scaler", None)
        if self._scaler is not None:
            config.grad_scale_func = optimizer.scale_loss

    @property
    def value(self) -> float:
        return 1.0 if self._scaler is None else float(self._scaler.scale)

    def can_fall(self) -> bool:
        """Whether gradients that overflow may be the scale's doing."""
        return self._scaler is not None and self.value > float(self._scaler.min_scale)

    def metrics(self, *, overflowed: bool) -> dict[str, float]:
        if self._scaler is None:
            return {}
        return {LOSS_SCALE: self.value, OVERFLOWED: float(overflowed)}

    def state(self) -> str:
        """For `load`; empty where there is none."""
        if self._scaler is None:
            return ""
        return json.dumps([self.value, self._scaler._growth_tracker, self._scaler._hysteresis_tracker])

    def load(self, state: str) -> None:
        """Go on from a `state`, where the run that saved it had one too."""
        if self._scaler is None or not state:
            return
        scale, growth, hysteresis = json.loads(state)
        self._scaler._scale.fill_(scale)
        self._scaler._growth_tracker, self._scaler._hysteresis_tracker = growth, hysteresis
