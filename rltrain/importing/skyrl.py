"""SkyRL's keys. Defaults are those of skyrl/train/config/config.py."""

from typing import Any

from rltrain.importing import skyrl_sft
from rltrain.importing.batches import (
    set_evaluation,
    set_mini_batches,
)
from rltrain.importing.conversions import (
    NOTHING,
    count,
    interval,
    one_of,
    pair,
    paths,
    ranks,
    real,
    text,
    truth,
)
from rltrain.importing.conversions import top_k as top_k_of
from rltrain.importing.engine import choose_engine
from rltrain.importing.fully_sharded import set_fully_sharded
from rltrain.importing.megatron_optimizer import megatron_options, set_megatron_optimizer
from rltrain.importing.prediction_head import leave_skyrls_prediction_layers
from rltrain.importing.skyrl_learning import (
    ALG,
    DECAYS,
    ENGINE,
    G,
    T,
    distills,
    set_algorithm,
    set_correction,
    set_loss,
    set_reward,
)
from rltrain.importing.skyrl_leftovers import HARMLESS
from rltrain.importing.skyrl_model import (
    MEGATRON,
    set_critic_lora,
    set_fake_quantization,
    set_lora,
    set_router_replay,
    slices_of,
)
from rltrain.importing.skyrl_servers import set_delta, set_servers, started_by_the_job
from rltrain.importing.steps import Rows, set_steps
from rltrain.importing.translation import Rule, SourceKeys, Translation, UntranslatableError, apply, sort_out

SECTIONS = ("trainer", "generator", "environment", "data", *skyrl_sft.SECTIONS)
LABEL = "reward_spec.ground_truth"
OPTIMIZER = "trainer.policy.optimizer_config."

PLAIN = (
    Rule(T + "policy.model.path", "model.path", "Qwen/Qwen2.5-1.5B-Instruct", text),
    Rule(T + "seed", "seed", 42, count),
    Rule(T + "max_prompt_length", "data.max_prompt_tokens", 512, count),
    Rule(T + "train_batch_size", "batch.prompts_per_step", 1024, count),
    Rule(T + "update_epochs_per_batch", "batch.epochs", 1, count),
    Rule(T + "eval_interval", "evaluation.interval", 5, interval),
    Rule(T + "ckpt_interval", "checkpoint.save_interval", 10, interval),
    Rule(T + "ckpt_path", "checkpoint.dir", None, text),
    Rule(T + "max_ckpts_to_keep", "checkpoint.keep", -1, interval),
    Rule(T + "hf_save_interval", "checkpoint.save_hf_interval", -1, interval),
    Rule(T + "project_name", "logging.wandb.project", "skyrl", text),
    Rule(T + "run_name", "logging.wandb.name", "test_run", text),
    Rule("data.train_data", "data.train.path", "~/data/gsm8k/train.parquet", paths),
    Rule(G + "n_samples_per_prompt", "batch.samples_per_prompt", 5, count),
    Rule(G + "apply_overlong_filtering", "advantages.mask_truncated", False, truth),
    Rule(G + "sampling_params.max_generate_length", "rollout.sampling.max_response_tokens", 1024, count),
    Rule(G + "sampling_params.temperature", "rollout.sampling.temperature", 1.0, real),
    Rule(G + "sampling_params.top_p", "rollout.sampling.top_p", 1.0, real),
    Rule(G + "sampling_params.top_k", "rollout.sampling.top_k", -1, top_k_of),
    Rule(ENGINE + "max_num_seqs", "rollout.max_running_requests", 1024, count),
    Rule(ALG + "eps_clip_low", "loss.clip_low", 0.2, real),
    Rule(ALG + "eps_clip_high", "loss.clip_high", 0.2, real),
    Rule(ALG + "sapo.tau_pos", "loss.sapo.tau_pos", 1.0, real),
    Rule(ALG + "sapo.tau_neg", "loss.sapo.tau_neg", 1.05, real),
    Rule(ALG + "clip_cov.clip_ratio", "loss.clip_cov.ratio", None, real),
    Rule(ALG + "clip_cov.clip_cov_lb", "loss.clip_cov.low", None, real),
    Rule(ALG + "clip_cov.clip_cov_ub", "loss.clip_cov.high", None, real),
    Rule(OPTIMIZER + "lr", "actor.optimizer.lr", 1e-6, real),
    Rule(OPTIMIZER + "weight_decay", "actor.optimizer.weight_decay", 1e-2, real),
    Rule(OPTIMIZER + "max_grad_norm", "actor.optimizer.clip_grad", 1.0, real),
    Rule(OPTIMIZER + "num_warmup_steps", "actor.optimizer.warmup_steps", 0, count),
    Rule(OPTIMIZER + "scheduler", "actor.optimizer.decay", "constant", one_of(DECAYS, "learning rates")),
)


def translate(keys: SourceKeys, out: Translation, rows: Rows) -> None:
    if "sft" in str(keys.get("-m", "")):
        skyrl_sft.translate(keys, out, rows)
        return
    apply(PLAIN, keys, out)
    out.set("data.train.prompt_key", "prompt", "SkyRL's column")
    out.set("data.train.label_key", LABEL, "SkyRL's column")
    first, second = pair(keys.get(OPTIMIZER + "adam_betas", [0.9, 0.999]))
    out.set("actor.optimizer.beta1", first, OPTIMIZER + "adam_betas")
    out.set("actor.optimizer.beta2", second, OPTIMIZER + "adam_betas")
    _batch(keys, out)
    _placement(keys, out)
    _trainer(keys, out)
    set_algorithm(keys, out)
    set_loss(keys, out)
    set_correction(keys, out)
    set_reward(keys, out)
    _sampling(keys, out)
    _schedule(keys, out)
    _engine(keys, out)
    named = (T + "max_training_steps", T + "epochs")
    set_steps(out, rows, keys.get(named[0]), keys.get(named[1], 1), named)
    sort_out(keys, HARMLESS, out)


def _batch(keys: SourceKeys, out: Translation) -> None:
    prompts = out.get("batch.prompts_per_step")
    mini = keys.get(T + "policy_mini_batch_size", 256)
    set_mini_batches(out, prompts, mini, T + "policy_mini_batch_size, which counts prompts")
    own = count(keys.get(T + "critic_mini_batch_size", 256))
    if keys.get(ALG + "advantage_estimator") == "gae" and own != count(mini):
        out.differs(T + "critic_mini_batch_size", own, "actor and critic have the same mini-batches here")
    tokens = count(keys.get(T + "max_tokens_per_microbatch", -1))
    longest = out.get("data.max_prompt_tokens") + out.get("rollout.sampling.max_response_tokens")
    longest = -(-longest // slices_of(keys))
    samples = count(keys.get(T + "micro_train_batch_size_per_gpu", 1))
    if tokens > 0:
        out.set("actor.micro_batch_tokens", tokens, T + "max_tokens_per_microbatch")
    else:
        origin = f"{T}micro_train_batch_size_per_gpu {samples} x {longest} tokens"
        out.set("actor.micro_batch_tokens", samples * longest, origin)
    chunk = keys.get(T + "logprobs_chunk_size", 1024)
    if chunk not in NOTHING:
        out.set("model.logits_chunk_tokens", count(chunk), T + "logprobs_chunk_size")
    evaluated = count(keys.get(T + "micro_forward_batch_size_per_gpu", 1)) * longest
    origin = T + "micro_forward_batch_size_per_gpu"
    out.set(f"{_frozen(keys)}.micro_batch_tokens", tokens if tokens > 0 else evaluated, origin)


def _gpus(keys: SourceKeys, role: str) -> int:
    """GPUs of a role; the first releases had the keys right below `trainer`."""
    number = 1
    for what in ("num_nodes", "num_gpus_per_node"):
        number *= count(keys.first(f"{T}placement.{role}_{what}", f"{T}{role}_{what}", default=1)[1])
    return number


def _frozen(keys: SourceKeys) -> str:
    """What SkyRL's reference is here."""
    return "teacher" if distills(keys) else "reference"


def _roles(keys: SourceKeys) -> list[str]:
    critic = ["critic"] if keys.get(ALG + "advantage_estimator") == "gae" else []
    penalty = truth(keys.get(ALG + "use_kl_loss", True)) or truth(keys.get(ALG + "use_kl_in_reward", False))
    return [*critic, *([_frozen(keys)] if penalty else [])]


def _placement(keys: SourceKeys, out: Translation) -> None:
    """SkyRL's rules: all colocated, with as many GPUs for the policy as for the engines; or the policy with the
    reference, and the others behind them."""
    engine_size, engines = 1, 1
    for size in ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"):
        engine_size *= count(keys.first(ENGINE + size, f"{G}inference_engine_{size}", default=1)[1])
    engines = count(keys.first(ENGINE + "num_engines", G + "num_inference_engines", default=1)[1])
    tp = count(keys.first(ENGINE + "tensor_parallel_size", G + "inference_engine_tensor_parallel_size", default=1)[1])
    out.set("rollout.parallel.tp", tp, ENGINE + "tensor_parallel_size")
    policy, rollout = _gpus(keys, "policy"), engines * engine_size
    out.ranks_per_node = count(
        keys.first(T + "placement.policy_num_gpus_per_node", T + "policy_num_gpus_per_node", default=1)[1]
    )
    others, together = (
        _roles(keys),
        truth(keys.first(T + "placement.colocate_all", T + "colocate_all", default=True)[1]),
    )
    of_others = set_servers(keys, out, policy)
    set_delta(keys, out, of_others=of_others)
    if together and started_by_the_job(keys):
        _all_together(keys, out, others, policy, rollout)
        return
    taken = policy
    out.place(["actor"], ranks(0, policy), T + "placement.policy_num_*")
    with_reference = truth(keys.first(T + "placement.colocate_policy_ref", T + "colocate_policy_ref", default=True)[1])
    frozen = _frozen(keys)
    if frozen in others and with_reference:
        own = _gpus(keys, "ref")
        if own != policy:
            raise UntranslatableError(
                f"num_policy_gpus {policy} and num_ref_gpus {own} must be the same when colocate_policy_ref is true"
            )
        out.place([frozen], ranks(0, policy), T + "placement.colocate_policy_ref")
        others.remove(frozen)
    for role, name in ((frozen, "ref"), ("critic", "critic")):
        if role in others:
            own = _gpus(keys, name)
            out.place([role], ranks(taken, own), f"{T}placement.{name}_num_*, behind the others")
            taken += own
    if of_others:
        out.world_size = taken
        return
    out.place(["rollout", "reward"], ranks(taken, rollout), ENGINE + "num_engines x tensor_parallel_size, behind them")
    out.world_size = taken + rollout


def _all_together(keys: SourceKeys, out: Translation, others: list[str], policy: int, rollout: int) -> None:
    if policy != rollout:
        raise UntranslatableError(
            f"num_policy_gpus ({policy}) and num_rollout_gpus ({rollout}) must be the same when colocating all models"
        )
    for role, name in (("critic", "critic"), (_frozen(keys), "ref")):
        given = f"{T}placement.{name}_num_gpus_per_node"
        if role in others and given in keys and _gpus(keys, name) != policy:
            raise UntranslatableError(
                f"num_policy_gpus ({policy}) and num_{name}_gpus ({_gpus(keys, name)}) must be the same when "
                "colocating all models"
            )
    for name in ("critic", "ref"):
        _gpus(keys, name)
    out.place(["actor", *others, "rollout", "reward"], ranks(0, policy), T + "placement.colocate_all")
    out.world_size = policy


def _trainer(keys: SourceKeys, out: Translation) -> None:
    strategy = str(keys.get(T + "strategy", "fsdp"))
    kind = T + "policy.megatron_config.lora_config.lora_type" if strategy == "megatron" else None
    set_lora(keys, out, T + "policy.model.lora.", kind)
    set_critic_lora(keys, out)
    set_router_replay(keys, out)
    set_fake_quantization(keys, out)
    leave_skyrls_prediction_layers(keys, out, T + "mtp.enabled", T + "mtp.")
    if strategy == "megatron":
        prefix = T + "policy.megatron_config.optimizer_config_kwargs."
        set_megatron_optimizer(megatron_options(keys, prefix), out, prefix)
        for name, here in MEGATRON.items():
            size = keys.get(f"{T}policy.megatron_config.{name}")
            if size not in NOTHING:
                out.set(f"actor.parallel.{here}", count(size), f"{T}policy.megatron_config.{name}")
        if out.get("actor.parallel.tp") > 1:
            out.set("actor.parallel.sequence_parallel", True, "SkyRL's with tensor parallelism")
        _reference_parallel(keys, out)
    else:
        set_fully_sharded(keys, out, T + "strategy", strategy, slices_of(keys), T + "policy.fsdp_config.")
    if truth(keys.get(T + "gradient_checkpointing", True)):
        out.set("model.recompute", "full", T + "gradient_checkpointing")
    _experts(keys, out)
    _records(keys, out)


def _records(keys: SourceKeys, out: Translation) -> None:
    mode, path = keys.get(T + "resume_mode", "latest"), keys.get(T + "resume_path")
    if mode in NOTHING:
        out.set("checkpoint.resume", "none", T + "resume_mode")
    elif mode == "from_path" and path not in NOTHING:
        out.set("checkpoint.resume", str(path), T + "resume_path")
    own = keys.get(T + "ref.model.path")
    if own not in NOTHING and (own != out.get("model.path") or distills(keys)):
        out.set(f"{_frozen(keys)}.path", str(own), T + "ref.model.path")


def _experts(keys: SourceKeys, out: Translation) -> None:
    balanced = keys.get(T + "policy.megatron_config.moe_router_load_balancing_type", "none")
    if balanced != "none":
        out.set(
            "model.moe.aux_loss_coef",
            real(keys.get(T + "policy.megatron_config.moe_aux_loss_coeff", 0)),
            "moe_aux_loss_coeff",
        )


def _reference_parallel(keys: SourceKeys, out: Translation) -> None:
    given = {here: keys.get(f"{T}ref.megatron_config.{name}") for name, here in MEGATRON.items()}
    own = {here: count(size) for here, size in given.items() if size not in NOTHING}
    actor = {here: out.get(f"actor.parallel.{here}") for here in MEGATRON.values()}
    frozen = _frozen(keys)
    if frozen in _roles(keys) and any(actor[here] != size for here, size in own.items()):
        for here, size in {**actor, **own}.items():
            if size is not None:
                out.set(f"{frozen}.parallel.{here}", size, T + "ref.megatron_config.*")


def _sampling(keys: SourceKeys, out: Translation) -> None:
    variables = keys.under(G + "chat_template_kwargs.")
    if variables:
        out.set("data.chat_template_args", variables, G + "chat_template_kwargs")
    stop = keys.get(G + "sampling_params.stop")
    if stop not in NOTHING:
        out.set("rollout.sampling.stop", [stop] if isinstance(stop, str) else stop, G + "sampling_params.stop")
    longest = keys.first(ENGINE + "engine_init_kwargs.max_model_len", G + "max_input_length")[1]
    needed = out.get("data.max_prompt_tokens") + out.get("rollout.sampling.max_response_tokens")
    most = max(count(longest), needed) if longest not in NOTHING else needed
    if "env.function" in out.settings and longest not in NOTHING:
        most = max(most, count(longest) + out.get("rollout.sampling.max_response_tokens"))
    out.set("rollout.max_context_tokens", most, "prompt and response" if most == needed else G + "max_input_length")
    files = keys.get("data.val_data", "~/data/gsm8k/validation.parquet")
    if files in NOTHING:
        out.settings.pop("evaluation.interval", None)
        return
    prefix = G + "eval_sampling_params."
    given = any(key.startswith(prefix) for key in keys.left())
    sampling: dict[str, Any] = {
        "temperature": real(keys.get(prefix + "temperature", 1.0 if given else 0.0)),
        "top_p": real(keys.get(prefix + "top_p", 1.0)),
        "top_k": top_k_of(keys.get(prefix + "top_k", -1)),
        "max_response_tokens": count(
            keys.get(prefix + "max_generate_length", out.get("rollout.sampling.max_response_tokens"))
        ),
    }
    data = {"path": paths(files), "prompt_key": "prompt", "label_key": LABEL}
    samples = count(keys.get(G + "eval_n_samples_per_prompt", 1))
    set_evaluation(out, data, sampling, samples, "data.val_data, generator.eval_sampling_params")


def _schedule(keys: SourceKeys, out: Translation) -> None:
    if truth(keys.get(T + "fully_async.enabled", False)) or "fully_async" in str(keys.get("-m", "")):
        out.set("schedule.mode", "asynchronous", T + "fully_async.enabled")
        out.set("schedule.max_staleness", count(keys.get(T + "fully_async.max_staleness_steps", 4)), T + "fully_async")
    elif "async" in str(keys.get("-m", "")):
        out.set("schedule.mode", "asynchronous", str(keys.get("-m")))
        out.set("schedule.max_staleness", 1, "one step ahead")


def _engine(keys: SourceKeys, out: Translation) -> None:
    arguments: dict[str, Any] = {
        "mem_fraction_static": real(
            keys.first(ENGINE + "gpu_memory_utilization", G + "gpu_memory_utilization", default=0.8)[1]
        )
    }
    if truth(keys.get(ENGINE + "enforce_eager", False)):
        arguments["disable_cuda_graph"] = True
    rounded = keys.get(ENGINE + "engine_init_kwargs.quantization")
    if rounded == "fp8":
        out.set("rollout.dtype", "fp8", ENGINE + "engine_init_kwargs.quantization")
    elif rounded not in NOTHING:
        out.differs(
            ENGINE + "engine_init_kwargs.quantization", rounded, "engines' weights here are rounded to fp8 alone"
        )
    backend = str(keys.first(ENGINE + "backend", G + "backend", default="vllm")[1])
    ep = count(keys.get(ENGINE + "expert_parallel_size", 1))
    if out.get("rollout.engine") == "http":
        for name, value in arguments.items():
            out.leave(name, value, "of how the servers were started")
        return
    choose_engine(out, backend, min(ep, out.get("rollout.parallel.tp")), arguments, ENGINE + "*")
