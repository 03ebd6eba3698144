"""The modules that hold parameters, by the constructors' arguments that megatron-core 0.16.1 gives them, and what
linear layers return that are not cut."""

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed import get_process_group_ranks
from torch.nn import Module, Parameter


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return import_module(f"{__name__}.{name}") if name.islower() else getattr(import_module(f"{__name__}.absent"), name)


class _Parallel(Module):
    """Shares of in_features or out_features, where TP is not left to the caller (parallel_mode None)."""

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
        # The group's size wins over the argument.
        self.tp_size = tp_size if tp_group is None else tp_group.size()
        self.in_features, self.out_features = in_features, out_features
        if parallel_mode == "column":
            self.out_features = _share(out_features, self.tp_size)
        elif parallel_mode == "row":
            self.in_features = _share(in_features, self.tp_size)
        self.parallel_mode, self.use_bias, self.return_bias = parallel_mode, bias, return_bias
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        self._made = {"device": device, "dtype": params_dtype}

    def _register(self, name: str, *shape: int) -> None:
        self.register_parameter(name, Parameter(torch.empty(shape, **self._made)))


def _share(features: int, tp_size: int) -> int:
    assert features % tp_size == 0, f"{features} features for {tp_size} ranks"
    return features // tp_size


class Linear(_Parallel):
    def __init__(self, *, tp_group: Any = None, **settings: Any) -> None:
        super().__init__(tp_group=tp_group, **settings)
        self._register("weight", self.out_features, self.in_features)
        if self.use_bias:
            self._register("bias", self.out_features)

    def forward(self, inputs: torch.Tensor, is_first_microbatch: bool | None = None) -> Any:
        bias = self.bias if self.use_bias else None
        output = F.linear(inputs, self.weight, None if self.return_bias else bias)
        return (output, bias) if self.return_bias else output


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
        assert self.parallel_mode == "column" and normalization == "RMSNorm"
        self.eps, self.zero_centered_gamma = eps, zero_centered_gamma
        self.return_layernorm_output = return_layernorm_output
        self._register("layer_norm_weight", self.in_features)
        self._register("weight", self.out_features, self.in_features)
        if self.use_bias:
            self._register("bias", self.out_features)

    def forward(self, inputs: torch.Tensor, is_first_microbatch: bool | None = None) -> Any:
        """The output, alone or followed by the bias and by the normed inputs, as it was told; it looks at each call."""
        bias, gain = self.bias if self.use_bias else None, self.layer_norm_weight + self.zero_centered_gamma
        normed = F.rms_norm(inputs, gain.shape, gain, self.eps)
        found = [F.linear(normed, self.weight, None if self.return_bias else bias)]
        found += [bias] if self.return_bias else []
        found += [normed] if self.return_layernorm_output else []
        return found[0] if len(found) == 1 else tuple(found)


class GroupedLinear(_Parallel):
    def __init__(self, num_gemms: int, **settings: Any) -> None:
        super().__init__(**settings)
        self.num_gemms = num_gemms
        for number in range(num_gemms):
            self._register(f"weight{number}", self.out_features, self.in_features)
            if self.use_bias:
                self._register(f"bias{number}", self.out_features)

    def forward(
        self, inputs: torch.Tensor, m_splits: list[int], is_first_microbatch: bool | None = None
    ) -> torch.Tensor:
        parts = enumerate(inputs.split(m_splits))
        return torch.cat([F.linear(part, getattr(self, f"weight{number}")) for number, part in parts])


class RMSNorm(Module):
    def __init__(
        self,
        hidden_size: int,
        eps: float,
        sequence_parallel: bool,
        zero_centered_gamma: bool,
        params_dtype: torch.dtype,
        device: Any,
    ) -> None:
        super().__init__()
        self.weight = Parameter(torch.empty(hidden_size, dtype=params_dtype, device=device))


class DotProductAttention(Module):
    """Has no parameters. Refuses heads that it could not share out, and context parallelism of which it is not told
    all, or told as it would not understand."""

    def __init__(
        self,
        num_attention_heads: int,
        kv_channels: int | tuple[int, int],
        attention_dropout: float,
        attn_mask_type: str,
        sequence_parallel: bool,
        tp_size: int,
        get_rng_state_tracker: Callable[[], Any] | None,
        tp_group: Any,
        layer_number: int,
        num_gqa_groups: int | None,
        attention_type: str,
        softmax_scale: float | None,
        cp_group: Any = None,
        cp_global_ranks: list[int] | None = None,
        cp_stream: Any = None,
        cp_comm_type: str = "p2p",
    ) -> None:
        super().__init__()
        if cp_group is not None:
            assert cp_global_ranks == get_process_group_ranks(cp_group) and cp_stream is not None
            assert cp_comm_type in ("p2p", "all_gather", "a2a", "a2a+p2p")
        self.cp_group, self.cp_comm_type = cp_group, cp_comm_type
        tp_size = tp_size if tp_group is None else tp_group.size()
        num_gqa_groups = num_attention_heads if num_gqa_groups is None else num_gqa_groups
        assert num_attention_heads % num_gqa_groups == 0
        assert num_attention_heads % tp_size == 0 and num_gqa_groups % tp_size == 0
