"""The routing that engines hand over with samples, against that of transformers' routers."""

from pathlib import Path

import numpy as np
import torch
import transformers

from rltrain.rollout.sample import Sample


@torch.no_grad()
def expected_routing(path: Path, tokens: tuple[int, ...]) -> torch.Tensor:
    """Experts [tokens, layers, top_k] of transformers' routers."""
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    routed: list[torch.Tensor] = []
    for layer in model.model.layers:
        if hasattr(layer.mlp, "gate"):
            layer.mlp.gate.register_forward_hook(lambda module, given, found: routed.append(found[2]))
    model(torch.tensor([tokens]))
    return torch.stack(routed, 1)


def check(path: Path, sample: Sample, first: int = 0) -> None:
    """All tokens but the last one have been fed; in the order of experts, which is nobody's."""
    routing = sample.routing
    assert routing is not None and len(routing) == len(sample.context) - 1
    assert routing.experts.dtype == np.int8
    found, expected = torch.from_numpy(routing.experts).long(), expected_routing(path, sample.context[:-1])
    assert torch.equal(found.sort(-1).values[first:], expected.sort(-1).values[first:])
