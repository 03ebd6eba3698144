"""verl's keys. Defaults are those of verl/trainer/config (ppo_trainer.yaml)."""

from typing import Any

from rltrain.importing import verl_sft
from rltrain.importing.batches import (
    set_context,
    set_evaluation,
    set_mini_batches,
)
from rltrain.importing.conversions import NOTHING, count, interval, one_of, paths, ranks, real, text, truth
from rltrain.importing.conversions import top_k as top_k_of
from rltrain.importing.engine import choose_engine
from rltrain.importing.fully_sharded import set_fully_sharded
from rltrain.importing.prediction_head import set_verls_prediction_layers
from rltrain.importing.steps import Rows, set_steps
from rltrain.importing.translation import Rule, SourceKeys, Translation, apply, sort_out, sort_out_override
from rltrain.importing.verl_correction import set_correction
from rltrain.importing.verl_learning import (
    A,
    R,
    named_estimator,
    set_algorithm,
    set_critic,
    set_kl,
    set_loss,
    set_micro,
    set_optimizer,
)
from rltrain.importing.verl_leftovers import HARMLESS
from rltrain.importing.verl_model import is_megatron, set_kind_of_optimizer, set_lora, set_router_replay, slices_of
from rltrain.importing.verl_reward import set_reward
from rltrain.importing.verl_teacher import set_teacher

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

MEGATRON = (
    Rule(A + "megatron.tensor_model_parallel_size", "actor.parallel.tp", 1, count),
    Rule(A + "megatron.pipeline_model_parallel_size", "actor.parallel.pp", 1, count),
    Rule(A + "megatron.context_parallel_size", "actor.parallel.cp", 1, count),
    Rule(A + "megatron.expert_model_parallel_size", "actor.parallel.ep", 1, count),
    Rule(A + "megatron.expert_tensor_parallel_size", "actor.parallel.etp", None, count),
    Rule(A + "megatron.virtual_pipeline_model_parallel_size", "actor.parallel.vpp", None, count),
)
TRANSFORMER = A + "megatron.override_transformer_config."
EXPERTS = (
    Rule(TRANSFORMER + "moe_aux_loss_coeff", "model.moe.aux_loss_coef", None, real),
    Rule(TRANSFORMER + "moe_z_loss_coeff", "model.moe.z_loss_coef", None, real),
    Rule(TRANSFORMER + "moe_router_bias_update_rate", "model.moe.bias_update_rate", None, real),
)
PLAIN = (
    Rule("data.train_files", "data.train.path", "~/data/rlhf/gsm8k/train.parquet", paths),
    Rule("data.prompt_key", "data.train.prompt_key", "prompt", text),
    Rule("data.max_prompt_length", "data.max_prompt_tokens", 512, count),
    Rule("data.max_response_length", "rollout.sampling.max_response_tokens", 512, count),
    Rule("data.shuffle", "data.shuffle", True, truth),
    Rule("data.seed", "seed", None, count),
    Rule("data.train_batch_size", "batch.prompts_per_step", 1024, count),
    Rule(R + "n", "batch.samples_per_prompt", 1, count),
    Rule(R + "temperature", "rollout.sampling.temperature", 1.0, real),
    Rule(R + "top_p", "rollout.sampling.top_p", 1.0, real),
    Rule(R + "top_k", "rollout.sampling.top_k", -1, top_k_of),
    Rule(R + "tensor_model_parallel_size", "rollout.parallel.tp", 2, count),
    Rule(R + "max_num_seqs", "rollout.max_running_requests", 256, count),
    Rule(R + "quantization", "rollout.dtype", None, one_of({"fp8": "fp8"}, "types of engines' weights")),
    Rule(A + "ppo_epochs", "batch.epochs", 1, count),
    Rule(A + "clip_ratio_low", "loss.clip_low", 0.2, real),
    Rule(A + "clip_ratio_high", "loss.clip_high", 0.2, real),
    Rule(A + "entropy_coeff", "loss.entropy_coef", 0.0, real),
    Rule(A + "tau_pos", "loss.sapo.tau_pos", 1.0, real),
    Rule(A + "tau_neg", "loss.sapo.tau_neg", 1.05, real),
    Rule(A + "policy_loss.clip_cov_ratio", "loss.clip_cov.ratio", None, real),
    Rule(A + "policy_loss.clip_cov_lb", "loss.clip_cov.low", None, real),
    Rule(A + "policy_loss.clip_cov_ub", "loss.clip_cov.high", None, real),
    Rule(A + "policy_loss.kl_cov_ratio", "loss.kl_cov.ratio", None, real),
    Rule(A + "policy_loss.ppo_kl_coef", "loss.kl_cov.coef", None, real),
    Rule("actor_rollout_ref.model.path", "model.path", "~/models/deepseek-llm-7b-chat", text),
    Rule("trainer.save_freq", "checkpoint.save_interval", -1, interval),
    Rule("trainer.test_freq", "evaluation.interval", -1, interval),
    Rule("trainer.default_local_dir", "checkpoint.dir", None, text),
    Rule("trainer.max_actor_ckpt_to_keep", "checkpoint.keep", None, interval),
    Rule("trainer.project_name", "logging.wandb.project", None, text),
    Rule("trainer.experiment_name", "logging.wandb.name", None, text),
)


def translate(keys: SourceKeys, out: Translation, rows: Rows) -> None:
    if "sft" in str(keys.get(MODULE, "")):
        verl_sft.translate(keys, out, rows)
        return
    apply(PLAIN, keys, out)
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
    sort_out(keys, HARMLESS, out)


def _steps(keys: SourceKeys, out: Translation, rows: Rows) -> None:
    steps, epochs = "trainer.total_training_steps", "trainer.total_epochs"
    most = keys.get(DRAWN)
    if most in NOTHING:
        set_steps(out, rows, keys.get(steps), keys.get(epochs, 30), (steps, epochs), name=steps)
    else:
        named = (f"{DRAWN} {most} // prompts per step", epochs)
        set_steps(out, rows, count(most) // out.get("batch.prompts_per_step"), keys.get(epochs, 30), named)


DRAWN = "rollout.total_rollout_steps"
"""Prompts that a fully asynchronous run draws, at most those of its epochs."""
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
        prompts = count(keys.get(A + "ppo_mini_batch_size", 256)) * count(keys.get("async_training.require_batches", 1))
        out.set("batch.prompts_per_step", prompts, "ppo_mini_batch_size x async_training.require_batches")
    mini = keys.get(A + "ppo_mini_batch_size", 256)
    set_mini_batches(out, prompts, mini, A + "ppo_mini_batch_size, which counts prompts")
    chunked = [key for key in CHUNKED if truth(keys.get(key, False))]
    if chunked:
        out.set("model.logits_chunk_tokens", CHUNK, chunked[0])
    longest = out.get("data.max_prompt_tokens") + out.get("rollout.sampling.max_response_tokens")
    longest = -(-longest // slices_of(keys))
    dynamic = truth(keys.get(A + "use_dynamic_bsz", False))
    set_micro(keys, out, "actor", A + "ppo_max_token_len_per_gpu", A + "ppo_micro_batch_size_per_gpu", dynamic, longest)


def _placement(keys: SourceKeys, out: Translation) -> None:
    """The hybrid engine has all roles on all GPUs; asynchronous trainers have engines on GPUs of their own."""
    nodes, per_node = count(keys.get("trainer.nnodes", 1)), count(keys.get("trainer.n_gpus_per_node", 8))
    trained = nodes * per_node
    module, mode = str(keys.get(MODULE, "")), keys.get("trainer.v1.trainer_mode", "sync")
    hybrid = truth(keys.get("actor_rollout_ref.hybrid_engine", True))
    apart = "fully_async" in module or not hybrid or mode == "separate_async"
    roles = ["actor", "critic"] if named_estimator(keys) == "gae" else ["actor"]
    if truth(keys.get(A + "use_kl_loss", False)) or truth(keys.get("algorithm.use_kl_in_reward", False)):
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
    out.place(["rollout", "reward"], ranks(trained, engines), "rollout.nnodes x rollout.n_gpus_per_node, behind them")
    out.world_size = trained + engines
    every = count(
        keys.first("async_training.trigger_parameter_sync_step", SEPARATE + "parameter_sync_step", default=1)[1]
    )
    out.set("schedule.mode", "asynchronous", module or "trainer.v1.trainer_mode")
    stale = real(keys.get("async_training.staleness_threshold", 0))
    off_policy = keys.get("trainer.v1.sampler.max_off_policy_threshold")
    most = every + round(stale * every) if off_policy is None else count(off_policy)
    out.set("schedule.max_staleness", max(most, every), "staleness threshold, in steps")
    out.set("schedule.sync_every", every, "parameter sync step")
    if truth(keys.get("async_training.partial_rollout", False)):
        out.set("schedule.partial_rollouts", True, "async_training.partial_rollout")


SEPARATE = "trainer.v1.separate_async."


def _trainer(keys: SourceKeys, out: Translation) -> None:
    strategy = str(keys.get(A + "strategy", keys.get("model_engine", "dp")))
    checkpointing = truth(keys.get("actor_rollout_ref.model.enable_gradient_checkpointing", True))
    megatron = is_megatron(keys)
    set_lora(keys, out, "actor_rollout_ref.model.", megatron)
    set_router_replay(keys, out)
    set_verls_prediction_layers(keys, out, "actor_rollout_ref.model.", megatron)
    set_kind_of_optimizer(keys, out, A + "optim.")
    if megatron:
        apply(MEGATRON, keys, out)
        apply(EXPERTS, keys, out)
        if out.get("actor.parallel.vpp") > 1 and out.get("actor.parallel.pp") == 1:
            chunks = out.settings.pop("actor.parallel.vpp")
            out.leave(chunks.origin, chunks.value, "one stage has no other to take turns with")
        own = truth(keys.get(A + "megatron.sequence_parallel", True))
        if own and out.get("actor.parallel.tp") > 1:
            out.set("actor.parallel.sequence_parallel", True, A + "megatron.sequence_parallel")
        granularity = keys.get(TRANSFORMER + "recompute_granularity")
        if granularity not in NOTHING:
            block = keys.get(TRANSFORMER + "recompute_method") == "block"
            layers = count(keys.get(TRANSFORMER + "recompute_num_layers", 1))
            value: Any = {"granularity": "full", "layers": layers} if block and granularity == "full" else granularity
            out.set("model.recompute", value, TRANSFORMER + "recompute_granularity")
        offloads = [A + f"megatron.{what}_offload" for what in ("param", "grad", "optimizer")]
    else:
        set_fully_sharded(keys, out, "strategy", strategy, slices_of(keys), A + "fsdp_config.")
        if checkpointing:
            out.set("model.recompute", "full", "actor_rollout_ref.model.enable_gradient_checkpointing")
        offloads = [A + f"fsdp_config.{what}_offload" for what in ("param", "optimizer")]
    given = [name for name in offloads if truth(keys.get(name, False))]
    if given:
        out.set("actor.offload", True, ", ".join(name.rsplit(".", 1)[-1] for name in given))


def _data(keys: SourceKeys, out: Translation) -> None:
    out.set("data.train.label_key", LABEL, "what verl's reward functions compare with")
    overlong = truth(keys.get("data.filter_overlong_prompts", False)) or keys.get("data.truncation", "error") != "error"
    if overlong:
        out.set("data.on_bad_row", "skip", "data.filter_overlong_prompts, data.truncation: longer prompts are left out")
    if keys.get("data.truncation", "error") in ("left", "right", "middle"):
        out.leave("data.truncation", keys.get("data.truncation"), "longer prompts are left out, and none is cut")
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
    draws = truth(keys.get(prefix + "do_sample", False))
    given = keys.first(prefix + "n", "'n'", default=1)[1]
    sampling: dict[str, Any] = {"temperature": real(keys.get(prefix + "temperature", 0)) if draws else 0.0}
    if draws:
        sampling["top_p"] = real(keys.get(prefix + "top_p", 1.0))
        sampling["top_k"] = top_k_of(keys.get(prefix + "top_k", -1))
    data = {"path": paths(files), "prompt_key": out.get("data.train.prompt_key"), "label_key": LABEL}
    set_evaluation(out, data, sampling, count(given), "data.val_files, rollout.val_kwargs")


def _engine(keys: SourceKeys, out: Translation) -> None:
    arguments = {name.replace("-", "_"): value for name, value in keys.under(R + "engine_kwargs.sglang.").items()}
    for name, value in keys.under(R + "engine_kwargs.vllm.").items():
        if name.startswith("hf_overrides"):
            sort_out_override(f"{R}engine_kwargs.vllm.{name}", value, out)
    arguments["mem_fraction_static"] = real(keys.get(R + "gpu_memory_utilization", 0.5))
    if truth(keys.get(R + "enforce_eager", False)):
        arguments["disable_cuda_graph"] = True
    replicas = count(keys.get(R + "data_parallel_size", 1) or 1)
    if replicas > 1:
        out.leave(R + "data_parallel_size", replicas, "as many engines more, each of rollout.parallel.tp ranks")
    ep = count(keys.get(R + "expert_parallel_size", 1) or 1)
    tp = out.get("rollout.parallel.tp")
    choose_engine(out, str(keys.get(R + "name", "vllm")), min(ep, tp), arguments, R + "gpu_memory_utilization, ...")


def _records(keys: SourceKeys, out: Translation) -> None:
    mode, path = keys.get("trainer.resume_mode", "auto"), keys.get("trainer.resume_from_path")
    if mode == "disable":
        out.set("checkpoint.resume", "none", "trainer.resume_mode")
    elif mode == "resume_path" and path not in NOTHING:
        out.set("checkpoint.resume", str(path), "trainer.resume_from_path")
    if str(out.get("checkpoint.dir") or "").startswith("$"):
        del out.settings["checkpoint.dir"]
