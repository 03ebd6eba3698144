"""A part of which some tensors lie on the host for good."""

from collections.abc import Callable, Iterable, Sequence

from torch import Tensor

from rltrain.residency.memory_parts import MemoryPart


class PartOnHost(MemoryPart):
    """`hosted` are never on the device and never move; of `tensors`, which may have them too, the others come and go.

    The hosted ones are read where they lie, and count as the part's memory on the host.
    """

    def __init__(self, tensors: Callable[[], Iterable[Tensor]], hosted: Sequence[Tensor]) -> None:
        self._hosted = {tensor.untyped_storage()._cdata for tensor in hosted}
        self._hosted_bytes = sum(tensor.nbytes for tensor in hosted)
        self._kept = hosted
        super().__init__(lambda: (tensor for tensor in tensors() if not self._is_hosted(tensor)))

    @property
    def host_bytes(self) -> int:
        return super().host_bytes + self._hosted_bytes

    def read(self, tensor: Tensor, first: int = 0, count: int | None = None, *, into: Tensor | None = None) -> Tensor:
        if not self._is_hosted(tensor):
            return super().read(tensor, first, count, into=into)
        count = tensor.numel() - first if count is None else count
        values = tensor.detach().view(-1)[first : first + count]
        return values.clone() if into is None else into.copy_(values)

    def _is_hosted(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._hosted
