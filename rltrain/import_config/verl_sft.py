"""Rules for verl's supervised trainers: today's, and the older one with FSDP alone."""

from rltrain.config.foreign import VERL_SFT, VERL_SFT_OLDER
from rltrain.import_config.influence import Condition, KeyRules, by_pattern, sort_out
from rltrain.import_config.shared_rules import set_fully_sharded, set_verls_prediction_layers, set_vision
from rltrain.import_config.translation import (
    NOTHING,
    RowCounts,
    SourceKeys,
    Translation,
    UntranslatableError,
    apply,
    count,
    interval,
    paths,
    ranks,
    real,
    set_betas,
    set_steps,
)
from rltrain.import_config.verl_learning import set_kind_of_optimizer, set_lora

# The supervised trainer.

IMAGES, MODULE = "data.image_key", "-m"
PROGRAMS = ("verl.trainer.sft_trainer", "verl.trainer.sft_trainer_ray")
OLDER = "verl.trainer.fsdp_sft_trainer"


def is_supervised(keys: SourceKeys) -> bool:
    """Returns whether the program is a supervised trainer of verl's own."""
    return keys.get(MODULE) in (*PROGRAMS, OLDER)


EACH_EPOCH = "after_each_epoch"
DECAYS = ("constant", "cosine", "linear")
SFT_HARMLESS = by_pattern("""
choice of the trainer: engine engine.strategy strategy model_engine model optim engine._target_ -m
speed or memory only: engine.{param_offload,optimizer_offload,grad_offload,offload_policy,forward_prefetch}
    engine.{use_orig_params,wrap_policy.min_num_params,reshard_after_forward,fsdp_size,use_torch_compile}
    engine.{sequence_parallel,entropy_from_logits_with_chunking,entropy_checkpointing,use_remove_padding}
    engine.use_megatron_fsdp
    engine.override_transformer_config.{sequence_parallel,context_parallel_algo}
    engine.{use_distributed_optimizer,full_determinism,override_transformer_config.attention_backend}
    engine.override_transformer_config.{recompute_granularity,recompute_method,recompute_modules,recompute_num_layers}
    engine.override_transformer_config.{moe_router_dtype,apply_rope_fusion,moe_permute_fusion,use_flash_attn}
    engine.override_transformer_config.{moe_token_dispatcher_type,moe_enable_deepep,gradient_accumulation_fusion}
    engine.override_ddp_config.{overlap_grad_reduce,overlap_param_gather,grad_reduce_in_fp32}
    optim.override_optimizer_config.{overlap_cpu_optimizer_d2h_h2d,use_precision_aware_optimizer}
    optim.override_optimizer_config.optimizer_offload_fraction
    model.{use_liger,use_shm,enable_activation_offload,use_fused_kernels,enable_gradient_checkpointing}
    model.override_config.attn_implementation data.num_workers data.use_shm
checkpoint files only: engine.{use_mbridge,vanilla_mbridge,use_dist_checkpointing,dist_checkpointing_path}
Megatron trains: engine.{model_dtype,ulysses_sequence_parallel_size}
FSDP trains: engine.{tensor_model_parallel_size,pipeline_model_parallel_size,virtual_pipeline_model_parallel_size}
    engine.{context_parallel_size,expert_model_parallel_size,expert_tensor_parallel_size}
seeds of orders: engine.seed
the schedule covers the whole run: optim.lr_decay_steps optim.total_training_steps
the learning rate is constant: optim.{min_lr,min_lr_ratio,num_cycles}
warm-up is given in steps: optim.lr_warmup_steps_ratio
warm-up begins at 0: optim.lr_warmup_init
sequences are always packed: model.use_remove_padding data.pad_mode data.balance_dp_token
code in checkpoints is never run: model.trust_remote_code data.trust_remote_code
no adapters: model.{lora_alpha,target_modules,exclude_modules,lora_adapter_path,lora.*}
implementation of torch or Megatron: optim.optimizer_impl
micro-batches are counted in tokens: data.{micro_batch_size,micro_batch_size_per_gpu,use_dynamic_bsz}
    data.{max_token_len_per_gpu,val_max_token_len_per_gpu,val_micro_batch_size_per_gpu}
chat templates are always checked: data.ignore_input_ids_mismatch
longer conversations are left out: data.truncation
no images: data.image_key data.video_key
no evaluation: trainer.test_freq
steps are given: trainer.total_epochs trainer.total_training_steps
logs only: trainer.logger trainer.project_name trainer.experiment_name profiler.* global_profiler.*
checkpoint files only: trainer.{default_hdfs_dir,resume_mode,resume_from_path,max_ckpt_to_keep} checkpoint.*
    trainer.checkpoint.*
detected automatically: trainer.device
settings of torchrun: --nproc-per-node --nnodes
torchrun gives the number of processes: trainer.n_gpus_per_node trainer.nnodes
its keys are read: --config-name --config-path
settings of Hydra: hydra.*
""")


def _conditions(keys: SourceKeys, megatron: bool) -> dict[str, Condition]:
    """Returns the checks of reasons that depend on the source's keys."""
    return {
        "Megatron trains": lambda _: megatron,
        "FSDP trains": lambda _: not megatron,
        "torchrun gives the number of processes": lambda _: "--nproc-per-node" in keys,
        "the learning rate is constant": lambda out: out.get("actor.optimizer.decay") == "constant",
        "warm-up is given in steps": lambda _: keys.get("optim.lr_warmup_steps") not in NOTHING,
        "warm-up begins at 0": lambda _: real(keys.get("optim.lr_warmup_init") or 0) == 0,
        "single-turn rows": lambda _: not keys.truth(TURNS + "enable", False),
        "conversations": lambda _: keys.truth(TURNS + "enable", False),
    }


def translate_sft(keys: SourceKeys, out: Translation, rows: RowCounts) -> None:
    """Translates a config of verl's supervised trainers into `out`."""
    if keys.get(MODULE) == OLDER:
        _translate_older(keys, out, rows)
        return
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
    _place(keys, out)
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
    megatron = "megatron" in keys.text("engine", keys.get("engine.strategy", "fsdp"))
    sort_out(keys, out, KeyRules(SFT_HARMLESS, "verl_sft", _conditions(keys, megatron)))


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


def _place(keys: SourceKeys, out: Translation) -> None:
    """Places the actor on the processes of torchrun."""
    per_node = count(keys.get("--nproc-per-node", keys.get("trainer.n_gpus_per_node", 1)))
    nodes = keys.count("--nnodes", keys.get("trainer.nnodes", 1))
    out.place(["actor"], ranks(0, nodes * per_node), "trainer.nnodes x trainer.n_gpus_per_node")
    out.world_size, out.ranks_per_node = nodes * per_node, per_node


# The older trainer, verl.trainer.fsdp_sft_trainer. Its defaults are from verl/trainer/config/sft_trainer.yaml, 0.4.

TURNS, FSDP = "data.multiturn.", "model.fsdp_config."
MICRO = "data.micro_batch_size_per_gpu"
OLDER_HARMLESS = by_pattern("""
choice of the trainer: -m
speed or memory only: model.{enable_gradient_checkpointing,use_liger,use_shm,strategy} data.use_shm use_remove_padding
    model.fsdp_config.{wrap_policy.min_num_params,wrap_policy.transformer_layer_cls_to_wrap,cpu_offload,offload_params}
    data.micro_batch_size_per_gpu data.num_workers
code in checkpoints is never run: model.trust_remote_code
no adapters: model.{lora_alpha,target_modules}
logs only: trainer.logger trainer.project_name trainer.experiment_name
checkpoint files only: trainer.{default_hdfs_dir,max_ckpt_to_keep} trainer.checkpoint.*
steps are given: trainer.total_training_steps trainer.total_epochs
the run ends by its epochs: trainer.total_training_steps
single-turn rows: data.multiturn.*
conversations: data.{prompt_key,response_key,prompt_dict_keys,response_dict_keys}
detected automatically: trainer.device
settings of torchrun: --nproc-per-node --nnodes
torchrun gives the number of processes: trainer.n_gpus_per_node trainer.nnodes
its keys are read: --config-name --config-path
settings of Hydra: hydra.*
""")


def _translate_older(keys: SourceKeys, out: Translation, rows: RowCounts) -> None:
    out.set("algorithm", "sft", OLDER)
    apply(VERL_SFT_OLDER, keys, out)
    set_betas(keys, out, "optim.betas")
    if "optim.betas" not in keys:
        out.set("actor.optimizer.beta2", 0.95, "optim.betas, default of verl")
    keys.assumed["optim.betas"] = [0.9, 0.95]
    _place(keys, out)
    _rows_of_older(keys, out)
    _loss_of_older(keys, out)
    set_lora(keys, out, "model.", megatron=False)
    slices = keys.count("ulysses_sequence_parallel_size", 1)
    set_fully_sharded(keys, out, "model.strategy", keys.text("model.strategy", "fsdp"), slices, FSDP)
    if keys.truth("model.enable_gradient_checkpointing", True):
        out.set("model.recompute", "full", "model.enable_gradient_checkpointing")
    if keys.get(FSDP + "model_dtype", "fp32") not in ("fp32", "float32"):
        out.differs(FSDP + "model_dtype", keys.get(FSDP + "model_dtype"), "master weights are in float32 here")
    if (path := keys.get("trainer.resume_path")) not in NOTHING:
        out.set("checkpoint.resume", str(path), "trainer.resume_path")
    _schedule_of_older(keys, out, rows)
    sort_out(keys, out, KeyRules(OLDER_HARMLESS, "verl_sft_older", _conditions(keys, megatron=False)))


def _rows_of_older(keys: SourceKeys, out: Translation) -> None:
    """Sets the columns and lengths. A prompt is one message of the user, and the response ends with eos_token."""
    for data in ("data.train", "data.eval"):
        if data == "data.eval":
            if (held_out := keys.get("data.val_files", "~/data/gsm8k/test.parquet")) in NOTHING:
                continue
            out.set("data.eval.path", paths(held_out), "data.val_files")
        if keys.truth(TURNS + "enable", False):
            out.set(f"{data}.prompt_key", keys.text(TURNS + "messages_key", "messages"), TURNS + "messages_key")
            out.set(f"{data}.response_key", None, "messages are whole conversations")
            out.set(f"{data}.tools_key", keys.text(TURNS + "tools_key", "tools"), TURNS + "tools_key")
        else:
            for name, default in (("prompt", "question"), ("response", "answer")):
                given = keys.get(f"data.{name}_dict_keys")
                inner = [] if given in NOTHING else [given] if isinstance(given, str) else [*given]
                column = ".".join(map(str, (keys.get(f"data.{name}_key", default), *inner)))
                out.set(f"{data}.{name}_key", column, f"data.{name}_key, data.{name}_dict_keys")
        out.set(f"{data}.label_key", None, "demonstrations have no labels")
    if not keys.truth(TURNS + "enable", False):
        out.notes.append(
            "responses end with the tokenizer's eos_token there, and here with the token that closes a turn. Both are "
            "the same for models that were tuned to chat"
        )
    longest = keys.count("data.max_length", 1024)
    out.set("data.max_prompt_tokens", longest, "data.max_length")
    out.set("data.max_response_tokens", longest, "data.max_length")
    cut = keys.text("data.truncation", "error")
    if cut != "error":
        out.differs("data.truncation", cut, "rows are cut there. Here on_bad_row: skip leaves long ones out")
    if keys.get("data.chat_template") not in NOTHING:
        out.differs("data.chat_template", keys.get("data.chat_template"), "the checkpoint's template is used here")


def _loss_of_older(keys: SourceKeys, out: Translation) -> None:
    """Sets the loss. A step is the mean over ranks of the means over micro-batches, whatever their numbers of tokens.

    This is the mean over tokens for one micro-batch with `balance_dp_token`. It is the mean over sequences for one
    sequence on each rank.
    """
    replicas = out.num_ranks("actor") // keys.count("ulysses_sequence_parallel_size", 1)
    if not replicas:
        raise UntranslatableError("fewer ranks than ulysses_sequence_parallel_size")
    samples = out.get("batch.prompts_per_step")
    micro, of_all = keys.count(MICRO, 4), keys.get("data.micro_batch_size")
    if MICRO not in keys and of_all not in NOTHING:
        micro = max(count(of_all) // replicas, 1)
        reason = f"some versions cut it into {micro} for each rank, and others ignore it; give {MICRO}"
        out.differs("data.micro_batch_size", of_all, reason)
    balanced = keys.truth("data.balance_dp_token", False)
    is_one = samples == micro * replicas
    kind = "sequence_mean" if micro == 1 else "token_mean"
    out.set("loss.normalization", kind, f"{MICRO} {micro}")
    out.set("actor.micro_batch_tokens", micro * keys.count("data.max_length", 1024), f"{MICRO} x data.max_length")
    if micro == 1 and balanced:
        out.set("loss.normalization", "token_mean", "data.balance_dp_token")
    if not is_one or not (balanced or micro == 1):
        out.differs(
            MICRO,
            micro,
            f"the {samples // replicas} samples of a rank are cut into micro-batches of {micro}, whose means weigh "
            "alike there, whatever their tokens. Some versions add them up, so that clip_grad bounds another norm. "
            f"Here the loss is the {kind} of the step",
        )


def _schedule_of_older(keys: SourceKeys, out: Translation, rows: RowCounts) -> None:
    """Sets steps and the learning rate. Its schedule covers all epochs, even if the run ends earlier."""
    steps, epochs = keys.get("trainer.total_training_steps"), keys.get("trainer.total_epochs", 4)
    set_steps(out, rows, steps, epochs, ("trainer.total_training_steps", "trainer.total_epochs"))
    found = rows.of(out.data["data"]["train"])
    each = None if found is None else max(found // out.get("batch.prompts_per_step"), 1)
    whole = None if each is None else each * count(epochs)
    decay = keys.text("optim.lr_scheduler", "cosine")
    if decay == "cosine":
        out.set("actor.optimizer.decay", "cosine", "optim.lr_scheduler, default cosine")
    else:
        out.differs("optim.lr_scheduler", decay, "schedules of the learning rate of this trainer here: cosine")
    if whole != out.get("steps"):
        reason = "the learning rate falls over all epochs there, and over the run's steps here"
        out.differs("trainer.total_training_steps", out.get("steps"), f"{reason}; give --rows N if both are equal")
    warmup = int(out.get("steps") * keys.real("optim.warmup_steps_ratio", 0.1))
    if warmup:
        out.set("actor.optimizer.warmup_steps", warmup, "optim.warmup_steps_ratio")
    each = each or max(out.get("steps") // count(epochs), 1)
    for path, name in (("checkpoint.save_interval", "save_freq"), ("evaluation.interval", "test_freq")):
        given = keys.get(f"trainer.{name}")
        out.set(path, each if given is None else interval(given), f"trainer.{name}, or the end of each epoch")
    if "data.eval.path" not in out.settings:
        del out.settings["evaluation.interval"]
