"""Layers that predict further tokens (multi-token prediction), trained as their source trains them or left alone."""

from typing import Literal

from rltrain.importing.conversions import real, truth
from rltrain.importing.translation import SourceKeys, Translation

DRAFTING = "of layers that draft alone"
APART = "what they learn stays in them there, and here they stay as the checkpoint has them (docs/families.md)"
WEIGHED = (
    "model.mtp: here each sample's tokens have equal parts of what the sample counts for in the main loss; the source "
    "takes the mean of every micro-batch's tokens"
)
SAVED = "model.mtp: engines here draft with no such layer; what it learns is in what is saved and exported"
SHIFTED = (
    "model.mtp: here the loss is of the tokens of responses; slime's mask of it stands one token earlier, so that it "
    "has the last token of a prompt, and not that of a response"
)
Trained = Literal["layer", "head", "model"]


def set_slimes_prediction_layers(keys: SourceKeys, out: Translation) -> None:
    """slime detaches the last hidden states, the embedding and the head."""
    name = "enable-mtp-training"
    if truth(keys.get(name, False)):
        _set(out, name, real(keys.get("mtp-loss-scaling-factor", 0.2)), "layer")
        out.notes.append(SHIFTED)
        layers = keys.get("mtp-num-layers", 1)
        if str(layers) != "1":
            out.differs("mtp-num-layers", layers, "here one such layer is trained, and no more")


def set_verls_prediction_layers(keys: SourceKeys, out: Translation, prefix: str, megatron: bool) -> None:
    """verl detaches the last hidden states and the embedding with `detach_encoder`; the head learns with the Megatron
    that it pins, core 0.18. `prefix` is that of its model."""
    own = prefix + "mtp."
    if megatron and truth(keys.get(own + "enable", False)) and truth(keys.get(own + "enable_train", False)):
        detached = truth(keys.get(own + "detach_encoder", False))
        factor = real(keys.get(own + "mtp_loss_scaling_factor", 0.1))
        _set(out, own + "enable_train", factor, "head" if detached else "model")
    for name, value in keys.under(own).items():
        if value not in (None, False):
            out.leave(own + name, value, DRAFTING)


def leave_skyrls_prediction_layers(keys: SourceKeys, out: Translation, key: str, prefix: str) -> None:
    """SkyRL's gradients of them have a norm of their own, so that the others learn as without them: a note, as they
    draft alone. `key` turns their training on; what begins with `prefix` says how."""
    if truth(keys.get(key, False)):
        out.notes.append(f"{key}: layers that predict further tokens draft alone; {APART}")
        for name, value in keys.under(prefix).items():
            out.leave(prefix + name, value, DRAFTING)


def _set(out: Translation, origin: str, coef: float, trains: Trained) -> None:
    out.set("model.mtp.coef", coef, origin)
    out.set("model.mtp.trains", trains, origin)
    out.notes += [WEIGHED, SAVED]
