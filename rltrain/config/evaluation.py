"""The config section evaluation."""

from rltrain.config.section import NonNegativeInt, Section


class Evaluation(Section):
    """Greedy decoding of data.eval, scored by the reward function. Off when data.eval is absent."""

    interval: NonNegativeInt = 0
    """Steps between evaluations; 0 evaluates only before the first and after the last step."""
    stop_at: float | None = None
    """End training early once the mean score reaches this."""
