"""Config files: how they are read, the shipped ones, and the quickstart's task."""

import json
import re
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
from rltrain.cli.main import main
from rltrain.cli.quickstart import Size, qwen3_weights
from rltrain.config.explain import all_keys, expectation
from rltrain.config.foreign import FOREIGN
from rltrain.config.loader import REMOVED, RENAMED, load_config
from rltrain.config.schema import Config
from rltrain.errors import ConfigError
from rltrain.planning.description import describe_job
from rltrain.planning.options import SHIPPED, DryRunOptions, shipped_folder
from rltrain.planning.validation import check_config
from rltrain.roles.reward import WARN_AFTER_STEPS
from rltrain.runtime.job_store import REPORT_EVERY_S
from rltrain.runtime.placement import resolve_placement, role_grids

CONFIGS = sorted((Path(__file__).resolve().parents[2] / "configs").rglob("*.yaml"))
HEADER = re.compile(r"^# world size: (\d+)$", re.MULTILINE)
RANKS_PER_NODE = 8


def test_there_are_recipes():
    assert {"quickstart.yaml", "quickstart_sft.yaml"} <= {path.name for path in CONFIGS}


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_the_recipe_is_accepted_in_its_world(path: Path):
    header = HEADER.search(path.read_text())
    assert header, f"{path.name} needs a line '# world size: N'"
    world_size = int(header[1])
    config = load_config(path, [])
    check_config(config)
    placement = resolve_placement(config.placement, world_size, min(world_size, RANKS_PER_NODE))
    grids = role_grids(config, placement)
    assert {rank for grid in grids.values() for rank in grid.ranks} == set(range(world_size)), "no rank stays idle"
    for role, grid in grids.items():
        assert config.batch.prompts_per_step // config.batch.mini_batches >= grid.dp, role


LARGE = ("qwen3_30b_a3b.yaml", "qwen3_30b_a3b_4_nodes.yaml", "deepseek_v3.yaml")


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_bytes_and_seconds_are_foretold_in_a_fresh_checkout(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # the models of recipes are not here
    header = HEADER.search(path.read_text())
    assert header
    text = describe_job(path, [], DryRunOptions(int(header[1]), RANKS_PER_NODE))  # raises if it does not fit an H100
    assert "no deadlock" in text and "Bytes, estimated for h100" in text and "a step: " in text
    model = load_config(path, []).model.path
    assert f"model.path: {model} does not exist yet; its shape is the one in rltrain's config.json of " in text
    assert path.name not in LARGE or "Warnings" not in text
    assert path.name != "deepseek_v3.yaml" or "layers of the stages: 7, 8, 8, 8, 8, 8, 8, 6" in text


def test_shipped_shapes_take_the_place_of_absent_folders_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert shipped_folder("Qwen/Qwen3-0.6B@main") == SHIPPED / "Qwen3-0.6B"
    assert shipped_folder("/quickstart/../no/hf") == SHIPPED / "quickstart"
    assert shipped_folder("models/another") is None
    (tmp_path / "models" / "Qwen3-8B").mkdir(parents=True)
    assert shipped_folder("models/Qwen3-8B") is None


@pytest.mark.parametrize(("name", "experts"), [("quickstart", 0), ("quickstart_moe", 8)])
def test_the_quickstarts_shape_is_that_of_what_it_makes(name: str, experts: int, tmp_path: Path) -> None:
    rows = ["--train-rows", "1", "--eval-rows", "1", "--experts", str(experts)]
    main(["make-quickstart", "--output", str(tmp_path), *rows])
    shipped, made = (
        json.loads((folder / "config.json").read_text()) for folder in (SHIPPED / name, tmp_path / "model")
    )
    assert shipped == made


TOOLS = Path(__file__).resolve().parents[2] / "tools"
sys.path.insert(0, str(TOOLS))
import make_counting  # noqa: E402


def test_the_shape_of_the_example_with_images_is_that_of_what_it_makes() -> None:
    shipped, made = json.loads((SHIPPED / "counting/config.json").read_text()), make_counting.model_config()
    of_files = {"architectures", "dtype"}
    expected = json.loads(made.to_json_string())
    assert {name: shipped[name] for name in shipped.keys() - of_files} == {
        name: expected[name] for name in expected.keys() - of_files - {"transformers_version"}
    }


@pytest.fixture(scope="module")
def made_quickstart(tmp_path_factory: pytest.TempPathFactory) -> Path:
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


def test_held_out_problems_are_512_and_never_trained_on(made_quickstart: Path) -> None:
    train, held_out = rows_of(made_quickstart / "train.jsonl"), rows_of(made_quickstart / "eval.jsonl")
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


def test_the_tokenizer_writes_every_row_one_token_a_character(made_quickstart: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(made_quickstart / "model")
    assert len(tokenizer) == 15
    for row in rows_of(made_quickstart / "eval.jsonl"):
        text = row["prompt"] + row["response"]
        ids = tokenizer(text)["input_ids"]
        assert len(ids) == len(text)
        assert tokenizer.decode(ids) == text
        assert tokenizer.decode([*ids, tokenizer.eos_token_id], skip_special_tokens=True) == text


def test_the_checkpoint_loads_in_transformers_tensor_for_tensor(made_quickstart: Path) -> None:
    model, report = AutoModelForCausalLM.from_pretrained(made_quickstart / "model", output_loading_info=True)
    assert not any(report.values())
    assert type(model).__name__ == "Qwen3ForCausalLM"
    expected = qwen3_weights(Size(max_positions=128), vocab_size=15, seed=3)
    loaded = model.state_dict()
    assert set(loaded) == set(expected)
    for name, weight in expected.items():
        assert torch.equal(loaded[name], torch.from_numpy(weight)), name
    assert model.config.eos_token_id == AutoTokenizer.from_pretrained(made_quickstart / "model").eos_token_id
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


MINIMAL = """\
steps: 10
placement:
  actor, reference: 0-1
  rollout,reward: 2-3
model: {path: models/tiny}
data:
  train: {path: train.jsonl}
"""


@pytest.fixture
def load(tmp_path: Path):
    def load(text: str = MINIMAL, *overrides: str) -> Config:
        path = tmp_path / "recipe.yaml"
        path.write_text(text, encoding="utf-8")
        return load_config(path, overrides)

    return load


@pytest.fixture
def refusal(load):
    def refusal(text: str, *overrides: str) -> str:
        with pytest.raises(ConfigError) as refused:
            load(text, *overrides)
        message = str(refused.value)
        for leaked in ("pydantic", "extra_forbidden", "Input should", "validation error", "errors.pydantic.dev"):
            assert leaked not in message
        return message

    return refusal


@pytest.mark.parametrize("value", ["true", "3", "null"])
def test_a_key_whose_type_says_too_little_says_what_it_takes(refusal, value):
    message = refusal(MINIMAL, f"checkpoint.resume={value}")
    assert message.endswith(f"checkpoint.resume: got {value}; expected auto, none, or the folder of a checkpoint")


@pytest.mark.parametrize(
    ("text", "value"),
    [("1e-3", 1e-3), ("3e-4", 3e-4), ("1E5", 1e5), ("2.5e-1", 0.25), (".5", 0.5), ("1.", 1.0), ("2", 2)],
)
def test_numbers_in_scientific_notation_are_numbers(load, text, value):
    assert load(MINIMAL + f"actor: {{optimizer: {{lr: {text}}}}}\n").actor.optimizer.lr == value
    assert load(MINIMAL, f"actor.optimizer.lr={text}").actor.optimizer.lr == value


@pytest.mark.parametrize("text", ["1:30", "010", "2026-11-21", ".inf", "1e", "0x10"])
def test_what_only_old_yaml_takes_for_a_number_or_date_is_text(load, text):
    assert load(MINIMAL, f"output_dir={text}").output_dir == text


def test_a_minimal_file_has_defaults_and_text_placement(load):
    config = load()
    assert (config.steps, config.algorithm, config.seed) == (10, "grpo", 0)
    assert config.placement == {"actor, reference": "0-1", "rollout,reward": "2-3"}


def test_anchors_and_merges_work(load):
    text = MINIMAL + "actor: {parallel: &p {tp: 2}}\nreference: {parallel: {<<: *p, pp: 2}}\nrollout: {parallel: *p}\n"
    config = load(text)
    assert (config.reference.parallel.tp, config.reference.parallel.pp, config.rollout.parallel.tp) == (2, 2, 2)


def test_overrides_apply_in_order_and_parse_yaml(load):
    config = load(
        MINIMAL,
        "steps=3",
        "steps=4",
        "actor.parallel.tp=2",
        "rollout.sampling.stop=['\\n', x]",
        "data.eval.path=e.jsonl",
    )
    assert (config.steps, config.actor.parallel.tp, config.data.eval.path) == (4, 2, "e.jsonl")
    assert config.rollout.sampling.stop == ("\\n", "x")
    assert load(MINIMAL, "data.eval={path: e}", "data.eval=null").data.eval is None
    assert load(MINIMAL, "output_dir=a=b").output_dir == "a=b"


@pytest.mark.parametrize(
    ("override", "placement"),
    [
        ("placement.rollout=0,2-3", {"actor, reference": "0-1", "reward": "2-3", "rollout": "0,2-3"}),
        ("placement.reference=3", {"actor": "0-1", "rollout,reward": "2-3", "reference": 3}),
        ("placement.reward, reference=node:1", {"actor": "0-1", "rollout": "2-3", "reward, reference": "node:1"}),
        ("placement.reference,actor=all", {"rollout,reward": "2-3", "reference,actor": "all"}),
        ("placement.reference=null", {"actor": "0-1", "rollout,reward": "2-3"}),
        ("placement={actor: 0}", {"actor": 0}),
    ],
)
def test_a_placement_override_reassigns_the_named_roles_only(load, override, placement):
    assert load(MINIMAL, override).placement == placement


def test_the_line_of_a_split_key_is_kept(refusal):
    message = refusal(MINIMAL.replace("2-3", "[2, 3]"), "placement.rollout=2-3")
    assert ":4: placement.reward: got [2, 3]; expected text or a whole number" in message


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("stepz: 5", ":8: stepz: unknown key (value 5); the nearest valid key is steps"),
        ("lr: 1e-3", ":8: lr: unknown key (value 0.001); the nearest valid key is actor.optimizer.lr"),
        ("qqqq: 1", "expected one of algorithm, steps, seed"),
        ("actor: {optimizer: {beta3: 1}}", "actor.optimizer.beta3: unknown key (value 1); the nearest valid key is"),
        ("seed: -1", ":8: seed: got -1; expected a whole number, at least 0"),
        ("seed: 1.0", ":8: seed: got 1.0; expected a whole number, at least 0"),
        ("seed: '8'", ':8: seed: got "8"; expected a whole number'),
        ("seed: true", ":8: seed: got true; expected a whole number"),
        ("output_dir: 3", "output_dir: got 3; expected text in quotes"),
        ("output_dir: no", "output_dir: got false; expected text in quotes"),
        ("algorithm: grop", "evaluate (the nearest is grpo)"),
        ("algorithm: a2c", 'algorithm: got "a2c"; expected one of grpo, rloo, '),
        ("preference: {label_smoothing: 0.5}", "preference.label_smoothing: got 0.5; expected a number"),
        ("actor: 3", "actor: got 3; expected a section with the keys micro_batch_tokens, backend, fsdp, optimizer"),
        ("schedule: {mode: async}", 'schedule.mode: got "async"; expected one of sequential, pipelined, asynchronous'),
        ("schedule: {chunks: 0}", "schedule.chunks: got 0; expected a whole number, at least 1"),
        ("schedule: {stale: drop}", "schedule.stale: unknown key"),
        ("critic: {offload: sometimes}", 'critic.offload: got "sometimes"; expected'),
        (
            "actor:\n  optimizer:\n    beta1: 2",
            ":10: actor.optimizer.beta1: got 2; expected a number, above 0 and at most 1",
        ),
        ("reference: {parallel: {tp: 0}}", "reference.parallel.tp: got 0; expected a whole number, at least 1"),
        ("rollout: {sampling: {stop: [a, 1]}}", "rollout.sampling.stop.1: got 1; expected text in quotes"),
        *(
            (
                f"rollout: {{sampling: {{temperature: {value}}}}}",
                f"rollout.sampling.temperature: got {shown}; expected 0, or a number from 0.001 to 1000",
            )
            for value, shown in (("1.0e-40", "1e-40"), ("1.0e+39", "1e+39"), ("-1", "-1"), (".nan", '".nan"'))
        ),
        (
            "judge: {sampling: {temperature: .inf}}",
            'judge.sampling.temperature: got ".inf"; expected 0, or a number from',
        ),
        ("rollout: {sampling: {top_p: 1.0e-300}}", "top_p: got 1e-300; expected a number, at least 0.000001"),
        ("rollout: {sampling: {top_k: -5}}", "rollout.sampling.top_k: got -5; expected a whole number, at least -1"),
        ("rollout: {sampling: {stop: a}}", 'rollout.sampling.stop: got "a"; expected a list of text'),
        ("reward: {options: 3}", "reward.options: got 3; expected keys with values"),
        ("steps: 5", ":8: steps: the key is given twice, first in line 1"),
        ("loss: {kl: {coef: 0, coef: 1}}", ":8: loss.kl.coef: the key is given twice, first in line 8"),
        ("batch: [", ":9: not valid YAML:"),
        ("batch: {\tmini_batches: 1}\n\tx: 1", "not valid YAML:"),
        ("batch: !!python/object:os.system {}", ":8: not valid YAML:"),
        ("seed: !!int x", "not valid YAML:"),
        ("batch: &b {mini_batches: *b}", ":8: not valid YAML: an alias that contains itself"),
        ("? [a]\n: 1", ":8: not valid YAML: a key must be text"),
        ("output_dir: \x01", "not valid YAML:"),
    ],
)
def test_mistakes_in_a_file_are_named_with_line_key_value_and_expectation(refusal, tmp_path, line, expected):
    message = refusal(MINIMAL + line + "\n")
    assert expected in message
    assert message.startswith(str(tmp_path / "recipe.yaml"))


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("steps", "override 'steps': expected key=value"),
        ("=3", "override '=3': expected key=value"),
        ("actor..tp=3", "override 'actor..tp=3': expected key=value"),
        ("steps=0", "override 'steps=0': steps: got 0; expected a whole number, at least 1"),
        ("steps=", "override 'steps=': steps: got null; expected a whole number, at least 1"),
        ("steps.x=3", "override 'steps.x=3': steps is a value, not a section"),
        ("steps=[1", "override 'steps=[1': not valid YAML"),
        ("model.logits_chunk_tokens=9", "the key was removed: logits are always computed for some tokens"),
        ("actor={a: 1, a: 2}", "actor={a: 1, a: 2}':1: a: the key is given twice"),
        ("actr.parallel.tp=3", "override 'actr.parallel.tp=3': actr: unknown key"),
        ("data.evall.path=x", "the nearest valid key is data.eval"),
        ("actor.parallel={tp: x}", "override 'actor.parallel={tp: x}': actor.parallel.tp: got \"x\""),
    ],
)
def test_mistakes_in_an_override_are_named_with_its_text(refusal, override, expected):
    assert expected in refusal(MINIMAL, override)


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        (
            "loss: {importance_cap: 2.0}",
            "loss.importance_cap: unknown key (value 2.0); the key is now loss.correction.high",
        ),
        ("loss: {tis_clip: 2.0}", "loss.tis_clip: unknown key (value 2.0); the key is now loss.correction.high"),
        (
            "critic: {critic_only_steps: 5}",
            "critic.critic_only_steps: unknown key (value 5); the key is now critic.critic_warmup_steps",
        ),
        (
            "weight_sync: {transport: golden}",
            'weight_sync.transport: got "golden"; the value is now called full_gather',
        ),
        (
            "timeouts: {report_s: 9}",
            "timeouts.report_s: unknown key (value 9); the key was removed: waits are reported every 30 s",
        ),
    ],
)
def test_what_has_another_name_now_or_is_gone_is_refused_with_that(refusal, section, expected):
    assert refusal(f"{MINIMAL}{section}\n").endswith(f":8: {expected}")


def test_what_is_named_as_the_present_name_exists():
    keys = set(all_keys())
    for old, new in RENAMED.items():
        key, _, old_value = old.partition("=")
        assert (new in keys and key not in keys) if not old_value else new in expectation(tuple(key.split("."))), old
    assert not keys & {*REMOVED}
    numbers = {"reward.warn_flat_steps": WARN_AFTER_STEPS, "timeouts.report_s": REPORT_EVERY_S}
    assert all(f" {number:g} " in REMOVED[key] for key, number in numbers.items())


@pytest.mark.parametrize(
    "override, expected",
    [
        ("rollout.n=4", "for rollout.n use batch.samples_per_prompt"),
        ("num_generations=8", "for num_generations use batch.samples_per_prompt"),
        ("trainer.save_freq=5", "for trainer.save_freq use checkpoint.save_interval"),
        (
            "trainer={total_training_steps: 5, logger: console, nnodes: 2}",
            "for trainer.total_training_steps use steps; for trainer.nnodes use placement and torchrun's --nnodes",
        ),
    ],
)
def test_keys_of_other_trainers_are_refused_with_ours(refusal, override, expected):
    assert refusal(MINIMAL, override).endswith(f"; {expected}")


def test_what_stands_for_keys_of_other_trainers_exists():
    keys = set(all_keys())
    for theirs, ours in FOREIGN.items():
        assert theirs not in keys
        assert ours.replace(" ", ",").split(",")[0] in keys, theirs


def test_all_mistakes_are_listed_in_one_message(refusal):
    message = refusal("steps: 0\nmodel: {pth: x}\nplacement: {}\n", "seed=x")
    for part in (
        ":1: steps: got 0",
        ":2: model.path: the key is required and missing; expected text",
        ":2: model.pth: unknown key",
        "recipe.yaml: data: the key is required and missing; expected a section with the keys train",
        "override 'seed=x': seed: got \"x\"",
    ):
        assert message.count(part) == 1
    assert "5 mistakes" in message


def test_a_role_that_is_neither_text_nor_number_is_one_mistake(refusal):
    assert "mistakes" not in refusal(MINIMAL, "placement.actor=true")


@pytest.mark.parametrize(
    ("text", "expected"),
    [("", "got an empty file"), ("# only a comment\n", "got an empty file"), ("- a\n", "got list"), ("abc", "got str")],
)
def test_a_file_without_keys_is_refused(refusal, text, expected):
    assert f"recipe.yaml: {expected}; expected keys with values at the top level" in refusal(text)


def test_files_that_cannot_be_read_are_refused(tmp_path):
    (tmp_path / "latin.yaml").write_bytes(b"steps: \xff")
    with pytest.raises(ConfigError, match="missing.yaml: the config file does not exist"):
        load_config(tmp_path / "missing.yaml")
    for path in (tmp_path, tmp_path / "latin.yaml"):
        with pytest.raises(ConfigError, match="cannot be read"):
            load_config(path)


def test_a_long_value_is_cut_in_the_message(refusal):
    message = refusal(MINIMAL, f"steps={'x' * 500}")
    assert "..." in message.partition("steps: got")[2]
    assert len(message.partition("steps: got")[2]) < 200


def test_every_key_of_the_schema_has_an_expectation_in_words():
    for key in all_keys():
        words = expectation(tuple(key.split(".")))
        assert words and "a value" not in words, key


@pytest.mark.parametrize(
    ("functions", "expected"),
    [
        (
            "[{function: math, wieght: 2}]",
            "reward.functions.0.wieght: unknown key (value 2); the nearest valid key is ",
        ),
        ("[{weight: 2}]", "reward.functions.0.function: the key is required and missing; expected text"),
        ("[{function: math, weight: much}]", 'reward.functions.0.weight: got "much"; expected a number'),
        ("math", 'reward.functions: got "math"; expected a list of sections with the keys function, weight, name, opt'),
    ],
)
def test_mistakes_in_a_list_of_sections_are_told_with_their_place(refusal, functions, expected):
    assert expected in refusal(f"{MINIMAL}reward: {{functions: {functions}}}\n")


def test_a_list_of_sections_is_read(load):
    reward = load(MINIMAL, "reward.functions=[{function: math, weight: 2}, {function: a.b}]").reward
    assert [(part.function, part.weight) for part in reward.functions] == [("math", 2), ("a.b", 1)]


@pytest.mark.parametrize("override", ["placement={actor: null}", "placement={actor,rollout,reward: 0}"])
def test_a_role_on_no_ranks_is_told_of_the_quotes(load, override):
    with pytest.raises(ConfigError, match=r'placement\.actor: got null; .*needs quotes: \{"actor, rollout": 0\}'):
        load(MINIMAL, override)
