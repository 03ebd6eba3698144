"""Rules for SkyRL and its supervised trainer."""

import re
from collections.abc import Mapping
from typing import Any

from rltrain.config.foreign import ENGINE, OPTIMIZER, SKYRL, SKYRL_SFT
from rltrain.import_config.influence import Condition, KeyRules, by_pattern, sort_out
from rltrain.import_config.shared_rules import (
    MEGATRON_SIZES,
    choose_engine,
    is_named_after_seeing,
    leave_skyrls_prediction_layers,
    megatron_options,
    set_fully_sharded,
    set_megatron_optimizer,
    set_sizes_of_frozen,
    set_vision,
)
from rltrain.import_config.skyrl_learning import (
    ALG,
    DECAYS,
    G,
    T,
    distills,
    refuse_own_generator,
    set_algorithm,
    set_correction,
    set_critic_lora,
    set_fake_quantization,
    set_lora,
    set_loss,
    set_reward,
    set_router_replay,
    slices_of,
)
from rltrain.import_config.translation import (
    NOTHING,
    RowCounts,
    SourceKeys,
    Translation,
    UntranslatableError,
    apply,
    count,
    one_of,
    paths,
    ranks,
    real,
    set_betas,
    set_context,
    set_evaluation,
    set_mini_batches,
    set_steps,
    truth,
)
from rltrain.import_config.translation import top_k as top_k_of

# Keys of SkyRL without influence on results, by pattern, with the reason.

HARMLESS = by_pattern("""
settings of Hydra: hydra.*
logs only: trainer.{logger,log_path,log_example_interval,tags,dump_data_batch,dump_eval_results,project_name,run_name}
    trainer.{print_example_interval,num_logger_train_samples,num_logger_eval_samples,enable_ray_gpu_monitor}
    trainer.policy.record_memory trainer.policy.torch_profiler_config.* generator.eval_sampling_params.logprobs
    trainer.policy.megatron_config.torch_profiler_config.* trainer.policy.megatron_config.moe_per_layer_logging
    generator.inference_engine.{served_model_name,enable_ray_prometheus_stats}
    generator.inference_engine.engine_init_kwargs.{enable_log_requests,enable_log_outputs,disable_log_stats}
checkpoint files only: trainer.export_path trainer.hf_save_interval
resuming does not name a path: trainer.resume_path
speed or memory only: trainer.{eval_batch_size,micro_train_batch_size_per_gpu,micro_forward_batch_size_per_gpu}
    trainer.{flash_attn,attn_backend,use_expandable_segments,fused_lm_head_logprob,fused_lm_head_logprob_backend}
    trainer.{logprobs_chunk_size,vocab_entropy_chunk_size,vocab_entropy_chunk_memory_mb,disable_fast_tokenizer}
    trainer.{gradient_checkpointing,gradient_checkpointing_use_reentrant,max_tokens_per_microbatch}
    trainer.{sequence_parallel_backend,policy.use_torch_compile,policy.sequence_parallel_size}
    trainer.policy.{inference_only_init,optimizer_config.offload_after_step}
    trainer.policy.megatron_config.optimizer_config_kwargs.{overlap_cpu_optimizer_d2h_h2d,optimizer_offload_fraction}
    trainer.policy.megatron_config.optimizer_config_kwargs.{use_precision_aware_optimizer,optimizer_cpu_offload}
    trainer.policy.megatron_config.ddp_config.{overlap_grad_reduce,overlap_param_gather,grad_reduce_in_fp32}
    trainer.policy.megatron_config.ddp_config.average_in_collective
    trainer.policy.megatron_config.transformer_config_kwargs.{recompute_granularity,recompute_method}
    trainer.policy.megatron_config.transformer_config_kwargs.{recompute_num_layers,recompute_modules}
    trainer.policy.megatron_config.transformer_config_kwargs.gradient_accumulation_fusion
    trainer.policy.megatron_config.{empty_cuda_cache,moe_grouped_gemm,moe_token_dispatcher_type,moe_router_dtype}
    trainer.fully_async.{clear_kv_cache_on_weight_sync,sample_full_batch} generator.batched generator.async_engine
    generator.rate_limit.* generator.use_cache_salt generator.enforce_eager generator.enable_prefix_caching
    generator.enable_chunked_prefill generator.gpu_memory_utilization generator.max_num_batched_tokens
    generator.inference_engine.{async_engine,max_num_batched_tokens,enable_prefix_caching,gpu_memory_utilization}
    generator.inference_engine.{enable_chunked_prefill,enable_pd,num_prefill,distributed_executor_backend}
    generator.inference_engine.{enforce_eager,use_expandable_segments,offload_kv_for_weight_sync}
    generator.inference_engine.{vllm_v1_disable_multiproc,weight_transfer_threshold_cuda_ipc_GB,router_init_kwargs.*}
    generator.inference_engine.engine_init_kwargs.{compilation_config.cudagraph_mode,compilation_config.mode}
    generator.inference_engine.{fully_sharded_loras,override_existing_update_group}
    generator.inference_engine.engine_init_kwargs.{kv_transfer_config.*,kv_cache_dtype_skip_layers,kv_cache_memory_bytes}
    generator.inference_engine.engine_init_kwargs.{gdn_prefill_backend,kernel_config.*,compilation_config}
    generator.inference_engine.engine_init_kwargs.{disable_custom_all_reduce,disable_mm_preprocessor_cache}
    generator.inference_engine.engine_init_kwargs.{enable_expert_parallel,attention_backend,disable_hybrid_kv_cache_manager}
    generator.{vllm_v1_disable_multiproc,override_existing_update_group} data.dataloader.num_workers
    data.dataloader.persistent_workers trainer.dataloader_num_workers
always evaluated before the first step: trainer.eval_before_train
no evaluation: trainer.eval_interval generator.eval_sampling_params.* generator.eval_n_samples_per_prompt
no critic: trainer.critic_mini_batch_size trainer.critic.* trainer.placement.critic_num_nodes
    trainer.placement.critic_num_gpus_per_node trainer.algorithm.value_clip trainer.algorithm.lambd
    trainer.algorithm.value_head_prefix
no discounts: trainer.algorithm.gamma
speed or memory only: trainer.critic.fsdp_config.{cpu_offload,reshard_after_forward,fsdp_size}
    trainer.critic.sequence_parallel_size trainer.critic.optimizer_config.offload_after_step
a reference is never trained: trainer.ref.megatron_config.optimizer_config_kwargs.{optimizer_cpu_offload}
    trainer.ref.megatron_config.optimizer_config_kwargs.{optimizer_offload_fraction,overlap_cpu_optimizer_d2h_h2d}
    trainer.ref.megatron_config.optimizer_config_kwargs.use_precision_aware_optimizer
    trainer.ref.megatron_config.ddp_config.{average_in_collective,grad_reduce_in_fp32,overlap_param_gather}
    trainer.ref.megatron_config.{freeze_moe_router,moe_aux_loss_coeff,moe_router_load_balancing_type,mtp_loss_weight}
    trainer.ref.megatron_config.{mtp_loss_chunk_size,mtp_loss_topk,mtp_num_layers,moe_per_layer_logging}
    trainer.ref.megatron_config.transformer_config_kwargs.{gradient_accumulation_fusion,recompute_modules}
checkpoint files only: trainer.ref.megatron_config.{async_dist_ckpt_strategy,async_save_prestage_to_cpu}
    trainer.ref.megatron_config.hf_export_config.{distributed_save,save_every_n_ranks}
no reference: trainer.ref.* trainer.placement.ref_num_nodes trainer.placement.ref_num_gpus_per_node
speed or memory only: trainer.ref.fsdp_config.{cpu_offload,reshard_after_forward,fsdp_size}
    trainer.ref.sequence_parallel_size trainer.ref.megatron_config.{tensor_model_parallel_size,moe_grouped_gemm}
    trainer.ref.megatron_config.{pipeline_model_parallel_size,context_parallel_size,expert_model_parallel_size}
    trainer.ref.megatron_config.{expert_tensor_parallel_size,moe_token_dispatcher_type,moe_router_dtype}
    trainer.ref.megatron_config.{empty_cuda_cache,async_dist_ckpt_save,dist_ckpt_optim_fully_reshardable}
    trainer.ref.megatron_config.torch_profiler_config.* trainer.ref.megatron_config.ddp_config.overlap_grad_reduce
    trainer.ref.megatron_config.transformer_config_kwargs.{recompute_granularity,recompute_method,recompute_num_layers}
stages are automatic: trainer.ref.megatron_config.transformer_config_kwargs.num_layers_in_first_pipeline_stage
    trainer.ref.megatron_config.transformer_config_kwargs.num_layers_in_last_pipeline_stage
all roles are on the policy's ranks: trainer.placement.{ref_num_nodes,ref_num_gpus_per_node,colocate_policy_ref}
    trainer.placement.{critic_num_nodes,critic_num_gpus_per_node}
rewards are functions: trainer.placement.reward_num_nodes trainer.placement.reward_num_gpus_per_node
settings of the placement: trainer.placement.{colocate_policy_ref,colocate_critic_reward,colocate_all}
sequences are always packed: trainer.remove_microbatch_padding trainer.use_sample_packing
Megatron trains: trainer.policy.fsdp_config.*
speed or memory only: trainer.policy.fsdp_config.{cpu_offload,reshard_after_forward,fsdp_size,sharding_strategy}
    trainer.policy.fsdp_config.{wrap_policy.transformer_layer_cls_to_wrap,wrap_policy.min_num_params}
FSDP trains: trainer.policy.megatron_config.*
no images: trainer.policy.language_model_only generator.inference_engine.language_model_only
    generator.inference_engine.engine_init_kwargs.language_model_only trainer.ref.language_model_only
no adapters: trainer.policy.model.lora.* trainer.policy.megatron_config.lora_config.*
storage of adapters: trainer.policy.model.lora.{lora_sync_path,max_loras,max_cpu_loras}
stages are automatic: trainer.policy.megatron_config.transformer_config_kwargs.num_layers_in_first_pipeline_stage
    trainer.policy.megatron_config.transformer_config_kwargs.num_layers_in_last_pipeline_stage
    trainer.policy.megatron_config.transformer_config_kwargs.account_for_loss_in_pipeline_split
    trainer.policy.megatron_config.transformer_config_kwargs.account_for_embedding_in_pipeline_split
read from config.json: trainer.policy.megatron_config.{moe_router_score_function,moe_router_enable_expert_bias}
experts are not balanced: trainer.policy.megatron_config.moe_aux_loss_coeff
engines always receive merged weights: trainer.policy.megatron_config.lora_config.merge_lora
layers for speculative decoding only: trainer.policy.megatron_config.{mtp_loss_chunk_size,mtp_loss_topk}
    trainer.policy.megatron_config.{mtp_loss_weight,mtp_num_layers} trainer.mtp.loss_weight
    trainer.mtp.num_speculative_tokens
checkpoint files only: trainer.policy.megatron_config.{async_dist_ckpt_save,async_dist_ckpt_strategy}
    trainer.policy.megatron_config.{async_save_prestage_to_cpu,dist_ckpt_optim_fully_reshardable}
    trainer.policy.megatron_config.hf_export_config.{distributed_save,save_every_n_ranks}
not asynchronous: trainer.fully_async.{max_staleness_steps,num_parallel_generation_workers}
engines take prompts when they are free: trainer.fully_async.num_parallel_generation_workers
only for policy_loss_type dual_clip: trainer.algorithm.clip_ratio_c
a loss without the clip: trainer.algorithm.{eps_clip_low,eps_clip_high}
bounds of the loss itself: trainer.algorithm.{eps_clip_low,eps_clip_high}
no penalty for long responses: trainer.algorithm.overlong_buffer_penalty_factor
no penalty: trainer.algorithm.{kl_loss_coef,kl_estimator_type,use_kl_loss,use_kl_in_reward}
no penalty in the reward: trainer.algorithm.kl_ctrl.*
no entropy term: trainer.algorithm.entropy_loss_coef
sums are divided by the longest response: trainer.algorithm.max_seq_len
no selection of groups: trainer.algorithm.dynamic_sampling.{max_sample_batches,min_replace_ratio}
only for replacing groups: trainer.algorithm.dynamic_sampling.min_replace_ratio
advantages without a deviation: trainer.algorithm.grpo_norm_by_std
not the loss cispo: trainer.algorithm.cispo.*
not the loss kl_cov: trainer.algorithm.kl_cov.*
not the loss clip_cov: trainer.algorithm.clip_cov.*
not the loss dppo: trainer.algorithm.dppo.*
not the loss sapo: trainer.algorithm.sapo.*
no correction of weights: trainer.algorithm.tis_imp_ratio_cap trainer.algorithm.off_policy_correction.*
settings of other corrections: trainer.algorithm.off_policy_correction.{geo_mask_high,geo_mask_low,product_mask_high}
    trainer.algorithm.off_policy_correction.{product_mask_low,sequence_tis_ratio_clip_high,token_tis_ratio_clip_high}
only for several turns: generator.max_input_length
ids are kept and never encoded again: generator.use_conversation_multi_turn
ids are those of the engine: generator.append_eos_token_after_stop_str_in_multi_turn
conversations are one sequence if possible: generator.step_wise_trajectories generator.merge_stepwise_output
engines always return them: generator.sampling_params.logprobs
the same as in training: generator.eval_sampling_params.stop
rltrain has its own weight sync: generator.weight_sync_backend generator.inference_engine.weight_sync_backend
    generator.inference_engine.delta_weight_sync.*
speculative decoding has the same distribution: generator.inference_engine.speculative_config*
an engine has one rank: generator.inference_engine.expert_parallel_size
steps are given: trainer.epochs trainer.max_training_steps
settings of other environments: environment.skyrl_gym.*
the program is asynchronous: trainer.fully_async.enabled
the model's name says that it sees: generator.vision_language_generator
engines here serve the same model: generator.inference_engine.backend generator.backend
the run ends by its epochs: trainer.max_training_steps
weights are not rounded: trainer.policy.model.fake_int4_qat.*
no server is named, so the job starts engines: generator.inference_engine.run_engines_locally
    generator.run_engines_locally
servers run elsewhere: generator.inference_engine.{num_engines,tensor_parallel_size,run_engines_locally}
    generator.run_engines_locally
the weights of fake_int4_qat.bf16_base_path are loaded: trainer.policy.model.path
follows from model.router_replay: generator.inference_engine.enable_return_routed_experts
choice of the trainer: -m trainer.strategy
settings of Hydra: --*
""")


# The supervised trainer. Defaults are from skyrl/train/config/sft_config.py.

SFT_SECTIONS = ("model", "optimizer_config", "placement", "megatron_config", "fsdp_config")
TURNS = {"last_assistant_message": "last", "all_assistant_messages": "all"}
SPLIT = re.compile(r"(\w+)(?:\[:(\d+)\])?")
"""A whole split of a data set, or a number of its first rows."""
ALPACA = "rows with instruction, input and output (Alpaca) must be converted to messages first"
SFT_HARMLESS = by_pattern("""
logs only: logger tags record_memory torch_profiler_config.* enable_ray_*
checkpoint files only: export_path
held-out conversations are not imported, set data.eval: eval_*
speed only: *num_workers dataloader_* async_batch_collation cache_dir force_recache disable_cache
    use_torch_compile
sequences are always packed: remove_microbatch_padding use_sample_packing use_sequence_packing
only for use_sequence_packing: max_tokens_per_microbatch
no adapters: model.lora.* megatron_config.lora_config.*
storage of adapters: model.lora.{lora_sync_path,max_loras,max_cpu_loras}
Megatron trains: fsdp_config.* sequence_parallel_size
FSDP trains: megatron_config.*
speed or memory only: fsdp_config.{cpu_offload,reshard_after_forward,fsdp_size}
    megatron_config.{empty_cuda_cache,moe_grouped_gemm,moe_token_dispatcher_type,moe_router_dtype}
    megatron_config.ddp_config.{overlap_grad_reduce,overlap_param_gather,grad_reduce_in_fp32,average_in_collective}
    megatron_config.transformer_config_kwargs.{recompute_granularity,recompute_method,recompute_num_layers}
    megatron_config.transformer_config_kwargs.{recompute_modules,gradient_accumulation_fusion}
    megatron_config.optimizer_config_kwargs.{overlap_cpu_optimizer_d2h_h2d,use_precision_aware_optimizer}
    megatron_config.optimizer_config_kwargs.{optimizer_offload_fraction,optimizer_cpu_offload}
    micro_train_batch_size_per_gpu gradient_checkpointing flash_attn optimizer_config.offload_after_step
checkpoint files only: megatron_config.{async_dist_ckpt_save,dist_ckpt_optim_fully_reshardable}
steps are given: num_epochs num_steps max_training_steps
choice of the trainer: strategy
choice of the trainer: -m
settings of Hydra: --*
""")


INT4_BASE = T + "policy.model.fake_int4_qat.bf16_base_path"


def conditions(keys: SourceKeys) -> dict[str, Condition]:
    """Returns the checks of reasons that depend on the source's keys."""
    module = keys.text("-m", "")
    key, default = ("strategy", "megatron") if "sft" in module else (T + "strategy", "fsdp")
    megatron = keys.text(key, default) == "megatron"
    mode, together = keys.get(T + "resume_mode", "latest"), keys.get(T + "placement.colocate_all", True)
    environment = keys.text("environment.env_class", "gsm8k")
    own = f"environment.skyrl_gym.{environment}."
    return {
        "Megatron trains": lambda _: megatron,
        "FSDP trains": lambda _: not megatron,
        "resuming does not name a path": lambda _: mode != "from_path",
        "all roles are on the policy's ranks": lambda _: truth(together),
        "bounds of the loss itself": lambda out: out.get("loss.policy") in ("cispo", "dppo", "reinforce"),
        "experts are not balanced": lambda out: "model.moe.aux_loss_coef" not in out.settings,
        "an engine has one rank": lambda out: out.get("rollout.parallel.tp") == 1,
        "settings of other environments": lambda _: not any(key.startswith(own) for key in keys.left()),
        "the program is asynchronous": lambda _: "fully_async" in module,
        "the model's name says that it sees": lambda out: is_named_after_seeing(out.get("model.path")),
        "weights are not rounded": lambda out: not any(path.startswith("model.fake_quant") for path in out.settings),
        "no server is named, so the job starts engines": lambda _: keys.get(URLS) in NOTHING,
        "servers run elsewhere": lambda out: out.get("rollout.engine") == "http",
        "the weights of fake_int4_qat.bf16_base_path are loaded": lambda _: INT4_BASE in keys,
        "follows from model.router_replay": lambda out: out.get("model.router_replay") != "off",
        "only for several turns": lambda out: out.get("env.max_turns") == 1 or "env.function" not in out.settings,
    }


def translate_sft(keys: SourceKeys, out: Translation, rows: RowCounts) -> None:
    """Translates a config of SkyRL's supervised trainer into `out`."""
    out.set("algorithm", "sft", "skyrl.train.main_sft")
    apply(SKYRL_SFT, keys, out, decay=one_of(DECAYS, "learning rates"))
    set_betas(keys, out, "optimizer_config.adam_betas")
    _data(keys, out)
    nodes, per_node = keys.count("placement.num_nodes", 1), keys.count("placement.num_gpus_per_node", 4)
    out.place(["actor"], ranks(0, nodes * per_node), "placement.num_nodes x placement.num_gpus_per_node")
    out.world_size, out.ranks_per_node = nodes * per_node, per_node
    _sft_batch(keys, out)
    _sft_trainer(keys, out)
    _sft_records(keys, out)
    steps = keys.first("max_training_steps", "num_steps")[1]
    epochs = None if keys.get("num_steps") not in NOTHING else keys.get("num_epochs", 1)
    set_steps(out, rows, steps, epochs, ("num_steps, max_training_steps", "num_epochs"))
    set_vision(out)
    sort_out(keys, out, KeyRules(SFT_HARMLESS, "skyrl_sft", conditions(keys)))


def _listed(value: Any) -> list[Any]:
    return [*value] if isinstance(value, list) else [] if value in NOTHING else [value]


def _data(keys: SourceKeys, out: Translation) -> None:
    names = _listed(keys.first("train_datasets", "dataset_name", default="yahma/alpaca-cleaned")[1])
    splits = _listed(keys.first("train_dataset_splits", "dataset_split", default="train[:100]")[1])
    if len(splits) != len(names):
        raise UntranslatableError(f"train_datasets has {len(names)} entries and train_dataset_splits {len(splits)}")
    parts = [{"path": name, **_part(name, str(split))} for name, split in zip(names, splits, strict=True)]
    if len(parts) == 1:
        for name, value in parts[0].items():
            out.set(f"data.train.{name}", value, "train_datasets, train_dataset_splits")
    else:
        weights = keys.get("train_dataset_weights") or [1 / len(parts)] * len(parts)
        sources = [{**part, "weight": real(weight)} for part, weight in zip(parts, weights, strict=True)]
        out.set("data.train.sources", sources, "train_datasets, train_dataset_splits, train_dataset_weights")
    out.set("data.train.response_key", None, "messages are whole conversations")
    out.set("data.train.label_key", None, "conversations have no labels")
    learnt = keys.get("train_on_what", "last_assistant_message")
    if learnt not in TURNS:
        raise UntranslatableError(f"train_on_what must be {' or '.join(TURNS)}")
    if TURNS[learnt] != "all":
        out.set("data.train.learnt_turns", TURNS[learnt], "train_on_what, default last_assistant_message")
    sampler = keys.get("sampler", "random")
    if sampler == "sequential":
        out.set("data.shuffle", False, "sampler")
    elif sampler != "random":
        out.differs("sampler", sampler, "rows are taken at random or in order here")
    out.notes.append(ALPACA)


def _part(name: object, split: str) -> dict[str, Any]:
    found = SPLIT.fullmatch(split)
    if found is None:
        raise UntranslatableError(f"split {split} of {name}: expected a whole split, or a number of its first rows")
    rows = {"max_rows": count(found[2])} if found[2] else {}
    return {"split": found[1], **rows}


def _sft_batch(keys: SourceKeys, out: Translation) -> None:
    longest = keys.get("max_length")
    if longest in NOTHING:
        raise UntranslatableError("max_length is missing; expected the longest conversation in tokens")
    out.set("data.max_prompt_tokens", count(longest), "max_length")
    out.set("data.max_response_tokens", count(longest), "max_length")
    out.set("data.on_bad_row", "skip", "max_length: longer conversations are left out")
    samples = keys.count("micro_train_batch_size_per_gpu", 2)
    packed = count(keys.get("max_tokens_per_microbatch") or longest)
    tokens = packed if keys.truth("use_sequence_packing", False) else samples * count(longest)
    out.set("actor.micro_batch_tokens", tokens, "micro_train_batch_size_per_gpu, max_tokens_per_microbatch, max_length")


def _sft_trainer(keys: SourceKeys, out: Translation) -> None:
    strategy = keys.text("strategy", "megatron")
    megatron = strategy == "megatron"
    set_lora(keys, out, "model.lora.", "megatron_config.lora_config.lora_type" if megatron else None)
    if megatron:
        _set_megatron(keys, out, "megatron_config.", {"tp": 2, "pp": 2})
    else:
        slices = keys.count("sequence_parallel_size", 1)
        set_fully_sharded(keys, out, "strategy", strategy, slices, "fsdp_config.")
    out.set("model.recompute", "full", "activations are always recomputed")


def _set_megatron(keys: SourceKeys, out: Translation, prefix: str, sizes: Mapping[str, int]) -> None:
    """Sets Megatron's keys. `sizes` has SkyRL's defaults of parallel sizes."""
    own = prefix + "optimizer_config_kwargs."
    set_megatron_optimizer(megatron_options(keys, own), out, own)
    for name, here in MEGATRON_SIZES.items():
        size = keys.get(prefix + name, sizes.get(here))
        if size not in NOTHING:
            out.set(f"actor.parallel.{here}", count(size), prefix + name)
    if out.get("actor.parallel.tp") > 1:
        out.set("actor.parallel.sequence_parallel", True, "SkyRL uses it with tensor parallelism")


def _sft_records(keys: SourceKeys, out: Translation) -> None:
    if keys.get("ckpt_path") not in NOTHING:
        out.set("checkpoint.dir", keys.text("ckpt_path"), "ckpt_path")
    resume = keys.get("resume_from")
    if resume != "latest":
        out.set("checkpoint.resume", "none" if resume in NOTHING else str(resume), "resume_from")


# Independently running engines: generator.inference_engine.external_server_urls.

BACKEND, SYNC_DIR = "weight_sync_backend", ENGINE + "delta_weight_sync.sync_dir"
URLS, PROXY = ENGINE + "external_server_urls", ENGINE + "external_proxy_url"


def started_by_the_job(keys: SourceKeys) -> bool:
    """Returns whether the job starts the engines."""
    return truth(keys.first(ENGINE + "run_engines_locally", G + "run_engines_locally", default=True)[1])


def set_servers(keys: SourceKeys, out: Translation, policy: int) -> bool:
    """Returns whether the engines are such servers. The first of the `policy` ranks send the requests, and need no
    device for it."""
    urls, proxy, local = keys.get(URLS), keys.get(PROXY), started_by_the_job(keys)
    if urls in NOTHING and proxy in NOTHING:
        return False
    if urls in NOTHING or local:
        out.differs(
            PROXY if urls in NOTHING else URLS,
            proxy or urls,
            "list every server in external_server_urls, and set run_engines_locally to false",
        )
        return False
    servers = [urls] if isinstance(urls, str) else [*urls]
    out.set("rollout.engine", "http", URLS)
    out.set("rollout.urls", servers, URLS)
    out.settings.pop("rollout.parallel.tp", None)
    out.place(["rollout", "reward"], ranks(0, min(len(servers), policy)), URLS + ": ranks that send requests")
    out.notes.append(f"{URLS}: servers load new weights from rollout.http.weights_dir, so they need access to it")
    if proxy not in NOTHING:
        out.leave(PROXY, proxy, "requests go directly to the server with the least load")
    return True


def set_delta(keys: SourceKeys, out: Translation, *, of_others: bool) -> None:
    """Sets syncs of changed weights. External servers are vLLM servers and load whole checkpoints from the same
    folder."""
    name, backend = keys.first(ENGINE + BACKEND, G + BACKEND, default="nccl")
    if backend != "delta":
        return
    if not of_others:
        out.set("weight_sync.delta", {}, name)
        return
    folder = keys.get(SYNC_DIR)
    if isinstance(folder, str) and "://" not in folder:
        out.set("rollout.http.weights_dir", folder, SYNC_DIR)
    out.notes.append(
        f"{name}: vLLM's servers load whole checkpoints. With weight_sync.delta: {{}} servers of SGLang and "
        "launch/serve.py load files with the changes (docs/engines.md)"
    )


# The RL trainer. Defaults are from skyrl/train/config/config.py.

SECTIONS = ("trainer", "generator", "environment", "data", *SFT_SECTIONS)
LABEL = "reward_spec.ground_truth"
SEES = G + "vision_language_generator"


def translate(keys: SourceKeys, out: Translation, rows: RowCounts) -> None:
    """Translates a config of SkyRL into `out`."""
    if "sft" in keys.text("-m", ""):
        translate_sft(keys, out, rows)
        return
    refuse_own_generator(keys, out)
    apply(SKYRL, keys, out, decay=one_of(DECAYS, "learning rates"))
    out.set("data.train.prompt_key", "prompt", "SkyRL's column")
    out.set("data.train.label_key", LABEL, "SkyRL's column")
    set_betas(keys, out, OPTIMIZER + "adam_betas")
    _batch(keys, out)
    _placement(keys, out)
    _trainer(keys, out)
    set_algorithm(keys, out)
    set_loss(keys, out)
    set_correction(keys, out)
    set_reward(keys, out)
    _sampling(keys, out)
    _schedule(keys, out)
    _engine(keys, out)
    named = (T + "max_training_steps", T + "epochs")
    set_steps(out, rows, keys.get(named[0]), keys.get(named[1], 1), named)
    set_vision(out, key=SEES, sees=keys.truth(SEES, False))
    sort_out(
        keys,
        out,
        KeyRules(HARMLESS, "skyrl", conditions(keys), learning=("trainer.",), attached=(G, "data.")),
    )


def _batch(keys: SourceKeys, out: Translation) -> None:
    prompts = out.get("batch.prompts_per_step")
    mini = keys.get(T + "policy_mini_batch_size", 256)
    set_mini_batches(out, prompts, mini, T + "policy_mini_batch_size, which counts prompts")
    own = keys.count(T + "critic_mini_batch_size", 256)
    if keys.get(ALG + "advantage_estimator") == "gae" and own != count(mini):
        out.differs(T + "critic_mini_batch_size", own, "actor and critic have the same mini-batches here")
    tokens = keys.count(T + "max_tokens_per_microbatch", -1)
    longest = out.get("data.max_prompt_tokens") + out.get("rollout.sampling.max_response_tokens")
    longest = -(-longest // slices_of(keys))
    samples = keys.count(T + "micro_train_batch_size_per_gpu", 1)
    if tokens > 0:
        out.set("actor.micro_batch_tokens", tokens, T + "max_tokens_per_microbatch")
    else:
        origin = f"{T}micro_train_batch_size_per_gpu {samples} x {longest} tokens"
        out.set("actor.micro_batch_tokens", samples * longest, origin)
    evaluated = keys.count(T + "micro_forward_batch_size_per_gpu", 1) * longest
    origin = T + "micro_forward_batch_size_per_gpu"
    out.set(f"{_frozen(keys)}.micro_batch_tokens", tokens if tokens > 0 else evaluated, origin)


def _gpus(keys: SourceKeys, role: str) -> int:
    """Returns the number of GPUs of a role. In the first releases the keys were directly below `trainer`."""
    number = 1
    for what in ("num_nodes", "num_gpus_per_node"):
        number *= count(keys.first(f"{T}placement.{role}_{what}", f"{T}{role}_{what}", default=1)[1])
    return number


def _frozen(keys: SourceKeys) -> str:
    """Returns the role of SkyRL's reference in rltrain."""
    return "teacher" if distills(keys) else "reference"


def _roles(keys: SourceKeys) -> list[str]:
    critic = ["critic"] if keys.get(ALG + "advantage_estimator") == "gae" else []
    penalty = keys.truth(ALG + "use_kl_loss", True) or keys.truth(ALG + "use_kl_in_reward", False)
    return [*critic, *([_frozen(keys)] if penalty else [])]


def _placement(keys: SourceKeys, out: Translation) -> None:
    """Places the roles by SkyRL's rules. Either all are colocated, with equal numbers of GPUs for policy and engines.
    Or policy and reference share ranks, and all others follow."""
    engine_size, engines = 1, 1
    for size in ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"):
        engine_size *= count(keys.first(ENGINE + size, f"{G}inference_engine_{size}", default=1)[1])
    engines = count(keys.first(ENGINE + "num_engines", G + "num_inference_engines", default=1)[1])
    tp = count(keys.first(ENGINE + "tensor_parallel_size", G + "inference_engine_tensor_parallel_size", default=1)[1])
    out.set("rollout.parallel.tp", tp, ENGINE + "tensor_parallel_size")
    policy, rollout = _gpus(keys, "policy"), engines * engine_size
    out.ranks_per_node = count(
        keys.first(T + "placement.policy_num_gpus_per_node", T + "policy_num_gpus_per_node", default=1)[1]
    )
    others = _roles(keys)
    together = truth(keys.first(T + "placement.colocate_all", T + "colocate_all", default=True)[1])
    of_others = set_servers(keys, out, policy)
    set_delta(keys, out, of_others=of_others)
    if together and started_by_the_job(keys):
        _all_together(keys, out, others, policy, rollout)
        return
    taken = policy
    out.place(["actor"], ranks(0, policy), T + "placement.policy_num_*")
    with_reference = truth(keys.first(T + "placement.colocate_policy_ref", T + "colocate_policy_ref", default=True)[1])
    frozen = _frozen(keys)
    if frozen in others and with_reference:
        own = _gpus(keys, "ref")
        if own != policy:
            raise UntranslatableError(
                f"num_policy_gpus {policy} and num_ref_gpus {own} must be the same when colocate_policy_ref is true"
            )
        out.place([frozen], ranks(0, policy), T + "placement.colocate_policy_ref")
        others.remove(frozen)
    for role, name in ((frozen, "ref"), ("critic", "critic")):
        if role in others:
            own = _gpus(keys, name)
            out.place([role], ranks(taken, own), f"{T}placement.{name}_num_*, after the others")
            taken += own
    if of_others:
        out.world_size = taken
        return
    out.place(["rollout", "reward"], ranks(taken, rollout), ENGINE + "num_engines x tensor_parallel_size, after them")
    out.world_size = taken + rollout


def _all_together(keys: SourceKeys, out: Translation, others: list[str], policy: int, rollout: int) -> None:
    if policy != rollout:
        raise UntranslatableError(
            f"num_policy_gpus ({policy}) and num_rollout_gpus ({rollout}) must be the same when colocating all models"
        )
    for role, name in (("critic", "critic"), (_frozen(keys), "ref")):
        given = f"{T}placement.{name}_num_gpus_per_node"
        if role in others and given in keys and _gpus(keys, name) != policy:
            raise UntranslatableError(
                f"num_policy_gpus ({policy}) and num_{name}_gpus ({_gpus(keys, name)}) must be the same when "
                "colocating all models"
            )
    for name in ("critic", "ref"):
        _gpus(keys, name)
    out.place(["actor", *others, "rollout", "reward"], ranks(0, policy), T + "placement.colocate_all")
    out.world_size = policy


def _trainer(keys: SourceKeys, out: Translation) -> None:
    strategy = keys.text(T + "strategy", "fsdp")
    kind = T + "policy.megatron_config.lora_config.lora_type" if strategy == "megatron" else None
    set_lora(keys, out, T + "policy.model.lora.", kind)
    set_critic_lora(keys, out)
    set_router_replay(keys, out)
    set_fake_quantization(keys, out)
    leave_skyrls_prediction_layers(keys, out, T + "mtp.enabled", T + "mtp.")
    if strategy == "megatron":
        _set_megatron(keys, out, T + "policy.megatron_config.", {})
        frozen = _frozen(keys) if _frozen(keys) in _roles(keys) else None
        set_sizes_of_frozen(keys, out, frozen, T + "ref.megatron_config.")
    else:
        set_fully_sharded(keys, out, T + "strategy", strategy, slices_of(keys), T + "policy.fsdp_config.")
    if keys.truth(T + "gradient_checkpointing", True):
        out.set("model.recompute", "full", T + "gradient_checkpointing")
    _experts(keys, out)
    _records(keys, out)


def _records(keys: SourceKeys, out: Translation) -> None:
    mode, path = keys.get(T + "resume_mode", "latest"), keys.get(T + "resume_path")
    if mode in NOTHING:
        out.set("checkpoint.resume", "none", T + "resume_mode")
    elif mode == "from_path" and path not in NOTHING:
        out.set("checkpoint.resume", str(path), T + "resume_path")
    own = keys.get(T + "ref.model.path")
    if own not in NOTHING and (own != out.get("model.path") or distills(keys)):
        out.set(f"{_frozen(keys)}.path", str(own), T + "ref.model.path")


def _experts(keys: SourceKeys, out: Translation) -> None:
    balanced = keys.get(T + "policy.megatron_config.moe_router_load_balancing_type", "none")
    if balanced != "none":
        out.set(
            "model.moe.aux_loss_coef",
            keys.real(T + "policy.megatron_config.moe_aux_loss_coeff", 0),
            "moe_aux_loss_coeff",
        )


LENGTHS = (ENGINE + "engine_init_kwargs.max_model_len", G + "engine_init_kwargs.max_model_len")
"""The engine's longest context, now and in the first releases."""


def _sampling(keys: SourceKeys, out: Translation) -> None:
    variables = keys.under(G + "chat_template_kwargs.")
    if variables:
        out.set("data.chat_template_args", variables, G + "chat_template_kwargs")
    stop = keys.get(G + "sampling_params.stop")
    if stop not in NOTHING:
        out.set("rollout.sampling.stop", [stop] if isinstance(stop, str) else stop, G + "sampling_params.stop")
    longest = keys.first(*LENGTHS, G + "max_input_length")[1]
    needed = out.get("data.max_prompt_tokens") + out.get("rollout.sampling.max_response_tokens")
    most = max(count(longest), needed) if longest not in NOTHING else needed
    if "env.function" in out.settings and longest not in NOTHING:
        most = max(most, count(longest) + out.get("rollout.sampling.max_response_tokens"))
    if LENGTHS[0] in keys or LENGTHS[1] in keys:
        set_context(out, longest, next(key for key in LENGTHS if key in keys))
        most = max(most, out.get("rollout.max_context_tokens"))
    out.set("rollout.max_context_tokens", most, "prompt and response" if most == needed else G + "max_input_length")
    files = keys.get("data.val_data", "~/data/gsm8k/validation.parquet")
    if files in NOTHING:
        out.settings.pop("evaluation.interval", None)
        return
    prefix = G + "eval_sampling_params."
    given = any(key.startswith(prefix) for key in keys.left())
    sampling: dict[str, Any] = {
        "temperature": keys.real(prefix + "temperature", 1.0 if given else 0.0),
        "top_p": keys.real(prefix + "top_p", 1.0),
        "top_k": top_k_of(keys.get(prefix + "top_k", -1)),
        "max_response_tokens": keys.count(
            prefix + "max_generate_length", out.get("rollout.sampling.max_response_tokens")
        ),
    }
    data = {"path": paths(files), "prompt_key": "prompt", "label_key": LABEL}
    samples = keys.count(G + "eval_n_samples_per_prompt", 1)
    set_evaluation(out, data, sampling, samples, "data.val_data, generator.eval_sampling_params")


def _schedule(keys: SourceKeys, out: Translation) -> None:
    if keys.truth(T + "fully_async.enabled", False) or "fully_async" in keys.text("-m", ""):
        out.set("schedule.mode", "asynchronous", T + "fully_async.enabled")
        out.set("schedule.max_staleness", keys.count(T + "fully_async.max_staleness_steps", 4), T + "fully_async")
    elif "async" in keys.text("-m", ""):
        out.set("schedule.mode", "asynchronous", keys.text("-m"))
        out.set("schedule.max_staleness", 1, "one step ahead")


def _engine(keys: SourceKeys, out: Translation) -> None:
    arguments: dict[str, Any] = {
        "mem_fraction_static": real(
            keys.first(ENGINE + "gpu_memory_utilization", G + "gpu_memory_utilization", default=0.8)[1]
        )
    }
    if keys.truth(ENGINE + "enforce_eager", False):
        arguments["disable_cuda_graph"] = True
    rounded = keys.get(ENGINE + "engine_init_kwargs.quantization")
    if rounded == "fp8":
        out.set("rollout.dtype", "fp8", ENGINE + "engine_init_kwargs.quantization")
    elif rounded not in NOTHING:
        out.differs(ENGINE + "engine_init_kwargs.quantization", rounded, "engines here support only fp8")
    backend = str(keys.first(ENGINE + "backend", G + "backend", default="vllm")[1])
    ep = keys.count(ENGINE + "expert_parallel_size", 1)
    if out.get("rollout.engine") == "http":
        for name, value in arguments.items():
            out.leave(name, value, "an option of starting the servers")
        return
    choose_engine(out, backend, min(ep, out.get("rollout.parallel.tp")), arguments, ENGINE + "*")
