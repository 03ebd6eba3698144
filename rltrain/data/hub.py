"""Names on the Hugging Face hub instead of paths. Each node copies them once, all nodes at the same revision."""

import json
import logging
import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from pydantic import BaseModel

from rltrain.config.schema import Config, PromptSource
from rltrain.config.section import HubName
from rltrain.data.rows import kind_of
from rltrain.errors import CheckpointError, DataError, StallError, UserError

if TYPE_CHECKING:
    from rltrain.runtime.world import World


logger = logging.getLogger(__name__)

NAME = re.compile(
    r"(?P<prefix>hf:)?(?P<name>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@(?P<revision>[\w][\w./-]*))?(?P<rows>@\[.*\])?"
)
OF_WEIGHTS = ("*.json", "*.jinja", "*.txt", "*.model", "*.safetensors", "README.md")
"""Files read from a checkpoint: no pickled weights, and no code."""
OF_ROWS = tuple(f"*{suffix}*" for suffix in (".jsonl", ".ndjson", ".json", ".parquet", ".arrow", ".feather", ".ipc"))
FILES = {"model": OF_WEIGHTS, "dataset": (*OF_ROWS, "README.md")}
DOUBLES = ["original/*", "consolidated*"]
"""Files with the same weights under other names."""
SMALL_FILES = [".gitattributes", "config.json", "README.md"]
"""Files copied to learn the commit of a revision. The cache then knows it too. Every repository has the first one."""
POLL_S, LOOKS_PER_S = 0.2, 2000
"""Seconds between two checks of the store by a rank, and checks per second by all ranks at most."""


@dataclass(frozen=True)
class HubRepository:
    """A repository of the hub, named in the config under `config_key`."""

    config_key: str
    kind: Literal["model", "dataset"]
    name: str
    revision: str
    rows: str = ""
    """A slice such as @[0:1000]. It follows the folder's path."""

    @classmethod
    def of(cls, text: str, config_key: str, kind: Literal["model", "dataset"]) -> "HubRepository | None":
        """Returns the repository, or None if `text` is a path.

        A text with the prefix hf: is a name. Others are paths if they exist, have the name of a file of rows, or are
        not OWNER/NAME.
        """
        found = NAME.fullmatch(text)
        if found is None or (found["prefix"] is None and (Path(text).exists() or kind_of(Path(found["name"])))):
            return None
        return cls(config_key, kind, found["name"], found["revision"] or "main", found["rows"] or "")

    @property
    def title(self) -> str:
        return f"{self.kind} {self.name}@{self.revision}"

    def copy(
        self, commit: str | None = None, files: list[str] | None = None, on_progress: Callable[[], None] = lambda: None
    ) -> Path:
        """Returns the folder with `files` of `commit`, from the cache or copied there. The default is all files that
        are read.

        `on_progress` is called while bytes arrive. Raises UserError if the files are neither in the cache nor
        available.
        """
        from huggingface_hub.utils import tqdm

        class Bar(tqdm):
            def update(self, n: float | None = 1) -> bool | None:
                on_progress()
                return bool(super().update(n))

        try:
            return self._snapshot(files or list(FILES[self.kind]), revision=commit or self.revision, tqdm_class=Bar)
        except Exception as error:
            raise self._missing(error) from error

    def cached(self) -> Path | None:
        """Returns the folder if the cache has it, else None. Makes no requests."""
        try:
            return self._snapshot(SMALL_FILES, revision=self.revision, local_files_only=True)
        except (OSError, ValueError):
            return None

    def _snapshot(self, files: list[str], **how: Any) -> Path:
        import huggingface_hub

        folder = huggingface_hub.snapshot_download(
            self.name, repo_type=self.kind, allow_patterns=files, ignore_patterns=DOUBLES, **how
        )
        return Path(str(folder))

    def _missing(self, error: Exception) -> UserError:
        of_kind = CheckpointError if self.kind == "model" else DataError
        reason = str(error).strip().splitlines() or [type(error).__name__]
        return of_kind(
            f"{self.config_key}: there is no path {self.name!r} (relative ones start at {Path.cwd()}), and the hub "
            f"gives no {self.title} ({type(error).__name__}: {reason[0]}); expected a path, or a name on the hub that "
            "this machine can reach and may read (HF_ENDPOINT, HF_TOKEN), or that its cache has (HF_HOME)"
        )


def named_checkpoint(text: str, option: str) -> "Path | HubRepository":
    """Returns the checkpoint given to a command: a folder, or a repository of the hub.

    Raises CheckpointError if the path does not exist and cannot be a name.
    """
    repository = HubRepository.of(text, option, "model")
    if repository is None and not Path(text).is_dir():
        raise CheckpointError(
            f"{option}: there is no folder {text!r}; expected one of a model, or a name on the hub (OWNER/NAME)"
        )
    return Path(text) if repository is None else repository


def with_local_copies(config: Config, world: "World", advance: Callable[[], object] = lambda: None) -> Config:
    """Returns the config with a local folder in place of every name. Collective over: all ranks.

    Rank 0 finds the commit of each revision, and logs it. One rank of each node copies this commit, and the node's
    other ranks wait. They wait at most timeouts.no_progress_s without new bytes. `advance` is called as bytes arrive.
    Raises UserError if a repository is not available.
    """
    repositories = {repository.title: repository for repository in repositories_of(config)}
    job = _HubCopies(world, advance)
    if world.rank == 0:
        commits = {title: one.copy(files=SMALL_FILES).name for title, one in repositories.items()}
        job.tell("commits", commits)
        for one in repositories.values():
            logger.warning("%s: %s is commit %s", one.config_key, one.title, commits[one.title])
    if not repositories:
        return config
    commits = job.await_told("commits", "the commits of " + ", ".join(repositories))
    folders = f"folders/{world.rank // world.ranks_per_node}"
    if world.local_rank == 0:
        # A path on rank 0 that this node lacks is no name. Its reader reports that it is missing.
        named = {title: one for title, one in repositories.items() if title in commits}
        copies = {title: one.copy(commits[title], on_progress=job.on_progress) for title, one in named.items()}
        job.tell(folders, {title: str(folder) for title, folder in copies.items()})
    return _replaced(config, job.await_told(folders, "this node's copies of " + ", ".join(repositories)))


def with_cached_copies(config: Config) -> Config:
    """Returns the config with the folder in place of every cached name. Makes no requests. For commands
    without a job."""
    found = {one.title: one.cached() for one in repositories_of(config)}
    return _replaced(config, {title: str(folder) for title, folder in found.items() if folder is not None})


def repositories_of(config: Config) -> list[HubRepository]:
    """Returns the repositories named in the config, in its order."""
    found: list[HubRepository] = []

    def note(text: str, key: str, mark: HubName) -> str:
        repository = HubRepository.of(text, key, mark.kind)
        found.extend([repository] if repository is not None else [])
        return text

    _mapped(config, "", note)
    return found


def checkpoint_paths(config: Config) -> dict[str, str]:
    """Returns the model checkpoints named in the config, by config key."""
    found: dict[str, str] = {}

    def note(text: str, key: str, mark: HubName) -> str:
        if mark.kind == "model":
            found[key] = text
        return text

    _mapped(config, "", note)
    return found


def with_checkpoint_paths(config: Config, folders: Mapping[str, str]) -> Config:
    """Returns the config with other folders for model checkpoints. `folders` maps present paths to new ones."""
    return _mapped(config, "", lambda text, key, mark: folders.get(text, text) if mark.kind == "model" else text)


def _replaced(config: Config, folders: dict[str, str]) -> Config:
    def local(text: str, key: str, mark: HubName) -> str:
        repository = HubRepository.of(text, key, mark.kind)
        return text if repository is None else folders.get(repository.title, text) + repository.rows

    return _mapped(config, "", local)


Section = TypeVar("Section", bound=BaseModel)


def _mapped(section: Section, prefix: str, change: Callable[[str, str, HubName], str]) -> Section:
    """Returns a copy of the section. Paths that may be names are replaced by `change(path, key, mark)`."""
    changed: dict[str, Any] = {}
    for name, field in type(section).model_fields.items():
        value, key = getattr(section, name), f"{prefix}{name}"
        mark = next((mark for mark in field.metadata if isinstance(mark, HubName)), None)
        if isinstance(value, BaseModel):
            changed[name] = _mapped(value, f"{key}.", change)
        elif mark is not None and isinstance(value, str):
            changed[name] = change(value, key, mark)
        elif mark is not None and isinstance(value, dict):
            changed[name] = {item: change(path, f"{key}.{item}", mark) for item, path in value.items()}
        elif isinstance(value, tuple):
            changed[name] = tuple(_mapped_items(value, key, mark, change))
    given = {name: value for name, value in changed.items() if value != getattr(section, name)}
    if isinstance(section, PromptSource) and given:
        given["name"] = section.title  # the name is made from the path
    return section.model_copy(update=given) if given else section


def _mapped_items(
    items: tuple[Any, ...], key: str, mark: HubName | None, change: Callable[[str, str, HubName], str]
) -> Iterator[Any]:
    for number, item in enumerate(items):
        if isinstance(item, BaseModel):
            yield _mapped(item, f"{key}.{number}.", change)
        else:
            yield change(item, f"{key}.{number}", mark) if mark is not None and isinstance(item, str) else item


class _HubCopies:
    """The messages between ranks about copies, through the job's store."""

    def __init__(self, world: "World", advance: Callable[[], object]) -> None:
        self.world, self._advance = world, advance
        self._last_progress = 0.0

    def tell(self, key: str, value: dict[str, str]) -> None:
        self.world.store.set(f"hub/{key}", json.dumps(value))

    def on_progress(self) -> None:
        self._advance()
        now = time.monotonic()
        if now - self._last_progress >= 1.0:
            self._last_progress = now
            self.world.store.add("hub/progress", 1)

    def await_told(self, key: str, what: str) -> dict[str, str]:
        """Waits for the value of `key` and returns it. Raises StallError if no bytes arrive for too long."""
        store, limit_s = self.world.store, self.world.timeouts.no_progress_s
        progress, since = store.add("hub/progress", 0), time.monotonic()
        while not store.check([f"hub/{key}"]):
            now, before = time.monotonic(), progress
            progress = store.add("hub/progress", 0)
            if progress != before:
                since = now
                self._advance()
            if now - since > limit_s:
                raise StallError(
                    f"Waited {limit_s:.0f} s for {what}, but no bytes arrived (timeouts.no_progress_s). The first rank "
                    "of the node should copy it from the hub. Copy it beforehand (hf download) into the cache in "
                    "HF_HOME, or raise the limit."
                )
            time.sleep(max(POLL_S, self.world.size / LOOKS_PER_S))
        told: dict[str, str] = json.loads(store.get(f"hub/{key}"))
        return told
