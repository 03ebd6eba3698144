"""Files and folders appear under their names once they are complete, or not at all."""

from pathlib import Path

import pytest

from rltrain.runtime.whole_files import make_empty, partial_of, put_in_place, write_whole, written_whole


def test_a_file_is_replaced_once_it_is_written_to_its_end(tmp_path: Path) -> None:
    write_whole(tmp_path / "file", "old")
    with pytest.raises(KeyboardInterrupt), written_whole(tmp_path / "file") as file:
        file.write(b"half of the new")
        raise KeyboardInterrupt
    assert (tmp_path / "file").read_text() == "old"
    with written_whole(tmp_path / "file", durable=False) as file:
        file.write(b"new")
        assert (tmp_path / "file").read_text() == "old"
    assert (tmp_path / "file").read_text() == "new" and len([*tmp_path.iterdir()]) == 1


def test_a_folder_gets_its_name_and_replaces_another_only_if_it_may(tmp_path: Path) -> None:
    for text in ("first", "second"):
        made = partial_of(tmp_path / "folder")
        make_empty(made)
        (made / "inner").mkdir()
        (made / "inner/file").write_text(text)
        if text == "second":
            with pytest.raises(OSError, match="not empty"):
                put_in_place(made, tmp_path / "folder")
            assert (tmp_path / "folder/inner/file").read_text() == "first"
        put_in_place(made, tmp_path / "folder", replaces=text == "second")
        assert (tmp_path / "folder/inner/file").read_text() == text and len([*tmp_path.iterdir()]) == 1
