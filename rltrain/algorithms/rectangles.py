"""Packed tokens as other trainers have them: a row for each sample, of its response from the first token on."""

from dataclasses import dataclass

import torch
from torch import Tensor

from rltrain.algorithms.losses import sample_index
from rltrain.data.experience import Experience


@dataclass(frozen=True)
class Rectangle:
    """What was observed between the turns of a response stands in the rows as well, out of the mask."""

    tokens: Tensor
    """[n] the tokens that are in it."""
    places: Tensor
    """[n] where each stands, row by row."""
    shape: tuple[int, int]
    """Samples, and tokens of the longest response."""

    @classmethod
    def of(cls, experience: Experience) -> "Rectangle":
        samples = sample_index(experience)
        within = torch.arange(len(samples), device=samples.device) - experience.offsets()[:-1][samples]
        drawn = experience.response_mask
        longest = int(experience.lengths.max()) if experience.num_samples else 0
        firsts = experience.lengths.new_full((experience.num_samples,), longest)
        firsts = firsts.scatter_reduce(0, samples[drawn], within[drawn], "amin")
        ends = torch.zeros_like(firsts).scatter_reduce(0, samples[drawn], within[drawn] + 1, "amax")
        tokens = torch.nonzero((within >= firsts[samples]) & (within < ends[samples])).flatten()
        width = int((ends - firsts).clamp(min=0).max()) if experience.num_samples else 0
        rows = samples[tokens]
        places = rows * width + within[tokens] - firsts[rows]
        return cls(tokens, places, (experience.num_samples, width))

    def padded(self, values: Tensor) -> Tensor:
        """[samples, longest] of `values` [tokens], 0 behind what is there. Gradients flow."""
        flat = values.new_zeros(self.shape[0] * self.shape[1])
        return flat.index_put((self.places,), values[self.tokens]).view(self.shape)

    def packed(self, rows: Tensor, num_tokens: int) -> Tensor:
        """[tokens] what `rows` [samples, longest] hold of each token, 0 of those that are not in it."""
        return rows.new_zeros(num_tokens).index_put((self.tokens,), rows.reshape(-1)[self.places])
