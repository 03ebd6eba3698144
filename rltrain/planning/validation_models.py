"""Refuses configs that cannot work with their models."""

from collections.abc import Iterator, Mapping
from pathlib import Path

from rltrain.algorithms.registry import algorithm_of
from rltrain.config.data import Images
from rltrain.config.models import OF_POLICY, FakeQuantization
from rltrain.config.schema import Config
from rltrain.models import Architecture
from rltrain.models.checkpoint_model import local_mechanisms, num_predicting, positions_of
from rltrain.models.registry import FAMILIES, PREDICTIONS, TURNED, UNTOLD_FAMILIES
from rltrain.planning.problems import (
    adapted_model_problems,
    evaluated_text,
    longest_text,
    lora_key,
    refuse,
    sglang_problems,
    url_problems,
)
from rltrain.reshard.megatron_layout import chunks_of
from rltrain.runtime.grid import Grid, planned_layers
from rltrain.schedule.shape import RunShape
from rltrain.tasks.roles import DECLARED, device_roles, drawing_roles, model_roles, served_roles, trained_roles

# Mechanisms of some model families that not every parallelism, backend or engine supports.


def trained_mechanism_problems(config: Config, key: str, grid: Grid, architecture: Architecture) -> Iterator[str]:
    """Yields the problems of a trained or evaluated model. `key` is the section with its parallel sizes."""
    mechanisms = local_mechanisms(architecture)
    if mechanisms and config.model.transformer_impl == "transformer_engine":
        yield (
            f"model.transformer_impl: got transformer_engine, but a model of {architecture.family} has "
            f"{' and '.join(mechanisms)}, which only Megatron's own layers can train; expected auto or local"
        )
    if grid.cp > 1 and not grid.is_sharded and architecture.windows is not None:
        yield (
            f"{key}.cp: got {grid.cp}; expected 1: a model of {architecture.family} has layers with a window of "
            f"{architecture.windows.size} tokens, but context parallelism attends to all earlier tokens"
        )
    if grid.cp > 1 and not grid.is_sharded and architecture.attention_softcap is not None:
        yield f"{key}.cp: got {grid.cp}; expected 1: a model of {architecture.family} has soft caps on its scores"
    if grid.cp > 1 and not grid.is_sharded and architecture.attention_sinks:
        yield f"{key}.cp: got {grid.cp}; expected 1: a model of {architecture.family} has attention sinks"
    if architecture.delta is not None:
        yield from _delta_problems(key, grid, architecture)


def _delta_problems(key: str, grid: Grid, architecture: Architecture) -> Iterator[str]:
    """Yields the problems of a trained or evaluated model with gated delta nets."""
    assert architecture.delta is not None
    yield from _delta_head_problems(key, grid, architecture)
    num_key_heads = architecture.delta.num_key_heads
    if num_key_heads % grid.tp == 0 and num_key_heads % (grid.tp * grid.cp):
        yield (
            f"{key}.cp: got {grid.cp} with tp {grid.tp}; expected a divisor of {num_key_heads // grid.tp}, since the "
            f"cp ranks share the {num_key_heads} key heads of gated delta nets"
        )
    if grid.is_sharded and grid.cp > 1:
        yield (
            f"{key}.cp: got {grid.cp} with backend fsdp; expected 1, or megatron: a model of {architecture.family} has "
            "gated delta nets, whose states need the tokens in order"
        )


def _delta_head_problems(key: str, grid: Grid, architecture: Architecture) -> Iterator[str]:
    delta = architecture.delta
    if delta is not None and delta.num_key_heads % grid.tp:
        yield (
            f"{key}.tp: got {grid.tp}, which does not divide the {delta.num_key_heads} key heads of the model's gated "
            "delta nets"
        )


def served_mechanism_problems(config: Config, role: str, grid: Grid, architecture: Architecture) -> Iterator[str]:
    """Yields the problems of the mechanisms of a served model."""
    yield from _delta_head_problems(config.parallel_of(role)[1], grid, architecture)
    if config.served(role).engine == "sglang":
        yield from sglang_problems(config, role, architecture)


# Served models, and the ranks of their engines.


def served_model_problems(config: Config, role: str, grid: Grid, architecture: Architecture) -> Iterator[str]:
    """Yields the problems of the model of an engine. Of servers at URLs, only the delivery of weights is checked."""
    if config.served(role).engine == "http":
        yield from _delivery_problems(config, role, architecture)
        return
    if architecture.unlisted:
        path, key = config.checkpoint_of(role)
        yield (
            f"{key}: the model in {path} is of family {architecture.family}, which no engine of rltrain serves, so "
            f"role {role} cannot generate with it; expected a model of {', '.join(FAMILIES)}, or an algorithm without "
            "a rollout: sft, dpo, reward_model"
        )
        return
    parallel_key = config.parallel_of(role)[1]
    is_sglang = config.served(role).engine == "sglang"
    yield from served_mechanism_problems(config, role, grid, architecture)
    if architecture.moe is None:
        if grid.ep > 1:
            yield f"{parallel_key}.ep: got {grid.ep}; expected 1: the model has no experts"
        return
    if is_sglang and grid.ep > 1:
        yield (
            f"{parallel_key}.ep: got {grid.ep} with {role}.engine sglang; expected 1: its servers split every expert "
            "over all of their ranks"
        )
    yield from _share_problems(parallel_key, grid, architecture)


def _delivery_problems(config: Config, role: str, architecture: Architecture) -> Iterator[str]:
    """Yields the problems of sending a model's weights to servers at URLs."""
    vision, lora = config.model.vision, config.model.lora
    if architecture.vision is not None and vision is not None and (lora.vision if lora else vision.train):
        trained = "model.lora.vision" if lora else f"{VISION}.train"
        yield (
            f"{role}.engine: got http with {trained} true, but its servers keep the features of earlier images over "
            f"weight syncs; expected embedded or sglang, or {trained}: false"
        )
    served = config.served(role)
    if architecture.family in TURNED and (served.http.weights != "folder" or config.weight_sync.delta):
        yield (
            f"{role}.engine: got http with a model of {architecture.family}, whose files have experts in another form; "
            f"expected {role}.http.weights: folder without weight_sync.delta, or embedded or sglang"
        )


def _share_problems(key: str, grid: Grid, architecture: Architecture) -> Iterator[str]:
    moe = architecture.moe
    assert moe is not None
    if architecture.num_experts % grid.ep:
        yield f"{key}.ep: got {grid.ep}, which does not divide the {architecture.num_experts} experts of the model"
    cut = grid.tp // grid.ep
    if moe.ffn_hidden_size % cut:
        yield (
            f"{key}.tp: got {grid.tp} with {key}.ep {grid.ep}, which splits each expert in {cut}; expected a divisor "
            f"of its {moe.ffn_hidden_size} units, or a larger ep"
        )


# Limits of gpt-oss's experts. All sides keep their matrices in the form of the files.

KEPT = "whose experts' matrices stay in the form of its files"


def interleaved_expert_problems(
    config: Config, grids: Mapping[str, Grid], architectures: Mapping[str, Architecture]
) -> Iterator[str]:
    """Yields the problems of placed models with such experts."""
    found = [role for role in grids if role in architectures and (moe := architectures[role].moe) and moe.interleaved]
    for role in found:
        what = f"the model of role {role} is {architectures[role].family}, {KEPT}"
        if role in trained_roles() and getattr(config, role).optimizer.name == "muon":
            yield (
                f"{role}.optimizer.name: got muon, but {what}: one tensor per layer, which is no matrix; expected adamw"
            )
        if role in served_roles() and config.served(role).dtype == "fp8":
            yield (f"{config.engine_key(role, 'dtype')}: got fp8, but {what} and cannot be rounded; expected auto")
    if found and config.model.fake_quantization:
        role = found[0]
        yield (
            f"model.fake_quantization: got a section, but the model of role {role} is {architectures[role].family}, "
            f"{KEPT}; expected null"
        )


# The settings of model.fake_quantization.

KEY = "model.fake_quantization"
GIVEN = f"{KEY}: got a section"


def fake_quantization_problems(config: Config) -> Iterator[str]:
    """Yields the problems of model.fake_quantization found from the config alone."""
    if config.model.fake_quantization is None:
        return
    for role in (role for role in served_roles() if role in OF_POLICY and role in config.placed_roles):
        if config.served(role).dtype == "fp8":
            yield (
                f"{GIVEN} with {config.engine_key(role, 'dtype')} fp8, which would round the rounded weights again; "
                "expected only one of the two"
            )
    if config.rollout.engine == "http" and not algorithm_of(config).trains:
        yield (
            f"{GIVEN} with rollout.engine http, whose servers load the checkpoint themselves; expected null, or "
            "rollout.engine: embedded or sglang"
        )
    recomputed = config.model.recomputed
    if config.model.activation_offload and (recomputed.granularity != "full" or recomputed.layers is not None):
        yield (
            f"model.activation_offload: got true with {KEY}, whose rounded weights would be offloaded with the "
            "activations; expected false, or model.recompute: full"
        )
    yield from _adapter_problems(config)


def _adapter_problems(config: Config) -> Iterator[str]:
    """Yields the problems with low-rank adapters. They are added to the rounded base and not rounded themselves."""
    if config.model.lora is None:
        return
    if config.weight_sync.adapters == "apart":
        yield (
            f"weight_sync.adapters: got apart with {KEY}; expected merged, since engines get the rounded base merged "
            "with the adapters"
        )
    if config.reference.refresh_every:
        yield (
            f"reference.refresh_every: got {config.reference.refresh_every} with {KEY} and model.lora; expected 0: the "
            "reference would round the adapters too"
        )


def fake_quantization_problems_of_models(
    config: Config, grids: Mapping[str, Grid], architectures: Mapping[str, Architecture]
) -> Iterator[str]:
    """Yields the problems of model.fake_quantization with the placed models. Role inference is in `grids` unless it has
    the actor's ranks and layout."""
    settings = config.model.fake_quantization
    if settings is None:
        return
    if architectures["actor"].moe is None:
        yield f"{GIVEN}; expected null: the model in {config.model.path} has no experts, and only experts are rounded"
        return
    if config.model.lora and "inference" in grids:
        yield (
            f"{GIVEN} with model.lora and role inference, whose ranks would round the adapters too; expected only one "
            "of the two, or no inference in placement"
        )
    loads = not algorithm_of(config).trains
    for role in (role for role in OF_POLICY if role in grids and architectures[role].moe):
        if role not in served_roles() or loads:
            yield from _cut_groups(config, settings, role, grids[role], architectures[role])


def _cut_groups(
    config: Config, settings: FakeQuantization, role: str, grid: Grid, architecture: Architecture
) -> Iterator[str]:
    """Yields the problems of groups of rows in experts' matrices. Every rank needs whole groups.

    Weights of a trained model are rounded before engines split them, so they are not checked for engines.
    """
    moe, size, key = architecture.moe, settings.group_size, config.parallel_of(role)[1]
    assert moe is not None
    if architecture.hidden_size % size:
        yield (
            f"{KEY}.group_size: got {size}; expected a divisor of {architecture.hidden_size}, the hidden size of the "
            f"model of role {role}"
        )
    is_engine = role in served_roles()
    num_ranks = grid.tp // grid.ep if is_engine else 1 if grid.is_sharded else grid.etp or grid.tp
    share = moe.ffn_hidden_size // num_ranks
    if share % size:
        cut = f", split over {num_ranks} ranks" if num_ranks > 1 else ""
        remedy = f", or experts on fewer ranks ({key}.{'ep' if is_engine else 'etp'})" if num_ranks > 1 else ""
        yield (
            f"{KEY}.group_size: got {size}; expected a divisor of {share}, the rows of an expert's last matrix in role "
            f"{role}{cut}{remedy}"
        )


# The settings of model.mtp.

MTP = "model.mtp"
ASKED = f"{MTP}: got a section"


def mtp_problems(config: Config) -> Iterator[str]:
    """Yields the problems of model.mtp found from the config alone."""
    algorithm, model = algorithm_of(config), config.model
    if model.mtp is None or not algorithm.trains:
        return
    if algorithm.name == "reward_model":
        yield f"{ASKED} with algorithm reward_model, whose model ends in a score without such a layer; expected null"
    for role in ("actor", "inference"):
        if role in config.placed_roles and config.backend_of(role) == "fsdp":
            yield (
                f"{ASKED} with backend fsdp for role {role}, but models of transformers have no such layer; expected "
                f"null, or {role}.backend: megatron"
            )
    if model.lora is not None:
        yield f"{ASKED} with model.lora, which trains only adapters; expected only one of the two"
    if model.residual_dtype is not None:
        yield f"model.residual_dtype: got {model.residual_dtype} with {MTP}; expected null"
    reference_path, key = config.checkpoint_of("reference")
    if config.reference.refresh_every and not config.predicts("reference"):
        yield (
            f"reference.refresh_every: got {config.reference.refresh_every} with {MTP} and {key} {reference_path}; "
            "expected 0, or no path, since the reference would lack the actor's layer for a further token"
        )


def mtp_problems_of_models(
    config: Config, grids: Mapping[str, Grid], architectures: Mapping[str, Architecture]
) -> Iterator[str]:
    """Yields the problems of model.mtp with the placed models."""
    if config.model.mtp is None or not algorithm_of(config).trains or "actor" not in grids:
        return
    path, model = config.model.path, architectures["actor"]
    found = num_predicting(Path(path), model.family)
    if model.family not in PREDICTIONS:
        yield (
            f"{ASKED}, but the model in {path} is of family {model.family}; expected null: such layers can be trained "
            f"for {', '.join(PREDICTIONS)}, and are copied unchanged for others"
        )
    elif found != 1:
        yield (
            f"{ASKED}, but {PREDICTIONS[model.family].counts[0]} is {found} in the config.json of {path} (model.path); "
            "expected null, or a checkpoint with one such layer"
        )
    elif model.tied_embeddings and grids["actor"].pp > 1:
        yield (
            f"actor.parallel.pp: got {grids['actor'].pp} with {MTP} and tied embeddings; expected 1: the last stage "
            "would also need the embedding"
        )


# The settings of model.vision.

VISION = "model.vision"


def vision_problems(config: Config) -> Iterator[str]:
    """Yields the problems of model.vision, and of the keys without effect if it is null."""
    if config.model.vision is not None:
        yield from _problems_of_images(config)
        return
    for role in trained_roles():
        if (lora := config.lora_of(role)) and lora.vision:
            yield f"{lora_key(role)}.vision: got true without {VISION}; expected false, as no tower is trained"
    if config.data.images != Images():
        yield f"data.images: got a section without {VISION}; expected none, as prompts have no images"


BLIND_ROLES = ("teacher", "judge", "reward_model")
"""Roles that would get the tokens of images without the images."""


def _problems_of_images(config: Config) -> Iterator[str]:
    """Yields the problems of roles, engines and algorithms that cannot use images."""
    given, model = f"{VISION}: got a section", config.model
    for role in (role for role in BLIND_ROLES if role in config.placed_roles):
        yield f"{given} with role {role}, which would not see the images; expected null, or no such role"
    if algorithm_of(config).name == "reward_model":
        yield f"{given} with algorithm reward_model, which trains on texts only; expected null"
    if model.mtp is not None:
        yield f"{given} with {MTP}, whose layer takes no positions of images; expected only one of the two"
    if model.fake_quantization is not None:
        yield f"{given} with model.fake_quantization, which has no rule for a tower; expected only one of the two"
    if model.transformer_impl == "transformer_engine":
        yield (
            f"model.transformer_impl: got transformer_engine with {VISION}; expected auto or local, since its rotary "
            "embeddings take one position of a token"
        )
    for role in (role for role in drawing_roles() if role in config.placed_roles):
        served = config.served(role)
        if served.engine == "http" and served.protocol in ("vllm", "openai"):
            yield f"{role}.protocol: got {served.protocol} with {VISION}; expected auto or sglang, which takes images"


def _first_layers_problems(key: str, grid: Grid, architecture: Architecture) -> Iterator[str]:
    """Yields a problem if layers with features of a tower are not all in the first chunk of the first stage."""
    needed = len(architecture.vision.deepstack) if architecture.vision else 0
    if needed and not grid.is_sharded and (found := len(chunks_of(architecture, grid)[0][0].layers)) < needed:
        yield (
            f"{key}: the first pipeline stage begins with {found} layers, but the tower has features for the first "
            f"{needed}; expected at least {needed}. Set layers_per_stage, or a smaller pp or vpp"
        )


# The settings of model.router_replay.


def replay_problems(config: Config) -> Iterator[str]:
    """Yields the problems of model.router_replay found from the config alone."""
    algorithm, mode = algorithm_of(config), config.model.router_replay
    if mode == "off" or not algorithm.trains:
        return
    given = f"model.router_replay: got {mode}"
    if not algorithm.generates:
        yield f"{given} with algorithm {algorithm.name}, which uses no samples of an engine; expected off"
    elif mode == "recompute" and not algorithm.needs_actor_logprobs():
        yield (
            f"{given}, but with loss.old_logprobs {config.loss.old_logprobs} and algorithm {algorithm.name} the actor "
            "computes no old log-probs, so there are no choices to replay; expected loss.old_logprobs: actor, or "
            "model.router_replay: rollout or off"
        )


def replay_problems_of_models(
    config: Config, grids: Mapping[str, Grid], architectures: Mapping[str, Architecture]
) -> Iterator[str]:
    """Yields the problems of model.router_replay with the placed models. Role inference is in `grids` unless it has the
    actor's ranks and layout."""
    mode = config.model.router_replay
    if mode == "off" or not algorithm_of(config).trains:
        return
    if architectures["actor"].moe is None:
        yield f"model.router_replay: got {mode}; expected off: the model in {config.model.path} has no experts"
    elif mode == "recompute" and "inference" in grids:
        yield (
            "model.router_replay: got recompute with role inference, whose ranks cannot send their choices of experts "
            "to the actor; expected rollout or off, or no inference in placement"
        )


# Models on the grids of a placement.

DEEPEP_RANKS = (2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 144, 160)
"""Numbers of ranks with settings for DeepEP's buffers (deep_ep, Buffer.get_dispatch_config)."""
DEEPEP_ELEMENTS = 8
"""Number of bfloat16 elements in the 16 bytes that DeepEP copies at a time."""


def check_against_architecture(
    config: Config, grids: Mapping[str, Grid], architectures: Mapping[str, Architecture]
) -> None:
    """Refuses models without an engine, grids that do not divide the model or the batch, and texts too long for a
    model.

    `architectures` are by role. The actor's is the one of model.path. Raises ConfigError.
    """
    problems = [*_data_parallel_problems(config, grids), *_balance_problems(config, grids, architectures)]
    problems += adapted_model_problems(config, architectures)
    problems += replay_problems_of_models(config, grids, architectures)
    problems += fake_quantization_problems_of_models(config, grids, architectures)
    problems += interleaved_expert_problems(config, grids, architectures)
    problems += mtp_problems_of_models(config, grids, architectures)
    problems += _dispatcher_problems(config, grids, architectures)
    for role in grids:
        if role in device_roles():
            problems += _model_problems(config, role, architectures)
            problems += _grid_problems(config.parallel_of(role)[1], grids[role], architectures[role])
            if role in served_roles():
                problems += url_problems(config, role, len(grids[role].ranks))
                problems += _stop_problems(config, role, architectures[role])
                problems += served_model_problems(config, role, grids[role], architectures[role])
            else:
                key = config.parallel_of(role)[1]
                problems += trained_mechanism_problems(config, key, grids[role], architectures[role])
                problems += _sharded_problems(config, role, grids[role], architectures[role])
                problems += _slice_problems(config, key, grids[role], architectures[role])
                problems += _first_layers_problems(key, grids[role], architectures[role])
                problems += _expert_problems(config, role, grids[role], architectures)
    refuse(problems)


def _model_problems(config: Config, role: str, architectures: Mapping[str, Architecture]) -> Iterator[str]:
    architecture = architectures[role]
    path, key = config.checkpoint_of(role)
    found = f"{key}: the model in {path} has"
    if DECLARED[role].reads_text:
        yield from _context_problems(config, role, architecture)
        return
    if architecture.vocab_size < architectures["actor"].vocab_size:
        yield (
            f"{found} a vocabulary of {architecture.vocab_size}; expected at least the "
            f"{architectures['actor'].vocab_size} of model.path, because it evaluates these tokens"
        )
    texts = [longest_text(config)]
    if role == ("evaluation" if config.evaluates_apart else "rollout"):
        texts += [evaluated_text(config, plan) for plan in config.evaluations]
    for longest, sizes in texts:
        if longest > architecture.max_positions:
            yield (
                f"{sizes}, but the model in {key} ({path}) has {positions_of(architecture)}; expected a smaller or "
                "equal sum"
            )


def _context_problems(config: Config, role: str, architecture: Architecture) -> Iterator[str]:
    """Yields the problem of an engine whose texts are not the policy's samples."""
    if DECLARED[role].model == "served":
        longest = getattr(config, role).max_context_tokens
        if longest > architecture.max_positions:
            yield (
                f"{role}.max_context_tokens: got {longest}, but the model in {role}.path has "
                f"{positions_of(architecture)}; expected at most that"
            )


def _stop_problems(config: Config, role: str, architecture: Architecture) -> Iterator[str]:
    """Yields the problem of stop tokens outside a model's vocabulary."""
    sampling = config.judge.sampling if role == "judge" else config.rollout.sampling
    key = "judge" if role == "judge" else "rollout"
    beyond = [token for token in sampling.stop_token_ids if token >= architecture.vocab_size]
    if beyond:
        yield (
            f"{key}.sampling.stop_token_ids: got {beyond[0]}; expected less than {architecture.vocab_size}, the "
            f"vocabulary of the model in {config.checkpoint_of(role)[1]}"
        )


def _data_parallel_problems(config: Config, grids: Mapping[str, Grid]) -> Iterator[str]:
    """Yields roles with more replicas than prompt groups in a batch. Evaluations are exempt."""
    if not algorithm_of(config).trains:
        return
    batch, blocks = config.batch, RunShape.of(config).prompt_blocks
    for role, grid in grids.items():
        if DECLARED[role].beside_steps:
            continue
        groups, of = batch.prompts_per_step, f"batch.prompts_per_step {batch.prompts_per_step}"
        if role in trained_roles():
            groups //= blocks
            of += f" in {blocks} blocks for mini-batches" if blocks > 1 else ""
        if groups < grid.dp:
            yield (
                f"placement.{role}: {len(grid.ranks)} ranks make {grid.dp} data-parallel replicas, but {of} gives them "
                f"{groups} prompts; expected at least {grid.dp} prompts, or fewer ranks"
            )


def _balance_problems(
    config: Config, grids: Mapping[str, Grid], architectures: Mapping[str, Architecture]
) -> Iterator[str]:
    """Yields keys of expert balancing without effect on any trained model.

    Without training they are not checked, since they may belong to the run of the evaluated checkpoint.
    """
    if not algorithm_of(config).trains:
        return
    found = [architectures[role].moe for role in trained_roles() if role in grids]
    with_biases = any(moe and moe.score == "sigmoid" for moe in found)
    for name, about, is_there in (
        ("aux_loss_coef", "experts", any(found)),
        ("z_loss_coef", "experts", any(found)),
        ("bias_update_rate", "experts chosen by a bias, like deepseek_v3 and glm4_moe", with_biases),
    ):
        value = getattr(config.model.moe, name)
        if value and not is_there:
            yield f"model.moe.{name}: got {value}; expected 0: no trained model has {about}"


def _grid_problems(key: str, grid: Grid, architecture: Architecture) -> Iterator[str]:
    moe = architecture.moe
    units = [("attention heads", architecture.num_heads)]
    if moe is None or moe.dense_layers:
        units.append(("feed-forward units", architecture.ffn_hidden_size))
    if moe and moe.shared_ffn_hidden_size:
        units.append(("feed-forward units of shared experts", moe.shared_ffn_hidden_size))
    for name, size in units:
        if size % grid.tp:
            yield f"{key}.tp: got {grid.tp}, which does not divide the model's {size} {name}"
    num_kv_heads = architecture.num_kv_heads
    if num_kv_heads % grid.tp and grid.tp % num_kv_heads:
        yield (
            f"{key}.tp: got {grid.tp}; expected a divisor or a multiple of the model's {num_kv_heads} key-value heads"
        )
    num_layers, num_chunks = architecture.num_layers, grid.pp * grid.vpp
    if grid.layers_per_stage is not None:
        if len(grid.layers_per_stage) != num_chunks or sum(grid.layers_per_stage) != num_layers:
            planned = f", such as {[*planned_layers(num_layers, num_chunks)]}" if num_layers >= num_chunks else ""
            yield (
                f"{key}.layers_per_stage: got {[*grid.layers_per_stage]}; expected {num_chunks} numbers "
                f"(pp {grid.pp} x vpp {grid.vpp}) that sum up to the model's {num_layers} layers{planned}"
            )
    elif num_layers < num_chunks:
        yield (
            f"{key}.pp: got {grid.pp} with vpp {grid.vpp}, which makes {num_chunks} chunks of the model's {num_layers} "
            "layers; expected at most as many chunks as layers, or layers_per_stage with a 0 for empty chunks"
        )


def _sharded_problems(config: Config, role: str, grid: Grid, architecture: Architecture) -> Iterator[str]:
    path, key = config.checkpoint_of(role)
    if grid.is_sharded and architecture.moe and architecture.moe.score == "sigmoid":
        yield (
            f"{role}.backend: got fsdp, but the model in {path} ({key}) chooses experts by a bias, which is no "
            "parameter of transformers' model and cannot be sharded; expected megatron"
        )
    if grid.is_sharded and architecture.family in UNTOLD_FAMILIES:
        yield (
            f"{role}.backend: got fsdp, but the model in {path} ({key}) is {architecture.family}, whose attention in "
            "transformers cannot separate packed samples; expected megatron"
        )
    if architecture.unlisted and architecture.head == "value" and not architecture.unlisted.classifier:
        yield f"{key}: the model in {path} has no classifier in transformers, so a score model cannot be saved"


def _slice_problems(config: Config, key: str, grid: Grid, architecture: Architecture) -> Iterator[str]:
    if grid.cp == 1:
        return
    if architecture.num_experts and grid.is_sharded:
        yield f"{key}.cp: got {grid.cp}; expected 1: backend fsdp splits sequences only for dense models"
    if config.model.cp_communication != "all_to_all" and not grid.is_sharded:
        return
    how, remedy = "model.cp_communication all_to_all", ", or model.cp_communication: auto"
    if grid.is_sharded:
        how, remedy = "backend fsdp, whose ranks have all tokens of some heads", ""
    num_heads, num_kv_heads = architecture.num_heads // grid.tp, max(1, architecture.num_kv_heads // grid.tp)
    if num_heads % grid.cp or (num_kv_heads % grid.cp and grid.cp % num_kv_heads):
        yield (
            f"{key}.cp: got {grid.cp} with {how}, and a tensor-parallel rank has {num_heads} attention heads and "
            f"{num_kv_heads} key-value heads; expected a divisor of the former and a divisor or multiple of the "
            f"latter{remedy}"
        )


def _expert_problems(config: Config, role: str, grid: Grid, architectures: Mapping[str, Architecture]) -> Iterator[str]:
    moe, key = architectures[role].moe, config.parallel_of(role)[1]
    owner = key.partition(".")[0]
    if moe is None:
        if owner == role or architectures[owner].moe:
            yield from _shares_of_nothing(key, grid, "" if owner == role else role)
        return
    for name, size, whole, of in (
        ("ep", grid.ep, moe.num_experts, "experts"),
        ("etp", grid.etp or grid.tp, moe.ffn_hidden_size, "feed-forward units of an expert"),
    ):
        if whole % size:
            given = f"{size}" if name == "ep" or grid.etp else f"null, which means tp {size}"
            nearest = min((n for n in range(1, whole + 1) if whole % n == 0), key=lambda n: (abs(n - size), n))
            yield (
                f"{key}.{name}: got {given}, which does not divide the model's {whole} {of}; the nearest that does is "
                f"{nearest}"
            )


def _dispatcher_problems(
    config: Config, grids: Mapping[str, Grid], architectures: Mapping[str, Architecture]
) -> Iterator[str]:
    """Yields the problems of dispatcher deepep, which lacks kernels for some sizes."""
    if config.model.moe.dispatcher != "deepep":
        return
    given = "model.moe.dispatcher: got deepep"
    found = [role for role in grids if role in model_roles() and architectures[role].moe]
    if found and config.model.dtype != "bfloat16":
        yield (
            f"{given} with model.dtype {config.model.dtype}; expected alltoall, or model.dtype bfloat16, the only "
            "dtype that deepep sends"
        )
    for role in found:
        num_ranks, key = grids[role].ep * (grids[role].etp or grids[role].tp), config.parallel_of(role)[1]
        if num_ranks > 1 and num_ranks not in DEEPEP_RANKS:
            closest = min(DEEPEP_RANKS, key=lambda n: (abs(n - num_ranks), n))
            yield (
                f"{given}, but {key} makes {num_ranks} ranks share a layer's experts (ep x etp), and deepep has no "
                f"buffers for this number; expected alltoall, or another number: the nearest is {closest}"
            )
        if architectures[role].hidden_size % DEEPEP_ELEMENTS:
            yield (
                f"{given}, but the model of role {role} has a hidden size of {architectures[role].hidden_size}; "
                f"expected alltoall, since deepep sends multiples of {DEEPEP_ELEMENTS} elements"
            )


def _shares_of_nothing(key: str, grid: Grid, borrower: str) -> Iterator[str]:
    """Yields the problems of expert parallelism without experts. `borrower` is a role with another role's parallel
    sizes."""
    whose, remedy = (f"the model of role {borrower}", f", or {borrower}.parallel") if borrower else ("the model", "")
    for name, size, none in (("ep", grid.ep, "1"), ("etp", grid.etp or 1, "null")):
        if size > 1:
            yield f"{key}.{name}: got {size}; expected {none}{remedy}: {whose} has no experts"
