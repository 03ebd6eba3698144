"""Tests of refusals over several keys. Each names the keys, the values and the accepted values."""

import re
from dataclasses import replace

import pytest

from rltrain.config.schema import Config
from rltrain.errors import ConfigError, PlacementError
from rltrain.planning.validation import check_config
from rltrain.planning.validation_models import check_against_architecture
from rltrain.runtime.placement import resolve_placement, role_grids
from tests.support.model_shards import MOE, tiny_architecture

TAUGHT = {"algorithm": "distillation", "placement": {"actor": 0, "teacher": 1, "rollout,reward": "2-3"}}
GRPO = {"actor,reference": "0-1", "rollout,reward": "2-3"}
DPO = {"algorithm": "dpo", "placement": {"actor,reference": 0}}
PPO = {"algorithm": "ppo", "placement": {"actor,critic": "0-1", "rollout,reward": "2-3"}}
SFT = {"algorithm": "sft", "placement": {"actor": 0}}
ENVIRONMENT = {"placement": {**GRPO, "env": 0}, "env": {"function": "calculator"}}
EVAL = {"train": {"path": "t"}, "eval": {"path": "e"}}
LOSS = {"stop_at": 0.5, "keep_best": {"metric": "eval/loss", "mode": "min"}}
HELD = {"name": "held", "data": {"path": "h"}}
UNLABELLED = {"train": {"path": "t"}, "eval": {"path": "e", "label_key": None}}
SIZES = tiny_architecture(
    "llama", num_layers=4, num_heads=8, num_kv_heads=2, ffn_hidden_size=48, max_positions=4096, vocab_size=100
)


def make_config(**sections) -> Config:
    required = {"steps": 1, "model": {"path": "m"}, "data": {"train": {"path": "t"}}, "placement": GRPO}
    return Config.model_validate({**required, **sections})


def check_in_world_of_8(sizes=SIZES, own=None, **sections) -> None:
    """Checks a config for models of `sizes`. `own` has the sizes of roles with another model."""
    config = make_config(**sections)
    placement = resolve_placement(config.placement, world_size=8, ranks_per_node=8)
    architectures = dict.fromkeys(["actor", *placement.roles], sizes) | (own or {})
    check_against_architecture(config, role_grids(config, placement), architectures)


@pytest.mark.parametrize(
    "sections",
    [
        {},
        {"placement": {"actor": 0, "rollout": 0, "reward": 0}},
        {"algorithm": "sft", "placement": {"actor": "all"}},
        {"algorithm": "sft", "placement": {"actor": "all", "rollout , reward": 0}, "data": EVAL},
        {"algorithm": "sft", "placement": {"actor": "all"}, "data": EVAL},
        {"algorithm": "sft", "placement": {"actor": "all"}, "data": UNLABELLED, "evaluation": LOSS},
        DPO | {"data": UNLABELLED, "evaluation": LOSS},
        {"algorithm": "sft", "placement": {"actor": "all"}, "batch": {"samples_per_prompt": 1}},
        {"algorithm": "dpo", "placement": {"actor": "0-1", "reference": "2-3"}, "data": EVAL},
        {"algorithm": "reward_model", "placement": {"actor": 0}, "batch": {"prompts_per_step": 9, "mini_batches": 3}},
        {"loss": {"kl": {"coef": 0.1}}},
        {"data": EVAL, "evaluation": {"stop_at": 0.5}},
        {"actor": {"parallel": {"tp": 2, "sequence_parallel": True}}},
        {"rollout": {"max_context_tokens": 2048}},
        PPO,
        {**PPO, "batch": {"samples_per_prompt": 1}},
        {**PPO, "steps": 3, "critic": {"critic_warmup_steps": 2}},
    ],
)
def test_configs_that_work_are_accepted(sections):
    check_config(make_config(**sections))


ROLES = {
    "placement.reward: the role is not placed, but algorithm grpo needs it": {"placement": {"actor,rollout": 0}},
    "placement.actor: the role is not placed": {"placement": {"rollout,reward": 0}},
    "placement.reference: the role is not placed, but loss.kl.coef 0.1 needs it; expected reference: ranks": {
        "placement": {"actor,rollout,reward": 0},
        "loss": {"kl": {"coef": 0.1}},
    },
    "placement.reward: the role is not placed, but data.eval needs it": SFT
    | {"placement": {"actor,rollout": 0}, "data": EVAL},
    "placement.rollout: the role is not placed, but data.eval needs it": SFT
    | {"data": EVAL, "evaluation": {"sets": [HELD]}},
    "role rollout has nothing to do in algorithm sft without data.eval; expected only actor": SFT
    | {"placement": {"actor,rollout": 0}},
    "placement.actor,rollout,reward,reference: role reference has nothing to do in algorithm sft;": SFT
    | {"placement": {"actor,rollout,reward,reference": 0}, "data": EVAL},
    "role rollout has nothing to do in algorithm dpo; expected only actor, reference": DPO
    | {"placement": {"actor,rollout": 0}},
    "placement.reference: the role is not placed, but algorithm": DPO | {"placement": {"actor": 0}},
    "placement.critic: role critic has nothing to do in algorithm grpo": {"placement": {**GRPO, "critic": 0}},
    "placement.critic: the role is not placed, but algorithm ppo needs it; expected critic: ranks": {
        "algorithm": "ppo"
    },
    "placement.aktor: unknown role 'aktor'; expected one of actor, refer": {"placement": {**GRPO, "aktor": 0}},
    "unknown role 'qq'; expected one of actor, reference, teacher, inference, reward_model, judge, evaluation, "
    "env, rollout, reward": {"placement": {**GRPO, "qq": 0}},
}


@pytest.mark.parametrize(("expected", "sections"), ROLES.items(), ids=range(len(ROLES)))
def test_roles_that_are_missing_useless_or_unknown_are_refused(sections, expected):
    with pytest.raises(PlacementError, match=re.escape(expected)):
        check_config(make_config(**sections))


@pytest.mark.parametrize(
    "placement",
    [
        {"actor, reference": 0, "rollout, env": 1},
        {"actor, reference": 0, "rollout, reward, env": 1},
        {"actor, reference, reward": 0, "rollout": 1, "env": 2},
        {"actor, reference, rollout, env": 0, "judge": 1},
    ],
)
@pytest.mark.parametrize("reward", [{}, {"timeout_s": 3.0}])
def test_what_environments_give_is_the_reward_wherever_it_is_placed(placement, reward):
    assert make_config(placement=placement, reward=reward).reward.names == ("environment",)
    of_function = make_config(placement=placement, reward={"function": "math", **reward})
    assert of_function.reward.names == ("math",)


CONTRADICTIONS = {
    "preference.label_smoothing: got 0.1 with preference.loss ipo": DPO
    | {"preference": {"loss": "ipo", "label_smoothing": 0.1}},
    "loss: got a section for algorithms that learn from rewards with algorithm dpo; expected none": DPO
    | {"loss": {"kl": {"coef": 0.1}}},
    "preference.center_coef: got 0.1 with algorithm dpo, but it does not use the key; remove it": DPO
    | {"preference": {"center_coef": 0.1}},
    "batch.mini_batches: got 3 with batch.prompts_per_step 8 and 1 samples per prompt; expected a divisor of 8": DPO
    | {"batch": {"prompts_per_step": 8, "mini_batches": 3}},
    "model.recompute.layers: got 2 with granularity selective, which applies to all layers; expected null": {
        "model": {"path": "m", "recompute": {"granularity": "selective", "layers": 2}}
    },
    "model.recompute.modules: got mlp with granularity full; remove the key": {
        "model": {"path": "m", "recompute": {"layers": 2, "modules": ["mlp"]}}
    },
    "model.recompute.modules: got none; expected some, such as [core_attn, mlp]": {
        "model": {"path": "m", "recompute": {"granularity": "selective", "modules": []}}
    },
    "actor.optimizer.loss_scale.minimum: got 1.0; expected at most actor.optimizer.loss_scale.initial 0.5": {
        "actor": {"optimizer": {"loss_scale": {"initial": 0.5, "minimum": 1.0}}}
    },
    "rollout.parallel.pp: got 2; expected 1": {"rollout": {"parallel": {"pp": 2}}},
    "rollout.parallel.cp: got 2; expected 1: only training backends": {"rollout": {"parallel": {"cp": 2}}},
    "rollout.parallel.ep: got 2 with rollout.parallel.tp 1; expected a divisor": {"rollout": {"parallel": {"ep": 2}}},
    "rollout.parallel.sequence_parallel: got true": {"rollout": {"parallel": {"tp": 2, "sequence_parallel": True}}},
    "actor.parallel.sequence_parallel: got true with actor.parallel.tp 1; expected false, or a tp": {
        "actor": {"parallel": {"sequence_parallel": True}}
    },
    "batch.mini_batches: got 4 with batch.prompts_per_step 9 and 6 samples per prompt; expected a divisor of 9 "
    "times one of 6. The nearest that works is 3": {
        "batch": {"prompts_per_step": 9, "samples_per_prompt": 6, "mini_batches": 4}
    },
    "batch.mini_batches: got 8 with batch.prompts_per_step 10 and 2 samples per prompt; expected a divisor of "
    "10 times one of 2. The nearest that works is 10": {
        "batch": {"prompts_per_step": 10, "samples_per_prompt": 2, "mini_batches": 8}
    },
    "batch.mini_batches: got 8 with batch.prompts_per_step 10; expected a divisor of 10, because each takes whole "
    "prompts. The nearest that works is 10": {
        "batch": {"prompts_per_step": 10, "mini_batches": 8, "mini_batches_by": "prompts"}
    },
    "batch.samples_per_prompt: got 1; expected at least 2": {"batch": {"samples_per_prompt": 1}},
    "batch.samples_per_prompt: got 1; expected at least 2: algorithm rloo compares": {
        "algorithm": "rloo",
        "batch": {"samples_per_prompt": 1},
    },
    "advantages.gamma: got 0.9; expected 1.0, or no value: algorithm grpo does not use it": {
        "advantages": {"gamma": 0.9}
    },
    "advantages.k: got 5 with batch.samples_per_prompt 4; expected 2 to 4": {
        "algorithm": "pass_at_k",
        "batch": {"samples_per_prompt": 4},
        "advantages": {"k": 5},
    },
    "reward.functions: got 0; expected at least 2: algorithm gdpo normalizes each function": {"algorithm": "gdpo"},
    "loss.kl.where: got reward; expected loss: algorithm maxrl divides by the mean reward": {
        "algorithm": "maxrl",
        "loss": {"kl": {"coef": 0.1, "where": "reward"}},
    },
    "advantages.overlong_penalty: got one; expected null: algorithm maxrl divides": {
        "algorithm": "maxrl",
        "advantages": {"overlong_penalty": {"buffer_tokens": 8}},
    },
    "loss.kl.where: got reward; expected loss: algorithm distillation uses no rewards": TAUGHT
    | {"placement": GRPO | {"teacher": 4}, "teacher": {"path": "m"}, "loss": {"kl": {"coef": 0.1, "where": "reward"}}},
    "teacher.kl: got forward with teacher.where advantage and teacher.top_k 0; expected teacher.where: loss": TAUGHT
    | {"teacher": {"path": "m", "kl": "forward"}},
    "teacher.rest: got False with teacher.kl reverse; expected teacher.kl: forward": TAUGHT
    | {"teacher": {"path": "m", "where": "loss", "top_k": 4, "rest": False}},
    "teacher.max_distance: got 1.0 with teacher.where loss and teacher.top_k 0, which has no distances": TAUGHT
    | {"teacher": {"path": "m", "where": "loss", "max_distance": 1.0}},
    "env.agent: got one with algorithm remax; expected none": {
        "algorithm": "remax",
        "env": {"agent": {"command": ["a"]}},
        "placement": GRPO | {"env": 4},
    },
    "advantages.overlong_penalty.buffer_tokens: got 1025; expected at most rollout.sampling.max_response_tokens 1024": {
        "advantages": {"overlong_penalty": {"buffer_tokens": 1025}}
    },
    "data.max_response_tokens: got 8 with algorithm grpo, whose rows have no responses; remove the key": {
        "data": {"train": {"path": "t"}, "max_response_tokens": 8}
    },
    "loss.kl.adaptive: got one with loss.kl.coef 0.1 and loss.kl.where loss; expected an initial coefficient": {
        "loss": {"kl": {"coef": 0.1, "adaptive": {"target": 0.1}}}
    },
    "rollout.sampling.temperature: got 0; expected above 0": {"rollout": {"sampling": {"temperature": 0}}},
    "evaluation.stop_at: got 0.5 without data.eval": {"evaluation": {"stop_at": 0.5}},
    "data.train: neither path nor sources is given; expected data.train.path (a file)": {"data": {"train": {}}},
    "data.train: both path and sources are given": {"data": {"train": {"path": "a", "sources": [{"path": "b"}]}}},
    "data.train.sources.1.weight: got none, but other sources have one; expected a weight for every source": {
        "data": {"train": {"sources": [{"path": "a", "weight": 1.0}, {"path": "b"}]}}
    },
    "data.train.sources: 2 are called 'rows'; expected different names": {
        "data": {"train": {"sources": [{"path": "a/rows.jsonl"}, {"path": "b/rows.jsonl"}]}}
    },
    "data.train.sources.0.name: got 'a b'; expected letters, digits": {
        "data": {"train": {"sources": [{"path": "a", "name": "a b"}]}}
    },
    "data.train.sources.0.path: got an empty list": {"data": {"train": {"sources": [{"path": []}]}}},
    "data.eval.sources: got weights; expected none": {
        "data": {"train": {"path": "a"}, "eval": {"sources": [{"path": "b", "weight": 1.0}]}}
    },
    "data.solved_rate.low: got 0.6; expected at most data.solved_rate.high 0.5": {
        "data": {"train": {"path": "a"}, "solved_rate": {"low": 0.6, "high": 0.5}}
    },
    "data.solved_rate: got low 0.4 and high 0.45, but with batch.samples_per_prompt 8 no possible rate": {
        "data": {"train": {"path": "a"}, "solved_rate": {"low": 0.4, "high": 0.45}}
    },
    "data.solved_rate: got a section together with data.curriculum, which already chooses": {
        "data": {"train": {"path": "a"}, "solved_rate": {}, "curriculum": {"key": "level", "steps": 2}}
    },
    "data.solved_rate: got a section with algorithm sft, which generates no samples; expected null": SFT
    | {"data": {"train": {"path": "a"}, "solved_rate": {}}},
    "data.train.sources: got 2 values of prompt_key with an environment; expected the same one": ENVIRONMENT
    | {"data": {"train": {"sources": [{"path": "a"}, {"path": "b", "prompt_key": "q"}]}}},
    "data.train.tools_key: got 'tools' with an environment; expected null": ENVIRONMENT
    | {"data": {"train": {"path": "a", "tools_key": "tools"}}},
    "actor.optimizer.min_lr: got 1.0; expected at most": {"actor": {"optimizer": {"min_lr": 1.0}}},
    "critic.optimizer.min_lr: got 1.0; expected at most": {"critic": {"optimizer": {"min_lr": 1.0}}},
    "actor.parallel.vpp: got 2 with actor.parallel.pp 1; expected 1, or a pp of at least 2": {
        "actor": {"parallel": {"pp": 1, "vpp": 2}}
    },
    "critic.critic_warmup_steps: got 3 of 3 steps (config key steps); expected fewer, so that the actor learns": PPO
    | {"steps": 3, "critic": {"critic_warmup_steps": 3}},
    "rollout.max_context_tokens: got 2047; expected at least data.max_prompt_tokens 1024 + "
    "rollout.sampling.max_response_tokens 1024 = 2048": {"rollout": {"max_context_tokens": 2047}},
    "rollout.kv_cache_gb: got 3.0 with rollout.engine sglang; expected auto, and mem_fraction_static": {
        "rollout": {"engine": "sglang", "kv_cache_gb": 3}
    },
    "model.router_replay: got recompute with backend fsdp for role actor, whose routers cannot replay choices": {
        "actor": {"backend": "fsdp"},
        "model": {"path": "m", "router_replay": "recompute"},
    },
    "actor.optimizer.moments_dtype: got bfloat16 with backend fsdp; expected float32: torch's AdamW": {
        "actor": {"backend": "fsdp", "optimizer": {"moments_dtype": "bfloat16"}},
    },
    "data.train.system_key: got 'system' with an environment; expected null": {
        **ENVIRONMENT,
        "data": {"train": {"path": "train.jsonl", "system_key": "system"}},
    },
    "actor.optimizer.name: got muon with model.lora, whose matrices are low-rank factors; expected adamw": {
        "model": {"path": "m", "lora": {"rank": 8}},
        "actor": {"optimizer": {"name": "muon"}},
    },
    "loss.kl.estimator: got full with loss.kl.where reward; expected k1, k2 or k3": {
        "loss": {"kl": {"coef": 0.1, "estimator": "full", "where": "reward"}},
    },
    "rollout.parallel.etp: got 2; expected null: an engine splits each expert over tp / ep ranks": {
        "rollout": {"parallel": {"etp": 2}},
    },
    "env: neither env.function nor env.agent is given, and placement has role env; expected one": {
        "placement": ENVIRONMENT["placement"],
    },
    "env.agent: expected either command or function": {
        "placement": ENVIRONMENT["placement"],
        "env": {"agent": {"command": ["a"], "function": "m:f"}},
    },
    "env.batch_size: got 2 with env.agent, whose runs are independent; expected 1": {
        "placement": ENVIRONMENT["placement"],
        "env": {"agent": {"function": "m:f"}, "batch_size": 2},
    },
    "teacher.path: got none, and placement has role teacher; expected the checkpoint of a model to learn from": {
        **TAUGHT,
    },
    "teacher.top_k: got 5 with teacher.where advantage, which uses the sampled token only": {
        **TAUGHT,
        "teacher": {"path": "t", "top_k": 5, "where": "advantage"},
    },
}


@pytest.mark.parametrize(("expected", "sections"), CONTRADICTIONS.items(), ids=range(len(CONTRADICTIONS)))
def test_values_that_contradict_each_other_are_refused(sections, expected):
    with pytest.raises(ConfigError, match=re.escape(expected)) as refused:
        check_config(make_config(**sections))
    assert "mistakes" not in str(refused.value)


def test_all_contradictions_come_in_one_message():
    with pytest.raises(ConfigError) as refused:
        check_config(make_config(placement={"actor": 0}, batch={"samples_per_prompt": 1}))
    message = str(refused.value)
    assert "3 mistakes in the config" in message
    assert all(key in message for key in ("placement.rollout", "placement.reward", "batch.samples_per_prompt"))


@pytest.mark.parametrize(
    "sections",
    [
        {},
        {"placement": {"actor,reference": "0-7", "rollout,reward": "0-7"}, "actor": {"parallel": {"tp": 2, "pp": 4}}},
        {"placement": {"actor,rollout,reward": "all"}, "rollout": {"parallel": {"tp": 8}}},
        {"placement": {**GRPO, "actor,reference": "0-2"}, "actor": {"parallel": {"pp": 3}}},
        {"placement": {**GRPO, "actor,reference": "0-1"}, "actor": {"parallel": {"pp": 2, "vpp": 2}}},
        {
            "placement": {**GRPO, "actor,reference": "0-2"},
            "actor": {"parallel": {"pp": 3, "vpp": 2, "layers_per_stage": [1, 1, 1, 0, 1, 0]}},
        },
    ],
)
def test_grids_that_divide_the_model_are_accepted(sections):
    check_in_world_of_8(**sections)


UNFIT = {
    "actor.parallel.tp: got 3, which does not divide the model's 8 attention heads": {
        "placement": {**GRPO, "actor,reference": "0-2"},
        "actor": {"parallel": {"tp": 3}},
    },
    "rollout.parallel.tp: got 3; expected a divisor or a multiple of the model's 2 key-value heads": {
        "placement": {**GRPO, "rollout,reward": "2-4"},
        "rollout": {"parallel": {"tp": 3}},
    },
    "actor.parallel.layers_per_stage: got [2, 2]; expected 3 numbers (pp 3 x vpp 1) that sum up to the model's "
    "4 layers, such as [1, 2, 1]": {
        "placement": {**GRPO, "actor,reference": "0-2"},
        "actor": {"parallel": {"pp": 3, "layers_per_stage": [2, 2]}},
    },
    "actor.parallel.pp: got 8 with vpp 1, which makes 8 chunks of the model's 4 layers; expected at most": {
        "placement": {**GRPO, "actor,reference": "0-7"},
        "actor": {"parallel": {"pp": 8}},
    },
    "placement.reward: 8 ranks make 8 data-parallel replicas, but batch.prompts_per_step 4 gives them 4 prompts": {
        "placement": {"actor,reference,rollout": 0, "reward": "all"},
        "batch": {"prompts_per_step": 4},
    },
    "placement.actor: 8 ranks make 8 data-parallel replicas, but batch.prompts_per_step 16 in 4 blocks for "
    "mini-batches gives them 4 prompts; expected at least 8 prompts, or fewer ranks": {
        "placement": {"actor": "all", "rollout,reward": 0},
        "batch": {"prompts_per_step": 16, "samples_per_prompt": 2, "mini_batches": 8},
    },
    "data.max_prompt_tokens 4000 + rollout.sampling.max_response_tokens 1024 = 5024, but the model in "
    "model.path (m) has 4096 positions": {"data": {"train": {"path": "t"}, "max_prompt_tokens": 4000}},
    "data.max_prompt_tokens 1024 + data.max_response_tokens 4000 = 5024, but the model in model.path (m) has": SFT
    | {"data": {"train": {"path": "t"}, "max_response_tokens": 4000}},
    "data.max_prompt_tokens 4096 + 1 token of a response = 4097, but the model in model.path (m) has": SFT
    | {"data": {"train": {"path": "t"}, "max_prompt_tokens": 4096}},
}


@pytest.mark.parametrize(("expected", "sections"), UNFIT.items(), ids=range(len(UNFIT)))
def test_grids_that_do_not_fit_the_model_or_batch_are_refused(sections, expected):
    with pytest.raises(ConfigError, match=re.escape(expected)):
        check_in_world_of_8(**sections)


EXPERTS = {
    "actor.parallel.ep: got 8, which does not divide the model's 4 experts; the nearest": ("qwen3_moe", {"ep": 8}),
    "actor.parallel.ep: got 2; expected 1: the model has no experts": ("qwen3", {"ep": 2}),
    "actor.parallel.etp: got 2; expected null: the model has no experts": ("qwen3", {"etp": 2}),
    "divides experts among ep 3 x etp 1 (null, so equal to tp) = 3; expected a divisor": ("qwen3_moe", {"ep": 3}),
    "among ep 4 x etp 4 = 16; expected a divisor of 8. The nearest that works is ep 2": (
        "qwen3_moe",
        {"ep": 4, "etp": 4},
    ),
}


@pytest.mark.parametrize(("expected", "given"), EXPERTS.items(), ids=range(len(EXPERTS)))
def test_experts_that_cannot_be_shared_out_so_are_refused(expected, given):
    family, parallel = given
    architecture = tiny_architecture(family, max_positions=4096)
    with pytest.raises(ConfigError, match=re.escape(expected)):
        check_in_world_of_8(architecture, algorithm="sft", placement={"actor": "all"}, actor={"parallel": parallel})


def test_a_dense_critic_beside_an_actor_with_experts_needs_sizes_of_its_own():
    actor, critic = (tiny_architecture(family, max_positions=4096) for family in ("qwen3_moe", "qwen3"))
    settings = {**PPO, "critic": {"path": "c"}, "actor": {"parallel": {"ep": 2}}}
    expected = "actor.parallel.ep: got 2; expected 1, or critic.parallel: the model of role critic has no experts"
    with pytest.raises(ConfigError, match=re.escape(expected)) as refused:
        check_in_world_of_8(actor, own={"critic": critic}, **settings)
    assert "mistakes" not in str(refused.value)
    settings["critic"]["parallel"] = {"tp": 2}
    check_in_world_of_8(actor, own={"critic": critic}, **settings)


@pytest.mark.parametrize(
    ("family", "refused"),
    [
        ("qwen3", {"aux_loss_coef": "has experts", "z_loss_coef": "has experts", "bias_update_rate": "by a bias"}),
        ("qwen3_moe", {"bias_update_rate": "by a bias"}),
        ("deepseek_v3", {}),
    ],
)
def test_balance_of_what_is_not_there_is_refused(family, refused):
    architecture, sft = tiny_architecture(family, max_positions=4096), {"algorithm": "sft", "placement": {"actor": 0}}
    for name in ("aux_loss_coef", "z_loss_coef", "bias_update_rate"):
        sections = {**sft, "model": {"path": "m", "moe": {name: 0.5}}}
        if name not in refused:
            check_in_world_of_8(architecture, **sections)
            continue
        with pytest.raises(ConfigError, match=rf"model.moe.{name}: got 0.5; expected 0: .*{refused[name]}"):
            check_in_world_of_8(architecture, **sections)


SERVED = {"algorithm": "evaluate", "placement": {"rollout,reward": "all"}, "data": EVAL}


@pytest.mark.parametrize(
    ("family", "parallel"),
    [("qwen3_moe", {"tp": 4, "ep": 2}), ("mixtral", {"tp": 4, "ep": 4}), ("deepseek_v3", {"tp": 2})],
)
def test_engines_serve_experts_and_latent_attention(family, parallel):
    sizes = tiny_architecture(family, max_positions=4096, num_heads=8)
    check_in_world_of_8(sizes, **SERVED, rollout={"parallel": parallel})


MANY = replace(MOE["deepseek_v3"], num_experts=12, ffn_hidden_size=6, shared_ffn_hidden_size=6)


ENGINES = {
    "rollout.parallel.ep: got 2; expected 1: the model has no experts": ("qwen3", {"parallel": {"tp": 2, "ep": 2}}),
    "rollout.sampling.stop_token_ids: got 100000; expected less than": (
        "qwen3",
        {"sampling": {"stop_token_ids": [3, 100_000]}},
    ),
    "rollout.parallel.ep: got 2 with rollout.engine sglang; expected 1": (
        "qwen3_moe",
        {"engine": "sglang", "parallel": {"tp": 2, "ep": 2}},
    ),
    "rollout.engine: got sglang, but the model in m (model.path) has model_type nemotron": (
        "nemotron",
        {"engine": "sglang"},
    ),
    "ep: got 8, which does not divide the 12 experts": ("deepseek_v3", {"parallel": {"tp": 8, "ep": 8}}),
    "rollout.parallel.tp: got 8 with rollout.parallel.ep 2, which splits each expert in 4; expected a divisor of "
    "its 6 units, or a larger ep": ("deepseek_v3", {"parallel": {"tp": 8, "ep": 2}}),
    "tp: got 4, which does not divide the model's 6 feed-forward units of shared experts": (
        "deepseek_v3",
        {"parallel": {"tp": 4, "ep": 2}},
    ),
}


@pytest.mark.parametrize(("expected", "given"), ENGINES.items(), ids=range(len(ENGINES)))
def test_what_engines_cannot_share_out_is_refused(expected, given):
    family, rollout = given
    moe = {"moe": MANY} if family == "deepseek_v3" else {}
    sizes = tiny_architecture(family, max_positions=4096, num_heads=8, **moe)
    with pytest.raises(ConfigError, match=re.escape(expected)):
        check_in_world_of_8(sizes, **SERVED, rollout=rollout)


def test_a_model_of_its_own_is_checked_under_its_own_key():
    small = replace(SIZES, vocab_size=99, max_positions=100)
    with pytest.raises(ConfigError) as refused:
        check_in_world_of_8(own={"critic": small}, **PPO, critic={"path": "c"})
    assert "critic.path: the model in c has a vocabulary of 99; expected at least the 100 of model.path" in str(
        refused.value
    )
    assert "but the model in critic.path (c) has 100 positions" in str(refused.value)
    assert "model.path (m)" not in str(refused.value)


def test_a_critic_without_sizes_of_its_own_has_those_of_the_actor():
    with pytest.raises(ConfigError, match=re.escape("actor.parallel.pp: got 8 with vpp 1")) as refused:
        check_in_world_of_8(
            **{**PPO, "placement": {**PPO["placement"], "actor,critic": "0-7"}}, actor={"parallel": {"pp": 8}}
        )
    assert "mistakes" not in str(refused.value), "one message for both roles"


def test_feed_forward_units_must_divide_too():
    sizes, placement = replace(SIZES, ffn_hidden_size=50), {**GRPO, "actor,reference": "0-3"}
    with pytest.raises(ConfigError, match="got 4, which does not divide the model's 50 feed-forward units"):
        check_in_world_of_8(sizes, placement=placement, actor={"parallel": {"tp": 4}})


def test_what_actor_and_reference_share_is_refused_once_and_their_own_sizes_twice():
    both = {"placement": {**GRPO, "actor,reference": "0-7"}, "actor": {"parallel": {"pp": 8}}}
    with pytest.raises(ConfigError) as refused:
        check_in_world_of_8(**both)
    assert "mistakes" not in str(refused.value)
    with pytest.raises(ConfigError, match="2 mistakes") as refused:
        check_in_world_of_8(**both, reference={"parallel": {"pp": 8}})
    assert "reference.parallel.pp: got 8" in str(refused.value)


@pytest.mark.parametrize("key, checkpoint", [("save_interval", 3), ("memory.interval", {"interval": 3})])
def test_a_run_is_not_saved_between_two_weight_syncs(key, checkpoint):
    schedule = {"mode": "asynchronous", "max_staleness": 1, "sync_every": 2}
    message = f"checkpoint.{key}: got 3; expected a multiple of schedule.sync_every 2, because a checkpoint"
    with pytest.raises(ConfigError, match=re.escape(message)):
        check_config(make_config(schedule=schedule, checkpoint={key.split(".")[0]: checkpoint}))
