"""Whole jobs with images on one rank: a tiny model learns to count red squares, by demonstrations and rewards."""

from pathlib import Path

import pytest

from tests.support.counting_images import GRPO, IMAGE_TOKENS, NUM_EVAL, grpo_overrides
from tests.support.jobs import column, read_lines, read_records, train

FEW = ("steps=2", "batch={prompts_per_step: 16, samples_per_prompt: 4, mini_batches: 1}", "data.eval.max_rows=20")


def test_demonstrations_with_images_lower_the_held_out_loss(counting: Path) -> None:
    records = read_records(counting / "sft")
    losses, of_steps = column(records, "eval/loss"), column(records, "images/tokens")
    assert losses[-1] < losses[0] / 2
    assert {*of_steps} == {32.0 * IMAGE_TOKENS}
    assert sum(column(records, "images/decoded")) == 32 * len(of_steps) + NUM_EVAL


def test_engine_and_actor_agree_on_images_after_every_sync(counting: Path, tmp_path: Path) -> None:
    records = train(GRPO, *grpo_overrides(counting), *FEW, f"output_dir={tmp_path}", num_ranks=1)
    differences = column(records, "train/train_rollout_logprob_abs_diff_max")
    assert len(differences) == 2 and max(differences) <= 1e-4
    assert column(records, "images/tokens") == [16.0 * 4 * IMAGE_TOKENS] * 2
    assert column(records, "images/distinct") == [16.0] * 2
    assert sum(column(records, "images/decoded")) == 2 * 16 + 20, "once for a group of samples"
    assert not any(column(records, "images/bytes_sent"))
    assert len(column(records, "eval/score")) == 2
    assert all("<image>" in sample["prompt"] for sample in read_lines(tmp_path / "samples.jsonl"))


@pytest.mark.slow
def test_rewards_teach_a_model_to_count(counting: Path, tmp_path: Path) -> None:
    """Greedy decoding of the export by transformers scores the same as the job reported."""
    records = train(GRPO, *grpo_overrides(counting), f"output_dir={tmp_path}", num_ranks=1)
    scores = column(records, "eval/score")
    assert scores[0] <= 0.4 and scores[-1] >= 0.9
    assert score_of_transformers(tmp_path / "hf", counting / "start") == pytest.approx(scores[-1], abs=2 / NUM_EVAL)


def score_of_transformers(model: Path, rows: Path) -> float:
    import torch
    from PIL import Image
    from transformers import AutoModelForImageTextToText, AutoTokenizer
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    network, tokenizer = AutoModelForImageTextToText.from_pretrained(model), AutoTokenizer.from_pretrained(model)
    processor = Qwen2VLImageProcessorPil.from_pretrained(model)
    shown = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "red?"}]}]
    text = tokenizer.apply_chat_template(shown, tokenize=False, add_generation_prompt=True)
    ids = tokenizer(text.replace("<|image_pad|>", "<|image_pad|>" * IMAGE_TOKENS), return_tensors="pt")["input_ids"]
    shown_at = (ids == tokenizer.convert_tokens_to_ids("<|image_pad|>")).int()
    right = 0
    for row in read_lines(rows / "eval.jsonl"):
        images = processor([Image.open(rows / row["images"][0])], return_tensors="pt")
        with torch.no_grad():
            answer = network.generate(
                input_ids=ids, mm_token_type_ids=shown_at, **images, max_new_tokens=2, do_sample=False
            )
        right += tokenizer.decode(answer[0, ids.shape[1] :], skip_special_tokens=True) == row["label"]
    return right / NUM_EVAL
