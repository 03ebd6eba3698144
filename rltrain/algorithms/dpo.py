"""DPO: the actor comes to prefer what was preferred, as far as that takes it away from the reference."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rltrain.algorithms.from_pairs import FromPairs

if TYPE_CHECKING:
    from rltrain.algorithms.losses import LossFunction


class Dpo(FromPairs):
    name = "dpo"
    has_no_use_for = frozenset({"center_coef"})

    def needs(self) -> dict[str, str]:
        return {**super().needs(), "reference": f"algorithm {self.name}"}

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        preference = self.config.preference
        if preference.loss == "ipo" and preference.label_smoothing:
            yield (
                f"preference.label_smoothing: got {preference.label_smoothing} with preference.loss ipo, which is "
                "of no probabilities; expected 0, or preference.loss: sigmoid"
            )

    def loss_function(self) -> "LossFunction":
        from rltrain.algorithms.preference import direct_preference_loss

        return direct_preference_loss(self.config.preference)
