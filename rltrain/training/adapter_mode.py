"""What low-rank adapters are on every backend: whether they add anything, what they drop, and weights that have them
merged."""

import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

SEEDS = 2**62


class AdapterMode:
    """Of all adapters of a model together. `seed` is for what is dropped."""

    def __init__(self, dropout: float, seed: int) -> None:
        self.is_on = True
        self._dropout, self._seed, self._draws = dropout, seed, False

    @contextmanager
    def off(self) -> Iterator[None]:
        """The model is the base alone."""
        self.is_on = False
        try:
            yield
        finally:
            self.is_on = True

    @contextmanager
    def drawing(self, *at: int) -> Iterator[None]:
        """Around what is computed in training at some point of a run: what is dropped follows from it and the seed, and
        no one else's random numbers change."""
        if not self._dropout:
            yield
            return
        with torch.random.fork_rng(devices=[]):
            digest = hashlib.sha256(repr((self._seed, at)).encode()).digest()
            torch.default_generator.manual_seed(int.from_bytes(digest[:8], "little") >> 1)
            self._draws = True
            try:
                yield
            finally:
                self._draws = False

    def dropped(self, inputs: Tensor, rank: int = 0) -> Tensor:
        """`inputs` without what is dropped. The mask is drawn from a seed of torch's generator on the host, whose state
        recomputation restores: ranks that give the same `rank` draw the same one, others do not."""
        if not self._draws:
            return inputs
        generator = torch.Generator(inputs.device).manual_seed(int(torch.randint(SEEDS, ())) + rank)
        kept = torch.empty_like(inputs).bernoulli_(1 - self._dropout, generator=generator)
        return inputs * kept.div_(1 - self._dropout)


class MadeWeights(Mapping[str, Tensor]):
    """`weights` by name as `made(name, weight)` makes them of these, when they are asked for; none is kept."""

    def __init__(self, weights: Mapping[str, Tensor], made: Callable[[str, Tensor], Tensor]) -> None:
        self._weights, self._made = weights, made

    def __getitem__(self, name: str) -> Tensor:
        return self._made(name, self._weights[name])

    def __contains__(self, name: object) -> bool:
        return name in self._weights

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)
