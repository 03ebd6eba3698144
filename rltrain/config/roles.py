"""The names of the roles of a run."""

from rltrain.tasks.roles import DECLARED


def role_names() -> tuple[str, ...]:
    """Every role name, in the order in which roles are listed."""
    return tuple(DECLARED)


def split_roles(key: str) -> tuple[str, ...]:
    """The roles that a key of `placement` names: "actor, reference" -> ("actor", "reference")."""
    return tuple(role.strip() for role in key.split(","))
