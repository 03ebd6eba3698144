"""The roles of a run: their names, and the nearest name to a misspelt one."""

import difflib
from collections.abc import Iterable

from rltrain.tasks.roles import DECLARED


def role_names() -> tuple[str, ...]:
    """Every role name, in the order in which roles are listed."""
    return tuple(DECLARED)


def split_roles(key: str) -> tuple[str, ...]:
    """The roles that a key of `placement` names: "actor, reference" -> ("actor", "reference")."""
    return tuple(role.strip() for role in key.split(","))


def nearest(name: str, valid: Iterable[str]) -> str | None:
    """The valid name that `name` was probably meant to be."""
    return next(iter(difflib.get_close_matches(name, list(valid), n=1)), None)
