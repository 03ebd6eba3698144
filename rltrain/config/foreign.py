"""Keys that other trainers' users write from habit, each with where rltrain says the same."""

from collections.abc import Iterator, Mapping
from typing import Any

OF_VERL = {
    "actor_rollout_ref.actor.clip_ratio": "loss.clip_low, loss.clip_high",
    "actor_rollout_ref.actor.kl_loss_coef": "loss.kl.coef",
    "actor_rollout_ref.actor.optim.lr": "actor.optimizer.lr",
    "actor_rollout_ref.actor.ppo_epochs": "batch.epochs",
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": "actor.micro_batch_tokens",
    "actor_rollout_ref.actor.ppo_mini_batch_size": "batch.mini_batches, which counts them",
    "actor_rollout_ref.model.lora_alpha": "model.lora.alpha",
    "actor_rollout_ref.model.lora_rank": "model.lora.rank",
    "actor_rollout_ref.model.path": "model.path",
    "actor_rollout_ref.rollout.gpu_memory_utilization": "rollout.kv_cache_gb",
    "actor_rollout_ref.rollout.n": "batch.samples_per_prompt",
    "actor_rollout_ref.rollout.name": "rollout.engine",
    "actor_rollout_ref.rollout.temperature": "rollout.sampling.temperature",
    "actor_rollout_ref.rollout.tensor_model_parallel_size": "rollout.parallel.tp",
    "custom_reward_function.path": "reward.function, as file.py:function",
    "data.max_prompt_length": "data.max_prompt_tokens",
    "data.max_response_length": "rollout.sampling.max_response_tokens",
    "data.train_batch_size": "batch.prompts_per_step",
    "data.train_files": "data.train.path",
    "data.val_files": "data.eval.path",
    "rollout.n": "batch.samples_per_prompt",
    "rollout.temperature": "rollout.sampling.temperature",
    "rollout.tensor_model_parallel_size": "rollout.parallel.tp",
    "trainer.default_local_dir": "checkpoint.dir",
    "trainer.n_gpus_per_node": "placement, and torchrun's --nproc-per-node",
    "trainer.nnodes": "placement, and torchrun's --nnodes",
    "trainer.project_name": "logging.wandb.project",
    "trainer.resume_mode": "checkpoint.resume",
    "trainer.save_freq": "checkpoint.save_interval",
    "trainer.test_freq": "evaluation.interval",
    "trainer.total_epochs": "steps, which is epochs times rows of data over batch.prompts_per_step",
    "trainer.total_training_steps": "steps",
}
OF_SKYRL = {
    "generator.backend": "rollout.engine",
    "generator.inference_engine_tensor_parallel_size": "rollout.parallel.tp",
    "generator.n_samples_per_prompt": "batch.samples_per_prompt",
    "generator.num_inference_engines": "placement of rollout: its ranks over rollout.parallel.tp",
    "trainer.ckpt_interval": "checkpoint.save_interval",
    "trainer.epochs": "steps, which is epochs times rows of data over batch.prompts_per_step",
    "trainer.eval_interval": "evaluation.interval",
    "trainer.policy.model.path": "model.path",
    "trainer.policy.optimizer_config.lr": "actor.optimizer.lr",
    "trainer.train_batch_size": "batch.prompts_per_step",
    "trainer.policy.model.fake_int4_qat.group_size": "model.fake_quantization.group_size",
    "trainer.policy.model.lora.rank": "model.lora.rank",
}
OF_SLIME = {
    "eps_clip": "loss.clip_low",
    "eps_clip_high": "loss.clip_high",
    "hf_checkpoint": "model.path",
    "kl_loss_coef": "loss.kl.coef",
    "n_samples_per_prompt": "batch.samples_per_prompt",
    "num_rollout": "steps",
    "pipeline_model_parallel_size": "actor.parallel.pp",
    "prompt_data": "data.train.path",
    "rollout_batch_size": "batch.prompts_per_step",
    "rollout_max_response_len": "rollout.sampling.max_response_tokens",
    "rollout_num_gpus": "placement of rollout",
    "rollout_temperature": "rollout.sampling.temperature",
    "tensor_model_parallel_size": "actor.parallel.tp",
}
"""And those of Megatron's arguments."""
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
    "num_train_epochs": "steps, which is epochs times rows of data over batch.prompts_per_step",
    "reward_funcs": "reward.functions",
    "save_steps": "checkpoint.save_interval",
}
FOREIGN = OF_VERL | OF_SKYRL | OF_SLIME | OF_TRL


def known_elsewhere(key: str, value: Any) -> Iterator[tuple[str, str]]:
    """Of `key` and the keys inside `value`, those that another trainer has: dotted, with what is written here."""
    for name in (key, *_keys_inside(key, value)):
        if name in FOREIGN:
            yield name, FOREIGN[name]


def _keys_inside(prefix: str, value: Any) -> Iterator[str]:
    for key, inner in value.items() if isinstance(value, Mapping) else ():
        yield f"{prefix}.{key}"
        yield from _keys_inside(f"{prefix}.{key}", inner)


def table() -> list[str]:
    """In Markdown, by what is written here."""
    lines = ["| here | slime | verl | SkyRL | TRL |", "| --- | --- | --- | --- | --- |"]
    for ours in sorted({*FOREIGN.values()}):
        theirs = ([key for key, value in of.items() if value == ours] for of in (OF_SLIME, OF_VERL, OF_SKYRL, OF_TRL))
        named = (", ".join(f"`{key}`" for key in keys) for keys in theirs)
        lines.append(f"| {_quoted(ours)} | {' | '.join(named)} |")
    return lines


def _quoted(ours: str) -> str:
    """Keys as code, where it is nothing but keys."""
    keys = ours.split(", ")
    return ", ".join(f"`{key}`" for key in keys) if all(" " not in key for key in keys) else ours
