"""slime's on-policy distillation: a teacher that Megatron evaluates, or that a server of the same script serves."""

from rltrain.importing.conversions import count, ranks, real
from rltrain.importing.slime_commands import CUT, MODEL, SERVER
from rltrain.importing.translation import SourceKeys, Translation

REWARD = "slime.rollout.on_policy_distillation.reward_func"


def set_teacher(keys: SourceKeys, out: Translation, actor: str) -> None:
    """`actor` are the actor's ranks. A teacher that is served has ranks of its own here, behind all others."""
    model, tp = keys.get(MODEL), keys.get(CUT, 1)
    if not keys.get("use-opd"):
        return
    kind = keys.get("opd-type", "sglang")
    if kind == "sglang" and model is None:
        out.differs("opd-type", kind, "which weights the server at rm-url has is not told: docs/roles.md")
        return
    out.set("teacher.coef", real(keys.get("opd-kl-coef", 1.0)), "opd-kl-coef")
    if kind == "sglang":
        out.set("teacher.path", str(model), f"the model that {SERVER} serves")
        out.set("teacher.parallel.tp", count(tp), f"as {SERVER} has it")
        out.place(["teacher"], ranks(out.world_size, count(tp)), f"{SERVER}: behind the others")
        out.world_size += count(tp)
        keys.get("rm-url")
        return
    out.set("teacher.path", str(keys.get("opd-teacher-load")), "opd-teacher-load: in Hugging Face's format here")
    out.place(["teacher"], actor, "use-opd")
