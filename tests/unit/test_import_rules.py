"""Rules for single keys of other trainers: what they set, and what they refuse."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from rltrain.errors import ConfigError
from rltrain.import_config.command import imported
from rltrain.import_config.translation import Translation
from tests.unit.test_import_features import config_of, found_of

SLIME: list[tuple[str, dict[str, Any]]] = [
    (
        "--rollout-max-context-len 1200 --rollout-stop END",
        {"rollout.max_context_tokens": 1536, "rollout.sampling.stop": ["END"]},
    ),
    (
        "--advantage-estimator ppo --gamma 0.9 --normalize-advantages --value-clip 0.3",
        {
            "algorithm": "ppo",
            "advantages.gae_lambda": 1.0,
            "advantages.gamma": 0.9,
            "advantages.whiten": True,
            "critic.value_clip": 0.3,
            "placement.actor, critic, rollout, reward": "0-7",
        },
    ),
    (
        "--advantage-estimator gspo --use-rollout-logprobs --use-opsm",
        {
            "algorithm": "grpo",
            "loss.policy": "gspo",
            "loss.old_logprobs": "rollout",
            "loss.correction.opsm_delta": 1e-4,
        },
    ),
    ("--fp16 --recompute-granularity full", {"model.dtype": "float16", "model.recompute": "full"}),
    (
        "--recompute-granularity full --recompute-method block --recompute-num-layers 3",
        {"model.recompute": {"granularity": "full", "layers": 3}},
    ),
    (
        "--recompute-granularity selective --recompute-modules mlp",
        {"model.recompute": {"granularity": "selective", "modules": ["mlp"]}},
    ),
    (
        "--pipeline-model-parallel-size 4 --num-layers 10 --decoder-last-pipeline-num-layers 1",
        {"actor.parallel.layers_per_stage": [3, 3, 3, 1]},
    ),
    (
        "--pipeline-model-parallel-size 4 --num-layers 10 --decoder-first-pipeline-num-layers 2 "
        "--decoder-last-pipeline-num-layers 2",
        {"actor.parallel.layers_per_stage": [2, 3, 3, 2]},
    ),
    (
        "--num-steps-per-rollout 4 --lr-warmup-fraction 0.25",
        {"batch.mini_batches": 4, "actor.optimizer.warmup_steps": 9},
    ),
    (
        "--kl-coef 0.02 --ref-update-interval 5",
        {"loss.kl.coef": 0.02, "loss.kl.where": "reward", "loss.kl.estimator": "k1"},
    ),
    ("--use-kl-loss --kl-loss-coef 0.1 --ref-update-interval 5", {"reference.refresh_every": 5}),
    (
        "--dynamic-sampling-filter-path slime.filter_hub.check_reward_nonzero_std",
        {"batch.dynamic_sampling.filter": "rewards_differ"},
    ),
    (
        "--update-weights-interval 2 --fully-async --max-weight-staleness 3 --over-sampling-batch-size 48",
        {
            "schedule.mode": "asynchronous",
            "schedule.max_staleness": 3,
            "schedule.sync_every": 2,
            "schedule.partial_rollouts": True,
            "schedule.oversampling": 0.5,
        },
    ),
    (
        "--partial-rollout --mask-offpolicy-in-partial-rollout --update-weight-mode delta",
        {"schedule.partial_rollouts": True, "schedule.on_stale": "mask", "weight_sync.delta": {}},
    ),
    ("--rm-type remote_rm --rm-url http://judge:8000/score", {"reward.function": "http://judge:8000/score"}),
    (
        "--custom-rm-path rules.score --reward-key acc",
        {"reward.function": "rules:score", "reward.options": {"reward_key": "acc"}},
    ),
    (
        "--eval-prompt-data test /data/t.jsonl --eval-max-response-len 4096",
        {"rollout.max_context_tokens": 512 + 4096},
    ),
    (
        "--sglang-max-running-requests 64 --sglang-enable-dp-attention --sglang-cuda-graph-bs 1 2 x",
        {"rollout.max_running_requests": 64, "rollout.sglang.args": {"cuda_graph_bs": [1, 2, "x"]}},
    ),
    (
        "--use-opd --opd-type megatron --opd-teacher-load /models/teacher --opd-kl-coef 0.5",
        {"teacher.path": "/models/teacher", "teacher.coef": 0.5, "placement.actor, rollout, reward, teacher": "0-7"},
    ),
]
SLIME_REFUSED = [
    ("--advantage-estimator raft", "advantage-estimator: 'raft': there is no algorithm of this name"),
    ("--kl-coef 0.1 --use-kl-loss --kl-loss-coef 0.1", "the penalty is already in the loss"),
    ("--dynamic-sampling-filter-path mine.check", "set it as batch.dynamic_sampling.filter"),
    ("--rollout-function-path mine.rollout", "your own rollout loop becomes an environment"),
    ("--rm-type f1", "set your function as reward.function"),
    (
        "--pipeline-model-parallel-size 4 --num-layers 12 --decoder-last-pipeline-num-layers 1",
        "do not divide evenly over 3 stages",
    ),
]
CONVERSATIONS = """python3 train.py --actor-num-nodes 1 --actor-num-gpus-per-node 8 --hf-checkpoint /models/m
 --prompt-data /data/a.parquet --input-key messages --loss-type sft_loss --num-rollout 9 --rollout-batch-size 128
 --global-batch-size 128 --use-dynamic-batch-size --max-tokens-per-gpu 4096 --debug-train-only
 --attention-dropout 0.0 --hidden-dropout 0.0 --disable-compute-advantages-and-returns"""

ACTOR, ENGINE, ALGORITHM = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout.", "algorithm."
MEGATRON = f"{ACTOR}strategy=megatron {ACTOR}megatron."
TRANSFORMER = f"{ACTOR}megatron.override_transformer_config."
KL_IN_REWARD = f"{ALGORITHM}use_kl_in_reward=True {ALGORITHM}kl_ctrl.kl_coef=0.01 "
MODEL = "reward.reward_model."
LABEL = "reward_model.ground_truth"
VERL: list[tuple[str, dict[str, Any]]] = [
    (
        f"{KL_IN_REWARD}{ALGORITHM}kl_penalty=mse {ALGORITHM}kl_ctrl.type=adaptive {ALGORITHM}kl_ctrl.horizon=100",
        {
            "loss.kl.coef": 0.01,
            "loss.kl.where": "reward",
            "loss.kl.estimator": "k2",
            "loss.kl.adaptive": {"target": 0.1, "horizon": 100},
        },
    ),
    (
        f"{ALGORITHM}adv_estimator=reinforce_plus_plus {ALGORITHM}gamma=0.95",
        {"algorithm": "reinforce_plus_plus", "advantages.gamma": 0.95, "advantages.whiten": True},
    ),
    (f"{ALGORITHM}adv_estimator=grpo_passk", {"algorithm": "pass_at_k", "advantages.k": 5}),
    (f"{ALGORITHM}norm_adv_by_std_in_grpo=False", {"advantages.normalize_std": False}),
    (
        f"-m recipe.dapo.main_dapo {ALGORITHM}filter_groups.enable=True "
        f"{ALGORITHM}filter_groups.max_num_gen_batches=10 data.gen_batch_size=192",
        {"batch.dynamic_sampling.filter": "rewards_differ", "batch.dynamic_sampling.max_drawn": 30.0},
    ),
    (
        f"{ALGORITHM}rollout_correction.rollout_is=token {ALGORITHM}rollout_correction.rollout_is_threshold=0.5_5.0",
        {"loss.correction.method": "icepop", "loss.correction.low": 0.5, "loss.correction.high": 5.0},
    ),
    (f"{ACTOR}policy_loss.loss_mode=gspo", {"loss.policy": "gspo", "loss.normalization": "sequence_mean"}),
    (f"{ACTOR}use_prefix_grouper=True", {"actor.share_prefixes": True}),
    (f"{ACTOR}use_prefix_grouper=False", {"actor.share_prefixes": None}),
    (f"{ACTOR}ppo_micro_batch_size_per_gpu=4", {"actor.micro_batch_tokens": 4 * (512 + 512)}),
    (
        f"{ACTOR}optim.lr=1e-5 {ACTOR}optim.min_lr_ratio=0.1 {ACTOR}optim.lr_scheduler_type=cosine",
        {"actor.optimizer.min_lr": pytest.approx(1e-6), "actor.optimizer.decay": "cosine"},
    ),
    (
        f"{MEGATRON}tensor_model_parallel_size=2 {TRANSFORMER}recompute_granularity=full "
        f"{TRANSFORMER}recompute_method=block {TRANSFORMER}recompute_num_layers=2",
        {"actor.parallel.sequence_parallel": True, "model.recompute": {"granularity": "full", "layers": 2}},
    ),
    (f"{MEGATRON}virtual_pipeline_model_parallel_size=2", {"actor.parallel.vpp": None}),
    (
        f"{MEGATRON}tensor_model_parallel_size=4 {ACTOR}use_kl_loss=True "
        "actor_rollout_ref.ref.megatron.tensor_model_parallel_size=2",
        {"actor.parallel.tp": 4, "reference.parallel.tp": 2, "reference.parallel.pp": 1},
    ),
    (
        "actor_rollout_ref.hybrid_engine=False rollout.nnodes=1 rollout.n_gpus_per_node=4 "
        "async_training.trigger_parameter_sync_step=4 async_training.staleness_threshold=0.5 "
        "async_training.partial_rollout=True",
        {
            "placement.actor": "0-7",
            "placement.rollout, reward": "8-11",
            "schedule.mode": "asynchronous",
            "schedule.max_staleness": 6,
            "schedule.sync_every": 4,
            "schedule.partial_rollouts": True,
        },
    ),
    (
        f"data.train_batch_size=0 {ACTOR}ppo_mini_batch_size=32 async_training.require_batches=2",
        {"batch.prompts_per_step": 64, "batch.mini_batches": 2},
    ),
    (
        "data.truncation=left data.train_max_samples=100 trainer.resume_mode=disable",
        {"data.on_bad_row": "skip", "data.train.max_rows": 100, "checkpoint.resume": "none"},
    ),
    (
        "trainer.resume_mode=resume_path trainer.resume_from_path=/runs/7",
        {"checkpoint.resume": "/runs/7"},
    ),
    (
        f"data.val_files=/data/t.parquet {ENGINE}val_kwargs.do_sample=True {ENGINE}val_kwargs.n=4 "
        f"{ENGINE}val_kwargs.temperature=0.6 {ENGINE}val_kwargs.top_k=20",
        {
            "evaluation.sets": [
                {
                    "name": "val",
                    "data": {"path": "/data/t.parquet", "prompt_key": "prompt", "label_key": LABEL},
                    "sampling": {"temperature": 0.6, "top_p": 1.0, "top_k": 20},
                    "samples_per_prompt": 4,
                }
            ]
        },
    ),
    (
        f"{ENGINE}name=sglang {ENGINE}enforce_eager=True {ENGINE}data_parallel_size=2",
        {"rollout.sglang.args": {"mem_fraction_static": 0.5, "disable_cuda_graph": True}},
    ),
    (
        "custom_reward_function.path=/r/score.py custom_reward_function.name=score "
        "reward.reward_manager.name=dapo "
        "reward.reward_kwargs.overlong_buffer_cfg.enable=True reward.reward_kwargs.overlong_buffer_cfg.len=128",
        {"advantages.overlong_penalty": {"buffer_tokens": 128, "factor": 1.0}},
    ),
    (
        f"{MODEL}enable=True {MODEL}model_path=/models/judge {MODEL}enable_resource_pool=True {MODEL}nnodes=1 "
        f"{MODEL}n_gpus_per_node=4",
        {"reward_model.path": "/models/judge", "placement.reward_model": "8-11"},
    ),
]
VERL_REFUSED = [
    (f"{KL_IN_REWARD}{ACTOR}use_kl_loss=True", "the penalty is already in the loss; one place is possible"),
    (f"{KL_IN_REWARD}{ENGINE}n=1", "a single sample per prompt has its KL per token here"),
    (f"{ACTOR}policy_loss.loss_mode=mine", "policy_loss.loss_mode: 'mine'"),
    (f"{ACTOR}loss_agg_mode=seq-mean-token-sum-norm {ACTOR}loss_scale_factor=7", "divided by the longest response"),
    (f"{ACTOR}optim.lr_scheduler_type=wsd", "schedules of the learning rate here: constant, cosine, linear"),
    (
        f"{ALGORITHM}rollout_correction.rollout_rs=seq_sum_k2 {ALGORITHM}rollout_correction.rollout_rs_threshold=1",
        "bounds on a sum of k2 or k3 over a sequence are not supported",
    ),
    (f"{ALGORITHM}adv_estimator=gae critic.ppo_mini_batch_size=16", "actor and critic have the same mini-batches"),
    ("reward.reward_manager.name=prime_time", "your own manager becomes a reward function here"),
    (f"{ENGINE}multi_turn.enable=True", "turns come from an environment here: env.function"),
    ("reward.reward_manager.name=gdpo", "at least two algorithm.gdpo_reward_keys"),
    (f"{MODEL}enable=True", "reward_model.*model_path: expected the model's checkpoint"),
    ("distillation.enabled=True", "expected a teacher's checkpoint"),
]

TRAINER, GENERATOR, ALG = "trainer.", "generator.", "trainer.algorithm."
OFF_POLICY = f"{ALG}off_policy_correction."
SKYRL: list[tuple[str, dict[str, Any]]] = [
    (f"{ALG}grpo_norm_by_std=false {ALG}loss_reduction=token_mean_legacy", {"advantages.normalize_std": False}),
    (
        f"{ALG}advantage_estimator=reinforce++ {ALG}gamma=0.9 {ALG}use_entropy_loss=true",
        {"algorithm": "reinforce_plus_plus", "advantages.gamma": 0.9, "loss.entropy_coef": 0.01},
    ),
    (
        f"{ALG}dynamic_sampling.type=filter {ALG}zero_variance_filter=true",
        {"batch.dynamic_sampling.filter": "rewards_differ", "batch.dynamic_sampling.max_drawn": 30.0},
    ),
    (
        f"{ALG}policy_loss_type=cispo {ALG}cispo.cispo_anchor=rollout",
        {"loss.policy": "cispo", "loss.old_logprobs": "rollout", "loss.clip_low": 1.0, "loss.clip_high": 4.0},
    ),
    (f"{ALG}policy_loss_type=kl_cov", {"loss.kl_cov.ratio": 0.2, "loss.kl_cov.coef": 1.0}),
    (
        f"{OFF_POLICY}tis_ratio_type=sequence",
        {"loss.correction.level": "sequence", "loss.correction.high": 5.0},
    ),
    (f"{ALG}use_tis=true", {"loss.correction.level": "token", "loss.correction.high": 2.0}),
    (
        f"{OFF_POLICY}outlier_token_is_threshold_low=1e-4 {OFF_POLICY}outlier_token_is_threshold_high=100",
        {"loss.correction.masks": [{"level": "every_token", "low": 1e-4, "high": 100.0}]},
    ),
    (
        f"{ALG}overlong_buffer_len=64 {ALG}overlong_buffer_penalty_factor=0.5",
        {"advantages.overlong_penalty": {"buffer_tokens": 64, "factor": 0.5}},
    ),
    (f"{TRAINER}max_tokens_per_microbatch=5000", {"actor.micro_batch_tokens": 5000}),
    (
        f"{TRAINER}placement.colocate_all=false {TRAINER}placement.colocate_policy_ref=false",
        {"placement.actor": "0-3", "placement.reference": "4-7", "placement.rollout, reward": "8-11"},
    ),
    (f"{TRAINER}resume_mode=null", {"checkpoint.resume": "none"}),
    (f"{TRAINER}resume_mode=from_path {TRAINER}resume_path=/runs/7", {"checkpoint.resume": "/runs/7"}),
    (
        f"{TRAINER}strategy=megatron {TRAINER}policy.megatron_config.moe_router_load_balancing_type=aux_loss "
        f"{TRAINER}policy.megatron_config.moe_aux_loss_coeff=1e-3",
        {"model.moe.aux_loss_coef": 1e-3},
    ),
    (f"{GENERATOR}sampling_params.stop=END data.val_data=null", {"rollout.sampling.stop": ["END"]}),
    (f"{TRAINER}fully_async.enabled=true", {"schedule.mode": "asynchronous", "schedule.max_staleness": 4}),
    (
        f"{GENERATOR}inference_engine.backend=sglang {GENERATOR}inference_engine.enforce_eager=true "
        f"{GENERATOR}inference_engine.engine_init_kwargs.quantization=fp8",
        {"rollout.dtype": "fp8"},
    ),
]
SKYRL_REFUSED = [
    (f"{ALG}use_kl_in_reward=true {GENERATOR}n_samples_per_prompt=1", "a single sample per prompt has its KL per tok"),
    (f"{ALG}advantage_estimator=mine", "no algorithm here has this estimator"),
    (f"{ALG}dynamic_sampling.type=replace", "only filter is supported"),
    (f"{OFF_POLICY}sequence_mask_metric=sum", "sequence_mask_metric must be "),
    (f"{ALG}advantage_estimator=gae {TRAINER}critic_mini_batch_size=32", "actor and critic have the same mini-batches"),
    (
        f"{TRAINER}placement.colocate_all=false {TRAINER}placement.ref_num_gpus_per_node=2",
        "num_ref_gpus 2 must be the same when colocate_policy_ref is true",
    ),
    (f"{TRAINER}placement.ref_num_gpus_per_node=2", r"num_ref_gpus \(2\) must be the same when colocating all"),
    (f"{GENERATOR}inference_engine.engine_init_kwargs.quantization=int8", "engines here support only fp8"),
]


def cases(framework: str, table: list[tuple[str, Any]]) -> list[Any]:
    return [pytest.param(framework, more, expected, id=f"{framework} {more}") for more, expected in table]


def values_of(found: Translation) -> Mapping[str, Any]:
    return {path: one.value for path, one in found.settings.items()}


@pytest.mark.parametrize(
    ("framework", "more", "expected"), [*cases("slime", SLIME), *cases("verl", VERL), *cases("skyrl", SKYRL)]
)
def test_what_keys_set(framework: str, more: str, expected: dict[str, Any], tmp_path: Path) -> None:
    found = found_of(framework, more)
    values = values_of(found)
    assert {path: values.get(path) for path in expected} == expected
    config_of(found, tmp_path)


@pytest.mark.parametrize(
    ("framework", "more", "said"),
    [*cases("slime", SLIME_REFUSED), *cases("verl", VERL_REFUSED), *cases("skyrl", SKYRL_REFUSED)],
)
def test_what_keys_are_refused(framework: str, more: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        found_of(framework, more)


def test_conversations_of_slime_have_no_engine_and_fill_a_micro_batch(tmp_path: Path) -> None:
    text = CONVERSATIONS.replace("\n", " ")
    found = imported("slime", [text])
    config = config_of(found, tmp_path)
    assert config.algorithm == "sft" and config.placement == {"actor": "0-7"} and found.world_size == 8
    assert (config.data.max_prompt_tokens, config.data.max_response_tokens) == (4096, 4096)
    assert config.loss.normalization == "sequence_mean" and config.data.train.response_key is None
    with pytest.raises(ConfigError, match="conversations come from files here"):
        imported("slime", [f"{text} --rollout-function-path mine.rows"])


RLINF: dict[str, Any] = {
    "cluster": {"num_nodes": 1, "component_placement": {"actor,rollout": "0-7"}},
    "runner": {"max_steps": 5, "seq_length": 2048},
    "algorithm": {"group_size": 16},
    "data": {"max_prompt_length": 1024, "train_data_paths": ["/data/a.jsonl"], "rollout_batch_size": 32},
    "actor": {"model": {"tensor_model_parallel_size": 4}, "optim": {"lr": 2e-6}},
    "rollout": {"model": {"model_path": "/models/m"}, "tensor_parallel_size": 2},
}


def of_rlinf(folder: Path, **more: dict[str, Any]) -> Translation:
    """Returns the translation of a file of RLinf with further keys in its sections."""
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump({name: {**RLINF.get(name, {}), **more.get(name, {})} for name in {*RLINF, *more}}))
    return imported("rlinf", [str(path)])


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        (
            {"rollout": {"gpu_memory_utilization": 0.6, "enforce_eager": True, "sglang": {"attention_backend": "fa3"}}},
            {
                "rollout.sglang.args": {
                    "mem_fraction_static": 0.6,
                    "disable_cuda_graph": True,
                    "attention_backend": "fa3",
                }
            },
        ),
        (
            {"algorithm": {"group_size": 16, "kl_beta": 0.01, "kl_penalty_type": "k2", "clip_ratio_c": 3.0}},
            {
                "loss.kl.coef": 0.01,
                "loss.kl.estimator": "k2",
                "loss.dual_clip": 3.0,
                "placement.actor, rollout, reward, reference": "0-7",
            },
        ),
        (
            {"algorithm": {"importance_sampling_fix": True, "importance_sampling_clip": 5.0, "group_size": 8}},
            {"loss.correction.high": 5.0, "batch.samples_per_prompt": 8},
        ),
        (
            {
                "actor": {"enable_offload": True, "optim": {"lr": 2e-6}, "lr_sched": {"max_lr": 1e-5}},
                "rollout": {"enable_offload": True},
            },
            {"actor.offload": True, "rollout.offload": True, "actor.optimizer.lr": 2e-6},
        ),
        (
            {
                "actor": {"model": {"sequence_parallel": True, "tensor_model_parallel_size": 2}},
                "runner": {"enable_dynamic_batch_size": True, "max_tokens_per_mbs": 9000},
            },
            {"actor.parallel.sequence_parallel": True, "actor.micro_batch_tokens": 9000},
        ),
        (
            {
                "data": {"filter_prompt_by_length": True, "apply_chat_template": False, "val_data_paths": ["/v.jsonl"]},
                "runner": {"val_check_interval": 5},
            },
            {
                "data.on_bad_row": "skip",
                "data.chat_template": "never",
                "data.eval.path": "/v.jsonl",
            },
        ),
        (
            {"reward": {"reward_scale": 5}, "actor": {"model": {"recompute_granularity": "full"}}},
            {"reward.functions": [{"function": "math", "weight": 10.0}], "model.recompute": "full"},
        ),
    ],
)
def test_what_keys_of_rlinf_set(more: dict[str, Any], expected: dict[str, Any], tmp_path: Path) -> None:
    found = of_rlinf(tmp_path, **more)
    values = values_of(found)
    assert {path: values.get(path) for path in expected} == expected
    config_of(found, tmp_path)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"algorithm": {"adv_type": "raft"}}, "no algorithm here has this estimator"),
        (
            {"algorithm": {"group_size": 16, "sampling_params": {"do_sample": False}}},
            "temperature: got 0; expected above",
        ),
        ({"algorithm": {"loss_type": "embodied"}}, "only the loss of PPO is supported"),
        ({"reward": {"reward_type": "vqa"}}, "set your function as reward.function"),
        ({"reward": {"use_reward_model": True}}, "place role reward_model"),
        ({"algorithm": {"adv_type": "gae"}}, "reward_min_val: -1.0: a wrong answer has -1 there and 0 here"),
        ({"runner": {"task_type": "sft"}}, "expected the task reasoning or coding_online_rl or math"),
        ({"algorithm": {"max_num_gen_batches": 3}}, "max_num_gen_batches: 3: it has no counterpart"),
        ({"cluster": {"component_placement": {"actor,painter": "0-7"}}}, "painter is not a role here"),
        (
            {"cluster": {"component_placement": {"actor": {"node_group": "blue", "placement": "0-7"}}}},
            "there is no such node group",
        ),
    ],
)
def test_what_keys_of_rlinf_are_refused(more: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=said):
        of_rlinf(tmp_path, **more)


def test_rlinfs_rewards_of_right_and_wrong_answers(tmp_path: Path) -> None:
    """Wrong answers have minus the scale by default."""
    assert of_rlinf(tmp_path).get("reward.functions") == [{"function": "math", "weight": 2.0}]
    ends = {"reward_min_val": 0, "reward_max_val": 1}
    assert of_rlinf(tmp_path, reward=ends).get("reward.function") == "math"
    placed = {"component_placement": {"actor,rollout,critic": "0-7"}}
    ppo = of_rlinf(tmp_path, reward=ends, algorithm={"adv_type": "gae"}, cluster=placed)
    assert ppo.get("algorithm") == "ppo" and ppo.get("reward.function") == "math"


def test_rlinfs_schedule_and_types_by_backend(tmp_path: Path) -> None:
    """Warm-up is a fraction of lr_decay_iters. FSDP computes in another type than it stores."""
    sched = {"lr_warmup_fraction": 0.1, "lr_decay_iters": 50, "lr_warmup_iters": 9}
    assert of_rlinf(tmp_path, actor={"lr_sched": sched}).get("actor.optimizer.warmup_steps") == 5
    own = {"mixed_precision": {"param_dtype": "fp16"}}
    sharded = {"training_backend": "fsdp", "lr_sched": sched, "model": {"precision": "fp32"}, "fsdp_config": own}
    found = of_rlinf(tmp_path, actor=sharded)
    assert found.get("model.dtype") == "float16" and not found.get("actor.optimizer.warmup_steps")
    with pytest.raises(ConfigError, match="actor.model.precision: 'bf16': FSDP trains weights of this type"):
        of_rlinf(tmp_path, actor={**sharded, "model": {"precision": "bf16"}})
    with pytest.raises(ConfigError, match="lr_scheduler: 'cosine': set actor.optimizer.decay"):
        of_rlinf(tmp_path, actor={**sharded, "optim": {"lr_scheduler": "cosine"}})


UNREAD = [
    ("algorithm", {"sampling_params": {"repetition_penalty": 1.1}}),
    ("data", {"system_prompt": "Be brief."}),
    ("runner", {"resume_dir": "/runs/7"}),
    ("rollout", {"pipeline_parallel_size": 2}),
    ("actor", {"optim": {"optimizer": "sgd"}}),
    ("actor", {"model": {"is_lora": True}}),
]


@pytest.mark.parametrize(("section", "given"), UNREAD)
def test_no_key_of_rlinf_vanishes_with_its_section(section: str, given: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"{section}.*: (it has no counterpart|optimizers here)"):
        of_rlinf(tmp_path, **{section: given})


def test_rlinfs_scale_of_a_mean_over_tokens(tmp_path: Path) -> None:
    """With engines of their own, losses there are larger by the number of replicas."""
    scaled, longest = {"use_valid_token_scale": True}, {"sampling_params": {"max_new_tokens": 1024}}
    apart = {"component_placement": {"actor": "0-7", "rollout": "8-15"}}
    optim = {"model": {"tensor_model_parallel_size": 4}, "optim": {"lr": 2e-6, "clip_grad": 0.8}}
    found = of_rlinf(tmp_path, algorithm={**scaled, **longest}, cluster=apart, actor=optim)
    assert found.get("loss.normalization") == "dr_grpo" and found.get("actor.optimizer.clip_grad") == 0.4
    alone = of_rlinf(tmp_path, algorithm={"n_minibatches": 1, **scaled})
    assert alone.get("loss.normalization") == "token_mean"
    with pytest.raises(ConfigError, match="use_valid_token_scale: True: it has no counterpart"):
        of_rlinf(tmp_path, algorithm={"n_minibatches": 2, **scaled})


def test_rlinf_normalizes_advantages_of_every_algorithm(tmp_path: Path) -> None:
    def of(kind: str, normalizes: bool) -> Translation:
        return of_rlinf(tmp_path, algorithm={"adv_type": kind, "normalize_advantages": normalizes}, reward=NOUGHT)

    assert of("grpo", normalizes=True).get("advantages.whiten") is True
    found = of("grpo", normalizes=False)
    assert [one.key for one in found.leftovers if one.key.endswith("normalize_advantages")]
    assert of("reinpp", normalizes=True).get("advantages.whiten") is True
    assert of("reinpp", normalizes=False).get("advantages.whiten") is True, "reinpp itself normalizes"
    assert of("raw", normalizes=False).get("advantages.whiten") is False


NOUGHT = {"reward_min_val": 0.0}
"""Rewards of 0 for wrong answers."""


def test_rlinfs_estimators_of_its_own(tmp_path: Path) -> None:
    def of(kind: str, **more: Any) -> Translation:
        return of_rlinf(tmp_path, algorithm={"adv_type": kind, **more}, reward=NOUGHT)

    assert of("raw").get("algorithm") == "reinforce_plus_plus"
    assert of("reinpp", use_reinpp_baseline=True).get("algorithm") == "reinforce_plus_plus_baseline"
    found = of("reinpp", reinpp_kl_beta=0.01, kl_penalty_type="k1")
    assert values_of(found)["loss.kl.where"] == "reward" and found.get("loss.kl.coef") == 0.01
    assert "reference" in found.placed
    unread = of("grpo", reinpp_kl_beta=0.01)
    assert not unread.get("loss.kl.coef") and "reference" not in unread.placed
    with pytest.raises(ConfigError, match="remove one of both"):
        of("reinpp", reinpp_kl_beta=0.01, kl_beta=0.01)
    assert of("grpo_dynamic", advantage_mode="trajectory").get("algorithm") == "grpo"
    with pytest.raises(ConfigError, match="advantage_mode: 'turn': the samples of a prompt are compared"):
        of("grpo_dynamic")
    assert of("grpo", clip_log_ratio_max=20).get("algorithm") == "grpo"
    with pytest.raises(ConfigError, match="clip_log_ratio_max: 2"):
        of("grpo", clip_log_ratio_max=2)


def test_an_unknown_estimator_of_rlinf_loses_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    given = {"adv_type": "mine", "ratio_clip_eps": 0.3, "loss_agg_func": "seq-mean-token-mean", "clip_ratio_c": 3.0}
    path.write_text(yaml.safe_dump({**RLINF, "algorithm": {**RLINF["algorithm"], **given}}))
    found = imported("rlinf", [str(path)], allow_differences=True)
    assert [one.key for one in found.differences] == ["algorithm.adv_type"]
    assert (found.get("loss.clip_high"), found.get("loss.normalization")) == (0.3, "sequence_mean")
    assert found.get("loss.dual_clip") == 3.0


def test_rlinfs_critic_and_its_optimizer(tmp_path: Path) -> None:
    critic = {
        "use_critic_model": True,
        "offload_weight": True,
        "model": {"tensor_model_parallel_size": 4},
        "optim": {"lr": 3e-5, "weight_decay": 0.1, "adam_beta2": 0.95},
        "lr_sched": {"lr_decay_style": "linear", "lr_warmup_fraction": 0.0, "end_weight_decay": 0.1},
    }
    ppo = {"adv_type": "gae", "value_cliprange": 0.4, "critic_warmup_steps": 2}
    placed = {"num_nodes": 1, "component_placement": {"actor,rollout,critic": "0-7"}}
    found = of_rlinf(tmp_path, algorithm=ppo, critic=critic, reward=NOUGHT, cluster=placed)
    expected = {"lr": 3e-5, "weight_decay": 0.1, "beta2": 0.95, "decay": "linear"}
    assert {name: found.get(f"critic.optimizer.{name}") for name in expected} == expected
    sizes = [found.get(f"critic.{name}") for name in ("parallel.tp", "value_clip", "critic_warmup_steps", "offload")]
    assert sizes == [4, 0.4, 2, True]
    with pytest.raises(ConfigError, match="critic.optim.optimizer: 'muon'"):
        of_rlinf(tmp_path, algorithm=ppo, critic={"optim": {"optimizer": "muon"}}, reward=NOUGHT, cluster=placed)


def test_rlinfs_stop_words_and_tokens(tmp_path: Path) -> None:
    found = of_rlinf(tmp_path, algorithm={"sampling_params": {"stop": ["</search>"], "stop_token_ids": [5, 6]}})
    assert found.get("rollout.sampling.stop") == ["</search>"]
    assert found.get("rollout.sampling.stop_token_ids") == [5, 6]


def test_parts_of_rlinfs_own_stay_open(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"

    def of(**more: dict[str, Any]) -> Translation:
        path.write_text(yaml.safe_dump({**RLINF, **more}))
        return imported("rlinf", [str(path)], allow_holes=True)

    assert [*of(reward={"reward_type": "vqa"}).holes] == ["reward.function"]
    agents = of(agentloop={"max_turns": 4}, tools={"search": {"topk": 3}}, reward={"reward_type": "searchr1"})
    told = [one.key for one in agents.holes["env.function"]]
    assert told == ["reward.reward_type", "agentloop.max_turns", "tools.search.topk"] and not agents.differences
    data = {name: value for name, value in RLINF["data"].items() if name != "train_data_paths"}
    served = of(runner={**RLINF["runner"], "task_type": "coding_online_rl"}, data=data)
    assert [*served.holes] == ["env.function", "data.train.path"]
