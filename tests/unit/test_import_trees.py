"""Imports of verl's scripts beside a tree of verl that its users changed, and the rewards that verl selects itself."""

from pathlib import Path

import pytest

from rltrain.errors import ConfigError
from rltrain.import_config.command import imported
from rltrain.import_config.translation import RowCounts, Translation
from tests.unit.test_import_features import SLIME, VERL, found_of

CONFIG = """
data: {apply_chat_template: true, gen_batch_size: "${data.train_batch_size}"}
actor_rollout_ref:
  actor: {entropy_coeff: 0.005, clip_ratio_low: -1, use_own_term: false, strategy: fsdp}
  rollout: {temperature: 0.7}
algorithm: {use_kl_in_reward: false}
"""
SCORES = """
def default_compute_score(data_source, solution_str, ground_truth, extra_info=None):
    if data_source == "openai/gsm8k":
        return 1.0
    elif data_source.startswith("countdown"):
        return 2.0
    raise NotImplementedError
"""
GSM8K_FILE = "data.train_files=/data/gsm8k.parquet"
DAPO = "-m recipe.dapo.main_dapo algorithm.filter_groups.enable=True "


def beside(folder: Path, more: str, *, allow_holes: bool = False, **files: str) -> Translation:
    """Imports a script with a tree of verl in the folder above. `files` are the texts of its config and its rewards."""
    places = {"config": "trainer/config/ppo_trainer.yaml", "scores": "utils/reward_score/__init__.py"}
    for name, text in files.items():
        path = folder / "verl" / places.get(name, f"trainer/{name}.py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (folder / "scripts").mkdir(exist_ok=True)
    script = folder / "scripts" / "run.sh"
    script.write_text(VERL.replace("MODEL", "/models/m").replace("MORE", more).replace("\n", " "))
    return imported("verl", [str(script)], rows=RowCounts(rows=6400), allow_holes=allow_holes)


def test_changed_defaults_count_where_the_script_is_silent(tmp_path: Path) -> None:
    plain = beside(tmp_path, "")
    assert (plain.get("loss.entropy_coef"), plain.get("rollout.sampling.temperature")) == (0.0, 1.0)
    found = beside(tmp_path, "", config=CONFIG)
    assert (found.get("loss.entropy_coef"), found.get("rollout.sampling.temperature")) == (0.005, 0.7)
    assert found.get("loss.clip_low") == 0.2, "a negative bound follows from clip_ratio"
    told = beside(tmp_path, "actor_rollout_ref.actor.entropy_coeff=0")
    assert told.get("loss.entropy_coef") == 0


def test_a_key_of_a_changed_tree_is_harmless_only_at_its_default(tmp_path: Path) -> None:
    key = "actor_rollout_ref.actor.use_own_term"
    with pytest.raises(ConfigError, match=f"{key}: False: it has no counterpart"):
        beside(tmp_path, f"{key}=False")
    found = beside(tmp_path, f"{key}=False", config=CONFIG)
    reasons = {one.key: one.reason for one in found.leftovers}
    assert reasons[key] == "the default of the tree of verl beside the script"
    with pytest.raises(ConfigError, match=f"{key}: True"):
        beside(tmp_path, f"{key}=True")
    assert beside(tmp_path, "data.apply_chat_template=False").get("data.chat_template") == "never"


def test_the_tree_selects_the_reward_if_it_knows_more_than_verl(tmp_path: Path) -> None:
    assert (
        beside(tmp_path, GSM8K_FILE, scores=SCORES).get("reward.function")
        == "verl.utils.reward_score:default_compute_score"
    )
    usual = SCORES.replace('.startswith("countdown")', ' == "lighteval/MATH"')
    assert beside(tmp_path, GSM8K_FILE, scores=usual).get("reward.function") == "math"
    with pytest.raises(ConfigError, match="needs other arguments; set your function as reward.function"):
        beside(tmp_path, GSM8K_FILE, scores=SCORES.replace("extra_info=None", "length"))
    main = (
        'def _select_rm_score_fn(data_source):\n    if data_source == "openai/gsm8k":\n        return a\n    return b\n'
    )
    with pytest.raises(ConfigError, match="every other data_source of verl/trainer/main_ppo.py"):
        beside(tmp_path, GSM8K_FILE, main_ppo=main)


def test_rewards_that_a_tree_keeps_to_itself_may_stay_open(tmp_path: Path) -> None:
    found = beside(tmp_path, GSM8K_FILE, scores=SCORES.replace("extra_info=None", "length"), allow_holes=True)
    assert found.data["reward"] == {"function": "???"}
    assert [one.key for one in found.holes["reward.function"]] == ["data.train_files"]


def test_the_reward_of_a_tree_is_kept_beside_an_open_environment(tmp_path: Path) -> None:
    turns = "actor_rollout_ref.rollout.multi_turn.enable=True"
    own = beside(tmp_path, turns, scores=SCORES, allow_holes=True)
    assert own.data["reward"] == {"function": "verl.utils.reward_score:default_compute_score"}
    assert own.get("env.function") == "???"


GSM8K, BOX = {"after": ["####"]}, {"last_number": False}
SIGNED = [{"function": "math", "weight": 2.0, "options": {"after": ["Answer:", "answer:"]}}]


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ("/d/gsm8k/train.parquet", {"function": "math", "options": GSM8K}),
        ("/d/math-lighteval/train.parquet", {"function": "math", "options": BOX}),
        ("[/d/gsm8k/a.parquet,/d/math/a.parquet]", {"function": "math", "options": BOX}),
        ("/d/dapo-math-17k.parquet", {"functions": SIGNED}),
        ("/d/geo3k/train.parquet", {"function": "verl.utils.reward_score:default_compute_score"}),
    ],
)
def test_rewards_by_the_kind_of_data(files: str, expected: dict[str, object]) -> None:
    assert found_of("verl", f"data.train_files={files}").data["reward"] == expected


def test_an_algorithm_that_learns_from_minus_1_is_refused() -> None:
    with pytest.raises(ConfigError, match="a wrong answer has -1 there and 0 here"):
        found_of("verl", "data.train_files=/d/dapo.parquet algorithm.adv_estimator=reinforce_plus_plus")


def test_only_dapos_program_selects_groups() -> None:
    assert found_of("verl", DAPO).get("batch.dynamic_sampling.filter") == "rewards_differ"
    found = found_of("verl", "algorithm.filter_groups.enable=True")
    assert "batch.dynamic_sampling.filter" not in found.settings
    assert any("algorithm.filter_groups: only main_dapo reads it" in note for note in found.notes)


def test_batches_of_rows_count_in_steps_and_prompts(tmp_path: Path) -> None:
    """A step of DAPO draws at least one such batch. Other programs train on all of it."""
    epochs = "trainer.total_training_steps=null trainer.total_epochs=3 data.gen_batch_size=192 "
    found = beside(tmp_path, DAPO + epochs)
    assert (found.get("steps"), found.get("batch.prompts_per_step")) == (3 * (6400 // 192), 64)
    found = beside(tmp_path, epochs)
    assert (found.get("steps"), found.get("batch.prompts_per_step")) == (3 * (6400 // 192), 192)
    assert found.get("batch.mini_batches") == 3


def test_groups_selected_with_the_penalty_for_long_responses_are_refused() -> None:
    """The release's default reward manager of DAPO's program has the penalty."""
    buffer = "reward_model.overlong_buffer."
    penalty = f"{DAPO}{buffer}enable=True {buffer}len=64 algorithm.filter_groups.metric="
    assert found_of("verl", penalty + "acc").get("advantages.overlong_penalty")["buffer_tokens"] == 64
    with pytest.raises(ConfigError, match="filter_groups.metric: 'seq_final_reward': rewards without the penalty"):
        found_of("verl", penalty + "seq_final_reward")


def test_slimes_evaluation_samples_as_training_and_has_its_own_context() -> None:
    evaluated = "--eval-prompt-data aime /d/aime.jsonl --eval-interval 5 "
    (one,) = found_of("slime", evaluated + "--rollout-top-k 7").get("evaluation.sets")
    assert one["sampling"]["top_k"] == 7
    contexts = "--rollout-max-context-len 8192 --eval-max-context-len 16384 "
    assert "env.options" not in found_of("slime", contexts).settings
    found = found_of("slime", contexts + "--custom-generate-function-path mine.generate --custom-rm-path mine.reward")
    assert found.get("env.options") == {"rollout_max_context_len": 8192, "eval_max_context_len": 16384}
    assert found.get("rollout.max_context_tokens") == 16384


def test_conversations_of_slime_without_a_limit_have_the_models(tmp_path: Path) -> None:
    turns = "--custom-generate-function-path mine.generate "
    with pytest.raises(ConfigError, match="rollout-max-context-len: None: slime has no limit for conversations"):
        found_of("slime", turns)
    (tmp_path / "config.json").write_text('{"model_type": "qwen2", "max_position_embeddings": 4096}')
    assert found_of("slime", turns, tmp_path).get("rollout.max_context_tokens") == 4096
    text = SLIME.replace("MODEL", "/models/m").replace("MORE", turns).replace("\n", " ")
    found = imported("slime", [text], settings=["rollout.max_context_tokens=9000"])
    assert found.get("rollout.max_context_tokens") == 9000


def test_a_changed_tree_of_slime_has_its_own_reward(tmp_path: Path) -> None:
    script, rewards = tmp_path / "run.sh", tmp_path / "slime" / "rollout" / "rm_hub" / "deepscaler.py"
    rewards.parent.mkdir(parents=True)
    text = SLIME.replace("MODEL", "/models/m").replace("MORE", "--rm-type deepscaler").replace("\n", " ")
    script.write_text(text)
    rewards.write_text('MARK = "</think>"\n')
    assert imported("slime", [str(script)]).get("reward.function") == "math"
    rewards.write_text("MARK = None\n")
    own = "slime.rollout.rm_hub.deepscaler:get_deepscaler_rule_based_reward"
    assert imported("slime", [str(script)]).get("reward.function") == own
