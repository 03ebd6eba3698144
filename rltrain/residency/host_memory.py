"""Host memory that what leaves the device is copied to: allocated once, reused at every move, pinned beside CUDA."""

from collections.abc import Iterator

import torch
from torch import Tensor

SLAB_BYTES = 256 * 2**20
"""Pinned memory comes in powers of two from torch's allocator: one large buffer would waste up to half of itself."""
SMALLEST_SLAB_BYTES = 2**20
ALIGNMENT_BYTES = 64


class HostRegion:
    """A growing range of bytes on the host, in slabs that keep their address for good."""

    def __init__(self, device: torch.device) -> None:
        self._pinned = device.type == "cuda"
        self.slabs: list[Tensor] = []
        """uint8, end to end the bytes of the region."""

    @property
    def num_bytes(self) -> int:
        return sum(slab.numel() for slab in self.slabs)

    def reserve(self, num_bytes: int) -> None:
        """Have at least `num_bytes`, keeping what is there."""
        while (missing := num_bytes - self.num_bytes) > 0:
            self.slabs.append(torch.empty(self._slab_bytes(missing), dtype=torch.uint8, pin_memory=self._pinned))

    def pieces(self, begin: int, num_bytes: int) -> Iterator[Tensor]:
        """Bytes `begin` to `begin + num_bytes`, in order; ValueError where they were not reserved."""
        if begin < 0 or begin + num_bytes > self.num_bytes:
            raise ValueError(f"bytes {begin} to {begin + num_bytes} of a host region of {self.num_bytes}")
        first = 0
        for slab in self.slabs:
            start, end = max(begin - first, 0), min(begin + num_bytes - first, slab.numel())
            if start < end:
                yield slab[start:end]
            first += slab.numel()

    def _slab_bytes(self, missing: int) -> int:
        if not self._pinned:
            return missing
        power_of_two = 1 << (missing - 1).bit_length()
        return min(max(power_of_two, SMALLEST_SLAB_BYTES), SLAB_BYTES)


def aligned(num_bytes: int) -> int:
    """The next multiple of the alignment at which every storage starts in a region."""
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
