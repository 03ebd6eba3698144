"""Attention over packed sequences by torch's flash kernel. cuDNN takes no part in it."""

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from rltrain.models import attention
from rltrain.training.megatron.attention import PackedAttention, packed_sequences, tree_sequences
from rltrain.training.megatron.context_parallel import sequences_of_share
from rltrain.training.packed_attention import boundaries_of
from rltrain.training.packing import ContextShare, pack
from rltrain.training.prefix_tree import SortedSamples
from rltrain.training.sliced_attention import attend_slices
from tests.support.packed_experience import plain_experience

pytestmark = pytest.mark.gpu

LENGTHS = [300, 5, 290, 140, 1, 150, 129]
DEVICE = torch.device("cuda", 0)


def attended(heads: tuple[int, int], head_dims: tuple[int, int]) -> tuple[Tensor, list[Tensor]]:
    """Returns (output of attention, gradients of its inputs) for random bf16 rows."""
    torch.manual_seed(0)
    shapes = [(heads[0], head_dims[0]), (heads[1], head_dims[0]), (heads[1], head_dims[1])]
    inputs = [
        torch.randn(sum(LENGTHS), 1, *shape, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
        for shape in shapes
    ]
    packed = packed_sequences(LENGTHS, DEVICE)
    output = PackedAttention(softmax_scale=None)(*inputs, None, packed_seq_params=packed)
    return output, list(torch.autograd.grad(output.float().square().sum(), inputs))


@pytest.mark.skipif(attention.packed_kernel() is None, reason="this torch has no attention over packed rows")
@pytest.mark.parametrize("kv_heads", [16, 4])
def test_one_call_for_all_sequences_equals_padded_batches(kv_heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    output, gradients = attended((16, kv_heads), (128, 128))
    monkeypatch.setattr(attention, "FLASH_DTYPES", ())
    padded, expected = attended((16, kv_heads), (128, 128))
    torch.testing.assert_close(output, padded, rtol=2e-2, atol=2e-2)
    for mine, theirs in zip(gradients, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=5e-2, atol=5e-2)


@pytest.mark.skipif(attention.packed_kernel() is None, reason="this torch has no attention over packed rows")
@pytest.mark.parametrize("rank", [0, 1])
def test_slices_of_context_parallelism_see_what_padded_ones_do(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With more keys than queries, the kernel's causal mask is aligned at the ends."""
    lengths = [4 * length for length in LENGTHS]
    rows, share = sum(lengths) // 2, ContextShare(rank, 2)
    shapes = [(rows, 16), (2 * rows, 4), (2 * rows, 4)]
    inputs = [torch.randn(*shape, 128, device=DEVICE, dtype=torch.bfloat16) for shape in shapes]
    sequences = sequences_of_share(lengths, share, DEVICE, by_heads=False)
    output = attend_slices(*inputs, sequences, None)
    monkeypatch.setattr(attention, "FLASH_DTYPES", ())
    torch.testing.assert_close(output, attend_slices(*inputs, sequences, None), rtol=2e-2, atol=2e-2)


@pytest.mark.skipif(attention.packed_kernel() is None, reason="this torch has no attention over packed rows")
def test_runs_of_a_prefix_tree_see_what_padded_ones_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Backward selects the keys of all runs again."""
    common = torch.arange(200)
    texts = [torch.cat([common[:shared], torch.arange(own) + 1000]) for shared, own in ((200, 90), (200, 5), (128, 40))]
    samples = plain_experience([len(text) for text in texts], torch.cat(texts))
    [batch] = pack(samples, 10_000, device=DEVICE, prefixes=SortedSamples.of(samples))
    rows = tree_sequences(batch, DEVICE)
    inputs = [
        torch.randn(batch.num_rows, heads, 128, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
        for heads in (16, 4, 4)
    ]
    output = attend_slices(*inputs, rows, None)
    gradients = torch.autograd.grad(output.float().square().sum(), inputs)
    monkeypatch.setattr(attention, "FLASH_DTYPES", ())
    padded = attend_slices(*inputs, rows, None)
    torch.testing.assert_close(output, padded, rtol=2e-2, atol=2e-2)
    expected = torch.autograd.grad(padded.float().square().sum(), inputs)
    for mine, theirs in zip(gradients, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=5e-2, atol=1e-1)


@pytest.mark.skipif(attention.packed_kernel() is None, reason="this torch has no attention over packed rows")
@pytest.mark.parametrize("head_dim", [72, 80])
def test_images_attend_to_themselves_alone(head_dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    heads = [torch.randn(sum(LENGTHS), 16, head_dim, device=DEVICE, dtype=torch.bfloat16) for _ in "qkv"]
    boundaries = boundaries_of(LENGTHS, DEVICE)
    output = attention.attend_whole(*heads, boundaries, max(LENGTHS), scale=0.1)
    monkeypatch.setattr(attention, "FLASH_DTYPES", ())
    one_by_one = attention.attend_whole(*heads, boundaries, max(LENGTHS), scale=0.1)
    torch.testing.assert_close(output, one_by_one, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("head_dims", [(128, 128), (192, 128)], ids=["plain", "latent"])
def test_no_kernel_is_cudnns(head_dims: tuple[int, int]) -> None:
    attended((16, 16), head_dims)
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        attended((16, 16), head_dims)
    names = {event.key for event in profiled.key_averages()}
    assert any("attention" in name for name in names) and not any("cudnn" in name for name in names), names
