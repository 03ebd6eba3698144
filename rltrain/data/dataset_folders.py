"""Which files of a folder hold the rows of a split: of a data set that `datasets` saved, a copy of a repository of the
hub, or a plain folder."""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import yaml

from rltrain.data.file_kinds import has_rows
from rltrain.errors import DataError, one_of
from rltrain.runtime.json_text import read_json

NOT_ROWS = frozenset({"dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json"})
SPLIT_WORDS = ("train", "training", "validation", "valid", "val", "dev", "test", "testing", "eval", "evaluation")


def files_of_folder(folder: Path, config_key: str, subset: str | None, split: str | None) -> list[Path]:
    """In their order. DataError where there are none, or where several splits or subsets are and none is named.

    `config_key` ends in ".path"; `.split` and `.subset` stand beside it.
    """
    asked = _Asked(folder, config_key.removesuffix(".path"), subset, split)
    if (folder / "dataset_dict.json").is_file():
        splits = _read_json(folder / "dataset_dict.json", asked).get("splits", [])
        return _saved_files(folder / asked.choose_split(splits), asked)
    if (folder / "state.json").is_file():
        return _saved_files(folder, asked)
    files = _described_files(folder, asked)
    if files is None:
        files = _named_files(folder, asked)
    if not files:
        raise DataError(f"{config_key}: the folder {str(folder)!r} has no file of rows{asked}")
    return files


class _Asked:
    """What is asked for of a folder, by which keys."""

    def __init__(self, folder: Path, section: str, subset: str | None, split: str | None) -> None:
        self.folder, self.section, self.subset, self.split = folder, section, subset, split

    def __str__(self) -> str:
        asked = (f"{kind} {name!r}" for kind, name in (("subset", self.subset), ("split", self.split)) if name)
        return "".join(f" for the {text}" for text in asked)

    def choose_split(self, splits: Sequence[str]) -> str:
        return self._choose("split", self.split, splits)

    def choose_subset(self, subsets: Sequence[str]) -> str:
        return self._choose("subset", self.subset, subsets)

    def _choose(self, kind: str, asked: str | None, present: Sequence[str]) -> str:
        if asked is None and len(present) == 1:
            return present[0]
        if asked is None or asked not in present:
            raise DataError(
                f"{self.section}.{kind}: got {'nothing' if asked is None else repr(asked)}; expected one of those that "
                f"{str(self.folder)!r} has: {one_of(asked, present).removeprefix('one of ') or 'none'}"
            )
        return asked


def _read_json(path: Path, asked: _Asked) -> dict[str, Any]:
    try:
        value = read_json(path)
    except (OSError, ValueError) as error:
        raise DataError(f"{asked.section}.path: cannot read {path}: {error}") from error
    if not isinstance(value, dict):
        raise DataError(f"{asked.section}.path: {path} has {value!r:.80}; expected a JSON object")
    return value


def _saved_files(folder: Path, asked: _Asked) -> list[Path]:
    """Of `Dataset.save_to_disk`."""
    state = _read_json(folder / "state.json", asked)
    if state.get("_indices_data_files") or state.get("_indices_files"):
        raise DataError(
            f"{asked.section}.path: {str(folder)!r} chooses rows by an index beside its table, as old versions of "
            "`datasets` saved them; save it anew (flatten_indices, then save_to_disk)"
        )
    try:
        return [folder / entry["filename"] for entry in state["_data_files"]]
    except (KeyError, TypeError) as error:
        raise DataError(f"{asked.section}.path: {folder / 'state.json'} names no data files") from error


def _described_files(folder: Path, asked: _Asked) -> list[Path] | None:
    """As the head of the folder's README.md says, as on the hub; None where it says nothing."""
    subsets = _described_subsets(folder / "README.md")
    if not subsets:
        return None
    chosen = subsets.get("default") if asked.subset is None else None
    patterns = chosen or subsets[asked.choose_subset([*subsets])]
    split = asked.choose_split([*patterns])
    return _rows_among(path for pattern in patterns[split] for path in sorted(folder.glob(pattern)))


def _described_subsets(readme: Path) -> dict[str, dict[str, list[str]]]:
    """Subset -> split -> patterns of paths; empty where the file is none or its head is of another form."""
    if not readme.is_file():
        return {}
    head = re.match(r"---\s*\n(.*?)\n---\s*\n", readme.read_text(encoding="utf-8", errors="replace"), re.DOTALL)
    try:
        described = yaml.safe_load(head[1]) if head else None
    except yaml.YAMLError:
        return {}
    configs = described.get("configs") if isinstance(described, dict) else None
    found = {}
    for config in configs if isinstance(configs, list) else []:
        if isinstance(config, dict) and config.get("data_files"):
            name = "default" if config.get("default") is True else str(config.get("config_name", "default"))
            found[name] = _patterns_by_split(config["data_files"])
    return found


def _patterns_by_split(data_files: Any) -> dict[str, list[str]]:
    if isinstance(data_files, str):
        return {"train": [data_files]}
    patterns: dict[str, list[str]] = {}
    for entry in data_files:
        split, paths = (entry.get("split", "train"), entry["path"]) if isinstance(entry, dict) else ("train", entry)
        patterns.setdefault(str(split), []).extend([paths] if isinstance(paths, str) else paths)
    return patterns


def _named_files(folder: Path, asked: _Asked) -> list[Path]:
    """Every file of rows whose path has the words of the split and the subset in it."""
    files = _rows_among(sorted(folder.rglob("*")))
    words = {path: _words(path.relative_to(folder)) for path in files}
    if asked.subset is not None:
        files = [path for path in files if asked.subset in path.relative_to(folder).parts[:-1]]
    if asked.split is not None:
        return [path for path in files if asked.split in words[path]]
    splits = {word for path in files for word in words[path] if word in SPLIT_WORDS}
    if len(splits) > 1:
        asked.choose_split(sorted(splits))
    return files


def _words(path: Path) -> set[str]:
    return {*re.split(r"[^A-Za-z0-9]+", path.as_posix()), *path.parts[:-1], path.name.split(".")[0]}


def _rows_among(paths: Iterable[Path]) -> list[Path]:
    return [path for path in paths if path.is_file() and path.name not in NOT_ROWS and has_rows(path)]
