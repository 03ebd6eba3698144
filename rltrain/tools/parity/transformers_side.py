"""The model of transformers, sample by sample without a cache."""

from collections.abc import Callable
from typing import Any

import torch

from rltrain.models.table import EMBEDDING, FINAL_NORM, LOGITS, LOGPROBS, stages_of_layer
from rltrain.tools.parity.states import Checked, Notes, Samples, States, next_token_logprobs


def run_transformers(checked: Checked, samples: Samples) -> States:
    """In model.dtype throughout: it knows no wider residual stream."""
    from transformers import AutoModelForCausalLM

    # Of its attention that of eager execution alone has soft caps, and leaves them out otherwise without a word.
    load = AutoModelForCausalLM.from_pretrained
    model: Any = load(checked.path, dtype=getattr(torch, checked.model.dtype), attn_implementation="eager")
    model.to(checked.device).eval()
    notes = Notes()
    watch(model.model, notes.add)
    with torch.no_grad():
        for sample in samples:
            notes.add(LOGITS, model(torch.tensor([sample], device=checked.device), use_cache=False).logits)
    states = notes.states()
    return {**states, LOGPROBS: next_token_logprobs(states[LOGITS], samples)}


def watch(decoder: Any, note: Callable[[str, Any], None]) -> None:
    """Have transformers' decoder tell what its stages put out in every forward pass."""
    decoder.embed_tokens.register_forward_hook(lambda module, given, made: note(EMBEDDING, made))
    for index, layer in enumerate(decoder.layers):
        attention, mlp = stages_of_layer(index)
        norm = layer.post_attention_layernorm
        norm.register_forward_pre_hook(lambda module, given, stage=attention: note(stage, given[0]))
        layer.register_forward_hook(lambda module, given, made, stage=mlp: note(stage, made))
    decoder.norm.register_forward_hook(lambda module, given, made: note(FINAL_NORM, made))
