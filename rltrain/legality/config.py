"""What a config may ask for in any world: checks that span several keys."""

from collections.abc import Iterator

from rltrain.algorithms.registry import algorithm_of
from rltrain.config.schema import Config, Parallel
from rltrain.config.section import role_names, split_roles
from rltrain.errors import ConfigError, PlacementError, one_of
from rltrain.legality.backends import backend_problems
from rltrain.legality.checks import check_problems
from rltrain.legality.data import data_problems
from rltrain.legality.delta import delta_problems
from rltrain.legality.evaluation import evaluation_problems
from rltrain.legality.fake_quantization import fake_quantization_problems
from rltrain.legality.http_engines import http_problems
from rltrain.legality.learning import learning_problems
from rltrain.legality.lora import lora_problems
from rltrain.legality.mtp import mtp_problems
from rltrain.legality.optimizer import optimizer_problems
from rltrain.legality.problems import longest_text, refuse
from rltrain.legality.rewards import reward_problems
from rltrain.legality.router_replay import replay_problems
from rltrain.schedule.shape import RunShape, prompt_blocks_of
from rltrain.tasks.roles import served_roles


def check_config(config: Config) -> None:
    """Refuse what cannot work in any world. ConfigError; PlacementError if only the placed roles are at fault."""
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
                f"{key}.vpp: got {parallel.vpp} with {key}.pp 1; expected 1, or a pp of at least 2: one stage has no "
                "other to take turns with"
            )
        if role in served_roles():
            yield from _engine_problems(key, parallel)
        elif parallel.sequence_parallel and parallel.tp == 1:
            yield f"{key}.sequence_parallel: got true with {key}.tp 1; expected false, or a tp of at least 2"


def _engine_problems(key: str, parallel: Parallel) -> Iterator[str]:
    if parallel.etp is not None:
        yield f"{key}.etp: got {parallel.etp}; expected null: an engine's experts are each cut over tp / ep ranks"
    if parallel.pp > 1:
        yield f"{key}.pp: got {parallel.pp}; expected 1: the embedded engine has no pipeline stages"
    if parallel.cp > 1:
        yield f"{key}.cp: got {parallel.cp}; expected 1: only training and evaluation cut sequences among ranks"
    if parallel.sequence_parallel:
        yield f"{key}.sequence_parallel: got true; expected false: only training splits sequences"
    if parallel.tp % parallel.ep:
        yield (
            f"{key}.ep: got {parallel.ep} with {key}.tp {parallel.tp}; expected a divisor of that: experts are dealt "
            "out to the ranks of an engine"
        )


def _batch_problems(config: Config) -> Iterator[str]:
    batch, shape = config.batch, RunShape.of(config)
    samples = 1 if shape.from_pairs else shape.samples_per_group
    if prompt_blocks_of(batch, samples) is not None:
        return
    legal = _divisors(batch.prompts_per_step)
    cut, expected = "", f"a divisor of {batch.prompts_per_step}, as each takes whole prompts"
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
                f"{key}: got {served.kv_cache_gb} with {engine} sglang, whose server decides; expected auto: set "
                f"mem_fraction_static in {server}.args"
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
        yield f"env.batch_size: got {env.batch_size} with env.agent, whose runs go on by themselves; expected 1"


def _teacher_problems(config: Config) -> Iterator[str]:
    teacher, is_placed = config.teacher, "teacher" in config.placed_roles
    if is_placed and not teacher.path:
        yield "teacher.path: got none, and placement has role teacher; expected the checkpoint of a model to learn from"
    if teacher.path and not is_placed:
        yield "placement.teacher: the role is not placed, but teacher.path names a model; expected teacher: ranks"
    if teacher.max_distance is not None and teacher.where == "loss" and not teacher.top_k:
        yield (
            f"teacher.max_distance: got {teacher.max_distance} with teacher.where loss and teacher.top_k 0, an "
            "estimate; expected teacher.where: advantage, or teacher.top_k, whose distances it bounds, or null"
        )
    if teacher.kl == "forward" and (teacher.where != "loss" or not teacher.top_k):
        yield (
            f"teacher.kl: got forward with teacher.where {teacher.where} and teacher.top_k {teacher.top_k}; expected "
            "teacher.where: loss and tokens of the teacher's, such as teacher.top_k: 64: what the actor draws tells "
            "nothing of it"
        )
    for key, default in (("rest", True), ("min_logprob", None)):
        if teacher.kl == "reverse" and (value := getattr(teacher, key)) != default:
            yield f"teacher.{key}: got {value} with teacher.kl reverse; expected teacher.kl: forward, or no such key"
    if teacher.top_k and teacher.where == "advantage":
        yield (
            f"teacher.top_k: got {teacher.top_k} with teacher.where advantage, which is of the drawn token; expected "
            "teacher.where: loss, or teacher.top_k: 0"
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
            f"model.recompute.layers: got {given.layers} with granularity {granularity}, which is of all layers; "
            "expected null, or granularity: full"
        )
    if "modules" in given.model_fields_set and granularity != "selective":
        yield (
            f"model.recompute.modules: got {', '.join(given.modules) or 'none'} with granularity {granularity}, which "
            "is of whole layers; expected the key to be left out, or granularity: selective"
        )
    elif granularity == "selective" and not given.modules:
        yield "model.recompute.modules: got none; expected some, such as [core_attn, mlp], or model.recompute: none"


def _checkpoint_problems(config: Config) -> Iterator[str]:
    sync_every, memory = config.schedule.sync_every, config.checkpoint.memory
    intervals = {"checkpoint.save_interval": config.checkpoint.save_interval}
    if memory:
        intervals["checkpoint.memory.interval"] = memory.interval
    for key, interval in intervals.items():
        if interval % sync_every:
            yield (
                f"{key}: got {interval}; expected a multiple of schedule.sync_every {sync_every}: a "
                "checkpoint has the actor's weights, not the older ones that engines have between two weight syncs"
            )
