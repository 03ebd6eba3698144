"""Checkpoints of tiny models with layers that predict further tokens."""

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import cross_entropy, linear, rms_norm

from rltrain.data.experience import Experience
from tests.support.family_checkpoints import SHAPE, _randomize_vectors, make_family_checkpoint, tiny_config
from tests.support.packed_experience import plain_experience

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
    """Writes Qwen2's model with a further layer. All vectors are random."""
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
    """Returns samples with responses from the second, third or fourth token."""
    tokens = torch.randint(VOCAB_SIZE, (sum(LENGTHS),), generator=torch.Generator().manual_seed(7))
    masks = [torch.arange(length) > number % 3 for number, length in enumerate(LENGTHS)]
    return plain_experience(LENGTHS, tokens, torch.cat(masks))


def write_reference(path: Path, folder: Path, *, trains: str) -> tuple[float, float]:
    """Returns both losses of all samples, means over response tokens, and writes gradients to `folder`.

    The gradients are of the first loss plus COEF times the second.
    """
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
    """Returns the hidden states after the last norm, shape [tokens, hidden]."""
    hidden = tensors["model.embed_tokens.weight"][tokens]
    for layer in range(CONFIG["num_hidden_layers"]):
        hidden = _decoder_layer(path, tensors, f"model.layers.{layer}.", hidden)
    return _norm(path, hidden, tensors["model.norm.weight"])


def _further(path: Path, tensors: dict[str, Tensor], hidden: Tensor, tokens: Tensor, trains: str) -> Tensor:
    """Returns the cross-entropy of every token from the third on, shape [tokens - 2]."""
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
    """Returns the output of a layer of Qwen2, shape [tokens, hidden]."""

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


NEXT = {"enorm": "mtp.pre_fc_norm_embedding", "hnorm": "mtp.pre_fc_norm_hidden", "fc": "mtp.fc", "norm": "mtp.norm"}
LATER = {"enorm": "enorm", "hnorm": "hnorm", "fc": "eh_proj", "norm": "shared_head.norm"}


class Family(NamedTuple):
    count: str
    prefix: str
    names: dict[str, str]
    changes: dict[str, Any]
    """Changes of transformers' config: with them its only layer is like the further one."""
    offset: float = 0.0
    """Norms multiply by this plus their weight."""


FAMILIES = {
    "deepseek_v3": Family("num_nextn_predict_layers", "model.layers.4.", LATER, {"first_k_dense_replace": 0}),
    "qwen3_5": Family("mtp_num_hidden_layers", "mtp.layers.0.", NEXT, {"layer_types": ["full_attention"]}, 1.0),
    "qwen3_next": Family("", "mtp.layers.0.", NEXT, {"layer_types": ["full_attention"], "mlp_only_layers": []}, 1.0),
}


class Further:
    """The further layer of a family, without the model."""

    def __init__(self, name: str) -> None:
        import transformers

        torch.manual_seed(3)
        self.family = FAMILIES[name]
        config = tiny_config(name, SHAPE, num_hidden_layers=1, **self.family.changes)
        self.layer = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        _randomize_vectors(self.layer)
        hidden = SHAPE["hidden_size"]
        self.own = {"enorm": torch.randn(hidden), "hnorm": torch.randn(hidden), "fc": torch.randn(hidden, 2 * hidden)}
        self.own = {key: (0.3 * one).requires_grad_() for key, one in self.own.items()}
        self.eps = config.rms_norm_eps

    def losses(self, hidden: Tensor, embedding: Tensor, head: Tensor, tokens: Tensor) -> Tensor:
        """Returns the losses, shape [tokens - 2]."""
        parts = [self._norm(embedding[tokens[1:-1]], "enorm"), self._norm(hidden, "hnorm")]
        joined = linear(torch.cat(parts, dim=-1), self.own["fc"])
        states = self.layer.model(inputs_embeds=joined[None]).last_hidden_state[0]
        return cross_entropy(linear(states, head), tokens[2:], reduction="none")

    def _norm(self, x: Tensor, key: str) -> Tensor:
        return torch.nn.functional.rms_norm(x, (x.size(-1),), self.own[key] + self.family.offset, self.eps)

    def tensors(self, folder: Path) -> dict[str, Tensor]:
        """Returns the layer's tensors by their names in checkpoint files. `folder` is scratch space for
        transformers."""
        self.layer.save_pretrained(folder)
        decoder = re.compile(r"model\.(language_model\.)?")
        found = {}
        for name, one in _stored(folder).items():
            rest = decoder.sub("", name, count=1)
            if rest.startswith("layers.0."):
                found[self.family.prefix + rest.removeprefix("layers.0.")] = one
            elif rest == "norm.weight":
                found[self._name("norm")] = one
        return found | {self._name(key): one.detach().clone() for key, one in self.own.items()}

    def _name(self, key: str) -> str:
        name = f"{self.family.names[key]}.weight"
        return name if name.startswith("mtp.") else self.family.prefix + name


def make_with_further(name: str, path: Path) -> Path:
    """Writes a checkpoint with the further layer, its gradients in `path`/gradients, and both losses in losses.json.

    The gradients are of the mean negative log-likelihood of response tokens plus COEF times the other loss.
    """
    import transformers

    make_family_checkpoint(name, path)
    further = Further(name)
    config = json.loads((path / "config.json").read_text())
    if further.family.count:
        inner = config.get("text_config", config)
        inner[further.family.count] = 1
    (path / "config.json").write_text(json.dumps(config))
    save_file(_stored(path) | further.tensors(path / "further"), path / "model.safetensors", metadata={"format": "pt"})
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    losses = _learn(model, further)
    (path / "losses.json").write_text(json.dumps(losses))
    for parameter in (*model.parameters(), *further.layer.parameters(), *further.own.values()):
        parameter.data = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    model.save_pretrained(path / "gradients")
    gradients = _stored(path / "gradients") | further.tensors(path / "further_gradients")
    save_file(gradients, path / "gradients/model.safetensors", metadata={"format": "pt"})
    return path


def _learn(model: Any, further: Further) -> tuple[float, float]:
    samples = experience()
    embedding, head = model.get_input_embeddings().weight, model.lm_head.weight
    likelihood, other = torch.zeros(()), torch.zeros(())
    masks = samples.response_mask.split(LENGTHS)
    for tokens, mask in zip(samples.tokens.split(LENGTHS), masks, strict=True):
        hidden = model.model(tokens[None]).last_hidden_state[0]
        losses = cross_entropy(linear(hidden[:-1], head), tokens[1:], reduction="none")
        likelihood = likelihood + losses[mask[1:]].sum()
        if mask[2:].any():
            of_rows = further.losses(hidden[:-2], embedding, head, tokens)
            other = other + of_rows[mask[2:]].mean() * mask.sum()
    total = int(samples.response_mask.sum())
    ((likelihood + COEF * other) / total).backward()
    return likelihood.item() / total, other.item() / total


def _stored(path: Path) -> dict[str, Tensor]:
    return {name: one for file in path.glob("model*.safetensors") for name, one in load_file(file).items()}
