"""Without a budget the memory of the KV cache follows what is needed."""

import pytest
import torch

from rltrain.models.attention import attend
from rltrain.rollout.embedded import slot_cache
from rltrain.rollout.embedded.kv_cache import AttentionShape, CacheShape
from rltrain.rollout.embedded.slot_cache import SlotCache

HEADS = AttentionShape(num_heads=2, num_kv_heads=2, head_dim=4, value_dim=4, scale=0.5)
LATENTS = AttentionShape(num_heads=2, num_kv_heads=1, head_dim=7, value_dim=5, scale=0.5, latent=True)


def small_cache(attention: AttentionShape = HEADS) -> SlotCache:
    """Two layers, at most 12 slots of 48 positions."""
    return SlotCache(CacheShape(2, attention, 12, 48, torch.float32, torch.device("cpu")))


def shape_of(cache: SlotCache) -> tuple[int, int]:
    assert cache.keys.shape == cache.values.shape
    assert cache.first_positions.tolist() == [
        [(slot * 2 + head) * cache.capacity for head in range(2)] for slot in range(cache.num_slots)
    ]
    return cache.num_slots, cache.capacity


def test_an_empty_cache_takes_what_is_asked_for() -> None:
    cache = small_cache()
    assert shape_of(cache) == (0, 0)
    cache.reserve(5, 3, num_used=0)
    assert shape_of(cache) == (5, 16)


def test_growth_doubles_up_to_the_limits() -> None:
    cache = small_cache()
    cache.reserve(5, 8, num_used=0)
    sizes = []
    for num_slots, num_positions in ((5, 9), (6, 9), (6, 40), (11, 33), (12, 48)):
        cache.reserve(num_slots, num_positions, num_used=5)
        sizes.append(shape_of(cache))
    assert sizes == [(5, 16), (10, 16), (10, 40), (12, 40), (12, 48)]


def test_growth_keeps_the_used_slots_and_everything_finite() -> None:
    cache = small_cache()
    cache.reserve(3, 16, num_used=0)
    keys, values = torch.rand_like(cache.keys), torch.rand_like(cache.values)
    cache.keys.copy_(keys)
    cache.values.copy_(values)
    cache.reserve(7, 20, num_used=2)
    for grown, before in ((cache.keys, keys), (cache.values, values)):
        assert torch.equal(grown[:, :2, :, :16], before[:, :2])
        assert not grown[:, 2:].any()
        assert not grown[:, :, :, 16:].any()


def test_memory_stays_until_released() -> None:
    cache = small_cache()
    cache.reserve(3, 8, num_used=0)
    address = cache.keys.data_ptr()
    cache.reserve(2, 5, num_used=0)
    assert cache.keys.data_ptr() == address
    cache.reserve(4, 20, num_used=0)
    assert shape_of(cache) == (4, 24)
    cache.release()
    assert cache.keys.untyped_storage().nbytes() == cache.values.untyped_storage().nbytes() == 0


def test_latents_are_kept_once_and_values_are_a_part_of_them() -> None:
    cache = small_cache(LATENTS)
    cache.reserve(3, 16, num_used=0)
    assert [tensor.shape for tensor in cache.tensors()] == [(2, 3, 1, 16, LATENTS.token_elements)]
    latents = torch.rand_like(cache.keys)
    cache.keys.copy_(latents)
    cache.reserve(7, 20, num_used=2)
    assert torch.equal(cache.values[:, :2, :, :16], latents[:, :2, ..., :5])
    cache.move([1], [0], 16)
    assert torch.equal(cache.keys[:, 0, :, :16], latents[:, 1])


def test_half_precision_attends_as_everything_else_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the attention that never takes cuDNN's kernel."""
    attended = []

    def noted(*tensors: torch.Tensor, **settings: float | None) -> torch.Tensor:
        attended.append(tensors[0].dtype)
        return attend(*tensors, **settings)

    monkeypatch.setattr(slot_cache, "attend", noted)
    q, k, v = torch.randn(3, 2, 4), torch.randn(3, 6, 4), torch.randn(3, 6, 4)
    bias = torch.zeros(3, 1, 6)
    whole = slot_cache._attend(q, k, v, bias, HEADS)
    half = slot_cache._attend(*(tensor.bfloat16() for tensor in (q, k, v, bias)), HEADS)
    assert attended == [torch.bfloat16]
    assert torch.allclose(half.float(), whole, atol=0.05)
