"""Logits in fp32 from weights in half precision: a product in half precision with sums in fp32."""

import pytest
import torch

from rltrain.models.products import wide_product

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
