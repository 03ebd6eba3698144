"""Rules for keys of several trainers: engines, adapters, sharding, Megatron's optimizer, INT4, multi-token prediction
and models that see."""

import json
import re
from collections.abc import Mapping
from typing import Any, Literal

from rltrain.import_config import translation
from rltrain.import_config.translation import (
    NOTHING,
    SourceKeys,
    Translation,
    UntranslatableError,
    count,
    cut_fully_sharded,
    real,
    truth,
)
from rltrain.models.registry import BIASED_ROUTERS, SERVED_BY_SGLANG, UNTOLD_FAMILIES

# Layers for multi-token prediction. They are trained as in the source, or left alone.

DRAFTING = "layers for speculative decoding only"
APART = "SkyRL trains them without effect on other layers, and here they stay unchanged (docs/families.md)"
WEIGHED = (
    "model.mtp: the tokens of a sample share the sample's weight in the main loss equally here. The source takes the "
    "mean over the tokens of a micro-batch"
)
SAVED = "model.mtp: engines here do not use the layer for drafting. The trained layer is in checkpoints and exports"
SHIFTED = (
    "model.mtp: the loss covers the tokens of responses here. slime's mask is one token earlier: it includes the last "
    "token of the prompt, and not that of the response"
)
Trained = Literal["layer", "head", "model"]


def set_slimes_prediction_layers(keys: SourceKeys, out: Translation) -> None:
    """Sets multi-token prediction of slime. It detaches the last hidden states, the embedding and the head."""
    name = "enable-mtp-training"
    if keys.truth(name, False):
        _set(out, name, keys.real("mtp-loss-scaling-factor", 0.2), "layer")
        out.notes.append(SHIFTED)
        layers = keys.get("mtp-num-layers", 1)
        if str(layers) != "1":
            out.differs("mtp-num-layers", layers, "only one such layer is trained here")


def set_verls_prediction_layers(keys: SourceKeys, out: Translation, prefix: str, megatron: bool) -> None:
    """Sets multi-token prediction of verl. `prefix` is the prefix of its model keys.

    With `detach_encoder` it detaches the last hidden states and the embedding. In its version of Megatron, core 0.18,
    the head still learns.
    """
    own = prefix + "mtp."
    if megatron and keys.truth(own + "enable", False) and keys.truth(own + "enable_train", False):
        detached = keys.truth(own + "detach_encoder", False)
        factor = keys.real(own + "mtp_loss_scaling_factor", 0.1)
        _set(out, own + "enable_train", factor, "head" if detached else "model")
    for name, value in keys.under(own).items():
        if value not in (None, False):
            out.leave(own + name, value, DRAFTING)


def leave_skyrls_prediction_layers(keys: SourceKeys, out: Translation, key: str, prefix: str) -> None:
    """Adds a note about SkyRL's multi-token prediction. The layers stay untrained.

    SkyRL clips their gradients separately, so all other parameters learn as without them. `key` enables their training.
    Keys with `prefix` are its settings.
    """
    if keys.truth(key, False):
        out.notes.append(f"{key}: prediction layers are for speculative decoding only; {APART}")
        for name, value in keys.under(prefix).items():
            out.leave(prefix + name, value, DRAFTING)


def _set(out: Translation, origin: str, coef: float, trains: Trained) -> None:
    out.set("model.mtp.coef", coef, origin)
    out.set("model.mtp.trains", trains, origin)
    out.notes += [WEIGHED, SAVED]


# The engine replacing the engine of a source.

SERVED_APART = ("sglang", "vllm")
FROM_REPLAY = "enable_return_routed_experts"
"""Argument of SGLang's server that follows from model.router_replay."""


def choose_engine(out: Translation, named: str, ep: Any, arguments: dict[str, Any], origin: str) -> None:
    """Selects SGLang for SGLang and vLLM. `arguments` are arguments of SGLang's server.

    The embedded engine is used for expert parallelism, and for families not served by SGLang here.
    """
    family = translation.model_config(out.get("model.path")).get("model_type")
    own = family is not None and family not in SERVED_BY_SGLANG
    ep = ep if isinstance(ep, int) else 1
    if named in SERVED_APART and ep == 1 and not own:
        out.set("rollout.engine", "sglang", named if named == "sglang" else f"{named}: SGLang instead")
        arguments = {name: value for name, value in arguments.items() if name != FROM_REPLAY}
        if arguments:
            out.set("rollout.sglang.args", arguments, origin)
        return
    reasons = {
        "it supports expert parallelism": ep > 1,
        f"it supports {family}": own,
        "it is always available": True,
    }
    why = next(reason for reason, holds in reasons.items() if holds)
    out.set("rollout.engine", "embedded", f"{named}: rltrain's engine instead, as {why}")
    if ep > 1:
        tp = out.get("rollout.parallel.tp")
        if tp % ep:
            out.leave("expert parallel size", ep, f"not a divisor of the engine's {tp} ranks; experts are split")
        else:
            out.set("rollout.parallel.ep", ep, "expert parallel size")
    for name, value in arguments.items():
        out.leave(name, value, "an argument of SGLang's server")


# Low-rank adapters. The keys of verl and SkyRL use the names of PEFT or Megatron-Bridge.

MEGATRON_TARGETS = {
    "linear_qkv": ("q_proj", "k_proj", "v_proj"),
    "linear_proj": ("o_proj",),
    "linear_fc1": ("gate_proj", "up_proj"),
    "linear_fc2": ("down_proj",),
}
ALL = ("all-linear", "all")
KNOWN = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
SHARED = (
    "Megatron-Bridge shares one A among the adapters of q, k, v, and of gate, up. Here each has its own, as with PEFT"
)


def set_adapters(
    given: Mapping[str, Any], out: Translation, prefix: str, alpha: float, megatron: bool, section: str = "model.lora"
) -> None:
    """Sets the adapters in `section` of the config. Sets nothing if the source's rank is 0 or missing.

    `given` has the source's values of rank, alpha, targets, exclude, dropout, init, type and path (files of PEFT
    adapters). Values may be missing. `alpha` is the source's default for alpha. `prefix` is the prefix of the source's
    keys in messages.

    With `megatron` the source trains with Megatron. Some of its adapters then share a matrix A, unless their type is
    canonical_lora, and a note in `out` says so.

    Values without a counterpart are listed in `out` as differences. Raises UntranslatableError if the rank is no whole
    number, or if alpha or dropout is no number.
    """
    rank = given.get("rank")
    if rank in NOTHING or not count(rank):
        return
    out.set(f"{section}.rank", count(rank), prefix + "rank")
    out.set(f"{section}.alpha", real(given["alpha"] if given.get("alpha") not in NOTHING else alpha), prefix + "alpha")
    _set_targets(given, out, prefix, section)
    dropout = given.get("dropout")
    if dropout not in NOTHING and real(dropout):
        out.set(f"{section}.dropout", real(dropout), prefix + "dropout")
    if given.get("init") not in (*NOTHING, "kaiming"):
        out.differs(prefix + "init_method", given["init"], "A is initialised uniformly here, as by kaiming and PEFT")
    if given.get("type") not in (*NOTHING, "lora", "canonical_lora"):
        out.differs(prefix + "type", given["type"], "adapters here are of type lora")
    if given.get("path") not in NOTHING:
        out.set(f"{section}.path", str(given["path"]), prefix + "path: files of PEFT")
    if megatron and given.get("type") != "canonical_lora":
        out.notes.append(SHARED)


def _set_targets(given: Mapping[str, Any], out: Translation, prefix: str, section: str) -> None:
    targets = given.get("targets")
    excluded = given.get("exclude")
    if excluded not in (*NOTHING, []) and "visual" in str(excluded):
        out.leave(prefix.removesuffix("lora.") + "exclude_modules", excluded, "a tower never has adapters")
    elif excluded not in (*NOTHING, []):
        out.differs(prefix + "exclude_modules", excluded, f"list the remaining ones as {section}.targets")
    if targets in NOTHING or targets in ALL or targets in ([], *([one] for one in ALL)):
        return
    names = [targets] if isinstance(targets, str) else [*targets]
    found = [one for name in names for one in MEGATRON_TARGETS.get(str(name), (str(name),))]
    if set(found) - set(KNOWN):
        out.differs(prefix + "target_modules", targets, f"adapters are possible for {', '.join(KNOWN)}")
    elif set(found) != set(KNOWN):
        out.set(f"{section}.targets", found, prefix + "target_modules")


# Training for INT4 by fake quantization.

WEIGHTS = (
    "model.fake_quantization: trainer and engines start from bfloat16 weights, so model.path must be such a checkpoint "
    "and not the INT4 one of the source's engines. Engines hold the rounded weights in model.dtype. They generate as "
    "with INT4, but save no memory"
)


# Fully sharded training. It becomes `backend: fsdp` if that backend supports all settings.

NAMES = ("dp", "fsdp", "fsdp1", "fsdp2")
"""Names of torch's FSDP in verl and SkyRL."""
EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts")


def set_fully_sharded(keys: SourceKeys, out: Translation, key: str, name: str, slices: int, section: str) -> None:
    """Sets the sharding of the actor and of its reference.

    `slices` ranks share a sequence. `section` is the prefix of FSDP's keys. `backend: fsdp` does not support adapters,
    split sequences or router replay with experts, nor split sequences with gated delta nets. Megatron is used for
    these.
    """
    own = {name: keys.get(section + name) for name in ("fsdp_size", "reshard_after_forward")}
    out.set("actor.parallel.cp", slices, "sequences are split by heads")
    reason = _refused(out, name, slices)
    if reason:
        cut_fully_sharded(out, key, name)
        out.notes.append(f"{key} {name}: Megatron trains, as backend fsdp does not support {reason}")
        return
    out.set("actor.backend", "fsdp", f"{key} {name}")
    size, ranks = own["fsdp_size"], out.num_ranks("actor")
    if size not in NOTHING and 0 < count(size) < ranks and ranks % count(size) == 0:
        out.set("actor.fsdp.replicas", ranks // count(size), f"{section}fsdp_size {size} of {ranks} ranks")
    if own["reshard_after_forward"] not in NOTHING and not truth(own["reshard_after_forward"]):
        out.set("actor.fsdp.reshard_after_forward", False, section + "reshard_after_forward")


def _refused(out: Translation, name: str, slices: int) -> str | None:
    """Returns the setting not supported by `backend: fsdp`, or None if none is known."""
    if name not in NAMES:
        return f"the strategy {name}"
    replicas = out.num_ranks("actor") // slices
    prompts = out.get("batch.prompts_per_step") // out.get("batch.mini_batches")
    if replicas > prompts:
        return f"more ranks ({replicas}) than a mini-batch has prompts ({prompts})"
    model = translation.language_model(out.get("model.path"))
    if model.get("topk_method") == "noaux_tc" or model.get("model_type") in BIASED_ROUTERS:
        return "experts selected by a bias"
    if model.get("model_type") in UNTOLD_FAMILIES:
        return "this model family: its attention in transformers does not separate packed samples"
    if slices > 1 and translation.has_delta_nets(out.get("model.path")):
        return "split sequences with gated delta nets"
    asked = {
        "adapters": "model.lora.rank" in out.settings,
        "split sequences": slices > 1,
        "router replay": out.get("model.router_replay") not in ("off", None),
    }
    found = [what for what, given in asked.items() if given]
    if found and any(model.get(experts) for experts in EXPERTS):
        return f"{' and '.join(found)} with experts"
    return None


MEGATRON_SIZES = {
    "tensor_model_parallel_size": "tp",
    "pipeline_model_parallel_size": "pp",
    "context_parallel_size": "cp",
    "expert_model_parallel_size": "ep",
    "expert_tensor_parallel_size": "etp",
}


def set_sizes_of_frozen(keys: SourceKeys, out: Translation, role: str | None, prefix: str) -> None:
    """Sets the parallel sizes of an evaluated model if one differs from the actor's. `prefix` is the prefix of
    Megatron's keys. Without a role nothing is set."""
    given = {here: keys.get(prefix + name) for name, here in MEGATRON_SIZES.items()}
    own = {here: count(size) for here, size in given.items() if size not in NOTHING}
    actor = {here: out.get(f"actor.parallel.{here}") for here in given}
    if role is not None and any(actor[here] != size for here, size in own.items()):
        for here, size in {**actor, **own}.items():
            if size is not None:
                out.set(f"{role}.parallel.{here}", size, prefix + "*")


# Megatron's optimizer keys, as used by slime, verl and SkyRL.

ADAM = ("adam", "adamw")
BFLOAT16 = ("bf16", "bfloat16", "torch.bfloat16")
SCALE = 0.2
"""Factor giving Muon's updates the size of AdamW's, Liu et al. 2025, arXiv:2502.16982."""

OPTIONS = (
    "optimizer",
    "optimizer_cpu_offload",
    "optimizer_offload_fraction",
    "exp_avg_dtype",
    "exp_avg_sq_dtype",
    "muon_momentum",
    "muon_use_nesterov",
    "muon_num_ns_steps",
    "muon_scale_mode",
    "muon_extra_scale_factor",
)


def megatron_options(keys: SourceKeys, prefix: str, dashes: bool = False) -> dict[str, Any]:
    """Returns the values of `OPTIONS` given below `prefix`, or as flags with dashes."""
    names = {option: prefix + (option.replace("_", "-") if dashes else option) for option in OPTIONS}
    return {option: keys.get(name) for option, name in names.items() if name in keys}


def set_megatron_optimizer(given: Mapping[str, Any], out: Translation, prefix: str, momentum: float = 0.95) -> None:
    """Sets the optimizer. `given` has Megatron's names with underscores. `momentum` is the source's default for
    Muon."""
    here = "actor.optimizer."
    if truth(given.get("optimizer_cpu_offload", False)):
        share = given.get("optimizer_offload_fraction")
        part = 1.0 if share in NOTHING else real(share)
        out.set(here + "cpu_offload", True if part >= 1 else part, prefix + "optimizer_cpu_offload")
    moments = [str(given.get(name, "fp32")).lower() for name in ("exp_avg_dtype", "exp_avg_sq_dtype")]
    if all(one in BFLOAT16 for one in moments):
        out.set(here + "moments_dtype", "bfloat16", prefix + "exp_avg_dtype, exp_avg_sq_dtype")
    elif any(one not in ("fp32", "float32", "torch.float32") for one in moments):
        out.differs(prefix + "exp_avg_dtype", ", ".join(moments), "both moments have the same type here, fp32 or bf16")
    name = str(given.get("optimizer", "adam")).lower()
    if name in ("muon", "dist_muon"):
        _set_muon(given, out, prefix, momentum)
    elif name not in ADAM:
        out.differs(prefix + "optimizer", name, "optimizers here are adamw and muon")


def _set_muon(given: Mapping[str, Any], out: Translation, prefix: str, momentum: float) -> None:
    here = "actor.optimizer."
    out.set(here + "name", "muon", prefix + "optimizer")
    out.set(here + "muon.momentum", real(given.get("muon_momentum", momentum)), prefix + "muon_momentum")
    nesterov = truth(given.get("muon_use_nesterov", False))
    out.set(here + "muon.nesterov", nesterov, prefix + "muon_use_nesterov")
    out.set(here + "muon.newton_schulz_steps", count(given.get("muon_num_ns_steps", 5)), prefix + "muon_num_ns_steps")
    factor, mode = real(given.get("muon_extra_scale_factor", 1.0)), str(given.get("muon_scale_mode", "spectral"))
    if factor != SCALE or mode != "spectral":
        reason = f"updates have size {SCALE} sqrt(max(rows, columns)) here: spectral with factor {SCALE}"
        out.differs(prefix + "muon_scale_mode, muon_extra_scale_factor", f"{mode}, {factor}", reason)


# Models that see: the tower, the columns of images, and the limits of their pixels.

SEES = re.compile(r"(?<![a-z])vl(?![a-z])", re.IGNORECASE)
"""Names of vision-language models, such as Qwen2.5-VL-7B-Instruct."""
TOWER, COLUMN = "model.vision", "data.train.images_key"
USUAL_COLUMN = "images"
"""The default of images_key, and of verl's trainers."""
ACTION_HEADS = re.compile(
    r"openvla|openpi|pi0|gr00t|dreamzero|lingbot|abot|evo1|starvla|molmoact|dexbotic|_policy$|^resnet|steam|recap|"
    r"cfg_model|buffered_vlm|ti2v|i2v|^sd3|cosmos",
    re.IGNORECASE,
)
"""RLinf's types of models that are no language models: they have heads for actions or values, or make pictures."""


def is_named_after_seeing(path: object) -> bool:
    """Returns whether the last part of a model's path names a vision-language model."""
    return SEES.search(str(path).rstrip("/").rsplit("/", 1)[-1]) is not None


def set_vision(
    out: Translation, column: Any = None, key: str = "", *, sees: bool = False, frozen: str | None = None
) -> None:
    """Sets the tower if the model's name says that it sees, or the source's `key`: it names a `column` of images, or
    `sees` is True. Called after the evaluation sets are set.

    `frozen` is the key of the source that keeps the tower's weights, or None if they are trained.
    """
    given = column not in NOTHING
    if not given and not sees and not is_named_after_seeing(out.get("model.path")):
        return
    origin = f"{key}, for images" if given or sees else "the model's name"
    if frozen is None:
        out.set(TOWER, {}, origin)
    else:
        out.set(f"{TOWER}.train", False, frozen)
    _choose_engine(out)
    if given and str(column) != USUAL_COLUMN:
        out.set(COLUMN, str(column), key)
        _use_in_evaluations(out, str(column), key)


def _choose_engine(out: Translation) -> None:
    """Replaces SGLang by the embedded engine if an engine has several ranks, as SGLang splits towers among them."""
    if out.get("rollout.engine") != "sglang" or out.get("rollout.parallel.tp") == 1:
        return
    named = out.settings["rollout.engine"].origin.partition(":")[0]
    out.set("rollout.engine", "embedded", f"{named}: rltrain's engine instead, as SGLang splits towers")
    given = out.settings.pop("rollout.sglang.args", None)
    for name, value in (given.value if given else {}).items():
        out.leave(name, value, "an argument of SGLang's server")


def _use_in_evaluations(out: Translation, column: str, key: str) -> None:
    if "data.eval.path" in out.settings:
        out.set("data.eval.images_key", column, key)
    for one in out.get("evaluation.sets") or ():
        one["data"] = {**one["data"], "images_key": column}


def column_of(keys: SourceKeys, out: Translation, key: str) -> Any:
    """Returns the column of a key with a list of columns. Several are a difference, as a row has one list of images."""
    given = keys.get(key)
    if not isinstance(given, list):
        return given
    if len(given) > 1:
        out.differs(key, given, "all images of a row are in one column here")
    return given[0] if given else None


def column_in_json(keys: SourceKeys, out: Translation, key: str) -> Any:
    """Returns the column of images in slime's map from kinds of media to columns, such as {"image": "images"}."""
    given = keys.get(key)
    if given in NOTHING:
        return None
    try:
        columns = json.loads(given) if isinstance(given, str) else given
        kinds = {str(kind): str(column) for kind, column in columns.items()}
    except (ValueError, AttributeError):
        raise UntranslatableError(f"a JSON object was expected (at {key}: {given!r})") from None
    others = kinds.keys() - {"image"}
    if others:
        out.differs(key, given, f"{', '.join(sorted(others))}: only images can be shown here")
    return kinds.get("image")


def set_pixels(keys: SourceKeys, out: Translation, *prefixes: str) -> None:
    """Sets the limits of pixels, from keys min_pixels and max_pixels after one of `prefixes`."""
    for limit in ("min_pixels", "max_pixels"):
        key, given = keys.first(*(prefix + limit for prefix in prefixes))
        if given not in NOTHING:
            out.set(f"data.images.{limit}", count(given), key)


def refuse_action_heads(keys: SourceKeys, *names: str) -> None:
    """Raises UntranslatableError for a model that is no language model, by its type under one of the keys `names`."""
    for name in names:
        kind = keys.get(name)
        if kind not in NOTHING and ACTION_HEADS.search(str(kind)):
            raise UntranslatableError(
                f"{name} is {kind}, which is no language model: actions, values or pictures come from a head of its "
                "own. Vision-language models act by text here: docs/environments.md"
            )
