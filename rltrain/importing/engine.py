"""Which engine takes the place of a source's."""

from typing import Any

from rltrain.importing import model_file
from rltrain.importing.translation import Translation
from rltrain.planning.validation_models import SERVED_BY_SGLANG

SERVED_APART = ("sglang", "vllm")
FROM_REPLAY = "enable_return_routed_experts"
"""SGLang's argument that follows from model.router_replay."""


def choose_engine(out: Translation, named: str, ep: Any, arguments: dict[str, Any], origin: str) -> None:
    """SGLang in the place of SGLang and vLLM, unless experts are dealt out whole or the family is not one of SGLang's
    here, which the embedded engine alone does. `arguments` are SGLang's."""
    latent = model_file.has_latent_attention(out.get("model.path"))
    family = model_file.model_config(out.get("model.path")).get("model_type")
    own = family is not None and family not in SERVED_BY_SGLANG
    ep = ep if isinstance(ep, int) else 1
    if named in SERVED_APART and ep == 1 and not latent and not own:
        out.set("rollout.engine", "sglang", named if named == "sglang" else f"{named}: SGLang in its place")
        arguments = {name: value for name, value in arguments.items() if name != FROM_REPLAY}
        if arguments:
            out.set("rollout.sglang.args", arguments, origin)
        return
    reasons = {
        "it deals out whole experts": ep > 1,
        "it serves latent attention": latent,
        f"it serves {family}": own,
        "it is always there": True,
    }
    why = next(reason for reason, holds in reasons.items() if holds)
    out.set("rollout.engine", "embedded", f"{named}: rltrain's own in its place, as {why}")
    if ep > 1:
        tp = out.get("rollout.parallel.tp")
        if tp % ep:
            out.leave("expert parallel size", ep, f"no divisor of the engine's {tp} ranks; experts are cut over all")
        else:
            out.set("rollout.parallel.ep", ep, "expert parallel size")
    for name, value in arguments.items():
        out.leave(name, value, "an argument of SGLang's server")
