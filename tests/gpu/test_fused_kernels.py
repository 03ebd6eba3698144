"""The fused kernels of layers against torch in fp64, in the shapes of real models."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from rltrain.models.attention import fused_kernels
from tests.support.fused_references import EPS, agrees, normal, plain_norm, plain_turn, turn_of

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda", 0)
KINDS = pytest.mark.parametrize("kind", [torch.bfloat16, torch.float32])
NUM_TOKENS = 777


def on_device(*shape: int, kind: torch.dtype, seed: int = 0) -> Tensor:
    return normal(*shape, dtype=kind, seed=seed).to(DEVICE)


@KINDS
@pytest.mark.parametrize("size", [64, 1024, 4096, 5120])
def test_norms(size: int, kind: torch.dtype) -> None:
    kernels = fused_kernels(DEVICE)
    assert kernels is not None
    x, added = (on_device(NUM_TOKENS, size, kind=kind, seed=seed) for seed in (0, 1))
    weight = on_device(size, kind=kind, seed=2)
    agrees(
        lambda x, weight: [kernels.rms_norm(x, weight, EPS, 1.0)],
        lambda x, weight: [plain_norm(x, weight, 1.0)],
        [x, weight],
    )

    def plain(x: Tensor, added: Tensor, weight: Tensor) -> list[Tensor]:
        total = x + added
        total = total + (total.to(kind).double() - total).detach()
        return [total, plain_norm(total, weight, 0.0)]

    agrees(lambda x, added, weight: kernels.added_norm(x, added, weight, EPS), plain, [x, added, weight])


@KINDS
@pytest.mark.parametrize("size", [768, 12288])
def test_gated_activations(size: int, kind: torch.dtype) -> None:
    kernels = fused_kernels(DEVICE)
    assert kernels is not None

    def plain(gate_up: Tensor) -> list[Tensor]:
        gate, up = gate_up.chunk(2, -1)
        return [F.silu(gate) * up]

    gate_up = on_device(NUM_TOKENS, 2 * size, kind=kind)
    agrees(lambda gate_up: [kernels.gated(gate_up)], plain, [gate_up])
    agrees(
        lambda gate, up: [kernels.gated_product(gate, up)],
        lambda gate, up: [F.silu(gate) * up],
        gate_up.chunk(2, -1),
    )


@KINDS
@pytest.mark.parametrize(
    ("head_dim", "half", "pairs"), [(128, 64, False), (64, 32, True), (128, 48, True), (80, 40, False)]
)
def test_rotation(head_dim: int, half: int, pairs: bool, kind: torch.dtype) -> None:
    kernels = fused_kernels(DEVICE)
    assert kernels is not None
    turn = turn_of(NUM_TOKENS, half, pairs=pairs)
    turn = turn._replace(cos=turn.cos.to(DEVICE), sin=turn.sin.to(DEVICE))
    heads = on_device(NUM_TOKENS, 8, 4 + 2, head_dim, kind=kind)
    weights = [on_device(head_dim, kind=kind, seed=seed) for seed in (4, 5)]

    def plain(heads: Tensor, of_queries: Tensor, of_keys: Tensor) -> list[Tensor]:
        queries, keys = heads[:, :, :-2].flatten(1, 2), heads[:, :, -2]
        return [plain_turn(queries, of_queries, turn), plain_turn(keys, of_keys, turn), heads[:, :, -1]]

    agrees(lambda heads, *weights: kernels.turned_groups(heads, turn._replace(norms=weights)), plain, [heads, *weights])
    agrees(
        lambda queries, keys: kernels.turned_pair(queries, keys, turn),
        lambda queries, keys: (plain_turn(queries, None, turn), plain_turn(keys, None, turn)),
        [on_device(NUM_TOKENS, count, head_dim, kind=kind) for count in (32, 8)],
    )


def test_bandwidth_of_norms() -> None:
    """A norm with its addition moves four tensors. It should take most of the memory's bandwidth."""
    kernels = fused_kernels(DEVICE)
    assert kernels is not None
    x, added = (torch.randn(16384, 4096, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    weight = torch.ones(4096, device=DEVICE, dtype=torch.bfloat16)

    def milliseconds(step: object) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for _ in range(3):
            step()  # type: ignore[operator]
        start.record()
        for _ in range(20):
            step()  # type: ignore[operator]
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) / 20

    copying = milliseconds(lambda: added.copy_(x))
    with torch.no_grad():
        norming = milliseconds(lambda: kernels.added_norm(x, added, weight, EPS))
    assert norming < 3 * 2 * copying  # twice the bytes of a copy
