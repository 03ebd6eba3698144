"""Finds the files in which other trainers read the keys that an import leaves out.

    python tools/find_readers.py FOLDER            # writes tools/find_readers.json
    python tools/find_readers.py FOLDER --check    # compares it with the sources

FOLDER has the trainers' repositories at the releases of source_defaults.json: volcengine+verl, THUDM+slime,
NovaSky-AI+SkyRL, RLinf+RLinf, and NVIDIA+Megatron-LM.
"""

import argparse
import io
import json
import re
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

from rltrain.import_config import rlinf, skyrl, slime, verl, verl_sft
from rltrain.import_config.influence import defaults_of

READERS = Path(__file__).with_suffix(".json")
TABLES: dict[str, Mapping[str, tuple[str, ...]]] = {
    "slime": slime.HARMLESS,
    "verl": {**verl.HARMLESS, **verl.CRITIC_HARMLESS},
    "verl_sft": verl_sft.SFT_HARMLESS,
    "skyrl": skyrl.HARMLESS,
    "skyrl_sft": skyrl.SFT_HARMLESS,
    "rlinf": rlinf.HARMLESS,
}
"""The rules of keys without influence, by the names of their defaults."""
MEGATRON = "NVIDIA+Megatron-LM/megatron"
"""Settings that a trainer passes on are read here."""
SOURCES = {
    "slime": ("THUDM+slime/slime", "THUDM+slime/train.py", MEGATRON),
    "verl": ("volcengine+verl/verl", MEGATRON),
    "verl_sft": ("volcengine+verl/verl", MEGATRON),
    "skyrl": ("NovaSky-AI+SkyRL/skyrl", MEGATRON),
    "skyrl_sft": ("NovaSky-AI+SkyRL/skyrl", MEGATRON),
    "rlinf": ("RLinf+RLinf/rlinf", "RLinf+RLinf/toolkits", MEGATRON),
}
SECTION = 3
"""Weight of a file that names the section of a key too."""


@cache
def names_in(path: Path) -> frozenset[str]:
    """Returns the names and texts in the code of a file. A text counts by its words, without leading dashes."""
    found: set[str] = set()
    try:
        for token in tokenize.generate_tokens(io.StringIO(path.read_text(encoding="utf-8")).readline):
            if token.type == tokenize.NAME:
                found.add(token.string)
            elif token.type == tokenize.STRING:
                found |= {word.replace("-", "_") for word in re.findall(r"[A-Za-z_][\w-]*", token.string)}
    except (tokenize.TokenError, SyntaxError):
        return frozenset()
    return frozenset(found)


def parts_of(pattern: str, known: Iterable[str]) -> list[tuple[str, ...]]:
    """Returns the sections and names of the keys of a pattern. Without a known key, those of the pattern itself."""
    keys = [key for key in known if fnmatchcase(key, pattern)] if "*" in pattern else [pattern]
    split = [tuple(part for part in re.split(r"[.\s]+", key.replace("-", "_")) if part) for key in keys or [pattern]]
    return [tuple(part.strip("*_") for part in parts if part.strip("*_")) for parts in split]


def readers_of(folder: Path, patterns: Iterable[str], known: Mapping[str, Any]) -> dict[str, str]:
    """Returns for every pattern the file below `folder` that reads most of its keys. Empty if none reads any."""
    files = [folder] if folder.is_file() else sorted(folder.rglob("*.py"))
    return {pattern: _reader(files, folder, parts_of(pattern, known)) for pattern in patterns}


def _reader(files: Iterable[Path], folder: Path, keys: list[tuple[str, ...]]) -> str:
    scores: Counter[Path] = Counter()
    for path in files:
        names = names_in(path)
        for parts in keys:
            if parts and parts[-1] in names:
                scores[path] += 1 + SECTION * sum(part in names for part in parts[:-1])
    if not scores:
        return ""
    best = max(scores.values())
    return next(path for path in files if scores[path] == best).relative_to(folder).as_posix()


def all_readers(folder: Path) -> dict[str, dict[str, str]]:
    """Returns {framework: {file: its patterns, separated by blanks}}. A pattern without a reader has the file ""."""
    found: dict[str, dict[str, str]] = {}
    for framework, table in TABLES.items():
        left, of_files = list(table), defaultdict[str, list[str]](list)
        for place in SOURCES[framework]:
            readers = readers_of(folder / place, left, defaults_of(framework))
            for pattern, reader in readers.items():
                if reader:
                    of_files[f"{place}/{reader}".removesuffix("/.")].append(pattern)
            left = [pattern for pattern in left if not readers[pattern]]
        of_files[""] = left
        found[framework] = {file: " ".join(patterns) for file, patterns in sorted(of_files.items()) if patterns}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--check", action="store_true")
    given = parser.parse_args()
    text = json.dumps(all_readers(given.folder), indent=1) + "\n"
    if not given.check:
        READERS.write_text(text, encoding="utf-8")
    elif text != READERS.read_text(encoding="utf-8"):
        raise SystemExit(f"{READERS} differs from the sources in {given.folder}")


if __name__ == "__main__":
    main()
