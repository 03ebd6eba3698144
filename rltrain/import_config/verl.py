"""Rules for verl and its supervised trainer."""

import re
from typing import Any

from rltrain.config.foreign import TRANSFORMER, VERL, VERL_MEGATRON
from rltrain.import_config.influence import (
    ATTACHED,
    ENVIRONMENT,
    PROGRAM,
    Condition,
    KeyRules,
    by_pattern,
    sort_out,
    sort_out_override,
)
from rltrain.import_config.shared_rules import NAMES as FSDP_NAMES
from rltrain.import_config.shared_rules import (
    choose_engine,
    set_fully_sharded,
    set_pixels,
    set_verls_prediction_layers,
    set_vision,
)
from rltrain.import_config.translation import (
    NOTHING,
    RowCounts,
    SourceKeys,
    Translation,
    apply,
    count,
    one_of,
    paths,
    ranks,
    real,
    set_context,
    set_evaluation,
    set_mini_batches,
    set_steps,
)
from rltrain.import_config.translation import top_k as top_k_of
from rltrain.import_config.verl_learning import (
    A,
    R,
    has_kl_in_reward,
    is_megatron,
    is_older,
    named_estimator,
    selects_groups,
    set_algorithm,
    set_correction,
    set_critic,
    set_kind_of_optimizer,
    set_kl,
    set_lora,
    set_loss,
    set_micro,
    set_older_defaults,
    set_optimizer,
    set_reward,
    set_router_replay,
    set_teacher,
    slices_of,
)
from rltrain.import_config.verl_sft import is_supervised, translate_sft

# Keys of verl without influence on results, by pattern, with the reason. Reasons in `influence.CONDITIONS` or
# `conditions` are checked for each run.

HARMLESS = by_pattern("""
no Ray: ray_kwargs.*
logs only: global_profiler.* *.profiler.* trainer.logger trainer.log_val_generations trainer.rollout_data_dir
    trainer.controller_nsight_options.* trainer.worker_nsight_options.* actor_rollout_ref.actor.profile.*
    trainer.{stats_path,stats_save_freq} trainer.*wandb* trainer.*swanlab* trainer.*tensorboard* trainer.*log*_dir
    trainer.*log*_path trainer.*dump*_dir trainer.*dump*_path trainer.*save_path
    trainer.validation_data_dir trainer.project_name trainer.experiment_name
    actor_rollout_ref.actor.{calculate_entropy,calculate_sum_pi_squared,sum_pi_squared_checkpointing}
    actor_rollout_ref.rollout.{trace.*,prometheus.*,disable_log_stats}
    trainer.ray_wait_register_center_timeout trainer.esi_redundant_time
always evaluated before the first step: trainer.val_before_train
speed or memory only: trainer.balance_batch trainer.use_legacy_worker_impl trainer.use_v1 trainer.nccl_timeout
    transfer_queue.enable transfer_queue.num_data_storage_units data.val_batch_size data.dataloader_num_workers
    data.num_workers data.filter_overlong_prompts_workers data.use_shm reward.num_workers reward_model.num_workers
    reward.launch_reward_fn_async reward_model.launch_reward_fn_async actor_rollout_ref.nccl_timeout critic.nccl_timeout
detected automatically: trainer.device
no critic: critic.* trainer.critic_warmup trainer.max_critic_ckpt_to_keep algorithm.lam
steps are given: trainer.total_training_steps trainer.total_epochs rollout.total_epochs
no evaluation: trainer.test_freq rollout.test_freq data.val_max_samples
the trainer is synchronous: trainer.v1.*
checkpoint files only: trainer.default_hdfs_dir trainer.del_local_ckpt_after_load trainer.max_actor_ckpt_to_keep
    trainer.max_optim_to_keep
    trainer.max_critic_ckpt_to_keep actor_rollout_ref.*.checkpoint.* critic.checkpoint.*
    trainer.default_local_dir
resuming does not name a path: trainer.resume_from_path
not asynchronous: async_training.*
old log-probs are recomputed: async_training.use_rollout_log_probs
queues of the trainer: async_training.{use_trainer_do_validate,checkpoint_engine.enable}
    async_training.checkpoint_engine.{device_buffer_size_M,overlap_broadcast_and_consume} async_training.require_batches
rows are read unchanged: data.return_raw_chat data.return_raw_input_ids data.return_full_prompt
    data.return_multi_modal_inputs
reward functions name their columns: data.reward_fn_key
engines take prompts when they are free: data.gen_batch_size
speed or memory only: actor_rollout_ref.model.{use_fused_kernels,fused_kernel_options.impl_backend,use_liger,use_shm}
    actor_rollout_ref.model.{enable_activation_offload,enable_gradient_checkpointing}
    actor_rollout_ref.model.{tiled_mlp.enabled,tiled_mlp.num_shards}
    actor_rollout_ref.model.override_config.{attn_implementation,use_cache}
    actor_rollout_ref.*.{use_torch_compile,entropy_checkpointing,entropy_from_logits_with_chunking}
    actor_rollout_ref.*.{use_dynamic_bsz,log_prob_use_dynamic_bsz}
    actor_rollout_ref.*.{log_prob_micro_batch_size,log_prob_micro_batch_size_per_gpu,log_prob_max_token_len_per_gpu}
    actor_rollout_ref.actor.{ppo_micro_batch_size,ppo_micro_batch_size_per_gpu,ppo_max_token_len_per_gpu}
    actor_rollout_ref.*.ulysses_sequence_parallel_size
code in checkpoints is never run: data.trust_remote_code actor_rollout_ref.model.trust_remote_code
the checkpoint's processor has the size of patches: data.image_patch_size
no images: data.image_key data.video_key actor_rollout_ref.actor.freeze_vision_tower
longer prompts than data.max_prompt_length are left out: data.truncation
all rows are evaluated: data.validation_shuffle
choice of the trainer: model_engine -m actor_rollout_ref.*.model_engine actor_rollout_ref.*.strategy
no sandbox: reward_model.sandbox_fusion.{max_concurrent,memory_limit_mb}
no generation is skipped: actor_rollout_ref.rollout.skip_dump_dir
no reward model: reward_model.{n_gpus_per_node,nnodes,enable_resource_pool,strategy,model.*,rollout.*,megatron.*}
    reward_model.{micro_batch_size,micro_batch_size_per_gpu,forward_max_token_len_per_gpu,use_dynamic_bsz}
    reward_model.{ulysses_sequence_parallel_size,max_length,nccl_timeout,load_weight,use_reward_loop}
    reward.reward_model.*
speed or memory only: reward_model.{micro_batch_size,micro_batch_size_per_gpu,forward_max_token_len_per_gpu}
    reward_model.{use_dynamic_bsz,strategy,nccl_timeout,use_reward_loop} *reward_model.model.fsdp_config.param_offload
    reward_model.model.{use_remove_padding,use_shm,use_fused_kernels} *reward_model.rollout.gpu_memory_utilization
    *reward_model.rollout.{name,free_cache_engine,enforce_eager,skip_tokenizer_init,max_num_seqs}
    *reward_model.rollout.{max_num_batched_tokens,prompt_length,response_length,dtype}
no penalty in the reward: algorithm.kl_ctrl.* algorithm.kl_penalty
the coefficient of the penalty is fixed: algorithm.kl_ctrl.{horizon,target_kl}
no penalty in the loss: actor_rollout_ref.actor.{kl_loss_coef,kl_loss_type}
no reference: actor_rollout_ref.ref.*
no discounts: algorithm.gamma
advantages without a deviation: algorithm.norm_adv_by_std_in_grpo
no correction of weights: algorithm.rollout_correction.{rollout_is_threshold,rollout_rs_threshold,loss_type}
no selection of groups: algorithm.filter_groups.{metric,max_num_gen_batches}
groups with equal rewards have equal metrics: algorithm.filter_groups.metric
sequences are always packed: actor_rollout_ref.model.use_remove_padding actor_rollout_ref.*.use_remove_padding
    actor_rollout_ref.*.megatron.use_remove_padding
no adapters: actor_rollout_ref.model.{lora_alpha,target_modules,exclude_modules,lora_adapter_path,lora.*}
storage of adapters: actor_rollout_ref.model.lora.{merge,a2a_experimental}
    actor_rollout_ref.model.lora.{freeze_vision_model,freeze_vision_projection,freeze_language_model}
Megatron trains: actor_rollout_ref.*.fsdp_config.*
speed or memory only: actor_rollout_ref.*.fsdp_config.{param_offload,optimizer_offload,offload_policy,forward_prefetch}
    actor_rollout_ref.*.fsdp_config.{grad_offload,use_orig_params,wrap_policy.min_num_params,reshard_after_forward,fsdp_size}
    actor_rollout_ref.*.fsdp_config.wrap_policy.transformer_layer_cls_to_wrap
    actor_rollout_ref.*.fsdp_config.{entropy_checkpointing,entropy_from_logits_with_chunking,use_torch_compile}
    actor_rollout_ref.*.fsdp_config.{strategy,full_determinism,ulysses_sequence_parallel_size}
models that are only evaluated have the type model.dtype: actor_rollout_ref.ref.fsdp_config.model_dtype
the type of the model: actor_rollout_ref.*.fsdp_config.mixed_precision.param_dtype
rounding of sums only: actor_rollout_ref.*.fsdp_config.mixed_precision.{reduce_dtype,buffer_dtype}
FSDP trains: actor_rollout_ref.*.megatron.*
speed or memory only: actor_rollout_ref.*.megatron.{param_offload,grad_offload,optimizer_offload}
    actor_rollout_ref.*.megatron.{sequence_parallel,use_distributed_optimizer,dtype_for_load,use_megatron_fsdp}
    actor_rollout_ref.*.megatron.override_ddp_config.{overlap_grad_reduce,overlap_param_gather,bucket_size}
    actor_rollout_ref.*.megatron.override_ddp_config.{grad_reduce_in_fp32,average_in_collective}
    actor_rollout_ref.*.megatron.override_ddp_config.use_distributed_optimizer
    actor_rollout_ref.*.megatron.override_transformer_config.{apply_rope_fusion,attention_backend,moe_permute_fusion}
    actor_rollout_ref.*.megatron.override_transformer_config.{masked_softmax_fusion,bias_activation_fusion}
    actor_rollout_ref.*.megatron.override_transformer_config.{bias_dropout_fusion,bias_swiglu_fusion,batch_p2p_comm}
    actor_rollout_ref.*.megatron.override_transformer_config.{moe_router_dtype,moe_token_dispatcher_type}
    actor_rollout_ref.*.megatron.override_transformer_config.{moe_enable_deepep,moe_grouped_gemm,use_flash_attn}
    actor_rollout_ref.*.megatron.override_transformer_config.{moe_shared_expert_overlap,use_fused_weighted_squared_relu}
    actor_rollout_ref.*.megatron.override_transformer_config.{recompute_granularity,recompute_method,recompute_modules}
    actor_rollout_ref.*.megatron.override_transformer_config.{recompute_num_layers,use_arbitrary_attention_mask}
    actor_rollout_ref.*.megatron.override_transformer_config.{sequence_parallel,context_parallel_algo}
    actor_rollout_ref.*.megatron.override_transformer_config.{context_parallel_size,cross_entropy_loss_fusion}
    actor_rollout_ref.*.megatron.override_transformer_config.{deallocate_pipeline_outputs,persist_layer_norm}
    actor_rollout_ref.*.megatron.override_transformer_config.{gradient_accumulation_fusion,variable_seq_lengths}
    actor_rollout_ref.*.megatron.override_transformer_config.{overlap_moe_expert_parallel_comm,fused_single_qkv_rope}
checkpoint files only: actor_rollout_ref.*.megatron.{use_mbridge,vanilla_mbridge,dist_checkpointing_path}
    actor_rollout_ref.*.megatron.{use_dist_checkpointing,dist_checkpointing_prefix}
stages are automatic: actor_rollout_ref.*.megatron.override_transformer_config.account_for_loss_in_pipeline_split
    actor_rollout_ref.*.megatron.override_transformer_config.account_for_embedding_in_pipeline_split
    actor_rollout_ref.*.megatron.override_transformer_config.num_layers_in_first_pipeline_stage
    actor_rollout_ref.*.megatron.override_transformer_config.num_layers_in_last_pipeline_stage
    actor_rollout_ref.*.megatron.override_transformer_config.pipeline_model_parallel_layout
read from config.json: actor_rollout_ref.*.megatron.override_transformer_config.{swiglu,normalization}
    actor_rollout_ref.*.megatron.override_transformer_config.moe_router_enable_expert_bias
    actor_rollout_ref.*.megatron.override_transformer_config.moe_router_score_function
speed or memory only: *.override_optimizer_config.{overlap_cpu_optimizer_d2h_h2d,use_precision_aware_optimizer}
    *.override_optimizer_config.optimizer_offload_fraction
implementation of torch or Megatron: *.optim.optimizer_impl
the schedule covers the whole run: *.optim.{lr_decay_steps,total_training_steps}
the learning rate is constant: *.optim.{min_lr,min_lr_ratio,num_cycles}
the learning rate has no such schedule: *.optim.{lr_wsd_decay_steps,lr_wsd_decay_style,num_cycles}
warm-up is given in steps: *.optim.lr_warmup_steps_ratio
seeds of orders: actor_rollout_ref.actor.data_loader_seed critic.data_loader_seed critic.megatron.seed
    actor_rollout_ref.*.fsdp_config.seed actor_rollout_ref.*.megatron.seed
every mini-batch is the whole step: actor_rollout_ref.actor.shuffle critic.shuffle
mini-batches keep the order of prompts, which is random: actor_rollout_ref.actor.shuffle critic.shuffle
given by clip_ratio_low and clip_ratio_high: actor_rollout_ref.actor.clip_ratio
a loss without the clip: actor_rollout_ref.actor.{clip_ratio,clip_ratio_low,clip_ratio_high}
not the loss clip: actor_rollout_ref.actor.clip_ratio_c
not the loss sapo: actor_rollout_ref.actor.{tau_pos,tau_neg}
not the loss clip_cov: actor_rollout_ref.actor.policy_loss.{clip_cov_ratio,clip_cov_lb,clip_cov_ub}
not the loss kl_cov: actor_rollout_ref.actor.policy_loss.{kl_cov_ratio,ppo_kl_coef}
sums are divided by the longest response: actor_rollout_ref.actor.loss_scale_factor
speed or memory only: actor_rollout_ref.ref.{entropy_checkpointing,entropy_from_logits_with_chunking}
    actor_rollout_ref.ref.megatron.{tensor_model_parallel_size,pipeline_model_parallel_size,context_parallel_size}
    actor_rollout_ref.ref.megatron.{expert_model_parallel_size,expert_tensor_parallel_size}
    actor_rollout_ref.ref.megatron.virtual_pipeline_model_parallel_size
    actor_rollout_ref.rollout.{mode,enable_chunked_prefill,enable_prefix_caching,max_num_batched_tokens}
    actor_rollout_ref.rollout.{gpu_memory_utilization,layered_summon,agent.num_workers,cudagraph_capture_sizes,multi_stage_wake_up}
    actor_rollout_ref.rollout.{skip_tokenizer_init,scheduling_policy,enforce_eager,moe_tensor_parallel_size}
    actor_rollout_ref.rollout.{disaggregation.enable,data_parallel_size}
    actor_rollout_ref.rollout.engine_kwargs.vllm.{disable_mm_preprocessor_cache,mm_processor_cache_gb,swap_space}
    actor_rollout_ref.rollout.engine_kwargs.vllm.{compilation_config,enable_expert_parallel,async_scheduling}
    actor_rollout_ref.rollout.engine_kwargs.vllm.compilation_config.{cudagraph_mode,cudagraph_capture_sizes}
    actor_rollout_ref.rollout.engine_kwargs.vllm.{attention_backend,max_num_batched_tokens,enable_sleep_mode}
    actor_rollout_ref.rollout.engine_kwargs.trtllm.{batch_wait_timeout_iters,batch_wait_max_tokens_ratio}
    actor_rollout_ref.rollout.engine_kwargs.trtllm.{cuda_graph_config,moe_config,kv_cache_config,enable_attention_dp}
only for separate engines: actor_rollout_ref.rollout.{nnodes,n_gpus_per_node} rollout.nnodes rollout.n_gpus_per_node
engines leave a shared device: actor_rollout_ref.rollout.free_cache_engine
weights arrive by the weight sync: actor_rollout_ref.rollout.load_format
engines always return them: actor_rollout_ref.rollout.calculate_log_probs
log-probs of the sampling distribution: actor_rollout_ref.rollout.logprobs_mode
single-turn generation: actor_rollout_ref.rollout.multi_turn.{format,max_assistant_turns,max_user_turns}
    actor_rollout_ref.rollout.multi_turn.{max_parallel_calls,max_tool_response_length,tool_response_truncate_side}
    actor_rollout_ref.rollout.multi_turn.{tool_config_path,interaction_config_path,completion_callback,max_turns}
    actor_rollout_ref.rollout.multi_turn.{use_inference_chat_template,tokenization_sanity_check_mode}
    actor_rollout_ref.rollout.multi_turn.enable_tokenization_sanity_check
rltrain has its own weight sync: actor_rollout_ref.rollout.checkpoint_engine.{backend,update_weights_bucket_megabytes}
    actor_rollout_ref.rollout.update_weights_bucket_megabytes
no evaluation: actor_rollout_ref.rollout.{val_kwargs.*,n_val,val_temperature}
evaluation is greedy: actor_rollout_ref.rollout.val_kwargs.{temperature,top_p,top_k,do_sample}
layout of the engine only: actor_rollout_ref.rollout.expert_parallel_size
engines here serve the same model: actor_rollout_ref.rollout.name
follows from model.router_replay: actor_rollout_ref.rollout.enable_rollout_routing_replay
the run ends by its epochs: rollout.total_rollout_steps
the steps of a fully asynchronous run: trainer.total_training_steps
the teacher replaces the loss: actor_rollout_ref.actor.{entropy_coeff,use_kl_loss,kl_loss_coef,kl_loss_type}
no teacher: distillation.*
FSDP or Megatron trains: actor_rollout_ref.actor.veomni.* actor_rollout_ref.actor.torchtitan.*
its keys are read: --config-name --config-path
the version of verl: --source-version
the agent is off: actor_rollout_ref.agent.*
tokens of observations are never trained on: actor_rollout_ref.actor.state_masking
    actor_rollout_ref.agent.mask_observations
settings of Hydra: hydra.*
""")
CRITIC_HARMLESS = by_pattern("""
speed or memory only: critic.{use_dynamic_bsz,ppo_micro_batch_size,ppo_micro_batch_size_per_gpu}
    critic.{ppo_max_token_len_per_gpu,forward_micro_batch_size,forward_micro_batch_size_per_gpu}
    critic.{forward_max_token_len_per_gpu,ulysses_sequence_parallel_size,strategy,model.use_shm}
    critic.model.{enable_gradient_checkpointing,enable_activation_offload,use_fused_kernels,use_liger}
    critic.model.fsdp_config.{param_offload,optimizer_offload,offload_policy,forward_prefetch,reshard_after_forward}
    critic.model.fsdp_config.{fsdp_size,grad_offload,wrap_policy.min_num_params,wrap_policy.transformer_layer_cls_to_wrap}
    critic.fsdp.{param_offload,optimizer_offload,offload_policy,forward_prefetch,reshard_after_forward,fsdp_size}
    critic.model.override_config.attn_implementation
    critic.megatron.{param_offload,grad_offload,optimizer_offload,sequence_parallel,use_distributed_optimizer}
    critic.megatron.{use_mbridge,vanilla_mbridge,use_dist_checkpointing,dist_checkpointing_path,use_remove_padding}
    critic.megatron.override_transformer_config.{recompute_granularity,recompute_method,recompute_num_layers}
sequences are always packed: critic.model.use_remove_padding
code in checkpoints is never run: critic.model.trust_remote_code
no adapters: critic.model.{lora_alpha,target_modules,lora.*}
a critic has no penalty: critic.kl_ctrl.kl_coef critic.kl_ctrl.type
""")


DTYPE = "model.dtype"
TYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


def conditions(keys: SourceKeys, megatron: bool) -> dict[str, Condition]:
    """Returns the checks of reasons that depend on the source's keys."""
    modes = keys.get("trainer.resume_mode", "auto"), keys.truth("actor_rollout_ref.rollout.multi_turn.enable", False)
    skips = keys.truth(R + "skip_rollout", False)
    kinds = [keys.get(f"actor_rollout_ref.{one}.fsdp_config.mixed_precision.param_dtype") for one in ("actor", "ref")]
    strategy, mode = keys.text(A + "strategy", "fsdp"), keys.get("trainer.v1.trainer_mode", "sync")
    return {
        "Megatron trains": lambda _: megatron,
        "the type of the model": lambda out: {TYPES.get(str(one), one) for one in kinds} <= {*NOTHING, out.get(DTYPE)},
        "FSDP or Megatron trains": lambda _: strategy in (*FSDP_NAMES, "megatron"),
        "old log-probs are recomputed": lambda out: out.get("loss.old_logprobs") != "rollout",
        "no sandbox": lambda _: keys.get("reward_model.sandbox_fusion.url") in NOTHING,
        "no generation is skipped": lambda _: not skips,
        "the trainer is synchronous": lambda _: mode == "sync",
        "FSDP trains": lambda _: not megatron,
        "resuming does not name a path": lambda _: modes[0] != "resume_path",
        "single-turn generation": lambda _: not modes[1],
        "the learning rate is constant": lambda out: out.get("actor.optimizer.decay") == "constant",
        "warm-up is given in steps": lambda _: count(keys.get(A + "optim.lr_warmup_steps", -1) or -1) >= 0,
        "every mini-batch is the whole step": lambda out: out.get("batch.mini_batches") == 1,
        "follows from model.router_replay": lambda out: out.get("model.router_replay") != "off",
        "the steps of a fully asynchronous run": lambda _: keys.get(DRAWN) not in NOTHING,
        "the agent is off": lambda _: not keys.truth(AGENT + "enable_agent", True),
        "tokens of observations are never trained on": lambda _: keys.truth(A + "state_masking", True),
        "given by clip_ratio_low and clip_ratio_high": lambda _: not keys.older,
    }


# The RL trainer. Defaults are from verl/trainer/config (ppo_trainer.yaml).

SECTIONS = (
    "actor_rollout_ref",
    "algorithm",
    "critic",
    "data",
    "trainer",
    "reward",
    "reward_model",
    "custom_reward_function",
    "model_engine",
    "model",
    "optim",
    "engine",
    "rollout",
    "async_training",
    "ray_kwargs",
    "distillation",
    "global_profiler",
    "checkpoint",
    "transfer_queue",
)
MODULE = "-m"
LABEL = "reward_model.ground_truth"


def translate(keys: SourceKeys, out: Translation, rows: RowCounts) -> None:
    """Translates a config of verl into `out`."""
    if is_supervised(keys):
        translate_sft(keys, out, rows)
        return
    keys.older = is_older(keys, out)
    _program(keys, out)
    apply(VERL, keys, out, dtype=one_of({"fp8": "fp8"}, "types of engines' weights"))
    _conversations(keys, out)
    _batch(keys, out)
    _placement(keys, out)
    _trainer(keys, out)
    set_algorithm(keys, out)
    set_loss(keys, out)
    set_older_defaults(keys, out)
    set_kl(keys, out)
    set_correction(keys, out)
    _data(keys, out)
    _tokenizers(keys, out)
    set_reward(keys, out)
    _engine(keys, out)
    _records(keys, out)
    _steps(keys, out, rows)
    set_optimizer(keys, out, A + "optim.", "actor", 1e-6)
    if out.get("algorithm") == "ppo":
        set_critic(keys, out)
    set_teacher(keys, out)
    _vision(keys, out)
    checks = conditions(keys, is_megatron(keys))
    table = {**HARMLESS, **CRITIC_HARMLESS}
    sort_out(keys, out, KeyRules(table, "verl", checks, learning=LEARNING, attached=("data.", R)))


LEARNING = (
    A,
    "actor_rollout_ref.ref.",
    "actor_rollout_ref.model.",
    "algorithm.",
    "critic.",
    "trainer.",
    "distillation.",
)
"""Sections without settings of an environment or a reward."""


PROGRAMS = (
    *("main_ppo", "main_ppo_sync", "main_dapo", "fully_async_main", "async_main_ppo", "main_sdpo", "main_fapo"),
    *("one_step_off_policy.main_ppo", "main_ppo_v1"),
)
OF_VERL = ("verl.", "recipe.", "fully_async_policy.", "one_step_off_policy.", "dapo.", "fapo.")
"""Packages of verl's own programs. Their last part must be in PROGRAMS."""


def _program(keys: SourceKeys, out: Translation) -> None:
    """Refuses programs other than verl's own trainers. Only running them tells what they compute.

    One that starts verl's trainer has a reward or an environment of its own.
    """
    module = keys.get(MODULE)
    if module is None or (str(module).rsplit(".", 1)[-1] in PROGRAMS and str(module).startswith(OF_VERL)):
        return
    own = _trainer_of(str(module), keys)
    if own is None:
        reason = "it is none of verl's own trainers, such as verl.trainer.main_ppo"
        out.differs(MODULE, module, reason, None if re.search(GENERATES, str(module)) else PROGRAM)
    else:
        reason = f"it starts a trainer of its own, {own}, and none of verl's: compare what else that one computes"
        out.differs(MODULE, module, reason, ATTACHED)


GENERATES = r"generation|generate|eval|infer"
"""Pattern of programs that train nothing."""
TRAINERS = ("RayPPOTrainer", "RayDAPOTrainer")
OWN_TRAINER = re.compile(r"\b(\w*Trainer)\s*\(")
REPLACED = re.compile(r"\b(Ray\w*Trainer\.\w+)\s*=[^=]")
TAKEN_FROM = re.compile(r"^\s*from\s+(\S+)\s+import\s+[^\n]*\bRay\w*Trainer\b", re.MULTILINE)


def _trainer_of(module: str, keys: SourceKeys) -> str | None:
    """Returns the trainer of a program's own, by its text. None if it starts verl's, or if the text is not found."""
    program = keys.file(module.replace(".", "/") + ".py")
    if program is None:
        return None
    text = program.read_text(encoding="utf-8", errors="replace")
    started = {*OWN_TRAINER.findall(text)} - {*TRAINERS}
    started |= {*REPLACED.findall(text)}
    places = {place for place in TAKEN_FROM.findall(text) if not place.startswith(("verl.trainer.ppo.", "recipe.dapo"))}
    return min(started | places, default=None)


def _vision(keys: SourceKeys, out: Translation) -> None:
    """Sets the tower and the images of rows. verl's default of data.image_key counts only for models that see."""
    set_vision(out, keys.get(IMAGES), IMAGES, frozen=FROZEN if keys.truth(FROZEN, False) else None)
    set_pixels(keys, out, "data.", "data.mm_processor_kwargs.")
    if keys.get("data.video_key", "videos") != "videos":
        out.differs("data.video_key", keys.get("data.video_key"), "give the frames of videos as images")


def _steps(keys: SourceKeys, out: Translation, rows: RowCounts) -> None:
    steps, epochs = "trainer.total_training_steps", "trainer.total_epochs"
    most = keys.get(DRAWN)
    if most in NOTHING:
        drawn = count(keys.get(DRAWN_AT_ONCE) or 0) if selects_groups(keys) else 0
        set_steps(out, rows, keys.get(steps), keys.get(epochs, 30), (steps, epochs), name=steps, at_once=drawn)
    else:
        named = (f"{DRAWN} {most} // prompts per step", epochs)
        set_steps(out, rows, count(most) // out.get("batch.prompts_per_step"), keys.get(epochs, 30), named)


DRAWN = "rollout.total_rollout_steps"
"""Number of prompts generated by a fully asynchronous run, at most those of its epochs."""
DRAWN_AT_ONCE = "data.gen_batch_size"
"""Prompts of a batch of rows. A step that selects groups draws at least one such batch."""
GROUPER = A + "use_prefix_grouper"


def _batch(keys: SourceKeys, out: Translation) -> None:
    prompts = out.get("batch.prompts_per_step")
    fully = prompts == 0
    if fully:  # fully asynchronous: a step is what is required of samples between two updates
        prompts = keys.count(A + "ppo_mini_batch_size", 256) * keys.count("async_training.require_batches", 1)
        out.set("batch.prompts_per_step", prompts, "ppo_mini_batch_size x async_training.require_batches")
    drawn = keys.get(DRAWN_AT_ONCE)
    if not (keys.older or fully or selects_groups(keys) or drawn in NOTHING or count(drawn) == prompts):
        out.notes.append(f"{DRAWN_AT_ONCE}: a step has these {drawn} prompts, and not data.train_batch_size {prompts}")
        prompts = count(drawn)
        out.set("batch.prompts_per_step", prompts, DRAWN_AT_ONCE)
    _mini_batches(keys, out, prompts)
    if keys.truth(GROUPER, False):  # without it, auto shares too: results are the same but for rounding
        out.set("actor.share_prefixes", True, GROUPER)
    longest = out.get("data.max_prompt_tokens") + out.get("rollout.sampling.max_response_tokens")
    longest = -(-longest // slices_of(keys))
    dynamic = keys.truth(A + "use_dynamic_bsz", False)
    set_micro(keys, out, "actor", A + "ppo_max_token_len_per_gpu", A + "ppo_micro_batch_size_per_gpu", dynamic, longest)


def _mini_batches(keys: SourceKeys, out: Translation, prompts: int) -> None:
    """Sets mini-batches of whole prompts. With `n_agent` prompts are repeated before verl counts them."""
    name = A + "ppo_mini_batch_size"
    mini, agents = keys.get(name, 256), keys.get(AGENTS)
    keys.assumed[AGENTS] = 1
    if agents in NOTHING or count(agents) == 1:
        set_mini_batches(out, prompts, mini, name + ", which counts prompts")
        return
    out.set("batch.samples_per_prompt", keys.count(R + "n", 1) * count(agents), f"{R}n x {AGENTS}")
    set_mini_batches(out, prompts * count(agents), mini, f"{name}, which counts samples with {AGENTS}")
    if "batch.mini_batches_by" in out.settings:
        out.set("batch.mini_batches_by", "samples", f"{AGENTS}: mini-batches count samples")


AGENT = "actor_rollout_ref.agent."
AGENTS = R + "n_agent"
"""Samples per prompt of agent stacks. Prompts are repeated before the rollout."""
TURN, SEEN, TURNS = "data.max_start_length", "data.max_obs_length", "max_turns"
"""Lengths of the first prompt and of an observation, where the other lengths are those of a turn and a conversation."""


def _conversations(keys: SourceKeys, out: Translation) -> None:
    """Sets lengths and turns of agent stacks.

    With `TURN` and `SEEN` the longest response is that of a turn, and the longest prompt that of the conversation. One
    more turn answers at the end.
    """
    of_agents = TURN in keys and SEEN in keys
    for masks, default in ((A + "state_masking", not of_agents), (AGENT + "mask_observations", True)):
        if keys.truth(masks, default):
            keys.assumed[masks] = True
        else:
            out.differs(masks, False, "tokens of observations are trained on there, and never here")
    limit = keys.get(R + "multi_turn.max_assistant_turns")
    if limit not in NOTHING and keys.truth(R + "multi_turn.enable", False):
        out.set("env.max_turns", count(limit), R + "multi_turn.max_assistant_turns")
    if not of_agents:
        return
    of_turn, whole = out.get("rollout.sampling.max_response_tokens"), out.get("data.max_prompt_tokens")
    out.set("data.max_prompt_tokens", keys.count(TURN), TURN)
    out.set("rollout.sampling.max_response_tokens", whole, "data.max_prompt_length: all turns and observations")
    out.set("env.max_turn_tokens", of_turn, "data.max_response_length: one turn")
    if TURNS in keys:
        out.set("env.max_turns", keys.count(TURNS) + 1, f"{TURNS}, and the answer")
    out.differs(SEEN, keys.get(SEEN), "turns come from an environment here: env.function", ENVIRONMENT)


def _placement(keys: SourceKeys, out: Translation) -> None:
    """Places the roles. The hybrid engine has all roles on all GPUs. Asynchronous trainers have separate GPUs for
    engines."""
    nodes, per_node = keys.count("trainer.nnodes", 1), keys.count("trainer.n_gpus_per_node", 8)
    trained = nodes * per_node
    module, mode = keys.text(MODULE, ""), keys.get("trainer.v1.trainer_mode", "sync")
    hybrid = keys.truth("actor_rollout_ref.hybrid_engine", True)
    apart = "fully_async" in module or not hybrid or mode == "separate_async"
    if "fully_async" in module and not hybrid:
        out.leave("actor_rollout_ref.hybrid_engine", hybrid, "engines of this program always have GPUs of their own")
    roles = ["actor", "critic"] if named_estimator(keys) == "gae" else ["actor"]
    if keys.truth(A + "use_kl_loss", False) or has_kl_in_reward(keys):
        roles.append("reference")
    out.ranks_per_node = per_node
    out.place(roles, ranks(0, trained), f"trainer.nnodes {nodes} x trainer.n_gpus_per_node {per_node}")
    if not apart:
        out.place(["rollout", "reward"], ranks(0, trained), "hybrid engine")
        out.world_size = trained
        return
    own_nodes = keys.first("rollout.nnodes", R + "nnodes", default=nodes)[1] or nodes
    own_per_node = keys.first("rollout.n_gpus_per_node", R + "n_gpus_per_node", default=per_node)[1]
    engines = count(own_nodes) * count(own_per_node)
    out.place(["rollout", "reward"], ranks(trained, engines), "rollout.nnodes x rollout.n_gpus_per_node, after them")
    out.world_size = trained + engines
    _schedule(keys, out, module, "fully_async" in module)


def _schedule(keys: SourceKeys, out: Translation, module: str, fully: bool) -> None:
    """Sets the schedule of asynchronous trainers. `fully` says that it is the fully asynchronous one, with defaults of
    its own."""
    steps = ("async_training.trigger_parameter_sync_step", SEPARATE + "parameter_sync_step")
    every = count(keys.first(*steps, default=4 if fully else 1)[1])
    out.set("schedule.mode", "asynchronous", module or "trainer.v1.trainer_mode")
    stale = keys.real("async_training.staleness_threshold", 0.1 if fully else 0)
    off_policy = None if fully else keys.get("trainer.v1.sampler.max_off_policy_threshold")
    most = every + round(stale * every) if off_policy is None else count(off_policy)
    out.set("schedule.max_staleness", max(most, every), "staleness threshold, in steps")
    out.set("schedule.sync_every", every, "parameter sync step")
    if keys.truth("async_training.partial_rollout", fully):
        out.set("schedule.partial_rollouts", True, "async_training.partial_rollout")
    taken = keys.truth("async_training.use_rollout_log_probs", fully)
    if taken and not keys.truth("async_training.compute_prox_log_prob", False):
        out.set("loss.old_logprobs", "rollout", "async_training.use_rollout_log_probs, default of the trainer")


SEPARATE = "trainer.v1.separate_async."
IMAGES, FROZEN = "data.image_key", A + "freeze_vision_tower"


def _trainer(keys: SourceKeys, out: Translation) -> None:
    strategy = keys.text(A + "strategy", keys.get("model_engine", "dp"))
    checkpointing = keys.truth("actor_rollout_ref.model.enable_gradient_checkpointing", True)
    megatron = is_megatron(keys)
    set_lora(keys, out, "actor_rollout_ref.model.", megatron)
    set_router_replay(keys, out)
    set_verls_prediction_layers(keys, out, "actor_rollout_ref.model.", megatron)
    set_kind_of_optimizer(keys, out, A + "optim.")
    if megatron:
        apply(VERL_MEGATRON, keys, out)
        if out.get("actor.parallel.vpp") > 1 and out.get("actor.parallel.pp") == 1:
            chunks = out.settings.pop("actor.parallel.vpp")
            out.leave(chunks.origin, chunks.value, "interleaving needs more than one stage")
        own = keys.truth(A + "megatron.sequence_parallel", True)
        if own and out.get("actor.parallel.tp") > 1:
            out.set("actor.parallel.sequence_parallel", True, A + "megatron.sequence_parallel")
        granularity = keys.get(TRANSFORMER + "recompute_granularity")
        if granularity not in NOTHING:
            block = keys.get(TRANSFORMER + "recompute_method") == "block"
            layers = keys.count(TRANSFORMER + "recompute_num_layers", 1)
            value: Any = {"granularity": "full", "layers": layers} if block and granularity == "full" else granularity
            out.set("model.recompute", value, TRANSFORMER + "recompute_granularity")
        offloads = [A + f"megatron.{what}_offload" for what in ("param", "grad", "optimizer")]
    else:
        set_fully_sharded(keys, out, "strategy", strategy, slices_of(keys), A + "fsdp_config.")
        if checkpointing:
            out.set("model.recompute", "full", "actor_rollout_ref.model.enable_gradient_checkpointing")
        offloads = [A + f"fsdp_config.{what}_offload" for what in ("param", "optimizer")]
    given = [name for name in offloads if keys.truth(name, False)]
    if given:
        out.set("actor.offload", True, ", ".join(name.rsplit(".", 1)[-1] for name in given))


def _lengths(keys: SourceKeys, out: Translation) -> None:
    """Compares the lengths of engines with those of the data."""
    lengths = {"prompt_length": "data.max_prompt_tokens", "response_length": "rollout.sampling.max_response_tokens"}
    for name, here in lengths.items():
        given = keys.get(R + name)
        if given not in NOTHING and count(given) == out.get(here):
            out.leave(R + name, given, f"{here} has the same value")
        elif given not in NOTHING:
            out.differs(R + name, given, f"{here} is {out.get(here)}; expected one length")


def _rows(keys: SourceKeys, out: Translation) -> None:
    """Sets the rows of the training files."""
    out.set("data.train.label_key", LABEL, "the label of verl's reward functions")
    if not keys.truth("data.apply_chat_template", True):
        out.set("data.chat_template", "never", "data.apply_chat_template, a key of trees changed by their users")
    filters, cut = keys.truth("data.filter_overlong_prompts", False), keys.get("data.truncation", "error")
    if filters or cut != "error":
        out.set("data.on_bad_row", "skip", "data.filter_overlong_prompts, data.truncation: longer prompts are left out")
    if cut in ("left", "right", "middle"):
        out.leave("data.truncation", cut, "longer prompts are left out, not cut")
        if filters:
            out.leave("data.filter_overlong_prompts", filters, "longer prompts are left out")
    if SHUFFLED in keys:
        out.set("data.shuffle", keys.truth(SHUFFLED), SHUFFLED)
    rows = keys.get("data.train_max_samples", -1)
    if rows not in NOTHING and count(rows) > 0:
        out.set("data.train.max_rows", count(rows), "data.train_max_samples")
    for name in ("path", "name"):
        if (own := keys.get(f"data.custom_cls.{name}")) not in NOTHING:
            out.differs(f"data.custom_cls.{name}", own, "rows are read from files here, by no class of yours", ATTACHED)


def _data(keys: SourceKeys, out: Translation) -> None:
    _rows(keys, out)
    _lengths(keys, out)
    variables = keys.under("data.apply_chat_template_kwargs.")
    if variables:
        out.set("data.chat_template_args", variables, "data.apply_chat_template_kwargs")
    limit_key, limit = keys.first(R + "max_model_len", R + "engine_kwargs.vllm.max_model_len")
    set_context(out, limit, limit_key)
    files = keys.get("data.val_files")
    if files in NOTHING:
        out.settings.pop("evaluation.interval", None)
        return
    prefix = R + "val_kwargs."
    temperature = keys.first(prefix + "temperature", R + "val_temperature", default=0)
    draws = keys.truth(prefix + "do_sample", temperature[0] == R + "val_temperature" and real(temperature[1]) > 0)
    given = keys.first(prefix + "n", "'n'", R + "n_val", default=1)[1]
    sampling: dict[str, Any] = {"temperature": real(temperature[1]) if draws else 0.0}
    if draws:
        sampling["top_p"] = keys.real(prefix + "top_p", 1.0)
        sampling["top_k"] = top_k_of(keys.get(prefix + "top_k", -1))
    data = {"path": paths(files), "prompt_key": out.get("data.train.prompt_key"), "label_key": LABEL}
    rows = keys.get("data.val_max_samples", -1)
    if rows not in NOTHING and count(rows) > 0:
        data["max_rows"] = count(rows)
    set_evaluation(out, data, sampling, count(given), "data.val_files, rollout.val_kwargs")


SHUFFLED = "data.shuffle_train_dataloader"
"""Name of data.shuffle in forks of verl."""


def _tokenizers(keys: SourceKeys, out: Translation) -> None:
    """Compares the tokenizers of actor and critic with that of model.path, which every role uses."""
    for model, role in (("actor_rollout_ref.model.", "actor"), ("critic.model.", "critic")):
        given = keys.get(model + "tokenizer_path")
        if given in NOTHING or role not in out.placed:
            continue
        if str(given) == str(out.get("model.path")):
            out.leave(model + "tokenizer_path", given, "model.path has this tokenizer")
        else:
            out.differs(model + "tokenizer_path", given, "copy its files to model.path; every role reads them there")


def _engine(keys: SourceKeys, out: Translation) -> None:
    arguments = {name.replace("-", "_"): value for name, value in keys.under(R + "engine_kwargs.sglang.").items()}
    for name, value in keys.under(R + "engine_kwargs.vllm.").items():
        if name.startswith("hf_overrides"):
            sort_out_override(f"{R}engine_kwargs.vllm.{name}", value, out)
    arguments["mem_fraction_static"] = keys.real(R + "gpu_memory_utilization", 0.5)
    if keys.truth(R + "enforce_eager", False):
        arguments["disable_cuda_graph"] = True
    replicas = count(keys.get(R + "data_parallel_size", 1) or 1)
    if replicas > 1:
        out.leave(R + "data_parallel_size", replicas, "further engines, each with rollout.parallel.tp ranks")
    ep = count(keys.get(R + "expert_parallel_size", 1) or 1)
    tp = out.get("rollout.parallel.tp")
    choose_engine(out, keys.text(R + "name", "vllm"), min(ep, tp), arguments, R + "gpu_memory_utilization, ...")


def _records(keys: SourceKeys, out: Translation) -> None:
    mode, path = keys.get("trainer.resume_mode", "auto"), keys.get("trainer.resume_from_path")
    if keys.truth("trainer.remove_previous_ckpt_in_save", False):
        out.set("checkpoint.keep", 1, "trainer.remove_previous_ckpt_in_save")
    if keys.truth("trainer.val_only", False):
        out.differs("trainer.val_only", True, "it evaluates and trains nothing; here launch/evaluate.py does that")
    if mode == "disable":
        out.set("checkpoint.resume", "none", "trainer.resume_mode")
    elif mode == "resume_path" and path not in NOTHING:
        out.set("checkpoint.resume", str(path), "trainer.resume_from_path")
    if str(out.get("checkpoint.dir") or "").startswith("$"):
        del out.settings["checkpoint.dir"]
