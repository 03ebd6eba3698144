"""Parts that only the source has: its environment or its reward stays open, and the config is refused until then."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from rltrain.cli.main import run_script
from rltrain.config.loader import load_config
from rltrain.errors import ConfigError
from rltrain.import_config.command import imported, written
from rltrain.import_config.influence import ATTACHED, ENVIRONMENT, REWARD, KeyRules, hole_of
from rltrain.import_config.translation import Translation
from rltrain.planning.description import describe_job
from rltrain.planning.options import DryRunOptions
from tests.unit.test_import_features import SKYRL, SLIME, VERL

A, R = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout."
TEXTS = {"verl": VERL, "slime": SLIME, "skyrl": SKYRL}
TURNS = R + "multi_turn."
AGENT = f"{TURNS}enable=True {TURNS}tool_config_path=tools.yaml {TURNS}max_assistant_turns=5"
SEARCH = (
    "data.max_prompt_length=4096 data.max_response_length=500 data.max_start_length=2048 data.max_obs_length=400 "
    f"max_turns=2 retriever.url=http://127.0.0.1:8000/retrieve retriever.topk=3 {A}state_masking=true "
    f"data.train_batch_size=64 {A}ppo_mini_batch_size=32 {R}n=1 {R}n_agent=4"
)


def opened(framework: str, more: str, **options: Any) -> Translation:
    """Imports with holes."""
    text = TEXTS[framework].replace("MODEL", "/models/m").replace("MORE", more).replace("\n", " ")
    return imported(framework, [text], allow_holes=True, **options)


def values_of(found: Translation, *paths: str) -> dict[str, Any]:
    return {path: found.get(path) for path in paths}


@pytest.mark.parametrize(
    ("framework", "more", "hole"),
    [
        ("verl", AGENT, ENVIRONMENT),
        ("verl", "agent.tool_server_url=http://tools " + R + "agent.default_agent_loop=mine", ENVIRONMENT),
        ("verl", "reward_model.reward_manager=mine reward_model.format_score=0.1", REWARD),
        ("skyrl", "environment.env_class=mine", ENVIRONMENT),
        ("slime", "--rollout-function-path my.loop.generate --search-url http://s", ENVIRONMENT),
        ("slime", "--rm-type mine", REWARD),
    ],
)
def test_a_part_of_the_sources_own_stays_open(framework: str, more: str, hole: str) -> None:
    text = TEXTS[framework].replace("MODEL", "/models/m").replace("MORE", more).replace("\n", " ")
    with pytest.raises(ConfigError, match="with --allow-holes it stays open"):
        imported(framework, [text])
    found = imported(framework, [text], allow_holes=True)
    assert [*found.holes] == [hole] and found.get(hole) == "???" and not found.differences
    assert ("env" in found.placed) is (hole == ENVIRONMENT)


def test_the_settings_of_the_open_part_are_comments() -> None:
    text = written(opened("verl", AGENT), "a command")
    settings = [line for line in text.splitlines() if line.startswith("#   not carried over: ")]
    assert f"#   not carried over: {TURNS}tool_config_path: tools.yaml" in settings
    assert (
        f"#   not carried over: {TURNS}enable: true   (turns come from an environment here: env.function)" in settings
    )
    assert "# HOLE: env.function: write the environment of the source" in text
    data = yaml.safe_load(text)
    assert data["env"] == {"function": "???", "max_turns": 5} and data["reward"] == {"function": "environment"}


def test_the_config_is_refused_until_the_hole_is_filled(tmp_path: Path) -> None:
    config = tmp_path / "run.yaml"
    config.write_text(written(opened("verl", AGENT), "a command"))
    with pytest.raises(
        ConfigError, match=r"run.yaml:\d+: env.function: got \?\?\?, a hole that import-config left open"
    ):
        load_config(config)
    with pytest.raises(ConfigError, match="env.function: got"):
        describe_job(config, [], DryRunOptions(world_size=8))
    (tmp_path / "mine.py").write_text(
        "class Mine:\n    def reset(self, row, seed): ...\n    def step(self, action): ...\n"
    )
    filled = [f"env.function={tmp_path}/mine.py:Mine"]
    assert "env.function: " in describe_job(config, filled, DryRunOptions(world_size=8))


def test_the_command_tells_what_is_not_carried_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = VERL.replace("MORE", AGENT).replace("\n", " ").split()
    assert run_script("import-config", ["--allow-holes", "--output", str(tmp_path / "run.yaml"), *words]) == 0
    told = capsys.readouterr().out
    assert "HOLE: env.function: write" in told and f"not carried over: {TURNS}tool_config_path: tools.yaml" in told


def test_an_own_reward_function_is_kept_beside_an_open_environment() -> None:
    own = "custom_reward_function.path=/r.py custom_reward_function.name=score"
    assert opened("verl", f"{AGENT} {own}").get("reward.function") == "/r.py:score"
    found = opened("verl", f"{AGENT} {own} reward_model.reward_manager=mine")
    assert found.get("reward.function") == "environment"
    assert "/r.py:score" in [one.value for one in found.holes[ENVIRONMENT]], "the manager decides how it is called"


def test_a_users_own_environment_fills_the_hole() -> None:
    found = opened("verl", AGENT, settings=["env.function=mine.py:Mine"])
    assert found.get("env.function") == "mine.py:Mine"
    assert "# env.function is your own\n#   not carried over: " in written(found, "a command")


def test_lengths_of_turns_and_of_the_conversation() -> None:
    found = opened("verl", SEARCH)
    expected = {"data.max_prompt_tokens": 2048, "rollout.sampling.max_response_tokens": 4096, "env.max_turns": 3}
    assert values_of(found, *expected) == expected and found.get("env.max_turn_tokens") == 500
    assert values_of(found, "batch.samples_per_prompt", "batch.mini_batches") == {
        "batch.samples_per_prompt": 4,
        "batch.mini_batches": 8,
    }, "mini-batches count samples: 64 x 4 / 32"
    with pytest.raises(ConfigError, match="state_masking: False: tokens of observations are trained on there"):
        opened("verl", SEARCH.replace("state_masking=true", "state_masking=false"))


def test_what_is_learned_is_never_part_of_a_hole() -> None:
    with pytest.raises(ConfigError, match="use_own_loss: True: it has no counterpart") as refused:
        opened("verl", f"{AGENT} {A}use_own_loss=True algorithm.tool_bonus=2")
    assert "algorithm.tool_bonus" in str(refused.value) and "tool_config_path" not in str(refused.value)


@pytest.mark.parametrize(
    ("key", "value", "hole"),
    [
        ("agent.max_turns", 3, ENVIRONMENT),
        ("reward_config.alpha", 0.1, REWARD),
        ("data.prompt_template", "x", ATTACHED),
        ("data.rows_per_batch", "x", None),
        (R + "n_repeats", 4, None),
        (A + "tool_loss", True, None),
        ("reward.normalize", True, None),
        ("own.section", True, None),
    ],
)
def test_keys_belong_to_a_hole_by_their_names(key: str, value: Any, hole: str | None) -> None:
    assert hole_of(key, value, KeyRules({}, "verl", learning=(A,), attached=("data.", R))) == hole


# Programs of the source's own.

PROGRAM = "from verl.trainer.ppo.ray_trainer import RayPPOTrainer\nRayPPOTrainer(config)\n"


def started(folder: Path, program: str, more: str = "", **options: Any) -> Translation:
    """Imports a script that starts mine/main_ppo.py, with the text `program`."""
    (folder / "mine").mkdir(exist_ok=True)
    (folder / "mine" / "main_ppo.py").write_text(program)
    text = VERL.replace("-m verl.trainer.main_ppo", "mine/main_ppo.py").replace("MORE", more).replace("\n", " ")
    (folder / "run.sh").write_text(text + "\n")
    return imported("verl", [str(folder / "run.sh")], **options)


def test_a_program_of_its_own_has_a_reward_of_its_own(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="-m: 'mine.main_ppo': it is none of verl's own trainers"):
        started(tmp_path, PROGRAM)
    found = started(tmp_path, PROGRAM, allow_holes=True)
    assert [(path, [one.value for one in settings]) for path, settings in found.holes.items()] == [
        (REWARD, ["mine.main_ppo"])
    ]
    with pytest.raises(ConfigError, match="it starts a trainer of its own, MyTrainer"):
        started(tmp_path, PROGRAM.replace("RayPPOTrainer(", "MyTrainer("), allow_holes=True)
    with pytest.raises(ConfigError, match="it starts a trainer of its own, RayPPOTrainer.fit"):
        started(tmp_path, PROGRAM + "RayPPOTrainer.fit = fit\n", allow_holes=True)
    with pytest.raises(ConfigError, match="it starts a trainer of its own, .ray_trainer"):
        started(tmp_path, PROGRAM.replace("verl.trainer.ppo.ray", ".ray"), allow_holes=True)


def test_an_agent_stack_may_have_a_trainer_of_its_own(tmp_path: Path) -> None:
    agent = "actor_rollout_ref.agent."
    more = f"{agent}tool_server_url=http://tools {agent}max_turns=3 {agent}mask_observations=True"
    found = started(tmp_path, PROGRAM.replace("RayPPOTrainer(", "AgentTrainer("), more, allow_holes=True)
    told = {one.key: one.reason for one in found.holes[ENVIRONMENT]}
    assert "it starts a trainer of its own, AgentTrainer" in told["-m"] and told.keys() > {agent + "tool_server_url"}
    with pytest.raises(ConfigError, match="tokens of observations are trained on there, and never here"):
        started(tmp_path, PROGRAM, more.replace("mask_observations=True", "mask_observations=False"), allow_holes=True)
    off = started(tmp_path, PROGRAM, f"{more} {agent}enable_agent=False", allow_holes=True)
    assert [*off.holes] == [REWARD] and "env" not in off.placed


def test_verls_program_may_be_a_file(tmp_path: Path) -> None:
    text = VERL.replace("-m verl.trainer.main_ppo", "/opt/verl/verl/trainer/main_ppo.py").replace("MORE", "")
    assert imported("verl", [text.replace("\n", " ")]).get("algorithm") == "grpo"


def test_skyrls_own_generator_is_an_environment(tmp_path: Path) -> None:
    (tmp_path / "main_own.py").write_text("class Exp:\n    def get_generator(self): ...\n")
    text = SKYRL.replace("skyrl.train.entrypoints.main_base", "main_own").replace("MORE", "").replace("\n", " ")
    (tmp_path / "run.sh").write_text(text.replace("MODEL", "/models/m") + "\n")
    with pytest.raises(ConfigError, match="it has a generator of its own"):
        imported("skyrl", [str(tmp_path / "run.sh")])
    assert imported("skyrl", [str(tmp_path / "run.sh")], allow_holes=True).get(ENVIRONMENT) == "???"
