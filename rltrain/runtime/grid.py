"""The grid of one role: its ranks by kind of parallelism, and the layers of each pipeline stage."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

# The layers of each stage of a pipeline.


def planned_layers(num_layers: int, num_chunks: int) -> tuple[int, ...]:
    """Returns the number of layers in each of `num_chunks` consecutive chunks of a model.

    If the layers do not divide evenly, the embedding and the loss count as one layer each. Chunks with fewer layers are
    then at the ends, the last chunk before the first. Raises ValueError if there are fewer layers than chunks.
    """
    if num_layers < num_chunks:
        raise ValueError(f"{num_layers} layers cannot be divided among {num_chunks} chunks of a pipeline")
    if num_layers % num_chunks == 0:
        return (num_layers // num_chunks,) * num_chunks
    ends = [(number == 0) + (number == num_chunks - 1) for number in range(num_chunks)]
    counts = [1] * num_chunks
    for _ in range(num_layers - num_chunks):
        least = min(range(num_chunks), key=lambda number: (counts[number] + ends[number], ends[number], number))
        counts[least] += 1
    return tuple(counts)


def checked_layers(given: Sequence[int], num_layers: int, pp: int, vpp: int) -> tuple[int, ...]:
    """Returns `given` as the layers of pp * vpp chunks. Raises ValueError unless it has as many numbers, of sum
    `num_layers`."""
    if len(given) != pp * vpp or sum(given) != num_layers or min(given) < 0:
        raise ValueError(
            f"layers_per_stage is {list(given)}; expected {pp * vpp} numbers (pp {pp} x vpp {vpp}) that sum up to the "
            f"model's {num_layers} layers"
        )
    return tuple(given)


# The ranks of one role by tensor, pipeline, context and data parallelism.


@dataclass(frozen=True)
class Coordinates:
    """A rank's indices in the grid of its role. Each starts at 0."""

    tp: int
    cp: int
    dp: int
    pp: int


@dataclass(frozen=True)
class ExpertCoordinates:
    """A rank's indices among the ranks that share the experts of its pipeline stage."""

    etp: int
    ep: int
    dp: int


@dataclass(frozen=True)
class Grid:
    """`ranks` (any subset of the world, in rank order) in the shape tp x cp x dp x pp, with tp varying fastest.

    This is Megatron's order "tp-cp-dp-pp". `len(ranks)` must be divisible by tp * cp * pp, as the placement checks
    first. The ranks of each pipeline stage share its experts as etp x ep x expert dp, with etp varying fastest. Each of
    the ep shares has whole experts, split over etp ranks (None: the same number as tp). An engine's experts are on its
    tp ranks, so ep x etp is tp.

    A model's layers are split into pp * vpp chunks. Chunk v of pipeline stage s has depth v * pp + s.
    `layers_per_stage` has the layers of each chunk in the order of depth (None: those of `planned_layers`).
    """

    ranks: tuple[int, ...]
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int | None = None
    vpp: int = 1
    layers_per_stage: tuple[int, ...] | None = None
    copies: int | None = None
    """Number of copies of a model sharded over all ranks. Each copy has equally many consecutive ranks. None if not
    sharded in this way."""

    @property
    def is_sharded(self) -> bool:
        """Whether a replica needs the shards of other replicas to compute."""
        return self.copies is not None

    @cached_property
    def sharded_array(self) -> np.ndarray:
        """World ranks, shape [copies, shards]. Raises ValueError if the ranks do not divide."""
        return np.array(self.ranks, dtype=np.int64).reshape(self.copies or 1, -1)

    @property
    def dp(self) -> int:
        return len(self.ranks) // (self.tp * self.pp * self.cp)

    def layers_of_chunks(self, num_layers: int) -> tuple[int, ...]:
        """Returns the layers of the pp * vpp chunks of a model, in the order of depth. Raises ValueError if they do not
        fit."""
        if self.layers_per_stage is None:
            return planned_layers(num_layers, self.pp * self.vpp)
        return checked_layers(self.layers_per_stage, num_layers, self.pp, self.vpp)

    @cached_property
    def array(self) -> np.ndarray:
        """World ranks, shape [pp, dp, cp, tp]."""
        return np.array(self.ranks, dtype=np.int64).reshape(self.pp, self.dp, self.cp, self.tp)

    def coordinates(self, rank: int) -> Coordinates:
        pp, dp, cp, tp = (int(i[0]) for i in np.nonzero(self.array == rank))
        return Coordinates(tp=tp, cp=cp, dp=dp, pp=pp)

    @cached_property
    def expert_array(self) -> np.ndarray:
        """World ranks, shape [pp, expert dp, ep, etp]. Raises ValueError if ep * etp does not divide a stage."""
        etp = self.etp or self.tp
        stage = self.array.reshape(self.pp, -1)
        if stage.shape[1] % (self.ep * etp):
            raise ValueError(
                f"ep {self.ep} x etp {etp} does not divide the {stage.shape[1]} ranks of a pipeline stage: "
                f"dp {self.dp} x cp {self.cp} x tp {self.tp}"
            )
        return stage.reshape(self.pp, -1, self.ep, etp)

    def expert_coordinates(self, rank: int) -> ExpertCoordinates:
        _, dp, ep, etp = (int(i[0]) for i in np.nonzero(self.expert_array == rank))
        return ExpertCoordinates(etp=etp, ep=ep, dp=dp)

    def replica(self, dp: int) -> tuple[int, ...]:
        """Returns the ranks of one copy of the model. They work on the same data."""
        return self._replicas[dp]

    @cached_property
    def _replicas(self) -> list[tuple[int, ...]]:
        """The ranks of each replica, by data-parallel index."""
        return [tuple(row) for row in self.array.transpose(1, 0, 2, 3).reshape(self.dp, -1).tolist()]

    def owner(self, dp: int) -> int:
        """Returns the leader of a replica: the first tp and cp rank of the last pipeline stage. It has the model's
        outputs."""
        return int(self.array[-1, dp, 0, 0])

    def owners(self) -> tuple[int, ...]:
        return tuple(self.owner(dp) for dp in range(self.dp))

    def lists(self, *axes: str) -> tuple[tuple[int, ...], ...]:
        """Returns the rank lists that vary along `axes` ("tp", "cp", "dp", "pp") and are fixed along the others."""
        names = ("pp", "dp", "cp", "tp")
        return lists_along(self.array, *map(names.index, axes))


def lists_along(ranks: np.ndarray, *axes: int) -> tuple[tuple[int, ...], ...]:
    """Returns the lists of `ranks` that vary along `axes` and are fixed along the others."""
    inner = sorted(axes)
    outer = [axis for axis in range(ranks.ndim) if axis not in axes]
    size = int(np.prod([ranks.shape[axis] for axis in inner], dtype=np.int64))
    return tuple(map(tuple, ranks.transpose(outer + inner).reshape(-1, size).tolist()))


def job_leader(grids: Mapping[str, Grid]) -> int:
    """Returns the leader of the job: the actor's, or the rollout's if nothing is trained."""
    return grids.get("actor", grids.get("rollout", next(iter(grids.values())))).owner(0)
