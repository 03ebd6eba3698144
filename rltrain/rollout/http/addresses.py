"""Which servers there are, and which rank asks which: from the config, or from a file that is read again."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from rltrain.errors import ConfigError
from rltrain.runtime.job_store import JobStore

SCHEMES = ("http://", "https://")


def checked(urls: Sequence[str], where: str) -> tuple[str, ...]:
    """The same without slashes at their ends; ConfigError for what is no URL, and for one that is there twice."""
    plain = tuple(url.strip().rstrip("/") for url in urls)
    for url in plain:
        if not url.startswith(SCHEMES) or not url.split("://", 1)[1]:
            raise ConfigError(f"{where}: got {url!r}; expected a URL such as http://10.0.0.5:30000")
        if plain.count(url) > 1:
            raise ConfigError(f"{where}: {url} stands there {plain.count(url)} times; expected once")
    return plain


def read(path: Path, where: str) -> tuple[str, ...]:
    """One URL a line; what follows a # is a comment. ConfigError where the file cannot be read, or says no URLs."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigError(f"{where}: cannot read {path}: {error.strerror}; expected a file with a URL a line") from None
    return checked([line for line in (raw.split("#", 1)[0].strip() for raw in lines) if line], f"{where}, {path}")


def dealt_out(urls: Sequence[str], before: Mapping[str, int], num_ranks: int) -> dict[str, int]:
    """Which of `num_ranks` asks each: what was dealt `before` stays, new ones go where there are fewest, and who has
    none gets one of those that have most."""
    dealt = {url: before[url] for url in urls if url in before}
    held: list[list[str]] = [[url for url in dealt if dealt[url] == rank] for rank in range(num_ranks)]
    for url in urls:
        if url not in dealt:
            min(held, key=len).append(url)
            dealt[url] = -1
    while len(most := max(held, key=len)) > 1 and not (fewest := min(held, key=len)):
        fewest.append(most.pop())
    return {url: rank for rank, of_rank in enumerate(held) for url in of_rank}


class Addresses:
    """Of the servers of a role's rank number `number` of `num_ranks`. The first of them reads the file, and tells the
    others through the store; a file that is being written, or is wrong, changes nothing."""

    def __init__(
        self, given: Sequence[str] | str, where: str, job_store: JobStore, key: str, number: int, num_ranks: int
    ) -> None:
        self._file = Path(given) if isinstance(given, str) else None
        self._where, self._job_store, self._key = where, job_store, f"http/{key}/urls"
        self._number, self._num_ranks = number, num_ranks
        self._dealt: dict[str, int] = {}
        self.problem: str | None = None
        """What is wrong with the file now."""
        urls = read(self._file, where) if self._file else checked(given, where)
        if len(urls) < num_ranks:
            raise ConfigError(
                f"{where}: got {len(urls)} for {num_ranks} ranks of role {key}; expected at least one for each: place "
                f"the role on fewer ranks, of which each can ask many servers, or name more"
            )
        self._deal(urls)

    def mine(self) -> tuple[str, ...]:
        """Those that this rank is to ask now."""
        if self._file is not None:
            self._look(self._file)
        return tuple(url for url, number in self._dealt.items() if number == self._number)

    def _look(self, file: Path) -> None:
        if self._number > 0:
            if self._job_store.has(self._key):
                self._dealt = json.loads(self._job_store.store.get(self._key))
            return
        try:
            urls, self.problem = read(file, self._where), None
        except ConfigError as error:
            self.problem = str(error)
            return
        if {*urls} != self._dealt.keys():
            self._deal(urls)

    def _deal(self, urls: Sequence[str]) -> None:
        self._dealt = dealt_out(urls, self._dealt, self._num_ranks)
        if self._number == 0 and self._file is not None:
            self._job_store.put(self._key, self._dealt)
