"""Demonstrations as Experience: where the mask stands, what ends a response, how a step is shared out."""

import json
from pathlib import Path

import pytest
import torch

from rltrain.config import schema
from rltrain.data.demonstrations import Demonstrations, load_sft_batch
from rltrain.data.experience import Experience
from rltrain.data.prompts import PromptDataset, load_prompts
from rltrain.data.tokenizer import UNKNOWN_MODEL, ModelLimits, PromptEncoder
from rltrain.errors import CheckpointError, DataError
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
    assert ids.tolist() == [28, 29, 30, 31], "four a step, for seven steps before"
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
    """The tokenizer's eos_token is another token than the one by which a chat's turn ends."""
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
    with pytest.raises(DataError, match=r"talks.jsonl:1: the chat template asks the model to go on from"):
        Demonstrations(settings)
    limited = settings.model_copy(update={"data": settings.data.model_copy(update={"max_response_tokens": 1})})
    with pytest.raises(DataError, match=r"talks.jsonl:1: the row cannot be encoded: the chat template asks the model"):
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
    assert [*Demonstrations(answered).datasets] == ["data.train"], "whose rows of data.eval need no response"
