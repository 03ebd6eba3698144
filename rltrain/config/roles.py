"""The roles of a run: their names, which an algorithm needs or may use, and the nearest name to a misspelt one."""

import difflib
from collections.abc import Iterable

from rltrain.config.schema import Config
from rltrain.tasks.roles import DECLARED

NOT_YET = {
    "env": "environments come in a later version; a reward function scores responses until then",
    "reward_model": "reward models come in a later version; role reward scores responses by a function",
}
"""Roles that a placement may not name, and why."""


def role_names() -> tuple[str, ...]:
    """Every role name, in the order in which roles are listed."""
    return (*DECLARED, "env")


def split_roles(key: str) -> tuple[str, ...]:
    """The roles that a key of `placement` names: "actor, reference" -> ("actor", "reference")."""
    return tuple(role.strip() for role in key.split(","))


def required_roles(config: Config) -> tuple[str, ...]:
    """Roles without which the run cannot be made."""
    if config.algorithm == "sft":
        return ("actor", "rollout", "reward") if config.data.eval else ("actor",)
    critic = ("critic",) if config.algorithm == "ppo" else ()
    reference = ("reference",) if config.loss.kl.coef else ()
    return ("actor", *critic, *reference, "rollout", "reward")


def usable_roles(config: Config) -> tuple[str, ...]:
    """Roles that have a task in the run. A reference that no penalty needs still gives the distance from it."""
    required = required_roles(config)
    return required if config.algorithm == "sft" else tuple({*required, *_optional_roles()})


def _optional_roles() -> Iterable[str]:
    return (role.name for role in DECLARED.values() if not role.needed_by_algorithm)


def nearest(name: str, valid: Iterable[str]) -> str | None:
    """The valid name that `name` was probably meant to be."""
    return next(iter(difflib.get_close_matches(name, list(valid), n=1)), None)
