"""The quickstart's files: right arithmetic, a clean hold-out, a tokenizer and a checkpoint that transformers loads."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from rltrain.cli import quickstart as make_quickstart
from rltrain.cli.tiny_model import Size, qwen3_weights

TOOLS = Path(__file__).resolve().parents[2] / "tools"


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("quickstart")
    command = [sys.executable, TOOLS / "make_quickstart.py", "--output", folder, "--seed", "3", "--train-rows", "2000"]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    return folder


def rows_of(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize(
    ("pair", "answer"),
    [
        ((347, 285), "7+5=12,4+8+1=13,3+2+1=6,632"),
        ((100, 100), "0+0=0,0+0=0,1+1=2,200"),
        ((999, 999), "9+9=18,9+9+1=19,9+9+1=19,1998"),
        ((555, 363), "5+3=8,5+6=11,5+3+1=9,918"),
    ],
)
def test_known_answers(pair: tuple[int, int], answer: str) -> None:
    assert make_quickstart.worked_answer(pair) == answer


@given(first=st.integers(100, 999), second=st.integers(100, 999))
def test_every_step_is_right_column_addition(first: int, second: int) -> None:
    *columns, total = make_quickstart.worked_answer((first, second)).split(",")
    assert int(total) == first + second
    carry = 0
    for place, column in enumerate(columns):
        terms, _, result = column.partition("=")
        digits = [int(str(first)[-1 - place]), int(str(second)[-1 - place])] + ([carry] if carry else [])
        assert [int(term) for term in terms.split("+")] == digits
        assert int(result) == sum(digits)
        assert int(result) % 10 == int(total[-1 - place])
        carry = int(result) // 10
    assert len(columns) == 3
    assert (len(total) == 4) == (carry == 1)


def test_held_out_problems_are_512_and_never_trained_on(quickstart: Path) -> None:
    train, held_out = rows_of(quickstart / "train.jsonl"), rows_of(quickstart / "eval.jsonl")
    train_prompts, eval_prompts = {row["prompt"] for row in train}, {row["prompt"] for row in held_out}
    assert (len(train), len(train_prompts)) == (2000, 2000)
    assert (len(held_out), len(eval_prompts)) == (512, 512)
    assert not train_prompts & eval_prompts
    other_train, other_eval = make_quickstart.draw_pairs(seed=4)
    assert not {make_quickstart.prompt_of(pair) for pair in other_train} & eval_prompts
    assert {make_quickstart.prompt_of(pair) for pair in other_eval} != eval_prompts


def test_a_tenth_of_all_pairs_is_held_out() -> None:
    sample = [(a, b) for a in range(100, 1000, 9) for b in range(100, 1000, 7)]
    share = sum(map(make_quickstart.is_held_out, sample)) / len(sample)
    assert share == pytest.approx(0.1, abs=0.01)


def test_impossible_numbers_of_problems_are_refused() -> None:
    with pytest.raises(ValueError, match="not enough pairs"):
        make_quickstart.draw_pairs(seed=0, num_train=810_000)


def test_the_tokenizer_writes_every_row_one_token_a_character(quickstart: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(quickstart / "model")
    assert len(tokenizer) == 15
    for row in rows_of(quickstart / "eval.jsonl"):
        text = row["prompt"] + row["response"]
        ids = tokenizer(text)["input_ids"]
        assert len(ids) == len(text)
        assert tokenizer.decode(ids) == text
        assert tokenizer.decode([*ids, tokenizer.eos_token_id], skip_special_tokens=True) == text


def test_the_checkpoint_loads_in_transformers_tensor_for_tensor(quickstart: Path) -> None:
    model, report = AutoModelForCausalLM.from_pretrained(quickstart / "model", output_loading_info=True)
    assert not any(report.values())
    assert type(model).__name__ == "Qwen3ForCausalLM"
    expected = qwen3_weights(Size(max_positions=128), vocab_size=15, seed=3)
    loaded = model.state_dict()
    assert set(loaded) == set(expected)
    for name, weight in expected.items():
        assert torch.equal(loaded[name], torch.from_numpy(weight)), name
    assert model.config.eos_token_id == AutoTokenizer.from_pretrained(quickstart / "model").eos_token_id
    logits = model(torch.tensor([[2, 3, 4]])).logits
    assert logits.shape == (1, 3, 15) and bool(logits.isfinite().all())


def test_weights_are_normal_with_deviation_two_hundredths_and_follow_the_seed() -> None:
    weights = qwen3_weights(Size(), vocab_size=15, seed=0)
    matrices = np.concatenate([w.ravel() for w in weights.values() if w.ndim == 2])
    assert matrices.std() == pytest.approx(0.02, rel=0.01)
    assert abs(matrices.mean()) < 2e-4
    again, other = qwen3_weights(Size(), 15, seed=0), qwen3_weights(Size(), 15, seed=1)
    assert all(np.array_equal(weights[name], again[name]) for name in weights)
    assert not np.array_equal(weights["lm_head.weight"], other["lm_head.weight"])


def test_a_tiny_model_with_a_trained_tokenizer_and_chat_template(tmp_path: Path) -> None:
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text(json.dumps({"question": "How many eggs? " * 20, "answer": "Sixteen eggs.", "id": 3}) + "\n")
    command = [sys.executable, TOOLS / "make_tiny_model.py", "--output", tmp_path / "m", "--corpus", corpus]
    subprocess.run([*command, "--vocab", "270", "--chat-template", "--layers", "1"], check=True, timeout=60)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "m")
    text = "Eggs: 16, naïve 🥚\n"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    messages = [{"role": "user", "content": "Hi"}]
    rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert rendered == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "m")
    assert model.config.num_hidden_layers == 1
    assert model.config.vocab_size == len(tokenizer) <= 270
