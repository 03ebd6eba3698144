"""The embedded engine's model, decoding token by token."""

from collections.abc import Sequence

import torch

from rltrain.checkpoint.hf import load_parameters
from rltrain.models import read_architecture
from rltrain.models.table import LOGITS, LOGPROBS
from rltrain.rollout.embedded.kv_cache import CacheShape
from rltrain.rollout.embedded.model import EngineModel
from rltrain.rollout.embedded.parameters import TensorParallel, allocate_parameters
from rltrain.rollout.embedded.slot_cache import SlotCache
from rltrain.rollout.layout import engine_layout
from rltrain.runtime.grid import Grid
from rltrain.tools.parity.states import Checked, Samples, States, next_token_logprobs


class Decoding:
    """The engine on a checkpoint. UserError where that cannot be read or served."""

    def __init__(self, checked: Checked, max_positions: int) -> None:
        architecture, settings = read_architecture(checked.path), checked.model
        device, dtype = torch.device(checked.device), getattr(torch, settings.dtype)
        layout = engine_layout(architecture, Grid((0,)), dtype=settings.dtype)
        parameters = allocate_parameters(layout, 0, device=device)
        load_parameters(checked.path, layout, 0, parameters, config_key="--checkpoint")
        self.device, self.dtype, self.max_positions = device, dtype, max_positions
        self.vocab_size = architecture.vocab_size
        self.model = EngineModel(
            architecture,
            parameters,
            {},
            TensorParallel(None),
            max_positions,
            dtype,
            device,
            residual_dtype=getattr(torch, settings.residual),
            head_dtype=getattr(torch, settings.head),
        )

    @torch.inference_mode()
    def run(self, samples: Samples) -> States:
        """Every token is fed in turn, of all samples at once; shorter ones are fed their last token again."""
        model, longest = self.model, max(len(sample) for sample in samples)
        sizes = (model.num_attention_layers, model.attention_shape, len(samples), self.max_positions)
        cache = SlotCache(CacheShape(*sizes, self.dtype, self.device, states=model.state_shape))
        cache.reserve(len(samples), longest, num_used=0)
        collected: dict[str, list[torch.Tensor]] = {}
        model.observe = lambda stage, values: collected.setdefault(stage, []).append(values.float().cpu().clone())
        for position in range(longest):
            fed = torch.tensor([sample[min(position, len(sample) - 1)] for sample in samples], device=self.device)
            positions = torch.full_like(fed, position)
            hidden = model.forward(fed, positions, cache.decode_attention(positions, position + 1))
            model.observe(LOGITS, model.logits(hidden)[:, : self.vocab_size])
        states = {stage: _end_to_end(steps, samples) for stage, steps in collected.items()}
        return {**states, LOGPROBS: next_token_logprobs(states[LOGITS], samples)}


def run_engine(checked: Checked, samples: Samples) -> States:
    return Decoding(checked, max(len(sample) for sample in samples)).run(samples)


def _end_to_end(steps: Sequence[torch.Tensor], samples: Samples) -> torch.Tensor:
    """[tokens, values] from those of every position, [samples, values] each."""
    by_sample = torch.stack(list(steps), dim=1)
    return torch.cat([by_sample[index, : len(sample)] for index, sample in enumerate(samples)])
