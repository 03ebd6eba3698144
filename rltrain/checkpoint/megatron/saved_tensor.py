"""What torch.save makes of a tensor, around elements that are written piece by piece: none need be in memory."""

import io
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO, Any, cast

import torch
from torch.serialization import skip_data

DESCRIPTOR_SIGNATURE, ENTRY_SIGNATURE = b"PK\7\x08", b"PK\1\2"
CRC_IN_DESCRIPTOR, CRC_IN_ENTRY, ENTRY_BYTES = 4, 16, 46
"""Where a zip archive has a file's checksum: behind the file, and in its entry of the directory, before its name."""
ELEMENTS = b"archive/data/0"


@dataclass(frozen=True)
class Around:
    """`before` the elements, and `behind` them if they had the checksum 0."""

    before: bytes
    behind: bytes

    def closing(self, crc32: int) -> bytes:
        """What stands behind elements of that checksum."""
        closing = bytearray(self.behind)
        for at in _checksum_places(self.behind):
            closing[at : at + 4] = crc32.to_bytes(4, "little")
        return bytes(closing)


def around_elements(shape: tuple[int, ...], dtype: torch.dtype) -> Around:
    """What torch.save makes of a contiguous tensor that is not empty, without its elements."""
    file = _Hollow()
    with skip_data():
        torch.save(torch.empty(shape, dtype=dtype), cast(IO[bytes], file))  # memory that is not touched takes no room
    before, *behind = file.parts
    if len(behind) != 1:
        raise RuntimeError(f"torch {torch.__version__} leaves {len(behind)} holes for a tensor's elements, not one")
    return Around(before.getvalue(), behind[0].getvalue())


class _Hollow:
    """A file to write to that begins another part where something is left out."""

    def __init__(self) -> None:
        self.parts = [io.BytesIO()]

    def write(self, data: Any) -> int:
        return self.parts[-1].write(data)

    def seek(self, offset: int, whence: int) -> None:
        self.parts.append(io.BytesIO())

    def flush(self) -> None:
        pass


def _checksum_places(behind: bytes) -> Iterator[int]:
    in_directory = behind.rfind(ELEMENTS) - ENTRY_BYTES
    for signature, begin, at in (
        (DESCRIPTOR_SIGNATURE, 0, CRC_IN_DESCRIPTOR),
        (ENTRY_SIGNATURE, in_directory, CRC_IN_ENTRY),
    ):
        if behind[begin : begin + 4] != signature or any(behind[begin + at : begin + at + 4]):
            raise RuntimeError(f"torch {torch.__version__} writes another archive around a tensor than is known here")
        yield begin + at
