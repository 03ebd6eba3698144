"""A residual stream and logits in fp32 beside weights in half precision."""

from types import SimpleNamespace

import rltrain.training.megatron  # noqa: F401  # isort: skip  # first: it loads Megatron without torch's compiler

import pytest
import torch
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

from rltrain.models import products
from rltrain.models.products import wide_product
from rltrain.training.megatron.layers import RMSNorm, RoundedInput, residual_addition, widen_residual_stream

HALF = [torch.bfloat16, torch.float16]


@pytest.mark.parametrize("chunk", [1, 50, 1 << 20])
@pytest.mark.parametrize("dtype", HALF)
def test_products_of_weights_in_half_precision_are_rounded_nowhere(
    dtype: torch.dtype, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(products, "_CHUNK_ELEMENTS", chunk)
    x, weight = torch.randn(2, 3, 17).to(dtype), torch.randn(11, 17).to(dtype)
    product = wide_product(x, weight)
    assert product.dtype == torch.float32 and product.shape == (2, 3, 11)
    assert torch.allclose(product.double(), x.double() @ weight.double().T, rtol=1e-5, atol=1e-5)
    assert torch.equal(wide_product(x.float(), weight.float()), torch.nn.functional.linear(x.float(), weight.float()))


@pytest.mark.parametrize("dtype", HALF)
def test_what_layers_add_is_not_rounded_and_a_bias_neither(dtype: torch.dtype) -> None:
    residual, added, bias = torch.randn(5, 1, 8), torch.randn(5, 1, 8).to(dtype), torch.randn(8).to(dtype)
    add = residual_addition(training=True, fused=False)
    assert torch.equal(add((added, None), residual, 0.0), residual + added.float())
    assert torch.equal(add((added, bias), residual, 0.0), residual + added.float() + bias.float())


@pytest.mark.parametrize("dtype", HALF)
def test_norms_of_a_wide_stream_round_once_to_the_weights_type(dtype: torch.dtype) -> None:
    config = SimpleNamespace(
        use_cpu_initialization=True, params_dtype=dtype, sequence_parallel=False, layernorm_zero_centered_gamma=False
    )
    norm, wide = RMSNorm(config, 16, eps=1e-6), torch.randn(4, 16)
    torch.nn.init.normal_(norm.weight)
    exact = wide.double() / (wide.double().square().mean(-1, keepdim=True) + 1e-6).sqrt() * norm.weight.double()
    assert norm(wide).dtype == dtype
    error = ((norm(wide).double() - exact).abs() / exact.abs()).detach()
    assert float(error.max()) <= torch.finfo(dtype).eps / 2 * 1.01
    assert torch.equal(norm(wide.to(dtype)), torch.nn.functional.rms_norm(wide.to(dtype), (16,), norm.weight, 1e-6))


def test_norms_that_are_fused_with_products_get_the_weights_type() -> None:
    fused, plain = TransformerLayerSubmodules(), TransformerLayerSubmodules(input_layernorm=RMSNorm)
    block = TransformerBlockSubmodules(layer_specs=[ModuleSpec(TransformerLayer, submodules=s) for s in (fused, plain)])
    widen_residual_stream(block)
    assert fused.input_layernorm is fused.pre_mlp_layernorm is RoundedInput
    assert plain.input_layernorm is RMSNorm and IdentityOp not in (plain.input_layernorm, plain.pre_mlp_layernorm)
    for modules in (fused, plain):
        assert modules.self_attn_bda is modules.mlp_bda is residual_addition
    rounded = RoundedInput(SimpleNamespace(params_dtype=torch.bfloat16), hidden_size=4, eps=1e-6)
    assert rounded(torch.randn(3, 4)).dtype == torch.bfloat16
