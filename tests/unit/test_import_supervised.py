"""The supervised trainers of SkyRL and verl, by examples written after their documentation."""

from pathlib import Path

import pytest

from rltrain.config.loader import load_config
from rltrain.config.schema import Config
from rltrain.errors import ConfigError
from rltrain.import_config.command import imported, written
from rltrain.import_config.translation import RowCounts

COMMAND = """uv run --extra megatron python -m skyrl.train.main_sft strategy=STRATEGY model.path=Qwen/Qwen3-0.6B
 train_datasets="['owner/talks']" train_dataset_splits="['train[:4000]']" messages_key=messages max_length=2048
 num_steps=50 batch_size=8 micro_train_batch_size_per_gpu=2 optimizer_config.lr=1e-5 optimizer_config.num_warmup_steps=3
 placement.num_gpus_per_node=4 ckpt_path="" resume_from="" MORE"""
VERL = """torchrun --standalone --nproc-per-node=4 -m verl.trainer.sft_trainer data.train_files=/data/talks.parquet
 data.train_batch_size=64 data.max_length=1024 data.max_token_len_per_gpu=2048 model.path=Qwen/Qwen3-0.6B
 engine=megatron optim=megatron optim.lr=1e-5 engine.tensor_model_parallel_size=2 trainer.total_epochs=3 MORE"""
TWO = """train_datasets="['a/b','c/d']" train_dataset_splits="['train','train[:20]']"
 train_dataset_weights="[0.8,0.2]" """


def config_of(folder: Path, more: str = "", strategy: str = "megatron") -> Config:
    text = COMMAND.replace("STRATEGY", strategy).replace("MORE", more).replace("\n", " ")
    path = folder / "imported.yaml"
    path.write_text(written(imported("skyrl", [text]), "a test"))
    return load_config(path)


def test_conversations_are_learnt_from_their_last_turn(tmp_path: Path) -> None:
    config = config_of(tmp_path, "system_key=system")
    assert (config.algorithm, config.steps, config.batch.prompts_per_step) == ("sft", 50, 8)
    train = config.data.train
    assert (train.path, train.split, train.max_rows) == ("owner/talks", "train", 4000)
    assert (train.response_key, train.learnt_turns, train.system_key) == (None, "last", "system")
    assert config.actor.micro_batch_tokens == 2 * 2048 and config.loss.normalization == "token_mean"
    assert (config.actor.parallel.tp, config.actor.parallel.pp) == (2, 2), "SkyRL's default"
    assert (config.actor.optimizer.beta2, config.actor.optimizer.warmup_steps) == (0.999, 3)
    assert config.data.max_response_tokens == 2048 and "rollout" not in config.model_fields_set
    assert config.checkpoint.resume == "none" and config.placement == {"actor": "0-3"}


def test_sources_have_weights_and_fsdp_shards(tmp_path: Path) -> None:
    more = TWO + "train_on_what=all_assistant_messages model.lora.rank=32 model.lora.alpha=16"
    config = config_of(tmp_path, more, strategy="fsdp")
    assert [(one.path, one.max_rows, one.weight) for one in config.data.train.sources] == [
        ("a/b", None, 0.8),
        ("c/d", 20, 0.2),
    ]
    assert config.data.train.learnt_turns == "all" and config.backend_of("actor") == "fsdp"
    assert config.model.lora and (config.model.lora.rank, config.model.lora.alpha) == (32, 16)


@pytest.mark.parametrize(
    ("more", "interval"),
    [
        ("trainer.save_freq=after_each_epoch trainer.test_freq=after_each_epoch", 15),
        ("trainer.save_freq=7", 7),
        ("trainer.save_freq=-1", 0),
    ],
)
def test_verls_counts_epochs_by_their_steps(more: str, interval: int, tmp_path: Path) -> None:
    found = imported("verl", [VERL.replace("MORE", more).replace("\n", " ")], rows=RowCounts(rows=1000))
    path = tmp_path / "imported.yaml"
    path.write_text(written(found, "a test"))
    config = load_config(path)
    assert (config.algorithm, config.steps, config.checkpoint.save_interval) == ("sft", 3 * (1000 // 64), interval)
    assert config.placement == {"actor": "0-3"} and config.actor.parallel.tp == 2
    assert config.actor.micro_batch_tokens == 2048 and config.data.train.response_key is None
    assert config.data.max_response_tokens == 1024 and "rollout" not in config.model_fields_set


def test_verls_held_out_conversations_are_those_of_the_loss(tmp_path: Path) -> None:
    more = "data.val_files=/data/held.parquet trainer.test_freq=after_each_epoch data.messages_key=talk"
    found = imported("verl", [VERL.replace("MORE", more).replace("\n", " ")], rows=RowCounts(rows=1000))
    path = tmp_path / "imported.yaml"
    path.write_text(written(found, "a test"))
    config = load_config(path)
    assert config.scores_held_out and config.data.eval is not None and config.evaluation.interval == 15
    train, held_out = config.data.train, config.data.eval
    assert held_out.path == "/data/held.parquet" and held_out.prompt_key == train.prompt_key == "talk"
    assert held_out.response_key is None and held_out.label_key is None


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ("train_dataset_splits=\"['train[10%:]']\"", "a split here is whole"),
        ("sampler=custom sampler_class_path=my.Sampler", "rows are drawn at random or in their order"),
        ("dummy_run_full_ctx=true", "dummy_run_full_ctx: True"),
        ("of_nobody=1", "of_nobody: 1"),
    ],
)
def test_what_would_differ_is_refused(more: str, told: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        config_of(tmp_path, more)
    assert told in str(refused.value)
