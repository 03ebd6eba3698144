"""Some elements of tensors through loaders that cut, fuse and copy them, as SGLang's do."""

import math
from collections.abc import Callable, Iterable
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rltrain.rollout.servers.in_sglang.rltrain_overlay import CannotLoad, Count, Overlay, load_changes

Loader = Callable[[Tensor, Tensor], object]

LOADERS: dict[str, Loader] = {
    "whole": lambda target, loaded: target.copy_(loaded),
    "rows of one rank": lambda target, loaded: target[:2].copy_(loaded.narrow(0, 4, 2)),
    "columns of one rank": lambda target, loaded: target[:, 3:].copy_(loaded.narrow(1, 0, 5)),
    "fused": lambda target, loaded: [target.narrow(0, 3 * n, 3).copy_(half) for n, half in enumerate(loaded.chunk(2))],
    "transposed": lambda target, loaded: target.t().copy_(loaded.transpose(0, 1).contiguous()),
    "of another shape": lambda target, loaded: target.view(2, 3, 8).copy_(loaded.view(2, 3, 8)[:, :, :]),
    "through another type": lambda target, loaded: target.copy_(loaded.to(torch.float64).clone()),
    "filled up": lambda target, loaded: target.copy_(torch.cat([loaded[:, :6], torch.zeros(6, 2)], dim=1)),
    "parameter data": lambda target, loaded: torch.nn.Parameter(target).data.copy_(loaded.data),
}


def changed(name: str, values: Tensor, elements: Tensor) -> SimpleNamespace:
    shape = tuple(values.shape)
    of = values.view(-1)[elements]
    return SimpleNamespace(
        name=name, dtype=values.dtype, shape=shape, numel=math.prod(shape), elements=elements, values=of
    )


@given(loader=st.sampled_from([*LOADERS]), share=st.sampled_from([0.0, 0.1, 0.6, 1.0]), seed=st.integers(0, 1000))
def test_what_changed_is_loaded_and_nothing_else(loader: str, share: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    old, new = torch.randn(6, 8, generator=generator), torch.randn(6, 8, generator=generator)
    elements = (torch.rand(48, generator=generator) < share).nonzero().view(-1)
    new = old.view(-1).index_copy(0, elements, new.view(-1)[elements]).view(6, 8)
    first = torch.randn(6, 8, generator=generator)
    found, expected = first.clone(), first.clone()
    LOADERS[loader](found, old)
    LOADERS[loader](expected, new)

    def load(tensors: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in tensors:
            assert name == "weight" and tensor.shape == (6, 8) and isinstance(tensor, Tensor)
            LOADERS[loader](found, tensor)

    [count] = load_changes(load, [changed("weight", new, elements)])  # type: ignore[list-item]
    assert torch.equal(found, expected)
    assert count.copied == len(elements) or loader.endswith("one rank") or loader == "filled up"


def test_tensors_that_a_loader_joins_are_told_apart_and_waited_for() -> None:
    """As SGLang joins two projections of latent attention once it has seen both, of which one may not have changed."""
    first, second = torch.arange(6.0).view(2, 3), torch.arange(10.0, 19.0).view(3, 3)
    target = torch.cat([first, second])
    seen: dict[str, Tensor] = {}

    def load(tensors: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in tensors:
            seen[name] = tensor
            if len(seen) == 2:
                target.copy_(torch.cat([seen["first"], seen["second"]], dim=0))

    one = changed("second", second + 100, torch.tensor([0, 4]))
    [count] = load_changes(load, [one], [("first", first.dtype, (2, 3))])  # type: ignore[list-item]
    expected = torch.cat([first, second])
    expected[2, 0] += 100
    expected[3, 1] += 100
    assert torch.equal(target, expected) and count.copied == 2
    seen.clear()
    both = [changed("first", first - 50, torch.tensor([5])), changed("second", second, torch.tensor([], dtype=int))]
    counts = load_changes(load, both)  # type: ignore[arg-type]
    expected[1, 2] -= 50
    assert torch.equal(target, expected) and [one.copied for one in counts] == [1, 0]


def test_a_single_element_may_be_filled_in() -> None:
    target = torch.zeros(1)
    count = Count()
    target.fill_(Overlay.of(torch.tensor([3.0]), torch.tensor([1]), (count,)).item())
    assert target.item() == 3.0 and count.copied == 1


@pytest.mark.parametrize(
    "load",
    [
        lambda target, loaded: target.copy_(loaded + 1),
        lambda target, loaded: target.__setitem__(0, loaded[0]),
        lambda target, loaded: target.add_(loaded),
        lambda target, loaded: target[:1].copy_(loaded),
        lambda target, loaded: loaded.numpy(),
        lambda target, loaded: loaded.tolist(),
        lambda target, loaded: loaded.view(torch.int32),
        lambda target, loaded: loaded.view(torch.int8),
        lambda target, loaded: loaded.data_ptr(),
        lambda target, loaded: loaded.zero_(),
        lambda target, loaded: loaded.copy_(target),
        lambda target, loaded: loaded[0, 0].item(),
    ],
)
def test_what_would_lose_track_is_refused(load: Loader) -> None:
    target = torch.zeros(6, 8)
    with pytest.raises(CannotLoad):
        load(target, Overlay.of(torch.ones(6, 8), torch.zeros(6, 8, dtype=torch.int8), (Count(),)))
    assert not target.any()
