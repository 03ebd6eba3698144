"""A copy on the host of weights that passed through staging memory, for a server that is started anew."""

import torch
from torch import Tensor

from rltrain.residency.host_memory import HostRegion, aligned
from rltrain.rollout.sglang.weights.staging import Staging


class HostCopy:
    """All parts of one rank, end to end; pinned beside CUDA."""

    def __init__(self, staging: Staging, num_parts: int, device: torch.device) -> None:
        self._staging, self._memory = staging, HostRegion(device)
        self._begin = [0]
        for part in range(num_parts):
            self._begin.append(self._begin[-1] + aligned(staging.num_bytes(part)))
        self._memory.reserve(self._begin[-1])

    def store(self, part: int) -> None:
        """Returns when the copy is complete."""
        for piece, staged in self._pieces(part):
            piece.copy_(staged, non_blocking=True)
        if self._staging.bytes(part).is_cuda:
            torch.cuda.synchronize(self._staging.bytes(part).device)

    def restore(self, part: int) -> None:
        for piece, staged in self._pieces(part):
            staged.copy_(piece, non_blocking=True)

    def _pieces(self, part: int) -> list[tuple[Tensor, Tensor]]:
        memory = self._staging.bytes(part)
        pieces = list(self._memory.pieces(self._begin[part], memory.numel()))
        return list(zip(pieces, memory.split([piece.numel() for piece in pieces]), strict=True))
