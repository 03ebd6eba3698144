"""Names of what a model has come to on its way from tokens to logits, by which two of them can be compared."""

EMBEDDING, FINAL_NORM, LOGITS, LOGPROBS = "embedding", "final norm", "logits", "log-probs"


def stages_of_layer(index: int) -> tuple[str, str]:
    """The residual stream behind its attention, and behind its MLP or experts."""
    return f"layer {index} attention", f"layer {index} mlp"
