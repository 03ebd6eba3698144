"""A model's tool calls reach agents through the endpoint, and their rewards reach the update."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import PreTrainedTokenizerFast

from rltrain.environments.calculator import Calculator
from tests.support.jobs import QUICKSTART, column, read_lines, train
from tests.support.noting_reward import RECORDS
from tests.support.talking_engine import byte_tokenizer

CALL = ('<tool_call>\n{"name": "calculate", "arguments": {"expression": "', '"}}', "\n</tool_call>")
EXPRESSIONS = {"6*7": "42", "2+2": "4", "1/0": "error: division by zero"}
ANSWER = "42"
PROMPTS = ("What is six times seven?", "And two and two?")
HIDDEN = 64
CERTAINTY = 3.0
"""Times HIDDEN ** 0.5: by how much the logits of allowed next tokens exceed the others."""


def write_tool_caller(folder: Path) -> None:
    """Writes the model's files and tasks.jsonl. A turn is ANSWER or a call with one of EXPRESSIONS, equally likely."""
    byte_tokenizer().save_pretrained(folder)
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    tokenizer.add_tokens([*CALL, *EXPRESSIONS, ANSWER])
    tokenizer.save_pretrained(folder)
    (first,) = tokenizer("\n")["input_ids"]
    opening, closing, end_of_call, *expressions, answer = tokenizer.convert_tokens_to_ids([*CALL, *EXPRESSIONS, ANSWER])
    follow = {first: (opening, answer), opening: expressions, closing: (end_of_call,)}
    follow |= dict.fromkeys(expressions, (closing,)) | dict.fromkeys((end_of_call, answer), (tokenizer.eos_token_id,))
    _write_model(folder, len(tokenizer), tokenizer.eos_token_id, follow)
    tasks = [json.dumps({"prompt": [{"role": "user", "content": text}], "label": "42"}) for text in PROMPTS]
    (folder / "tasks.jsonl").write_text("\n".join(tasks))


def _write_model(folder: Path, vocab_size: int, end: int, follow: dict[int, Any]) -> None:
    config = transformers.Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=HIDDEN,
        intermediate_size=HIDDEN,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=end,
        pad_token_id=end,
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        embeddings = torch.nn.functional.normalize(torch.randn(vocab_size, HIDDEN), dim=-1)
        model.model.embed_tokens.weight.copy_(embeddings)
        model.lm_head.weight.zero_()
        for token, following in follow.items():
            for other in following:
                model.lm_head.weight[other] += CERTAINTY * embeddings[token]
    model.save_pretrained(folder)


NUM_SAMPLES = 12


def test_calls_of_a_tool_are_answered_in_the_templates_own_increments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(RECORDS, str(tmp_path / "samples"))
    model = tmp_path / "model"
    write_tool_caller(model)
    records = train(
        QUICKSTART,
        *(f"model.path={model}", f"data.train.path={model}/tasks.jsonl", f"output_dir={tmp_path}", "data.eval=null"),
        *("data.max_prompt_tokens=600", "rollout.sampling.max_response_tokens=400", "rollout.max_context_tokens=1000"),
        *("env={function: calculator, num_workers: 1, max_turns: 4}", "steps=1", "checkpoint.save_hf=false"),
        "reward={function: 'tests/support/noting_reward.py:noted'}",
        "batch={prompts_per_step: 2, samples_per_prompt: 6, mini_batches: 1}",
        *("placement={'actor, rollout, reward, env': 0}", "loss.kl.coef=0"),
        *("actor.parallel.tp=1", "actor.optimizer.lr=1e-9"),
        num_ranks=1,
    )
    assert max(column(records, "train/train_rollout_logprob_abs_diff_max")) < 1e-4
    assert sum(column(records, "env/calls")) > 0 and all(failed == 0 for failed in column(records, "env/failed"))
    tokenizer = PreTrainedTokenizerFast.from_pretrained(model)
    samples = {sample["id"]: sample for sample in read_lines(tmp_path / "samples")}  # a worker's first call is repeated
    assert sorted(samples) == [*range(NUM_SAMPLES)]
    num_turns = [check(tokenizer, sample) for sample in samples.values()]
    assert max(num_turns) >= 3 and min(num_turns) == 1


def check(tokenizer: PreTrainedTokenizerFast, sample: dict[str, Any]) -> int:
    """Asserts that a sample's ids are those of the template for the whole conversation. Returns its number of turns."""
    turns = drawn_turns(tokenizer, sample)
    question = next(text for text in PROMPTS if text in tokenizer.decode(sample["prompt"]))
    messages: list[dict[str, Any]] = [{"role": "user", "content": question}]
    for number, turn in enumerate(turns):
        expression = next((e for e in EXPRESSIONS if turn == CALL[0] + e + "".join(CALL[1:])), None)
        if expression is None:
            messages.append({"role": "assistant", "content": turn})
            assert number == len(turns) - 1, "an answer ends the conversation"
            break
        call = {"type": "function", "function": {"name": "calculate", "arguments": {"expression": expression}}}
        messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        if number < len(turns) - 1:
            messages.append({"role": "tool", "name": "calculate", "content": EXPRESSIONS[expression]})
    whole = tokenizer.apply_chat_template(messages, tools=Calculator().tools, tokenize=False)
    ids = sample["prompt"] + sample["response"]
    assert ids == tokenizer(whole.removesuffix("\n"), add_special_tokens=False)["input_ids"]
    return len(turns)


def drawn_turns(tokenizer: PreTrainedTokenizerFast, sample: dict[str, Any]) -> list[str]:
    """Returns the text of every run of generated ids."""
    ids = [token if drawn else -1 for token, drawn in zip(sample["response"], sample["mask"], strict=True)]
    runs: list[list[int]] = [[]]
    for token in ids:
        if token >= 0:
            runs[-1].append(token)
        elif runs[-1]:
            runs.append([])
    return [tokenizer.decode(run, skip_special_tokens=True) for run in runs if run]
