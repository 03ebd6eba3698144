"""The in-process rollout engine: batched decoding over a KV cache, with weights in SGLang's layout."""

from rltrain.rollout.embedded.engine import EmbeddedEngine

__all__ = ["EmbeddedEngine"]
