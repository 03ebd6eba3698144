"""Safetensors files written piece by piece, read by safetensors itself."""

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file

from rltrain.checkpoint.safetensors_file import TYPE_NAMES, SafetensorsFile, TensorEntry
from rltrain.errors import CheckpointError

ENTRY = st.tuples(st.sampled_from(list(TYPE_NAMES)), st.lists(st.integers(0, 5), max_size=3).map(tuple))


def random_values(entry: TensorEntry, generator: torch.Generator) -> torch.Tensor:
    return torch.randint(-100, 100, entry.shape, generator=generator).to(entry.dtype)


@settings(max_examples=30)
@given(tensors=st.lists(ENTRY, max_size=6), piece=st.integers(1, 7))
def test_safetensors_reads_what_was_appended_in_pieces(
    tensors: list[tuple[torch.dtype, tuple[int, ...]]], piece: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("written") / "file.safetensors"
    entries = [TensorEntry(f"tensor.{number}", dtype, shape) for number, (dtype, shape) in enumerate(tensors)]
    generator = torch.Generator().manual_seed(0)
    values = {entry.name: random_values(entry, generator) for entry in entries}
    with SafetensorsFile(path, entries, {"written_by": "a test"}) as file:
        for entry in file.entries:
            for part in values[entry.name].flatten().split(piece):
                file.append(entry.name, part)
    found = load_file(path)
    assert found.keys() == values.keys()
    assert all(found[name].dtype == values[name].dtype and torch.equal(found[name], values[name]) for name in values)
    with safe_open(path, "pt") as opened:
        assert opened.metadata() == {"written_by": "a test"}


def test_tensors_are_aligned(tmp_path: Path) -> None:
    entries = [
        TensorEntry("odd", torch.bfloat16, (3,)),
        TensorEntry("wide", torch.float32, (2,)),
        TensorEntry("last", torch.int64, (1,)),
    ]
    with SafetensorsFile(tmp_path / "file", entries, {}) as file:
        assert [entry.name for entry in file.entries] == ["last", "wide", "odd"]
        for entry in file.entries:
            file.append(entry.name, torch.ones(entry.shape, dtype=entry.dtype))
    header_bytes = int.from_bytes((tmp_path / "file").read_bytes()[:8], "little")
    assert header_bytes % 8 == 0


@pytest.mark.parametrize(
    ("name", "values"),
    [("b", torch.zeros(1)), ("a", torch.zeros(5)), ("a", torch.zeros(1, dtype=torch.float16))],
    ids=["another tensor", "too many elements", "another type"],
)
def test_what_is_not_due_is_refused(name: str, values: torch.Tensor, tmp_path: Path) -> None:
    entries = [TensorEntry("a", torch.float32, (4,)), TensorEntry("b", torch.float32, (4,))]
    with pytest.raises(ValueError, match="4 of a as torch.float32 are due"):
        SafetensorsFile(tmp_path / "file", entries, {}).append(name, values)


def test_a_file_that_lacks_elements_is_no_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    entries = [TensorEntry("a", torch.float32, (4,)), TensorEntry("b", torch.float32, (4,))]
    file = SafetensorsFile(path, entries, {})
    file.append("a", torch.zeros(3))
    with pytest.raises(CheckpointError, match="2 tensors were not written, the first is a, which lacks 1 elements"):
        file.close()
    with pytest.raises(FileExistsError):
        SafetensorsFile(path, entries, {})
    with pytest.raises(ValueError, match="named twice"):
        SafetensorsFile(tmp_path / "other", [entries[0], entries[0]], {})
