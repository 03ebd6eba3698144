"""Tiny checkpoints of families whose layer that predicts a further token is like those of their decoder, and what
transformers' layers make of one sample at a time: it is a model of one layer, which begins with other embeddings."""

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import cross_entropy, linear

from tests.distributed.family_checkpoints import SHAPE, _randomize_vectors, make_family_checkpoint, tiny_config
from tests.distributed.prediction_checkpoints import COEF, LENGTHS, experience

NEXT = {"enorm": "mtp.pre_fc_norm_embedding", "hnorm": "mtp.pre_fc_norm_hidden", "fc": "mtp.fc", "norm": "mtp.norm"}
LATER = {"enorm": "enorm", "hnorm": "hnorm", "fc": "eh_proj", "norm": "shared_head.norm"}


class Family(NamedTuple):
    count: str
    prefix: str
    names: dict[str, str]
    changes: dict[str, Any]
    """Of transformers' config, so that its only layer is as the further one."""
    offset: float = 0.0
    """Norms multiply by this plus their weight."""


FAMILIES = {
    "deepseek_v3": Family("num_nextn_predict_layers", "model.layers.4.", LATER, {"first_k_dense_replace": 0}),
    "qwen3_5": Family("mtp_num_hidden_layers", "mtp.layers.0.", NEXT, {"layer_types": ["full_attention"]}, 1.0),
    "qwen3_next": Family("", "mtp.layers.0.", NEXT, {"layer_types": ["full_attention"], "mlp_only_layers": []}, 1.0),
}


class Further:
    """The layer of a family, apart from the model."""

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
        """[tokens - 2]"""
        parts = [self._norm(embedding[tokens[1:-1]], "enorm"), self._norm(hidden, "hnorm")]
        joined = linear(torch.cat(parts, dim=-1), self.own["fc"])
        states = self.layer.model(inputs_embeds=joined[None]).last_hidden_state[0]
        return cross_entropy(linear(states, head), tokens[2:], reduction="none")

    def _norm(self, x: Tensor, key: str) -> Tensor:
        return torch.nn.functional.rms_norm(x, (x.size(-1),), self.own[key] + self.family.offset, self.eps)

    def tensors(self, folder: Path) -> dict[str, Tensor]:
        """As files have them, of what the layer holds; `folder` is where transformers may write them first."""
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
    """A checkpoint with such a layer, and in `path`/gradients one of the gradients of the mean negative log-likelihood
    of response tokens plus COEF times the other loss; losses.json has both."""
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
