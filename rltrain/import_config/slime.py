"""Rules for slime: its flags, the flags of Megatron, and other parts of its scripts."""

from collections.abc import Sequence
from typing import Any

from rltrain.config.foreign import SLIME
from rltrain.import_config import translation
from rltrain.import_config.influence import ROWS, Condition, KeyRules, by_pattern, sort_out
from rltrain.import_config.shared_rules import (
    column_in_json,
    megatron_options,
    set_fully_sharded,
    set_megatron_optimizer,
    set_slimes_prediction_layers,
    set_vision,
)
from rltrain.import_config.slime_learning import (
    MIS,
    PROGRAM,
    PROGRAMS,
    REWARD,
    is_supervised,
    set_algorithm,
    set_contexts,
    set_correction,
    set_engine,
    set_evaluation,
    set_fake_quantization,
    set_kl,
    set_lora,
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
    count,
    one_of,
    ranks,
    real,
    set_steps,
)

# Flags of slime without influence on results, by pattern, with the reason. Reasons in `influence.CONDITIONS` or
# `conditions` are checked for each run.

HARMLESS = by_pattern("""
shape of the model, read from config.json: use-rotary-position-embeddings no-position-embedding
    no-masked-softmax-fusion enable-experimental post-self-attn-layernorm post-mlp-layernorm num-layers hidden-size
    ffn-hidden-size num-attention-heads num-query-groups group-query-attention kv-channels vocab-size
    make-vocab-size-divisible-by max-position-embeddings normalization norm-epsilon position-embedding-type rotary-base
    rotary-percent rotary-scaling-factor rotary-interleaved rotary-seq-len-interpolation-factor no-rope-fusion
    rope-type use-rope-scaling rope-scaling-factor swiglu qk-layernorm qk-head-dim qk-pos-emb-head-dim q-lora-rank
    kv-lora-rank v-head-dim multi-latent-attention mscale mscale-all-dim original-max-position-embeddings beta-fast
    beta-slow attn-mscale disable-bias-linear add-qkv-bias untie-embeddings-and-output-weights num-experts
    moe-ffn-hidden-size moe-layer-freq moe-router-topk moe-router-topk-scaling-factor moe-router-score-function
    moe-router-pre-softmax moe-router-num-groups moe-router-group-topk moe-router-enable-expert-bias
    moe-shared-expert-intermediate-size moe-shared-expert-gate moe-shared-expert-overlap spec attention-output-gate
    apply-layernorm-1p use-gated-attention vocab-extra-ids model-name
its loss has the coefficient moe-aux-loss-coeff: moe-router-load-balancing-type
speed or memory only: balance-data allgather-cp overlap-cpu-optimizer-d2h-h2d use-precision-aware-optimizer
    accumulate-allreduce-grads-in-fp32 attention-softmax-in-fp32 attention-backend attn-implementation
    moe-grouped-gemm moe-permute-fusion moe-router-dtype moe-token-drop-policy moe-token-dispatcher-type
    moe-enable-deepep no-gradient-accumulation-fusion update-weight-buffer-size update-weight-transport
    update-weight-transfer-mode check-weight-update-equal
    update-weight-disk-dir update-weight-disk-keep-files update-weight-local-checkpoint-dir
    update-weight-delta-checksum update-weight-delta-encoding cpu-offloading-num-layers offload-modules
    distributed-timeout-seconds-after-init data-pad-size-multiplier no-offload-train no-offload-rollout offload
    offload-train
    offload-rollout use-distributed-optimizer recompute-granularity recompute-method recompute-num-layers
    recompute-modules recompute-loss-function micro-batch-size ref-micro-batch-size max-tokens-per-gpu
    log-probs-max-tokens-per-gpu use-dynamic-batch-size log-probs-chunk-size bf16 transformer-impl
    distributed-backend distributed-timeout-minutes num-gpus-per-node no-check-for-nan-in-loss-and-grad
    deterministic-mode prefill-num-servers overlap-grad-reduce overlap-param-gather empty-unused-memory-level
    train-memory-margin-bytes gradient-checkpointing fsdp-cpu-offload fsdp-state-dict-cpu-offload num-workers
    optimizer-offload-fraction sequence-parallel use-fault-tolerance rollout-health-check-interval
    rollout-health-check-timeout rollout-health-check-first-wait sglang-router-ip sglang-router-port
    use-slime-router slime-router-timeout slime-router-max-connections use-miles-router megatron-to-hf-mode
    sglang-server-concurrency
sequences are packed without a fixed length: seq-length
interleaving needs more than one stage: num-layers-per-virtual-pipeline-stage
with dynamic sampling, further prompts are drawn when they are needed: over-sampling-batch-size
no selection of groups: over-sampling-batch-size
mini-batches are given by num-steps-per-rollout: global-batch-size
one stage: decoder-first-pipeline-num-layers decoder-last-pipeline-num-layers
one mini-batch for each step: num-steps-per-rollout
speculative decoding has the same distribution: sglang-speculative-*
layout or speed of the engine only: sglang-*
the weights of prediction layers are not trained: mtp-num-layers mtp-loss-scaling-factor
logs only: wandb-* use-wandb disable-wandb* use-tensorboard tensorboard-* tb-* dump-details log-passrate log-multi-turn
    log-*-to-tensorboard log-throughput log-progress log-device-memory-used log-straggler log-params-norm
    custom-rollout-log-function-path custom-eval-rollout-log-function-path
    save-debug-rollout-data save-debug-train-data log-interval profile-* use-pytorch-profiler record-memory-history
    memory-snapshot-*
checkpoint files only: ckpt-convert-format ckpt-convert-save ckpt-convert-update-legacy-dist-opt-format
    load ref-load save-hf ckpt-format ckpt-fully-parallel-save ckpt-fully-parallel-load
    ckpt-assume-constant-structure ckpt-step async-save no-load-optim no-load-rng no-save-optim no-save-rng finetune
    auto-detect-ckpt-format dist-ckpt-strictness
the program is known: program
adapters are on all layers: target-modules lora-target-modules
no adapters: lora-* target-modules lora-target-modules exclude-modules
engines get merged weights: lora-sync-from-tensor lora-base-cpu-backup
a server started by the script: served-model served-tp
the same GPUs as the actor: rollout-num-gpus
FSDP trains without dropout: attention-dropout hidden-dropout
custom-rm-path gives the reward: rm-type
follows from model.router_replay: use-routing-replay use-rollout-routing-replay
given by the file of custom-config-path: use-tis
the reward only asks the teacher: rm-url custom-reward-post-process-path
supervised training: rollout-num-gpus rollout-num-gpus-per-engine colocate advantage-estimator eps-clip
    eps-clip-high entropy-coef n-samples-per-prompt debug-train-only disable-compute-advantages-and-returns
    rollout-max-response-len rollout-temperature rollout-top-p rollout-top-k rm-type
no evaluation: n-samples-per-eval-prompt eval-interval eval-input-key eval-label-key eval-max-response-len
    eval-temperature eval-top-p eval-top-k eval-max-prompt-len eval-max-context-len skip-eval-before-train
always evaluated before the first step: skip-eval-before-train
prompts of evaluations have the same limit: eval-max-prompt-len
only functions for generation read it: eval-max-context-len
evaluations report the reward: eval-reward-key
the built-in reward is one number: reward-key
rewards and environments receive all columns: metadata-key
the chat template marks the assistant's tokens: loss-mask-type
no penalty: kl-loss-type kl-loss-coef use-kl-loss use-unbiased-kl kl-coef
no penalty in the loss: kl-loss-type use-unbiased-kl
no reference: ref-update-interval
no discounts: gamma lambd
not the algorithm ppo: value-clip num-critic-only-steps critic-lr critic-load critic-save lambd
no correction of weights: tis-clip tis-clip-low opsm-delta
steps are given: num-epoch num-rollout
the longest sequence is prompt and response: rollout-max-context-len
an engine has one rank: sglang-ep-size sglang-expert-parallel-size
a single rank: sequence-parallel
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
    out.set("model.path", keys.get("hf-checkpoint", "CHECKPOINT"), "hf-checkpoint")
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
        set_contexts(keys, out)
        set_engine(keys, out)
    _dropout(keys, out)
    _records(keys, out)
    set_vision(out, column_in_json(keys, out, "multimodal-keys"), "multimodal-keys")
    set_steps(
        out, rows, keys.get("num-rollout"), keys.get("num-epoch"), ("--num-rollout", "--num-epoch"), name="num-rollout"
    )
    _warmup(keys, out)
    sort_out(keys, out, KeyRules(HARMLESS, "slime", conditions(keys), learning=()))


def conditions(keys: SourceKeys) -> dict[str, Condition]:
    """Returns the checks of reasons that depend on the source's flags."""
    updates = keys.get("num-steps-per-rollout")
    stages, colocate = keys.get("pipeline-model-parallel-size", 1), keys.truth("colocate", False)
    return {
        "interleaving needs more than one stage": lambda _: count(stages) == 1,
        "mini-batches are given by num-steps-per-rollout": lambda _: updates is not None,
        "one stage": lambda _: count(stages) == 1,
        "one mini-batch for each step": lambda out: out.get("batch.mini_batches") == 1,
        "the weights of prediction layers are not trained": lambda out: "model.mtp.coef" not in out.settings,
        "the same GPUs as the actor": lambda _: colocate,
        "prompts of evaluations have the same limit": lambda out: (
            count(keys.get("eval-max-prompt-len", 0)) == out.get("data.max_prompt_tokens")
        ),
        "only functions for generation read it": lambda _: "custom-generate-function-path" not in keys,
        "the built-in reward is one number": lambda _: "custom-rm-path" not in keys,
        "given by the file of custom-config-path": lambda _: keys.text("custom-tis-function-path", "").endswith(MIS),
        "the reward only asks the teacher": lambda _: keys.get("custom-rm-path") == REWARD,
        "FSDP trains without dropout": lambda _: keys.text("train-backend", "megatron") != "megatron",
        "custom-rm-path gives the reward": lambda _: "custom-rm-path" in keys,
        "follows from model.router_replay": lambda out: out.get("model.router_replay") != "off",
        "adapters are on all layers": lambda out: (
            "model.lora.rank" in out.settings and "model.lora.targets" not in out.settings
        ),
        "the program is known": lambda _: keys.get(PROGRAM) in PROGRAMS,
        "an engine has one rank": lambda out: out.get("rollout.parallel.tp") == 1,
    }


def _data(keys: SourceKeys, out: Translation) -> None:
    out.set("data.train.label_key", keys.get("label-key"), "label-key")
    template = keys.truth("apply-chat-template", False)
    out.set("data.chat_template", "auto" if template else "never", "apply-chat-template")
    longest = keys.get("rollout-max-prompt-len")
    if longest is not None:
        out.set("data.max_prompt_tokens", count(longest), "rollout-max-prompt-len")
        out.set("data.on_bad_row", "skip", "rollout-max-prompt-len: longer prompts are left out")
    context = keys.get("rollout-max-context-len")
    if longest is None and context is None and not is_supervised(keys):
        out.set(
            "data.max_prompt_tokens", out.get("data.max_prompt_tokens"), "slime has no limit: set your longest prompt"
        )
        out.notes.append("data.max_prompt_tokens: slime has no limit of prompts. A longer prompt stops the run here")
    response = out.get("rollout.sampling.max_response_tokens")
    most = count(context) if context else response + out.get("data.max_prompt_tokens")
    if context and longest is None and most > response:
        out.set("data.max_prompt_tokens", most - response, "rollout-max-context-len minus the longest response")
    most = max(most, response + out.get("data.max_prompt_tokens"))
    out.set("rollout.max_context_tokens", most, "rollout-max-context-len" if context else "prompt and response")
    stop = keys.get("rollout-stop")
    if stop is not None:
        out.set("rollout.sampling.stop", [stop] if isinstance(stop, str) else stop, "rollout-stop")
    ids = keys.get("rollout-stop-token-ids")
    if ids is not None:
        _stop_at(ids, keys, out)


def _stop_at(ids: Any, keys: SourceKeys, out: Translation) -> None:
    """Sets stop tokens. The checkpoint's end-of-sequence tokens always stop a response."""
    own = translation.model_config(out.get("model.path")).get("eos_token_id", [])
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
    set_lora(keys, out)
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


ENDS = ("decoder-first-pipeline-num-layers", "decoder-last-pipeline-num-layers")


def _stages(keys: SourceKeys, out: Translation) -> None:
    """Sets uneven first and last stages. Like Megatron, it divides the other layers evenly."""
    first, last = keys.get("decoder-first-pipeline-num-layers"), keys.get("decoder-last-pipeline-num-layers")
    stages, layers = out.get("actor.parallel.pp"), keys.get("num-layers")
    if (first is None and last is None) or stages == 1:
        return
    origin = ", ".join(ENDS)
    if layers is None:
        for name in ENDS:
            out.leave(name, keys.get(name), "stages are chosen automatically, as --num-layers is not given")
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
        if value and keys.text("train-backend", "megatron") == "megatron":
            out.differs(name, value, "there is no dropout here; set it to 0 (Megatron's default is 0.1)")


DATA_SOURCE = "slime.rollout.data_source.RolloutDataSourceWithBuffer"


def _records(keys: SourceKeys, out: Translation) -> None:
    """Sets the number of kept checkpoints, and names switches of slime that only test a part of it."""
    if keys.truth("keep-only-latest-checkpoint", False):
        out.set("checkpoint.keep", 1, "keep-only-latest-checkpoint")
    if keys.truth("disable-rollout-global-dataset", False) and not is_supervised(keys):
        reason = "prompts come from the own rollout loop there, and from files here"
        out.differs("disable-rollout-global-dataset", True, reason, ROWS)
    source = keys.get("data-source-path", DATA_SOURCE)
    if source not in (DATA_SOURCE, DATA_SOURCE.removesuffix("WithBuffer")):
        out.differs("data-source-path", source, "prompts are read from files here", ROWS)
    if keys.truth("debug-rollout-only", False):
        out.notes.append("debug-rollout-only: slime generates and trains nothing with this flag. The import trains")


def _warmup(keys: SourceKeys, out: Translation) -> None:
    fraction = keys.get("lr-warmup-fraction")
    if fraction is None:
        return
    updates = out.get("steps") * out.get("batch.mini_batches")
    out.set("actor.optimizer.warmup_steps", round(real(fraction) * updates), "lr-warmup-fraction of all updates")
