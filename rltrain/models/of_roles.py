"""The architectures of all roles' models. Includes families without a table, described by transformers."""

from collections.abc import Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from rltrain.config.schema import Config
from rltrain.errors import CheckpointError, ConfigError, named_by
from rltrain.models.architecture import CONFIG_FILE, Architecture, Unlisted, check_padding, is_unlisted, read_eos
from rltrain.models.checkpoint_model import (
    num_predicting,
    read_architecture,
    refuse_more_than_stored,
    require_classifier,
)
from rltrain.models.config_file import LARGEST, ConfigReader
from rltrain.models.table import CanonicalTensors
from rltrain.runtime.grid import Grid
from rltrain.tasks.roles import DECLARED

SEEING = ("actor", "inference", "rollout", "evaluation", "reference", "critic")
"""The roles whose models see images with model.vision."""


def role_architectures(config: Config, roles: Iterable[str]) -> dict[str, Architecture]:
    """Returns the architecture of each role's model. The trained model is under "actor". Raises CheckpointError if a
    config.json cannot be used."""
    return {role: _architecture(config, role) for role in ("actor", *roles)}


def _architecture(config: Config, role: str) -> Architecture:
    declared, (path, key) = DECLARED[role], config.checkpoint_of(role)
    model = _read(config, role, Path(path), key)
    if role == "teacher":
        _expect_one_architecture(config, model)
    if declared.reads_text and declared.head == "value":
        require_classifier(Path(path), key)
    learns_scores = role == "actor" and config.algorithm == "reward_model"
    if declared.head == "value" or learns_scores:
        return model.value_model()
    predicts = config.predicts(role) and num_predicting(Path(path), model.family) == 1
    return model.predicting() if predicts else model


def _read(config: Config, role: str, path: Path, key: str) -> Architecture:
    """Returns the architecture in a folder. Loads transformers only if backend fsdp uses a family without a table."""
    sees = config.model.vision is not None and role in SEEING
    if config.backend_of(role) == "fsdp" and is_unlisted(path) and not sees:
        return read_unlisted(path, key)
    return read_architecture(path, key, sees=sees)


def are_quickly_read(config: Config) -> bool:
    """Returns whether `role_architectures` reads the models of `config` without loading transformers. Loading takes
    seconds."""
    roles = ("actor", *config.placed_roles)
    return not any(config.backend_of(r) == "fsdp" and is_unlisted(Path(config.checkpoint_of(r)[0])) for r in roles)


def _expect_one_architecture(config: Config, first: Architecture) -> None:
    for name, path in config.teacher.checkpoints.items():
        if _read(config, "teacher", Path(path), f"teacher.path.{name}") != first:
            raise ConfigError(
                f"teacher.path.{name}: the model in {path} has another architecture than the first of teacher.path; "
                "all teachers need the same architecture, because they share a layout"
            )


def reference_uses_actor_modules(
    config: Config, grids: Mapping[str, Grid], architectures: Mapping[str, Architecture]
) -> bool:
    """Returns whether the reference shares the actor's modules. It needs the actor's ranks, layout and architecture.
    Its weights then replace the actor's during its task."""
    return not config.makes_actor_weights and _share_modules(config, grids, architectures)


def reference_is_actors_base(
    config: Config, grids: Mapping[str, Grid], architectures: Mapping[str, Architecture]
) -> bool:
    """Returns whether the reference is the actor without adapters, in the same memory. It needs the actor's ranks,
    layout and checkpoint, and no refresh."""
    return (
        config.model.lora is not None
        and not config.reference.refresh_every
        and config.checkpoint_of("reference")[0] == config.model.path
        and _share_modules(config, grids, architectures)
    )


def _share_modules(config: Config, grids: Mapping[str, Grid], architectures: Mapping[str, Architecture]) -> bool:
    return (
        {"actor", "reference"} <= grids.keys()
        and grids["reference"] == grids["actor"]
        and config.backend_of("reference") == config.backend_of("actor")
        and config.parallel_of("reference")[0] == config.actor.parallel
        and architectures.get("reference") == architectures.get("actor")
    )


# Models of families without a table, built by transformers.

WANTED = ("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size", "max_position_embeddings")
"""transformers' names of required sizes. The files of a family can have other names."""
FFN_FACTOR = 4
"""The default MLP size relative to the hidden size, as in GPT-2."""


@lru_cache(maxsize=8)
def read_unlisted(path: Path, config_key: str = "model.path") -> Architecture:
    """Returns the architecture in `path`/config.json. Raises CheckpointError if transformers cannot build a causal
    language model from it, or if backend fsdp could not train that model."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES

    reader = ConfigReader(path / CONFIG_FILE, config_key=config_key)
    _refuse_sizes(reader)
    try:
        config = AutoConfig.from_pretrained(path)
        _refuse_sizes(reader.inside("", {name: getattr(config, name, None) for name in WANTED}))
        with torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(config)
    except CheckpointError:
        raise
    except Exception as problem:  # noqa: BLE001 - transformers raises any error for odd values
        raise CheckpointError(
            f"{path}: transformers builds no causal language model from it: {problem} ({named_by(config_key)})"
        ) from None
    _refuse(path, config, model, config_key)
    named = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    heads = config.num_attention_heads
    check_padding(reader, config.vocab_size)
    architecture = Architecture(
        family=config.model_type,
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        num_heads=heads,
        num_kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        ffn_hidden_size=getattr(config, "intermediate_size", None) or FFN_FACTOR * config.hidden_size,
        vocab_size=config.vocab_size,
        tied_embeddings=model.get_output_embeddings().weight is model.get_input_embeddings().weight,
        qkv_bias=False,
        qk_norm=False,
        norm_eps=0.0,
        rope_theta=0.0,
        rope_scaling=None,
        max_positions=config.max_position_embeddings,
        eos_token_ids=read_eos(path, reader, config.vocab_size),
        unlisted=Unlisted(
            CanonicalTensors(tuple(named), tuple(named.values())),
            model.base_model_prefix,
            MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES.get(config.model_type, ""),
        ),
    )
    refuse_more_than_stored(reader, path, architecture)
    return architecture


def _refuse_sizes(reader: ConfigReader) -> None:
    """Raises CheckpointError if a size is too large. In any family, keys with "layer" in them count layers."""
    for key, value in reader.values.items():
        most = LARGEST.get(key, LARGEST["num_hidden_layers"] if "layer" in key else None)
        if most is not None and type(value) is int and value > most:
            raise reader.error(key, f"at most {most}")


def _refuse(path: Path, config: Any, model: Any, config_key: str) -> None:
    family = f"{path}: the family {config.model_type}"
    if not model._supports_attention_backend:
        raise CheckpointError(
            f"{family} of transformers supports only its own attention, and that cannot separate packed samples; "
            f"expected another family ({named_by(config_key)})"
        )
    missing = [name for name in WANTED if not isinstance(getattr(config, name, None), int)]
    if missing:
        raise CheckpointError(f"{family} has no {', '.join(missing)} in its config ({named_by(config_key)})")
    stacked = [name for name, parameter in model.named_parameters() if parameter.dim() not in (1, 2)]
    kept = [name for name in model.state_dict().keys() - dict(model.named_parameters(remove_duplicate=False)).keys()]
    if stacked or kept:
        raise CheckpointError(
            f"{family} has {sorted([*stacked, *kept])[0]}, which is not a trainable matrix or vector; expected a dense "
            f"family, or one with a table in rltrain ({named_by(config_key)})"
        )
