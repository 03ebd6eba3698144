"""Keys whose loss would import another run: each is translated, or refused by its own name."""

from pathlib import Path
from typing import Any

import pytest

from rltrain.errors import ConfigError
from rltrain.import_config.command import imported
from rltrain.import_config.translation import RowCounts, Translation
from tests.unit.test_import_features import SKYRL, SLIME, VERL, found_of

A, R, MODEL = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout.", "actor_rollout_ref.model."
OVERLONG = "reward_model.overlong_buffer."


def value_of(framework: str, more: str, path: str) -> Any:
    return found_of(framework, more).get(path)


def script(folder: Path, framework: str, more: str, before: str = "", **options: Any) -> Translation:
    """Imports a script with lines before its training."""
    text = {"verl": VERL, "slime": SLIME, "skyrl": SKYRL}[framework].replace("MODEL", "/models/m")
    (folder / "run.sh").write_text(before + "\n" + text.replace("MORE", more).replace("\n", " ") + "\n")
    return imported(framework, [str(folder / "run.sh")], **options)


def test_verls_penalty_for_long_responses_in_both_spellings() -> None:
    classic = f"{OVERLONG}enable=True {OVERLONG}len=256 {OVERLONG}penalty_factor=0.5 "
    penalty = {"buffer_tokens": 256, "factor": 0.5}
    assert value_of("verl", classic + "reward_model.reward_manager=dapo", "advantages.overlong_penalty") == penalty
    assert value_of("verl", classic + "reward_model.reward_manager=naive", "advantages.overlong_penalty") is None
    assert value_of("verl", classic.replace("True", "False"), "advantages.overlong_penalty") is None


def test_a_config_beside_the_script_is_read(tmp_path: Path) -> None:
    (tmp_path / "config").mkdir()
    file = tmp_path / "config" / "mine.yaml"
    file.write_text("defaults: [ppo_trainer, _self_]\ndata: {max_response_length: 99}\n")
    named = "--config-path=config --config-name=mine"
    found = script(tmp_path, "verl", named)
    assert found.get("rollout.sampling.max_response_tokens") == 99
    assert (
        script(tmp_path, "verl", named + " data.max_response_length=7").get("rollout.sampling.max_response_tokens") == 7
    )
    file.write_text("actor_rollout_ref: {rollout: {multi_turn: {enable: True}}}\n")
    with pytest.raises(ConfigError, match="multi_turn.enable: True: turns come from an environment"):
        script(tmp_path, "verl", named)
    with pytest.raises(ConfigError, match="--config-name other: .*is not found beside the script"):
        script(tmp_path, "verl", named.replace("mine", "other"))
    assert "actor.backend" not in script(tmp_path, "verl", "--config-name=ppo_megatron_trainer").settings


@pytest.mark.parametrize("program", ["recipe.sppo.main_sppo", "verl.trainer.main_ppo_split", "mine.main_ppo"])
def test_programs_that_are_not_known_are_refused(program: str) -> None:
    text = VERL.replace("verl.trainer.main_ppo", program).replace("MORE", "").replace("\n", " ")
    with pytest.raises(ConfigError, match=f"-m: '{program}': it is none of verl's own trainers"):
        imported("verl", [text])


REFUSED = [
    ("verl", A + "fsdp_config.qat.enable=True", "fsdp_config.qat.enable"),
    ("verl", A + "fsdp_config.model_dtype=bfloat16", "fsdp_config.model_dtype"),
    ("verl", A + "optim.override_optimizer_config.eps=1e-5", "override_optimizer_config.eps"),
    ("verl", R + "agent.default_agent_loop=tool_agent", "default_agent_loop"),
    ("verl", "trainer.val_only=True", "trainer.val_only"),
    ("verl", R + "response_length=100", "response_length: 100: rollout.sampling.max_response_tokens is 512"),
    ("verl", R + "max_model_len=100", "below the longest prompt and response, 1024 tokens"),
    ("verl", "algorithm.adv_estimator=gae critic.ppo_epochs=3", "critic.ppo_epochs"),
    ("verl", "reward_model.sandbox_fusion.url=http://box", "sandbox_fusion.url"),
    ("skyrl", "trainer.bf16=false", "trainer.bf16"),
    ("skyrl", "trainer.policy.fsdp_config.mixed_precision.param_dtype=fp32", "mixed_precision.param_dtype"),
    ("skyrl", "generator.inference_engine.engine_init_kwargs.max_model_len=100", "below the longest prompt"),
    ("slime", "--eval-config missing.yaml", "missing.yaml not found beside the script"),
]


@pytest.mark.parametrize(("framework", "more", "named"), REFUSED)
def test_what_would_compute_something_else_is_refused_by_name(framework: str, more: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        found_of(framework, more)


def test_a_column_of_images_gives_the_model_its_tower() -> None:
    found = found_of("verl", "data.image_key=pictures")
    assert found.get("model.vision") == {} and found.get("data.train.images_key") == "pictures"


TREE = "verl/trainer/config/ppo_trainer.yaml"
OLD = A + "ppo_micro_batch_size=16 "


def test_verl_before_0_4_has_its_penalty_in_the_reward_and_no_dual_clip(tmp_path: Path) -> None:
    found = script(tmp_path, "verl", OLD + f"algorithm.kl_ctrl.kl_coef=0.01 {A}clip_ratio=0.3")
    values = {path: found.get(path) for path in ("loss.kl.coef", "loss.kl.where", "loss.dual_clip", "loss.clip_high")}
    assert values == {"loss.kl.coef": 0.01, "loss.kl.where": "reward", "loss.dual_clip": None, "loss.clip_high": 0.3}
    assert found.get("loss.entropy_coef") == 0.001 and "reference" in found.placed
    assert found.get("actor.micro_batch_tokens") == 2 * 1024, "16 sequences over 8 GPUs"
    assert any("verl before 0.4 is assumed" in note and "ppo_micro_batch_size" in note for note in found.notes)
    in_loss = script(tmp_path, "verl", OLD + A + "use_kl_loss=True")
    assert (in_loss.get("loss.kl.coef"), in_loss.get("loss.kl.where")) == (0.001, "loss")


def test_the_version_of_verl_is_seen_in_its_tree_or_given(tmp_path: Path) -> None:
    assert script(tmp_path, "verl", "", version="0.3").get("loss.kl.where") == "reward"
    assert script(tmp_path, "verl", OLD, version="0.7").get("loss.dual_clip") == 3.0
    (tmp_path / TREE).parent.mkdir(parents=True)
    (tmp_path / TREE).write_text("algorithm: {kl_ctrl: {kl_coef: 0.001}}\n")
    assert script(tmp_path, "verl", "").get("loss.entropy_coef") == 0.001
    (tmp_path / TREE).write_text("algorithm: {use_kl_in_reward: False}\n")
    assert script(tmp_path, "verl", OLD).get("loss.entropy_coef") == 0.0
    with pytest.raises(ConfigError, match="--source-version new: expected a version such as 0.3"):
        script(tmp_path, "verl", "", version="new")


def test_slime_trains_on_old_tokens_unless_its_flag_masks_them() -> None:
    found = found_of("slime", "--partial-rollout")
    assert found.get("schedule.on_stale") == "drop" and found.get("schedule.max_staleness") > 100
    assert value_of("slime", "--partial-rollout --mask-offpolicy-in-partial-rollout", "schedule.on_stale") == "mask"


def test_slimes_rewards_look_for_marked_answers() -> None:
    options = {kind: found_of("slime", f"--rm-type {kind}").data["reward"] for kind in ("math", "deepscaler", "dapo")}
    assert options["math"] == {"function": "math", "options": {"last_number": False}}
    assert options["deepscaler"]["options"]["after"] == ["</think>", "###Response"]
    signed = {"function": "math", "weight": 2.0, "options": {"after": ["Answer:", "answer:"]}}
    assert options["dapo"] == {"functions": [signed]}
    with pytest.raises(ConfigError, match="a wrong answer has -1 there"):
        found_of("slime", "--rm-type dapo --advantage-estimator ppo")


def test_skyrls_environments_of_mathematics_look_for_marked_answers() -> None:
    assert found_of("skyrl", "").data["reward"] == {"function": "math", "options": {"after": ["####"]}}
    (part,) = found_of("skyrl", "environment.env_class=aime").get("reward.functions")
    assert part == {"function": "math", "weight": 2.0, "options": {"after": ["Answer:", "answer:"]}}
    with pytest.raises(ConfigError, match="a wrong answer has -1 there"):
        found_of("skyrl", "environment.env_class=aime trainer.algorithm.advantage_estimator=gae")


def test_slimes_file_of_evaluation_sets(tmp_path: Path) -> None:
    (tmp_path / "eval.yaml").write_text(
        "eval: {defaults: {top_p: 0.7}, datasets: [{name: aime, path: /d/a.jsonl, n_samples_per_eval_prompt: 4}]}\n"
    )
    found = script(tmp_path, "slime", "--eval-config eval.yaml --eval-interval 5 --eval-temperature 0.6")
    (one,) = found.get("evaluation.sets")
    assert one["name"] == "aime" and one["samples_per_prompt"] == 4 and one["data"]["path"] == "/d/a.jsonl"
    assert (one["sampling"]["temperature"], one["sampling"]["top_p"]) == (0.6, 0.7)
    (tmp_path / "eval.yaml").write_text("eval: {datasets: [{name: gpqa, path: /d/a.jsonl, rm_type: gpqa}]}\n")
    with pytest.raises(ConfigError, match="eval-config: gpqa: rm_type"):
        script(tmp_path, "slime", "--eval-config eval.yaml --eval-interval 5")


def test_slime_without_a_limit_of_prompts_says_which_one_counts_here() -> None:
    text = SLIME.replace("--rollout-max-prompt-len 512", "").replace("MORE", "").replace("\n", " ")
    found = imported("slime", [text])
    assert any("slime has no limit of prompts" in note for note in found.notes)
    assert "data.max_prompt_tokens" in found.settings


def test_the_size_of_groups_of_experts_in_engines_is_listed() -> None:
    found = found_of("verl", f"{R}expert_parallel_size=4 {R}tensor_model_parallel_size=1")
    assert [one.reason for one in found.leftovers if one.key == f"{R}expert_parallel_size"]


def test_the_engine_is_chosen_for_the_users_own_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "nemotron"}')
    text = VERL.replace("MORE", "").replace("\n", " ")
    assert imported("verl", [text]).get("rollout.engine") == "sglang"
    found = imported("verl", [text], settings=[f"model.path={tmp_path}"], gpu="none")
    assert found.get("rollout.engine") == "embedded" and found.get("model.path") == str(tmp_path)


# What is refused and need not be.


def test_more_positions_are_no_other_model_unless_rope_is_scaled(tmp_path: Path) -> None:
    config, override = tmp_path / "config.json", f"{MODEL}override_config.max_position_embeddings"
    config.write_text('{"model_type": "qwen2", "max_position_embeddings": 32768}')
    found = found_of("verl", f"+{override}=65536", tmp_path)
    assert [one.reason for one in found.leftovers if one.key == override] == [
        "without scaling of RoPE it changes no number; the dry run checks the context length"
    ]
    config.write_text('{"model_type": "qwen2", "rope_scaling": {"rope_type": "yarn", "factor": 4.0}}')
    with pytest.raises(ConfigError, match="max_position_embeddings in config.json of model.path instead"):
        found_of("verl", f"+{override}=65536", tmp_path)


def test_a_tokenizer_is_that_of_the_model(tmp_path: Path) -> None:
    key = f"{MODEL}tokenizer_path"
    found = found_of("verl", f"{key}={tmp_path} critic.model.tokenizer_path=/another", tmp_path)
    reasons = {one.key: one.reason for one in found.leftovers}
    assert reasons[key] == "model.path has this tokenizer"
    assert reasons["critic.model.tokenizer_path"] == "no critic"
    with pytest.raises(ConfigError, match="tokenizer_path: '/another': copy its files to model.path"):
        found_of("verl", f"{key}=/another", tmp_path)


HARMLESS = [
    ("verl", A + "optim.warmup_style=cosine", "actor.optimizer.decay", "cosine"),
    ("verl", A + "ppo_mini_batch_size=256", "batch.mini_batches", 1),
    ("verl", "critic.model.fsdp_config.grad_offload=True", "algorithm", "grpo"),
    ("verl", A + "grad_clip=0.3", "actor.optimizer.clip_grad", 0.3),
    ("verl", "data.filter_overlong_prompts=True data.truncation=right", "data.on_bad_row", "skip"),
    ("verl", A + "policy_loss.loss_mode=gspo " + A + "loss_agg_mode=token-mean", "loss.normalization", "sequence_mean"),
    ("verl", A + "optim.lr_warmup_steps=0", "actor.optimizer.warmup_steps", 0),
    ("verl", A + "fsdp_config.mixed_precision.param_dtype=bf16", "model.dtype", "bfloat16"),
    ("verl", A + "fsdp_config.mixed_precision.reduce_dtype=bf16", "model.dtype", "bfloat16"),
    ("verl", A + "policy_loss.loss_mode=sapo " + A + "policy_loss.tau_pos=1.0", "loss.policy", "sapo"),
    ("verl", "algorithm.adv_estimator=gae critic.fsdp.param_offload=True", "algorithm", "ppo"),
    ("verl", R + "engine_kwargs.vllm.compilation_config.cudagraph_mode=FULL_DECODE_ONLY", "algorithm", "grpo"),
    ("verl", R + "engine_kwargs.vllm.max_model_len=9000", "rollout.max_context_tokens", 9000),
    ("verl", A + "strategy=megatron " + A + "megatron.use_megatron_fsdp=True", "algorithm", "grpo"),
    ("verl", R + "val_temperature=0.6 " + R + "n_val=4 data.val_files=/d/v.parquet trainer.test_freq=5", None, None),
    ("slime", "--use-slime-router", "algorithm", "grpo"),
    ("slime", "--keep-only-latest-checkpoint", "checkpoint.keep", 1),
    ("slime", "--debug-rollout-only", "algorithm", "grpo"),
    ("skyrl", "trainer.attn_backend=sdpa", "algorithm", "grpo"),
    ("skyrl", "generator.inference_engine.weight_transfer_threshold_cuda_ipc_GB=2", "algorithm", "grpo"),
]


@pytest.mark.parametrize(("framework", "more", "path", "expected"), HARMLESS)
def test_keys_of_users_scripts(framework: str, more: str, path: str | None, expected: Any) -> None:
    found = found_of(framework, more)
    if path is not None:
        assert found.get(path) == expected
    else:
        (one,) = found.get("evaluation.sets")
        assert (one["sampling"]["temperature"], one["samples_per_prompt"]) == (0.6, 4)


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (A + "fsdp_config.mixed_precision.param_dtype=fp32", "param_dtype: 'fp32'"),
        (A + "policy_loss.loss_mode=sapo " + A + "policy_loss.tau_pos=2.0", "policy_loss.tau_pos: 2.0"),
        (
            "reward.reward_model.enable=True reward.reward_model.model_path=/m custom_reward_function.path=/r.py",
            "custom_reward_function.path: '/r.py': a reward model gives the whole reward",
        ),
    ],
)
def test_another_value_of_such_a_key_is_refused(more: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        found_of("verl", more)


def test_the_fully_asynchronous_program_has_its_own_threshold() -> None:
    more = "-m verl.experimental.fully_async_policy.fully_async_main actor_rollout_ref.hybrid_engine=False "
    more += "trainer.v1.sampler.max_off_policy_threshold=8 async_training.staleness_threshold=0.5 "
    text = VERL.replace("MODEL", "/m").replace("MORE", more + "async_training.trigger_parameter_sync_step=4")
    found = imported("verl", [text.replace("-m verl.trainer.main_ppo", "").replace("\n", " ")], allow_differences=True)
    assert found.get("schedule.max_staleness") == 6
    reasons = {one.key: one.reason for one in found.leftovers}
    assert "engines of this program" in reasons["actor_rollout_ref.hybrid_engine"]


def test_what_every_run_needs_is_asked_for_by_name(tmp_path: Path) -> None:
    words = SLIME.replace("--prompt-data /data/a.jsonl", "").replace("MODEL", "/m").replace("MORE", "")
    with pytest.raises(ConfigError, match="data.train.path: the source names no file of prompts; expected it by"):
        imported("slime", [words.replace("\n", " ")])
    assert [*imported("slime", [words.replace("\n", " ")], allow_holes=True).holes] == ["data.train.path"]
    with pytest.raises(ConfigError, match="model.path: the source names no checkpoint.* without a value: WHERE"):
        script(tmp_path, "verl", "actor_rollout_ref.model.path=$WHERE")


def test_prompts_of_slimes_own_source_stay_open() -> None:
    words = SLIME.replace("--prompt-data /data/a.jsonl", "--data-source-path my.Source --custom-rm-path my.reward")
    found = imported("slime", [words.replace("MODEL", "/m").replace("MORE", "").replace("\n", " ")], allow_holes=True)
    assert [one.key for one in found.holes["data.train.path"]] == ["data-source-path"]
    with pytest.raises(ConfigError, match="prompts are read from files here"):
        imported("slime", [SLIME.replace("MORE", "--data-source-path my.Source").replace("\n", " ")], allow_holes=True)


def test_a_reward_file_is_found_from_the_script_upwards(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def compute_score(**row): ...\n")
    (tmp_path / "scripts").mkdir()
    found = script(tmp_path / "scripts", "verl", "custom_reward_function.path=mine.py")
    assert found.get("reward.function") == f"{tmp_path}/mine.py:compute_score"


def test_fsdp_of_slime_needs_no_word_about_dropout() -> None:
    text = SLIME.replace("--attention-dropout 0.0 --hidden-dropout 0.0", "").replace("\n", " ")
    with pytest.raises(ConfigError, match="there is no dropout here"):
        imported("slime", [text.replace("MORE", "")])
    sharded = text.replace("--tensor-model-parallel-size 2", "").replace("MORE", "--train-backend fsdp")
    assert imported("slime", [sharded]).get("actor.backend") == "fsdp"


CHECKS = [
    'if [ -z "$MODEL_PATH" ]; then echo missing; exit 1; fi',
    "[[ ! -f /no/such/file ]] && exit 1",
    "[ -f /no/such/file ] || { echo missing; exit 2; }",
    "die() { echo $1; exit 1; }\nif [ $# -lt 2 ]; then die usage; fi",
    'case "$KIND" in a) ;; *) exit 1 ;; esac',
    "while true; do sleep 5; done",
    "for one in 1 2 3; do if [ $one = 2 ]; then break; fi; done",
]


@pytest.mark.parametrize("before", CHECKS)
def test_scripts_that_check_something_are_read_on(before: str, tmp_path: Path) -> None:
    assert script(tmp_path, "verl", "", before).get("batch.prompts_per_step") == 64


def test_a_script_without_a_check_ends_where_it_says(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="starts no command of verl"):
        script(tmp_path, "verl", "", "exit 1")


def test_numbers_that_only_running_tells_are_asked_for_by_name(tmp_path: Path) -> None:
    nodes = "trainer.nnodes=$SLURM_JOB_NUM_NODES"
    with pytest.raises(ConfigError, match="at trainer.nnodes.*SLURM_JOB_NUM_NODES; give those that count by --env"):
        script(tmp_path, "verl", nodes)
    assert script(tmp_path, "verl", nodes, variables=["SLURM_JOB_NUM_NODES=2"]).world_size == 16
    with pytest.raises(ConfigError, match="--env NODES: expected NAME=VALUE"):
        script(tmp_path, "verl", nodes, variables=["NODES"])
    counted = "trainer.n_gpus_per_node=$(echo $CUDA_VISIBLE_DEVICES | tr ',' '\\n' | wc -l)"
    assert script(tmp_path, "verl", counted, variables=["CUDA_VISIBLE_DEVICES=0,1,2,3"]).world_size == 4
    assert script(tmp_path, "verl", "trainer.nnodes=$(expr 1 + 2)").world_size == 24


def test_a_script_of_another_trainer_is_told_apart(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text(SLIME.replace("MORE", "").replace("\n", " "))
    with pytest.raises(ConfigError, match="one of slime .*: expected --from slime"):
        imported("verl", [str(tmp_path / "run.sh")], rows=RowCounts(rows=100))


def test_no_private_marks_are_shown(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        script(tmp_path, "verl", "trainer.n_gpus_per_node=$(nvidia-smi -L | wc -l)")
    assert "nvidia-smi" in str(refused.value)
    assert not any(0xFDD0 <= ord(char) <= 0xFDEF for char in str(refused.value))


LAUNCH = "trainer.n_gpus_per_node=$GPUS"


@pytest.mark.parametrize(
    ("test", "gpus"),
    [
        ("[ $EMPTY == 0 ]", 2),
        ("[ $EMPTY -eq 0 ]", 2),
        ('[ "$EMPTY" -eq 0 ]', 2),
        ("[ a -eq 0 ]", 2),
        ("[ ! $EMPTY ]", 1),
        ('[[ "$EMPTY" -eq 0 ]]', 1),
        ("[[ $EMPTY == 0 ]]", 2),
        ("[ 1 -eq 1 ]", 1),
    ],
)
def test_a_test_with_an_empty_variable_is_what_it_is_in_bash(test: str, gpus: int, tmp_path: Path) -> None:
    """With `[` a missing operand, or a text for a number, is an error, and the script goes on."""
    before = f"EMPTY=\nif {test}; then GPUS=1; else GPUS=2; fi"
    assert script(tmp_path, "verl", LAUNCH, before).world_size == gpus


@pytest.mark.parametrize("test", ['[ "$NODE_RANK" = 0 ]', "[ $RANK -eq 0 ]", '[[ "$SLURM_NODEID" == 0 ]]'])
def test_a_cluster_script_is_read_as_on_the_first_node(test: str, tmp_path: Path) -> None:
    before = f"GPUS=2\nif {test}; then GPUS=4; fi"
    found = script(tmp_path, "verl", LAUNCH, before, variables=["NODE_RANK=", "RANK=", "SLURM_NODEID="])
    assert found.world_size == 4 and any("read as on the first node" in note for note in found.notes)
    assert (
        script(tmp_path, "verl", LAUNCH, before, variables=["NODE_RANK=1", "RANK=1", "SLURM_NODEID=1"]).world_size == 2
    )
    alone = 'GPUS=4\nif [ -z "$NODE_RANK" ]; then GPUS=1; fi'
    assert script(tmp_path, "verl", LAUNCH, alone, variables=["NODE_RANK="]).world_size == 1


def test_a_path_with_a_colon_is_no_mapping(tmp_path: Path) -> None:
    found = script(
        tmp_path, "verl", "trainer.default_local_dir=/runs/${NAME:?is required} trainer.experiment_name='a: b'"
    )
    assert found.get("logging.wandb.name") == "a: b"


LORA = "--lora-rank 32 --lora-alpha 64 --lora-dropout 0.0 "


def test_adapters_of_miles() -> None:
    with pytest.raises(ConfigError, match="lora-init_method: 'xavier': A is initialised uniformly"):
        found_of("slime", LORA + "--target-modules all-linear")
    found = found_of("slime", LORA + "--lora-A-init-method kaiming --target-modules q_proj,v_proj")
    lora = found.data["model"]["lora"]
    assert lora == {"rank": 32, "alpha": 64.0, "targets": ["q_proj", "v_proj"]}
    text = (
        SLIME.replace("--tensor-model-parallel-size 2", "").replace("\n", " ").replace("MORE", "--train-backend fsdp ")
    )
    assert "lora" not in imported("slime", [text + LORA]).data["model"], "these forks have a switch"
    found = imported("slime", [text + LORA + "--use-lora --lora-target-modules all-linear"])
    assert found.get("model.lora.rank") == 32


def test_a_key_whose_value_only_running_tells_can_be_given(tmp_path: Path) -> None:
    counted = "trainer.n_gpus_per_node=$(python -c 'print(4)')"
    with pytest.raises(ConfigError, match="give it by --key trainer.n_gpus_per_node=VALUE"):
        script(tmp_path, "verl", counted)
    assert script(tmp_path, "verl", counted, keys=["trainer.n_gpus_per_node=4"]).world_size == 4
    with pytest.raises(ConfigError, match="--key nnodes: expected KEY=VALUE with a key of verl"):
        script(tmp_path, "verl", counted, keys=["nnodes"])


def test_words_that_a_script_reads_are_left_out_with_a_note(tmp_path: Path) -> None:
    before = 'LINE="$(python3 arguments.py)"\nread -ra ARGUMENTS <<< "${LINE}"'
    found = script(tmp_path, "slime", "${ARGUMENTS[@]}", before)
    assert any("read -ra ARGUMENTS: its words are not known" in note for note in found.notes)


def test_greedy_samples_of_a_prompt_are_equal() -> None:
    found = found_of(
        "skyrl", "data.val_data=/d/v.parquet generator.eval_n_samples_per_prompt=8 trainer.eval_interval=5"
    )
    assert found.get("data.eval.path") == "/d/v.parquet" and "evaluation.sets" not in found.settings
    assert any("8 greedy samples of a prompt are equal" in note for note in found.notes)


@pytest.mark.parametrize(("more", "whitens"), [("", False), ("--normalize-advantages", True)])
def test_slimes_rewards_that_are_not_compared_are_the_advantages(more: str, whitens: bool) -> None:
    found = found_of("slime", f"--disable-rewards-normalization --advantage-estimator gspo {more}")
    assert (found.get("algorithm"), found.get("loss.policy")) == ("reinforce_plus_plus", "gspo")
    assert found.get("advantages.whiten") is whitens and "advantages.normalize_std" not in found.settings


def test_options_of_verls_reward_functions() -> None:
    own = "custom_reward_function.path=/r.py custom_reward_function.name=score"
    found = found_of("verl", f"{own} +custom_reward_function.reward_kwargs.scale=0.5")
    assert found.data["reward"] == {"function": "/r.py:score", "options": {"scale": 0.5}}


def test_a_script_that_starts_a_missing_one_is_refused(tmp_path: Path) -> None:
    """The keys that the other script adds would be lost."""
    started = 'bash "$ROOT/inner.sh" data.train_batch_size=64 trainer.total_training_steps=9 trainer.n_gpus_per_node=8'
    (tmp_path / "outer.sh").write_text(started + "\n")
    with pytest.raises(ConfigError, match="it starts the script /nowhere/inner.sh, which is not found"):
        imported("verl", [str(tmp_path / "outer.sh")], variables=["ROOT=/nowhere"])
    (tmp_path / "inner.sh").write_text(VERL.replace("MORE", "$@").replace("\n", " ") + "\n")
    assert imported("verl", [str(tmp_path / "outer.sh")], variables=[f"ROOT={tmp_path}"]).get("algorithm") == "grpo"
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "outer.sh").write_text(started.replace('"$ROOT/inner.sh"', "inner.sh") + "\n")
    assert imported("verl", [str(tmp_path / "deep" / "outer.sh")]).get("algorithm") == "grpo", "run from the top folder"
