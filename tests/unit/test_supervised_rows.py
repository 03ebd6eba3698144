"""Rows with answers: demonstrations, preference pairs, whole conversations."""

import copy
import json
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rltrain.config import schema
from rltrain.data.chat_format import ChatFormat, Conversation
from rltrain.data.demonstrations import Demonstrations, Preferences, load_sft_batch
from rltrain.data.experience import Experience, assign_groups, join
from rltrain.data.prompt_rows import demonstrate
from rltrain.data.prompts import PromptDataset, load_prompts
from rltrain.data.tokenizer import UNKNOWN_MODEL, ModelLimits, PromptEncoder
from rltrain.errors import CheckpointError, DataError
from rltrain.schedule.shape import RunShape
from tests.support.chat_families import ADD, FAMILIES, format_of, tokenizer_of
from tests.support.schedule_configs import make_config
from tests.unit.test_prompts import CHAT_TEMPLATE, byte_tokenizer

EOS = 256
ROWS = [("ab", "xyz"), ("c", "w"), ("defg", "uv<eos>"), ("hi", "éa")]


def write(folder: Path) -> Path:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": p, "response": r}) + "\n" for p, r in ROWS))
    return path


def loaded(folder: Path, *, model: ModelLimits = UNKNOWN_MODEL, **keys: object) -> PromptDataset:
    file = schema.PromptFile(path=str(write(folder)))
    data = schema.Data.model_validate({"train": file, **keys})
    encoder = PromptEncoder(byte_tokenizer(), data)
    return load_prompts(file, data, encoder, needs="response", config_key="data.train", model=model)


@pytest.fixture
def dataset(tmp_path: Path) -> PromptDataset:
    return loaded(tmp_path)


def config(folder: Path, *, prompts_per_step: int = 4) -> schema.Config:
    return schema.Config(
        algorithm="sft",
        steps=1,
        placement={"actor": 0},
        model=schema.Model(path=str(folder / "model")),
        data=schema.Data(train=schema.PromptFile(path=str(write(folder)))),
        batch=schema.Batch(prompts_per_step=prompts_per_step),
    )


def demonstrate_rows(dataset: PromptDataset, rows: list[int], *, sample_ids: list[int] | None = None) -> Experience:
    numbers = range(len(rows))
    return load_sft_batch(dataset, rows, sample_ids=sample_ids or numbers, group_ids=numbers)


def texts(dataset: PromptDataset, tokens: torch.Tensor) -> str:
    return str(dataset.encoder.tokenizer.decode(tokens))


def test_prompt_response_and_end_of_sequence(dataset: PromptDataset) -> None:
    experience = demonstrate_rows(dataset, [1, 0], sample_ids=[8, 9])
    assert experience.lengths.tolist() == [1 + 1 + 1, 2 + 3 + 1]
    assert texts(dataset, experience.tokens) == "cw<eos>abxyz<eos>"
    assert experience.response_mask.tolist() == [False, True, True, False, False, True, True, True, True]
    assert experience.prompt_ids.tolist() == [1, 0]
    assert experience.sample_ids.tolist() == [8, 9]
    assert experience.group_ids.tolist() == [0, 1]
    assert experience.truncated.tolist() == [False, False]
    assert experience.rollout_logprobs.tolist() == [0.0] * 9
    assert experience.policy_version.tolist() == [0] * 9


def test_an_end_of_sequence_in_the_text_is_not_doubled(dataset: PromptDataset) -> None:
    experience = demonstrate_rows(dataset, [2])
    assert texts(dataset, experience.tokens) == "defguv<eos>"
    assert experience.tokens[-1] == EOS


@pytest.mark.parametrize(
    ("limit", "text", "truncated"), [(4, "abxyz<eos>", False), (3, "abxyz", True), (1, "abx", True)]
)
def test_long_responses_are_cut(tmp_path: Path, limit: int, text: str, truncated: bool) -> None:
    dataset = loaded(tmp_path, max_response_tokens=limit, on_long_row="cut")
    experience = demonstrate_rows(dataset, [0])
    assert texts(dataset, experience.tokens) == text
    assert experience.truncated.tolist() == [truncated]
    assert int(experience.response_mask.sum()) == limit
    assert dataset.dropped.num_cut == {4: 0, 3: 2, 1: 4}[limit] and dataset.dropped.num_left_out == 0


def test_rows_with_a_long_response_are_left_out_and_counted(tmp_path: Path) -> None:
    dataset = loaded(tmp_path, max_response_tokens=3)
    assert [dataset[row].response for row in range(len(dataset))] == ["w", "uv<eos>"]
    assert dataset.dropped.counts == "0 bad rows skipped, 0 prompts too long, 2 responses too long"


def test_a_long_response_is_refused_with_its_place(tmp_path: Path) -> None:
    told = (
        r"rows.jsonl:1: in the row the response has 4 tokens, its end token included; expected at most 3 \(data.max_r"
    )
    with pytest.raises(DataError, match=told):
        loaded(tmp_path, max_response_tokens=3, on_long_row="refuse")


@pytest.mark.parametrize(("positions", "kept"), [(7, 4), (6, 3), (5, 1)])
def test_without_a_limit_the_models_positions_hold_prompt_and_response(
    tmp_path: Path, positions: int, kept: int
) -> None:
    dataset = loaded(tmp_path, model=ModelLimits(max_positions=positions))
    assert (len(dataset), dataset.dropped.num_long) == (kept, 4 - kept)


def test_a_sample_without_a_position_for_each_token_is_refused(tmp_path: Path) -> None:
    told = "rows.jsonl:1: in the row prompt and response have 6 tokens; expected at most 5, as many as the model"
    with pytest.raises(DataError, match=told):
        loaded(tmp_path, model=ModelLimits(max_positions=5), on_long_row="refuse")


def test_what_the_rollout_may_draw_cuts_no_demonstration(tmp_path: Path) -> None:
    byte_tokenizer().save_pretrained(tmp_path / "model")
    drawing = schema.Rollout(sampling=schema.Sampling(max_response_tokens=1))
    demonstrations = Demonstrations(config(tmp_path).model_copy(update={"rollout": drawing}))
    assert not demonstrations.for_step(0).truncated.any()


def test_an_id_that_the_model_does_not_have_is_refused_with_its_row(tmp_path: Path) -> None:
    told = r"rows.jsonl:1: the row has the token '<eos>' of id 256, and the model in model.path has ids 0 to 255"
    with pytest.raises(DataError, match=told):
        loaded(tmp_path, model=ModelLimits(vocab_size=256))
    left = loaded(tmp_path, model=ModelLimits(vocab_size=257))
    assert len(left) == 4


def test_no_rows(dataset: PromptDataset) -> None:
    experience = demonstrate_rows(dataset, [])
    assert (experience.num_samples, experience.num_tokens) == (0, 0)


@pytest.mark.parametrize("num_parts", [1, 2, 3, 5])
def test_parts_share_a_step_without_overlap(tmp_path: Path, num_parts: int) -> None:
    byte_tokenizer().save_pretrained(tmp_path / "model")
    demonstrations = Demonstrations(config(tmp_path))
    parts = [demonstrations.for_step(7, part=part, num_parts=num_parts) for part in range(num_parts)]
    groups = torch.cat([part.group_ids for part in parts])
    assert sorted(groups.tolist()) == [0, 1, 2, 3]
    ids = torch.cat([part.sample_ids for part in parts])[groups.argsort()]
    assert ids.tolist() == [28, 29, 30, 31], "four samples in each of seven earlier steps"
    rows = torch.cat([part.prompt_ids for part in parts])[groups.argsort()]
    assert rows.tolist() == demonstrations.for_step(7).prompt_ids.tolist()
    assert sorted(rows.tolist()) == [0, 1, 2, 3]


def test_the_chat_template_frames_the_prompt_only(tmp_path: Path) -> None:
    byte_tokenizer(CHAT_TEMPLATE).save_pretrained(tmp_path / "model")
    demonstrations = Demonstrations(config(tmp_path, prompts_per_step=1))
    experience = demonstrations.for_step(0)
    prompt, response = ROWS[int(experience.prompt_ids)]
    text = texts(demonstrations.train, experience.tokens)
    assert text == f"[user]{prompt}\n[bot]{response.removesuffix('<eos>')}<eos>"
    assert texts(demonstrations.train, experience.tokens[~experience.response_mask]) == f"[user]{prompt}\n[bot]"


def test_a_tokenizer_without_end_of_sequence_is_refused(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.eos_token = None
    tokenizer.save_pretrained(tmp_path / "model")
    with pytest.raises(CheckpointError, match="has no eos_token"):
        Demonstrations(config(tmp_path))


def test_a_row_without_a_response_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "a", "label": "b"}\n')
    file = schema.PromptFile(path=str(path))
    data = schema.Data(train=file)
    with pytest.raises(DataError, match=r"rows.jsonl:1: the row has no key 'response'"):
        load_prompts(file, data, PromptEncoder(byte_tokenizer(), data), needs="response", config_key="data.train")


TALK = [
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": "bc"},
    {"role": "user", "content": "d"},
    {"role": "assistant", "content": "ef"},
    {"role": "user", "content": "nobody answers"},
]
TURNS = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ eos_token if m.role == 'assistant' }}{% endfor %}" + (
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def conversations(
    folder: Path, *talks: object, template: str | None = TURNS, learnt: str = "all", **keys: object
) -> PromptDataset:
    path = folder / "talks.jsonl"
    rows = [talk if isinstance(talk, dict) else {"messages": talk} for talk in talks]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    columns = {"prompt_key": "messages", "response_key": None, "system_key": "rules", "learnt_turns": learnt}
    file = schema.PromptFile.model_validate({"path": str(path), **columns})
    data = schema.Data(train=file, **keys)
    return load_prompts(
        file, data, PromptEncoder(byte_tokenizer(template), data), needs="response", config_key="data.train"
    )


def test_of_a_conversation_the_assistants_turns_are_learnt(tmp_path: Path) -> None:
    dataset = conversations(tmp_path, TALK, TALK[:2])
    experience = demonstrate_rows(dataset, [0, 1])
    whole = "[user]a[assistant]bc<eos>[user]d[assistant]ef<eos>"
    assert texts(dataset, experience.tokens) == whole + "[user]a[assistant]bc<eos>"
    assert texts(dataset, experience.tokens[experience.response_mask]) == "bc<eos>ef<eos>bc<eos>"
    assert experience.truncated.tolist() == [False, False]


def test_a_written_response_ends_as_the_template_ends_a_turn() -> None:
    """The tokenizer's eos_token differs from the last token of a chat's turn."""
    tokenizer = byte_tokenizer("{% for m in messages %}[{{ m.role }}]{{ m.content }}<end>{% endfor %}[assistant]")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<end>"]})
    end, data = tokenizer.convert_tokens_to_ids("<end>"), schema.Data(train=schema.PromptFile(path="x"))
    encoder = PromptEncoder(tokenizer, data, named_ends=[7])
    assert (encoder.response_end, encoder.end_tokens) == (end, {end, 7, tokenizer.eos_token_id})
    plain = PromptEncoder(tokenizer, data.model_copy(update={"chat_template": "never"}), named_ends=[7])
    assert (plain.response_end, plain.end_tokens) == (tokenizer.eos_token_id, {7, tokenizer.eos_token_id})


def test_the_last_turn_alone_may_be_learnt(tmp_path: Path) -> None:
    dataset = conversations(tmp_path, TALK, learnt="last")
    experience = demonstrate_rows(dataset, [0])
    assert texts(dataset, experience.tokens[experience.response_mask]) == "ef<eos>"
    assert texts(dataset, dataset.prompt_tokens(0)) == "[user]a[assistant]bc<eos>[user]d[assistant]"


def test_a_column_may_have_the_systems_message(tmp_path: Path) -> None:
    talk, ruled = TALK[:2], [{"role": "system", "content": "own"}, *TALK[:2]]
    rows = [{"messages": talk, "rules": "s"}, {"messages": ruled, "rules": "s"}, {"messages": talk, "rules": ""}]
    dataset = conversations(tmp_path, *rows)
    begun = [texts(dataset, dataset.prompt_tokens(row)) for row in range(3)]
    prompt = "[user]a[assistant]"
    assert begun == ["[system]s" + prompt, "[system]own" + prompt, prompt]
    with pytest.raises(DataError, match="has 3 under 'rules'; expected a text"):
        conversations(tmp_path, {"messages": talk, "rules": 3})


def test_a_long_conversation_is_cut_behind_its_first_prompt(tmp_path: Path) -> None:
    dataset = conversations(tmp_path, TALK, system_prompt="s", max_response_tokens=5, on_long_row="cut")
    experience = demonstrate_rows(dataset, [0])
    assert texts(dataset, experience.tokens) == "[system]s[user]a[assistant]bc<eos>[u"
    assert experience.truncated.tolist() == [True] and int(experience.response_mask.sum()) == 3


@pytest.mark.parametrize(
    ("talk", "template", "problem"),
    [
        ("text", TURNS, "has a text under 'messages'; expected a list of chat messages with turns of the assistant"),
        (TALK[:1], TURNS, "has messages of roles user under 'messages'; expected one of the user first"),
        (TALK[1:3], TURNS, "has messages of roles assistant, user under 'messages'; expected one of the user first"),
        ([TALK[0], TALK[1], TALK[1]], TURNS, "has two turns of the assistant one after the other"),
        (TALK, None, "has chat messages under 'messages', but the checkpoint's tokenizer has no chat template"),
    ],
)
def test_what_is_no_conversation(tmp_path: Path, talk: object, template: str | None, problem: str) -> None:
    with pytest.raises(DataError) as refusal:
        conversations(tmp_path, talk, template=template)
    assert f"talks.jsonl:1: the row {problem}" in str(refusal.value)


def test_a_template_without_a_place_for_the_rows_is_refused_at_the_start(tmp_path: Path) -> None:
    dataset = conversations(tmp_path, TALK)
    byte_tokenizer(TURNS.replace("[assistant]{%", "[assistant]<think>\n{%")).save_pretrained(tmp_path / "model")
    file = schema.PromptFile(path=str(tmp_path / "talks.jsonl"), prompt_key="messages", response_key=None)
    settings = config(tmp_path).model_copy(update={"data": schema.Data(train=file)})
    with pytest.raises(DataError, match=r"talks.jsonl:1: the chat template ends the prompt with"):
        Demonstrations(settings)
    limited = settings.model_copy(update={"data": settings.data.model_copy(update={"max_response_tokens": 1})})
    with pytest.raises(DataError, match=r"talks.jsonl:1: the row cannot be encoded: the chat template ends the prompt"):
        Demonstrations(limited)
    assert len(dataset) == 1


def test_held_out_demonstrations_are_read_where_their_loss_is_asked_for(tmp_path: Path) -> None:
    byte_tokenizer().save_pretrained(tmp_path / "model")
    data = schema.Data(train=schema.PromptFile(path=str(write(tmp_path))))
    asked = config(tmp_path).model_copy(update={"data": data.model_copy(update={"eval": data.train})})
    demonstrations = Demonstrations(asked)
    parts = [demonstrations.held_out(part=part, num_parts=3) for part in range(3)]
    assert [part.prompt_ids.tolist() for part in parts] == [[0, 3], [1], [2]]
    assert demonstrations.held_out(part=5, num_parts=6).num_samples == 0
    answered = asked.model_copy(update={"placement": {"actor,rollout,reward": 0}})
    assert [*Demonstrations(answered).datasets] == ["data.train"], "rows of data.eval need no response here"


TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ '<eos>' if m.role == 'assistant' else '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
PAIR = {"prompt": "ab", "chosen": "xyz", "rejected": "w"}


def said(*texts: str) -> list[dict[str, str]]:
    """Returns messages of the user and the assistant in turn."""
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
    share_prefixes: Literal["auto"] | bool = "auto",
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
            actor=schema.Actor(share_prefixes=share_prefixes),
        )
    )


def drawn_texts(experience: Experience) -> list[tuple[str, str]]:
    """Returns (text, the model's own part) of each sample."""
    tokenizer, found = byte_tokenizer(), []
    lengths = experience.lengths.tolist()
    for tokens, mask in zip(experience.tokens.split(lengths), experience.response_mask.split(lengths), strict=True):
        found.append((tokenizer.decode(tokens), tokenizer.decode(tokens[mask])))
    return found


def test_a_pair_is_a_group_of_the_chosen_sample_and_the_rejected_one(tmp_path: Path) -> None:
    pairs = preferences(tmp_path, PAIR, {"prompt": "c", "chosen": "d", "rejected": "ef"})
    experience = pairs.for_step(3)
    assert drawn_texts(experience) == [
        ("abxyz<eos>", "xyz<eos>"),
        ("abw<eos>", "w<eos>"),
        ("cd<eos>", "d<eos>"),
        ("cef<eos>", "ef<eos>"),
    ]
    assert experience.chosen.tolist() == [True, False, True, False]
    assert experience.group_ids.tolist() == experience.prompt_ids.tolist() == [0, 0, 1, 1]
    assert experience.sample_ids.tolist() == [12, 13, 14, 15]
    assert experience.margins.tolist() == [0.0] * 4


@pytest.mark.parametrize(("how", "copies"), [("auto", 1), (True, 1), (False, 2)])
def test_replicas_are_balanced_by_what_is_computed_of_pairs(how: Any, copies: int, tmp_path: Path) -> None:
    pairs = preferences(tmp_path, PAIR, {"prompt": "c", "chosen": "d", "rejected": "ef"}, share_prefixes=how)
    assert pairs.group_sizes(0).tolist() == [copies * 2 + 3 + 1, copies * 1 + 1 + 2]


@pytest.mark.parametrize(("algorithm", "end"), [("dpo", "<end>"), ("reward_model", "<eos>")])
def test_a_response_ends_as_the_template_ends_turns_but_for_scores(tmp_path: Path, algorithm: str, end: str) -> None:
    """Role reward_model looks for the tokenizer's eos_token in texts from other sources."""
    tokenizer = byte_tokenizer(TEMPLATE.replace("<eos>", "<end>"))
    tokenizer.add_special_tokens({"additional_special_tokens": ["<end>"]})
    experience = preferences(tmp_path, PAIR, algorithm=algorithm, tokenizer=tokenizer).for_step(0)
    lasts = experience.lengths.cumsum(0) - 1
    assert tokenizer.convert_ids_to_tokens(experience.tokens[lasts].tolist()) == [end, end]


def test_responses_are_cut_and_margins_and_keys_are_the_configs(tmp_path: Path) -> None:
    row = {"question": "ab", "better": "xyz", "worse": "w", "by": 1.5}
    keys = {"prompt_key": "question", "chosen_key": "better", "rejected_key": "worse", "margin_key": "by"}
    experience = preferences(tmp_path, row, limit=2, **keys).for_step(0)
    assert [text for text, _ in drawn_texts(experience)] == ["abxy", "abw<eos>"]
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
    assert drawn_texts(preferences(tmp_path, row, template=True).for_step(0)) == [
        ("[user]Hi\n[assistant]yes<eos>", "yes<eos>"),
        ("[user]Hi\n[assistant]no<eos>", "no<eos>"),
    ]


def test_turns_of_the_prompt_are_not_learnt_and_those_of_a_response_all_are(tmp_path: Path) -> None:
    common = said("a", "b", "c")
    row = {"chosen": [*common, *said("", "yes", "why", "so")[1:]], "rejected": [*common, *said("", "no")[1:]]}
    prompt = "[user]a\n[assistant]b<eos>[user]c\n[assistant]"
    assert drawn_texts(preferences(tmp_path, row, template=True).for_step(0)) == [
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
        ({"chosen": said("a", "b"), "rejected": said("c", "d")}, f"{DIFFERING} 1"),
        ({"chosen": said("a", "b", "c", "d"), "rejected": said("a", "b", "e", "f")}, f"{DIFFERING} 3"),
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


WHOLE_IS_EXACT = ("qwen2_5", "qwen3_coder", "llama3_1", "gemma3", "phi4", "smollm3")
"""Families with templates that never change earlier text."""
CHAT = [
    {"role": "user", "content": "What is 1 + 2?"},
    {"role": "assistant", "content": "The answer is 3."},
    {"role": "user", "content": "And 2 + 2? <|im_end|>"},
    {"role": "assistant", "content": "So 4, é 𝄞."},
]
CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}
TOOL_TALK = [
    {"role": "user", "content": "1 + 2?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "3", "tool_call_id": "abcdefghi"},
    {"role": "assistant", "content": "It is 3."},
]


def learnt(record: Conversation) -> list[str]:
    """Returns the text of every turn."""
    return [str(record.format.tokenizer.decode(record.ids[begin:end])) for begin, end in record.turns]


def naive_mask(chat: ChatFormat, messages: list[dict[str, Any]]) -> tuple[list[int], list[bool]]:
    """Returns (ids, mask) of the template's rendering of the whole. The mask covers an assistant's words and the next
    token."""
    text = chat.template.render(messages, generation_prompt=False)
    end = str(chat.tokenizer.convert_ids_to_tokens(chat.end.closing[-1]))
    spans, place = [], 0
    for message in messages:
        begin = text.index(message["content"], place)
        place = begin + len(message["content"])
        if message["role"] == "assistant":
            spans.append((begin, text.index(end, place) + len(end)))
    tokens = chat.tokenizer(text[: spans[-1][1]], add_special_tokens=False, return_offsets_mapping=True)
    mask = [any(b <= first and last <= e for b, e in spans) for first, last in tokens["offset_mapping"]]
    return tokens["input_ids"], mask


@pytest.mark.parametrize("family", WHOLE_IS_EXACT)
@pytest.mark.parametrize("system", [False, True])
def test_masks_are_those_of_the_whole_rendered_once(family: str, system: bool) -> None:
    messages = [{"role": "system", "content": "Be brief."}] * system + CHAT
    record = demonstrate(format_of(family), messages)
    ids, mask = naive_mask(record.format, messages)
    assert (list(record.ids), list(record.drawn_mask)) == (ids, mask)


def drawn(chat: ChatFormat, messages: list[dict[str, Any]], said: list[str]) -> Conversation:
    """Returns the record of a rollout whose engine generates the turns `said`. The messages between them are the
    answers."""
    places = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
    record = Conversation.begin(chat, messages[: places[0]])
    for number, (place, turn) in enumerate(zip(places, said, strict=True)):
        record = record.drawn(chat.template.encode(turn))
        if number + 1 < len(places):
            record = record.observed(messages[place + 1 : places[number + 1]])
    return record


@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "deepseek_r1"])
def test_a_demonstration_is_what_a_rollout_would_have_recorded(family: str) -> None:
    talks = [(CHAT, ())] + ([(TOOL_TALK, (ADD,))] if "tool" in FAMILIES[family].takes and family != "phi4" else [])
    for messages, tools in talks:
        record = demonstrate(format_of(family, tools), messages)
        said = learnt(record)
        assert all(record.ids[end - 1] in record.format.end_tokens for _, end in record.turns)
        again = drawn(record.format, messages, said)
        assert (record.ids, record.turns) == (again.ids, again.turns)
    assert "add" in said[0] or len(talks) == 1, "a turn with a tool call is trained on with its call"
    assert not any("3</" in text for text in said), "results of tools are not trained on"


GLM_MARKS = ("<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>")
GLM_TEMPLATE = (
    "{% for m in messages %}<|{{ 'observation' if m.role == 'tool' else m.role }}|>\n{{ m.content }}"
    "{% for call in m.tool_calls or [] %}{{ call.function.name }}{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)


def glm_format(*end_tokens: str) -> ChatFormat:
    """Returns a template like GLM-4's: a turn ends with the mark of the next message."""
    tokenizer = copy.deepcopy(tokenizer_of("phi4"))
    tokenizer.add_special_tokens({"eos_token": GLM_MARKS[0], "additional_special_tokens": [*GLM_MARKS[1:]]})
    tokenizer.chat_template = GLM_TEMPLATE
    return ChatFormat(tokenizer, end_tokens=[tokenizer.convert_tokens_to_ids(token) for token in end_tokens])


def test_the_mark_of_the_next_message_ends_a_turn_that_the_template_does_not_end() -> None:
    chat = glm_format("<|endoftext|>", "<|user|>", "<|observation|>")
    messages = [CHAT[0], {**TOOL_TALK[1], "content": "So "}, *TOOL_TALK[2:], *CHAT[2:]]
    record = demonstrate(chat, messages)
    said = learnt(record)
    assert said == ["So add<|observation|>", "It is 3.<|user|>", "So 4, é 𝄞.<|user|>"]
    whole = chat.template.render(messages, generation_prompt=False)
    assert chat.tokenizer.decode(record.ids) == whole + "<|user|>"
    again = drawn(chat, messages, said)
    assert (record.ids, record.turns) == (again.ids, again.turns)
    assert chat.tokenizer.convert_ids_to_tokens([chat.end.last]) == ["<|user|>"]
    called = demonstrate(chat, messages[:2])
    assert learnt(called) == ["So add<|observation|>"]


def test_without_end_tokens_among_the_marks_the_tokenizers_ends_a_turn() -> None:
    record = demonstrate(glm_format(), CHAT)
    assert learnt(record) == ["The answer is 3.<|endoftext|>", "So 4, é 𝄞.<|endoftext|>"]
    assert "3.<|endoftext|><|user|>\nAnd" in record.format.tokenizer.decode(record.ids)


def test_reasoning_of_every_turn_is_learnt_though_the_template_drops_it() -> None:
    """Qwen3's rendering of the whole has no reasoning in earlier turns, but the model generated it."""
    messages = [dict(message) for message in CHAT]
    for number in (1, 3):
        messages[number]["content"] = f"<think>\nthought{number}\n</think>\n\n{messages[number]['content']}"
    record = demonstrate(format_of("qwen3"), messages)
    assert [f"thought{number}" in text for number, text in zip((1, 3), learnt(record), strict=True)] == [True, True]
    whole = record.format.template.render(messages, generation_prompt=False)
    assert "thought1" not in whole and "thought3" in whole


@pytest.mark.parametrize("apart", [False, True])
def test_reasoning_that_the_prompt_begins(apart: bool) -> None:
    thought = {"reasoning_content": "so", "content": "3"} if apart else {"content": "<think>\nso\n</think>\n\n3"}
    record = demonstrate(format_of("deepseek_r1"), [CHAT[0], {"role": "assistant", **thought}])
    assert learnt(record) == ["so\n</think>\n\n3<｜end▁of▁sentence｜>"]
    assert record.format.tokenizer.decode(record.ids[: record.turns[0][0]]).endswith("<｜Assistant｜><think>\n")


def test_a_turn_without_the_reasoning_that_the_prompt_begins_is_refused() -> None:
    with pytest.raises(DataError, match=r"ends the prompt with '.*<think>\\n', but renders the turn 'The answ"):
        demonstrate(format_of("deepseek_r1"), CHAT)


def test_roles_that_the_template_refuses() -> None:
    twice = [CHAT[0], CHAT[0], CHAT[1]]
    with pytest.raises(DataError, match="the chat template refuses messages of roles user, user"):
        demonstrate(format_of("gemma3"), twice)
