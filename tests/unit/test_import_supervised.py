"""verl's older supervised trainer, with its own keys and its own mean over micro-batches."""

from typing import Any

import pytest

from rltrain.errors import ConfigError
from rltrain.import_config.command import imported
from rltrain.import_config.translation import RowCounts, Translation

OLDER = """torchrun --standalone --nnodes=1 --nproc_per_node=8 -m verl.trainer.fsdp_sft_trainer
 data.train_files=/d/train.parquet data.val_files=/d/test.parquet model.partial_pretrain=/models/m
 data.prompt_key=extra_info data.response_key=extra_info data.train_batch_size=64 optim.lr=1e-4
 data.prompt_dict_keys=['question'] +data.response_dict_keys=['answer'] trainer.total_epochs=2 """
ONE_EACH = "data.micro_batch_size_per_gpu=8 data.balance_dp_token=True "


def older(more: str, rows: int = 640, **options: Any) -> Translation:
    return imported("verl", [(OLDER + more).replace("\n", " ")], rows=RowCounts(rows=rows), **options)


def test_its_keys_are_translated() -> None:
    found = older(ONE_EACH + "data.max_length=2048 ulysses_sequence_parallel_size=1 model.lora_rank=8")
    expected = {
        "algorithm": "sft",
        "model.path": "/models/m",
        "steps": 20,
        "data.train.prompt_key": "extra_info.question",
        "data.train.response_key": "extra_info.answer",
        "data.eval.path": "/d/test.parquet",
        "data.max_prompt_tokens": 2048,
        "batch.prompts_per_step": 64,
        "actor.micro_batch_tokens": 8 * 2048,
        "actor.optimizer.lr": 1e-4,
        "actor.optimizer.beta2": 0.95,
        "actor.optimizer.decay": "cosine",
        "actor.optimizer.warmup_steps": 2,
        "loss.normalization": "token_mean",
        "checkpoint.save_interval": 10,
        "evaluation.interval": 10,
        "model.lora.rank": 8,
        "model.lora.alpha": 16.0,
    }
    assert {path: found.get(path) for path in expected} == expected
    assert found.placed == {"actor": "0-7"} and found.world_size == 8


@pytest.mark.parametrize(
    ("more", "kind", "same"),
    [
        (ONE_EACH, "token_mean", True),
        ("data.micro_batch_size_per_gpu=8", "token_mean", False),
        ("data.micro_batch_size_per_gpu=4 data.balance_dp_token=True", "token_mean", False),
        ("data.micro_batch_size_per_gpu=1", "sequence_mean", False),
        ("data.micro_batch_size_per_gpu=1 data.train_batch_size=8", "sequence_mean", True),
        ("data.micro_batch_size=16 data.balance_dp_token=True", "token_mean", False),
    ],
)
def test_micro_batches_weigh_alike_there(more: str, kind: str, same: bool) -> None:
    """Only one micro-batch per rank and step, with tokens counted over all ranks or one sequence, is the mean here."""
    if not same:
        with pytest.raises(ConfigError, match="micro_batch_size_per_gpu: .* whose means weigh alike there"):
            older(more)
    assert older(more, allow_differences=True).get("loss.normalization") == kind


def test_the_learning_rate_falls_over_all_epochs() -> None:
    assert older(ONE_EACH + "trainer.total_training_steps=20").get("steps") == 20
    with pytest.raises(ConfigError, match="total_training_steps: 15: the learning rate falls over all epochs"):
        older(ONE_EACH + "trainer.total_training_steps=15")
    with pytest.raises(ConfigError, match="lr_scheduler: 'wsd'"):
        older(ONE_EACH + "optim.lr_scheduler=wsd")


def test_conversations() -> None:
    found = older(ONE_EACH + "data.multiturn.enable=true data.multiturn.messages_key=chat")
    assert (found.get("data.train.prompt_key"), found.get("data.train.response_key")) == ("chat", None)
    assert found.get("data.train.tools_key") == "tools"


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ("data.truncation=right", "data.truncation: 'right': rows are cut there"),
        ("data.custom_cls.path=/x.py", "custom_cls.path"),
        ("model.fsdp_config.model_dtype=bf16", "model_dtype: 'bf16': master weights"),
        ("model.external_lib=mine", "external_lib"),
    ],
)
def test_what_would_compute_something_else_is_refused(more: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        older(ONE_EACH + more)


def test_a_program_with_sft_in_its_name_is_not_this_trainer() -> None:
    text = OLDER.replace("verl.trainer.fsdp_sft_trainer", "mine.sft_rl").replace("\n", " ")
    with pytest.raises(ConfigError, match="-m: 'mine.sft_rl': it is none of verl's own trainers"):
        imported("verl", [text], rows=RowCounts(rows=640))
