"""slime's flags and Megatron's beside them, and those that change nothing."""

from collections.abc import Sequence
from typing import Any

from rltrain.config.foreign import SLIME
from rltrain.import_config import translation
from rltrain.import_config.shared_rules import (
    megatron_options,
    set_fully_sharded,
    set_megatron_optimizer,
    set_slimes_prediction_layers,
)
from rltrain.import_config.slime_learning import (
    is_supervised,
    set_algorithm,
    set_correction,
    set_engine,
    set_evaluation,
    set_fake_quantization,
    set_kl,
    set_reward,
    set_schedule,
    set_supervised,
    set_teacher,
)
from rltrain.import_config.translation import (
    RowCounts,
    SourceKeys,
    Translation,
    UntranslatableError,
    apply,
    by_pattern,
    count,
    one_of,
    ranks,
    real,
    set_steps,
    sort_out,
)

# slime's flags that change nothing of what is computed, by pattern, with the reason.

HARMLESS = by_pattern("""
of the model's shape, which config.json tells: use-rotary-position-embeddings no-position-embedding
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
of speed or memory alone: balance-data allgather-cp overlap-cpu-optimizer-d2h-h2d use-precision-aware-optimizer
    accumulate-allreduce-grads-in-fp32 attention-softmax-in-fp32 attention-backend moe-grouped-gemm moe-permute-fusion
    moe-router-dtype moe-token-drop-policy moe-token-dispatcher-type moe-enable-deepep no-gradient-accumulation-fusion
    update-weight-* data-pad-size-multiplier over-sampling-batch-size no-offload-* offload* use-distributed-optimizer
    recompute-method micro-batch-size ref-micro-batch-size bf16 transformer-impl distributed-* seq-length vocab-*
    num-gpus-per-node no-check-for-nan-in-loss-and-grad deterministic-mode prefill-num-servers cpu-offload*
speculative decoding draws from the same distribution, faster: sglang-speculative-*
of the engine's layout or speed alone: sglang-*
of layers that draft alone: mtp-*
of logs alone: wandb-* use-wandb disable-wandb* dump-details save-debug-*
of checkpoint files: load ref-load save-hf* ckpt-* async-save
a server that the script starts beside the training: served-*
supervised steps have no engine to be ahead of: program
no evaluation set is given: n-samples-per-eval-prompt eval-*
all columns of a row are at hand for rewards and environments: metadata-key
of slime's own functions: custom-config-path
config.json tells the model's family: model-name
nothing is drawn for supervised steps: debug-train-only
supervised steps have no advantages: disable-compute-advantages-and-returns
templates tell which tokens an assistant's turn has: loss-mask-type
""")


DECAYS = {"constant": "constant", "linear": "linear", "cosine": "cosine"}


def parse_flags(arguments: Sequence[str]) -> dict[str, Any]:
    """Flags without their dashes. One without a value is True, one with several is a list."""
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
            out.set("data.max_prompt_tokens", most - response, "rollout-max-context-len less the longest response")
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
    """The checkpoint's end-of-sequence tokens end one in any case."""
    own = translation.model_config(keys.get("hf-checkpoint")).get("eos_token_id", [])
    ended = {str(token) for token in (own if isinstance(own, list) else [own])}
    given = ids if isinstance(ids, list) else [ids]
    if ended.issuperset(given):
        out.leave("rollout-stop-token-ids", ids, "the checkpoint's own end-of-sequence tokens")
    else:
        others = [count(token) for token in given if token not in ended]
        out.set("rollout.sampling.stop_token_ids", others, "rollout-stop-token-ids")


def _placement(keys: SourceKeys, out: Translation) -> None:
    """slime's rules: without --colocate the rollout's GPUs come after the actor's; with it both begin at 0."""
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
        out.notes.append("--colocate with --rollout-num-gpus: the engines begin at GPU 0 and go beyond the actor's")
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
    """Routers visit what the engine chose, or what they chose in the pass of the old log-probs."""
    recomputed = keys.truth("use-routing-replay", False)
    if keys.truth("use-rollout-routing-replay", False):
        out.set("model.router_replay", "rollout", "use-rollout-routing-replay")
    elif recomputed:
        out.set("model.router_replay", "recompute", "use-routing-replay")


def _stages(keys: SourceKeys, out: Translation) -> None:
    """Uneven first and last stages; the other layers are shared out evenly, as Megatron does."""
    first, last = keys.get("decoder-first-pipeline-num-layers"), keys.get("decoder-last-pipeline-num-layers")
    stages, layers = out.get("actor.parallel.pp"), keys.get("num-layers")
    if (first is None and last is None) or stages == 1:
        return
    origin = "decoder-first-pipeline-num-layers, decoder-last-pipeline-num-layers"
    if layers is None:
        out.leave(origin, (first, last), "stages are planned here, as --num-layers is not given")
        return
    ends = [count(end) for end in (first, last) if end is not None]
    inner, rest = divmod(count(layers) - sum(ends), max(stages - len(ends), 1))
    if rest or inner < 0:
        raise UntranslatableError(f"{origin}: the other layers do not divide over {stages - len(ends)} stages")
    shares = [inner] * (stages - len(ends))
    shares = [*([ends[0]] if first is not None else []), *shares, *([ends[-1]] if last is not None else [])]
    out.set("actor.parallel.layers_per_stage", shares, origin)


def _batch(keys: SourceKeys, out: Translation) -> None:
    """--global-batch-size counts samples."""
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
        out.set("batch.mini_batches_by", "prompts", "slime trains on samples in the order in which they came")
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
            out.differs(name, value, "no dropout here; Megatron's default is 0.1, set it to 0")


def _warmup(keys: SourceKeys, out: Translation) -> None:
    fraction = keys.get("lr-warmup-fraction")
    if fraction is None:
        return
    updates = out.get("steps") * out.get("batch.mini_batches")
    out.set("actor.optimizer.warmup_steps", round(real(fraction) * updates), "lr-warmup-fraction of all updates")
