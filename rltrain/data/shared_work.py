"""How the processes of a job divide work that has to be done once."""

from collections import Counter
from typing import Protocol


class SharedWork(Protocol):
    def claim(self, key: str) -> int:
        """0, 1, 2, ...: each number once, to whichever process asks."""

    def tell(self, key: str, text: str) -> None:
        """To all processes."""

    def hear(self, key: str, what: str) -> str:
        """What one has told, once it has; StallError, naming `what`, where none will."""

    def advance(self) -> None:
        """This process gets on."""


class WorkAlone:
    """Of a process that has no others."""

    def __init__(self) -> None:
        self._claimed = Counter[str]()
        self._told: dict[str, str] = {}

    def claim(self, key: str) -> int:
        self._claimed[key] += 1
        return self._claimed[key] - 1

    def tell(self, key: str, text: str) -> None:
        self._told[key] = text

    def hear(self, key: str, what: str) -> str:  # noqa: ARG002 - as SharedWork has it
        return self._told[key]

    def advance(self) -> None:
        """Nobody looks."""
