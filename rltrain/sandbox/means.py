"""Means of making sandboxes on this machine. `python -m rltrain.sandbox.means` prints them."""

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
"""Means in order of preference. The first working one is used."""
SETTINGS = ("auto", *PROTECTING, "none")
WITHOUT_NAMESPACES = (
    "Linux or this container refuses new namespaces; look at user.max_user_namespaces, "
    "kernel.unprivileged_userns_clone, kernel.apparmor_restrict_unprivileged_userns and the container's seccomp profile"
)


@dataclass(frozen=True)
class MeansFinding:
    """The result of trying one of the means."""

    works: bool
    text: str
    """The reason why it does not work, or its limitations here."""


@cache
def means() -> Mapping[str, MeansFinding]:
    """Returns the finding of each of the means. The first call in a process tries them and takes a moment."""
    return {"bubblewrap": _try_bubblewrap(), "kernel": _try("kernel")}


def require(setting: str, key: str = "sandbox") -> str:
    """Returns the means for a setting: "auto", one of the means, or "none" (without protection).

    Raises ConfigError, with `key` in its message, if this machine cannot make such a sandbox.
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
        f"{key}: {setting}: this machine cannot keep programs in a sandbox ({reasons}). Use another machine"
        + (f", or {key}: {others[0]}, which works here" if others else "")
        + f", or {key}: none for limits without a sandbox: programs then have this user's files and the network"
    )


def _try_bubblewrap() -> MeansFinding:
    if shutil.which("bwrap") is None:
        return MeansFinding(works=False, text="the command bwrap is not installed")
    return _try("bubblewrap")


def _try(name: str) -> MeansFinding:
    if sys.platform != "linux":
        return MeansFinding(works=False, text=f"it needs Linux, but this is {sys.platform}")
    try:
        with Sandbox(name).start(["sh", "-c", "test -e /proc/self"], limits=Limits(wall_s=60.0)) as running:
            outcome = running.communicate()
    except SandboxError as error:
        return MeansFinding(works=False, text=f"{error}. {WITHOUT_NAMESPACES}")
    if outcome.ended_by is not None or outcome.status not in (0, 1):
        said = outcome.stderr.decode(errors="replace").strip()
        return MeansFinding(works=False, text=f"{said or f'it ended with {outcome.status}'}. {WITHOUT_NAMESPACES}")
    lacks = [] if outcome.status == 0 else ["programs have no /proc, since parts of this machine's /proc are covered"]
    if running.uncounted:
        lacks.append(f"processes are counted from time to time, not limited by the kernel, since {running.uncounted}")
    return MeansFinding(works=True, text="; ".join(lacks))


def main() -> None:
    for name, finding in means().items():
        print(f"{name}: {'works' if finding.works else 'does not work'}{finding.text and ': ' + finding.text}")
    user = "the superuser" if os.geteuid() == 0 else "an ordinary user"
    print(f"tried as {user}; the setting auto uses the first working one")


if __name__ == "__main__":
    main()
