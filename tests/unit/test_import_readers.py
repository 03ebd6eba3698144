"""Keys without influence: the place where the other trainer reads each, and the check of each reason for a run."""

import json
import sys
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))

from find_readers import READERS, TABLES, readers_of  # noqa: E402

from rltrain.import_config.command import imported  # noqa: E402
from rltrain.import_config.influence import CONDITIONS  # noqa: E402
from rltrain.import_config.translation import RowCounts  # noqa: E402
from tests.unit.test_import_features import SKYRL, SLIME, VERL  # noqa: E402

FOUND: Mapping[str, Mapping[str, str]] = json.loads(READERS.read_text(encoding="utf-8"))


@pytest.mark.parametrize("framework", TABLES)
def test_every_rule_names_the_file_that_reads_its_keys(framework: str) -> None:
    """Without a file, no code of the release reads the key. It is then one of another version."""
    listed = [pattern for patterns in FOUND[framework].values() for pattern in patterns.split()]
    assert sorted(listed) == sorted(TABLES[framework]), "run: python tools/find_readers.py FOLDER"


def test_readers_are_found_in_the_sources(tmp_path: Path) -> None:
    """A key with a section is read where its section is named too. Texts in comments do not count."""
    files = {
        "a.py": "x = config.actor.lr  # .never\n",
        "b.py": "y = config.critic\nz = y.lr\n",
        "c.py": "def main(args):\n    args.save_all\n",
        "d.py": 'w = config.get("depth", 3)\nclass C:\n    width: int = 4\n',
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    patterns = ("critic.lr", "actor.lr", "save-all", "depth", "width", "never", "actor.*")
    assert readers_of(tmp_path, patterns, {}) == {
        "critic.lr": "b.py",
        "actor.lr": "a.py",
        "save-all": "c.py",
        "depth": "d.py",
        "width": "d.py",
        "never": "",
        "actor.*": "a.py",
    }


# Runs for which a reason holds, and others for which it does not. Parts in front of "|" are replaced.

A, R = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout."
T, P, G = "trainer.algorithm.", "trainer.policy.", "generator."
TEACHER = "distillation.distillation_loss."
RUNS = {
    "slime": (
        SLIME,
        "",
        "--advantage-estimator ppo --use-kl-loss --kl-loss-coef 0.1 --entropy-coef 0.1",
        "--use-tis --partial-rollout --eval-prompt-data a /d/a.jsonl --eval-interval 5 --eval-max-prompt-len 512",
        "--loss-type sft_loss --rollout-function-path slime.rollout.sft_rollout.generate_rollout",
        "--num-rollout 9 | --num-epoch 1 --dynamic-sampling-filter-path a.check_reward_nonzero_std",
        "--colocate | --rollout-num-gpus 4 --num-steps-per-rollout 2",
        "--pipeline-model-parallel-size 2 --enable-mtp-training --mtp-num-layers 1 --use-routing-replay",
        "--rollout-num-gpus-per-engine 4 | --rollout-num-gpus-per-engine 1 --custom-rm-path a.b",
        "--custom-rm-path slime.rollout.on_policy_distillation.reward_func --custom-generate-function-path a.b",
        "--tensor-model-parallel-size 2 | --train-backend fsdp --kl-coef 0.1",
        "--lora-rank 8",
        "--use-tis --custom-tis-function-path a.mis.compute_mis_weights_with_cp --custom-config-path mis.yaml",
    ),
    "verl": (
        VERL,
        "",
        "algorithm.adv_estimator=gae algorithm.use_kl_in_reward=True algorithm.kl_ctrl.type=adaptive",
        f"{A}use_kl_loss=True {A}policy_loss.loss_mode=sapo reward.reward_model.enable=True "
        "reward.reward_model.model_path=/m",
        f"{A}policy_loss.loss_mode=clip_cov actor_rollout_ref.model.path=/m/Qwen2.5-VL-7B data.val_files=/d/v.parquet "
        f"trainer.test_freq=5 {R}val_kwargs.do_sample=True {R}val_kwargs.temperature=0.6",
        f"{A}policy_loss.loss_mode=kl_cov actor_rollout_ref.model.lora_rank=8 {A}ppo_mini_batch_size=32 "
        "trainer.resume_mode=resume_path trainer.resume_from_path=/a",
        f"{A}strategy=megatron {A}megatron.router_replay.mode=R2 {A}optim.lr_scheduler_type=cosine "
        f"{A}optim.lr_warmup_steps=5 {R}skip_rollout=True",
        f"{A}strategy=veomni algorithm.adv_estimator=reinforce_plus_plus reward_model.sandbox_fusion.url=http://b "
        f"{R}multi_turn.enable=True trainer.v1.trainer_mode=separate_async",
        "-m verl.experimental.fully_async_policy.fully_async_main async_training.use_rollout_log_probs=True "
        "rollout.total_rollout_steps=640 trainer.total_training_steps=null",
        "-m recipe.dapo.main_dapo algorithm.filter_groups.enable=True algorithm.rollout_correction.rollout_is=token "
        "trainer.total_training_steps=null trainer.total_epochs=1",
        "distillation.enabled=True distillation.nnodes=1 distillation.teacher_models.a.model_path=/t "
        f"{TEACHER}use_task_rewards=False {TEACHER}loss_mode=forward_kl_topk",
        f"{A}ppo_micro_batch_size=8 data.val_batch_size=3 {A}state_masking=False "
        f"actor_rollout_ref.agent.enable_agent=False {A}fsdp_config.mixed_precision.param_dtype=fp16",
    ),
    "skyrl": (
        SKYRL,
        "",
        f"{T}advantage_estimator=gae {T}use_kl_loss=false trainer.resume_mode=from_path {T}use_entropy_loss=true",
        f"{T}policy_loss_type=sapo {T}use_kl_loss=false {T}use_kl_in_reward=true trainer.strategy=megatron "
        f"{P}model.lora.rank=8 {P}megatron_config.moe_aux_loss_coeff=0.1 "
        f"{P}megatron_config.moe_router_load_balancing_type=aux_loss {P}model.fake_int4_qat.enabled=true "
        f"{P}model.fake_int4_qat.bf16_base_path=/m {P}megatron_config.moe_enable_routing_replay=true",
        f"{T}policy_loss_type=clip_cov trainer.placement.colocate_all=false {T}dynamic_sampling.type=filter "
        f"{T}advantage_estimator=rloo {T}overlong_buffer_len=64",
        f"{T}policy_loss_type=kl_cov {T}off_policy_correction.tis_ratio_type=token "
        "-m skyrl.train.entrypoints.fully_async trainer.placement.colocate_all=false",
        f"{T}policy_loss_type=cispo {P}model.path=/m/Qwen2.5-VL-7B data.val_data=null "
        "environment.skyrl_gym.gsm8k.bonus=1",
        f"trainer.epochs=null | trainer.epochs=1 trainer.max_training_steps=null {T}policy_loss_type=dppo "
        f"environment.env_class=search {G}max_turns=3 environment.skyrl_gym.text2sql.db_path=/d",
        "generator.inference_engine.num_engines=4 | generator.inference_engine.num_engines=2 "
        "generator.inference_engine.tensor_parallel_size=2",
        "generator.inference_engine.external_server_urls=['http://a:1'] trainer.placement.colocate_all=false "
        "generator.inference_engine.run_engines_locally=false",
    ),
}
ALWAYS = {"the program is known"}
"""Commands of other programs are not read."""


def conditions_in(folder: Path, framework: str) -> dict[str, set[bool]]:
    """Returns whether each conditional reason of the framework's rules held, over all runs."""
    text, *runs = RUNS[framework]
    (folder / "mis.yaml").write_text("{use_tis: true, tis_level: token, tis_mode: clip, tis_upper_bound: 2.0}")
    held = defaultdict[str, set[bool]](set)
    for run in runs:
        given, _, more = run.rpartition(" | ")
        script = folder / "run.sh"
        script.write_text(text.replace(given, "", 1).replace("MODEL", "/m").replace("MORE", more).replace("\n", " "))
        found = imported(framework, [str(script)], rows=RowCounts(rows=6400), allow_differences=True)
        for name, holds in {**CONDITIONS, **found.rules.conditions}.items():
            held[name].add(bool(holds(found)))
    return held


@pytest.mark.parametrize("framework", RUNS)
def test_every_conditional_reason_is_checked_for_the_run(framework: str, tmp_path: Path) -> None:
    held = conditions_in(tmp_path, framework)
    used = {reason for reasons in TABLES[framework].values() for reason in reasons}
    constant = {name for name, values in held.items() if name in used and len(values) == 1}
    assert constant == ALWAYS & used, "no run shows that the reason holds, or that it does not"
