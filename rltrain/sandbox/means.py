"""By which means this machine can keep a program in a sandbox: `python -m rltrain.sandbox.means` says it."""

import os
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from rltrain.errors import ConfigError, SandboxError, one_of
from rltrain.sandbox.limits import Limits
from rltrain.sandbox.sandbox import Sandbox

PROTECTING = ("bubblewrap", "kernel")
"""The first that works is taken."""
SETTINGS = ("auto", *PROTECTING, "none")
WITHOUT_NAMESPACES = (
    "Linux, or what this container may do, refuses new namespaces; look at user.max_user_namespaces, "
    "kernel.unprivileged_userns_clone, kernel.apparmor_restrict_unprivileged_userns and the container's seccomp profile"
)


@dataclass(frozen=True)
class MeansFinding:
    """What was found when one of the means was tried."""

    works: bool
    text: str
    """What is missing: why it does not work, or what it cannot do here."""


@cache
def means() -> Mapping[str, MeansFinding]:
    """Tries each once in this process, which takes a moment."""
    return {"bubblewrap": _try_bubblewrap(), "kernel": _try("kernel")}


def require(setting: str, key: str = "env.sandbox") -> str:
    """The means for a setting: "auto", one of the means, or "none", which protects from nothing.

    Raises ConfigError, which names `key`, where this machine cannot keep a program in a sandbox so.
    """
    if setting not in SETTINGS:
        raise ConfigError(f"{key}: {setting!r} is unknown; expected {one_of(setting, SETTINGS)}")
    if setting == "none":
        return setting
    wanted = PROTECTING if setting == "auto" else (setting,)
    found = means()
    for name in wanted:
        if found[name].works:
            return name
    reasons = "; ".join(f"{name}: {found[name].text}" for name in wanted)
    others = [name for name in PROTECTING if name not in wanted and found[name].works]
    raise ConfigError(
        f"{key}: {setting}: this machine cannot keep programs in a sandbox ({reasons}). Expected one that can"
        + (f", or {key}: {others[0]}, which works here" if others else "")
        + f". {key}: none runs them with limits alone: they then read and write whatever this user can, and have the "
        "network"
    )


def _try_bubblewrap() -> MeansFinding:
    if shutil.which("bwrap") is None:
        return MeansFinding(works=False, text="the command bwrap is not installed")
    return _try("bubblewrap")


def _try(name: str) -> MeansFinding:
    if sys.platform != "linux":
        return MeansFinding(works=False, text=f"it is Linux's, and this is {sys.platform}")
    try:
        with Sandbox(name).start(["sh", "-c", "test -e /proc/self"], limits=Limits(wall_s=60.0)) as running:
            outcome = running.communicate()
    except SandboxError as error:
        return MeansFinding(works=False, text=f"{error}. {WITHOUT_NAMESPACES}")
    if outcome.ended_by is not None or outcome.status not in (0, 1):
        said = outcome.stderr.decode(errors="replace").strip()
        return MeansFinding(works=False, text=f"{said or f'it ended with {outcome.status}'}. {WITHOUT_NAMESPACES}")
    lacks = [] if outcome.status == 0 else ["programs have no /proc, since parts of this machine's are covered"]
    if running.uncounted:
        lacks.append(f"processes are counted from time to time, not limited by the kernel, since {running.uncounted}")
    return MeansFinding(works=True, text="; ".join(lacks))


def main() -> None:
    for name, finding in means().items():
        print(f"{name}: {'works' if finding.works else 'does not work'}{finding.text and ': ' + finding.text}")
    user = "the superuser" if os.geteuid() == 0 else "an ordinary user"
    print(f"tried as {user}; the setting auto takes the first that works")


if __name__ == "__main__":
    main()
