"""A tiny MiMo whose layer predicts a further token, its samples, and what plain torch makes of one sample at a time."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import cross_entropy, linear, rms_norm

from rltrain.data.experience import Experience

LENGTHS = (2, 17, 9, 23, 5, 12)
COEF = 0.3
LAYER = "model.mtp_layers.0."
VOCAB_SIZE, HIDDEN = 67, 32
CONFIG: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": HIDDEN,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "initializer_range": 0.15,
    "tie_word_embeddings": False,
}


def make_mimo(folder: Path, **changes: Any) -> Path:
    """Qwen2's model with a further layer, every vector random."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(5)
    model = Qwen2ForCausalLM(Qwen2Config(**(CONFIG | changes)))
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    of_last = "model.layers.1."
    tensors |= {name.replace(of_last, LAYER): one.clone() for name, one in tensors.items() if name.startswith(of_last)}
    for name in ("token_layernorm", "hidden_layernorm", "final_layernorm"):
        tensors[f"{LAYER}{name}.weight"] = torch.ones(HIDDEN)
    tensors[f"{LAYER}input_proj.weight"] = torch.empty(HIDDEN, 2 * HIDDEN)
    for name, tensor in tensors.items():
        if tensor.dim() == 1:
            tensor.add_(0.3 * torch.randn_like(tensor))
        elif name.startswith(LAYER):
            tensors[name] = 0.15 * torch.randn_like(tensor)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "mimo", "attention_bias": True, "num_nextn_predict_layers": 1}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def experience() -> Experience:
    """Responses begin at the second, third or fourth token."""
    count, random = torch.arange(len(LENGTHS)), torch.Generator().manual_seed(7)
    masks = [torch.arange(length) > number % 3 for number, length in enumerate(LENGTHS)]
    return Experience(
        sample_ids=count,
        group_ids=count,
        prompt_ids=count,
        lengths=torch.tensor(LENGTHS),
        tokens=torch.randint(VOCAB_SIZE, (sum(LENGTHS),), generator=random),
        response_mask=torch.cat(masks),
    )


def write_reference(path: Path, folder: Path, *, trains: str) -> tuple[float, float]:
    """The losses of all samples, mean over response tokens, and in `folder` a checkpoint of the gradients of the first
    plus COEF times the second."""
    tensors = {name: one.requires_grad_() for name, one in load_file(path / "model.safetensors").items()}
    samples = experience()
    likelihood, further = torch.zeros(()), torch.zeros(())
    masks = samples.response_mask.split(LENGTHS)
    for tokens, mask in zip(samples.tokens.split(LENGTHS), masks, strict=True):
        hidden = _trunk(path, tensors, tokens)
        losses = cross_entropy(linear(hidden[:-1], tensors["lm_head.weight"]), tokens[1:], reduction="none")
        likelihood = likelihood + losses[mask[1:]].sum()
        if mask[2:].any():
            of_rows = _further(path, tensors, hidden[:-2], tokens, trains)
            further = further + of_rows[mask[2:]].mean() * mask.sum()
    total = samples.response_mask.sum()
    ((likelihood + COEF * further) / total).backward()
    gradients = {name: torch.zeros_like(one) if one.grad is None else one.grad for name, one in tensors.items()}
    folder.mkdir()
    (folder / "config.json").write_text((path / "config.json").read_text())
    save_file(gradients, folder / "model.safetensors")
    return likelihood.item() / int(total), further.item() / int(total)


def _trunk(path: Path, tensors: dict[str, Tensor], tokens: Tensor) -> Tensor:
    """[tokens, hidden] behind the last norm."""
    hidden = tensors["model.embed_tokens.weight"][tokens]
    for layer in range(CONFIG["num_hidden_layers"]):
        hidden = _decoder_layer(path, tensors, f"model.layers.{layer}.", hidden)
    return _norm(path, hidden, tensors["model.norm.weight"])


def _further(path: Path, tensors: dict[str, Tensor], hidden: Tensor, tokens: Tensor, trains: str) -> Tensor:
    """[tokens - 2] the cross-entropy of every token from the third on."""
    embedding, head = tensors["model.embed_tokens.weight"], tensors["lm_head.weight"]
    if trains != "model":
        hidden, embedding = hidden.detach(), embedding.detach()
    head = head.detach() if trains == "layer" else head
    own = {name.removeprefix(LAYER): one for name, one in tensors.items() if name.startswith(LAYER)}
    normed = _norm(path, hidden, own["hidden_layernorm.weight"])
    following = _norm(path, embedding[tokens[1:-1]], own["token_layernorm.weight"])
    joined = linear(torch.cat([normed, following], dim=-1), own["input_proj.weight"])
    states = _norm(path, _decoder_layer(path, tensors, LAYER, joined), own["final_layernorm.weight"])
    return cross_entropy(linear(states, head), tokens[2:], reduction="none")


def _decoder_layer(path: Path, tensors: dict[str, Tensor], prefix: str, hidden: Tensor) -> Tensor:
    """[tokens, hidden] of Qwen2's."""

    def projected(name: str, x: Tensor) -> Tensor:
        weight = prefix + name
        return linear(x, tensors[f"{weight}.weight"], tensors.get(f"{weight}.bias"))

    heads, kv_heads = CONFIG["num_attention_heads"], CONFIG["num_key_value_heads"]
    normed = _norm(path, hidden, tensors[f"{prefix}input_layernorm.weight"])
    q, k, v = (
        projected(f"self_attn.{name}_proj", normed).unflatten(-1, (count, -1)).transpose(0, 1)
        for name, count in (("q", heads), ("k", kv_heads), ("v", kv_heads))
    )
    k, v = (x.repeat_interleave(heads // kv_heads, dim=0) for x in (_rotated(path, k), v))
    scores = _rotated(path, q) @ k.transpose(1, 2) / q.size(-1) ** 0.5
    seen = torch.ones_like(scores[0]).tril().bool()
    attended = scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v
    hidden = hidden + projected("self_attn.o_proj", attended.transpose(0, 1).flatten(1))
    normed = _norm(path, hidden, tensors[f"{prefix}post_attention_layernorm.weight"])
    gated = torch.nn.functional.silu(projected("mlp.gate_proj", normed)) * projected("mlp.up_proj", normed)
    return hidden + projected("mlp.down_proj", gated)


def _norm(path: Path, x: Tensor, weight: Tensor) -> Tensor:
    return rms_norm(x, (x.size(-1),), weight, _settings(path)["rms_norm_eps"])


def _rotated(path: Path, x: Tensor) -> Tensor:
    half = x.size(-1) // 2
    theta = _settings(path)["rope_parameters"]["rope_theta"]
    angles = torch.arange(x.size(1))[:, None] * theta ** (-torch.arange(half) / half)
    first, second = x.split(half, dim=-1)
    return torch.cat(
        [first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()], dim=-1
    )


def _settings(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((path / "config.json").read_text())
    return found
