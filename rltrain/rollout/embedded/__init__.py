"""The in-process rollout engine: batched decoding over a slot KV cache, weights held in SGLang's layout."""

from rltrain.rollout.embedded.engine import EmbeddedEngine
from rltrain.rollout.embedded.parameters import allocate_parameters

__all__ = ["EmbeddedEngine", "allocate_parameters"]
