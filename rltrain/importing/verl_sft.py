"""verl's supervised trainer. Defaults are those of verl/trainer/config/sft_trainer_engine.yaml."""

from rltrain.importing.conversions import NOTHING, count, interval, pair, paths, ranks, real, text, truth
from rltrain.importing.fully_sharded import set_fully_sharded
from rltrain.importing.prediction_head import set_verls_prediction_layers
from rltrain.importing.steps import Rows, set_steps
from rltrain.importing.translation import Rule, SourceKeys, Translation, apply, sort_out
from rltrain.importing.verl_model import set_kind_of_optimizer, set_lora

RULES = (
    Rule("data.train_files", "data.train.path", None, paths),
    Rule("data.messages_key", "data.train.prompt_key", "messages", text),
    Rule("data.train_batch_size", "batch.prompts_per_step", 256, count),
    Rule("model.path", "model.path", None, text),
    Rule("trainer.seed", "seed", 1, count),
    Rule("trainer.default_local_dir", "checkpoint.dir", None, text),
    Rule("trainer.project_name", "logging.wandb.project", "gsm8k-sft", text),
    Rule("trainer.experiment_name", "logging.wandb.name", "test", text),
    Rule("engine.tensor_model_parallel_size", "actor.parallel.tp", None, count),
    Rule("engine.pipeline_model_parallel_size", "actor.parallel.pp", None, count),
    Rule("engine.virtual_pipeline_model_parallel_size", "actor.parallel.vpp", None, count),
    Rule("engine.context_parallel_size", "actor.parallel.cp", None, count),
    Rule("engine.expert_model_parallel_size", "actor.parallel.ep", None, count),
    Rule("engine.expert_tensor_parallel_size", "actor.parallel.etp", None, count),
    Rule("engine.ulysses_sequence_parallel_size", "actor.parallel.cp", None, count),
    Rule("optim.lr", "actor.optimizer.lr", 1e-3, real),
    Rule("optim.weight_decay", "actor.optimizer.weight_decay", 0.01, real),
    Rule("optim.clip_grad", "actor.optimizer.clip_grad", 1.0, real),
    Rule("optim.min_lr", "actor.optimizer.min_lr", None, real),
)
EACH_EPOCH = "after_each_epoch"
DECAYS = ("constant", "cosine", "linear")
HARMLESS = {
    "engine.*": "of speed or checkpoint files",
    "engine": "of the trainer",
    "strategy": "of the trainer",
    "model_engine": "of the trainer",
    "model": "of the trainer",
    "optim": "of the trainer",
    "optim.override_optimizer_config.*": "of speed or memory alone",
    "optim.lr_warmup_init": "from 0",
    "optim.lr_decay_steps": "the whole run",
    "model.use_remove_padding": "sequences are packed always",
    "model.trust_remote_code": "no code of a checkpoint is run",
    "model.enable_gradient_checkpointing": "of memory alone",
    "model.use_liger": "of speed alone",
    "model.lora*": "no adapters, or of how they are stored",
    "optim.optimizer_impl": "torch's or Megatron's",
    "data.*micro_batch_size*": "micro-batches are counted in tokens",
    "data.use_dynamic_bsz": "micro-batches are counted in tokens",
    "data.max_token_len_per_gpu": "micro-batches are counted in tokens",
    "data.pad_mode": "sequences are packed always",
    "data.ignore_input_ids_mismatch": "templates are checked",
    "data.truncation": "longer conversations are left out",
    "data.num_workers": "of speed alone",
    "data.*": "of reading rows",
    "trainer.test_freq": "without data.val_files nothing is held out",
    "trainer.*": "of logs and checkpoint files",
    "global_profiler.*": "of logs alone",
    "profiler.*": "of logs alone",
    "checkpoint.*": "of checkpoint files",
    "--*": "of Hydra and torchrun",
    "-m": "the trainer",
}


def translate(keys: SourceKeys, out: Translation, rows: Rows) -> None:
    out.set("algorithm", "sft", "verl.trainer.sft_trainer")
    apply(RULES, keys, out)
    out.set("data.train.response_key", None, "messages are whole conversations")
    out.set("data.train.label_key", None, "conversations have no labels")
    longest = count(keys.get("data.max_length", 1024))
    out.set("data.max_prompt_tokens", longest, "data.max_length")
    out.set("data.max_response_tokens", longest, "data.max_length")
    out.set("data.on_bad_row", "skip", "longer conversations are left out")
    if truth(keys.get("data.use_dynamic_bsz", True)):
        out.set(
            "actor.micro_batch_tokens", count(keys.get("data.max_token_len_per_gpu", 8192)), "max_token_len_per_gpu"
        )
    else:
        samples = count(keys.get("data.micro_batch_size_per_gpu", 4))
        out.set("actor.micro_batch_tokens", samples * longest, "data.micro_batch_size_per_gpu x data.max_length")
    given = keys.get("--nproc-per-node", keys.get("trainer.n_gpus_per_node", 1))
    per_node = count(given)
    nodes = count(keys.get("--nnodes", keys.get("trainer.nnodes", 1)))
    out.place(["actor"], ranks(0, nodes * per_node), "trainer.nnodes x trainer.n_gpus_per_node")
    out.world_size, out.ranks_per_node = nodes * per_node, per_node
    _backend(keys, out)
    if truth(keys.get("model.enable_gradient_checkpointing", True)):
        out.set("model.recompute", "full", "model.enable_gradient_checkpointing")
    _optimizer(keys, out)
    named = ("trainer.total_training_steps", "trainer.total_epochs")
    set_steps(out, rows, keys.get(named[0]), keys.get(named[1], 4), named, name=named[0])
    saved = keys.get("trainer.save_freq", -1)
    each_epoch = max(out.get("steps") // count(keys.get(named[1], 4)), 1)
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
    sort_out(keys, HARMLESS, out)


def _backend(keys: SourceKeys, out: Translation) -> None:
    """The engine is FSDP unless it is named."""
    engine = str(keys.get("engine", keys.get("engine.strategy", "fsdp")))
    megatron = "megatron" in engine
    set_lora(keys, out, "model.", megatron)
    set_verls_prediction_layers(keys, out, "model.", megatron)
    set_kind_of_optimizer(keys, out, "optim.")
    if not megatron:
        set_fully_sharded(keys, out, "engine", engine, out.get("actor.parallel.cp"), "engine.")
    elif out.get("actor.parallel.tp") > 1:
        out.set("actor.parallel.sequence_parallel", True, "engine.sequence_parallel, on by default")


def _optimizer(keys: SourceKeys, out: Translation) -> None:
    first, second = pair(keys.get("optim.betas", [0.9, 0.999]))
    out.set("actor.optimizer.beta1", first, "optim.betas")
    out.set("actor.optimizer.beta2", second, "optim.betas")
    key, decay = keys.first("optim.lr_scheduler_type", "optim.lr_decay_style", "optim.lr_scheduler", default="constant")
    if str(decay) in DECAYS:
        out.set("actor.optimizer.decay", str(decay), key)
    else:
        out.differs(key, decay, f"learning rates here are {', '.join(DECAYS)}")
