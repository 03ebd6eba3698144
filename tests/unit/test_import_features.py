"""Tests of other trainers' features in translated configs."""

import json
from pathlib import Path
from typing import Any

import pytest

from rltrain.config.loader import load_config
from rltrain.config.schema import Config
from rltrain.errors import ConfigError, UserError
from rltrain.import_config.command import imported, written
from rltrain.import_config.translation import RowCounts, Translation
from rltrain.planning.description import describe_job
from rltrain.planning.options import DryRunOptions

SLIME = """python3 train.py --actor-num-nodes 1 --actor-num-gpus-per-node 8 --colocate --rollout-num-gpus-per-engine 4
 --hf-checkpoint MODEL --prompt-data /data/a.jsonl --input-key prompt --label-key label --rm-type math --num-rollout 9
 --rollout-batch-size 32 --n-samples-per-prompt 8 --rollout-max-response-len 1024 --rollout-max-prompt-len 512
 --attention-dropout 0.0 --hidden-dropout 0.0 --tensor-model-parallel-size 2 MORE"""
VERL = """python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_files=/data/a.parquet
 data.train_batch_size=64 actor_rollout_ref.actor.ppo_mini_batch_size=64 actor_rollout_ref.model.path=MODEL
 actor_rollout_ref.rollout.tensor_model_parallel_size=2 trainer.n_gpus_per_node=8 actor_rollout_ref.rollout.n=5
 trainer.total_training_steps=9 MORE"""
MEGATRON = "actor_rollout_ref.actor.strategy=megatron "
SKYRL = """python -m skyrl.train.entrypoints.main_base data.train_data=/data/a.parquet trainer.policy.model.path=MODEL
 trainer.placement.policy_num_gpus_per_node=4 generator.inference_engine.num_engines=4 trainer.max_training_steps=9
 trainer.placement.ref_num_gpus_per_node=4 trainer.train_batch_size=64 trainer.policy_mini_batch_size=64
 trainer.epochs=null MORE"""
STOP = "--rollout-stop-token-ids 7 8"
TEXTS = {"slime": SLIME, "verl": VERL, "skyrl": SKYRL}


def found_of(framework: str, more: str, model: Path | str = "/models/m") -> Translation:
    text = TEXTS[framework].replace("MODEL", str(model)).replace("MORE", more).replace("\n", " ")
    return imported(framework, [text])


def config_of(found: Translation, folder: Path) -> Config:
    path = folder / "imported.yaml"
    path.write_text(written(found, "a test"))
    return load_config(path)


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """Returns a folder with the config.json of a small model."""
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    more = {"intermediate_size": 128, "vocab_size": 256, "max_position_embeddings": 4096, "rope_theta": 1e6}
    kind = {"model_type": "qwen2", "rms_norm_eps": 1e-6, "hidden_act": "silu", "eos_token_id": 1}
    (tmp_path / "config.json").write_text(json.dumps({**kind, **sizes, **more, "tie_word_embeddings": False}))
    return tmp_path


@pytest.fixture
def experts(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_moe", "num_experts": 8}))
    return tmp_path


def test_fsdp_of_verl_shares_every_parameter_and_sequences_by_heads(tmp_path: Path) -> None:
    keys = "fsdp_config.fsdp_size=4 actor_rollout_ref.actor.ulysses_sequence_parallel_size=2"
    keys += " actor_rollout_ref.actor.fsdp_config.reshard_after_forward=False"
    keys += " actor_rollout_ref.actor.fsdp_config.optimizer_offload=True"
    config = config_of(
        found_of("verl", "actor_rollout_ref.actor.strategy=fsdp2 actor_rollout_ref.actor." + keys), tmp_path
    )
    actor = config.actor
    assert config.backend_of("actor") == "fsdp" and (actor.parallel.tp, actor.parallel.cp) == (1, 2)
    assert actor.fsdp and actor.fsdp.replicas == 2 and not actor.fsdp.reshard_after_forward and actor.offload is True


def test_fsdp_of_skyrl_has_the_micro_batches_of_its_ranks(tmp_path: Path) -> None:
    keys = "trainer.micro_train_batch_size_per_gpu=64 trainer.policy.sequence_parallel_size=2"
    found = found_of("skyrl", keys)
    config = config_of(found, tmp_path)
    assert config.backend_of("actor") == "fsdp" and config.actor.parallel.cp == 2
    assert config.actor.micro_batch_tokens == 64 * (512 + 1024) // 2
    few = config_of(found_of("skyrl", keys.replace("=64", "=2")), tmp_path)
    assert few.actor.micro_batch_tokens == 2 * (512 + 1024) // 2, "two samples, shared by two ranks"


def test_megatron_trains_what_fsdp_refuses(experts: Path) -> None:
    adapted = found_of("verl", "actor_rollout_ref.model.lora_rank=8", experts)
    assert adapted.get("actor.backend") is None and adapted.get("actor.parallel.tp") == 2
    assert any("adapters with experts" in note for note in adapted.notes)
    assert found_of("verl", "", experts).get("actor.backend") == "fsdp"
    keys = "actor_rollout_ref.actor.ppo_mini_batch_size=4"
    few = found_of("verl", keys)
    assert few.get("actor.backend") is None and any("more ranks (8)" in note for note in few.notes)


def test_megatron_cuts_sequences_of_gated_delta_nets(tmp_path: Path) -> None:
    language_model = {"model_type": "qwen3_5_text", "linear_num_key_heads": 16}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_5", "text_config": language_model}))
    cut = found_of("verl", "actor_rollout_ref.actor.ulysses_sequence_parallel_size=2", tmp_path)
    assert cut.get("actor.backend") is None and any("split sequences with gated" in note for note in cut.notes)
    assert found_of("verl", "", tmp_path).get("actor.backend") == "fsdp"
    keys = "actor_rollout_ref.actor.ulysses_sequence_parallel_size=4"
    wider = found_of("verl", keys, tmp_path)
    assert (wider.get("actor.parallel.tp"), wider.get("actor.parallel.cp")) == (2, 2), "four ranks share a sequence"


def test_fsdp_of_slime_is_fsdp() -> None:
    text = SLIME.replace("--tensor-model-parallel-size 2", "--train-backend fsdp")
    found = imported("slime", [text.replace("MODEL", "/m").replace("MORE", "").replace("\n", " ")])
    assert found.get("actor.backend") == "fsdp"


def test_environments_and_rewards_have_a_prompt_each() -> None:
    keys = "--custom-generate-function-path agent.generate.generate --custom-rm-path agent.reward.reward "
    keys += "--rollout-max-context-len 4096"
    found = found_of("slime", keys.replace("--custom", "--rollout-batch-size 4 --custom", 1))
    assert found.get("placement.actor, rollout") == "0-7"
    assert found.get("placement.reward, env") == "0,4", "first ranks of the two engines"


VERL_ROPE = "+actor_rollout_ref.model.override_config."
VLLM_ROPE = "actor_rollout_ref.rollout.engine_kwargs.vllm.hf_overrides."
ROPES = [("verl", VERL_ROPE), ("verl", VLLM_ROPE), ("skyrl", "+trainer."), ("skyrl", "+generator.")]


@pytest.mark.parametrize(("framework", "prefix"), ROPES)
def test_rope_scaling_has_to_stand_in_the_models_own_config(framework: str, prefix: str, small: Path) -> None:
    keys = f"{prefix}rope_scaling.rope_type=yarn {prefix}rope_scaling.factor=4.0"
    with pytest.raises(ConfigError) as refusal:
        found_of(framework, keys, small)
    assert "set rope_scaling.rope_type in config.json of model.path" in str(refusal.value)
    settings = json.loads((small / "config.json").read_text())
    scaled = settings | {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}
    (small / "config.json").write_text(json.dumps(scaled))
    left = {leftover.key: leftover.reason for leftover in found_of(framework, keys, small).leftovers}
    assert left[f"{prefix.removeprefix('+')}rope_scaling.factor"] == "config.json of model.path has the same value"
    with pytest.raises(ConfigError, match=r"set rope_scaling\.factor in config\.json of model\.path"):
        found_of(framework, keys.replace("4.0", "2.0"), small)


def test_adapters_have_the_defaults_of_their_source(tmp_path: Path) -> None:
    sharded = config_of(found_of("verl", "actor_rollout_ref.model.lora_rank=8"), tmp_path).model.lora
    assert sharded and (sharded.rank, sharded.alpha, sharded.targets) == (8, 16, None)
    keys = MEGATRON + "actor_rollout_ref.model.lora.rank=8 actor_rollout_ref.model.lora.lora_A_init_method=kaiming"
    found = found_of("verl", keys + " actor_rollout_ref.model.lora.target_modules=[linear_qkv,linear_fc2]")
    lora = config_of(found, tmp_path).model.lora
    assert lora and lora.alpha == 32 and lora.targets == ("q_proj", "k_proj", "v_proj", "down_proj")
    assert any("shares one A" in note for note in found.notes)
    keys = "trainer.policy.model.lora.rank=4 trainer.policy.model.lora.alpha=8 trainer.policy.model.lora.dropout=0.1"
    skyrl = config_of(found_of("skyrl", keys), tmp_path).model.lora
    assert skyrl and (skyrl.rank, skyrl.alpha, skyrl.dropout) == (4, 8, 0.1)


@pytest.mark.parametrize(
    ("framework", "keys"),
    [
        ("verl", "algorithm.adv_estimator=gae critic.model.lora_rank=8 critic.model.lora_alpha=24"),
        (
            "skyrl",
            "trainer.algorithm.advantage_estimator=gae trainer.critic_mini_batch_size=64 "
            "trainer.critic.model.lora.rank=8 trainer.critic.model.lora.alpha=24",
        ),
    ],
)
def test_a_critic_has_adapters_of_its_own(framework: str, keys: str, tmp_path: Path) -> None:
    config = config_of(found_of(framework, keys), tmp_path)
    assert config.critic.lora and (config.critic.lora.rank, config.critic.lora.alpha) == (8, 24)
    assert config.model.lora is None


@pytest.mark.parametrize(
    ("framework", "keys", "said"),
    [
        ("verl", MEGATRON + "actor_rollout_ref.model.lora.rank=8", "xavier"),
        ("verl", "actor_rollout_ref.model.lora_rank=8 actor_rollout_ref.model.target_modules=[lm_head]", "lm_head"),
        ("skyrl", "trainer.policy.model.lora.rank=8 trainer.policy.model.lora.init_method=xavier", "xavier"),
        ("slime", "--optimizer sgd", "adamw and muon"),
        ("slime", "--optimizer muon", "muon_extra_scale_factor"),
        ("slime", "--exp-avg-dtype bf16", "both moments"),
    ],
)
def test_what_has_no_counterpart_is_refused(framework: str, keys: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        found_of(framework, keys)


@pytest.mark.parametrize(
    ("framework", "keys", "mode"),
    [
        ("slime", "--use-rollout-routing-replay --use-routing-replay", "rollout"),
        ("slime", "--use-routing-replay", "recompute"),
        ("verl", MEGATRON + "actor_rollout_ref.actor.megatron.router_replay.mode=R2", "recompute"),
        (
            "verl",
            MEGATRON + "actor_rollout_ref.actor.megatron.router_replay.mode=R3"
            " actor_rollout_ref.rollout.enable_rollout_routing_replay=True",
            "rollout",
        ),
        (
            "skyrl",
            "trainer.strategy=megatron trainer.policy.megatron_config.moe_enable_routing_replay=true"
            " generator.inference_engine.enable_return_routed_experts=true",
            "rollout",
        ),
    ],
)
def test_routers_replay_what_the_engine_or_the_pass_before_chose(framework: str, keys: str, mode: str) -> None:
    found = found_of(framework, keys)
    assert found.get("model.router_replay") == mode
    assert found.get("rollout.engine") == "sglang"


def test_optimizers_of_megatron_keep_their_kind_types_and_place(tmp_path: Path) -> None:
    flags = "--optimizer-cpu-offload --use-precision-aware-optimizer --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16"
    slime = config_of(found_of("slime", flags), tmp_path).actor.optimizer
    assert slime.cpu_offload is True and slime.moments_dtype == "bfloat16" and slime.name == "adamw"
    prefix = "actor_rollout_ref.actor.optim.override_optimizer_config."
    keys = f"{MEGATRON} +{prefix}optimizer_cpu_offload=True +{prefix}optimizer_offload_fraction=0.5"
    assert config_of(found_of("verl", keys), tmp_path).actor.optimizer.cpu_offload == 0.5
    prefix = "trainer.policy.megatron_config.optimizer_config_kwargs."
    keys = f"trainer.strategy=megatron {prefix}optimizer_cpu_offload=true"
    assert config_of(found_of("skyrl", keys), tmp_path).actor.optimizer.cpu_offload is True
    flags = "--optimizer muon --muon-use-nesterov --muon-extra-scale-factor 0.2"
    muon: Any = config_of(found_of("slime", flags), tmp_path).actor.optimizer
    assert muon.name == "muon" and muon.muon.momentum == 0.9 and muon.muon.nesterov


def test_engines_of_verl_hold_fp8(tmp_path: Path) -> None:
    found = found_of("verl", "actor_rollout_ref.rollout.quantization=fp8")
    assert config_of(found, tmp_path).rollout.dtype == "fp8"


def test_ids_that_end_a_response_are_the_checkpoint_s_own_or_others_beside(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3", "eos_token_id": [7, 8]}))
    assert "rollout-stop-token-ids" in [one.key for one in found_of("slime", STOP, tmp_path).leftovers]
    found = config_of(found_of("slime", STOP + " 9", tmp_path), tmp_path)
    assert found.rollout.sampling.stop_token_ids == (9,)
    assert config_of(found_of("slime", STOP), tmp_path).rollout.sampling.stop_token_ids == (7, 8), (
        "the checkpoint is not on this machine"
    )


def test_fewer_prompts_than_replicas_or_engines_make_both_wider(tmp_path: Path) -> None:
    """For 3 prompts, 3 of 12 replicas and 3 of 12 engines remain. A mini-batch of 1 prompt has one replica."""
    more = MEGATRON + "trainer.nnodes=3 data.train_batch_size=3 actor_rollout_ref.actor.ppo_mini_batch_size=3 "
    more += "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2 "
    found = found_of("verl", more)
    config = config_of(found, tmp_path)
    assert (config.actor.parallel.tp, config.actor.parallel.cp, config.rollout.parallel.tp) == (2, 4, 8)
    assert len([note for note in found.notes if "the samples of a prompt stay together here" in note]) == 2
    one = config_of(found_of("verl", more + "actor_rollout_ref.actor.ppo_mini_batch_size=1"), tmp_path)
    assert (one.actor.parallel.cp, one.rollout.parallel.tp) == (12, 8)
    enough = config_of(found_of("verl", MEGATRON + "trainer.nnodes=3"), tmp_path)
    assert (enough.actor.parallel.cp, enough.rollout.parallel.tp) == (1, 2)


def test_families_that_sglang_has_not_are_served_by_the_own_engine(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "nemotron"}))
    assert found_of("slime", "", tmp_path).get("rollout.engine") == "embedded"
    assert found_of("slime", "").get("rollout.engine") == "sglang"


DETACHED = "actor_rollout_ref.model.mtp.enable=True actor_rollout_ref.model.mtp.enable_train=True "
DETACHED += "actor_rollout_ref.model.mtp.detach_encoder=DETACH actor_rollout_ref.model.mtp.enable_rollout=True"


def test_prediction_layers_whose_gradients_are_clipped_apart_stay_as_they_are() -> None:
    keys = "trainer.mtp.enabled=true trainer.mtp.loss_weight=0.2 trainer.policy.megatron_config.mtp_loss_topk=8"
    found = found_of("skyrl", keys)
    assert any("here they stay unchanged" in note for note in found.notes)
    assert not found.differences
    assert not any("prediction layers" in note for note in found_of("skyrl", "").notes)


@pytest.mark.parametrize(
    ("framework", "keys", "coef", "trains"),
    [
        ("slime", "--enable-mtp-training --mtp-num-layers 1 --mtp-loss-scaling-factor 0.3", 0.3, "layer"),
        ("slime", "--enable-mtp-training", 0.2, "layer"),
        ("verl", DETACHED.replace("DETACH", "True") + " model_engine=megatron", 0.1, "head"),
        ("verl", DETACHED.replace("DETACH", "False") + " model_engine=megatron", 0.1, "model"),
    ],
)
def test_prediction_layers_train_what_the_source_does_not_detach(
    framework: str, keys: str, coef: float, trains: str, tmp_path: Path
) -> None:
    found = found_of(framework, keys)
    mtp = config_of(found, tmp_path).model.mtp
    assert mtp and (mtp.coef, mtp.trains) == (coef, trains)
    assert any("slime's mask is one token" in note for note in found.notes) == (framework == "slime")
    assert not found.differences


@pytest.mark.parametrize(
    ("framework", "keys"),
    [
        ("slime", "--mtp-num-layers 1 --mtp-loss-scaling-factor 0.3"),
        ("verl", DETACHED.replace("DETACH", "True")),  # FSDP's
        ("verl", DETACHED.replace("enable_train=True", "enable_train=False") + " model_engine=megatron"),
    ],
)
def test_prediction_layers_that_no_source_trains_stay_as_they_are(framework: str, keys: str, tmp_path: Path) -> None:
    assert config_of(found_of(framework, keys.replace("DETACH", "True")), tmp_path).model.mtp is None


def test_more_prediction_layers_than_one_are_refused() -> None:
    with pytest.raises(ConfigError, match="only one such layer is trained"):
        found_of("slime", "--enable-mtp-training --mtp-num-layers 2")


SERVERS = "generator.inference_engine.external_server_urls=['http://10.0.0.5:8001','http://10.0.0.6:8001'] "
SERVERS += "generator.inference_engine.external_proxy_url=http://10.0.0.5:8000 "
SERVERS += "generator.inference_engine.tensor_parallel_size=4 trainer.placement.colocate_all=false"
APART = " generator.inference_engine.run_engines_locally=false"


def test_skyrls_external_servers_are_asked_by_ranks_without_devices(small: Path) -> None:
    found = found_of("skyrl", SERVERS + APART, small)
    config = config_of(found, small)
    assert config.placement == {"actor, reference": "0-3", "rollout, reward": "0-1"} and found.world_size == 4
    assert config.rollout.engine == "http" and config.rollout.parallel.tp == 1
    assert config.rollout.urls == ("http://10.0.0.5:8001", "http://10.0.0.6:8001")
    described = describe_job(small / "imported.yaml", [], DryRunOptions(world_size=4, gpu="h100"))
    assert "Ranks: 4" in described
    together = " trainer.placement.colocate_all=true generator.inference_engine.tensor_parallel_size=1"
    for placed in ("", together):
        with pytest.raises(ConfigError, match="external_server_urls: .*list every server in external_server_urls"):
            found_of("skyrl", SERVERS + placed)
    assert found_of("skyrl", "trainer.placement.colocate_all=false " + APART).get("rollout.engine") == "sglang"


DELTA = "generator.inference_engine.weight_sync_backend=delta generator.inference_engine.delta_weight_sync.sync_dir="


def test_syncs_of_what_changed_are_translated(small: Path) -> None:
    """SkyRL's external servers are vLLM servers. They load whole checkpoints from the same folder."""
    assert config_of(found_of("slime", "--update-weight-mode delta", small), small).weight_sync.delta is not None
    apart = f"trainer.placement.colocate_all=false {DELTA}gs://bucket/run"
    assert config_of(found_of("skyrl", apart, small), small).weight_sync.delta is not None
    found = found_of("skyrl", f"{SERVERS}{APART} {DELTA}/shared/run", small)
    config = config_of(found, small)
    assert config.weight_sync.delta is None and config.rollout.http.weights_dir == "/shared/run"
    assert any("vLLM's servers load whole checkpoints" in note for note in found.notes)
    of_cloud = found_of("skyrl", f"{SERVERS}{APART} {DELTA}s3://bucket/run", small)
    assert config_of(of_cloud, small).rollout.http.weights_dir is None


def test_verls_prompts_of_a_fully_asynchronous_run_are_steps() -> None:
    keys = "rollout.total_rollout_steps=6400 trainer.total_epochs=10"
    text = VERL.replace("trainer.total_training_steps=9", keys).replace("MODEL", "/models/m").replace("MORE", "")
    assert imported("verl", [text.replace("\n", " ")], rows=RowCounts(rows=7473)).get("steps") == 6400 // 64
    assert imported("verl", [text.replace("\n", " ")], rows=RowCounts(rows=128)).get("steps") == 10 * 2


@pytest.mark.parametrize(
    ("variables", "group_size"),
    [
        ({"OPEN_TRAINING_INT4_FAKE_QAT_FLAG": "1", "OPEN_TRAINING_INT4_GROUP_SIZE": "32"}, 32),
        ({"OPEN_TRAINING_INT4_GROUP_SIZE": "64", "A": "2", "OPEN_TRAINING_INT4_FAKE_QAT_FLAG": "1"}, 64),
        ({"OPEN_TRAINING_INT4_FAKE_QAT_FLAG": "1"}, 128),
        ({"OPEN_TRAINING_INT4_FAKE_QAT_FLAG": "0", "OPEN_TRAINING_INT4_GROUP_SIZE": "32"}, None),
        ({}, None),
    ],
)
def test_experts_of_slime_are_rounded_as_its_variables_say(
    variables: dict[str, str], group_size: int | None, tmp_path: Path
) -> None:
    """The variables are in the environment of a Ray job, on several lines, as in slime's scripts."""
    script = tmp_path / "run.sh"
    command = SLIME.replace("MODEL", "/models/m-INT4").replace("MORE", "").replace("\n", " ")
    environment = json.dumps({"env_vars": variables}, indent=2).replace('"', '\\"')
    script.write_text(f'JSON="{environment}"\nray job submit --runtime-env-json="${{JSON}}" -- {command}\n')
    found = imported("slime", [str(script)])
    rounded = config_of(found, tmp_path).model.fake_quantization
    assert (rounded and (rounded.group_size, rounded.scale_divisor)) == (group_size and (group_size, 7.0))
    assert any("model.path must be such a checkpoint" in note for note in found.notes) is (group_size is not None)


def test_experts_of_skyrl_are_rounded_beside_adapters(tmp_path: Path) -> None:
    prefix = "trainer.policy.model.fake_int4_qat."
    keys = f"trainer.strategy=megatron trainer.policy.model.lora.rank=8 {prefix}enabled=true "
    config = config_of(found_of("skyrl", f"{keys}{prefix}bf16_base_path=/models/bf16"), tmp_path)
    rounded = config.model.fake_quantization
    assert rounded and (rounded.group_size, rounded.scale_divisor) == (32, 7.5)
    assert config.model.path == "/models/bf16" and config.model.lora
    kimi = f"{keys}{prefix}scale_divisor=7.0 {prefix}q_min=-7 {prefix}group_size=64"
    found = found_of("skyrl", kimi)
    rounded = config_of(found, tmp_path).model.fake_quantization
    assert rounded and (rounded.group_size, rounded.scale_divisor) == (64, 7.0)
    assert any("model.path must be such a checkpoint" in note for note in found.notes)
    with pytest.raises(ConfigError, match="q_min.*-7 for 7"):
        found_of("skyrl", kimi.replace("q_min=-7", "q_min=-8"))
    with pytest.raises(ConfigError, match="symmetric.*no zero point"):
        found_of("skyrl", f"{kimi} {prefix}symmetric=false")
    assert config_of(found_of("skyrl", kimi.replace("=true", "=false")), tmp_path).model.fake_quantization is None


EXAMPLE = "--use-tis --custom-tis-function-path my.mis.compute_mis_weights_with_cp --custom-config-path weights.yaml "
VERL_CORRECTION = "algorithm.rollout_correction."
TRUNCATE = "tis_level: token\ntis_mode: truncate\ntis_lower_bound: 0.4\ntis_upper_bound: 3.0\n"


def of_example(options: str, folder: Path, monkeypatch: pytest.MonkeyPatch, more: str = "") -> Translation:
    """Translates slime's example. Its file is one folder above the command's working directory."""
    (folder / "weights.yaml").write_text(options)
    (folder / "runs").mkdir()
    monkeypatch.chdir(folder / "runs")
    return found_of("slime", EXAMPLE + more)


def test_slimes_example_weighs_normalizes_and_rejects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rejection without bounds uses the bounds of the weights. Rejected tokens stay in the divisors."""
    rejects = "use_rs: true\nrs_level: geometric\nrs_upper_bound: 1.1\nrs_veto_threshold: 0.001\n"
    found = of_example(TRUNCATE + rejects + "tis_batch_normalize: true\n", tmp_path, monkeypatch)
    assert not found.differences and any("tis_batch_normalize" in note for note in found.notes)
    correction = config_of(found, tmp_path).loss.correction
    assert (correction.method, correction.level, correction.low, correction.high) == ("tis", "token", 0, 3)
    assert (correction.normalize, correction.rejected) == ("mini_batch", "weight_0")
    assert [(one.level, one.low, one.high) for one in correction.masks] == [
        ("geometric", 0.4, 1.1),
        ("every_token", 0.001, 1e9),
    ]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("tis_level: sequence\ntis_mode: clip\ntis_upper_bound: 4.0\n", ("tis", "sequence", 0.25, 4)),
        ("tis_level: token\ntis_mode: mask\ntis_lower_bound: 0.5\ntis_upper_bound: 5.0\n", ("icepop", "token", 0.5, 5)),
    ],
)
def test_modes_of_slimes_example(
    options: str, expected: tuple[Any, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    correction = config_of(of_example(options, tmp_path, monkeypatch), tmp_path).loss.correction
    assert (correction.method, correction.level, correction.low, correction.high) == expected


@pytest.mark.parametrize(
    ("options", "more", "reason"),
    [
        (TRUNCATE + "own: 3\n", "", "own: 3: it has no counterpart here"),
        (TRUNCATE + "use_rs: true\nrs_level: token\n", "--entropy-coef 0.1", "also excluded from entropy and KL there"),
        ("tis_level: token\ntis_mode: mask\ntis_upper_bound: 5.0\ntis_batch_normalize: true\n", "", "excluded weights"),
        ("tis_level: turn\ntis_mode: mask\ntis_upper_bound: 5.0\n", "", "tis_level turn, tis_mode mask are not"),
    ],
)
def test_what_the_example_does_otherwise_is_refused(
    options: str, more: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UserError, match=reason):
        of_example(options, tmp_path, monkeypatch, more)


def test_what_only_the_examples_file_says_is_asked_for() -> None:
    with pytest.raises(UserError, match="weights.yaml not found"):
        found_of("slime", EXAMPLE)


def test_slimes_icepop_and_functions_of_ones_own(tmp_path: Path) -> None:
    weighs = "--use-tis --tis-clip 5 --tis-clip-low 0.5 --custom-tis-function-path "
    correction = config_of(found_of("slime", weighs + "slime.loss.icepop_function"), tmp_path).loss.correction
    assert (correction.method, correction.low, correction.high) == ("icepop", 0.5, 5)
    with pytest.raises(UserError, match="weights here come from loss.correction"):
        found_of("slime", weighs + "mine.weigh")


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ("", {"old_logprobs": "actor", "policy": "clip", "normalize": "step"}),
        (
            f" {VERL_CORRECTION}bypass_mode=true {VERL_CORRECTION}loss_type=reinforce",
            {"old_logprobs": "rollout", "policy": "reinforce", "normalize": "mini_batch"},
        ),
    ],
)
def test_verls_normalized_weights(more: str, expected: dict[str, str], tmp_path: Path) -> None:
    """verl takes the mean over the step or over the present log-probs. The latter are unknown when a step starts."""
    normalized = f"{VERL_CORRECTION}rollout_is=sequence {VERL_CORRECTION}rollout_is_batch_normalize=true"
    loss = config_of(found_of("verl", normalized + more), tmp_path).loss
    found = {"old_logprobs": loss.old_logprobs, "policy": loss.policy, "normalize": loss.correction.normalize}
    assert found == expected and loss.correction.level == "sequence"
