"""The modules with parameters, by the arguments that megatron-core 0.16.1 gives to constructors and calls.

They compute in the plainest way, with megatron-core's collectives.
"""

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.nn.functional import linear, rms_norm

from transformer_engine.pytorch.attention_rules import DotProductAttention

__all__ = ["DotProductAttention", "GroupedLinear", "LayerNormLinear", "Linear", "RMSNorm"]


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return import_module(f"{__name__}.{name}") if name.islower() else getattr(import_module(f"{__name__}.absent"), name)


class _Parallel(Module):
    """Holds a share of in_features or out_features, unless TP is left to the caller (parallel_mode None)."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        sequence_parallel: bool,
        fuse_wgrad_accumulation: bool,
        tp_group: Any,
        tp_size: int,
        get_rng_state_tracker: Callable[[], Any] | None,
        init_method: Callable[[torch.Tensor], Any],
        bias: bool,
        return_bias: bool,
        parallel_mode: str | None,
        params_dtype: torch.dtype,
        device: Any,
        rng_tracker_name: str | None = None,
        ub_name: str | None = None,
        symmetric_ar_type: str | None = None,
    ) -> None:
        super().__init__()
        assert parallel_mode in ("column", "row", None) and not (return_bias and not bias)
        assert not fuse_wgrad_accumulation, "gradient accumulation fusion is not in the stand-in"
        # The group's size takes precedence over the argument.
        self.tp_size = tp_size if tp_group is None else tp_group.size()
        self.in_features, self.out_features = in_features, out_features
        if parallel_mode == "column":
            self.out_features = _share(out_features, self.tp_size)
        elif parallel_mode == "row":
            self.in_features = _share(in_features, self.tp_size)
        self.parallel_mode, self.use_bias, self.return_bias = parallel_mode, bias, return_bias
        self.tp_group, self.sequence_parallel = tp_group, sequence_parallel and self.tp_size > 1
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        self._made = {"device": device, "dtype": params_dtype}

    def _register(self, name: str, *shape: int) -> None:
        self.register_parameter(name, Parameter(torch.empty(shape, **self._made)))

    def _register_weight(self, number: int | str = "") -> None:
        """Marks the weight as a shard in every case, as Transformer Engine does."""
        self._register(f"weight{number}", self.out_features, self.in_features)
        weight = getattr(self, f"weight{number}")
        weight.tensor_model_parallel, weight.partition_stride = True, 1
        weight.partition_dim = int(self.parallel_mode == "row")
        if self.use_bias:
            self._register(f"bias{number}", self.out_features)

    def _product(self, x: Tensor) -> Any:
        """Multiplies `x` by the weight. `x` has shape [tokens (of this rank), ..., in_features].

        Collective over: the tensor-parallel group.
        """
        assert x.dtype == self.weight.dtype and x.size(-1) == self.in_features
        bias = self.bias if self.use_bias else None
        taken, given = _collectives(self.sequence_parallel)
        if self.tp_size > 1 and self.parallel_mode == "column":
            x = taken(x, group=self.tp_group)
        made = linear(x, self.weight, None if self.return_bias or self.parallel_mode == "row" else bias)
        if self.tp_size > 1 and self.parallel_mode == "row":
            made = given(made, group=self.tp_group)
        if self.parallel_mode == "row" and bias is not None and not self.return_bias:
            made = made + bias
        return (made, bias) if self.return_bias else made


def _collectives(sequence_parallel: bool) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    """Returns the collectives before and after a product of tensor-parallel ranks."""
    from megatron.core.tensor_parallel import mappings  # it imports this package

    if sequence_parallel:
        return mappings.gather_from_sequence_parallel_region, mappings.reduce_scatter_to_sequence_parallel_region
    return mappings.copy_to_tensor_model_parallel_region, mappings.reduce_from_tensor_model_parallel_region


def _share(features: int, tp_size: int) -> int:
    assert features % tp_size == 0, f"{features} features for {tp_size} ranks"
    return features // tp_size


class Linear(_Parallel):
    def __init__(self, *, tp_group: Any = None, **settings: Any) -> None:
        super().__init__(tp_group=tp_group, **settings)
        self._register_weight()

    def forward(self, inp: Tensor, is_first_microbatch: bool | None = None) -> Any:
        return self._product(inp)


class LayerNormLinear(_Parallel):
    def __init__(
        self,
        *,
        eps: float,
        normalization: str,
        return_layernorm_output: bool,
        zero_centered_gamma: bool,
        **settings: Any,
    ) -> None:
        super().__init__(**settings)
        assert self.parallel_mode == "column" and normalization == "RMSNorm" and not zero_centered_gamma
        self.eps, self.return_layernorm_output = eps, return_layernorm_output
        self._register("layer_norm_weight", self.in_features)
        self.layer_norm_weight.sequence_parallel = self.sequence_parallel
        self._register_weight()

    def forward(self, inp: Tensor, is_first_microbatch: bool | None = None) -> Any:
        """Returns the output, alone or followed by the bias and by this rank's normed inputs, depending on the
        settings.

        The settings are read at each call.
        """
        assert inp.dtype == self.layer_norm_weight.dtype
        normed = rms_norm(inp, (self.in_features,), self.layer_norm_weight, self.eps)
        made = self._product(normed)
        if not self.return_layernorm_output:
            return made
        return (*made, normed) if self.return_bias else (made, normed)


class GroupedLinear(_Parallel):
    def __init__(
        self, num_gemms: int, single_grouped_weight: bool = False, single_grouped_bias: bool = False, **settings: Any
    ) -> None:
        super().__init__(**settings)
        assert not single_grouped_weight and not single_grouped_bias, "weight syncs expect a parameter for each expert"
        self.num_gemms = num_gemms
        for number in range(num_gemms):
            self._register_weight(number)

    def _get_weight_tensors(self) -> list[Tensor]:
        """Returns the weights of its products. Callers replace this method to use other weights."""
        return [getattr(self, f"weight{number}") for number in range(self.num_gemms)]

    def forward(self, inp: Tensor, m_splits: Any, is_first_microbatch: bool | None = None) -> Tensor:
        """`inp` has the tokens of one expert after those of the other, shape [tokens, in_features]."""
        assert not self.use_bias and len(m_splits) == self.num_gemms and sum(m_splits) == len(inp)
        assert self.parallel_mode is None or self.tp_size == 1, (
            "tensor parallelism of experts is left to the token dispatcher"
        )
        shares = inp.split([int(size) for size in m_splits])
        return torch.cat([linear(x, weight) for x, weight in zip(shares, self._get_weight_tensors(), strict=True)])


class RMSNorm(Module):
    def __init__(
        self,
        normalized_shape: int | None = None,
        *,
        eps: float,
        sequence_parallel: bool,
        zero_centered_gamma: bool,
        params_dtype: torch.dtype,
        device: Any,
        hidden_size: int | None = None,
    ) -> None:
        """`hidden_size` is the older name of `normalized_shape`."""
        super().__init__()
        assert not zero_centered_gamma and (normalized_shape is None) != (hidden_size is None)
        size = normalized_shape or hidden_size
        self.weight, self.eps = Parameter(torch.empty(size, dtype=params_dtype, device=device)), eps
        self.weight.sequence_parallel = sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight.shape, self.weight, self.eps)
