"""Low-rank adapters on every backend: initial values, switching them off, and merged weights."""

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

# Initial values of low-rank adapters. They are the same in every layout and backend.


def begin_adapters(layout: Layout, rank: int, parameters: Mapping[str, Tensor], settings: Lora, seed: int) -> None:
    """Fills `parameters`, the adapters of `rank` in `layout`, with the initial values of model.lora.

    Raises CheckpointError if its files do not fit the adapters.
    """
    if settings.path is None:
        draw_adapters(layout, rank, parameters, settings.targets, seed)
    else:
        load_adapters(Path(settings.path), layout, rank, parameters, settings)


@torch.no_grad()
def draw_adapters(
    layout: Layout, rank: int, parameters: Mapping[str, Tensor], targets: Collection[str] | None, seed: int
) -> None:
    """Initializes `parameters`, the adapters of `rank` in `layout`, except those of a head: B with zeros, A at random.

    A is uniform within 1 / sqrt(inputs): He et al. 2015, "Delving deep into rectifiers", section 2.2, with PEFT's
    negative slope sqrt(5). Each A has its own generator. With `targets`, the A of all other matrices is zero.
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


# The state of adapters on every backend: on or off, dropout, and merged weights.

SEEDS = 2**62


class AdapterMode(ABC):
    """The adapters of a model. `seed` is for dropout."""

    layout: Layout
    parameters: Mapping[str, Tensor]
    """This rank's adapters, as in `layout.on(rank)`."""

    def __init__(self, dropout: float, seed: int) -> None:
        self.is_on = True
        self._dropout, self._seed, self._draws = dropout, seed, False

    @abstractmethod
    def merged(self, name: str, weight: Tensor) -> Tensor:
        """Returns the model's `weight` of this name, with its adapter merged if it has one."""

    def held(self) -> list[Tensor]:
        """Returns the device tensors of the adapters: this rank's `parameters`, and copies made from them for merging.

        Memory part "weights" moves all of them.
        """
        return [*self.parameters.values()]

    @contextmanager
    def off(self) -> Iterator[None]:
        """Switches the adapters off, so the model is the base alone."""
        self.is_on = False
        try:
            yield
        finally:
            self.is_on = True

    @contextmanager
    def drawing(self, *at: int) -> Iterator[None]:
        """Activates dropout for a training computation. The masks depend on the seed and on `at`, the point of the run.

        Other random states are unchanged.
        """
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
        """Applies dropout to `inputs`.

        The mask's seed comes from torch's generator on the host, since recomputation restores its state. Ranks with the
        same `rank` drop the same elements, other ranks do not.
        """
        if not self._draws:
            return inputs
        generator = torch.Generator(inputs.device).manual_seed(int(torch.randint(SEEDS, ())) + rank)
        kept = torch.empty_like(inputs).bernoulli_(1 - self._dropout, generator=generator)
        return inputs * kept.div_(1 - self._dropout)


class MadeWeights(Mapping[str, Tensor]):
    """A mapping with `made(name, weight)` for each of `weights`, computed on access and not kept."""

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
