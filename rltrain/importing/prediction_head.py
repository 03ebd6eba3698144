"""Layers that predict further tokens (multi-token prediction), which stay here as the checkpoint has them."""

from rltrain.importing.conversions import real, truth
from rltrain.importing.translation import SourceKeys, Translation

APART = "what they learn stays in them there, and here they stay as the checkpoint has them (docs/families.md)"
OF_NORM = "their gradients count in the norm that all gradients are clipped by, and here they are not trained"


def leave_prediction_layers(
    keys: SourceKeys, out: Translation, key: str, prefix: str, clipped_apart: bool = False
) -> None:
    """Of layers whose loss reaches no other parameter. `key` turns their training on; what begins with `prefix` says
    how. `clipped_apart`: their gradients have a norm of their own, so that the others learn as without them: a note,
    as they draft alone."""
    if not truth(keys.get(key, False)):
        return
    if clipped_apart:
        out.notes.append(f"{key}: layers that predict further tokens draft alone; {APART}")
    else:
        out.differs(key, True, OF_NORM)
    for name, value in keys.under(prefix).items():
        out.leave(prefix + name, value, "of layers that draft alone")


def leave_verls_prediction_layers(keys: SourceKeys, out: Translation, prefix: str) -> None:
    """verl detaches the rest of the model from their loss only with `detach_encoder`; `prefix` is that of its model."""
    own = prefix + "mtp."
    trained = truth(keys.get(own + "enable", False)) and truth(keys.get(own + "enable_train", False))
    factor = real(keys.get(own + "mtp_loss_scaling_factor", 0.1))
    if trained and factor and not truth(keys.get(own + "detach_encoder", False)):
        reason = "their loss reaches the whole model but with detach_encoder, and here they are not trained"
        out.differs(own + "enable_train", True, reason)
    elif trained:
        leave_prediction_layers(keys, out, own + "enable_train", own)
    for name, value in keys.under(own).items():
        if not trained and value not in (None, False):
            out.leave(own + name, value, "of layers that draft alone")
