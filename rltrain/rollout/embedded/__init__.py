"""The in-process rollout engine: batched decoding over a slot KV cache, weights held in SGLang's layout."""

from rltrain.rollout.embedded.engine import EmbeddedEngine

__all__ = ["EmbeddedEngine"]
