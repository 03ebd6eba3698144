"""Which roles of this rank hold their memory now. Roles that share a rank take turns around their tasks."""

from collections.abc import Iterable, Mapping
from typing import Protocol


class Resident(Protocol):
    """A role whose device memory can be given up between its tasks."""

    def onload(self) -> None: ...

    def offload(self) -> None: ...


class Residency:
    """Onloads the roles that a task needs and offloads the others, on ranks that host more than one role."""

    def __init__(self, roles: Mapping[str, Resident]) -> None:
        self.roles = roles
        self.resident = set(roles)

    def require(self, names: Iterable[str]) -> None:
        """Make exactly the hosted roles of `names` resident; nobody moves for a task of none, or on a rank of one."""
        needed = set(names) & set(self.roles)
        if len(self.roles) < 2 or not needed:
            return
        for name in sorted(self.resident - needed):
            self.roles[name].offload()
        for name in sorted(needed - self.resident):
            self.roles[name].onload()
        self.resident = needed
