"""Megatron takes torch's where it cannot import these."""

raise ImportError("Transformer Engine's optimizers are not in the stand-in")
