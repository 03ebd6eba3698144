"""Models of families without a table, as transformers builds them. Apart from its siblings because it loads
transformers and torch, which takes seconds."""

from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES

from rltrain.errors import CheckpointError, named_by
from rltrain.models.architecture import CONFIG_FILE, Architecture, Unlisted, check_padding, read_eos
from rltrain.models.checkpoint_model import refuse_more_than_stored
from rltrain.models.config_file import LARGEST, ConfigReader
from rltrain.models.table import CanonicalTensors

WANTED = ("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size", "max_position_embeddings")
"""What transformers calls sizes that families' own files may call otherwise."""
FFN_FACTOR = 4
"""Of the hidden size, where a config names none: GPT-2's."""


@lru_cache(maxsize=8)
def read_unlisted(path: Path, config_key: str = "model.path") -> Architecture:
    """By `path`/config.json. CheckpointError where transformers builds no causal language model of it, or one that
    backend fsdp could not train."""
    reader = ConfigReader(path / CONFIG_FILE, config_key=config_key)
    _refuse_sizes(reader)
    try:
        config = AutoConfig.from_pretrained(path)
        _refuse_sizes(reader.inside("", {name: getattr(config, name, None) for name in WANTED}))
        with torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(config)
    except CheckpointError:
        raise
    except Exception as problem:  # noqa: BLE001 - what transformers raises of odd values is any error
        raise CheckpointError(
            f"{path}: transformers builds no causal language model of it: {problem} ({named_by(config_key)})"
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
    """CheckpointError where one is larger than models are. Keys with "layer" in them count layers in any family."""
    for key, value in reader.values.items():
        most = LARGEST.get(key, LARGEST["num_hidden_layers"] if "layer" in key else None)
        if most is not None and type(value) is int and value > most:
            raise reader.error(key, f"at most {most}")


def _refuse(path: Path, config: Any, model: Any, config_key: str) -> None:
    family = f"{path}: the family {config.model_type}"
    if not model._supports_attention_backend:
        raise CheckpointError(
            f"{family} of transformers takes no attention but its own, which could not tell packed samples apart; "
            f"expected another family ({named_by(config_key)})"
        )
    missing = [name for name in WANTED if not isinstance(getattr(config, name, None), int)]
    if missing:
        raise CheckpointError(f"{family} says nothing of {', '.join(missing)} ({named_by(config_key)})")
    stacked = [name for name, parameter in model.named_parameters() if parameter.dim() not in (1, 2)]
    kept = [name for name in model.state_dict().keys() - dict(model.named_parameters(remove_duplicate=False)).keys()]
    if stacked or kept:
        raise CheckpointError(
            f"{family} has {sorted([*stacked, *kept])[0]}, which is neither a matrix nor a vector that is trained; "
            f"expected a dense family, or one that rltrain has a table for ({named_by(config_key)})"
        )
