"""A whole job of conversations in chats with tools: calls are answered, and what is trained on is the template's."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from rltrain.environments.calculator import Calculator
from tests.end_to_end.jobs import column, train
from tests.end_to_end.noting_reward import RECORDS
from tests.end_to_end.tool_caller import CALL, EXPRESSIONS, PROMPTS, write_tool_caller

NUM_SAMPLES = 12


def test_calls_of_a_tool_are_answered_in_the_templates_own_increments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(RECORDS, str(tmp_path / "samples"))
    model = tmp_path / "model"
    write_tool_caller(model)
    records = train(
        "configs/quickstart.yaml",
        f"model.path={model}",
        f"data.train.path={model}/tasks.jsonl",
        "data.eval=null",
        "data.max_prompt_tokens=600",
        "env={function: calculator, num_workers: 1, max_turns: 4}",
        "rollout.sampling.max_response_tokens=400",
        "rollout.max_context_tokens=1000",
        "reward={function: 'tests/end_to_end/noting_reward.py:noted'}",
        "batch={prompts_per_step: 2, samples_per_prompt: 6, mini_batches: 1}",
        "placement={'actor, rollout, reward, env': 0}",
        "loss.kl.coef=0",
        "actor.parallel.tp=1",
        "actor.optimizer.lr=1e-9",
        "checkpoint.save_hf=false",
        f"output_dir={tmp_path}",
        "steps=1",
        num_ranks=1,
    )
    assert max(column(records, "train/train_rollout_logprob_abs_diff_max")) < 1e-4
    assert sum(column(records, "env/calls")) > 0 and all(failed == 0 for failed in column(records, "env/failed"))
    tokenizer = PreTrainedTokenizerFast.from_pretrained(model)
    noted = [json.loads(line) for line in (tmp_path / "samples").read_text().splitlines()]
    samples = {sample["id"]: sample for sample in noted}  # a worker's first call is repeated
    assert sorted(samples) == [*range(NUM_SAMPLES)]
    num_turns = [check(tokenizer, sample) for sample in samples.values()]
    assert max(num_turns) >= 3 and min(num_turns) == 1


def check(tokenizer: PreTrainedTokenizerFast, sample: dict[str, Any]) -> int:
    """Its ids are those of the template for the whole conversation; how many turns it has."""
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
    """The text of every run of ids that the model drew."""
    ids = [token if drawn else -1 for token, drawn in zip(sample["response"], sample["mask"], strict=True)]
    runs: list[list[int]] = [[]]
    for token in ids:
        if token >= 0:
            runs[-1].append(token)
        elif runs[-1]:
            runs.append([])
    return [tokenizer.decode(run, skip_special_tokens=True) for run in runs if run]
