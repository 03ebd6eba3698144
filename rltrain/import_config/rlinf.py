"""Rules for RLinf's configs for language models. These configs are complete, so defaults seldom matter."""

from math import prod
from typing import Any

from rltrain.config.foreign import RLINF, Pair
from rltrain.import_config.influence import ATTACHED, ENVIRONMENT, REWARD, Condition, KeyRules, by_pattern, sort_out
from rltrain.import_config.shared_rules import choose_engine, column_of, refuse_action_heads, set_vision
from rltrain.import_config.translation import (
    ALGORITHMS,
    NOTHING,
    WITHOUT_COMPARISON,
    RowCounts,
    SourceKeys,
    Translation,
    UntranslatableError,
    apply,
    count,
    estimator,
    number,
    one_of,
    paths,
    real,
    set_clip,
    set_context,
    set_evaluation,
    set_named,
    set_steps,
    set_whitening,
)

LEARNING = ("algorithm.", "actor.", "critic.", "runner.", "inference.", "cluster.")
"""Sections without settings of an environment or a reward."""
SECTIONS = ("cluster", "runner", "algorithm", "actor", "rollout", "data", "reward", "critic", "env", "inference")
PLACED = "cluster.component_placement."
ROLES = {
    "actor": "actor",
    "rollout": "rollout",
    "reward": "reward",
    "critic": "critic",
    "inference": "inference",
    "actor_inference": "inference",
    "env": "env",
    "agent": "env",
}
PRECISIONS = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "bf16-mixed": "bfloat16", "16": "float16"}
DECAYS = {"constant": "constant", "cosine": "cosine", "linear": "linear"}
SERVED = "coding_online_rl"
TASKS = ("reasoning", SERVED, "math")
MEANS = {"token-mean": "token_mean", "seq-mean-token-mean": "sequence_mean"}
OWN = {"raw": "reinforce_plus_plus", "grpo_dynamic": "grpo"}
"""Estimators of RLinf alone: the reward itself, and GRPO for samples of several turns."""
IN_REWARD = "algorithm.reinpp_kl_beta"
BASELINE, TURNS = "algorithm.use_reinpp_baseline", "algorithm.advantage_mode"
FAR = 20.0
"""A bound of a ratio's logarithm that no token reaches."""
NEVER = 1e6
"""A bound that no mean ratio reaches."""
HARMLESS = by_pattern("""
logs only: runner.logger.* runner.log_interval *.calculate_flops *.megatron.use_profiler *.megatron.profiler.*
    profiler.*
    rollout.{print_outputs,disable_log_stats} rollout.sglang.decode_log_interval rollout.vllm.torch_profiler_dir
    reward.random_print_percent
names of processes: *.group_name
checkpoint files only: *.megatron.{ckpt_format,use_dist_ckpt,use_hf_ckpt,mbridge,ckpt_convertor.*}
    *.model.megatron_checkpoint inference.load_from_actor
steps are given: runner.max_epochs
the run ends by its epochs: runner.max_steps
resuming names no path: runner.resume_dir
ranks are started by torchrun: cluster.*
the names of columns are read: data.{type,dataset_name}
speed or memory only: data.{num_workers,val_rollout_batch_size,lazy_loading} actor.model.sharding_strategy
all rows are read: data.data_size
all rows are evaluated: data.validation_shuffle
no evaluation: runner.val_check_interval
engines have the actor's type: rollout.model.precision
engines always return them: rollout.return_logprobs
weights arrive by the weight sync: rollout.{validate_weight,validate_save_dir,validate_weight_first_sync}
    rollout.weight_reload
costs for a search of placements: profile_data.*
an engine has no stages: rollout.pipeline_parallel_size
speed or memory of the engine only: rollout.{distributed_executor_backend,detokenize,cuda_graph_max_bs,rollout_backend}
    rollout.{enforce_eager,gpu_memory_utilization,sglang_decode_log_interval,use_torch_compile,torch_compile_max_bs}
    rollout.sglang.enable_ep_moe rollout.sglang.{use_torch_compile,torch_compile_max_bs}
    rollout.sglang.attention_backend rollout.vllm.{attention_backend,enable_chunked_prefill,enable_prefix_caching}
    rollout.vllm.{enable_flash_infer_sampler,max_num_batched_tokens}
no sampling setting but the default: algorithm.sampling_params.{repetition_penalty,min_new_tokens}
read from config.json: rollout.model.model_type *.model.{model_type,activation,add_bias_linear,add_qkv_bias}
    *.model.{normalization,position_embedding_type,multi_latent_attention,qk_layernorm,init_method_std,moe_router_topk}
    *.model.moe_router_pre_softmax inference.model_type
its loss has the coefficient moe_aux_loss_coeff: *.model.moe_router_load_balancing_type
speed or memory only: *.model.{apply_rope_fusion,attention_softmax_in_fp32,batch_p2p_comm,bias_activation_fusion}
    *.model.{bias_dropout_fusion,encoder_seq_length,seq_length,gradient_accumulation_fusion,moe_grouped_gemm}
    *.model.{moe_permute_fusion,moe_token_dispatcher_type,persist_layer_norm,recompute_granularity,recompute_method}
    *.model.{recompute_num_layers,sequence_parallel,use_cpu_initialization,variable_seq_lengths}
    *.optim.{overlap_grad_reduce,overlap_param_gather,overlap_param_gather_with_optimizer_step,optimizer_enable_pin}
    *.optim.{use_precision_aware_optimizer,use_distributed_optimizer}
    *.megatron.{ddp_bucket_size,distributed_backend,distributed_timeout_minutes,tp_comm_bootstrap_backend}
    *.megatron.{tp_comm_overlap_cfg,accumulate_allreduce_grads_in_fp32}
    actor.{enable_dp_load_balance,enable_offload,offload_grad,offload_optimizer,offload_weight,micro_batch_size}
    actor.{eval_batch_size,mcore_gpt,spec_name} rollout.enable_offload
    critic.{mcore_gpt,spec_name,enable_dp_load_balance,micro_batch_size,global_batch_size}
    critic.{offload_optimizer,offload_weight,offload_grad}
    algorithm.{logprob_forward_micro_batch_size,training_batch_size_per_gpu,rollout_batch_size_per_gpu}
    algorithm.val_rollout_batch_size_per_gpu runner.{enable_dynamic_batch_size,max_tokens_per_mbs}
follows from the type of the model: *.optim.{bf16,fp16}
a scale of losses changes no number: *.optim.{loss_scale,initial_loss_scale,loss_scale_window}
mini-batches are given by n_minibatches: actor.global_batch_size
nothing is drawn in training: actor.seed critic.seed
no adapters: *.model.{lora_rank,lora_alpha}
every role has the actor's weights: inference.model.{model_path,precision}
rounding of sums only: actor.fsdp_config.mixed_precision.{reduce_dtype,buffer_dtype}
the type of the model: actor.fsdp_config.{mixed_precision.param_dtype,amp_autocast.enabled,amp_autocast.precision}
a scale of losses changes no number: actor.fsdp_config.grad_scaler.enabled
only other rewards read it: reward.reward_weights.*
settings of your reward function: reward.{reward_scale,reward_weights.*,use_prompt,reward_min_val,reward_max_val}
Megatron trains: actor.fsdp_config.*
speed or memory only: actor.fsdp_config.{backward_prefetch,forward_prefetch,cpu_offload,offload_pin_memory,fsdp_size}
    actor.fsdp_config.{enable_gradient_accumulation,limit_all_gathers,reshard_after_forward,sharding_strategy,strategy}
    actor.fsdp_config.{use_liger_kernel,use_orig_params,gradient_checkpointing,gradient_checkpointing_use_reentrant}
the learning rate is constant: *.lr_sched.{lr_decay_iters,min_lr} actor.optim.min_lr
RLinf reads optim.lr: *.lr_sched.max_lr
given by lr_warmup_fraction: *.lr_sched.lr_warmup_iters
warm-up begins at 0: *.lr_sched.lr_warmup_init
FSDP trains: actor.lr_sched.* actor.megatron.*
the checkpoint has the tokenizer: actor.tokenizer.* reward.tokenizer.* critic.tokenizer.* inference.tokenizer.*
speed or memory only: inference.model.{tensor_model_parallel_size,pipeline_model_parallel_size,sequence_parallel}
FSDP trains: inference.fsdp_config.*
no entropy term: algorithm.entropy_bonus algorithm.calculate_entropy
no penalty: algorithm.kl_penalty_type algorithm.kl_penalty
no correction of weights: algorithm.importance_sampling_clip
no critic: algorithm.gae_lambda algorithm.value_clip algorithm.huber_delta critic.*
no discounts: algorithm.gamma
given by clip_ratio_low and clip_ratio_high: algorithm.ratio_clip_eps
every mini-batch has samples of as many prompts as possible: algorithm.shuffle_rollout
settings of Hydra: hydra.* --*
""")


SWITCHES = (
    *("algorithm.use_valid_token_scale", "algorithm.normalize_advantages", "algorithm.importance_sampling_fix"),
    *(
        "actor.model.is_lora",
        "inference.model.is_lora",
        "algorithm.calculate_entropy_loss",
        "algorithm.recompute_logprobs",
        "algorithm.max_num_gen_batches",
        "algorithm.use_critic",
        "algorithm.use_value_loss",
    ),
)


def conditions(keys: SourceKeys) -> dict[str, Condition]:
    """Returns the checks of reasons that depend on the source's keys."""
    ends = [keys.get(f"algorithm.clip_ratio_{end}") for end in ("low", "high")]
    sampling = [keys.get(f"algorithm.sampling_params.{name}", 1) for name in ("repetition_penalty", "min_new_tokens")]
    fraction = keys.get("actor.lr_sched.lr_warmup_fraction")
    kind, reward = keys.get("rollout.model.precision"), keys.get("reward.reward_type", "math")
    megatron, resumed = keys.get("actor.training_backend", "megatron") == "megatron", keys.get("runner.resume_dir")
    stages, start = keys.get("rollout.pipeline_parallel_size", 1), keys.get("actor.lr_sched.lr_warmup_init", 0)
    return {
        "given by clip_ratio_low and clip_ratio_high": lambda _: not any(end in NOTHING for end in ends),
        "no sampling setting but the default": lambda _: all(real(one) in (0, 1) for one in sampling),
        "engines have the actor's type": lambda out: PRECISIONS.get(str(kind)) == out.get("model.dtype"),
        "only other rewards read it": lambda _: reward == "math",
        "settings of your reward function": lambda _: reward != "math",
        "Megatron trains": lambda _: megatron,
        "FSDP trains": lambda _: not megatron,
        "all rows are read": lambda _: real(keys.get("data.data_size", -1)) < 0,
        "resuming names no path": lambda _: resumed in (*NOTHING, "auto"),
        "an engine has no stages": lambda _: count(stages) == 1,
        "given by lr_warmup_fraction": lambda _: fraction not in NOTHING,
        "warm-up begins at 0": lambda _: real(start or 0) == 0,
        "the learning rate is constant": lambda out: out.get("actor.optimizer.decay") == "constant",
    }


def translate(keys: SourceKeys, out: Translation, rows: RowCounts) -> None:
    """Translates a config of RLinf into `out`."""
    refuse_action_heads(keys, "actor.model.model_type", "rollout.model.model_type")
    task = keys.get("runner.task_type", TASKS[0])
    if task not in TASKS:
        raise UntranslatableError(f"expected the task {' or '.join(TASKS)}, which learn from rewards by text")
    keys.get("algorithm.max_num_gen_batches", 1)
    if task == SERVED and keys.get("data.train_data_paths") in NOTHING:
        out.differs("runner.task_type", task, "prompts and rewards come from its server there", ENVIRONMENT)
    apply(RLINF, keys, out, dtype=one_of(PRECISIONS, "precisions"), decay=one_of(DECAYS, "learning rates"))
    _placement(keys, out)
    _trainer(keys, out)
    _algorithm(keys, out)
    _data(keys, out)
    _reward(keys, out)
    arguments: dict[str, Any] = {}
    if "rollout.gpu_memory_utilization" in keys:
        arguments["mem_fraction_static"] = keys.real("rollout.gpu_memory_utilization")
    if keys.truth("rollout.enforce_eager", False):
        arguments["disable_cuda_graph"] = True
    attention = keys.get("rollout.sglang.attention_backend")
    if attention not in NOTHING:
        arguments["attention_backend"] = str(attention)
    choose_engine(out, keys.text("rollout.rollout_backend", "sglang"), 1, arguments, "rollout.sglang.*, ...")
    steps = keys.get("runner.max_steps")
    named = ("runner.max_steps", "runner.max_epochs")
    set_steps(out, rows, None if steps in NOTHING or number(steps) < 1 else steps, keys.get(named[1]), named)
    own = keys.get("actor.model.model_path")
    if own not in NOTHING and own == out.get("model.path"):
        out.leave("actor.model.model_path", own, "model.path has the same value")
    _guard(keys, out)
    _scale(keys, out)
    set_vision(out, column_of(keys, out, "data.image_keys"), "data.image_keys")
    if not keys.truth("algorithm.calculate_entropy", True):
        out.settings.pop("loss.entropy_coef", None)
    sort_out(keys, out, KeyRules(HARMLESS, "rlinf", conditions(keys), SWITCHES, LEARNING, ("rollout.", "data.")))


def _guard(keys: SourceKeys, out: Translation) -> None:
    """Sets RLinf's guard for Megatron. It leaves micro-batches with a large mean ratio out of the loss."""
    key = "algorithm.early_stop_imp_ratio"
    bound = keys.get(key)
    if bound in NOTHING:
        return
    if keys.get("actor.training_backend", "megatron") != "megatron" or real(bound) >= NEVER:
        out.leave(key, bound, "only for Megatron, and for bounds within reach of a mean ratio")
    else:
        out.set("on_divergence.max_ratio", real(bound), key)
        out.notes.append(f"{key}: RLinf leaves out one micro-batch of all replicas. Here it is the whole mini-batch")


def _scale(keys: SourceKeys, out: Translation) -> None:
    """Handles RLinf's scale of a mean over tokens, for Megatron.

    If engines have ranks of their own, it divides sums by the longest response times the samples of one replica. Else
    it divides them by the tokens of the whole step.
    """
    key, parallel = "algorithm.use_valid_token_scale", ("tp", "pp", "cp")
    scaled, placed = keys.truth(key, False), out.placed
    if not scaled or keys.get("algorithm.loss_agg_func", "token-mean") != "token-mean":
        return
    longest = keys.count("runner.seq_length", 2048) - out.get("data.max_prompt_tokens")
    if keys.get("actor.training_backend", "megatron") != "megatron":
        out.leave(key, scaled, "only for Megatron")
    elif placed.get("actor") == placed.get("rollout") and out.get("batch.mini_batches") == 1:
        out.leave(key, scaled, "the mean over the tokens of a step with one mini-batch")
    elif placed.get("actor") != placed.get("rollout") and longest == out.get("rollout.sampling.max_response_tokens"):
        replicas = max(out.num_ranks("actor") // prod(out.get(f"actor.parallel.{name}") for name in parallel), 1)
        bound = out.get("actor.optimizer.clip_grad")
        out.set("loss.normalization", "dr_grpo", key)
        out.set("actor.optimizer.clip_grad", bound / replicas, f"{bound} for losses {replicas} times as large there")


def _placement(keys: SourceKeys, out: Translation) -> None:
    """Copies the ranks of RLinf. `placement` accepts all of its forms."""
    nodes = keys.count("cluster.num_nodes", 1)
    largest = 0
    placed_in, groups = keys.under(PLACED), _node_groups(keys.get("cluster.node_groups") or [])
    for name, given in placed_in.items():
        if name.endswith(".node_group"):
            continue
        components, value = name.removesuffix(".placement"), str(given)
        group = str(placed_in.get(f"{components}.node_group", "cluster"))
        if group in groups:
            value = _on_nodes(value, groups[group])
        elif group not in ("cluster", "node"):
            out.differs(PLACED + components, group, "there is no such node group")
        roles = [component.strip() for component in components.split(",")]
        unknown = [role for role in roles if role not in ROLES]
        if unknown:
            out.differs(PLACED + components, given, f"{', '.join(unknown)} is not a role here", ATTACHED)
        known = list(dict.fromkeys(ROLES[role] for role in roles if role in ROLES))
        if known:
            out.place(known, value, PLACED + components)
            largest = max([largest, *(int(one) + 1 for one in _numbers(value))])
    placed = out.placed
    if "reward" not in placed and "rollout" in placed:
        out.place(["reward"], placed["rollout"], "on the ranks of the engines")
    used = ("algorithm.kl_beta", *([IN_REWARD] if keys.get("algorithm.adv_type", "grpo") == "reinpp" else []))
    penalized = any([real(keys.get(key, 0) or 0) for key in used])
    if penalized and "reference" not in placed and "actor" in placed:
        out.place(["reference"], placed["actor"], "algorithm.kl_beta")
    out.world_size = max(largest, 8 * nodes if largest == 0 or nodes > 1 else largest)


RANKS_OF_NODE = 8


def _node_groups(given: Any) -> dict[str, list[int]]:
    """Returns the nodes of each group by its label."""
    groups = {}
    for group in given if isinstance(given, list) else []:
        nodes = [int(one) for one in _listed(str(group.get("node_ranks", "")))]
        groups[str(group.get("label"))] = sorted(nodes)
    return groups


def _listed(text: str) -> list[int]:
    items = [item.strip().partition("-") for item in text.split(",") if item.strip()]
    return [number for first, _, last in items for number in range(count(first), count(last or first) + 1)]


def _on_nodes(value: str, nodes: list[int]) -> str:
    """Converts ranks counted within a group of nodes to ranks of the job."""
    if nodes != [*range(nodes[0], nodes[0] + len(nodes))]:
        raise UntranslatableError(f"the nodes {nodes} of a group are not consecutive; expected a range")
    if value == "all":
        return f"node:{nodes[0]}-{nodes[-1]}" if len(nodes) > 1 else f"node:{nodes[0]}"
    moved = [
        number + nodes[0] * RANKS_OF_NODE
        for number in _listed(",".join(one.partition(":")[0] for one in value.split(",")))
    ]
    return ",".join(map(str, moved)) if moved != [*range(moved[0], moved[-1] + 1)] else f"{moved[0]}-{moved[-1]}"


def _numbers(value: str) -> list[str]:
    ranks = ",".join(item.partition(":")[0] for item in value.split(","))
    return [one for item in ranks.split(",") for one in item.split("-") if one.strip().isdigit()]


def _trainer(keys: SourceKeys, out: Translation) -> None:
    backend = keys.get("actor.training_backend", "megatron")
    if backend != "megatron":
        out.leave("actor.training_backend", backend, "Megatron trains, data-parallel with a distributed optimizer")
    offloads = [key for key in ("enable_offload", "offload_optimizer", "offload_weight", "offload_grad")]
    if any([keys.truth(f"actor.{key}", False) for key in offloads]):
        out.set("actor.offload", True, "actor.enable_offload, ...")
    if keys.truth("rollout.enable_offload", False):
        out.set("rollout.offload", True, "rollout.enable_offload")
    if keys.truth("actor.model.sequence_parallel", False) and out.get("actor.parallel.tp") > 1:
        out.set("actor.parallel.sequence_parallel", True, "actor.model.sequence_parallel")
    granularity = keys.get("actor.model.recompute_granularity")
    if granularity not in NOTHING:
        out.set("model.recompute", str(granularity), "actor.model.recompute_granularity")
    _optimizer(keys, out, megatron=backend == "megatron")
    tokens = keys.get("runner.max_tokens_per_mbs")
    if keys.truth("runner.enable_dynamic_batch_size", False) and tokens not in NOTHING:
        out.set("actor.micro_batch_tokens", count(tokens), "runner.max_tokens_per_mbs")
    else:
        samples = keys.count("algorithm.training_batch_size_per_gpu", keys.get("actor.micro_batch_size", 1))
        longest = keys.count("runner.seq_length", 2048)
        out.set("actor.micro_batch_tokens", samples * longest, "training_batch_size_per_gpu x runner.seq_length")


def _optimizer(keys: SourceKeys, out: Translation, *, megatron: bool) -> None:
    """Sets the optimizer. With FSDP, RLinf has another schedule of the learning rate, which is constant by default."""
    name = keys.text("actor.optim.optimizer", "adam")
    if name != "adam":
        out.differs("actor.optim.optimizer", name, "optimizers here are adamw and muon")
    if keys.truth("actor.optim.optimizer_cpu_offload", False):
        out.set("actor.optimizer.cpu_offload", True, "actor.optim.optimizer_cpu_offload")
    fraction = keys.get("actor.lr_sched.lr_warmup_fraction")
    decayed = keys.get("actor.lr_sched.lr_decay_iters")
    if not megatron:
        _set_type(keys, out)
        for path in ("actor.optimizer.warmup_steps", "actor.optimizer.decay"):
            out.settings.pop(path, None)
        key = "actor.optim.lr_scheduler"
        if keys.get(key, "constant") not in ("constant", "torch_constant"):
            out.differs(key, keys.get(key), "set actor.optimizer.decay and warmup_steps")
        return
    if fraction not in NOTHING and decayed not in NOTHING:
        steps, key = int(real(fraction) * count(decayed)), "actor.lr_sched.lr_warmup_fraction"
        out.set("actor.optimizer.warmup_steps", steps, f"{key} of lr_decay_iters")
        if not steps:
            out.leave(key, fraction, f"less than one of {decayed} updates, lr_decay_iters")


def _set_type(keys: SourceKeys, out: Translation) -> None:
    """Sets the type in which FSDP computes. The actor's own type is that of the weights in its optimizer."""
    weights = keys.get("actor.model.precision", "fp32")
    if PRECISIONS.get(str(weights)) == "float32":
        out.leave("actor.model.precision", weights, "weights are in float32 in the optimizer")
    else:
        out.differs("actor.model.precision", weights, "FSDP trains weights of this type there, and of float32 here")
    own = "actor.fsdp_config."
    casts = keys.truth(own + "amp_autocast.enabled", False)
    key = own + ("amp_autocast.precision" if casts else "mixed_precision.param_dtype")
    kind = keys.get(key)
    if kind not in NOTHING:
        set_named(out, "model.dtype", PRECISIONS, key, kind, "precisions")


def _algorithm(keys: SourceKeys, out: Translation) -> None:
    name = keys.text("algorithm.adv_type", "grpo")
    if name in ALGORITHMS or name in OWN:
        algorithm = {**ALGORITHMS, **OWN}[name]
        if algorithm == "reinforce_plus_plus" and keys.truth(BASELINE, False):
            algorithm = "reinforce_plus_plus_baseline"
        out.set("algorithm", algorithm, "algorithm.adv_type")
        _normalize(keys, out, algorithm, always=name == "reinpp")
        if name == "grpo_dynamic" and keys.get(TURNS, "turn") != "trajectory":
            out.differs(TURNS, keys.get(TURNS, "turn"), "the samples of a prompt are compared here, not their turns")
    else:
        algorithm = out.get("algorithm")
        out.differs("algorithm.adv_type", name, "no algorithm here has this estimator")
    if algorithm == "ppo":
        out.set("advantages.gae_lambda", keys.real("algorithm.gae_lambda", 0.95), "algorithm.gae_lambda")
        _critic(keys, out)
    elif discount := out.settings.pop("advantages.gamma", None):
        out.leave("algorithm.gamma", discount.value, "only gae discounts")
    _loss(keys, out)


def _loss(keys: SourceKeys, out: Translation) -> None:
    kind = keys.text("algorithm.loss_type", "actor")
    if kind not in ("actor", "actor_critic", "math_ppo_actor"):
        out.differs("algorithm.loss_type", kind, "only the loss of PPO is supported")
    clip = keys.get("algorithm.ratio_clip_eps", 0.2)
    ends = ("algorithm.clip_ratio_low", "algorithm.clip_ratio_high")
    bounds = [clip if keys.get(end) in NOTHING else keys.get(end) for end in ends]
    for end in ends:
        if keys.get(end) not in NOTHING and real(keys.get(end)) == real(clip):
            out.leave(end, keys.get(end), "the same as ratio_clip_eps")
    set_clip(out, *bounds, *(f"{end}, ratio_clip_eps" for end in ends))
    bound = keys.get("algorithm.clip_ratio_c")
    if bound not in NOTHING:
        out.set("loss.dual_clip", real(bound), "algorithm.clip_ratio_c")
    _penalty(keys, out)
    key = "algorithm.loss_agg_func"
    set_named(out, "loss.normalization", MEANS, key, keys.text(key, "token-mean"), "means")
    recomputes = keys.truth("algorithm.recompute_logprobs", True)
    out.set("loss.old_logprobs", "actor" if recomputes else "rollout", "algorithm.recompute_logprobs")
    cap = keys.get("algorithm.importance_sampling_clip")
    if keys.truth("algorithm.importance_sampling_fix", False) and cap not in NOTHING:
        out.set("loss.correction.high", real(cap), "algorithm.importance_sampling_clip")
    for end in ("min", "max"):
        bound = keys.get(f"algorithm.clip_log_ratio_{end}")
        if bound not in NOTHING and abs(real(bound)) >= FAR:
            out.leave(f"algorithm.clip_log_ratio_{end}", bound, "no logarithm of a ratio reaches it")


def _penalty(keys: SourceKeys, out: Translation) -> None:
    """Sets the KL penalty, in the loss or in the reward."""
    beta, rewarded = real(keys.get("algorithm.kl_beta", 0) or 0), real(keys.get(IN_REWARD, 0) or 0)
    if rewarded and keys.get("algorithm.adv_type", "grpo") != "reinpp":
        out.leave(IN_REWARD, rewarded, "only for reinpp")
    elif rewarded and beta:
        out.differs(IN_REWARD, rewarded, "a penalty is in the reward or in the loss here: remove one of both")
    elif rewarded:
        out.set("loss.kl.coef", rewarded, IN_REWARD)
        out.set("loss.kl.where", "reward", IN_REWARD)
        out.set("loss.kl.estimator", estimator(keys.get("algorithm.kl_penalty_type", "low_var_kl")), "kl_penalty_type")
    if beta:
        out.set("loss.kl.coef", beta, "algorithm.kl_beta")
        out.set("loss.kl.estimator", estimator(keys.get("algorithm.kl_penalty_type", "low_var_kl")), "kl_penalty_type")
        out.set("loss.kl.unbiased", False, "RLinf does not multiply it by the ratio")
    keys.get("algorithm.kl_penalty_type")


def _critic(keys: SourceKeys, out: Translation) -> None:
    """Sets the critic with its optimizer. It begins with the weights of the engines' model."""
    optimizer, model = "critic.optim.", "critic.model."
    names = (("lr", "lr"), ("min_lr", "min_lr"), ("weight_decay", "weight_decay"), ("clip_grad", "clip_grad"))
    betas = (("adam_beta1", "beta1", 0.9), ("adam_beta2", "beta2", 0.999), ("adam_eps", "eps", 1e-8))
    rules = (
        *(Pair(optimizer + there, f"critic.optimizer.{here}") for there, here in names),
        *(Pair(optimizer + there, f"critic.optimizer.{here}", default) for there, here, default in betas),
        Pair("critic.lr_sched.lr_decay_style", "critic.optimizer.decay"),
        Pair(model + "tensor_model_parallel_size", "critic.parallel.tp"),
        Pair(model + "pipeline_model_parallel_size", "critic.parallel.pp"),
        Pair("algorithm.value_cliprange", "critic.value_clip"),
        Pair("algorithm.critic_warmup_steps", "critic.critic_warmup_steps", 0),
    )
    apply(rules, keys, out, decay=one_of(DECAYS, "learning rates"))
    if any([keys.truth(f"critic.offload_{part}", False) for part in ("optimizer", "weight", "grad")]):
        out.set("critic.offload", True, "critic.offload_*")
    same = {"training_backend": "megatron", "model.precision": "fp32", "optim.optimizer": "adam"}
    for name, default in same.items():
        given = keys.get(f"critic.{name}")
        if given not in NOTHING and given == keys.get(f"actor.{name}", default):
            out.leave(f"critic.{name}", given, "the same as for the actor")
    if keys.truth("critic.use_critic_model", False):
        out.leave("critic.use_critic_model", True, "ppo has a critic")
    fraction = keys.get("critic.lr_sched.lr_warmup_fraction")
    if fraction not in NOTHING and real(fraction) == 0:
        out.leave("critic.lr_sched.lr_warmup_fraction", fraction, "no warm-up")
    for end in ("start", "end"):
        decay = keys.get(f"critic.lr_sched.{end}_weight_decay")
        if decay not in NOTHING and decay == keys.get(optimizer + "weight_decay"):
            out.leave(f"critic.lr_sched.{end}_weight_decay", decay, "critic.optim.weight_decay has the same value")


def _normalize(keys: SourceKeys, out: Translation, algorithm: str, *, always: bool) -> None:
    """Sets the normalisation of advantages over the batch. RLinf has it for every algorithm, and `always` for
    reinpp."""
    key = "algorithm.normalize_advantages"
    normalizes = keys.truth(key, algorithm == "ppo")
    set_whitening(out, algorithm, normalizes or always, key)
    if always and key in keys:
        out.leave(key, normalizes, "reinpp always normalizes advantages")


def _data(keys: SourceKeys, out: Translation) -> None:
    set_context(out, keys.get("runner.seq_length"), "runner.seq_length")
    if keys.truth("data.filter_prompt_by_length", False):
        out.set("data.on_bad_row", "skip", "data.filter_prompt_by_length")
    if not keys.truth("data.apply_chat_template", True):
        out.set("data.chat_template", "never", "data.apply_chat_template")
    for name, here in (("stop", "stop"), ("stop_token_ids", "stop_token_ids")):
        given = keys.get(f"algorithm.sampling_params.{name}")
        if given not in (*NOTHING, []):
            ends = given if isinstance(given, list) else [given]
            out.set(f"rollout.sampling.{here}", ends, f"algorithm.sampling_params.{name}")
    if keys.truth("algorithm.sampling_params.do_sample", True) is False:
        out.set("rollout.sampling.temperature", 0.0, "algorithm.sampling_params.do_sample")
    files = keys.get("data.val_data_paths")
    if files in NOTHING or not out.get("evaluation.interval"):
        out.settings.pop("evaluation.interval", None)
        return
    data = {"path": paths(files)}
    for name in ("prompt_key", "label_key"):
        data[name] = out.get(f"data.train.{name}")
    set_evaluation(out, data, {}, 1, "data.val_data_paths")


def _reward(keys: SourceKeys, out: Translation) -> None:
    kind = keys.get("reward.reward_type", "math")
    served = any(one.key == "runner.task_type" for one in out.differences)
    if kind == "math" and not served:
        _set_values(keys, out)
    elif served and kind == "math":
        out.differs("reward.reward_type", kind, "the server gives rewards there", REWARD)
    else:
        out.differs("reward.reward_type", kind, "set your function as reward.function: docs/rewards.md", REWARD)
    if keys.truth("reward.use_reward_model", False):
        out.differs("reward.use_reward_model", True, "place role reward_model: docs/rewards.md")


def _set_values(keys: SourceKeys, out: Translation) -> None:
    """Sets the rewards of right and wrong answers, which are scale and -scale by default."""
    ends = {name: real(keys.get(f"reward.reward_{name}_val", value)) for name, value in (("max", 1.0), ("min", -1.0))}
    scale, algorithm = real(keys.get("reward.reward_scale", 1.0) or 1.0), out.get("algorithm")
    right, wrong = ends["max"] * scale, ends["min"] * scale
    origin = f"reward.reward_scale: {right:g} and {wrong:g} there, {right - wrong:g} and 0 here"
    if wrong and (algorithm == "ppo" or (algorithm in WITHOUT_COMPARISON and not out.get("advantages.whiten"))):
        reason = f"a wrong answer has {wrong:g} there and 0 here, which {algorithm} learns from"
        out.differs("reward.reward_min_val", ends["min"], reason)
    if right - wrong == 1:
        out.set("reward.function", "math", "reward.reward_type")
    else:
        out.set("reward.functions", [{"function": "math", "weight": right - wrong}], origin)
        out.notes.append(f"{origin}. Advantages, which compare samples, are equal")
