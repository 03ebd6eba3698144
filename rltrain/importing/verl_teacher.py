"""verl's on-policy distillation: a teacher that says how likely it finds what the actor drew."""

from rltrain.importing.conversions import NOTHING, count, ranks, real, truth
from rltrain.importing.translation import SourceKeys, Translation, UntranslatableError

PREFIX = "distillation."
LOSS = PREFIX + "distillation_loss."
TEACHERS = PREFIX + "teacher_models."
MAX_LOSS = 10.0
FORWARD = "forward_kl_topk"
DRAWN = ("kl", "k1")
"""Distances that are, as an advantage, log p - log q of the drawn token."""
SPEED = "of the server that the teacher is there, and a model that is evaluated here"


def set_teacher(keys: SourceKeys, out: Translation) -> None:
    """Behind everything else, since it takes the ranks behind the others'."""
    if not truth(keys.get(PREFIX + "enabled", False)):
        keys.under(PREFIX)
        return
    _set_models(keys, out)
    if truth(keys.get(LOSS + "use_task_rewards", True)):
        out.differs(LOSS + "use_task_rewards", True, "two losses, each with a clip of its own, are one loss here")
    else:
        out.set("algorithm", "distillation", LOSS + "use_task_rewards: rewards teach nothing")
        for path in [path for path in out.settings if path.startswith("advantages.")]:
            del out.settings[path]
    _set_distance(keys, out)
    own = str(keys.get(LOSS + "policy_loss_mode", "vanilla"))
    if own != "vanilla":
        out.differs(LOSS + "policy_loss_mode", own, "the policy loss is that of loss.policy")
    for end in ("low", "high"):
        out.set(f"loss.clip_{end}", real(keys.get(f"{LOSS}clip_ratio_{end}", 0.2)), f"{LOSS}clip_ratio_{end}")


def _set_distance(keys: SourceKeys, out: Translation) -> None:
    mode, by_gradient = str(keys.get(LOSS + "loss_mode", "k3")), truth(keys.get(LOSS + "use_policy_gradient", False))
    if mode == FORWARD and not by_gradient:
        _set_forward(keys, out)
        return
    out.set("teacher.where", "advantage", LOSS + "use_policy_gradient")
    if mode not in DRAWN or not by_gradient:
        reason = "k1 with use_policy_gradient is teacher.where advantage; of others docs/roles.md has what is there"
        out.differs(LOSS + "loss_mode", f"{mode}, use_policy_gradient {by_gradient}", reason)
    elif out.get("batch.mini_batches") * out.get("batch.epochs") > 1:
        reason = "by the weights of each mini-batch there, of the step's start here: the same for one mini-batch"
        out.differs(LOSS + "use_policy_gradient", True, reason)
    bound = keys.get(LOSS + "loss_max_clamp", MAX_LOSS)
    if bound not in NOTHING:
        out.set("teacher.max_distance", real(bound), f"{LOSS}loss_max_clamp, by default {MAX_LOSS}")
    for key in ("topk", "log_prob_min_clamp"):
        if LOSS + key in keys:
            out.leave(LOSS + key, keys.get(LOSS + key), "of losses over several tokens")


def _set_forward(keys: SourceKeys, out: Translation) -> None:
    """A term of the loss over the teacher's likeliest tokens, in the place of the policy loss with all its terms."""
    out.set("teacher.where", "loss", LOSS + "use_policy_gradient: off")
    out.set("teacher.kl", "forward", LOSS + "loss_mode")
    out.set("teacher.rest", False, LOSS + "loss_mode: the sum over topk tokens alone")
    out.set("teacher.top_k", count(keys.get(LOSS + "topk", 128)), LOSS + "topk, by default 128")
    bounds = (("loss_max_clamp", "max_distance", MAX_LOSS), ("log_prob_min_clamp", "min_logprob", -10.0))
    for key, path, default in bounds:
        bound = keys.get(LOSS + key, default)
        if bound not in NOTHING:
            out.set(f"teacher.{path}", real(bound), f"{LOSS}{key}, by default {default}")
    for key in ("use_chunked_topk", "chunked_topk_chunk_size"):
        if LOSS + key in keys:
            out.leave(LOSS + key, keys.get(LOSS + key), "of memory")
    for path in [path for path in out.settings if path.startswith(("loss.kl.", "loss.entropy_coef"))]:
        del out.settings[path]


def _set_models(keys: SourceKeys, out: Translation) -> None:
    given = keys.under(TEACHERS)
    names = {name.split(".")[0] for name in given if name.endswith(".model_path")}
    if not names:
        raise UntranslatableError(f"{TEACHERS}*.model_path: expected a teacher's checkpoint")
    nodes, per_node = count(keys.get(PREFIX + "nnodes", 0)), count(keys.get(PREFIX + "n_gpus_per_node", 8))
    tp = count(given.get(f"{min(names)}.inference.tensor_model_parallel_size", 2))
    out.place(
        ["teacher"], ranks(out.world_size, nodes * per_node), f"{PREFIX}nnodes x n_gpus_per_node, behind the others"
    )
    out.world_size += nodes * per_node
    out.set("teacher.parallel.tp", tp, TEACHERS + "*.inference.tensor_model_parallel_size")
    out.set("teacher.parallel.sequence_parallel", tp > 1, "with tensor parallelism")
    out.set("teacher.backend", "megatron", "a model that is cut by tensor parallelism")
    if len(names) == 1:
        out.set("teacher.path", str(given[f"{min(names)}.model_path"]), TEACHERS + "*.model_path")
    else:
        paths = {str(given.get(f"{name}.key", name)): str(given[f"{name}.model_path"]) for name in sorted(names)}
        out.set("teacher.path", paths, TEACHERS + "*.key, *.model_path")
        out.set("teacher.column", str(keys.get(PREFIX + "teacher_key", "data_source")), PREFIX + "teacher_key")
    for name, value in given.items():
        if not name.endswith((".model_path", ".key", ".tensor_model_parallel_size")):
            out.leave(TEACHERS + name, value, SPEED)
