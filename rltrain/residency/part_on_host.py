"""Parts of which some tensors, or all, lie on the host for good."""

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
        return _copied(tensor, first, count, into)

    def _is_hosted(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._hosted


class WholePartOnHost(MemoryPart):
    """All `tensors` are on the host for good: nothing of it is on the device, whatever its place, or ever moves."""

    def __init__(self, tensors: Callable[[], Iterable[Tensor]]) -> None:
        super().__init__(tuple)
        self._hosted_tensors = tensors

    @property
    def host_bytes(self) -> int:
        storages = (tensor.untyped_storage() for tensor in self._hosted_tensors())
        return sum({storage._cdata: storage.nbytes() for storage in storages}.values())

    def read(self, tensor: Tensor, first: int = 0, count: int | None = None, *, into: Tensor | None = None) -> Tensor:
        return _copied(tensor, first, count, into)


def _copied(tensor: Tensor, first: int, count: int | None, into: Tensor | None) -> Tensor:
    values = tensor.detach().view(-1)[first : None if count is None else first + count]
    return values.clone() if into is None else into.copy_(values)
