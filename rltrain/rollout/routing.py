"""Which experts an engine routed the tokens of a sample to."""

import base64
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True, eq=False)
class RecordedRouting:
    """Of the first tokens of a sample's context, in each layer that has experts: `experts` [tokens, layers, top_k] int8
    or int16.

    Each token's is of the forward pass that fed it for the first time: what follows it was drawn by that. Where keys
    and values are given up and computed anew, under other weights perhaps, what was recorded stays.
    """

    experts: np.ndarray

    def __len__(self) -> int:
        """Tokens."""
        return len(self.experts)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RecordedRouting) and np.array_equal(self.experts, other.experts)

    def __hash__(self) -> int:
        return hash(self.experts.shape)

    def followed_by(self, other: "RecordedRouting") -> "RecordedRouting":
        """Of the tokens of both."""
        return RecordedRouting(np.concatenate([self.experts, other.experts]))

    def first(self, num_tokens: int) -> "RecordedRouting":
        """Of no more than so many tokens."""
        return RecordedRouting(self.experts[:num_tokens])

    def record(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "shape": self.experts.shape,
            "type": self.experts.dtype.str,
            "experts": base64.b64encode(self.experts.tobytes()).decode(),
        }

    @classmethod
    def of_record(cls, record: dict[str, Any]) -> "RecordedRouting":
        experts = np.frombuffer(base64.b64decode(record["experts"]), dtype=record["type"])
        return cls(experts.reshape(record["shape"]))
