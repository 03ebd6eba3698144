"""Low-rank adapters on every backend: how they begin, and what turns them on and off."""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from rltrain.checkpoint.hf_reader import within, write_piece
from rltrain.checkpoint.peft_files import load_adapters
from rltrain.config.models import Lora
from rltrain.models.lora import A, B, target_of
from rltrain.reshard.layout import Layout

# How low-rank adapters begin, whatever the backend: the same numbers in every layout.


def begin_adapters(layout: Layout, rank: int, parameters: Mapping[str, Tensor], settings: Lora, seed: int) -> None:
    """Fill `parameters`, those of `rank` in the adapters' `layout`, as model.lora says. CheckpointError where its files
    are not of such adapters."""
    if settings.path is None:
        draw_adapters(layout, rank, parameters, settings.targets, seed)
    else:
        load_adapters(Path(settings.path), layout, rank, parameters, settings)


@torch.no_grad()
def draw_adapters(
    layout: Layout, rank: int, parameters: Mapping[str, Tensor], targets: Collection[str] | None, seed: int
) -> None:
    """Fill `parameters`, those of `rank` in the adapters' `layout` but a head's: B with zeros, and A as He et al. 2015,
    "Delving deep into rectifiers", section 2.2, with the negative slope sqrt(5) that PEFT takes: uniform up to
    1 / sqrt(inputs).

    Each A has a generator of its own. Those of matrices that are not among `targets` are zero.
    """
    mine = layout.on(rank)
    flats = [parameters[name].detach().view(-1) for name, _ in mine.parameters]
    heads = {piece["parameter"] for piece in mine.pieces if not layout.tensors.names[piece["tensor"]].endswith((A, B))}
    for number, flat in enumerate(flats):
        if number not in heads:
            flat.zero_()
    drawn: dict[int, Tensor] = {}
    for piece in mine.pieces:
        number = int(piece["tensor"])
        name = layout.tensors.names[number]
        if not name.endswith(A) or (targets is not None and target_of(name) not in targets):
            continue
        if number not in drawn:
            drawn = {number: _drawn(name, layout.tensors.shapes[number], seed)}
        write_piece(flats, piece, drawn[number][within(piece)])


def _drawn(name: str, shape: tuple[int, ...], seed: int) -> Tensor:
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    bound = shape[1] ** -0.5
    return torch.empty(shape).uniform_(-bound, bound, generator=generator)


# What low-rank adapters are on every backend: whether they add anything, what they drop, and weights that have them
# merged.

SEEDS = 2**62


class AdapterMode(ABC):
    """Of all adapters of a model together. `seed` is for what is dropped."""

    layout: Layout
    parameters: Mapping[str, Tensor]
    """This rank's, as in `layout.on(rank)`."""

    def __init__(self, dropout: float, seed: int) -> None:
        self.is_on = True
        self._dropout, self._seed, self._draws = dropout, seed, False

    @abstractmethod
    def merged(self, name: str, weight: Tensor) -> Tensor:
        """`weight`, the model's of this name, with what its adapter adds, where it has one."""

    def held(self) -> list[Tensor]:
        """Returns all tensors that the adapters have on the device."""
        return [*self.parameters.values()]

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
