"""Maps keys of other trainers to keys of rltrain. The loader's messages and imports of whole configs use these
tables."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Pair:
    """A key of another trainer and the rltrain key with the same meaning."""

    key: str
    here: str
    default: Any = None
    """The other trainer's default for a missing key. None: a missing key has no meaning."""
    told: bool = False
    """True if users often write the key from habit. The loader then answers with the key here."""


# The flags of slime and Megatron. Defaults are from slime/utils/arguments.py and from Megatron-LM.

SLIME = (
    Pair("lr", "actor.optimizer.lr", 1e-6),
    Pair("min-lr", "actor.optimizer.min_lr", 0.0),
    Pair("weight-decay", "actor.optimizer.weight_decay", 0.01),
    Pair("adam-beta1", "actor.optimizer.beta1", 0.9),
    Pair("adam-beta2", "actor.optimizer.beta2", 0.999),
    Pair("adam-eps", "actor.optimizer.eps", 1e-8),
    Pair("clip-grad", "actor.optimizer.clip_grad", 1.0),
    Pair("lr-warmup-iters", "actor.optimizer.warmup_steps", 0),
    Pair("lr-decay-style", "actor.optimizer.decay", "constant"),
    Pair("tensor-model-parallel-size", "actor.parallel.tp", 1, told=True),
    Pair("pipeline-model-parallel-size", "actor.parallel.pp", 1, told=True),
    Pair("context-parallel-size", "actor.parallel.cp", 1),
    Pair("expert-model-parallel-size", "actor.parallel.ep", 1),
    Pair("expert-tensor-parallel-size", "actor.parallel.etp"),
    Pair("rollout-temperature", "rollout.sampling.temperature", 1.0, told=True),
    Pair("rollout-top-p", "rollout.sampling.top_p", 1.0),
    Pair("rollout-top-k", "rollout.sampling.top_k", -1),
    Pair("rollout-max-response-len", "rollout.sampling.max_response_tokens", told=True),
    Pair("prompt-data", "data.train.path", told=True),
    Pair("input-key", "data.train.prompt_key", "input"),
    Pair("tool-key", "data.train.tools_key"),
    Pair("rollout-shuffle", "data.shuffle", False),
    Pair("rollout-seed", "seed", 42),
    Pair("eps-clip", "loss.clip_low", 0.2, told=True),
    Pair("eps-clip-c", "loss.dual_clip"),
    Pair("entropy-coef", "loss.entropy_coef", 0.0),
    Pair("use-opsm", "loss.correction.opsm_delta"),
    Pair("num-critic-only-steps", "critic.critic_warmup_steps", 0),
    Pair("save", "checkpoint.dir"),
    Pair("save-interval", "checkpoint.save_interval"),
    Pair("eval-interval", "evaluation.interval"),
    Pair("wandb-project", "logging.wandb.project"),
    Pair("wandb-group", "logging.wandb.name"),
    Pair("use-tensorboard", "logging.tensorboard"),
    Pair("moe-aux-loss-coeff", "model.moe.aux_loss_coef"),
    Pair("moe-z-loss-coeff", "model.moe.z_loss_coef"),
    Pair("moe-router-bias-update-rate", "model.moe.bias_update_rate"),
)

# The keys of verl. Defaults are from verl/trainer/config: ppo_trainer.yaml and sft_trainer_engine.yaml.

ACTOR, ROLLOUT = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout."
TRANSFORMER = ACTOR + "megatron.override_transformer_config."
VERL_SFT = (
    Pair("data.train_files", "data.train.path"),
    Pair("data.messages_key", "data.train.prompt_key", "messages"),
    Pair("data.train_batch_size", "batch.prompts_per_step", 256),
    Pair("model.path", "model.path"),
    Pair("trainer.seed", "seed", 1),
    Pair("trainer.default_local_dir", "checkpoint.dir"),
    Pair("trainer.project_name", "logging.wandb.project", "gsm8k-sft"),
    Pair("trainer.experiment_name", "logging.wandb.name", "test"),
    Pair("engine.tensor_model_parallel_size", "actor.parallel.tp"),
    Pair("engine.pipeline_model_parallel_size", "actor.parallel.pp"),
    Pair("engine.virtual_pipeline_model_parallel_size", "actor.parallel.vpp"),
    Pair("engine.context_parallel_size", "actor.parallel.cp"),
    Pair("engine.expert_model_parallel_size", "actor.parallel.ep"),
    Pair("engine.expert_tensor_parallel_size", "actor.parallel.etp"),
    Pair("engine.ulysses_sequence_parallel_size", "actor.parallel.cp"),
    Pair("optim.lr", "actor.optimizer.lr", 1e-3),
    Pair("optim.weight_decay", "actor.optimizer.weight_decay", 0.01),
    Pair("optim.clip_grad", "actor.optimizer.clip_grad", 1.0),
    Pair("optim.min_lr", "actor.optimizer.min_lr"),
)
VERL_SFT_OLDER = (
    Pair("data.train_files", "data.train.path", "~/data/gsm8k/train.parquet"),
    Pair("data.train_batch_size", "batch.prompts_per_step", 256),
    Pair("model.partial_pretrain", "model.path", "~/models/gemma-1.1-7b-it"),
    Pair("trainer.seed", "seed", 1),
    Pair("trainer.default_local_dir", "checkpoint.dir"),
    Pair("trainer.project_name", "logging.wandb.project", "gsm8k-sft"),
    Pair("trainer.experiment_name", "logging.wandb.name", "test"),
    Pair("optim.lr", "actor.optimizer.lr", 1e-5),
    Pair("optim.weight_decay", "actor.optimizer.weight_decay", 0.01),
    Pair("optim.clip_grad", "actor.optimizer.clip_grad", 1.0),
)
VERL_MEGATRON = (
    Pair(ACTOR + "megatron.tensor_model_parallel_size", "actor.parallel.tp", 1),
    Pair(ACTOR + "megatron.pipeline_model_parallel_size", "actor.parallel.pp", 1),
    Pair(ACTOR + "megatron.context_parallel_size", "actor.parallel.cp", 1),
    Pair(ACTOR + "megatron.expert_model_parallel_size", "actor.parallel.ep", 1),
    Pair(ACTOR + "megatron.expert_tensor_parallel_size", "actor.parallel.etp"),
    Pair(ACTOR + "megatron.virtual_pipeline_model_parallel_size", "actor.parallel.vpp"),
    Pair(TRANSFORMER + "moe_aux_loss_coeff", "model.moe.aux_loss_coef"),
    Pair(TRANSFORMER + "moe_z_loss_coeff", "model.moe.z_loss_coef"),
    Pair(TRANSFORMER + "moe_router_bias_update_rate", "model.moe.bias_update_rate"),
)
VERL = (
    Pair("data.train_files", "data.train.path", "~/data/rlhf/gsm8k/train.parquet", told=True),
    Pair("data.prompt_key", "data.train.prompt_key", "prompt"),
    Pair("data.max_prompt_length", "data.max_prompt_tokens", 512, told=True),
    Pair("data.max_response_length", "rollout.sampling.max_response_tokens", 512, told=True),
    Pair("data.shuffle", "data.shuffle", True),
    Pair("data.seed", "seed"),
    Pair("data.train_batch_size", "batch.prompts_per_step", 1024, told=True),
    Pair(ROLLOUT + "n", "batch.samples_per_prompt", 1, told=True),
    Pair(ROLLOUT + "temperature", "rollout.sampling.temperature", 1.0, told=True),
    Pair(ROLLOUT + "top_p", "rollout.sampling.top_p", 1.0),
    Pair(ROLLOUT + "top_k", "rollout.sampling.top_k", -1),
    Pair(ROLLOUT + "tensor_model_parallel_size", "rollout.parallel.tp", 2, told=True),
    Pair(ROLLOUT + "max_num_seqs", "rollout.max_running_requests", 256),
    Pair(ROLLOUT + "quantization", "rollout.dtype"),
    Pair(ACTOR + "ppo_epochs", "batch.epochs", 1, told=True),
    Pair(ACTOR + "clip_ratio_low", "loss.clip_low", 0.2),
    Pair(ACTOR + "clip_ratio_high", "loss.clip_high", 0.2),
    Pair(ACTOR + "entropy_coeff", "loss.entropy_coef", 0.0),
    Pair(ACTOR + "tau_pos", "loss.sapo.tau_pos", 1.0),
    Pair(ACTOR + "tau_neg", "loss.sapo.tau_neg", 1.05),
    Pair(ACTOR + "policy_loss.clip_cov_ratio", "loss.clip_cov.ratio"),
    Pair(ACTOR + "policy_loss.clip_cov_lb", "loss.clip_cov.low"),
    Pair(ACTOR + "policy_loss.clip_cov_ub", "loss.clip_cov.high"),
    Pair(ACTOR + "policy_loss.kl_cov_ratio", "loss.kl_cov.ratio"),
    Pair(ACTOR + "policy_loss.ppo_kl_coef", "loss.kl_cov.coef"),
    Pair("actor_rollout_ref.model.path", "model.path", "~/models/deepseek-llm-7b-chat", told=True),
    Pair("trainer.save_freq", "checkpoint.save_interval", -1, told=True),
    Pair("trainer.test_freq", "evaluation.interval", -1, told=True),
    Pair("trainer.default_local_dir", "checkpoint.dir", told=True),
    Pair("trainer.max_actor_ckpt_to_keep", "checkpoint.keep"),
    Pair("trainer.project_name", "logging.wandb.project", told=True),
    Pair("trainer.experiment_name", "logging.wandb.name"),
)

# The keys of SkyRL. Defaults are from skyrl/train/config: config.py and sft_config.py.

ENGINE, OPTIMIZER = "generator.inference_engine.", "trainer.policy.optimizer_config."
SKYRL_SFT = (
    Pair("model.path", "model.path", "Qwen/Qwen3-0.6B"),
    Pair("seed", "seed", 42),
    Pair("batch_size", "batch.prompts_per_step", 4),
    Pair("messages_key", "data.train.prompt_key", "messages"),
    Pair("tools_key", "data.train.tools_key"),
    Pair("system_key", "data.train.system_key"),
    Pair("ckpt_interval", "checkpoint.save_interval", 0),
    Pair("max_ckpts_to_keep", "checkpoint.keep", -1),
    Pair("hf_save_interval", "checkpoint.save_hf_interval", 0),
    Pair("project_name", "logging.wandb.project", "skyrl_sft"),
    Pair("run_name", "logging.wandb.name", "skyrl_sft_run"),
    Pair("optimizer_config.lr", "actor.optimizer.lr", 1e-6),
    Pair("optimizer_config.weight_decay", "actor.optimizer.weight_decay", 0.01),
    Pair("optimizer_config.max_grad_norm", "actor.optimizer.clip_grad", 1.0),
    Pair("optimizer_config.num_warmup_steps", "actor.optimizer.warmup_steps", 0),
    Pair("optimizer_config.scheduler", "actor.optimizer.decay", "constant"),
)
SKYRL = (
    Pair("trainer.policy.model.path", "model.path", "Qwen/Qwen2.5-1.5B-Instruct", told=True),
    Pair("trainer.seed", "seed", 42),
    Pair("trainer.max_prompt_length", "data.max_prompt_tokens", 512),
    Pair("trainer.train_batch_size", "batch.prompts_per_step", 1024, told=True),
    Pair("trainer.update_epochs_per_batch", "batch.epochs", 1),
    Pair("trainer.eval_interval", "evaluation.interval", 5, told=True),
    Pair("trainer.ckpt_interval", "checkpoint.save_interval", 10, told=True),
    Pair("trainer.ckpt_path", "checkpoint.dir"),
    Pair("trainer.max_ckpts_to_keep", "checkpoint.keep", -1),
    Pair("trainer.hf_save_interval", "checkpoint.save_hf_interval", -1),
    Pair("trainer.project_name", "logging.wandb.project", "skyrl"),
    Pair("trainer.run_name", "logging.wandb.name", "test_run"),
    Pair("data.train_data", "data.train.path", "~/data/gsm8k/train.parquet"),
    Pair("generator.n_samples_per_prompt", "batch.samples_per_prompt", 5, told=True),
    Pair("generator.apply_overlong_filtering", "advantages.mask_truncated", False),
    Pair("generator.sampling_params.max_generate_length", "rollout.sampling.max_response_tokens", 1024),
    Pair("generator.sampling_params.temperature", "rollout.sampling.temperature", 1.0),
    Pair("generator.sampling_params.top_p", "rollout.sampling.top_p", 1.0),
    Pair("generator.sampling_params.top_k", "rollout.sampling.top_k", -1),
    Pair(ENGINE + "max_num_seqs", "rollout.max_running_requests", 1024),
    Pair("trainer.algorithm.eps_clip_low", "loss.clip_low", 0.2),
    Pair("trainer.algorithm.eps_clip_high", "loss.clip_high", 0.2),
    Pair("trainer.algorithm.sapo.tau_pos", "loss.sapo.tau_pos", 1.0),
    Pair("trainer.algorithm.sapo.tau_neg", "loss.sapo.tau_neg", 1.05),
    Pair("trainer.algorithm.clip_cov.clip_ratio", "loss.clip_cov.ratio"),
    Pair("trainer.algorithm.clip_cov.clip_cov_lb", "loss.clip_cov.low"),
    Pair("trainer.algorithm.clip_cov.clip_cov_ub", "loss.clip_cov.high"),
    Pair(OPTIMIZER + "lr", "actor.optimizer.lr", 1e-6, told=True),
    Pair(OPTIMIZER + "weight_decay", "actor.optimizer.weight_decay", 0.01),
    Pair(OPTIMIZER + "max_grad_norm", "actor.optimizer.clip_grad", 1.0),
    Pair(OPTIMIZER + "num_warmup_steps", "actor.optimizer.warmup_steps", 0),
    Pair(OPTIMIZER + "scheduler", "actor.optimizer.decay", "constant"),
)

# The keys of RLinf's configs for language models. These configs are complete, so defaults seldom matter.

RLINF = (
    Pair("rollout.model.model_path", "model.path"),
    Pair("actor.model.precision", "model.dtype"),
    Pair("actor.model.tensor_model_parallel_size", "actor.parallel.tp", 1),
    Pair("actor.model.pipeline_model_parallel_size", "actor.parallel.pp", 1),
    Pair("actor.model.context_parallel_size", "actor.parallel.cp", 1),
    Pair("actor.model.expert_model_parallel_size", "actor.parallel.ep", 1),
    Pair("actor.model.expert_tensor_parallel_size", "actor.parallel.etp"),
    Pair("actor.model.moe_aux_loss_coeff", "model.moe.aux_loss_coef"),
    Pair("actor.model.moe_router_bias_update_rate", "model.moe.bias_update_rate"),
    Pair("actor.optim.lr", "actor.optimizer.lr"),
    Pair("actor.optim.min_lr", "actor.optimizer.min_lr"),
    Pair("actor.optim.adam_beta1", "actor.optimizer.beta1", 0.9),
    Pair("actor.optim.adam_beta2", "actor.optimizer.beta2", 0.999),
    Pair("actor.optim.adam_eps", "actor.optimizer.eps", 1e-8),
    Pair("actor.optim.weight_decay", "actor.optimizer.weight_decay"),
    Pair("actor.optim.clip_grad", "actor.optimizer.clip_grad"),
    Pair("actor.optim.use_distributed_optimizer", "actor.distributed_optimizer"),
    Pair("actor.lr_sched.lr_warmup_iters", "actor.optimizer.warmup_steps"),
    Pair("actor.lr_sched.lr_decay_style", "actor.optimizer.decay"),
    Pair("rollout.tensor_parallel_size", "rollout.parallel.tp", 1),
    Pair("rollout.max_running_requests", "rollout.max_running_requests"),
    Pair("data.rollout_batch_size", "batch.prompts_per_step"),
    Pair("algorithm.group_size", "batch.samples_per_prompt", 1),
    Pair("algorithm.n_minibatches", "batch.mini_batches", 1),
    Pair("data.max_prompt_length", "data.max_prompt_tokens"),
    Pair("data.prompt_key", "data.train.prompt_key"),
    Pair("data.answer_key", "data.train.label_key"),
    Pair("data.train_data_paths", "data.train.path"),
    Pair("data.shuffle", "data.shuffle", True),
    Pair("data.seed", "seed"),
    Pair("algorithm.sampling_params.temperature", "rollout.sampling.temperature", 1.0),
    Pair("algorithm.sampling_params.top_p", "rollout.sampling.top_p", 1.0),
    Pair("algorithm.sampling_params.top_k", "rollout.sampling.top_k", -1),
    Pair("algorithm.sampling_params.max_new_tokens", "rollout.sampling.max_response_tokens"),
    Pair("algorithm.entropy_bonus", "loss.entropy_coef", 0.0),
    Pair("algorithm.gamma", "advantages.gamma"),
    Pair("runner.val_check_interval", "evaluation.interval"),
    Pair("runner.save_interval", "checkpoint.save_interval"),
    Pair("runner.output_dir", "output_dir"),
    Pair("runner.logger.project_name", "logging.wandb.project"),
    Pair("runner.experiment_name", "logging.wandb.name"),
)
PAIRS = {"slime": SLIME, "verl": (*VERL_SFT, *VERL_MEGATRON, *VERL), "skyrl": (*SKYRL_SFT, *SKYRL), "rlinf": RLINF}

# The loader's answers to keys that users of other trainers write from habit.


def _told(pairs: Iterable[Pair]) -> dict[str, str]:
    return {pair.key.replace("-", "_"): pair.here for pair in pairs if pair.told}


EPOCHS = "steps (epochs * rows / batch.prompts_per_step)"
OF_SLIME = _told(SLIME) | {
    "eps_clip_high": "loss.clip_high",
    "hf_checkpoint": "model.path",
    "kl_loss_coef": "loss.kl.coef",
    "n_samples_per_prompt": "batch.samples_per_prompt",
    "num_rollout": "steps",
    "rollout_batch_size": "batch.prompts_per_step",
    "rollout_num_gpus": "placement of rollout",
}
"""Includes Megatron's arguments."""
OF_VERL = _told(VERL) | {
    "actor_rollout_ref.actor.clip_ratio": "loss.clip_low, loss.clip_high",
    "actor_rollout_ref.actor.kl_loss_coef": "loss.kl.coef",
    "actor_rollout_ref.actor.optim.lr": "actor.optimizer.lr",
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": "actor.micro_batch_tokens",
    "actor_rollout_ref.actor.ppo_mini_batch_size": "batch.mini_batches (their number)",
    "actor_rollout_ref.model.lora_alpha": "model.lora.alpha",
    "actor_rollout_ref.model.lora_rank": "model.lora.rank",
    "actor_rollout_ref.rollout.gpu_memory_utilization": "rollout.kv_cache_gb",
    "actor_rollout_ref.rollout.name": "rollout.engine",
    "custom_reward_function.path": "reward.function, as file.py:function",
    "data.val_files": "data.eval.path",
    "rollout.n": "batch.samples_per_prompt",
    "rollout.temperature": "rollout.sampling.temperature",
    "rollout.tensor_model_parallel_size": "rollout.parallel.tp",
    "trainer.n_gpus_per_node": "placement and torchrun's --nproc-per-node",
    "trainer.nnodes": "placement and torchrun's --nnodes",
    "trainer.resume_mode": "checkpoint.resume",
    "trainer.total_epochs": EPOCHS,
    "trainer.total_training_steps": "steps",
}
OF_SKYRL = _told(SKYRL) | {
    "generator.backend": "rollout.engine",
    "generator.inference_engine_tensor_parallel_size": "rollout.parallel.tp",
    "generator.num_inference_engines": "placement of rollout (engines * rollout.parallel.tp ranks)",
    "trainer.epochs": EPOCHS,
    "trainer.policy.model.fake_int4_qat.group_size": "model.fake_quantization.group_size",
    "trainer.policy.model.lora.rank": "model.lora.rank",
}
OF_TRL = {
    "beta": "loss.kl.coef",
    "epsilon": "loss.clip_low",
    "epsilon_high": "loss.clip_high",
    "eval_steps": "evaluation.interval",
    "lora": "model.lora",
    "lora.alpha": "model.lora.alpha",
    "lora.r": "model.lora.rank",
    "lora_alpha": "model.lora.alpha",
    "lora_r": "model.lora.rank",
    "peft_config": "model.lora",
    "learning_rate": "actor.optimizer.lr",
    "max_completion_length": "rollout.sampling.max_response_tokens",
    "max_prompt_length": "data.max_prompt_tokens",
    "max_steps": "steps",
    "model_name_or_path": "model.path",
    "num_generations": "batch.samples_per_prompt",
    "num_iterations": "batch.epochs",
    "num_train_epochs": EPOCHS,
    "reward_funcs": "reward.functions",
    "save_steps": "checkpoint.save_interval",
}
FOREIGN = OF_VERL | OF_SKYRL | OF_SLIME | OF_TRL


def known_elsewhere(key: str, value: Any) -> Iterator[tuple[str, str]]:
    """Yields each known key of other trainers with its name here. It looks at `key` and at the keys inside `value`."""
    for name in (key, *_keys_inside(key, value)):
        if name in FOREIGN:
            yield name, FOREIGN[name]


def _keys_inside(prefix: str, value: Any) -> Iterator[str]:
    for key, inner in value.items() if isinstance(value, Mapping) else ():
        yield f"{prefix}.{key}"
        yield from _keys_inside(f"{prefix}.{key}", inner)


def table() -> list[str]:
    """Returns the lines of a Markdown table of the keys here and their names in other trainers."""
    lines = ["| here | slime | verl | SkyRL | TRL |", "| --- | --- | --- | --- | --- |"]
    for ours in sorted({*FOREIGN.values()}):
        theirs = ([key for key in sorted(of) if of[key] == ours] for of in (OF_SLIME, OF_VERL, OF_SKYRL, OF_TRL))
        named = (", ".join(f"`{key}`" for key in keys) for keys in theirs)
        lines.append(f"| {_quoted(ours)} | {' | '.join(named)} |")
    return lines


def _quoted(ours: str) -> str:
    """Returns the keys as code, or the text unchanged if it has other words."""
    keys = ours.split(", ")
    return ", ".join(f"`{key}`" for key in keys) if all(" " not in key for key in keys) else ours
