"""Refuses configs that cannot work in any world."""

import re
from collections import Counter
from collections.abc import Iterator

from rltrain.algorithms.registry import algorithm_of
from rltrain.config.learning import Correction
from rltrain.config.models import CHEAP, RecomputedModule
from rltrain.config.schema import Config, Loss, Parallel, PromptFile, Trained
from rltrain.config.section import role_names, split_roles
from rltrain.errors import ConfigError, PlacementError, one_of
from rltrain.planning.problems import http_problems, longest_text, lora_key, lora_problems, refuse, reward_problems
from rltrain.planning.validation_models import (
    fake_quantization_problems,
    mtp_problems,
    replay_problems,
    vision_problems,
)
from rltrain.planning.validation_schedule import evaluation_problems
from rltrain.schedule.shape import RunShape, prompt_blocks_of
from rltrain.tasks.roles import model_roles, served_roles, trained_roles

# Limits of the training backends.

CUT = {
    "tp": "fsdp gathers whole layers",
    "pp": "every rank computes all layers",
    "vpp": "there is no pipeline",
    "ep": "experts are sharded like all parameters",
    "etp": "experts are sharded like all parameters",
    "layers_per_stage": "there is no pipeline",
    "sequence_parallel": "there is no tensor parallelism",
}
"""Keys of `parallel` without effect in backend fsdp, each with the reason."""
REDUCTION = {
    "distributed_optimizer": "optimizer states are sharded like their parameters",
    "overlap": "fully_shard always overlaps communication with computation on GPUs",
    "gradient_bucket_mb": "gradients are reduced layer by layer",
}
OPTIMIZER = {
    "name": "muon needs whole matrices, but fsdp shards them",
    "moments_dtype": "torch's AdamW keeps moments in the dtype of its parameters",
}
MODEL = {
    "activation_offload": "rltrain does not control the activations of transformers' layers",
    "residual_dtype": "transformers' layers add in model.dtype",
}


def backend_problems(config: Config) -> Iterator[str]:
    """Yields the problems of the placed roles with models of a training backend."""
    sharded = [role for role in model_roles() if role in config.placed_roles and config.backend_of(role) == "fsdp"]
    for role in sharded:
        yield from _sharded_parallel_problems(config, role)
    if sharded:
        yield from _model_problems(config, sharded[0])
    for role in model_roles():
        if getattr(config, role).fsdp is not None and config.backend_of(role) != "fsdp":
            yield f"{role}.fsdp: got a section with backend megatron; expected none, or {role}.backend: fsdp"


def _sharded_parallel_problems(config: Config, role: str) -> Iterator[str]:
    parallel, key = config.parallel_of(role)
    none = Parallel()
    for name, reason in CUT.items():
        given = getattr(parallel, name)
        if given != getattr(none, name):
            expected = "null" if getattr(none, name) is None else str(getattr(none, name)).lower()
            yield (
                f"{key}.{name}: got {given} with backend fsdp for role {role}; expected {expected}, or "
                f"{role}.backend: megatron. With fsdp {reason}; all ranks of the role share every parameter, and "
                "sequences by cp"
            )
    for name, reason in REDUCTION.items() if role in trained_roles() else ():
        section, default = getattr(config, role), Trained()
        if getattr(section, name) != getattr(default, name):
            expected = {True: "true", None: "null"}.get(getattr(default, name), getattr(default, name))
            given = str(getattr(section, name)).lower()
            yield f"{role}.{name}: got {given} with backend fsdp; expected {expected}: {reason}"
    if role in trained_roles():
        yield from _offload_problems(config, role)
    for name, reason in OPTIMIZER.items() if role in trained_roles() else ():
        given, default = getattr(getattr(config, role).optimizer, name), getattr(Trained().optimizer, name)
        if given != default:
            said, expected = (str(value).lower() for value in (given, default))
            yield f"{role}.optimizer.{name}: got {said} with backend fsdp; expected {expected}: {reason}"


def _offload_problems(config: Config, role: str) -> Iterator[str]:
    given = getattr(config, role).optimizer.cpu_offload
    if not given:
        return
    if given not in (True, 1):
        yield (
            f"{role}.optimizer.cpu_offload: got {given} with backend fsdp; expected true or false, since its shards "
            "are all on the host or all on the device"
        )
    if config.lora_of(role) is not None:
        yield (
            f"{role}.optimizer.cpu_offload: got {str(given).lower()} with backend fsdp and {lora_key(role)}; expected "
            "false: the optimizer of adapters is small"
        )


def _model_problems(config: Config, role: str) -> Iterator[str]:
    model, backend = config.model, f"backend fsdp for role {role}"
    if model.dtype == "float16":
        yield f"model.dtype: got float16 with {backend}, which has no loss scaling; expected bfloat16 or float32"
    for name, reason in MODEL.items():
        given = getattr(model, name)
        if given and given != model.dtype:
            expected = "false" if given is True else "null"
            yield f"model.{name}: got {str(given).lower()} with {backend}; expected {expected}: {reason}"
    if model.router_replay != "off":
        yield (
            f"model.router_replay: got {model.router_replay} with {backend}, whose routers cannot replay choices; "
            "expected off"
        )
    refused = [module for module in model.recomputed.modules or () if module not in ("activation", "layernorm")]
    if refused:
        yield (
            f"model.recompute.modules: got {', '.join(refused)} with {backend}; expected activation and layernorm, or "
            "model.recompute: full"
        )
    for name in ("aux_loss_coef", "z_loss_coef", "bias_update_rate"):
        value = getattr(model.moe, name)
        if value:
            yield f"model.moe.{name}: got {value} with {backend}; expected 0: its routers do not balance experts"
    if config.residency.communicators == "release":
        yield (
            f"residency.communicators: got release with {backend}, whose device mesh keeps its groups; expected keep"
        )


# The checks during a run.


def check_problems(config: Config) -> Iterator[str]:
    """Yields the problems of section `checks`. Like every problem, each names the keys, the reason and the expected
    values."""
    algorithm = algorithm_of(config)
    for key in ("max_logprob_diff", "max_kl"):
        limit = getattr(config.checks, key)
        if limit is not None and not algorithm.generates:
            yield (
                f"checks.{key}: got {limit} with algorithm {algorithm.name}, which trains on no samples of an engine; "
                "expected null"
            )
    if config.checks.action == "pause" and not config.checkpoint.saves:
        yield (
            "checks.action: got pause with checkpoint.save_interval 0 and checkpoint.save_every_s 0, so there is no "
            "checkpoint to continue from; expected one of the two above 0, or checks.action: stop or warn"
        )


# Files of rows.


def data_problems(config: Config) -> Iterator[str]:
    data = config.data
    evaluated = [(plan.config_key, plan.file) for plan in config.evaluations]
    for key, file in (("data.train", data.train), *evaluated):
        yield from file_problems(key, file)
        yield from _title_problems(key, file)
    for key, file in evaluated:
        if any(source.weight is not None for source in file.sources):
            yield f"{key}.sources: got weights; expected none: an evaluation uses every row"
    weighted = [source.weight is not None for source in data.train.sources]
    if any(weighted) and not all(weighted):
        yield (
            f"data.train.sources.{weighted.index(False)}.weight: got none, but other sources have one; expected a "
            "weight for every source, or for none: without weights the rows form one set"
        )
    if not algorithm_of(config).reads_responses:
        for name in sorted({"max_response_tokens", "on_long_row"} & data.model_fields_set):
            yield (
                f"data.{name}: got {getattr(data, name)} with algorithm {config.algorithm}, whose rows have no "
                "responses; remove the key: rollout.sampling.max_response_tokens limits generated responses"
            )
    yield from _solved_rate_problems(config)
    if "env" in config.placed_roles:
        yield from _environment_key_problems(data.train)


def _solved_rate_problems(config: Config) -> Iterator[str]:
    settings, num_samples = config.data.solved_rate, config.batch.samples_per_prompt
    if settings is None:
        return
    if not algorithm_of(config).generates:
        yield (
            f"data.solved_rate: got a section with algorithm {config.algorithm}, which generates no samples; expected "
            "null"
        )
        return
    if config.data.curriculum is not None:
        yield (
            "data.solved_rate: got a section together with data.curriculum, which already chooses the prompts of a "
            "step; expected one of the two, and null for the other"
        )
    if settings.low > settings.high:
        yield f"data.solved_rate.low: got {settings.low}; expected at most data.solved_rate.high {settings.high}"
    elif not any(settings.low <= solved / num_samples <= settings.high for solved in range(num_samples + 1)):
        yield (
            f"data.solved_rate: got low {settings.low} and high {settings.high}, but with batch.samples_per_prompt "
            f"{num_samples} no possible rate is between them; expected a wider window, or more samples per prompt"
        )


def file_problems(key: str, file: PromptFile) -> Iterator[str]:
    """Yields the problems of the PromptFile at `key`."""
    if bool(file.path) == bool(file.sources):
        given = "both path and sources are" if file.path else "neither path nor sources is"
        yield f"{key}: {given} given; expected {key}.path (a file) or {key}.sources (a list of {{path, weight}})"
    for number, source in enumerate(file.sources):
        if not source.path:
            yield f"{key}.sources.{number}.path: got an empty list; expected one or more files"


def _title_problems(key: str, file: PromptFile) -> Iterator[str]:
    titles = [source.title for source in file.sources]
    for number, title in enumerate(titles):
        if not re.fullmatch(r"[A-Za-z0-9_.-]+", title):
            yield (
                f"{key}.sources.{number}.name: got {title!r}; expected letters, digits, underscores, points and "
                "hyphens, because the metric is rollout/reward_mean/<name>"
            )
    for title, count in Counter(titles).items():
        if count > 1:
            yield (
                f"{key}.sources: {count} are called {title!r}; expected different names for their metrics "
                f"({key}.sources.<number>.name)"
            )


def _environment_key_problems(train: PromptFile) -> Iterator[str]:
    """Yields the problems of row keys with an environment. It needs one name per column, and has its own prompts and
    tools."""
    for name in ("prompt_key", "label_key"):
        keys = {getattr(source, name) for source in train.parts()}
        if len(keys) > 1:
            yield (
                f"data.train.sources: got {len(keys)} values of {name} with an environment; expected the same one for "
                "all sources, because an environment reads one column"
            )
    for number, source in enumerate(train.parts()):
        key = f"data.train.sources.{number}" if train.sources else "data.train"
        if source.system_key is not None:
            yield (
                f"{key}.system_key: got {source.system_key!r} with an environment; expected null: environments get the "
                "row, and decide the first messages to the model"
            )
        if source.tools_key is not None:
            yield (
                f"{key}.tools_key: got {source.tools_key!r} with an environment; expected null: environments define "
                "their tools"
            )


# Weight syncs of changes only. Engines must keep their weights, and the sync must compare them.


def delta_problems(config: Config) -> Iterator[str]:
    """Yields the problems of weight_sync.delta."""
    if config.weight_sync.delta is not None and config.rollout.engine == "http":
        yield from _problems_of_files(config)
    if config.synced_delta is None:
        return
    if config.weight_sync.transport != "planned":
        yield (
            f"weight_sync.delta: got a section with weight_sync.transport {config.weight_sync.transport}, which sends "
            "whole tensors; expected weight_sync.transport: planned, or weight_sync.delta: null"
        )
    if config.rollout.offload is True:
        yield (
            "weight_sync.delta: got a section with rollout.offload true, so engines drop their weights before every "
            "sync, and each sync would send everything; expected rollout.offload: auto or false, or "
            "weight_sync.delta: null"
        )


def _problems_of_files(config: Config) -> Iterator[str]:
    """Yields the problems of deltas for servers at URLs."""
    if config.rollout.http.weights == "group":
        yield (
            "weight_sync.delta: got a section with rollout.http.weights group, which sends servers whole tensors; "
            "expected rollout.http.weights: folder, or weight_sync.delta: null"
        )
    if config.rollout.protocol == "vllm":
        yield (
            "weight_sync.delta: got a section with rollout.protocol vllm, whose servers load only whole checkpoints; "
            "expected weight_sync.delta: null"
        )


# Optimizers, and activations on the host.

NOT_OFFLOADED: tuple[RecomputedModule, ...] = (*CHEAP, "mla_up_proj")
"""Modules whose inputs stay on the device to make their outputs again."""


def optimizer_problems(config: Config) -> Iterator[str]:
    """Yields the problems of optimizers and of model.activation_offload."""
    for role in trained_roles():
        optimizer = getattr(config, role).optimizer
        if optimizer.name == "muon" and optimizer.cpu_offload:
            given = str(optimizer.cpu_offload).lower()
            yield (
                f"{role}.optimizer.cpu_offload: got {given} with {role}.optimizer.name muon, whose orthogonalisation "
                "is too slow on a host; expected false, or name adamw. If memory is short, set "
                f"{role}.optimizer.moments_dtype: bfloat16 or {role}.offload: true"
            )
        if optimizer.name == "muon" and config.lora_of(role):
            yield (
                f"{role}.optimizer.name: got muon with {lora_key(role)}, whose matrices are low-rank factors; expected "
                "adamw"
            )
        if optimizer.name != "muon" and "muon" in optimizer.model_fields_set:
            yield (
                f"{role}.optimizer.muon: got a section with {role}.optimizer.name {optimizer.name}, which ignores it; "
                "expected name: muon, or no such section"
            )
    yield from _activation_problems(config)


def _activation_problems(config: Config) -> Iterator[str]:
    chosen = config.model.recomputed.chosen(transformer_engine=False)
    staying = [module for module in NOT_OFFLOADED if module in chosen]
    if config.model.activation_offload and staying:
        yield (
            f"model.activation_offload: got true with {', '.join(staying)} in model.recompute.modules, whose inputs "
            "stay on the device; expected false, or other modules, or model.recompute: full"
        )


# The policy loss.


def learning_problems(config: Config) -> Iterator[str]:
    """Yields the problems of section `loss`."""
    yield from _policy_problems(config)
    yield from _correction_problems(config.loss)
    yield from _kl_problems(config.loss)


def _policy_problems(config: Config) -> Iterator[str]:
    loss, algorithm = config.loss, algorithm_of(config)
    if loss.policy != "clip" and not algorithm.generates:
        yield (
            f"loss.policy: got {loss.policy} with algorithm {algorithm.name}, which has no policy loss; remove the key"
        )
    if (loss.policy == "own") != (loss.function is not None):
        expected = "null" if loss.function else '"file.py:function" or "module:function"'
        yield f"loss.function: got {loss.function} with loss.policy {loss.policy}; expected {expected}"
    if loss.dual_clip is not None and loss.policy not in ("clip", "own"):
        yield (
            f"loss.dual_clip: got {loss.dual_clip} with loss.policy {loss.policy}; expected null, since it is the "
            "second bound of loss.policy clip"
        )
    if loss.policy == "geometric_mean" and algorithm.per_token:
        yield (
            f"loss.policy: got geometric_mean with algorithm {algorithm.name}, which has an advantage per token; "
            "expected clip, cispo or sapo: geometric_mean needs one advantage per sequence"
        )
    if loss.clip_cov.low >= loss.clip_cov.high:
        yield (
            f"loss.clip_cov.low: got {loss.clip_cov.low} with loss.clip_cov.high {loss.clip_cov.high}; expected less, "
            "because clipped tokens are chosen among those with a covariance between the two"
        )


def _correction_problems(loss: Loss) -> Iterator[str]:
    correction = loss.correction
    if correction.high is None:
        for key, default in (("method", "tis"), ("level", "token"), ("low", 0), ("normalize", None)):
            value = getattr(correction, key)
            if value != default:
                yield (
                    f"loss.correction.{key}: got {value} without loss.correction.high; expected an upper bound of the "
                    "ratio in loss.correction.high, such as 2.0"
                )
    elif correction.low >= correction.high:
        yield (
            f"loss.correction.low: got {correction.low} with loss.correction.high {correction.high}; expected less, "
            "because only ratios between the two are used unchanged"
        )
    elif loss.old_logprobs != "actor" and correction.method != "mask" and loss.policy != "reinforce":
        yield (
            f"loss.correction.high: got {correction.high} with loss.old_logprobs {loss.old_logprobs} and "
            f"loss.correction.method {correction.method}, so the policy's ratio already compares the actor with the "
            "engine; expected loss.old_logprobs: actor, or loss.correction.method: mask (without weights), or "
            "loss.policy: reinforce (without a ratio)"
        )
    elif correction.normalize is not None and correction.method == "mask":
        yield (
            f"loss.correction.normalize: got {correction.normalize} with loss.correction.method mask, whose weights "
            "are all 1; expected null, or tis, mis or icepop"
        )
    elif correction.normalize == "step" and loss.old_logprobs != "actor":
        yield (
            f"loss.correction.normalize: got step with loss.old_logprobs {loss.old_logprobs}; expected mini_batch: the "
            "weights use the present log-probs, and every mini-batch changes these"
        )
    yield from _rejection_problems(correction)


def _rejection_problems(correction: Correction) -> Iterator[str]:
    for number, bounds in enumerate(correction.masks):
        if bounds.low >= bounds.high:
            yield (
                f"loss.correction.masks.{number}.low: got {bounds.low} with high {bounds.high}; expected less, because "
                "only ratios between the two are kept"
            )
    if correction.rejected == "weight_0" and correction.reject_above is None and not correction.masks:
        yield (
            "loss.correction.rejected: got weight_0 without loss.correction.masks or reject_above; expected one of "
            "these, or left_out: without them nothing is rejected"
        )
    if correction.reject_above is None and correction.reject_by != "k3":
        yield (
            f"loss.correction.reject_by: got {correction.reject_by} without loss.correction.reject_above; expected a "
            "limit there: the estimated KL per token above which a sequence is left out, such as 0.01"
        )


def _kl_problems(loss: Loss) -> Iterator[str]:
    if loss.kl.unbiased and loss.kl.where == "reward":
        yield (
            "loss.kl.unbiased: got true with loss.kl.where reward; expected loss.kl.where: loss, since a reward has no "
            "gradient"
        )
    if loss.kl.unbiased and loss.kl.estimator == "k2":
        yield (
            "loss.kl.unbiased: got true with loss.kl.estimator k2, whose mean is never the KL; expected "
            "loss.kl.estimator: k3"
        )
    if loss.kl.estimator == "full" and (loss.kl.where == "reward" or loss.kl.unbiased):
        other = "where reward" if loss.kl.where == "reward" else "unbiased true"
        yield (
            f"loss.kl.estimator: got full with loss.kl.{other}; expected k1, k2 or k3: the exact KL over the whole "
            "vocabulary can only be a term of the loss"
        )


# Checks of several keys together, for any world.


def check_config(config: Config) -> None:
    """Refuses a config that cannot work in any world.

    Raises PlacementError if only the placed roles are wrong, and ConfigError otherwise.
    """
    placement = list(_role_problems(config))
    others = [
        *_parallel_problems(config),
        *backend_problems(config),
        *data_problems(config),
        *_batch_problems(config),
        *_length_problems(config),
        *_engine_memory_problems(config),
        *_environment_problems(config),
        *algorithm_of(config).problems(),
        *_training_problems(config),
        *optimizer_problems(config),
        *_recompute_problems(config),
        *_teacher_problems(config),
        *learning_problems(config),
        *reward_problems(config),
        *evaluation_problems(config),
        *check_problems(config),
        *delta_problems(config),
        *http_problems(config),
        *replay_problems(config),
        *_checkpoint_problems(config),
        *lora_problems(config),
        *fake_quantization_problems(config),
        *mtp_problems(config),
        *vision_problems(config),
    ]
    refuse([*placement, *others], ConfigError if others else PlacementError)


def _role_problems(config: Config) -> Iterator[str]:
    placed = [(key, role) for key in config.placement for role in split_roles(key)]
    algorithm = algorithm_of(config)
    usable = [role for role in role_names() if role in algorithm.usable_roles()]
    settled = algorithm.generates or algorithm.from_pairs or config.evaluations
    without = "" if settled else " without data.eval"
    for key, role in placed:
        if role not in role_names():
            yield f"placement.{key}: unknown role {role!r}; expected {one_of(role, usable)}"
        elif role not in usable:
            yield (
                f"placement.{key}: role {role} has nothing to do in algorithm {algorithm.name}{without}; "
                f"expected only {', '.join(usable)}"
            )
    names = {role for _, role in placed}
    needs = algorithm.needs()
    for role in role_names():
        if role in needs and role not in names:
            yield f"placement.{role}: the role is not placed, but {needs[role]} needs it; expected {role}: ranks"


def _parallel_problems(config: Config) -> Iterator[str]:
    for role in role_names():
        parallel, key = config.parallel_of(role)
        if key != f"{role}.parallel":
            continue
        if parallel.vpp > 1 and parallel.pp == 1:
            yield (
                f"{key}.vpp: got {parallel.vpp} with {key}.pp 1; expected 1, or a pp of at least 2, since vpp "
                "interleaves pipeline stages"
            )
        if role in served_roles():
            yield from _engine_problems(key, parallel)
        elif parallel.sequence_parallel and parallel.tp == 1:
            yield f"{key}.sequence_parallel: got true with {key}.tp 1; expected false, or a tp of at least 2"


def _engine_problems(key: str, parallel: Parallel) -> Iterator[str]:
    if parallel.etp is not None:
        yield f"{key}.etp: got {parallel.etp}; expected null: an engine splits each expert over tp / ep ranks"
    if parallel.pp > 1:
        yield f"{key}.pp: got {parallel.pp}; expected 1: the embedded engine has no pipeline stages"
    if parallel.cp > 1:
        yield f"{key}.cp: got {parallel.cp}; expected 1: only training backends split sequences among ranks"
    if parallel.sequence_parallel:
        yield f"{key}.sequence_parallel: got true; expected false: only training splits sequences"
    if parallel.tp % parallel.ep:
        yield (
            f"{key}.ep: got {parallel.ep} with {key}.tp {parallel.tp}; expected a divisor of tp, since an engine's "
            "ranks share its experts"
        )


def _batch_problems(config: Config) -> Iterator[str]:
    batch, shape = config.batch, RunShape.of(config)
    samples = 1 if shape.from_pairs else shape.samples_per_group
    if prompt_blocks_of(batch, samples) is not None:
        return
    legal = _divisors(batch.prompts_per_step)
    cut, expected = "", f"a divisor of {batch.prompts_per_step}, because each takes whole prompts"
    if batch.mini_batches_by == "samples":
        legal = [blocks * parts for blocks in legal for parts in _divisors(samples)]
        cut = f" and {samples} samples per prompt"
        expected = f"a divisor of {batch.prompts_per_step} times one of {samples}"
    nearest = min(legal, key=lambda n: (abs(n - batch.mini_batches), n))
    yield (
        f"batch.mini_batches: got {batch.mini_batches} with batch.prompts_per_step {batch.prompts_per_step}{cut}; "
        f"expected {expected}. The nearest that works is {nearest}"
    )


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def _length_problems(config: Config) -> Iterator[str]:
    if algorithm_of(config).reads_responses:
        return
    longest, sizes = longest_text(config)
    if "rollout" in config.placed_roles and config.rollout.max_context_tokens < longest:
        yield f"rollout.max_context_tokens: got {config.rollout.max_context_tokens}; expected at least {sizes}"


def _engine_memory_problems(config: Config) -> Iterator[str]:
    problems = []
    for role in (role for role in served_roles() if role in config.placed_roles):
        served = config.served(role)
        key, engine, server = (config.engine_key(role, name) for name in ("kv_cache_gb", "engine", "sglang"))
        if served.engine == "sglang" and served.kv_cache_gb != "auto":
            problems.append(
                f"{key}: got {served.kv_cache_gb} with {engine} sglang; expected auto, and mem_fraction_static in "
                f"{server}.args"
            )
    yield from dict.fromkeys(problems)


def _environment_problems(config: Config) -> Iterator[str]:
    env, is_placed = config.env, "env" in config.placed_roles
    named = [key for key, given in (("function", env.function), ("agent", env.agent)) if given is not None]
    if is_placed and len(named) != 1:
        given = "both env.function and env.agent are" if named else "neither env.function nor env.agent is"
        yield (
            f"env: {given} given, and placement has role env; expected one: an environment, such as calculator or "
            '"module:name" (docs/environments.md), or an agent (docs/endpoint.md)'
        )
    if named and not is_placed:
        yield f"placement.env: the role is not placed, but env.{named[0]} needs it; expected env: ranks"
    if env.agent is not None and bool(env.agent.command) == bool(env.agent.function):
        yield "env.agent: expected either command or function"
    if env.agent is not None and env.batch_size > 1:
        yield f"env.batch_size: got {env.batch_size} with env.agent, whose runs are independent; expected 1"


def _teacher_problems(config: Config) -> Iterator[str]:
    teacher, is_placed = config.teacher, "teacher" in config.placed_roles
    if is_placed and not teacher.path:
        yield "teacher.path: got none, and placement has role teacher; expected the checkpoint of a model to learn from"
    if teacher.path and not is_placed:
        yield "placement.teacher: the role is not placed, but teacher.path names a model; expected teacher: ranks"
    if teacher.max_distance is not None and teacher.where == "loss" and not teacher.top_k:
        yield (
            f"teacher.max_distance: got {teacher.max_distance} with teacher.where loss and teacher.top_k 0, which has "
            "no distances to bound; expected teacher.where: advantage, or a teacher.top_k above 0, or null"
        )
    if teacher.kl == "forward" and (teacher.where != "loss" or not teacher.top_k):
        yield (
            f"teacher.kl: got forward with teacher.where {teacher.where} and teacher.top_k {teacher.top_k}; expected "
            "teacher.where: loss with teacher.top_k above 0, such as 64, since the forward KL needs the teacher's "
            "likeliest tokens"
        )
    for key, default in (("rest", True), ("min_logprob", None)):
        if teacher.kl == "reverse" and (value := getattr(teacher, key)) != default:
            yield f"teacher.{key}: got {value} with teacher.kl reverse; expected teacher.kl: forward, or no such key"
    if teacher.top_k and teacher.where == "advantage":
        yield (
            f"teacher.top_k: got {teacher.top_k} with teacher.where advantage, which uses the sampled token only; "
            "expected teacher.where: loss, or teacher.top_k: 0"
        )


def _training_problems(config: Config) -> Iterator[str]:
    if config.reference.refresh_every and "reference" not in config.placed_roles:
        yield (
            f"reference.refresh_every: got {config.reference.refresh_every}, but no role reference is placed; expected "
            "0, or reference: ranks in placement"
        )
    for role, optimizer in (("actor", config.actor.optimizer), ("critic", config.critic.optimizer)):
        if optimizer.min_lr > optimizer.lr:
            yield (
                f"{role}.optimizer.min_lr: got {optimizer.min_lr}; expected at most {role}.optimizer.lr {optimizer.lr}"
            )
        scale = optimizer.loss_scale
        if scale.minimum > scale.initial:
            yield (
                f"{role}.optimizer.loss_scale.minimum: got {scale.minimum}; expected at most "
                f"{role}.optimizer.loss_scale.initial {scale.initial}"
            )


def _recompute_problems(config: Config) -> Iterator[str]:
    given, granularity = config.model.recomputed, config.model.recomputed.granularity
    if given.layers is not None and granularity != "full":
        yield (
            f"model.recompute.layers: got {given.layers} with granularity {granularity}, which applies to all layers; "
            "expected null, or granularity: full"
        )
    if "modules" in given.model_fields_set and granularity != "selective":
        yield (
            f"model.recompute.modules: got {', '.join(given.modules or ()) or 'none'} with granularity {granularity}; "
            "remove the key, or set granularity: selective"
        )
    elif granularity == "selective" and given.modules == ():
        yield "model.recompute.modules: got none; expected some, such as [core_attn, mlp], or model.recompute: none"


def _checkpoint_problems(config: Config) -> Iterator[str]:
    sync_every, memory = config.schedule.sync_every, config.checkpoint.memory
    intervals = {"checkpoint.save_interval": config.checkpoint.save_interval}
    if memory:
        intervals["checkpoint.memory.interval"] = memory.interval
    for key, interval in intervals.items():
        if interval % sync_every:
            yield (
                f"{key}: got {interval}; expected a multiple of schedule.sync_every {sync_every}, because a checkpoint "
                "lacks the older weights of engines between two weight syncs"
            )
