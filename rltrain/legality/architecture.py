"""What a config may ask for with the models that it names, on the grids that its placement makes."""

from collections.abc import Iterator, Mapping

from rltrain.algorithms.registry import algorithm_of
from rltrain.config.schema import Config
from rltrain.legality.fake_quantization import fake_quantization_problems_of_models
from rltrain.legality.http_engines import url_problems
from rltrain.legality.interleaved_experts import interleaved_expert_problems
from rltrain.legality.lora import adapted_model_problems
from rltrain.legality.mechanisms import UNTOLD_FAMILIES, trained_mechanism_problems
from rltrain.legality.mtp import mtp_problems_of_models
from rltrain.legality.problems import evaluated_text, longest_text, refuse
from rltrain.legality.router_replay import replay_problems_of_models
from rltrain.legality.served_models import served_model_problems
from rltrain.models import Architecture
from rltrain.models.checkpoint_model import positions_of
from rltrain.runtime.grid import Grid, planned_layers
from rltrain.schedule.shape import RunShape
from rltrain.tasks.roles import DECLARED, device_roles, model_roles, served_roles, trained_roles

DEEPEP_RANKS = (2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 144, 160)
"""That its buffers have settings for (deep_ep, Buffer.get_dispatch_config)."""
DEEPEP_ELEMENTS = 8
"""Of bfloat16, in the 16 bytes that it copies at a time."""


def check_against_architecture(
    config: Config, grids: Mapping[str, Grid], architectures: Mapping[str, Architecture]
) -> None:
    """Refuse models that cannot be served, grids that do not divide the model or the batch, and texts longer than a
    model takes. `architectures` are by role, that of model.path under actor. ConfigError."""
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
            f"{architectures['actor'].vocab_size} of model.path, whose tokens it is to evaluate"
        )
    texts = [longest_text(config)]
    if role == ("evaluation" if config.evaluates_apart else "rollout"):
        texts += [evaluated_text(config, plan) for plan in config.evaluations]
    for longest, sizes in texts:
        if longest > architecture.max_positions:
            yield (
                f"{sizes}, but the model in {key} ({path}) has {positions_of(architecture)}; expected a sum of at most "
                "that"
            )


def _context_problems(config: Config, role: str, architecture: Architecture) -> Iterator[str]:
    """Of an engine that reads other texts than the policy's samples."""
    if DECLARED[role].model == "served":
        longest = getattr(config, role).max_context_tokens
        if longest > architecture.max_positions:
            yield (
                f"{role}.max_context_tokens: got {longest}, but the model in {role}.path has "
                f"{positions_of(architecture)}; expected at most that"
            )


def _stop_problems(config: Config, role: str, architecture: Architecture) -> Iterator[str]:
    """Of the tokens that end what a model draws."""
    sampling = config.judge.sampling if role == "judge" else config.rollout.sampling
    key = "judge" if role == "judge" else "rollout"
    beyond = [token for token in sampling.stop_token_ids if token >= architecture.vocab_size]
    if beyond:
        yield (
            f"{key}.sampling.stop_token_ids: got {beyond[0]}; expected less than {architecture.vocab_size}, the "
            f"vocabulary of the model in {config.checkpoint_of(role)[1]}"
        )


def _data_parallel_problems(config: Config, grids: Mapping[str, Grid]) -> Iterator[str]:
    """Every replica needs a prompt group in each of its batches; an evaluation shares out what there is."""
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
                f"placement.{role}: {len(grid.ranks)} ranks make {grid.dp} data-parallel replicas, but {of} gives "
                f"{groups} prompts to share out; expected at least {grid.dp} prompts, or fewer ranks"
            )


def _balance_problems(
    config: Config, grids: Mapping[str, Grid], architectures: Mapping[str, Architecture]
) -> Iterator[str]:
    """Keys that would do nothing, as no model that is trained has what they are about. Where none is, they may be those
    of the run whose checkpoint is evaluated."""
    if not algorithm_of(config).trains:
        return
    found = [architectures[role].moe for role in trained_roles() if role in grids]
    with_biases = any(moe and moe.score == "sigmoid" for moe in found)
    for name, about, is_there in (
        ("aux_loss_coef", "experts", any(found)),
        ("z_loss_coef", "experts", any(found)),
        ("bias_update_rate", "experts that are chosen by a bias, as deepseek_v3's and glm4_moe's are", with_biases),
    ):
        value = getattr(config.model.moe, name)
        if value and not is_there:
            yield f"model.moe.{name}: got {value}; expected 0: no model that is trained has {about}"


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
            "layers; expected at most as many chunks as layers, or layers_per_stage with a 0 for those without any"
        )


def _sharded_problems(config: Config, role: str, grid: Grid, architecture: Architecture) -> Iterator[str]:
    path, key = config.checkpoint_of(role)
    if grid.is_sharded and architecture.moe and architecture.moe.score == "sigmoid":
        yield (
            f"{role}.backend: got fsdp, but the model in {path} ({key}) chooses experts by a bias that is no parameter "
            "of transformers' model and would not be sharded; expected megatron"
        )
    if grid.is_sharded and architecture.family in UNTOLD_FAMILIES:
        yield (
            f"{role}.backend: got fsdp, but transformers' {architecture.family}, which the model in {path} ({key}) is, "
            "does not tell its attention which tokens are of one sample; expected megatron"
        )
    if architecture.unlisted and architecture.head == "value" and not architecture.unlisted.classifier:
        yield f"{key}: the model in {path} has no classifier in transformers, which a score would be saved as"


def _slice_problems(config: Config, key: str, grid: Grid, architecture: Architecture) -> Iterator[str]:
    if grid.cp == 1:
        return
    if architecture.num_experts and grid.is_sharded:
        yield f"{key}.cp: got {grid.cp}; expected 1: backend fsdp shares out the sequences of dense models alone"
    if config.model.cp_communication != "all_to_all" and not grid.is_sharded:
        return
    how, remedy = "model.cp_communication all_to_all", ", or model.cp_communication: auto"
    if grid.is_sharded:
        how, remedy = "backend fsdp, by which ranks have all tokens of some heads", ""
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
    """What DeepEP has no kernels for."""
    if config.model.moe.dispatcher != "deepep":
        return
    given = "model.moe.dispatcher: got deepep"
    found = [role for role in grids if role in model_roles() and architectures[role].moe]
    if found and config.model.dtype != "bfloat16":
        yield (
            f"{given} with model.dtype {config.model.dtype}; expected alltoall, or model.dtype bfloat16: it sends "
            "nothing else"
        )
    for role in found:
        num_ranks, key = grids[role].ep * (grids[role].etp or grids[role].tp), config.parallel_of(role)[1]
        if num_ranks > 1 and num_ranks not in DEEPEP_RANKS:
            closest = min(DEEPEP_RANKS, key=lambda n: (abs(n - num_ranks), n))
            yield (
                f"{given}, and {key} has {num_ranks} ranks share a layer's experts (ep x etp), for which it has no "
                f"buffers; expected alltoall, or a number that it has: the nearest is {closest}"
            )
        if architectures[role].hidden_size % DEEPEP_ELEMENTS:
            yield (
                f"{given}, and the model of role {role} has a hidden size of {architectures[role].hidden_size}; "
                f"expected alltoall: it sends multiples of {DEEPEP_ELEMENTS} elements"
            )


def _shares_of_nothing(key: str, grid: Grid, borrower: str) -> Iterator[str]:
    """Of a model without experts; `borrower` is its role, where that has another role's parallel sizes."""
    whose, remedy = (f"the model of role {borrower}", f", or {borrower}.parallel") if borrower else ("the model", "")
    for name, size, none in (("ep", grid.ep, "1"), ("etp", grid.etp or 1, "null")):
        if size > 1:
            yield f"{key}.{name}: got {size}; expected {none}{remedy}: {whose} has no experts"
