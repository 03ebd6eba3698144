"""Small random checkpoints of every family that is converted, made and saved by transformers."""

from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor

from tests.distributed.family_checkpoints import tiny_config

SIZES: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
}
"""Of all families, where their settings do not say otherwise."""

TOKENIZER_FILES = {
    "tokenizer_config.json": '{"model_max_length": 64}',
    "tiktoken.model": "a vocabulary",
    "tokenization_own.py": "# code that tokenizer_config.json may name",
}


def make_checkpoint(
    folder: Path, name: str = "qwen3", *, dtype: torch.dtype = torch.float32, shard: str = "1GB", **changes: Any
) -> dict[str, Tensor]:
    """One of CHECKPOINTS in `folder`, with files of a tokenizer; returns the tensors that its files hold."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(tiny_config(name, SIZES, **changes)).to(dtype)
    for tensor_name, tensor in model.state_dict(keep_vars=True).items():
        if "e_score_correction_bias" in tensor_name:
            tensor.data = tensor.data.float()  # which no dtype of a model changes
        torch.nn.init.normal_(tensor)  # norms and biases too
    model.save_pretrained(folder, max_shard_size=shard)
    for file, text in TOKENIZER_FILES.items():
        (folder / file).write_text(text)
    return stored_tensors(folder)


def loads_alike(one: Path, other: Path) -> bool:
    """Whether transformers makes equal models of both folders, bit for bit.

    Their outputs may differ in the last bits: where a weight lies in memory follows from where it lay in its file.
    """
    first, second = (transformers.AutoModelForCausalLM.from_pretrained(path).state_dict() for path in (one, other))
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def stored_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder's safetensors files."""
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}
