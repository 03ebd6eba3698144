"""Pairs as Experience: which rows are pairs, where the mask stands, how a step is shared out."""

import json
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rltrain.config import schema
from rltrain.data.demonstrations import Preferences
from rltrain.data.experience import Experience, assign_groups, join
from rltrain.errors import DataError
from rltrain.schedule.shape import RunShape
from tests.unit.schedule_configs import make_config
from tests.unit.test_prompts import byte_tokenizer

TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ '<eos>' if m.role == 'assistant' else '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
PAIR = {"prompt": "ab", "chosen": "xyz", "rejected": "w"}


def said(*texts: str) -> list[dict[str, str]]:
    """Messages of the user and the assistant in turn."""
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]


def preferences(
    folder: Path,
    *rows: dict[str, Any],
    template: bool = False,
    limit: int | None = None,
    on_long_row: Literal["skip", "cut", "refuse"] = "cut",
    num_eval: int = 0,
    algorithm: str = "dpo",
    tokenizer: Any = None,
    **columns: Any,
) -> Preferences:
    (tokenizer or byte_tokenizer(TEMPLATE if template else None)).save_pretrained(folder / "model")
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    file = schema.PromptFile(path=str(path), **columns)
    held_out = schema.PromptFile(path=str(path), max_rows=num_eval, **columns) if num_eval else None
    return Preferences(
        schema.Config(
            algorithm=algorithm,
            steps=1,
            placement={"actor,reference": 0},
            model=schema.Model(path=str(folder / "model")),
            data=schema.Data(
                train=file, eval=held_out, shuffle=False, max_response_tokens=limit, on_long_row=on_long_row
            ),
            batch=schema.Batch(prompts_per_step=len(rows)),
        )
    )


def texts(experience: Experience) -> list[tuple[str, str]]:
    """(text, what of it the model would have drawn) of each sample."""
    tokenizer, found = byte_tokenizer(), []
    lengths = experience.lengths.tolist()
    for tokens, mask in zip(experience.tokens.split(lengths), experience.response_mask.split(lengths), strict=True):
        found.append((tokenizer.decode(tokens), tokenizer.decode(tokens[mask])))
    return found


def test_a_pair_is_a_group_of_the_chosen_sample_and_the_rejected_one(tmp_path: Path) -> None:
    pairs = preferences(tmp_path, PAIR, {"prompt": "c", "chosen": "d", "rejected": "ef"})
    experience = pairs.for_step(3)
    assert texts(experience) == [
        ("abxyz<eos>", "xyz<eos>"),
        ("abw<eos>", "w<eos>"),
        ("cd<eos>", "d<eos>"),
        ("cef<eos>", "ef<eos>"),
    ]
    assert experience.chosen.tolist() == [True, False, True, False]
    assert experience.group_ids.tolist() == experience.prompt_ids.tolist() == [0, 0, 1, 1]
    assert experience.sample_ids.tolist() == [12, 13, 14, 15]
    assert experience.margins.tolist() == [0.0] * 4


@pytest.mark.parametrize(("algorithm", "end"), [("dpo", "<end>"), ("reward_model", "<eos>")])
def test_a_response_ends_as_the_template_ends_turns_but_for_scores(tmp_path: Path, algorithm: str, end: str) -> None:
    """Role reward_model looks for the tokenizer's eos_token in texts that others wrote."""
    tokenizer = byte_tokenizer(TEMPLATE.replace("<eos>", "<end>"))
    tokenizer.add_special_tokens({"additional_special_tokens": ["<end>"]})
    experience = preferences(tmp_path, PAIR, algorithm=algorithm, tokenizer=tokenizer).for_step(0)
    lasts = experience.lengths.cumsum(0) - 1
    assert tokenizer.convert_ids_to_tokens(experience.tokens[lasts].tolist()) == [end, end]


def test_responses_are_cut_and_margins_and_keys_are_the_configs(tmp_path: Path) -> None:
    row = {"question": "ab", "better": "xyz", "worse": "w", "by": 1.5}
    keys = {"prompt_key": "question", "chosen_key": "better", "rejected_key": "worse", "margin_key": "by"}
    experience = preferences(tmp_path, row, limit=2, **keys).for_step(0)
    assert [text for text, _ in texts(experience)] == ["abxy", "abw<eos>"]
    assert experience.truncated.tolist() == [True, False]
    assert experience.margins.tolist() == [1.5, 1.5]


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "Hi", "chosen": "yes", "rejected": "no"},
        {"prompt": said("Hi"), "chosen": "yes", "rejected": "no"},
        {"prompt": said("Hi"), "chosen": said("", "yes")[1:], "rejected": said("", "no")[1:]},
        {"chosen": said("Hi", "yes"), "rejected": said("Hi", "no")},
        {"prompt": "Hi", "chosen": said("Hi", "yes"), "rejected": said("Hi", "no")},
    ],
    ids=["texts", "messages and texts", "messages", "whole conversations", "with their prompt"],
)
def test_texts_and_messages_and_whole_conversations_are_the_same_pair(tmp_path: Path, row: dict[str, Any]) -> None:
    assert texts(preferences(tmp_path, row, template=True).for_step(0)) == [
        ("[user]Hi\n[assistant]yes<eos>", "yes<eos>"),
        ("[user]Hi\n[assistant]no<eos>", "no<eos>"),
    ]


def test_turns_of_the_prompt_are_not_learnt_and_those_of_a_response_all_are(tmp_path: Path) -> None:
    common = said("a", "b", "c")
    row = {"chosen": [*common, *said("", "yes", "why", "so")[1:]], "rejected": [*common, *said("", "no")[1:]]}
    prompt = "[user]a\n[assistant]b<eos>[user]c\n[assistant]"
    assert texts(preferences(tmp_path, row, template=True).for_step(0)) == [
        (f"{prompt}yes<eos>[user]why\n[assistant]so<eos>", "yes<eos>so<eos>"),
        (f"{prompt}no<eos>", "no<eos>"),
    ]


DIFFERING = "has conversations under 'chosen' and 'rejected' that first differ in message"


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"prompt": "a", "chosen": "b"}, "has no key 'rejected'"),
        ({"chosen": "b", "rejected": "c"}, "has no key 'prompt'"),
        ({**PAIR, "rejected": "xyz"}, "has the same under 'chosen' and 'rejected'"),
        ({**PAIR, "chosen": ""}, "has '' under 'chosen'; expected a text or a list of chat messages"),
        ({**PAIR, "chosen": said("a", "b")}, "has a whole conversation under one of"),
        (
            {"chosen": said("a", "b"), "rejected": said("c", "d")},
            f"{DIFFERING} 1",
        ),
        (
            {"chosen": said("a", "b", "c", "d"), "rejected": said("a", "b", "e", "f")},
            f"{DIFFERING} 3",
        ),
        ({**PAIR, "chosen": said("", "b", "c")[1:]}, "has a message of role 'user' at the end of 'chosen'"),
        ({**PAIR, "rejected": [*said("", "b")[1:]] * 2}, "has two turns of the assistant one after the other"),
        ({**PAIR, "by": "1"}, "has '1' under 'by'; expected a finite number"),
    ],
)
def test_what_is_no_pair_is_refused_with_its_place(tmp_path: Path, row: dict[str, Any], reason: str) -> None:
    with pytest.raises(DataError) as refused:
        preferences(tmp_path, row, template=True, margin_key="by" if "by" in row else None)
    assert f"rows.jsonl:1: the row {reason}" in str(refused.value)


@settings(max_examples=10)
@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=12),
    num_parts=st.integers(1, 4),
    mini_batches=st.sampled_from([1, 2]),
)
def test_replicas_share_a_step_as_the_exchange_does(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], num_parts: int, mini_batches: int
) -> None:
    rows = [{"prompt": "a", "chosen": "b" * length, "rejected": "c"} for length in lengths * mini_batches]
    pairs = preferences(tmp_path_factory.mktemp("pairs"), *rows)
    pairs.num_mini_batches = mini_batches
    parts = [pairs.for_step(0, part=part, num_parts=num_parts) for part in range(num_parts)]
    replicas = assign_groups(pairs.group_sizes(0), num_parts, mini_batches)
    for part, experience in enumerate(parts):
        assert experience.group_ids[::2].tolist() == torch.nonzero(replicas == part).flatten().tolist()
    whole = join(parts).select(torch.argsort(join(parts).group_ids, stable=True))
    assert torch.equal(whole.tokens, pairs.for_step(0).tokens)


def test_blocks_of_pairs_are_those_of_transfers_to_the_actor() -> None:
    for mini_batches in (1, 2, 4):
        batch = {"prompts_per_step": 8, "mini_batches": mini_batches}
        assert RunShape.of(make_config(algorithm="dpo", batch=batch)).chunk_blocks == mini_batches


def test_held_out_pairs_are_all_there(tmp_path: Path) -> None:
    pairs = preferences(tmp_path, PAIR, PAIR, PAIR, num_eval=2)
    assert pairs.held_out().group_ids.tolist() == [0, 0, 1, 1]
    assert len(pairs.held_out_sizes()) == 2
    assert [pairs.held_out(part=part, num_parts=3).num_samples for part in range(3)] == [2, 2, 0]
