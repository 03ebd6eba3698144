"""Rules for verl and its supervised trainer."""

from typing import Any

from rltrain.config.foreign import TRANSFORMER, VERL, VERL_MEGATRON, VERL_SFT
from rltrain.import_config.seeing_models import set_pixels, set_vision
from rltrain.import_config.shared_rules import choose_engine, set_fully_sharded, set_verls_prediction_layers
from rltrain.import_config.translation import (
    NOTHING,
    RowCounts,
    SourceKeys,
    Translation,
    apply,
    by_pattern,
    count,
    interval,
    one_of,
    paths,
    ranks,
    real,
    set_betas,
    set_context,
    set_evaluation,
    set_mini_batches,
    set_steps,
    sort_out,
    sort_out_override,
)
from rltrain.import_config.translation import top_k as top_k_of
from rltrain.import_config.verl_learning import (
    A,
    R,
    is_megatron,
    named_estimator,
    set_algorithm,
    set_correction,
    set_critic,
    set_kind_of_optimizer,
    set_kl,
    set_lora,
    set_loss,
    set_micro,
    set_optimizer,
    set_reward,
    set_router_replay,
    set_teacher,
    slices_of,
)

# Keys of verl without influence on results, by pattern, with the reason.

HARMLESS = by_pattern("""
no Ray: ray_kwargs.*
logs only: global_profiler.* *.profiler.* trainer.logger trainer.log_val_generations trainer.rollout_data_dir
    trainer.validation_data_dir trainer.val_only
always evaluated before the first step: trainer.val_before_train
speed or memory only: trainer.balance_batch trainer.use_legacy_worker_impl trainer.use_v1 trainer.nccl_timeout
detected automatically: trainer.device
the role is not placed: trainer.critic_warmup
queues of the trainer: trainer.v1.*
checkpoint files only: trainer.default_hdfs_dir trainer.del_local_ckpt_after_load trainer.max_*_ckpt_to_keep
    trainer.resume_from_path *.checkpoint.*
speed or memory only: transfer_queue.* data.val_batch_size
queues of the trainer: async_training.*
rows are read unchanged: data.return_raw_*
reward functions name their columns: data.reward_fn_key
engines take prompts when they are free: data.gen_batch_size
speed or memory only: data.*num_workers data.filter_overlong_prompts_workers data.use_shm reward*.num_workers
    reward*.launch_reward_fn_async actor_rollout_ref.nccl_timeout
    actor_rollout_ref.model.{use_fused_kernels,fused_kernel_options.*,use_liger,use_shm,enable_*}
    actor_rollout_ref.model.override_config.attn_implementation actor_rollout_ref.*.use_torch_compile
    actor_rollout_ref.*.entropy_*
code in checkpoints is never run: data.trust_remote_code actor_rollout_ref.model.trust_remote_code
the checkpoint's processor has the size of patches: data.image_patch_size
longer prompts than data.max_prompt_length are left out: data.truncation
all rows are evaluated: data.validation_shuffle
choice of the trainer: model_engine
the role is not placed: critic.* reward*.rollout.* reward.reward_model.* reward_model.*
no penalty: algorithm.kl_ctrl.* actor_rollout_ref.actor.kl_loss_*
groups with equal rewards have equal metrics: algorithm.filter_groups.metric
sequences are always packed: actor_rollout_ref.model.use_remove_padding
no adapters, or their storage: actor_rollout_ref.model.lora*
read from config.json: actor_rollout_ref.model.override_config.model_config.max_position_embeddings
settings of FSDP: actor_rollout_ref.*.fsdp_config.*
choice of the trainer: actor_rollout_ref.*.model_engine actor_rollout_ref.*.strategy
speed or memory only: actor_rollout_ref.*.use_dynamic_bsz actor_rollout_ref.*.log_prob_*
    actor_rollout_ref.*.ppo_micro_batch_size* actor_rollout_ref.actor.ppo_max_token_len_per_gpu
    actor_rollout_ref.*.ulysses_sequence_parallel_size actor_rollout_ref.*.megatron.{*_offload,sequence_parallel}
checkpoint files or speed only: actor_rollout_ref.*.megatron.use_*
checkpoint files only: actor_rollout_ref.*.megatron.{*mbridge,dist_checkpointing_path}
model.dtype: actor_rollout_ref.*.megatron.dtype actor_rollout_ref.rollout.dtype
speed or memory only: actor_rollout_ref.*.megatron.override_ddp_config.*
    actor_rollout_ref.*.megatron.override_transformer_config.{apply_rope_fusion,attention_backend,*fusion*}
    actor_rollout_ref.*.megatron.override_transformer_config.{moe_router_dtype,moe_token_dispatcher_type}
    actor_rollout_ref.*.megatron.override_transformer_config.{moe_enable_deepep,moe_grouped_gemm}
    actor_rollout_ref.*.megatron.override_transformer_config.{moe_shared_expert_overlap,recompute_*,use_*}
    actor_rollout_ref.*.megatron.override_transformer_config.{sequence_parallel,context_parallel_*}
    actor_rollout_ref.*.megatron.override_transformer_config.{deallocate_pipeline_outputs,persist_layer_norm}
    actor_rollout_ref.*.megatron.override_transformer_config.{gradient_accumulation_fusion,batch_p2p_comm}
    actor_rollout_ref.*.megatron.override_transformer_config.{overlap_moe_*,variable_seq_lengths,bias_*}
stages are automatic: actor_rollout_ref.*.megatron.override_transformer_config.{account_for_*,num_layers_in_*}
stages are automatic: actor_rollout_ref.*.megatron.override_transformer_config.pipeline_model_parallel_layout
read from config.json: actor_rollout_ref.*.megatron.override_transformer_config.{swiglu,moe_router_enable_expert_bias}
    actor_rollout_ref.*.megatron.override_transformer_config.{moe_router_score_function,normalization}
speed or memory only: actor_rollout_ref.*.optim.override_optimizer_config.*
    actor_rollout_ref.actor.{use_prefix_grouper,data_loader_seed}
implementation of torch or Megatron: actor_rollout_ref.*.optim.optimizer_impl
the schedule covers the whole run: actor_rollout_ref.*.optim.{lr_decay_steps,total_training_steps}
warm-up starts at 0: actor_rollout_ref.*.optim.lr_warmup_init
metrics only: actor_rollout_ref.actor.calculate_sum_pi_squared
mini-batches keep the order of prompts: actor_rollout_ref.actor.shuffle
given by clip_ratio_low and clip_ratio_high: actor_rollout_ref.actor.clip_ratio
only for loss_mode vanilla: actor_rollout_ref.actor.clip_ratio_c
logs only: actor_rollout_ref.actor.calculate_* actor_rollout_ref.rollout.{trace.*,prometheus.*,disable_log_stats}
given by optim.clip_grad: actor_rollout_ref.actor.grad_clip
settings of other losses: actor_rollout_ref.actor.policy_loss.*
speed or memory only: actor_rollout_ref.ref.*
    actor_rollout_ref.rollout.{mode,enable_chunked_prefill,enable_prefix_caching,max_num_batched_tokens}
    actor_rollout_ref.rollout.{layered_summon,agent.num_workers,moe_*,engine_kwargs.*,skip*,cudagraph_*}
    actor_rollout_ref.rollout.{multi_stage_wake_up,disaggregation.*}
only for separate engines: actor_rollout_ref.rollout.{nnodes,n_gpus_per_node}
engines leave a shared device: actor_rollout_ref.rollout.free_cache_engine
weights arrive by the weight sync: actor_rollout_ref.rollout.load_format
engines always return them: actor_rollout_ref.rollout.calculate_log_probs
log-probs of the sampling distribution: actor_rollout_ref.rollout.logprobs_mode
false: actor_rollout_ref.rollout.ignore_eos
data.max_prompt_length: actor_rollout_ref.rollout.prompt_length
data.max_response_length: actor_rollout_ref.rollout.response_length
single-turn generation: actor_rollout_ref.rollout.{agent.default_agent_loop,multi_turn.*}
rltrain has its own weight sync: actor_rollout_ref.rollout.{checkpoint_engine.*,update_weights_bucket_megabytes}
evaluation is greedy: actor_rollout_ref.rollout.val_kwargs.*
settings of VeOmni: actor_rollout_ref.actor.veomni.*
settings of torchtitan: actor_rollout_ref.actor.torchtitan.*
settings of Hydra: --config-* hydra.*
""")


# The supervised trainer.

EACH_EPOCH = "after_each_epoch"
DECAYS = ("constant", "cosine", "linear")
SFT_HARMLESS = by_pattern("""
speed or checkpoint files only: engine.*
choice of the trainer: engine strategy model_engine model optim
speed or memory only: optim.override_optimizer_config.*
warm-up starts at 0: optim.lr_warmup_init
the schedule covers the whole run: optim.lr_decay_steps
sequences are always packed: model.use_remove_padding data.pad_mode
code in checkpoints is never run: model.trust_remote_code
memory only: model.enable_gradient_checkpointing
speed only: model.use_liger data.num_workers
no adapters, or their storage: model.lora*
implementation of torch or Megatron: optim.optimizer_impl
micro-batches are counted in tokens: data.*micro_batch_size* data.use_dynamic_bsz data.max_token_len_per_gpu
chat templates are always checked: data.ignore_input_ids_mismatch
longer conversations are left out: data.truncation
reading of rows only: data.*
no evaluation set without data.val_files: trainer.test_freq
logs and checkpoint files only: trainer.*
logs only: global_profiler.* profiler.*
checkpoint files only: checkpoint.*
settings of Hydra and torchrun: --*
choice of the trainer: -m
""")


def translate_sft(keys: SourceKeys, out: Translation, rows: RowCounts) -> None:
    """Translates a config of verl's supervised trainer into `out`."""
    out.set("algorithm", "sft", "verl.trainer.sft_trainer")
    apply(VERL_SFT, keys, out)
    out.set("data.train.response_key", None, "messages are whole conversations")
    out.set("data.train.label_key", None, "conversations have no labels")
    longest = keys.count("data.max_length", 1024)
    out.set("data.max_prompt_tokens", longest, "data.max_length")
    out.set("data.max_response_tokens", longest, "data.max_length")
    out.set("data.on_bad_row", "skip", "longer conversations are left out")
    if keys.truth("data.use_dynamic_bsz", True):
        out.set("actor.micro_batch_tokens", keys.count("data.max_token_len_per_gpu", 8192), "max_token_len_per_gpu")
    else:
        samples = keys.count("data.micro_batch_size_per_gpu", 4)
        out.set("actor.micro_batch_tokens", samples * longest, "data.micro_batch_size_per_gpu x data.max_length")
    given = keys.get("--nproc-per-node", keys.get("trainer.n_gpus_per_node", 1))
    per_node = count(given)
    nodes = keys.count("--nnodes", keys.get("trainer.nnodes", 1))
    out.place(["actor"], ranks(0, nodes * per_node), "trainer.nnodes x trainer.n_gpus_per_node")
    out.world_size, out.ranks_per_node = nodes * per_node, per_node
    _backend(keys, out)
    if keys.truth("model.enable_gradient_checkpointing", True):
        out.set("model.recompute", "full", "model.enable_gradient_checkpointing")
    _optimizer(keys, out)
    named = ("trainer.total_training_steps", "trainer.total_epochs")
    set_steps(out, rows, keys.get(named[0]), keys.get(named[1], 4), named, name=named[0])
    saved = keys.get("trainer.save_freq", -1)
    each_epoch = max(out.get("steps") // keys.count(named[1], 4), 1)
    out.set("checkpoint.save_interval", each_epoch if saved == EACH_EPOCH else interval(saved), "trainer.save_freq")
    if (held_out := keys.get("data.val_files")) not in NOTHING:
        out.set("data.eval.path", paths(held_out), "data.val_files")
        out.set("data.eval.prompt_key", out.get("data.train.prompt_key"), "data.messages_key")
        out.set("data.eval.response_key", None, "messages are whole conversations")
        out.set("data.eval.label_key", None, "conversations have no labels")
        tested = keys.get("trainer.test_freq", -1)
        out.set("evaluation.interval", each_epoch if tested == EACH_EPOCH else interval(tested), "trainer.test_freq")
    ratio = real(keys.get("optim.lr_warmup_steps_ratio", 0) or 0)
    warmup = keys.get("optim.lr_warmup_steps")
    steps = count(warmup) if warmup not in NOTHING and count(warmup) >= 0 else round(ratio * out.get("steps"))
    if steps:
        out.set("actor.optimizer.warmup_steps", steps, "optim.lr_warmup_steps, _ratio")
    set_vision(out, keys.get(IMAGES), IMAGES)
    sort_out(keys, SFT_HARMLESS, out)


def _backend(keys: SourceKeys, out: Translation) -> None:
    """Sets the backend. The default engine is FSDP."""
    engine = keys.text("engine", keys.get("engine.strategy", "fsdp"))
    megatron = "megatron" in engine
    set_lora(keys, out, "model.", megatron)
    set_verls_prediction_layers(keys, out, "model.", megatron)
    set_kind_of_optimizer(keys, out, "optim.")
    if not megatron:
        set_fully_sharded(keys, out, "engine", engine, out.get("actor.parallel.cp"), "engine.")
    elif out.get("actor.parallel.tp") > 1:
        out.set("actor.parallel.sequence_parallel", True, "engine.sequence_parallel, on by default")


def _optimizer(keys: SourceKeys, out: Translation) -> None:
    set_betas(keys, out, "optim.betas")
    names = ("optim.lr_scheduler_type", "optim.lr_decay_style", "optim.lr_scheduler", "optim.warmup_style")
    key, decay = keys.first(*names, default="constant")
    if str(decay) in DECAYS:
        out.set("actor.optimizer.decay", str(decay), key)
    else:
        out.differs(key, decay, f"schedules of the learning rate here: {', '.join(DECAYS)}")
    least = keys.get("optim.min_lr_ratio")
    if least not in NOTHING:
        out.set("actor.optimizer.min_lr", real(least) * out.get("actor.optimizer.lr"), "optim.min_lr_ratio")


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
    if "sft" in keys.text(MODULE, ""):
        translate_sft(keys, out, rows)
        return
    apply(VERL, keys, out, dtype=one_of({"fp8": "fp8"}, "types of engines' weights"))
    _batch(keys, out)
    _placement(keys, out)
    _trainer(keys, out)
    set_algorithm(keys, out)
    set_loss(keys, out)
    set_kl(keys, out)
    set_correction(keys, out)
    _data(keys, out)
    set_reward(keys, out)
    _engine(keys, out)
    _records(keys, out)
    _steps(keys, out, rows)
    set_optimizer(keys, out, A + "optim.", "actor", 1e-6)
    if out.get("algorithm") == "ppo":
        set_critic(keys, out)
    set_teacher(keys, out)
    _vision(keys, out)
    sort_out(keys, HARMLESS, out)


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
        set_steps(out, rows, keys.get(steps), keys.get(epochs, 30), (steps, epochs), name=steps)
    else:
        named = (f"{DRAWN} {most} // prompts per step", epochs)
        set_steps(out, rows, count(most) // out.get("batch.prompts_per_step"), keys.get(epochs, 30), named)


DRAWN = "rollout.total_rollout_steps"
"""Number of prompts generated by a fully asynchronous run, at most those of its epochs."""
CHUNKED = (
    A + "entropy_from_logits_with_chunking",
    A + "fsdp_config.entropy_from_logits_with_chunking",
    A + "megatron.entropy_from_logits_with_chunking",
    "actor_rollout_ref.model.use_fused_kernels",
)
CHUNK = 2048


def _batch(keys: SourceKeys, out: Translation) -> None:
    prompts = out.get("batch.prompts_per_step")
    if prompts == 0:  # fully asynchronous: a step is what is required of samples between two updates
        prompts = keys.count(A + "ppo_mini_batch_size", 256) * keys.count("async_training.require_batches", 1)
        out.set("batch.prompts_per_step", prompts, "ppo_mini_batch_size x async_training.require_batches")
    mini = keys.get(A + "ppo_mini_batch_size", 256)
    set_mini_batches(out, prompts, mini, A + "ppo_mini_batch_size, which counts prompts")
    chunked = [key for key in CHUNKED if keys.truth(key, False)]
    if chunked:
        out.set("model.logits_chunk_tokens", CHUNK, chunked[0])
    longest = out.get("data.max_prompt_tokens") + out.get("rollout.sampling.max_response_tokens")
    longest = -(-longest // slices_of(keys))
    dynamic = keys.truth(A + "use_dynamic_bsz", False)
    set_micro(keys, out, "actor", A + "ppo_max_token_len_per_gpu", A + "ppo_micro_batch_size_per_gpu", dynamic, longest)


def _placement(keys: SourceKeys, out: Translation) -> None:
    """Places the roles. The hybrid engine has all roles on all GPUs. Asynchronous trainers have separate GPUs for
    engines."""
    nodes, per_node = keys.count("trainer.nnodes", 1), keys.count("trainer.n_gpus_per_node", 8)
    trained = nodes * per_node
    module, mode = keys.text(MODULE, ""), keys.get("trainer.v1.trainer_mode", "sync")
    hybrid = keys.truth("actor_rollout_ref.hybrid_engine", True)
    apart = "fully_async" in module or not hybrid or mode == "separate_async"
    roles = ["actor", "critic"] if named_estimator(keys) == "gae" else ["actor"]
    if keys.truth(A + "use_kl_loss", False) or keys.truth("algorithm.use_kl_in_reward", False):
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
    every = count(
        keys.first("async_training.trigger_parameter_sync_step", SEPARATE + "parameter_sync_step", default=1)[1]
    )
    out.set("schedule.mode", "asynchronous", module or "trainer.v1.trainer_mode")
    stale = keys.real("async_training.staleness_threshold", 0)
    off_policy = keys.get("trainer.v1.sampler.max_off_policy_threshold")
    most = every + round(stale * every) if off_policy is None else count(off_policy)
    out.set("schedule.max_staleness", max(most, every), "staleness threshold, in steps")
    out.set("schedule.sync_every", every, "parameter sync step")
    if keys.truth("async_training.partial_rollout", False):
        out.set("schedule.partial_rollouts", True, "async_training.partial_rollout")


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


def _data(keys: SourceKeys, out: Translation) -> None:
    out.set("data.train.label_key", LABEL, "the label of verl's reward functions")
    overlong = keys.truth("data.filter_overlong_prompts", False) or keys.get("data.truncation", "error") != "error"
    if overlong:
        out.set("data.on_bad_row", "skip", "data.filter_overlong_prompts, data.truncation: longer prompts are left out")
    if keys.get("data.truncation", "error") in ("left", "right", "middle"):
        out.leave("data.truncation", keys.get("data.truncation"), "longer prompts are left out, not cut")
    rows = keys.get("data.train_max_samples", -1)
    if rows not in NOTHING and count(rows) > 0:
        out.set("data.train.max_rows", count(rows), "data.train_max_samples")
    variables = keys.under("data.apply_chat_template_kwargs.")
    if variables:
        out.set("data.chat_template_args", variables, "data.apply_chat_template_kwargs")
    set_context(out, keys.get(R + "max_model_len"), R + "max_model_len")
    files = keys.get("data.val_files")
    if files in NOTHING:
        out.settings.pop("evaluation.interval", None)
        return
    prefix = R + "val_kwargs."
    draws = keys.truth(prefix + "do_sample", False)
    given = keys.first(prefix + "n", "'n'", default=1)[1]
    sampling: dict[str, Any] = {"temperature": keys.real(prefix + "temperature", 0) if draws else 0.0}
    if draws:
        sampling["top_p"] = keys.real(prefix + "top_p", 1.0)
        sampling["top_k"] = top_k_of(keys.get(prefix + "top_k", -1))
    data = {"path": paths(files), "prompt_key": out.get("data.train.prompt_key"), "label_key": LABEL}
    set_evaluation(out, data, sampling, count(given), "data.val_files, rollout.val_kwargs")


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
    if mode == "disable":
        out.set("checkpoint.resume", "none", "trainer.resume_mode")
    elif mode == "resume_path" and path not in NOTHING:
        out.set("checkpoint.resume", str(path), "trainer.resume_from_path")
    if str(out.get("checkpoint.dir") or "").startswith("$"):
        del out.settings["checkpoint.dir"]
