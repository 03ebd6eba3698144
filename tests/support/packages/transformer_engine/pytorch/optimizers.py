"""Raises ImportError, so that Megatron uses torch's optimizers."""

raise ImportError("Transformer Engine's optimizers are not in the stand-in")
