"""Rules for slime: its flags, the flags of Megatron, and other parts of its scripts."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from rltrain.config.foreign import SLIME
from rltrain.import_config import translation
from rltrain.import_config.seeing_models import column_in_json, set_vision
from rltrain.import_config.shared_rules import (
    WEIGHTS,
    choose_engine,
    megatron_options,
    set_fully_sharded,
    set_megatron_optimizer,
    set_slimes_prediction_layers,
)
from rltrain.import_config.translation import (
    NOTHING,
    RowCounts,
    SourceKeys,
    Translation,
    UntranslatableError,
    apply,
    by_pattern,
    count,
    estimator,
    number,
    one_of,
    ranks,
    real,
    set_steps,
    sort_out,
    truth,
)
from rltrain.import_config.translation import top_k as top_k_of

# Flags of slime without influence on results, by pattern, with the reason.

HARMLESS = by_pattern("""
shape of the model, read from config.json: use-rotary-position-embeddings no-position-embedding
    no-masked-softmax-fusion enable-experimental post-self-attn-layernorm post-mlp-layernorm num-layers hidden-size
    ffn-hidden-size num-attention-heads num-query-groups group-query-attention kv-channels vocab-size
    make-vocab-size-divisible-by max-position-embeddings normalization norm-epsilon position-embedding-type rotary-*
    no-rope-fusion rope-type use-rope-scaling swiglu qk-layernorm qk-head-dim qk-pos-emb-head-dim q-lora-rank
    kv-lora-rank v-head-dim multi-latent-attention mscale* original-max-position-embeddings beta-* attn-mscale
    disable-bias-linear add-qkv-bias untie-embeddings-and-output-weights num-experts moe-ffn-hidden-size
    moe-layer-freq moe-router-topk moe-router-topk-scaling-factor moe-router-score-function moe-router-pre-softmax
    moe-router-num-groups moe-router-group-topk moe-router-enable-expert-bias moe-router-load-balancing-type
    moe-shared-expert-intermediate-size moe-shared-expert-gate moe-shared-expert-overlap spec attention-output-gate
    apply-layernorm-1p use-gated-attention
speed or memory only: balance-data allgather-cp overlap-cpu-optimizer-d2h-h2d use-precision-aware-optimizer
    accumulate-allreduce-grads-in-fp32 attention-softmax-in-fp32 attention-backend moe-grouped-gemm moe-permute-fusion
    moe-router-dtype moe-token-drop-policy moe-token-dispatcher-type moe-enable-deepep no-gradient-accumulation-fusion
    update-weight-* data-pad-size-multiplier over-sampling-batch-size no-offload-* offload* use-distributed-optimizer
    recompute-method micro-batch-size ref-micro-batch-size bf16 transformer-impl distributed-* seq-length vocab-*
    num-gpus-per-node no-check-for-nan-in-loss-and-grad deterministic-mode prefill-num-servers cpu-offload*
speculative decoding has the same distribution: sglang-speculative-*
layout or speed of the engine only: sglang-*
layers for speculative decoding only: mtp-*
logs only: wandb-* use-wandb disable-wandb* dump-details save-debug-*
checkpoint files only: load ref-load save-hf* ckpt-* async-save
a server started by the script: served-*
supervised training has no engine: program
no evaluation set: n-samples-per-eval-prompt eval-*
rewards and environments receive all columns: metadata-key
settings of slime's own functions: custom-config-path
model family, read from config.json: model-name
supervised training generates nothing: debug-train-only
supervised training has no advantages: disable-compute-advantages-and-returns
the chat template marks the assistant's tokens: loss-mask-type
""")


DECAYS = {"constant": "constant", "linear": "linear", "cosine": "cosine"}


def parse_flags(arguments: Sequence[str]) -> dict[str, Any]:
    """Returns flags without their dashes. A flag without value is True, and one with several values is a list."""
    flags: dict[str, Any] = {}
    name = None
    values: list[str] = []
    for argument in [*arguments, "--"]:
        if argument.startswith("--"):
            if name:
                flags[name] = True if not values else values[0] if len(values) == 1 else values
            name, _, first = argument[2:].partition("=")
            values = [first] if first else []
        else:
            values.append(argument)
    return flags


def translate(keys: SourceKeys, out: Translation, rows: RowCounts) -> None:
    """Translates flags of slime into `out`."""
    apply(SLIME, keys, out, decay=one_of(DECAYS, "learning rates"), opsm_delta=lambda _: 1e-4)
    _data(keys, out)
    _placement(keys, out)
    _model(keys, out)
    _batch(keys, out)
    if is_supervised(keys):
        set_supervised(keys, out)
    else:
        set_algorithm(keys, out)
        set_kl(keys, out)
        set_correction(keys, out)
        set_schedule(keys, out)
        set_reward(keys, out)
        set_teacher(keys, out, out.placed["actor"])
        set_evaluation(keys, out)
        set_engine(keys, out)
    _dropout(keys, out)
    set_vision(out, column_in_json(keys, out, "multimodal-keys"), "multimodal-keys")
    set_steps(
        out, rows, keys.get("num-rollout"), keys.get("num-epoch"), ("--num-rollout", "--num-epoch"), name="num-rollout"
    )
    _warmup(keys, out)
    sort_out(keys, HARMLESS, out)


def _data(keys: SourceKeys, out: Translation) -> None:
    out.set("data.train.label_key", keys.get("label-key"), "label-key")
    template = keys.truth("apply-chat-template", False)
    out.set("data.chat_template", "auto" if template else "never", "apply-chat-template")
    longest = keys.get("rollout-max-prompt-len")
    if longest is not None:
        out.set("data.max_prompt_tokens", count(longest), "rollout-max-prompt-len")
        out.set("data.on_bad_row", "skip", "rollout-max-prompt-len: longer prompts are left out")
    context = keys.get("rollout-max-context-len")
    response = out.get("rollout.sampling.max_response_tokens")
    most = count(context) if context else response + out.get("data.max_prompt_tokens")
    if most < response + out.get("data.max_prompt_tokens"):
        if longest is None and most > response:
            out.set("data.max_prompt_tokens", most - response, "rollout-max-context-len minus the longest response")
        else:
            most = response + out.get("data.max_prompt_tokens")
    out.set("rollout.max_context_tokens", most, "rollout-max-context-len" if context else "prompt and response")
    stop = keys.get("rollout-stop")
    if stop is not None:
        out.set("rollout.sampling.stop", [stop] if isinstance(stop, str) else stop, "rollout-stop")
    ids = keys.get("rollout-stop-token-ids")
    if ids is not None:
        _stop_at(ids, keys, out)


def _stop_at(ids: Any, keys: SourceKeys, out: Translation) -> None:
    """Sets stop tokens. The checkpoint's end-of-sequence tokens always stop a response."""
    own = translation.model_config(keys.get("hf-checkpoint")).get("eos_token_id", [])
    ended = {str(token) for token in (own if isinstance(own, list) else [own])}
    given = ids if isinstance(ids, list) else [ids]
    if ended.issuperset(given):
        out.leave("rollout-stop-token-ids", ids, "already end-of-sequence tokens of the checkpoint")
    else:
        others = [count(token) for token in given if token not in ended]
        out.set("rollout.sampling.stop_token_ids", others, "rollout-stop-token-ids")


def _placement(keys: SourceKeys, out: Translation) -> None:
    """Places the roles by slime's rules. Without --colocate the rollout's GPUs follow the actor's. With it both begin
    at 0."""
    nodes, per_node = keys.count("actor-num-nodes", 1), keys.count("actor-num-gpus-per-node", 8)
    actor = nodes * per_node
    colocate = keys.truth("colocate", False)
    given = keys.get("rollout-num-gpus")
    origin = f"actor-num-nodes {nodes} x actor-num-gpus-per-node {per_node}"
    roles = ["actor"]
    if keys.get("advantage-estimator") == "ppo":
        roles.append("critic")
    if keys.truth("use-kl-loss", False) or keys.real("kl-coef", 0):
        roles.append("reference")
    out.place(roles, ranks(0, actor), origin)
    out.ranks_per_node = keys.count("num-gpus-per-node", max(per_node, 1))
    if is_supervised(keys):
        out.world_size = actor
        return
    if given is None and not colocate:
        raise UntranslatableError("--rollout-num-gpus is required when --colocate is not set")
    rollout = actor if given is None else count(given)
    if colocate and given is not None and rollout != actor:
        out.notes.append("--colocate with --rollout-num-gpus: engines begin at GPU 0 and use more GPUs than the actor")
    per_engine = keys.count("rollout-num-gpus-per-engine", 1)
    if rollout % per_engine:
        raise UntranslatableError(
            f"rollout_num_gpus {rollout} must be divisible by rollout_num_gpus_per_engine {per_engine}"
        )
    out.set("rollout.parallel.tp", per_engine, "rollout-num-gpus-per-engine")
    out.place(
        ["rollout", "reward"],
        ranks(0 if colocate else actor, rollout),
        "colocate" if colocate else "rollout-num-gpus, after the actor's",
    )
    out.world_size = max(actor, rollout) if colocate else actor + rollout


def _model(keys: SourceKeys, out: Translation) -> None:
    out.set("model.path", keys.get("hf-checkpoint", "CHECKPOINT"), "hf-checkpoint")
    if keys.truth("fp16", False):
        out.set("model.dtype", "float16", "fp16")
    granularity = keys.get("recompute-granularity")
    layers = keys.get("recompute-num-layers")
    if granularity == "full":
        method = keys.get("recompute-method", "uniform")
        recompute: Any = "full" if method == "uniform" else {"granularity": "full", "layers": count(layers or 1)}
        out.set("model.recompute", recompute, "recompute-granularity, -method, -num-layers")
    elif granularity == "selective":
        modules = keys.get("recompute-modules", ["core_attn"])
        modules = [modules] if isinstance(modules, str) else modules
        out.set("model.recompute", {"granularity": "selective", "modules": modules}, "recompute-granularity, -modules")
    _replay(keys, out)
    set_fake_quantization(keys, out)
    set_slimes_prediction_layers(keys, out)
    set_megatron_optimizer(megatron_options(keys, "", dashes=True), out, "", momentum=0.9)
    backend = keys.text("train-backend", "megatron")
    if backend != "megatron":
        set_fully_sharded(keys, out, "train-backend", backend, out.get("actor.parallel.cp"), "fsdp-")
    if keys.truth("sequence-parallel", False) and out.get("actor.parallel.tp") > 1:
        out.set("actor.parallel.sequence_parallel", True, "sequence-parallel")
    _stages(keys, out)


def _replay(keys: SourceKeys, out: Translation) -> None:
    """Sets the router replay from the engine's choices, or from those in the pass for the old log-probs."""
    recomputed = keys.truth("use-routing-replay", False)
    if keys.truth("use-rollout-routing-replay", False):
        out.set("model.router_replay", "rollout", "use-rollout-routing-replay")
    elif recomputed:
        out.set("model.router_replay", "recompute", "use-routing-replay")


def _stages(keys: SourceKeys, out: Translation) -> None:
    """Sets uneven first and last stages. Like Megatron, it divides the other layers evenly."""
    first, last = keys.get("decoder-first-pipeline-num-layers"), keys.get("decoder-last-pipeline-num-layers")
    stages, layers = out.get("actor.parallel.pp"), keys.get("num-layers")
    if (first is None and last is None) or stages == 1:
        return
    origin = "decoder-first-pipeline-num-layers, decoder-last-pipeline-num-layers"
    if layers is None:
        out.leave(origin, (first, last), "stages are chosen automatically, as --num-layers is not given")
        return
    ends = [count(end) for end in (first, last) if end is not None]
    inner, rest = divmod(count(layers) - sum(ends), max(stages - len(ends), 1))
    if rest or inner < 0:
        raise UntranslatableError(f"{origin}: the other layers do not divide evenly over {stages - len(ends)} stages")
    shares = [inner] * (stages - len(ends))
    shares = [*([ends[0]] if first is not None else []), *shares, *([ends[-1]] if last is not None else [])]
    out.set("actor.parallel.layers_per_stage", shares, origin)


def _batch(keys: SourceKeys, out: Translation) -> None:
    """Sets the batch. --global-batch-size counts samples."""
    prompts, samples = keys.count("rollout-batch-size", 1), keys.count("n-samples-per-prompt", 1)
    out.set("batch.prompts_per_step", prompts, "rollout-batch-size")
    if not is_supervised(keys):
        out.set("batch.samples_per_prompt", samples, "n-samples-per-prompt")
    updates = keys.get("num-steps-per-rollout")
    size = keys.get("global-batch-size")
    if updates is not None:
        out.set("batch.mini_batches", count(updates), "num-steps-per-rollout")
    elif size is not None:
        whole, rest = divmod(prompts * samples, count(size))
        if rest:
            raise UntranslatableError(
                f"rollout_batch_size {prompts} * n_samples_per_prompt {samples} is not a multiple of "
                f"global_batch_size {size}"
            )
        out.set("batch.mini_batches", max(whole, 1), "rollout-batch-size x n-samples-per-prompt / global-batch-size")
    if out.get("batch.mini_batches") > 1:
        out.set("batch.mini_batches_by", "prompts", "slime trains on samples in their order of arrival")
    tokens = keys.get("max-tokens-per-gpu")
    if keys.truth("use-dynamic-batch-size", False) and tokens is not None:
        out.set("actor.micro_batch_tokens", count(tokens), "max-tokens-per-gpu")
        own = keys.get("log-probs-max-tokens-per-gpu", tokens)
        out.set("reference.micro_batch_tokens", count(own), "max-tokens-per-gpu")
    else:
        sequences = keys.count("micro-batch-size", 1)
        longest = -(-out.get("rollout.max_context_tokens") * sequences // out.get("actor.parallel.cp"))
        out.set("actor.micro_batch_tokens", longest, "micro-batch-size times the longest sample")


def _dropout(keys: SourceKeys, out: Translation) -> None:
    for name in ("attention-dropout", "hidden-dropout"):
        value = keys.real(name, 0.1)
        if value:
            out.differs(name, value, "there is no dropout here; set it to 0 (Megatron's default is 0.1)")


def _warmup(keys: SourceKeys, out: Translation) -> None:
    fraction = keys.get("lr-warmup-fraction")
    if fraction is None:
        return
    updates = out.get("steps") * out.get("batch.mini_batches")
    out.set("actor.optimizer.warmup_steps", round(real(fraction) * updates), "lr-warmup-fraction of all updates")


# Importance weights for the difference between engine and trainer: slime's own, and those of its example of masked
# importance sampling.

FUNCTION, FILE = "custom-tis-function-path", "custom-config-path"
ICEPOP = ".loss.icepop_function"
MIS = ".mis.compute_mis_weights_with_cp"
KNOWN = {
    *("use_tis", "use_rs", "tis_level", "rs_level", "tis_mode", "tis_lower_bound", "tis_upper_bound"),
    *("rs_lower_bound", "rs_upper_bound", "rs_veto_threshold", "tis_batch_normalize"),
}
LEVELS = ("token", "sequence", "geometric")
UNBOUNDED = 1e9
"""No ratio is larger. The example cuts ratios at exp(20)."""


def set_correction(keys: SourceKeys, out: Translation) -> None:
    """Sets the correction. KL and entropy must be set before, as the example excludes rejected tokens from them."""
    function = keys.text(FUNCTION, "")
    if function.endswith(MIS):
        _set_by_example(_options(keys), keys, out)
    elif keys.truth("use-tis", False):
        out.set("loss.correction.high", keys.real("tis-clip", 2.0), "use-tis, tis-clip")
        if keys.real("tis-clip-low", 0):
            out.set("loss.correction.low", keys.real("tis-clip-low"), "tis-clip-low")
        if function.endswith(ICEPOP):
            out.set("loss.correction.method", "icepop", FUNCTION)
        elif function:
            out.differs(FUNCTION, function, "weights here come from loss.correction: docs/policy_losses.md")
    if "use-opsm" in keys:
        out.set("loss.correction.opsm_delta", keys.real("opsm-delta", 1e-4), "use-opsm, opsm-delta")


def _options(keys: SourceKeys) -> Mapping[str, Any]:
    """Returns the options in the file of the example. It is searched in the script's folder and its parents."""
    named = keys.get(FILE)
    near = keys.folder.resolve()
    found = [folder / str(named) for folder in (near, *near.parents) if (folder / str(named)).is_file()]
    if named is None or not found:
        raise UntranslatableError(f"--{FILE}: {named} not found; it has the settings of {FUNCTION}")
    options = yaml.safe_load(found[0].read_text(encoding="utf-8")) or {}
    if not isinstance(options, dict):
        raise UntranslatableError(f"--{FILE}: expected keys with values in {Path(str(named)).name}")
    return options


def _set_by_example(options: Mapping[str, Any], keys: SourceKeys, out: Translation) -> None:
    for name in sorted({*options} - KNOWN):
        out.differs(f"{FILE}: {name}", options[name], "it has no counterpart here")
    if not truth(options.get("use_tis", keys.get("use-tis", False))):
        return
    level, mode = str(options.get("tis_level")), str(options.get("tis_mode"))
    if level not in LEVELS or mode not in ("truncate", "clip", "mask"):
        raise UntranslatableError(f"--{FILE}: tis_level {level}, tis_mode {mode} are not values of the example")
    high = real(options.get("tis_upper_bound"))
    low = _bound(options, "tis_lower_bound", 1 / high)
    out.set("loss.correction.high", high, "tis_upper_bound")
    if mode != "truncate":
        out.set("loss.correction.low", low, "tis_lower_bound")
    if mode == "mask":
        out.set("loss.correction.method", "icepop", "tis_mode: mask")
    if level != "token":
        out.set("loss.correction.level", level, "tis_level")
    if truth(options.get("tis_batch_normalize", False)):
        _normalize(level, mode, out)
    if truth(options.get("use_rs", False)):
        _set_masks(options, low, high, out)


def _normalize(level: str, mode: str, out: Translation) -> None:
    if mode == "mask":
        out.differs("tis_batch_normalize", True, "the mean includes excluded weights there, but not here")
    elif level == "geometric":
        raise UntranslatableError("tis_batch_normalize needs level token or sequence in the example")
    out.set("loss.correction.normalize", "mini_batch", "tis_batch_normalize")
    out.notes.append("tis_batch_normalize: the mean is over a rank's micro-batch there, and over the mini-batch here")


def _set_masks(options: Mapping[str, Any], low: float, high: float, out: Translation) -> None:
    """Sets masks. Rejected tokens have no gradient there, and still count in the divisors."""
    level = str(options.get("rs_level"))
    if level not in LEVELS:
        raise UntranslatableError(f"--{FILE}: rs_level {level} is not a value of the example")
    bounds = {"low": _bound(options, "rs_lower_bound", low), "high": _bound(options, "rs_upper_bound", high)}
    masks = [{"level": level, **bounds}]
    if options.get("rs_veto_threshold") not in NOTHING:
        veto = {"low": real(options["rs_veto_threshold"]), "high": UNBOUNDED}
        masks.append({"level": "every_token", **veto})
    out.set("loss.correction.masks", masks, "use_rs, rs_*")
    out.set("loss.correction.rejected", "weight_0", "use_rs: divisors count all tokens")
    if out.get("loss.entropy_coef") or out.get("loss.kl.coef"):
        out.differs("use_rs", True, "rejected tokens are also excluded from entropy and KL there, but not here")


def _bound(options: Mapping[str, Any], name: str, otherwise: float) -> float:
    return otherwise if options.get(name) in NOTHING else real(options[name])


# Other parts of a slime script: a server, and variables of the training.

SERVER = "sglang.launch_server"
MODEL, CUT = "served-model", "served-tp"
"""Keys among the flags for the model of a server and its tensor-parallel size."""
ROUNDS, GROUP = "variable OPEN_TRAINING_INT4_FAKE_QAT_FLAG", "variable OPEN_TRAINING_INT4_GROUP_SIZE"
"""Keys among the flags for variables that enable rounded weights in training. No flag of slime enables them."""
GROUP_SIZE = 128
"""Default group size without a variable."""
VARIABLE = re.compile(r'"?(OPEN_TRAINING_INT4_\w+)"?\s*[:=]\s*"?(\d+)\b')


def beside_training(commands: Sequence[Sequence[str]]) -> dict[str, Any]:
    """Returns keys from all commands of a script: a server's model and variables."""
    return {**_served(commands), **_variables(commands)}


def _served(commands: Sequence[Sequence[str]]) -> dict[str, Any]:
    for words in commands:
        if SERVER in words or f"-m {SERVER}" in words:
            following = dict(zip(words, words[1:], strict=False))
            tp = following.get("--tp", following.get("--tp-size", following.get("--tensor-parallel-size", 1)))
            return {MODEL: following["--model-path"], CUT: tp} if "--model-path" in following else {}
    return {}


def _variables(commands: Sequence[Sequence[str]]) -> dict[str, Any]:
    found = (one for words in commands for word in words for one in VARIABLE.finditer(word))
    given = {f"variable {one[1]}": int(one[2]) for one in found}
    return given if given.get(ROUNDS) == 1 else {}


def set_fake_quantization(keys: SourceKeys, out: Translation) -> None:
    """Sets fake quantization of experts for INT4. slime rounds in training as in its engines."""
    if not keys.get(ROUNDS):
        return
    name = ROUNDS.removeprefix("variable ")
    out.set("model.fake_quantization.group_size", keys.count(GROUP, GROUP_SIZE), name)
    out.notes.append(WEIGHTS)


# On-policy distillation with a teacher in Megatron or on a server of the same script.

REWARD = "slime.rollout.on_policy_distillation.reward_func"


def set_teacher(keys: SourceKeys, out: Translation, actor: str) -> None:
    """Sets the teacher. `actor` is the range of the actor's ranks. A teacher on a server gets new ranks after all
    others."""
    model, tp = keys.get(MODEL), keys.get(CUT, 1)
    if not keys.get("use-opd"):
        return
    kind = keys.get("opd-type", "sglang")
    if kind == "sglang" and model is None:
        out.differs("opd-type", kind, "the weights of the server at rm-url are unknown: docs/roles.md")
        return
    out.set("teacher.coef", keys.real("opd-kl-coef", 1.0), "opd-kl-coef")
    if kind == "sglang":
        out.set("teacher.path", str(model), f"the model of {SERVER}")
        out.set("teacher.parallel.tp", count(tp), f"the same as for {SERVER}")
        out.place(["teacher"], ranks(out.world_size, count(tp)), f"{SERVER}: after the others")
        out.world_size += count(tp)
        keys.get("rm-url")
        return
    out.set("teacher.path", keys.text("opd-teacher-load"), "opd-teacher-load: in Hugging Face format here")
    out.place(["teacher"], actor, "use-opd")


# Learning and sampling.

PROGRAMS = ("train.py", "train_async.py")
MATH = ("math", "dapo", "deepscaler")
REWARDS_DIFFER = "check_reward_nonzero_std"
SFT_ROLLOUT = "slime.rollout.sft_rollout.generate_rollout"
OWN_ROLLOUTS = ("slime.rollout.sglang_rollout.generate_rollout", "fully_async_rollout.generate_rollout_fully_async")
NOT_FOR_ARGS = (
    "tp_size",
    "dp_size",
    "ep_size",
    "expert_parallel_size",
    "pp_size",
    "router",
    "server_concurrency",
    "config",
)


def is_supervised(keys: SourceKeys) -> bool:
    return keys.get("loss-type", "policy_loss") == "sft_loss"


def set_algorithm(keys: SourceKeys, out: Translation) -> None:
    name = keys.get("advantage-estimator", "grpo")
    policies = {"gspo": "gspo", "cispo": "cispo"}
    algorithms = ("grpo", "ppo", "reinforce_plus_plus", "reinforce_plus_plus_baseline")
    if name not in (*policies, *algorithms):
        out.differs("advantage-estimator", name, "there is no algorithm of this name here")
        return
    out.set("algorithm", name if name in algorithms else "grpo", "advantage-estimator")
    if name in policies:
        out.set("loss.policy", policies[name], "advantage-estimator")
    high = keys.get("eps-clip-high", keys.get("eps-clip", 0.2))
    out.set("loss.clip_high", real(high), "eps-clip-high, or eps-clip if it is missing")
    _set_advantages(keys, out, str(name))
    _set_means(keys, out)


def _set_advantages(keys: SourceKeys, out: Translation, name: str) -> None:
    whitens = keys.truth("normalize-advantages", False)
    gamma, gae_lambda = keys.real("gamma", 1.0), keys.real("lambd", 1.0)
    if name == "ppo":
        out.set("advantages.gae_lambda", gae_lambda, "lambd, default 1")
        out.set("critic.value_clip", keys.real("value-clip", 0.2), "value-clip")
    if name in ("ppo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"):
        out.set("advantages.whiten", whitens, "normalize-advantages")
        if name != "reinforce_plus_plus_baseline" and gamma != 1:
            out.set("advantages.gamma", gamma, "gamma")
    elif whitens:
        out.differs("normalize-advantages", True, f"advantages of {name} are not normalised over the batch here")
    alone = out.get("batch.samples_per_prompt") == 1
    if name in ("grpo", "gspo", "cispo"):
        plain = keys.truth("disable-grpo-std-normalization", False) or alone
        out.set("advantages.normalize_std", not plain, "disable-grpo-std-normalization")


def _set_means(keys: SourceKeys, out: Translation) -> None:
    by_token = keys.truth("calculate-per-token-loss", False)
    out.set("loss.normalization", "token_mean" if by_token else "sequence_mean", "calculate-per-token-loss")
    if keys.truth("use-rollout-logprobs", False):
        out.set("loss.old_logprobs", "rollout", "use-rollout-logprobs")
    selected = keys.get("dynamic-sampling-filter-path")
    if selected is not None and str(selected).endswith(REWARDS_DIFFER):
        out.set("batch.dynamic_sampling.filter", "rewards_differ", "dynamic-sampling-filter-path")
    elif selected is not None:
        out.differs("dynamic-sampling-filter-path", selected, "set it as batch.dynamic_sampling.filter")


def set_kl(keys: SourceKeys, out: Translation) -> None:
    in_loss, coef = keys.truth("use-kl-loss", False), keys.real("kl-loss-coef", 0)
    in_reward = keys.real("kl-coef", 0)
    kind = keys.get("kl-loss-type", "k1")
    if in_loss and coef:
        out.set("loss.kl.coef", coef, "kl-loss-coef")
        out.set("loss.kl.estimator", estimator(kind), "kl-loss-type")
        out.set("loss.kl.unbiased", keys.truth("use-unbiased-kl", False), "use-unbiased-kl")
    if in_reward and in_loss and coef:
        out.differs("kl-coef", in_reward, "the penalty is already in the loss; only one place is possible here")
    elif in_reward:
        out.set("loss.kl.coef", in_reward, "kl-coef")
        out.set("loss.kl.where", "reward", "kl-coef")
        out.set("loss.kl.estimator", "k1", "kl-coef")
    refresh = keys.get("ref-update-interval")
    if refresh is not None and in_loss:
        out.set("reference.refresh_every", count(refresh), "ref-update-interval")


def set_schedule(keys: SourceKeys, out: Translation) -> None:
    every = keys.count("update-weights-interval", 1)
    function = keys.text("rollout-function-path", OWN_ROLLOUTS[0])
    fully = keys.truth("fully-async", False) or function.endswith("fully_async")
    if function not in OWN_ROLLOUTS and not fully:
        out.differs(
            "rollout-function-path", function, "your own rollout loop becomes an environment here: docs/environments.md"
        )
    if keys.get(PROGRAM) == PROGRAMS[1] or fully:
        out.set("schedule.mode", "asynchronous", PROGRAMS[1])
        staleness = keys.count("max-weight-staleness", every)
        out.set("schedule.max_staleness", max(staleness, every), "max-weight-staleness" if fully else PROGRAMS[1])
    if every > 1:
        out.set("schedule.sync_every", every, "update-weights-interval")
    if keys.get("update-weight-mode") == "delta":
        out.set("weight_sync.delta", {}, "update-weight-mode")
    if keys.truth("partial-rollout", False) or fully:
        out.set("schedule.partial_rollouts", True, "rollout-function-path" if fully else "partial-rollout")
        masks = keys.truth("mask-offpolicy-in-partial-rollout", False)
        if masks or not out.get("schedule.max_staleness"):
            out.set("schedule.on_stale", "mask", "mask-offpolicy-in-partial-rollout")
        more = keys.count("over-sampling-batch-size", 0) / out.get("batch.prompts_per_step") - 1
        if more > 0:
            out.set("schedule.oversampling", more, "over-sampling-batch-size / rollout-batch-size - 1")


PROGRAM = "program"
"""The key among the flags for the name of the program."""


def set_reward(keys: SourceKeys, out: Translation) -> None:
    kind, own = keys.get("rm-type"), keys.get("custom-rm-path")
    generate = keys.get("custom-generate-function-path")
    if generate is not None:
        out.set("env.function", _function(generate), "custom-generate-function-path")
        out.place(["env"], out.placed["rollout"], "custom-generate-function-path")
    if own == REWARD:
        out.set("reward.function", "environment", "custom-rm-path: it only queries the teacher, and the reward is 0")
        keys.get("custom-reward-post-process-path")
    elif own is not None:
        out.set("reward.function", _function(own), "custom-rm-path")
    elif kind in MATH and keys.get("label-key") is None:
        out.set("reward.function", "environment", f"rm-type {kind} without label-key: the reward is always 0")
    elif kind in MATH:
        out.set("reward.function", "math", "rm-type")
    elif kind == "remote_rm":
        out.set("reward.function", keys.text("rm-url"), "rm-url")
    elif generate is not None and kind is None:
        out.set("reward.function", "environment", "custom-generate-function-path: it sets the reward of the sample")
    else:
        out.differs("rm-type", kind, "set your function as reward.function: docs/rewards.md")
    scored = keys.get("reward-key")
    if scored is not None and own is not None:
        out.set("reward.options", {"reward_key": scored}, "reward-key")
    keys.get("rm-url")


def _function(dotted: object) -> str:
    module, _, name = str(dotted).rpartition(".")
    return f"{module}:{name}"


def set_evaluation(keys: SourceKeys, out: Translation) -> None:
    given = keys.get("eval-prompt-data")
    if given is None:
        out.settings.pop("evaluation.interval", None)
        return
    words = [given] if isinstance(given, str) else [*given]
    words = words if len(words) > 1 else ["eval_set", words[0]]
    sampling = {
        "temperature": keys.real("eval-temperature", out.get("rollout.sampling.temperature")),
        "top_p": keys.real("eval-top-p", out.get("rollout.sampling.top_p")),
        "top_k": top_k_of(keys.get("eval-top-k", -1)),
        "max_response_tokens": keys.count("eval-max-response-len", out.get("rollout.sampling.max_response_tokens")),
    }
    files = {
        "prompt_key": keys.text("eval-input-key", out.get("data.train.prompt_key")),
        "label_key": keys.get("eval-label-key", out.get("data.train.label_key")),
    }
    samples = keys.count("n-samples-per-eval-prompt", 1)
    sets = [
        {"name": _name(name), "data": {"path": path, **files}, "sampling": sampling, "samples_per_prompt": samples}
        for name, path in zip(words[::2], words[1::2], strict=False)
    ]
    out.set("evaluation.sets", sets, "eval-prompt-data, n-samples-per-eval-prompt, eval-*")
    needed = sampling["max_response_tokens"] + out.get("data.max_prompt_tokens")
    if needed > out.get("rollout.max_context_tokens"):
        out.set("rollout.max_context_tokens", needed, "prompt and eval-max-response-len")


def _name(name: str) -> str:
    return "".join(char if char.isalnum() else "_" for char in name)


def set_engine(keys: SourceKeys, out: Translation) -> None:
    requests = keys.get("sglang-max-running-requests")
    if requests is not None:
        out.set("rollout.max_running_requests", count(requests), "sglang-max-running-requests")
    ep = number(keys.first("sglang-ep-size", "sglang-expert-parallel-size", default=1)[1])
    if keys.truth("sglang-enable-dp-attention", False):
        out.leave("sglang-enable-dp-attention", True, "an engine here splits attention over its tp ranks")
    arguments = {
        name.removeprefix("sglang-").replace("-", "_"): value
        for name, value in keys.left().items()
        if name.startswith("sglang-") and not name.startswith("sglang-speculative")
    }
    taken = {
        name: _typed(value)
        for name, value in arguments.items()
        if not name.startswith(NOT_FOR_ARGS) and not {"dp", "moe", "deepep", "disaggregation"} & {*name.split("_")}
    }
    choose_engine(out, "sglang", ep, taken, "sglang-*")
    for name in taken:
        keys.get("sglang-" + name.replace("_", "-"))


def _typed(value: Any) -> Any:
    if isinstance(value, list):
        return [_typed(one) for one in value]
    try:
        return number(value)
    except UntranslatableError:
        return value


def set_supervised(keys: SourceKeys, out: Translation) -> None:
    out.set("algorithm", "sft", "loss-type")
    out.set("data.train.response_key", None, "messages are whole conversations")
    by_token = keys.truth("calculate-per-token-loss", False)
    out.set("loss.normalization", "token_mean" if by_token else "sequence_mean", "calculate-per-token-loss")
    function = keys.get("rollout-function-path", SFT_ROLLOUT)
    if function != SFT_ROLLOUT:
        out.differs("rollout-function-path", function, "conversations come from files here")
    for path in ("rollout.max_context_tokens", "rollout.sampling.max_response_tokens", "evaluation.interval"):
        out.settings.pop(path, None)
    if "rollout-max-context-len" not in keys and "rollout-max-prompt-len" not in keys:
        most = out.get("actor.micro_batch_tokens") * out.get("actor.parallel.cp")
        out.set("data.max_prompt_tokens", most, "slime has no limit: as many tokens as a micro-batch")
        out.set("data.max_response_tokens", most, "slime has no limit: as many tokens as a micro-batch")
    for name in (
        "rollout-num-gpus",
        "colocate",
        "advantage-estimator",
        "eps-clip",
        "entropy-coef",
        "n-samples-per-prompt",
    ):
        keys.get(name)
