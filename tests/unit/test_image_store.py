"""Files of decoded images: links, limits, races between ranks, and the remains of killed processes."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from rltrain.errors import ConfigError
from rltrain.runtime import image_files
from rltrain.runtime.image_files import HEADER, ImageMissing, ImageStore, Pixels

REPOSITORY = Path(__file__).resolve().parents[2]
IMAGE_BYTES = HEADER.size + 3 * 4 * 5
OpenStore = Callable[..., ImageStore]


def image(value: int, height: int = 4) -> Pixels:
    return np.full((1, height, 5, 3), value, np.uint8)


@pytest.fixture
def open_store(tmp_path: Path) -> Iterator[OpenStore]:
    opened: list[ImageStore] = []

    def opens(rank: int = 0, name: str = "job", cache_bytes: float = 0) -> ImageStore:
        store = ImageStore.open(name, rank, folder=str(tmp_path), keep_steps=2, cache_bytes=cache_bytes)
        opened.append(store)
        return store

    yield opens
    for store in opened:
        store.close()


def other_process(tmp_path: Path, program: str, *, rank: int = 1, name: str = "job") -> subprocess.Popen[str]:
    """Starts a process with a `store` for `program`. It ends with a line on its standard output."""
    arguments = f"{name!r}, {rank}, folder={str(tmp_path)!r}, keep_steps=2, cache_bytes=0"
    imports = "import sys\nimport numpy as np\nfrom rltrain.runtime.image_files import ImageStore\n"
    opening = f"{imports}store = ImageStore.open({arguments})\n"
    closing = "print('done', flush=True)\nsys.stdin.read()\n"
    command = [sys.executable, "-c", f"{opening}{program}\n{closing}"]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=REPOSITORY, stdin=pipe, stdout=pipe, text=True)


def wait_for(process: subprocess.Popen[str]) -> None:
    assert process.stdout and process.stdout.readline() == "done\n"


def test_all_ranks_of_a_node_read_an_image(open_store: OpenStore) -> None:
    first, second = open_store(0), open_store(1)
    pixels = np.arange(2 * 4 * 6 * 3, dtype=np.uint8).reshape(2, 4, 6, 3)
    first.put(7, pixels[:, :, ::2], step=1)
    assert np.array_equal(second.pixels(7), pixels[:, :, ::2])
    assert second.shape(7) == (2, 4, 3)
    assert second.missing([7, 9, 8, 9]) == [9, 8]
    with pytest.raises(ImageMissing):
        second.shape(8)
    with pytest.raises(ImageMissing):
        second.pixels(8)


def test_stores_of_other_names_are_separate(open_store: OpenStore) -> None:
    first, second = open_store(name="job node 0"), open_store(name="job node 1")
    first.put(7, image(1), step=1)
    assert second.missing([7]) == [7]


def test_an_image_lives_as_long_as_a_rank_holds_it(open_store: OpenStore) -> None:
    first, second = open_store(0), open_store(1)
    first.put(7, image(1), step=1)
    second.hold([7, 7], step=1)
    first.release_before(9)
    assert np.array_equal(second.pixels(7), image(1)) and not first.missing([7])
    second.hold([7], step=10)
    second.release_before(10)
    first.release_before(12)
    assert not second.missing([7])
    mapped = second.pixels(7)
    second.release_before(11)
    first.release_before(13)
    assert second.missing([7]) == [7]
    assert np.array_equal(mapped, image(1))


def test_holding_names_the_missing_and_holds_the_others(open_store: OpenStore) -> None:
    store = open_store()
    store.put(7, image(1), step=1)
    with pytest.raises(ImageMissing, match="keys \\[8, 9\\]") as caught:
        store.hold([8, 7, 9], step=1)
    assert caught.value.keys == [8, 9]
    assert [path.name for path in store.own.iterdir()] == ["7"]


def test_an_image_stays_for_some_steps_after_its_last_use(open_store: OpenStore) -> None:
    first, second = open_store(0), open_store(1)
    first.put(7, image(1), step=1)
    first.release_before(3)
    second.put(7, image(1), step=2)
    first.release_before(4)
    assert not second.missing([7])
    first.release_before(5)
    assert second.missing([7]) == [7]


def test_unused_images_stay_within_the_cache(open_store: OpenStore) -> None:
    store = open_store(cache_bytes=2 * IMAGE_BYTES)
    for key in range(1, 6):
        store.put(key, image(key), step=key)
    store.hold([1], step=9)
    store.release_before(9)
    assert store.missing(range(1, 6)) == [2, 3]
    store.release_before(20)
    assert store.missing(range(1, 6)) == [2, 3, 4]


def test_a_file_removed_by_others_is_no_error(open_store: OpenStore) -> None:
    store = open_store()
    store.put(7, image(1), step=1)
    store.hold([7], step=1)
    (store.folder / "7").unlink()
    (store.own / "7").unlink()
    store.release_before(9)
    assert store.missing([7]) == [7]


@pytest.mark.parametrize(
    ("key", "pixels"), [(0, image(1)), (1, image(1)[0]), (1, image(1)[..., :1]), (1, image(1).astype(np.float32))]
)
def test_what_is_no_image_is_refused(open_store: OpenStore, key: int, pixels: Pixels) -> None:
    with pytest.raises(ValueError, match="expected uint8"):
        open_store().put(key, pixels, step=1)


def test_two_sizes_of_one_key_are_refused(open_store: OpenStore) -> None:
    store = open_store()
    store.put(7, image(1), step=1)
    with pytest.raises(ValueError, match="image 7 has shape"):
        store.put(7, image(1, height=3), step=1)


def test_threads_may_put_hold_and_release_the_same_images(open_store: OpenStore) -> None:
    stores, failed = [open_store(rank) for rank in range(3)], list[BaseException]()
    same_step = threading.Barrier(2 * len(stores), timeout=60)

    def work(store: ImageStore) -> None:
        try:
            for step in range(30):
                keys = [1 + step % 9, 1 + (step + 1) % 9]
                for key in keys:
                    store.put(key, image(key), step)
                store.hold(keys, step)
                assert all(np.array_equal(store.pixels(key), image(key)) for key in keys)
                store.release_before(step)
                same_step.wait()
        except BaseException as error:
            failed.append(error)
            same_step.abort()

    threads = [threading.Thread(target=work, args=[store]) for store in stores for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    assert not [path for path in stores[0].folder.iterdir() if path.name.startswith(".")]


def test_processes_put_the_same_images(open_store: OpenStore, tmp_path: Path) -> None:
    store = open_store()
    program = "for key in range(1, 40):\n  store.put(key, np.full((1, 4, 5, 3), key, np.uint8), 1)"
    with other_process(tmp_path, program) as other:
        for key in range(1, 40):
            store.put(key, image(key), step=1)
        wait_for(other)
        assert all(np.array_equal(store.pixels(key), image(key)) for key in range(1, 40))


def test_what_a_killed_process_left_is_removed_by_the_next(open_store: OpenStore, tmp_path: Path) -> None:
    program = "store.put(7, np.zeros((1, 4, 5, 3), np.uint8), 1)\nstore.hold([7], 1)"
    with other_process(tmp_path, program, name="dead") as dead, other_process(tmp_path, program, name="alive") as alive:
        wait_for(dead)
        wait_for(alive)
        dead.send_signal(signal.SIGKILL)
        dead.wait()
        store = open_store()
        assert {path.name for path in store.folder.parent.iterdir() if path.is_dir()} == {"alive", "job"}
        assert open_store(name="dead").missing([7]) == [7]
        assert open_store(name="alive").missing([7]) == []


def test_the_last_rank_removes_the_folder(open_store: OpenStore) -> None:
    first, second = open_store(0), open_store(1)
    first.put(7, image(1), step=1)
    second.hold([7], step=1)
    second.close()
    assert first.pixels(7)[0, 0, 0, 0] == 1
    first.close()
    assert not first.folder.exists()


def test_a_rank_that_starts_again_begins_without_links(open_store: OpenStore) -> None:
    first = open_store()
    first.put(7, image(1), step=1)
    first.hold([7], step=1)
    again = open_store()
    assert [*again.own.iterdir()] == []


def test_a_full_disk_is_reported_with_its_key(open_store: OpenStore, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "rename", full)
    with pytest.raises(ConfigError, match=r"data\.images: cannot write .*/7: No space left on device"):
        store.put(7, image(1), step=1)
    assert not [path for path in store.folder.iterdir() if path.name.startswith(".")]


def test_a_folder_of_another_user_is_refused(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / f"rltrain-images-{os.getuid()}").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match=r"data\.images\.folder: .* is no folder of this user"):
        ImageStore.open("job", 0, folder=str(tmp_path), keep_steps=2, cache_bytes=0)


@pytest.mark.parametrize(("free", "chosen"), [(5e9, "shared"), (1e9, "temporary")])
def test_a_store_is_in_shared_memory_if_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: float, chosen: str
) -> None:
    shared, temporary = tmp_path / "shared", tmp_path / "temporary"
    shared.mkdir()
    monkeypatch.setattr(image_files, "SHARED_MEMORY", shared)
    monkeypatch.setattr(image_files.tempfile, "gettempdir", lambda: str(temporary))
    monkeypatch.setattr(image_files, "free_bytes", lambda _: free)
    store = ImageStore.open("job", 0, folder=None, keep_steps=2, cache_bytes=0)
    assert store.folder.is_relative_to(tmp_path / chosen)
    monkeypatch.setattr(image_files, "free_bytes", lambda _: 6e9 - free)
    second = ImageStore.open("job", 1, folder=None, keep_steps=2, cache_bytes=0)
    assert second.folder == store.folder
    store.close()
    second.close()
