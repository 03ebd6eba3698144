"""Loading a config: numbers as people write them, overrides, and refusals that say where and what."""

from pathlib import Path

import pytest

from rltrain.config.explain import all_keys, expectation
from rltrain.config.foreign import FOREIGN
from rltrain.config.loader import RENAMED, load_config
from rltrain.config.schema import Config
from rltrain.errors import ConfigError

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
        ("actor: 3", "actor: got 3; expected a section with the keys backend, fsdp, optimizer, micro_batch_tokens"),
        (
            "schedule: {mode: async}",
            'schedule.mode: got "async"; expected one of sequential, pipelined, asynchronous',
        ),
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
        ("weight_sync: {transport: golden}", 'weight_sync.transport: got "golden", which is now full_gather'),
    ],
)
def test_what_has_another_name_now_is_refused_with_that(refusal, section, expected):
    assert refusal(f"{MINIMAL}{section}\n").endswith(f":8: {expected}")


def test_what_is_named_as_the_present_name_exists():
    keys = set(all_keys())
    for old, new in RENAMED.items():
        key, _, old_value = old.partition("=")
        assert (new in keys and key not in keys) if not old_value else new in expectation(tuple(key.split("."))), old


@pytest.mark.parametrize(
    "override, expected",
    [
        ("rollout.n=4", "rollout.n is here batch.samples_per_prompt"),
        ("num_generations=8", "num_generations is here batch.samples_per_prompt"),
        ("trainer.save_freq=5", "trainer.save_freq is here checkpoint.save_interval"),
        (
            "trainer={total_training_steps: 5, logger: console, nnodes: 2}",
            "trainer.total_training_steps is here steps; trainer.nnodes is here placement, and torchrun's --nnodes",
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
