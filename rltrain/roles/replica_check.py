"""Whether replicas of a model that learns still hold the same values, and which rank does not."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from rltrain.errors import ReplicaError
from rltrain.reshard.checksums import checksum_of
from rltrain.reshard.layout import Layout
from rltrain.training.backend import AdaptedModel, Model


@dataclass(frozen=True)
class OddRank:
    """`rank` holds other values of `parameter` than `others`, with equal parts of the model, most of which agree; or
    where `is_alone` is false nobody can tell who of them is wrong."""

    rank: int
    parameter: str
    others: tuple[int, ...]
    is_alone: bool

    def __str__(self) -> str:
        ranks = f"rank{'s' * (len(self.others) > 1)} {', '.join(map(str, self.others))}"
        if self.is_alone:
            return f"rank {self.rank} holds other values of {self.parameter} than {ranks}, which agree"
        return f"rank {self.rank} and {ranks} hold different values of {self.parameter}, and either may be wrong"


class ReplicaCheck:
    """Compares checksums of what ranks with equal parts of a role's model hold, every so many steps."""

    def __init__(self, every: int, role: str, rank: int, group: dist.ProcessGroup) -> None:
        """`every` is 0 for never. `group` has the role's ranks, over host memory."""
        self._every, self._role, self._rank, self._group = every, role, rank, group

    def check(self, step: int, model: Model) -> None:
        """After the updates of `step`. ReplicaError on all ranks where replicas differ. Collective over: the role's
        ranks."""
        if not self._every or (step + 1) % self._every:
            return
        for layout, tensors in held_by(model):
            if odd := self._odd_rank(layout, tensors):
                raise ReplicaError(
                    f"step {step}: replicas of the {self._role} are no longer equal (checks.replicas): {odd}. A GPU, "
                    "or the memory or network of its host, computes or carries wrong numbers: take the host out of the "
                    "job and start it again. No checkpoint is saved of this step; those that were saved since the last "
                    "comparison may have the fault (checkpoint.resume names an earlier one)"
                )

    def _odd_rank(self, layout: Layout, tensors: Mapping[str, Tensor]) -> OddRank | None:
        names = [[name for name, _ in layout.on(rank).parameters] for rank in layout.ranks]
        mine = names[layout.ranks.index(self._rank)]
        sums = torch.zeros(max(map(len, names)), dtype=torch.int64)
        sums[: len(mine)] = torch.tensor([checksum_of(tensors[name].contiguous()) for name in mine], dtype=torch.int64)
        told = [torch.empty_like(sums) for _ in layout.ranks]
        dist.all_gather(told, sums, group=self._group)
        return find_odd_rank(layout.ranks, layout.parts, names, [one.tolist() for one in told])


def held_by(model: Model) -> Iterator[tuple[Layout, Mapping[str, Tensor]]]:
    """What a rank has of a model, by layout."""
    yield model.layout, model.parameters
    if isinstance(model, AdaptedModel):
        yield model.adapters_layout, model.adapters


def find_odd_rank(
    ranks: Sequence[int], parts: Sequence[int], names: Sequence[Sequence[str]], sums: Sequence[Sequence[int]]
) -> OddRank | None:
    """The first of a rank's checksums that its replicas, the ranks with the same part, have otherwise. None: all agree.

    `names` and `sums` are by rank, in the order of `ranks`; a rank's sums are of its parameters in the order of their
    names, and those after them mean nothing.
    """
    for part in dict.fromkeys(parts):
        members = [index for index, of_rank in enumerate(parts) if of_rank == part]
        for number, name in enumerate(names[members[0]]):
            counts = Counter(sums[index][number] for index in members)
            if len(counts) == 1:
                continue
            (usual, most), (_, next_most) = counts.most_common(2)
            odd = next(index for index in reversed(members) if sums[index][number] != usual)
            agreeing = [ranks[index] for index in members if sums[index][number] == usual]
            return OddRank(ranks[odd], name, tuple(agreeing), is_alone=most > next_most)
    return None
