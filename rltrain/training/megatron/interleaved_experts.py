"""gpt-oss's experts as Megatron builds experts one by one: matrices [inputs, outputs], biases, an activation of gates
and what they gate that lie in turn; and the router that has a bias too."""

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from rltrain.models.products import clamped_swiglu
from rltrain.training.megatron.norms import parameter_device
from rltrain.training.megatron.routing import SampleRouter


class _Linear(torch.nn.Module):
    """An expert's product with `kernel` [inputs, outputs]. Tokens come to the ranks that the expert is cut over, and
    what these make of them is summed, elsewhere."""

    def __init__(self, num_inputs: int, num_outputs: int, num_biases: int, config: TransformerConfig) -> None:
        super().__init__()
        settings: dict[str, Any] = {"device": parameter_device(config), "dtype": config.params_dtype}
        self.kernel = torch.nn.Parameter(torch.empty(num_inputs, num_outputs, **settings))
        self.bias = torch.nn.Parameter(torch.empty(num_biases, **settings))


class GateUp(_Linear):
    """Cut by outputs: neighbours, a gate and what it gates, stay together."""

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: TransformerConfig,
        tp_group: dist.ProcessGroup,
        **unused: Any,
    ) -> None:
        share = output_size // tp_group.size()
        super().__init__(input_size, share, share, config)

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """(product, bias), as Megatron's MLP takes them."""
        return inputs @ self.kernel, self.bias


class Down(_Linear):
    """Cut by inputs. Every rank of an expert has the whole bias and adds its share of it."""

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: TransformerConfig,
        tp_group: dist.ProcessGroup,
        **unused: Any,
    ) -> None:
        super().__init__(input_size // tp_group.size(), output_size, output_size, config)
        self.num_ranks = tp_group.size()
        self.bias.shared = tp_group.rank() != 0  # type: ignore[attr-defined]  # counts once in a gradient's norm

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """(this rank's part of the product, as much of the bias). Of the bias every rank has the whole gradient: they
        have the same tokens."""
        share: Tensor = self.bias
        if self.num_ranks > 1:
            share = share - share.detach() * (1 - 1 / self.num_ranks)
        return inputs @ self.kernel, share


class ClampedSwiGlu(torch.nn.Module):
    """As Megatron builds the activation of an MLP."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()

    def forward(self, gate_up: Tensor) -> Tensor:
        return clamped_swiglu(gate_up)


class BiasedRouter(SampleRouter):
    """With a bias of its logits."""

    def __init__(
        self, config: TransformerConfig, pg_collection: ProcessGroupCollection | None = None, **settings: Any
    ) -> None:
        super().__init__(config, pg_collection, **settings)
        bias = torch.empty(self.num_experts, dtype=config.params_dtype, device=parameter_device(config))
        self.bias = torch.nn.Parameter(bias)
        self.bias.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
