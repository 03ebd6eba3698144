"""Exchange of matrix boxes between ranks: every matrix is assembled on one rank, and its result is sent back."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from rltrain.models.table import Array
from rltrain.reshard.layout import BOX_FIELDS, PIECE
from rltrain.runtime.group_messages import gather_bytes

ROUND_ELEMENTS = 1 << 25
"""Average number of matrix elements assembled on a rank at a time."""

Shape = tuple[int, int]


@dataclass(frozen=True, eq=False)
class Round:
    """The matrices assembled at one time. Boxes are rows of PIECE. Between two ranks they are ordered by tensor, row
    and column."""

    owned: Mapping[int, Shape]
    """Shapes of the matrices assembled on this rank, by tensor."""
    sent: Sequence[Array]
    """Boxes sent to each rank for its matrices, in rank order."""
    received: Sequence[Array]
    """Boxes received from each rank for this rank's matrices."""
    held: Sequence[Array]
    """Boxes of each rank's matrices on this rank."""
    held_by: Sequence[Array]
    """Boxes of this rank's matrices on each rank."""


@dataclass
class MatrixExchange:
    """An exchange among the ranks of `group`. All make the same calls, with `rounds` equal in number and order."""

    group: dist.ProcessGroup
    rounds: list[Round] = field(default_factory=list)

    @classmethod
    def of(
        cls,
        boxes: Array,
        shapes: Sequence[Sequence[int]],
        group: dist.ProcessGroup,
        device: torch.device,
        round_elements: int = ROUND_ELEMENTS,
    ) -> "MatrixExchange":
        """Plans the exchange from `boxes`, this rank's pieces of matrices with `parameter`, `offset` and `stride`.

        `shapes` are those of all tensors. The ranks together hold every matrix. Copies of a box on several ranks are
        equal. Collective over: `group`.
        """
        tables = _gathered(boxes, group, device)
        owners = _owners(tables, shapes)
        exchange = cls(group)
        batch: list[int] = []
        size = 0
        for tensor in sorted(owners):
            batch.append(tensor)
            size += shapes[tensor][0] * shapes[tensor][1]
            if size >= round_elements * group.size():
                exchange.rounds.append(_round(batch, owners, tables, shapes, group.rank()))
                batch, size = [], 0
        if batch:
            exchange.rounds.append(_round(batch, owners, tables, shapes, group.rank()))
        return exchange

    def map(
        self,
        sources: Callable[[int], Tensor],
        apply: Callable[[np.void, Tensor], None],
        function: Callable[[Tensor], Tensor],
        device: torch.device,
    ) -> None:
        """Replaces all matrices by the results of `function`.

        `function` gets matrices of one shape at a time, fp32 [count, rows, columns]. `sources` returns the flat fp32
        tensor of a parameter's boxes on this rank. `apply` is called with every box of this rank and its result, [rows,
        cols]. Collective over: the group.
        """
        for one in self.rounds:
            given = [_packed(table, sources, device) for table in one.sent]
            taken = self._exchanged(given, [_elements(table) for table in one.received], device)
            matrices = {tensor: torch.zeros(shape, device=device) for tensor, shape in one.owned.items()}
            for table, flat in zip(one.received, taken, strict=True):
                for box, values in _unpacked(table, flat):
                    _part(matrices[int(box["tensor"])], box).copy_(values)
            results = _by_shape(matrices, function)
            given = [_parts(table, results, device) for table in one.held_by]
            taken = self._exchanged(given, [_elements(table) for table in one.held], device)
            for table, flat in zip(one.held, taken, strict=True):
                for box, values in _unpacked(table, flat):
                    apply(box, values)

    def _exchanged(self, given: Sequence[Tensor], sizes: Sequence[int], device: torch.device) -> Sequence[Tensor]:
        if self.group.size() == 1:
            return given
        taken = torch.empty(sum(sizes), device=device)
        dist.all_to_all_single(taken, torch.cat(list(given)), list(sizes), [len(g) for g in given], group=self.group)
        return taken.split(list(sizes))


def _gathered(boxes: Array, group: dist.ProcessGroup, device: torch.device) -> list[Array]:
    """Returns the tables of all ranks, sorted by tensor, row and column."""
    tables = [np.frombuffer(of_rank, dtype=PIECE) for of_rank in gather_bytes(boxes.tobytes(), group, device)]
    return [table[np.lexsort([table[name] for name in reversed(BOX_FIELDS)])] for table in tables]


def _owners(tables: Sequence[Array], shapes: Sequence[Sequence[int]]) -> dict[int, int]:
    """Returns an owner of each tensor among its holders. The costliest go first, each to the rank with least load."""
    holders: dict[int, list[int]] = defaultdict(list)
    for rank, table in enumerate(tables):
        for tensor in np.unique(table["tensor"]).tolist():
            holders[tensor].append(rank)
    costs = {tensor: min(shapes[tensor]) * shapes[tensor][0] * shapes[tensor][1] for tensor in holders}
    loads, owners = [0] * len(tables), dict[int, int]()
    for tensor in sorted(holders, key=lambda tensor: (-costs[tensor], tensor)):
        owners[tensor] = min(holders[tensor], key=lambda rank: (loads[rank], rank))
        loads[owners[tensor]] += costs[tensor]
    return owners


def _round(
    batch: Sequence[int],
    owners: Mapping[int, int],
    tables: Sequence[Array],
    shapes: Sequence[Sequence[int]],
    rank: int,
) -> Round:
    by_owner = [[tensor for tensor in batch if owners[tensor] == owner] for owner in range(len(tables))]
    mine = by_owner[rank]
    held = [table[np.isin(table["tensor"], batch)] for table in tables]
    givers = _givers(held, owners)
    giving = [table[giver] for table, giver in zip(held, givers, strict=True)]
    return Round(
        owned={tensor: (shapes[tensor][0], shapes[tensor][1]) for tensor in mine},
        sent=[giving[rank][np.isin(giving[rank]["tensor"], tensors)] for tensors in by_owner],
        received=[table[np.isin(table["tensor"], mine)] for table in giving],
        held=[held[rank][np.isin(held[rank]["tensor"], tensors)] for tensors in by_owner],
        held_by=[table[np.isin(table["tensor"], mine)] for table in held],
    )


def _givers(held: Sequence[Array], owners: Mapping[int, int]) -> list[np.ndarray]:
    """Returns the boxes sent by each rank, as masks. Of equal boxes, the owner's is used, else the first rank's."""
    seen: dict[tuple[int, ...], int] = {}
    keys = [[tuple(int(box[name]) for name in BOX_FIELDS) for box in table] for table in held]
    for rank, of_rank in enumerate(keys):
        for key in of_rank:
            if key not in seen or owners[key[0]] == rank:
                seen[key] = rank
    return [np.array([seen[key] == rank for key in of_rank], dtype=bool) for rank, of_rank in enumerate(keys)]


def _elements(table: Array) -> int:
    return int((table["rows"] * table["cols"]).sum())


def view_of(flat: Tensor, box: np.void) -> Tensor:
    """Returns the view of a box in its flat parameter, [rows, cols]."""
    return flat[int(box["offset"]) :].as_strided((int(box["rows"]), int(box["cols"])), (int(box["stride"]), 1))


def _part(matrix: Tensor, box: np.void) -> Tensor:
    row, col = int(box["row"]), int(box["col"])
    return matrix[row : row + int(box["rows"]), col : col + int(box["cols"])]


def _packed(table: Array, sources: Callable[[int], Tensor], device: torch.device) -> Tensor:
    boxes = [view_of(sources(int(box["parameter"])), box).reshape(-1) for box in table]
    return torch.cat(boxes) if boxes else torch.empty(0, device=device)


def _parts(table: Array, matrices: Mapping[int, Tensor], device: torch.device) -> Tensor:
    boxes = [_part(matrices[int(box["tensor"])], box).reshape(-1) for box in table]
    return torch.cat(boxes) if boxes else torch.empty(0, device=device)


def _unpacked(table: Array, flat: Tensor) -> Iterator[tuple[np.void, Tensor]]:
    first = 0
    for box in table:
        rows, cols = int(box["rows"]), int(box["cols"])
        yield box, flat[first : first + rows * cols].view(rows, cols)
        first += rows * cols


def _by_shape(matrices: Mapping[int, Tensor], function: Callable[[Tensor], Tensor]) -> dict[int, Tensor]:
    groups: dict[torch.Size, list[int]] = defaultdict(list)
    for tensor, matrix in matrices.items():
        groups[matrix.shape].append(tensor)
    results: dict[int, Tensor] = {}
    for tensors in groups.values():
        made = function(torch.stack([matrices[tensor] for tensor in tensors]))
        results |= dict(zip(tensors, made, strict=True))
    return results
