"""Files of a run's checkpoints: how they are written, completed, read back and refused."""

import errno
import io
import json
import os
import shutil
import sys
import threading
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file

from rltrain.checkpoint import durable_file, run_files
from rltrain.checkpoint import run_writer as run_writer
from rltrain.checkpoint.durable_file import DurableFile, WriteBehind
from rltrain.checkpoint.megatron_pickles import around_elements
from rltrain.checkpoint.run_files import (
    MANIFEST_FILE,
    RUN_FILE,
    Contents,
    FileRecord,
    checksum,
    find_damage,
    random_states,
    read_contents,
    read_manifest,
    set_random_states,
    write_files,
)
from rltrain.checkpoint.run_folder import LATEST_FILE, CheckpointFolder, checkpoint_at, name_of
from rltrain.checkpoint.run_writer import NICENESS, FilesWriter, Target, Written
from rltrain.checkpoint.safetensors_file import TYPE_NAMES, SafetensorsFile, TensorEntry
from rltrain.errors import CheckpointError


def contents(value: float, num_values: int = 64) -> Contents:
    return Contents({"values": torch.full((num_values,), value), "empty": torch.empty(0)}, {"step": str(value)})


def save(folder: CheckpointFolder, step: int, keep: int = 2) -> None:
    """Saves like a job of two ranks."""
    partial = folder.begin(step)
    records: dict[str, FileRecord] = {}
    for rank in range(2):
        records |= write_files(partial, {f"actor/rank_{rank}.safetensors": contents(step + rank / 10)})
    folder.complete(step, records, {"step": step}, keep)


def damage(path: Path) -> str | None:
    manifest = read_manifest(path)
    return find_damage(path, manifest, manifest, lambda: None)


def steps(folder: CheckpointFolder) -> list[int]:
    return [found.step for found in folder.candidates()]


@pytest.fixture
def folder(tmp_path: Path) -> CheckpointFolder:
    return CheckpointFolder(tmp_path / "checkpoints")


def test_what_was_saved_is_read_again(folder: CheckpointFolder) -> None:
    save(folder, 4)
    (found,) = folder.candidates()
    assert (found.step, found.run, damage(found.folder)) == (4, {"step": 4}, None)
    first, second = (read_contents(path) for path in found.files("actor"))
    assert torch.equal(second.tensors["values"], contents(4.1).tensors["values"])
    assert first.metadata == {"step": "4.0"} and first.tensors["empty"].shape == (0,)


@settings(max_examples=30)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(0, 3))
def test_the_newest_ones_are_kept(gaps: list[int], keep: int) -> None:
    with TemporaryDirectory() as path:
        folder = CheckpointFolder(Path(path))
        for number, step in enumerate(saved := [*accumulate(gaps)]):
            save(folder, step, keep)
            assert steps(folder) == saved[: number + 1][-keep:][::-1]
        assert all(damage(found.folder) is None for found in folder.candidates())


class Killed(BaseException):
    """The end of a process before its next operation."""


class Disk:
    """A disk with a count of operations on files below `path`. It ends the process before operation number `last`."""

    OPERATIONS = ("open", "os.rename", "os.remove", "os.rmdir", "os.mkdir")

    def __init__(self) -> None:
        self.path, self.last, self.num_operations = "", -1, 0
        sys.addaudithook(self._before)

    @contextmanager
    def watch(self, path: Path, last: int) -> Iterator[None]:
        self.path, self.last, self.num_operations = str(path), last, 0
        try:
            yield
        finally:
            self.path = ""

    def _before(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.path and event in self.OPERATIONS and self.path in str(arguments[0]):
            self.num_operations += 1
            if self.num_operations > self.last:
                raise Killed


@pytest.fixture(scope="module")
def disk() -> Disk:
    return Disk()


def test_a_save_killed_at_any_moment_leaves_an_intact_checkpoint(tmp_path: Path, disk: Disk) -> None:
    reached = []
    for last in range(100):
        folder = CheckpointFolder(tmp_path / str(last))
        save(folder, 2)
        save(folder, 4)
        try:
            with disk.watch(folder.path, last):
                save(folder, 6)
            break
        except Killed:
            folder.clear_partial()
            newest, *older = [found.step for found in folder.candidates() if damage(found.folder) is None]
            assert newest == 6 or older == [2], "the newest is the last renamed folder, not the one in `latest`"
            reached.append(newest)
            assert not list(folder.path.glob(".step_*"))
            save(folder, 8)
            assert steps(folder)[0] == 8 and damage(folder.path / name_of(8)) is None
    assert reached == sorted(reached) and set(reached) == {4, 6}, "the checkpoint is absent first, then present"
    assert len(reached) > 10


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at % len(data)] ^= 1 << at % 8
    path.write_bytes(data)


HARM: dict[str, Callable[[Path, int], None]] = {
    "flipped": flip,
    "truncated": lambda path, at: path.write_bytes(path.read_bytes()[: at % path.stat().st_size]) and None,
    "extended": lambda path, at: path.write_bytes(path.read_bytes() + b"\0") and None,
    "missing": lambda path, at: path.unlink(),
}


@pytest.fixture(scope="module")
def intact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = CheckpointFolder(tmp_path_factory.mktemp("intact"))
    save(folder, 3)
    return folder.path / name_of(3)


@settings(max_examples=25)
@given(harm=st.sampled_from(sorted(HARM)), number=st.integers(0, 2), at=st.integers(0, 10**6))
def test_any_damage_to_a_file_is_found_and_the_file_named(intact: Path, harm: str, number: int, at: int) -> None:
    name = sorted(read_manifest(intact))[number]
    with TemporaryDirectory() as path:
        copy = Path(path, intact.name)
        shutil.copytree(intact, copy)
        assert damage(copy) is None
        HARM[harm](copy / name, at)
        assert str(copy / name) in (damage(copy) or "nothing found")


@pytest.mark.parametrize(
    "text", [None, "", "{", "[]", "\xff", '{"a": 3}', '{"a": {"num_bytes": 1}}', '{"a": {"num_bytes": "x"}}']
)
def test_a_manifest_that_cannot_be_read_is_named(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / MANIFEST_FILE).write_text(text, encoding="latin-1")
    with pytest.raises(CheckpointError, match=f"{tmp_path}/{MANIFEST_FILE} cannot be read"):
        read_manifest(tmp_path)


def unlist(checkpoint: Path, *names: str) -> None:
    path = checkpoint / MANIFEST_FILE
    path.write_text(json.dumps({name: value for name, value in json.loads(path.read_text()).items() if name in names}))


def test_a_manifest_that_leaves_files_out_is_damaged(folder: CheckpointFolder) -> None:
    save(folder, 2)
    path = folder.path / name_of(2)
    for listed in ((), ("actor/rank_0.safetensors", "actor/rank_1.safetensors")):
        unlist(path, *listed)
        with pytest.raises(CheckpointError, match=f"{path}/{MANIFEST_FILE} does not list {RUN_FILE}"):
            damage(path)


def test_a_file_that_was_not_saved_with_the_others_is_damage(folder: CheckpointFolder) -> None:
    """It would be read as the state of another rank."""
    save(folder, 2)
    path = folder.path / name_of(2)
    (path / "notes.txt").write_text("nobody reads this")
    assert damage(path) is None
    write_files(path, {"ranks/rank_00007.safetensors": contents(1)})
    with pytest.raises(CheckpointError, match=f"{path}/ranks/rank_00007.safetensors is none of the checkpoint's files"):
        damage(path)


def binary(path: Path) -> None:
    path.write_bytes(b"\xff\xfe\0")


def folder_instead(path: Path) -> None:
    path.unlink()
    path.mkdir()


LATEST: dict[str, Callable[[Path], object]] = {
    "is missing": Path.unlink,
    "names 'step_2'": lambda path: path.write_text("step_2"),
    "names 'step_0000002'": lambda path: path.write_text("step_0000002\n"),
    "is no text": binary,
    "cannot be read: Is a directory": folder_instead,
}


@pytest.mark.parametrize("says", LATEST)
def test_the_newest_counts_whatever_latest_says(folder: CheckpointFolder, says: str) -> None:
    save(folder, 2)
    save(folder, 4)
    LATEST[says](folder.path / LATEST_FILE)
    assert folder.latest() == says
    assert steps(folder) == [4, 2]
    assert "step_0000004 is complete" in folder.last_good()
    save(folder, 6)
    assert steps(folder) == [6, 4], "a save does not depend on `latest` either"


def test_what_took_the_place_of_a_checkpoint_is_damaged(folder: CheckpointFolder) -> None:
    save(folder, 2)
    (folder.path / name_of(4)).write_text("a file")
    (folder.path / name_of(6)).symlink_to("nowhere")
    assert steps(folder) == [6, 4, 2]
    for step, problem in ((6, "No such file or directory"), (4, "Not a directory")):
        with pytest.raises(CheckpointError, match=f"{name_of(step)}/{MANIFEST_FILE} cannot be read: {problem}"):
            damage(folder.path / name_of(step))
    assert "step_0000002 is complete" in folder.last_good()


def test_checkpoints_that_cannot_be_seen_are_no_reason_to_begin_anew(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    folder = CheckpointFolder(tmp_path / "file")
    with pytest.raises(CheckpointError, match=f"checkpoint.dir: cannot read {tmp_path}/file: Not a directory"):
        folder.candidates()
    assert "cannot read" in folder.last_good()
    assert CheckpointFolder(tmp_path / "nowhere").candidates() == []


def test_a_checkpoint_is_found_by_its_own_folder_or_by_that_of_all(folder: CheckpointFolder, tmp_path: Path) -> None:
    save(folder, 2)
    save(folder, 4)
    assert checkpoint_at(folder.path).step == 4
    assert checkpoint_at(folder.path / name_of(2)).step == 2
    for wrong in (tmp_path, tmp_path / "nowhere", folder.begin(6), folder.path / name_of(7)):
        with pytest.raises(CheckpointError, match=f"checkpoint.resume: {wrong} is not a checkpoint of a run: expected"):
            checkpoint_at(wrong)


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    folder = CheckpointFolder(tmp_path / "file")
    with pytest.raises(CheckpointError, match="checkpoint.dir: cannot make .*: Not a directory"):
        folder.begin(1)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_writer_reports_each_save_once_and_in_turn(tmp_path: Path, asynchronous: bool) -> None:
    writer, reports = FilesWriter(asynchronous=asynchronous), list[tuple[list[str], str | None, bool]]()

    def report(written: Written) -> None:
        reports.append((sorted(written.files), written.problem, written.seconds > 0))

    (tmp_path / "taken").touch()
    writer.start({"a/0": contents(1), "a/1": contents(2)}, Target(tmp_path, report))
    writer.start({"b": contents(3)}, Target(tmp_path / "taken", report))
    writer.start({"c": contents(4, num_values=10**6)}, Target(tmp_path, report))
    writer.join()
    assert reports == [(["a/0", "a/1"], None, True), ([], "File exists", False), (["c"], None, True)]
    assert read_contents(tmp_path / "c").tensors["values"].sum() == 4 * 10**6


def held_up(monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, threading.Event]:
    """Returns two events for a copy to the disk: the copy has begun, and it may continue."""
    begun, let = threading.Event(), threading.Event()
    copy = run_writer.copy_files

    def slow(*arguments: Any) -> Any:
        begun.set()
        assert let.wait(60)
        return copy(*arguments)

    monkeypatch.setattr(run_writer, "copy_files", slow)
    return begun, let


def test_a_slow_disk_holds_up_neither_what_is_written_from_nor_a_save_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, let = held_up(monkeypatch)
    writer, reports = FilesWriter(asynchronous=True), list[str]()
    memory, disk = (Target(tmp_path / name, lambda _, name=name: reports.append(name)) for name in ("memory", "disk"))
    saved = contents(1)
    writer.start({"a/0": saved}, memory, disk)
    writer.release()
    assert begun.wait(60)
    for values in saved.tensors.values():
        values.zero_()
    shutil.rmtree(tmp_path / "memory")
    writer.start({"a/0": contents(2)}, memory)
    writer.release()
    assert reports == ["memory", "memory"]
    let.set()
    writer.join()
    assert reports == ["memory", "memory", "disk"]
    for name, expected in (("memory", contents(2)), ("disk", contents(1))):
        found = read_contents(tmp_path / name / "a/0")
        assert all(values.equal(expected.tensors[key]) for key, values in found.tensors.items())


def test_what_memory_does_not_take_or_has_changed_is_the_disk_s_all_the_same_or_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, let = held_up(monkeypatch)
    writer, reports = FilesWriter(asynchronous=True), list[Written]()
    (tmp_path / "taken").touch()
    writer.start({"a": contents(1)}, Target(tmp_path / "taken", reports.append), Target(tmp_path, reports.append))
    writer.join()
    assert [report.problem for report in reports] == ["File exists", None] and not begun.is_set()
    assert read_contents(tmp_path / "a").metadata == contents(1).metadata
    writer.start({"b": contents(1)}, Target(tmp_path / "memory", reports.append), Target(tmp_path, reports.append))
    assert begun.wait(60)
    with (tmp_path / "memory" / "b").open("r+b") as file:
        file.write(b"1")
    let.set()
    writer.join()
    assert reports[-1].problem == "b has changed in memory since it was written there"


def test_writing_threads_leave_the_processors_to_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    niceness: dict[str, int] = {}

    def report(written: Written) -> None:
        niceness["the save"] = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    def write_block(file: DurableFile, block: memoryview) -> None:
        niceness["a file"] = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
        write(file, block)

    write = DurableFile._write
    monkeypatch.setattr(DurableFile, "_write", write_block)
    before = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    writer = FilesWriter(asynchronous=True)
    writer.start({"a": contents(1)}, Target(tmp_path, report))
    writer.join()
    assert niceness == dict.fromkeys(("a file", "the save"), max(before, NICENESS))
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == before


def test_a_file_is_written_once_and_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its checksum is computed during writing, and equals that of the file on disk. Little of it stays in memory."""
    flushed: list[int] = []
    monkeypatch.setattr(run_files, "MOST_CACHED_BYTES", 3 * 2**20)
    monkeypatch.setattr(os, "fsync", lambda file: flushed.append(os.fstat(file).st_size))
    tensors = {"a": torch.randn(2**20), "b": torch.randn(2**20 + 5), "c": torch.tensor([True])}
    with monkeypatch.context() as patch:
        patch.setattr(run_files, "checksum", None)
        records = write_files(tmp_path, {"file": Contents(tensors, {})})
    assert records == {"file": checksum(tmp_path / "file")}
    assert [size // 2**20 for size in flushed if size > 2**20] == [3, 6, 8]


def test_random_numbers_go_on_where_they_were() -> None:
    import random

    import numpy as np

    def draw() -> tuple[float, ...]:
        return (torch.rand(()).item(), random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn())

    draw()
    tensors, text = random_states(torch.device("cpu"))
    expected = draw()
    draw()
    set_random_states(tensors, text, torch.device("cpu"))
    assert draw() == expected


@pytest.mark.parametrize("behind_bytes", [0, 500, 7000])
def test_what_was_written_is_there_with_its_checksum(
    behind_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, size in {"BLOCK": 1000, "BEHIND_BLOCK": 1000, "TAKEN": 4096, "OUT": 3000}.items():
        monkeypatch.setattr(durable_file, f"{name}_BYTES", size)
    flushed: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: flushed.append(os.fstat(descriptor).st_size))
    values = torch.randn(3, 5000).T  # not contiguous
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
        """A file that takes at most seven bytes at a time, like an almost full disk."""

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


@settings(max_examples=30, deadline=None)
@given(sizes=st.lists(st.integers(1, 9), max_size=12), most_bytes=st.integers(1, 20))
def test_blocks_are_written_in_their_order_and_few_wait(sizes: list[int], most_bytes: int) -> None:
    written = bytearray()
    behind = WriteBehind(written.extend, most_bytes)
    given_bytes = b"".join(bytes([number]) * size for number, size in enumerate(sizes))
    for stop, size in zip(accumulate(sizes), sizes, strict=True):
        behind.put(memoryview(given_bytes)[stop - size : stop])
        assert stop - len(written) <= max(most_bytes, size)
    behind.wait_for(len(given_bytes) // 2)
    assert len(written) >= len(given_bytes) // 2
    behind.close()
    assert written == given_bytes and not behind._thread.is_alive()


class SlowDisk:
    """A disk that takes a block on a signal. It is full after `room` blocks."""

    def __init__(self, room: int) -> None:
        self.room, self.taken = room, list[bytes]()
        self.may_take = threading.Semaphore(0)

    def write(self, block: memoryview) -> None:
        assert self.may_take.acquire(timeout=60)
        if len(self.taken) == self.room:
            raise OSError(errno.ENOSPC, "No space left on device")
        self.taken.append(bytes(block))


@pytest.mark.parametrize("call", ["put", "wait_for", "close"])
def test_what_the_thread_failed_with_is_raised_and_no_more_is_written(call: str) -> None:
    disk = SlowDisk(room=1)
    behind = WriteBehind(disk.write, 3)
    for block in (b"a", b"b", b"c"):
        behind.put(memoryview(block))
    disk.may_take.release(9)
    calls = {"put": lambda: behind.put(memoryview(b"d" * 9)), "wait_for": lambda: behind.wait_for(2)}
    for _ in range(2):
        with pytest.raises(OSError, match="No space left"):
            calls.get(call, behind.close)()
    behind.give_up()
    assert disk.taken == [b"a"] and not behind._thread.is_alive()


def test_what_is_given_up_is_not_written() -> None:
    disk = SlowDisk(room=9)
    behind = WriteBehind(disk.write, 3)
    for block in (b"a", b"b", b"c"):
        behind.put(memoryview(block))
    threading.Timer(0.05, disk.may_take.release, [9]).start()
    behind.give_up()
    assert disk.taken in ([], [b"a"]) and not behind._thread.is_alive()


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


FOURS = [TensorEntry(name, torch.float32, (4,)) for name in ("a", "b")]


@pytest.mark.parametrize(
    ("name", "values"),
    [("b", torch.zeros(1)), ("a", torch.zeros(5)), ("a", torch.zeros(1, dtype=torch.float16))],
    ids=["another tensor", "too many elements", "another type"],
)
def test_what_is_not_due_is_refused(name: str, values: torch.Tensor, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="4 of a as torch.float32 are due"):
        SafetensorsFile(tmp_path / "file", FOURS, {}).append(name, values)


def test_a_file_that_lacks_elements_is_no_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    file = SafetensorsFile(path, FOURS, {})
    file.append("a", torch.zeros(3))
    with pytest.raises(CheckpointError, match="2 tensors were not written, the first is a, which lacks 1 elements"):
        file.close()
    with pytest.raises(FileExistsError):
        SafetensorsFile(path, FOURS, {})
    with pytest.raises(ValueError, match="named twice"):
        SafetensorsFile(tmp_path / "other", [FOURS[0], FOURS[0]], {})
