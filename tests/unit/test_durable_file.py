"""Files that are written once, from their beginning to their end, and what torch.save makes around a tensor in them."""

import io
import os
import zipfile
import zlib
from pathlib import Path

import pytest
import torch

from rltrain.checkpoint import durable_file
from rltrain.checkpoint.durable_file import DurableFile
from rltrain.checkpoint.megatron_pickles import around_elements


@pytest.mark.parametrize("behind_bytes", [0, 500, 7000])
def test_what_was_written_is_there_with_its_checksum(
    behind_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(durable_file, "BLOCK_BYTES", 1000)
    monkeypatch.setattr(durable_file, "BEHIND_BLOCK_BYTES", 1000)
    monkeypatch.setattr(durable_file, "TAKEN_BYTES", 4096)
    monkeypatch.setattr(durable_file, "OUT_BYTES", 3000)
    flushed: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: flushed.append(os.fstat(descriptor).st_size))
    values = torch.randn(3, 5000).T  # whose elements do not lie one after the other
    path = tmp_path / "file"
    with DurableFile(path, checksum=True, most_cached_bytes=20_000, behind_bytes=behind_bytes) as file:
        file.write(b"before")
        file.crc32 = 0
        file.write_tensor(values)
        assert file.num_bytes == 60_006 >= path.stat().st_size >= 60_006 - max(1000, behind_bytes)
        file.wait_for(60_006)
        assert path.stat().st_size == 60_006
    elements = values.contiguous().numpy().tobytes()
    assert (tmp_path / "file").read_bytes() == b"before" + elements
    assert file.crc32 == zlib.crc32(elements)
    assert flushed[-1] == 60_006
    assert all(later - earlier <= 21_000 for earlier, later in zip([0, *flushed], flushed, strict=False))
    with pytest.raises(FileExistsError):
        DurableFile(tmp_path / "file")


@pytest.mark.parametrize("behind_bytes", [0, 50])
def test_what_writing_leaves_over_is_written_too(
    behind_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = DurableFile(tmp_path / "file", behind_bytes=behind_bytes)
    raw = file._file

    class Hesitant:
        """Takes at most seven bytes at a time, as a disk may that is almost full."""

        def write(self, data: memoryview) -> int:
            return raw.write(data[:7]) or 0

    monkeypatch.setattr(file, "_file", Hesitant())
    file.write(bytes(range(100)))
    file.wait_for(100)
    monkeypatch.undo()
    file.close()
    assert (tmp_path / "file").read_bytes() == bytes(range(100)) and file.num_bytes == 100


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1,), (1, 3, 70), (2, 5, 1000)])
def test_elements_within_what_torch_saves_around_them_are_its_file(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    values = torch.randn(shape).to(dtype)
    elements = values.view(-1).view(torch.uint8).numpy().tobytes()
    around = around_elements(shape, dtype)
    made = around.before + elements + around.closing(zlib.crc32(elements))
    expected = io.BytesIO()
    torch.save(values, expected)
    assert len(made) == expected.tell() and around.before == expected.getvalue()[: len(around.before)]
    assert torch.equal(torch.load(io.BytesIO(made), weights_only=True), values)
    with zipfile.ZipFile(io.BytesIO(made)) as ours, zipfile.ZipFile(expected) as theirs:
        assert ours.testzip() is None, "all checksums are right"
        names = [name for name in theirs.namelist() if not name.endswith("serialization_id")]
        assert all(ours.read(name) == theirs.read(name) for name in names)
