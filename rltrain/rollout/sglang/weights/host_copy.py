"""A copy on the host of weights that passed through staging memory, for a server that is started anew."""

import torch

from rltrain.offload.host_memory import HostTensors, NodeCopy
from rltrain.rollout.sglang.weights.staging import Staging


class HostCopy:
    """All parts of one rank; pinned beside CUDA.

    Ranks of a node that are the same share of several engines have one copy, `shared`, which the first of them writes;
    None: a copy of this rank's own. Of two updates the second one's parts come to any rank only when all ranks have
    joined it, so that nobody reads any more what it overwrites.
    """

    def __init__(self, staging: Staging, num_parts: int, device: torch.device, shared: NodeCopy | None = None) -> None:
        self._staging, self._shared = staging, shared
        sizes = (staging.num_bytes(part) for part in range(num_parts))
        like = {str(part): torch.empty(size, dtype=torch.uint8, device="meta") for part, size in enumerate(sizes)}
        self._host = shared.tensors(like, lambda host: None) if shared else HostTensors(like, device)
        self._num_updates = 0
        """Whose last part has arrived: the same on all ranks that share the copy."""

    @property
    def num_bytes(self) -> int:
        """Of memory that this rank has for it, and no other."""
        return sum(tensor.nbytes for tensor in self._host.tensors.values()) if self._host.is_own else 0

    def store(self, part: int) -> None:
        """After each part of an update. Returns when it is copied, where this rank makes the copy."""
        if self._host.is_own:
            staged = self._staging.bytes(part)
            self._host.tensors[str(part)].copy_(staged, non_blocking=True)
            if staged.is_cuda:
                torch.cuda.synchronize(staged.device)

    def complete(self) -> None:
        """After the last part of an update: the copy has all of it, as far as this rank makes one."""
        self._num_updates += 1
        if self._shared and self._shared.is_first:
            self._shared.renewed(self._num_updates)

    def await_update(self) -> None:
        """Before `restore`: until whoever keeps the copy has all of the last update that is complete here."""
        if self._shared and not self._host.is_own:
            self._shared.await_renewed(self._num_updates)

    def restore(self, part: int) -> None:
        """Into the part's slot of staging memory."""
        self._staging.bytes(part).copy_(self._host.tensors[str(part)], non_blocking=True)
