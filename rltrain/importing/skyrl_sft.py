"""SkyRL's supervised trainer. Defaults are those of skyrl/train/config/sft_config.py."""

import re
from typing import Any

from rltrain.importing.conversions import NOTHING, count, interval, one_of, pair, ranks, real, text, truth
from rltrain.importing.fully_sharded import set_fully_sharded
from rltrain.importing.megatron_optimizer import megatron_options, set_megatron_optimizer
from rltrain.importing.skyrl_learning import DECAYS
from rltrain.importing.skyrl_model import MEGATRON, set_lora
from rltrain.importing.steps import Rows, set_steps
from rltrain.importing.translation import Rule, SourceKeys, Translation, UntranslatableError, apply, sort_out

SECTIONS = ("model", "optimizer_config", "placement", "megatron_config", "fsdp_config")
RULES = (
    Rule("model.path", "model.path", "Qwen/Qwen3-0.6B", text),
    Rule("seed", "seed", 42, count),
    Rule("batch_size", "batch.prompts_per_step", 4, count),
    Rule("messages_key", "data.train.prompt_key", "messages", text),
    Rule("tools_key", "data.train.tools_key", None, text),
    Rule("system_key", "data.train.system_key", None, text),
    Rule("ckpt_interval", "checkpoint.save_interval", 0, interval),
    Rule("max_ckpts_to_keep", "checkpoint.keep", -1, interval),
    Rule("hf_save_interval", "checkpoint.save_hf_interval", 0, interval),
    Rule("project_name", "logging.wandb.project", "skyrl_sft", text),
    Rule("run_name", "logging.wandb.name", "skyrl_sft_run", text),
    Rule("optimizer_config.lr", "actor.optimizer.lr", 1e-6, real),
    Rule("optimizer_config.weight_decay", "actor.optimizer.weight_decay", 1e-2, real),
    Rule("optimizer_config.max_grad_norm", "actor.optimizer.clip_grad", 1.0, real),
    Rule("optimizer_config.num_warmup_steps", "actor.optimizer.warmup_steps", 0, count),
    Rule("optimizer_config.scheduler", "actor.optimizer.decay", "constant", one_of(DECAYS, "learning rates")),
)
TURNS = {"last_assistant_message": "last", "all_assistant_messages": "all"}
SPLIT = re.compile(r"(\w+)(?:\[:(\d+)\])?")
"""A whole split of a data set, or so many of its first rows."""
ALPACA = "rows of instruction, input and output (Alpaca) have to be written as messages before"
HARMLESS = {
    "logger": "of logs alone",
    "tags": "of logs alone",
    "record_memory": "of logs alone",
    "torch_profiler_config.*": "of logs alone",
    "enable_ray_*": "of logs alone",
    "export_path": "of checkpoint files",
    "eval_*": "held-out conversations are not taken over: data.eval names them here",
    "*num_workers": "of speed alone",
    "dataloader_*": "of speed alone",
    "async_batch_collation": "of speed alone",
    "cache_dir": "of speed alone",
    "force_recache": "of speed alone",
    "disable_cache": "of speed alone",
    "use_torch_compile": "of speed alone",
    "remove_microbatch_padding": "sequences are packed always",
    "use_sample_packing": "sequences are packed always",
    "use_sequence_packing": "sequences are packed always",
    "max_tokens_per_microbatch": "of use_sequence_packing",
    "model.lora.*": "no adapters, or of how they are stored",
    "fsdp_config.*": "of FSDP: of memory alone",
    "megatron_config.*": "of Megatron: of speed or memory alone",
    "-m": "the trainer",
    "--*": "of Hydra",
}


def translate(keys: SourceKeys, out: Translation, rows: Rows) -> None:
    out.set("algorithm", "sft", "skyrl.train.main_sft")
    apply(RULES, keys, out)
    first, second = pair(keys.get("optimizer_config.adam_betas", [0.9, 0.999]))
    out.set("actor.optimizer.beta1", first, "optimizer_config.adam_betas")
    out.set("actor.optimizer.beta2", second, "optimizer_config.adam_betas")
    _data(keys, out)
    nodes, per_node = count(keys.get("placement.num_nodes", 1)), count(keys.get("placement.num_gpus_per_node", 4))
    out.place(["actor"], ranks(0, nodes * per_node), "placement.num_nodes x placement.num_gpus_per_node")
    out.world_size, out.ranks_per_node = nodes * per_node, per_node
    _batch(keys, out)
    _trainer(keys, out)
    _records(keys, out)
    steps = keys.first("max_training_steps", "num_steps")[1]
    epochs = None if keys.get("num_steps") not in NOTHING else keys.get("num_epochs", 1)
    set_steps(out, rows, steps, epochs, ("num_steps, max_training_steps", "num_epochs"))
    sort_out(keys, HARMLESS, out)


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
        raise UntranslatableError(f"turns that are learnt are {' or '.join(TURNS)}")
    if TURNS[learnt] != "all":
        out.set("data.train.learnt_turns", TURNS[learnt], "train_on_what, by default last_assistant_message")
    sampler = keys.get("sampler", "random")
    if sampler == "sequential":
        out.set("data.shuffle", False, "sampler")
    elif sampler != "random":
        out.differs("sampler", sampler, "rows are drawn at random or in their order here")
    out.notes.append(ALPACA)


def _part(name: object, split: str) -> dict[str, Any]:
    found = SPLIT.fullmatch(split)
    if found is None:
        raise UntranslatableError(f"of {name} the split {split}: a split here is whole, or so many of its first rows")
    rows = {"max_rows": count(found[2])} if found[2] else {}
    return {"split": found[1], **rows}


def _batch(keys: SourceKeys, out: Translation) -> None:
    longest = keys.get("max_length")
    if longest in NOTHING:
        raise UntranslatableError("max_length is not given: a longest conversation is expected here")
    out.set("data.max_prompt_tokens", count(longest), "max_length")
    out.set("data.max_response_tokens", count(longest), "max_length")
    out.set("data.on_bad_row", "skip", "max_length: longer conversations are left out")
    samples = count(keys.get("micro_train_batch_size_per_gpu", 2))
    packed = count(keys.get("max_tokens_per_microbatch") or longest)
    tokens = packed if truth(keys.get("use_sequence_packing", False)) else samples * count(longest)
    out.set("actor.micro_batch_tokens", tokens, "micro_train_batch_size_per_gpu, max_tokens_per_microbatch, max_length")


def _trainer(keys: SourceKeys, out: Translation) -> None:
    strategy = str(keys.get("strategy", "megatron"))
    megatron = strategy == "megatron"
    set_lora(keys, out, "model.lora.", "megatron_config.lora_config.lora_type" if megatron else None)
    if megatron:
        prefix = "megatron_config.optimizer_config_kwargs."
        set_megatron_optimizer(megatron_options(keys, prefix), out, prefix)
        for name, here in MEGATRON.items():
            size = keys.get(f"megatron_config.{name}", 2 if here in ("tp", "pp") else None)
            if size not in NOTHING:
                out.set(f"actor.parallel.{here}", count(size), f"megatron_config.{name}")
        if out.get("actor.parallel.tp") > 1:
            out.set("actor.parallel.sequence_parallel", True, "SkyRL's with tensor parallelism")
    else:
        slices = count(keys.get("sequence_parallel_size", 1))
        set_fully_sharded(keys, out, "strategy", strategy, slices, "fsdp_config.")
    out.set("model.recompute", "full", "activations are always recomputed")


def _records(keys: SourceKeys, out: Translation) -> None:
    if keys.get("ckpt_path") not in NOTHING:
        out.set("checkpoint.dir", str(keys.get("ckpt_path")), "ckpt_path")
    resume = keys.get("resume_from")
    if resume != "latest":
        out.set("checkpoint.resume", "none" if resume in NOTHING else str(resume), "resume_from")
