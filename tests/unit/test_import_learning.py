"""Tests of other trainers' learning settings in translated configs."""

import math
from pathlib import Path
from typing import Any

import pytest

from rltrain.config.loader import load_config
from rltrain.config.schema import Config
from rltrain.errors import ConfigError
from rltrain.import_config.command import imported, written
from rltrain.import_config.translation import RowCounts, Translation
from tests.unit.test_import_features import config_of, found_of

ALG, CORRECTION = "trainer.algorithm.", "algorithm.rollout_correction."
ROLLOUT_IS = f"{ALG}policy_loss_type=rollout_is {ALG}eps_clip_low=0.3 {ALG}eps_clip_high=0.2 "
GEOMETRIC = f"{ALG}off_policy_correction.sequence_mask_metric=geometric {ALG}off_policy_correction.geo_mask_high=1.02 "
BYPASS = f"{CORRECTION}bypass_mode=true "
TEACHER = (
    "distillation.enabled=True distillation.nnodes=1 distillation.n_gpus_per_node=4 "
    "distillation.teacher_models.teacher_model.model_path=/models/teacher "
    "distillation.teacher_models.teacher_model.inference.tensor_model_parallel_size=2 "
    "distillation.distillation_loss.use_task_rewards=False distillation.distillation_loss.use_policy_gradient=True "
    "distillation.distillation_loss.loss_mode=k1 distillation.distillation_loss.loss_max_clamp=10.0 "
)
LOSS = "actor_rollout_ref.actor.policy_loss.loss_mode="


def settings_of(framework: str, more: str) -> dict[str, Any]:
    return {path: one.value for path, one in found_of(framework, more).settings.items()}


def test_skyrls_rollout_is_is_reinforce_weighed_against_the_engine(tmp_path: Path) -> None:
    loss = config_of(found_of("skyrl", ROLLOUT_IS + GEOMETRIC), tmp_path).loss
    assert (loss.policy, loss.old_logprobs) == ("reinforce", "rollout")
    correction = loss.correction
    assert (correction.method, correction.level, correction.low, correction.high) == ("icepop", "token", 0.7, 1.2)
    assert [(one.level, one.low, one.high) for one in correction.masks] == [("geometric", 0.99, 1.02)]


@pytest.mark.parametrize(
    ("framework", "more", "expected"),
    [
        ("skyrl", f"{ALG}policy_loss_type=importance_sampling", {"loss.policy": "clip", "loss.clip_high": 1e9}),
        (
            "skyrl",
            f"{ALG}policy_loss_type=dppo {ALG}dppo.dppo_type=binary_kl {ALG}dppo.delta_low=0.05",
            {"loss.policy": "dppo", "loss.dppo.divergence": "kl", "loss.clip_low": 0.05, "loss.clip_high": 0.2},
        ),
        (
            "skyrl",
            "generator.chat_template_kwargs.enable_thinking=false",
            {"data.chat_template_args": {"enable_thinking": False}},
        ),
        ("verl", LOSS + "gpg algorithm.adv_estimator=gpg", {"loss.policy": "reinforce", "algorithm": "gpg"}),
        (
            "verl",
            "algorithm.adv_estimator=optimal_token_baseline actor_rollout_ref.actor.calculate_sum_pi_squared=True",
            {"algorithm": "optimal_token_baseline"},
        ),
        ("verl", "algorithm.adv_estimator=gpg", {"advantages.scale_by": "rewarded", "loss.policy": "clip"}),
        (
            "verl",
            LOSS + "dppo_tv actor_rollout_ref.actor.clip_ratio_c=1e4",
            {"loss.policy": "dppo", "loss.dppo.divergence": "tv", "loss.dppo.ratio_max": 1e4},
        ),
        (
            "verl",
            "+data.apply_chat_template_kwargs.enable_thinking=False",
            {"data.chat_template_args": {"enable_thinking": False}},
        ),
        (
            "verl",
            f"{BYPASS}{CORRECTION}loss_type=reinforce {CORRECTION}rollout_is=sequence",
            {"loss.policy": "reinforce", "loss.old_logprobs": "rollout", "loss.correction.level": "sequence"},
        ),
    ],
)
def test_policy_losses_and_advantages(framework: str, more: str, expected: dict[str, Any]) -> None:
    found = settings_of(framework, more)
    assert {path: found.get(path) for path in expected} == expected


@pytest.mark.parametrize(
    ("framework", "more", "key", "whitens"),
    [
        ("verl", "actor_rollout_ref.rollout.n=1", "actor_rollout_ref.rollout.n", False),
        ("verl", "actor_rollout_ref.rollout.n=1 algorithm.adv_estimator=rloo", "actor_rollout_ref.rollout.n", False),
        (
            "verl",
            "actor_rollout_ref.rollout.n=1 algorithm.adv_estimator=reinforce_plus_plus_baseline",
            "actor_rollout_ref.rollout.n",
            True,
        ),
        ("skyrl", "generator.n_samples_per_prompt=1", "generator.n_samples_per_prompt", False),
        (
            "skyrl",
            f"generator.n_samples_per_prompt=1 {ALG}advantage_estimator=maxrl {ALG}advantage_batch_normalize=true",
            "generator.n_samples_per_prompt",
            True,
        ),
    ],
)
def test_groups_of_one_keep_their_rewards_and_a_note_says_how(
    framework: str, more: str, key: str, whitens: bool, tmp_path: Path
) -> None:
    found = found_of(framework, more)
    config = config_of(found, tmp_path)
    assert (config.algorithm, config.advantages.whiten) == ("reinforce_plus_plus", whitens)
    assert config.batch.samples_per_prompt == 1
    (note,) = [note for note in found.notes if note.startswith(key)]
    assert "is 1: with one sample per prompt" in note and "would be 0" in note
    assert f"# {note}" in written(found, "a test")
    assert not [note for note in found_of(framework, "").notes if "one sample per prompt" in note]


@pytest.mark.parametrize(
    ("framework", "more"),
    [
        ("slime", "--n-samples-per-prompt 1"),
        ("skyrl", f"generator.n_samples_per_prompt=1 {ALG}advantage_estimator=rloo"),
    ],
)
def test_groups_of_one_that_would_learn_nothing_are_refused(framework: str, more: str) -> None:
    with pytest.raises(ConfigError, match=r"samples_per_prompt: got 1; .* the advantage of a single one is 0"):
        found_of(framework, more)


def test_masks_of_verl_are_of_the_inverse_ratio() -> None:
    masks = f"{BYPASS}{CORRECTION}rollout_is=token {CORRECTION}rollout_rs=\"'token_k1,seq_max_k2,token_k3'\" "
    found = settings_of("verl", masks + f"{CORRECTION}rollout_rs_threshold=\"'0.5_4.0,0.02,0.1'\"")
    assert "loss.correction.high" not in found, "ppo_clip applies no weights in bypass mode"
    first, second, third = found["loss.correction.masks"]
    assert first == {"level": "token", "low": 0.25, "high": 2.0}
    assert second == {"level": "every_token", "low": math.exp(-0.2), "high": math.exp(0.2)}
    for end in (third["low"], third["high"]):
        assert end - 1 - math.log(end) == pytest.approx(0.1, rel=1e-9)
    assert third["low"] < 1 < third["high"]
    found = settings_of("verl", f"{CORRECTION}rollout_rs=seq_mean_k3 {CORRECTION}rollout_rs_threshold=0.01")
    assert (found["loss.correction.reject_above"], found["loss.correction.reject_by"]) == (0.01, "k3")


def test_a_teacher_of_verl_has_ranks_of_its_own(tmp_path: Path) -> None:
    found = found_of("verl", TEACHER)
    config = config_of(found, tmp_path)
    assert config.algorithm == "distillation" and found.world_size == 12
    assert config.placement == {"actor, rollout, reward": "0-7", "teacher": "8-11"}
    teacher = config.teacher
    assert (teacher.path, teacher.where, teacher.max_distance) == ("/models/teacher", "advantage", 10.0)
    assert teacher.parallel is not None and teacher.parallel.tp == 2


def test_verls_forward_kl_is_a_term_of_the_loss(tmp_path: Path) -> None:
    """It replaces the policy loss, has verl's default bounds, and is the only term."""
    forward = TEACHER.replace("loss_mode=k1", "loss_mode=forward_kl_topk").replace("gradient=True", "gradient=False")
    penalized = "actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.entropy_coeff=0.1 "
    config = config_of(found_of("verl", forward + penalized), tmp_path)
    teacher = config.teacher
    assert (teacher.where, teacher.kl, teacher.rest, teacher.top_k) == ("loss", "forward", False, 128)
    assert (teacher.max_distance, teacher.min_logprob, teacher.coef) == (10.0, -10.0, 1.0)
    assert (config.algorithm, config.loss.kl.coef, config.loss.entropy_coef) == ("distillation", 0, 0)
    named = forward.replace("loss_max_clamp=10.0", "loss_max_clamp=null")
    teacher = config_of(found_of("verl", named + "distillation.distillation_loss.topk=32"), tmp_path).teacher
    assert (teacher.max_distance, teacher.top_k) == (None, 32)


def test_teachers_of_skyrl_and_slime(tmp_path: Path) -> None:
    program = "-m examples.train.on_policy_distillation.main_on_policy_distill"
    more = f"{program} {ALG}advantage_estimator=no_op {ALG}policy_loss_type=importance_sampling"
    more += f" {ALG}use_kl_loss=false {ALG}use_kl_in_reward=true trainer.ref.model.path=/models/teacher"
    config = config_of(found_of("skyrl", more), tmp_path)
    assert (config.algorithm, config.teacher.path, config.loss.kl.coef) == ("distillation", "/models/teacher", 0)
    assert config.placement == {"actor, teacher, rollout, reward": "0-3"}
    asked = "--use-opd --opd-type sglang --opd-kl-coef 0.5 --rm-url http://127.0.0.1:13141/generate"
    asked += " --custom-rm-path slime.rollout.on_policy_distillation.reward_func"
    asked += " --custom-reward-post-process-path slime.rollout.on_policy_distillation.post_process_rewards"
    with pytest.raises(ConfigError, match="the weights of the server at rm-url are unknown"):
        found_of("slime", asked)
    script = tmp_path / "run.sh"
    command = found_text(asked)
    script.write_text(f"python3 -m sglang.launch_server --model-path /models/teacher --tp 2 &\n{command}\n")
    config = config_of(imported("slime", [str(script)]), tmp_path)
    assert config.placement == {"actor, rollout, reward": "0-7", "teacher": "8-9"}
    assert (config.teacher.path, config.teacher.coef, config.reward.function) == ("/models/teacher", 0.5, "environment")


def found_text(more: str) -> str:
    from tests.unit.test_import_features import SLIME

    return SLIME.replace("MODEL", "/models/m").replace("MORE", more).replace("\n", " ")


def test_rewards_of_verl(tmp_path: Path) -> None:
    model = "reward.reward_model.enable=True reward.reward_model.model_path=/models/score"
    config = config_of(found_of("verl", model + " reward.reward_model.rollout.tensor_model_parallel_size=1"), tmp_path)
    assert config.reward_model.path == "/models/score" and config.reward.functions == ()
    assert config.placement == {"actor, rollout, reward, reward_model": "0-7"}
    parts = "algorithm.adv_estimator=gdpo reward.reward_manager.name=gdpo "
    parts += '+algorithm.gdpo_reward_keys=\'["right","form"]\' reward.custom_reward_function.path=/own.py'
    config = config_of(found_of("verl", parts), tmp_path)
    assert [(one.function, one.score_key) for one in config.reward.functions or ()] == [
        ("/own.py:compute_score", "right"),
        ("/own.py:compute_score", "form"),
    ]


def test_an_environment_is_found_where_the_program_registers_it(tmp_path: Path) -> None:
    package = tmp_path / "own" / "games"
    package.mkdir(parents=True)
    (package / "main.py").write_text("from own.games import more\nregister(id='other', entry_point='a.b:C')\n")
    (package / "more.py").write_text("raise SystemExit('run')\nregister(id='sums', entry_point='own.games.env:Sums')\n")
    script = package / "run.sh"
    text = "python -m own.games.main data.train_data=/data/a.parquet trainer.policy.model.path=/models/m"
    text += " environment.env_class=sums environment.skyrl_gym.sums.limit=3 trainer.max_training_steps=9 "
    script.write_text(text + "trainer.epochs=null trainer.train_batch_size=64 trainer.policy_mini_batch_size=64")
    config = config_of(imported("skyrl", [str(script)]), tmp_path)
    assert config.env.function == "own.games.env:Sums" and config.env.options == {"env_config": {"limit": 3}}
    script.write_text(script.read_text().replace("env_class=sums", "env_class=nobodys"))
    with pytest.raises(ConfigError, match="set your own environment as env.function"):
        imported("skyrl", [str(script)])


def test_a_loss_and_an_advantage_are_found_where_the_program_registers_them(tmp_path: Path) -> None:
    package = tmp_path / "own"
    package.mkdir()
    (package / "main.py").write_text(
        "from own.losses import steep\nimport registry as r\n"
        "def halves(token_level_rewards, response_mask, index): raise SystemExit('run')\n"
        "r.AdvantageEstimatorRegistry.register('halves', halves)\nr.OtherRegistry.register('steep', halves)\n"
    )
    (package / "losses.py").write_text("@register_policy_loss('steep')\ndef steep(log_probs): raise SystemExit\n")
    script = package / "run.sh"
    text = f"python -m own.main {ALG}advantage_estimator=halves {ALG}policy_loss_type=steep {ALG}lambd=0.9 "
    text += f"{ALG}clip_ratio_c=4 trainer.max_training_steps=9 "
    text += "data.train_data=/data/a.parquet trainer.policy.model.path=/models/m "
    script.write_text(text + "trainer.epochs=null trainer.train_batch_size=64 trainer.policy_mini_batch_size=64 $@")
    config = config_of(imported("skyrl", [str(script)]), tmp_path)
    assert (config.algorithm, config.advantages.function) == ("own", "own.main:halves")
    assert (config.advantages.gamma, config.advantages.gae_lambda) == (1.0, 0.9)
    assert (config.loss.policy, config.loss.function) == ("own", "own.losses:steep")
    assert config.loss.dual_clip == 4, "such a loss gets a dual clip"
    for more, told in {
        f"{ALG}off_policy_correction.tis_ratio_type=token": "your own loss weights its tokens itself",
        f"{ALG}advantage_batch_normalize=true": "your own advantages are used unchanged",
        f"{ALG}zero_variance_filter=true": "differ from 0 for filtered groups",
    }.items():
        with pytest.raises(ConfigError, match=told):
            imported("skyrl", [str(script), more])
    script.write_text(script.read_text().replace("policy_loss_type=steep", "policy_loss_type=nobodys"))
    with pytest.raises(ConfigError, match="policy_loss_type: 'nobodys'"):
        imported("skyrl", [str(script)])


@pytest.mark.parametrize(
    ("framework", "more", "told"),
    [
        ("skyrl", ROLLOUT_IS + GEOMETRIC + "trainer.policy_mini_batch_size=32", "equal for one mini-batch"),
        ("skyrl", ROLLOUT_IS + f"{ALG}off_policy_correction.tis_ratio_type=token", "already uses the same ratio"),
        ("verl", f"{BYPASS}{CORRECTION}loss_type=of_nobody", "bypass_mode supports the losses ppo_clip and reinforce"),
        ("verl", TEACHER.replace("loss_mode=k1", "loss_mode=forward_kl_topk"), "forward_kl_topk"),
        ("verl", "algorithm.adv_estimator=optimal_token_baseline", "_baseline requires actor_rollout_ref.actor."),
        ("verl", TEACHER.replace("use_task_rewards=False", "use_task_rewards=True"), "two losses with separate clips"),
    ],
)
def test_what_would_differ_is_refused(framework: str, more: str, told: str) -> None:
    with pytest.raises(ConfigError) as refused:
        found_of(framework, more)
    assert told in str(refused.value)


COMMAND = """uv run --extra megatron python -m skyrl.train.main_sft strategy=STRATEGY model.path=Qwen/Qwen3-0.6B
 train_datasets="['owner/talks']" train_dataset_splits="['train[:4000]']" messages_key=messages max_length=2048
 num_steps=50 batch_size=8 micro_train_batch_size_per_gpu=2 optimizer_config.lr=1e-5 optimizer_config.num_warmup_steps=3
 placement.num_gpus_per_node=4 ckpt_path="" resume_from="" MORE"""
VERL = """torchrun --standalone --nproc-per-node=4 -m verl.trainer.sft_trainer data.train_files=/data/talks.parquet
 data.train_batch_size=64 data.max_length=1024 data.max_token_len_per_gpu=2048 model.path=Qwen/Qwen3-0.6B
 engine=megatron optim=megatron optim.lr=1e-5 engine.tensor_model_parallel_size=2 trainer.total_epochs=3 MORE"""
TWO = """train_datasets="['a/b','c/d']" train_dataset_splits="['train','train[:20]']"
 train_dataset_weights="[0.8,0.2]" """


def supervised_config(folder: Path, more: str = "", strategy: str = "megatron") -> Config:
    text = COMMAND.replace("STRATEGY", strategy).replace("MORE", more).replace("\n", " ")
    path = folder / "imported.yaml"
    path.write_text(written(imported("skyrl", [text]), "a test"))
    return load_config(path)


def test_conversations_are_learnt_from_their_last_turn(tmp_path: Path) -> None:
    config = supervised_config(tmp_path, "system_key=system")
    assert (config.algorithm, config.steps, config.batch.prompts_per_step) == ("sft", 50, 8)
    train = config.data.train
    assert (train.path, train.split, train.max_rows) == ("owner/talks", "train", 4000)
    assert (train.response_key, train.learnt_turns, train.system_key) == (None, "last", "system")
    assert config.actor.micro_batch_tokens == 2 * 2048 and config.loss.normalization == "token_mean"
    assert (config.actor.parallel.tp, config.actor.parallel.pp) == (2, 2), "SkyRL's default"
    assert (config.actor.optimizer.beta2, config.actor.optimizer.warmup_steps) == (0.999, 3)
    assert config.data.max_response_tokens == 2048 and "rollout" not in config.model_fields_set
    assert config.checkpoint.resume == "none" and config.placement == {"actor": "0-3"}


def test_sources_have_weights_and_fsdp_shards(tmp_path: Path) -> None:
    more = TWO + "train_on_what=all_assistant_messages model.lora.rank=32 model.lora.alpha=16"
    config = supervised_config(tmp_path, more, strategy="fsdp")
    assert [(one.path, one.max_rows, one.weight) for one in config.data.train.sources] == [
        ("a/b", None, 0.8),
        ("c/d", 20, 0.2),
    ]
    assert config.data.train.learnt_turns == "all" and config.backend_of("actor") == "fsdp"
    assert config.model.lora and (config.model.lora.rank, config.model.lora.alpha) == (32, 16)


@pytest.mark.parametrize(
    ("more", "interval"),
    [
        ("trainer.save_freq=after_each_epoch trainer.test_freq=after_each_epoch", 15),
        ("trainer.save_freq=7", 7),
        ("trainer.save_freq=-1", 0),
    ],
)
def test_verls_counts_epochs_by_their_steps(more: str, interval: int, tmp_path: Path) -> None:
    found = imported("verl", [VERL.replace("MORE", more).replace("\n", " ")], rows=RowCounts(rows=1000))
    path = tmp_path / "imported.yaml"
    path.write_text(written(found, "a test"))
    config = load_config(path)
    assert (config.algorithm, config.steps, config.checkpoint.save_interval) == ("sft", 3 * (1000 // 64), interval)
    assert config.placement == {"actor": "0-3"} and config.actor.parallel.tp == 2
    assert config.actor.micro_batch_tokens == 2048 and config.data.train.response_key is None
    assert config.data.max_response_tokens == 1024 and "rollout" not in config.model_fields_set


def test_a_warm_up_from_0_is_the_only_one() -> None:
    def of(more: str) -> Translation:
        return imported("verl", [VERL.replace("MORE", more).replace("\n", " ")], rows=RowCounts(rows=1000))

    assert of("optim.lr_warmup_init=0 engine.use_megatron_fsdp=True").get("algorithm") == "sft"
    with pytest.raises(ConfigError, match="optim.lr_warmup_init: 1e-07"):
        of("optim.lr_warmup_init=1e-7")


def test_verls_held_out_conversations_are_those_of_the_loss(tmp_path: Path) -> None:
    more = "data.val_files=/data/held.parquet trainer.test_freq=after_each_epoch data.messages_key=talk"
    found = imported("verl", [VERL.replace("MORE", more).replace("\n", " ")], rows=RowCounts(rows=1000))
    path = tmp_path / "imported.yaml"
    path.write_text(written(found, "a test"))
    config = load_config(path)
    assert config.scores_held_out and config.data.eval is not None and config.evaluation.interval == 15
    train, held_out = config.data.train, config.data.eval
    assert held_out.path == "/data/held.parquet" and held_out.prompt_key == train.prompt_key == "talk"
    assert held_out.response_key is None and held_out.label_key is None


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ("train_dataset_splits=\"['train[10%:]']\"", "expected a whole split"),
        ("sampler=custom sampler_class_path=my.Sampler", "rows are taken at random or in order"),
        ("dummy_run_full_ctx=true", "dummy_run_full_ctx: True"),
        ("of_nobody=1", "of_nobody: 1"),
    ],
)
def test_what_would_differ_in_supervised_learning_is_refused(more: str, told: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        supervised_config(tmp_path, more)
    assert told in str(refused.value)
