"""Samples as members of prompt groups, in which an episode counts once, however many trajectories it has."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

STD_EPS = 1e-6
"""Beside a standard deviation that something is divided by."""


@dataclass(frozen=True)
class Groups:
    """The groups of some samples, which need not be contiguous or of equal size.

    A group's size is its number of episodes; a sample weighs as much as its share of its episode. Values are [samples]
    fp64, one for each; so are results, where nothing else is said.
    """

    index: Tensor
    """[samples] int64 the group of each, from 0 on."""
    episodes: Tensor
    """[samples] int64 the episode of each, from 0 on."""

    @classmethod
    def of(cls, group_ids: Tensor, episodes: Tensor | None = None) -> "Groups":
        """`episodes` [samples] int64: samples of equal ones are trajectories of one episode; None: each is one."""
        _, index = torch.unique(group_ids, return_inverse=True)
        if episodes is None:
            return cls(index, torch.arange(len(index), device=index.device))
        return cls(index, torch.unique(episodes, return_inverse=True)[1])

    def select(self, chosen: Tensor) -> "Groups":
        """Those of the samples that are `chosen` [samples] bool."""
        return Groups.of(self.index[chosen], self.episodes[chosen])

    @cached_property
    def num_groups(self) -> int:
        return int(self.index.max()) + 1 if len(self.index) else 0

    @cached_property
    def shares(self) -> Tensor:
        """One over the number of samples of each one's episode."""
        share: Tensor = 1 / self.episodes.bincount().double()[self.episodes]
        return share

    @cached_property
    def sizes(self) -> Tensor:
        """Of each sample's group."""
        return self._sums(torch.ones_like(self.shares)).round()

    def means(self, values: Tensor) -> Tensor:
        """Of each sample's group."""
        return self._sums(values) / self.sizes

    def others_means(self, values: Tensor) -> Tensor:
        """Of the other episodes of each sample's group; the sample's own where there is no other."""
        own = self.episode_means(values)
        return ((self._sums(values) - own) / (self.sizes - 1)).where(self.sizes > 1, own)

    def episode_means(self, values: Tensor) -> Tensor:
        """Of each sample's episode."""
        zeros = values.new_zeros(len(self.index))
        return zeros.index_add(0, self.episodes, values * self.shares)[self.episodes]

    def are_equal(self, values: Tensor) -> Tensor:
        """[samples] bool: whether all values of the sample's group are the same."""
        zeros = values.new_zeros(self.num_groups)
        largest = zeros.scatter_reduce(0, self.index, values, "amax", include_self=False)
        smallest = zeros.scatter_reduce(0, self.index, values, "amin", include_self=False)
        return (largest == smallest)[self.index]

    def centred(self, values: Tensor) -> Tensor:
        """Less the group's mean: exactly 0 where all of a group are equal."""
        return (values - self.means(values)).masked_fill(self.are_equal(values), 0)

    def deviations(self, values: Tensor) -> Tensor:
        """Of each sample's group the standard deviation of a sample (n - 1); 0 of a group of one."""
        variance = self._sums(self.centred(values).square()) / (self.sizes - 1).clamp(min=1)
        return variance.sqrt()

    def standardized(self, values: Tensor) -> Tensor:
        """Centred and divided by the group's standard deviation: exactly 0 where all of a group are equal."""
        return self.over_deviations(self.centred(values), values)

    def over_deviations(self, values: Tensor, of: Tensor) -> Tensor:
        """`values` divided by the group's standard deviation of the values `of`."""
        return values / (self.deviations(of) + STD_EPS)

    def _sums(self, values: Tensor) -> Tensor:
        zeros = values.new_zeros(self.num_groups)
        return zeros.index_add(0, self.index, values * self.shares)[self.index]
