"""Products in half precision with sums in fp32: logits, and gradients of weights."""

import rltrain.training.megatron  # noqa: F401  # isort: skip  # first: it loads Megatron without torch's compiler

import pytest
import torch

from rltrain.models.products import wide_product
from rltrain.training.megatron.platform import accumulates_in_products, add_to_gradient

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda", 0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sums_stay_in_fp32(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.randn(7, 1, 1024, device=DEVICE).to(dtype)
    weight = torch.randn(50_000, 1024, device=DEVICE).to(dtype)
    product = wide_product(x, weight)
    assert product.dtype == torch.float32 and product.shape == (7, 1, 50_000)
    exact = x.double() @ weight.double().T
    assert float((product - exact).abs().max()) < 1e-3 * float(exact.std())


def test_a_product_is_added_to_an_fp32_gradient() -> None:
    """torch refuses or does it; a layer then has a launch less for its weights' gradients."""
    torch.manual_seed(0)
    inputs, of_outputs = (torch.randn(300, size, device=DEVICE).bfloat16() for size in (256, 512))
    gradient = torch.randn(512, 256, device=DEVICE)
    exact = gradient.double() + of_outputs.double().T @ inputs.double()
    assert accumulates_in_products(DEVICE)
    add_to_gradient(inputs, of_outputs, gradient)
    assert float((gradient - exact).abs().max()) < 1e-4 * float(exact.abs().max())
