"""What algorithms have in common that learn from pairs of responses, of which one was preferred."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar

from rltrain.algorithms.algorithm import Algorithm

if TYPE_CHECKING:
    from rltrain.data.row_index import IndexFolder
    from rltrain.data.supervised import Preferences
    from rltrain.data.tokenizer import ModelLimits


class FromPairs(Algorithm):
    """Nothing is generated, also not for evaluations: data.eval has pairs too."""

    generates = False
    reads_responses = True
    from_pairs = True

    has_no_use_for: ClassVar[frozenset[str]] = frozenset()
    """Keys of the section preference that are for another algorithm."""

    def needs(self) -> dict[str, str]:
        return {"actor": f"algorithm {self.name}"}

    def usable_roles(self) -> frozenset[str]:
        return frozenset(self.needs())

    def problems(self) -> Iterator[str]:
        for section in ("loss", "advantages"):
            if section in self.config.model_fields_set:
                yield (
                    f"{section}: got a section for algorithms that learn from rewards with algorithm {self.name}; "
                    "expected none: the section preference is its own"
                )
        for key in sorted(self.has_no_use_for & self.config.preference.model_fields_set):
            value = getattr(self.config.preference, key)
            yield f"preference.{key}: got {value} with algorithm {self.name}, which has no use for it; remove the key"

    def samples_per_group(self) -> int:
        return 2

    def needs_actor_logprobs(self) -> bool:
        return False

    def temperature(self) -> float:
        return 1.0

    def longest_response(self) -> int | None:
        return self.config.data.max_response_tokens

    def training_data(self, indexes: "IndexFolder | None", model: "ModelLimits") -> "Preferences":
        from rltrain.data.supervised import Preferences

        return Preferences(self.config, indexes, model)
