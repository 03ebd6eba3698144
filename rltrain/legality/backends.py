"""What a training backend can do of what a config asks for."""

from collections.abc import Iterator

from rltrain.config.schema import Config, Parallel, Trained
from rltrain.legality.lora import lora_key
from rltrain.tasks.roles import model_roles, trained_roles

CUT = {
    "tp": "layers are gathered whole, and not cut",
    "pp": "every rank computes all layers",
    "vpp": "there is no pipeline",
    "ep": "experts are sharded as all parameters are",
    "etp": "experts are sharded as all parameters are",
    "layers_per_stage": "there is no pipeline",
    "sequence_parallel": "there is no tensor parallelism",
}
"""Keys of `parallel` that mean nothing to fsdp, and why."""
REDUCTION = {
    "distributed_optimizer": "optimizer states are as their parameters are, sharded",
    "overlap": "fully_shard gathers and reduces beside what is computed, on GPUs",
    "gradient_bucket_mb": "gradients are reduced layer by layer",
}
OPTIMIZER = {
    "name": "matrices are sharded, which muon would need whole",
    "moments_dtype": "torch's AdamW keeps moments in the type of its parameters",
}
MODEL = {
    "activation_offload": "layers are transformers', which leave what they like",
    "residual_dtype": "transformers' layers add in model.dtype",
    "head_dtype": "transformers makes logits in model.dtype",
    "logits_chunk_tokens": "transformers makes a micro-batch's logits at once",
}


def backend_problems(config: Config) -> Iterator[str]:
    """Of the placed roles whose models a backend trains or evaluates."""
    sharded = [role for role in model_roles() if role in config.placed_roles and config.backend_of(role) == "fsdp"]
    for role in sharded:
        yield from _parallel_problems(config, role)
    if sharded:
        yield from _model_problems(config, sharded[0])
    for role in model_roles():
        if getattr(config, role).fsdp is not None and config.backend_of(role) != "fsdp":
            yield f"{role}.fsdp: got a section with backend megatron; expected none, or {role}.backend: fsdp"


def _parallel_problems(config: Config, role: str) -> Iterator[str]:
    parallel, key = config.parallel_of(role)
    none = Parallel()
    for name, reason in CUT.items():
        given = getattr(parallel, name)
        if given != getattr(none, name):
            expected = "null" if getattr(none, name) is None else str(getattr(none, name)).lower()
            yield (
                f"{key}.{name}: got {given} with backend fsdp for role {role}; expected {expected}: {reason}. All "
                f"ranks of the role share every parameter, and sequences by cp; or {role}.backend: megatron"
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
            f"{role}.optimizer.cpu_offload: got {given} with backend fsdp; expected true or false: its layers are "
            "gathered from shards that are all on the host, or all on the device"
        )
    if config.lora_of(role) is not None:
        yield (
            f"{role}.optimizer.cpu_offload: got {str(given).lower()} with backend fsdp and {lora_key(role)}; expected "
            "false: the optimizer of adapters is small"
        )


def _model_problems(config: Config, role: str) -> Iterator[str]:
    model, backend = config.model, f"backend fsdp for role {role}"
    if model.dtype == "float16":
        yield f"model.dtype: got float16 with {backend}, which scales no losses; expected bfloat16 or float32"
    for name, reason in MODEL.items():
        given = getattr(model, name)
        if given and given != model.dtype:
            expected = "false" if given is True else "null"
            yield f"model.{name}: got {str(given).lower()} with {backend}; expected {expected}: {reason}"
    if model.router_replay != "off":
        yield (
            f"model.router_replay: got {model.router_replay} with {backend}, whose routers take no choices; "
            "expected off"
        )
    if model.recomputed.granularity == "selective":
        yield f"model.recompute: got selective with {backend}; expected none or full, which is of whole layers"
    for name in ("aux_loss_coef", "z_loss_coef", "bias_update_rate"):
        value = getattr(model.moe, name)
        if value:
            yield f"model.moe.{name}: got {value} with {backend}; expected 0: its routers balance nothing"
    if config.residency.communicators == "release":
        yield (
            f"residency.communicators: got release with {backend}, whose device mesh keeps its groups; expected keep"
        )
