"""Network namespaces that stand for hosts: each has an address and a name of its own, and a cable that can be cut."""

import os
import shutil
import subprocess
from pathlib import Path
from types import TracebackType
from typing import Self

NETWORK = "10.77.0"


def obstacle() -> str | None:
    """Why there can be none here; None where there can."""
    if missing := [name for name in ("ip", "unshare") if shutil.which(name) is None]:
        return f"{', '.join(missing)} not installed (Debian: iproute2, util-linux)"
    tried = subprocess.run(
        ["unshare", "--net", "--uts", "--mount", "--pid", "--fork", "ip", "link", "add", "type", "veth"],
        capture_output=True,
        text=True,
        check=False,
    )
    return f"no namespaces can be made: {tried.stderr.strip()}" if tried.returncode else None


class Hosts:
    """Hosts 1 to `num_hosts`, called n1, n2, ..., at a switch, which is host 0 and called controller."""

    def __init__(self, folder: Path, num_hosts: int) -> None:
        """`folder` gets the file that names them."""
        self.numbers = range(1, num_hosts + 1)
        self.names_file = folder / "hosts"
        self._mark = f"rltrain-{os.getpid()}-{id(self):x}"
        self._keepers: dict[int, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Self:
        lines = ["127.0.0.1 localhost", f"{NETWORK}.1 controller"]
        lines += [f"{self.address(number)} n{number}" for number in self.numbers]
        self.names_file.write_text("\n".join([*lines, ""]))
        try:
            self._connect()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._remove()

    @staticmethod
    def address(number: int) -> str:
        return f"{NETWORK}.{10 + number}" if number else f"{NETWORK}.1"

    def inside(self, number: int) -> list[str]:
        """The beginning of a command that runs in the network of host `number`."""
        return ["ip", "netns", "exec", self._namespace(number)]

    def on(self, number: int) -> list[str]:
        """The beginning of a command that runs on host `number`, by its name, with a /dev/shm of its own. When its
        first process is killed so are all others."""
        return self._named(number, "--pid", "--fork", "--kill-child", "--mount-proc")

    def namespaces(self, number: int) -> str:
        """What tests/forked is to be told in the variable NAMESPACES, for processes on host `number` that are forked.
        Numbers of processes are those of this machine."""
        if number not in self._keepers:
            command = [*self._named(number), "sh", "-c", "echo; exec sleep infinity"]
            keeper = self._keepers[number] = subprocess.Popen(command, stdout=subprocess.PIPE)
            assert keeper.stdout and keeper.stdout.readline(), f"no host {number}: its message is above"
        return f"/proc/{self._keepers[number].pid}/ns"

    def processes(self, number: int) -> set[int]:
        """Those that run on host `number`."""
        listed = subprocess.run(
            ["ip", "netns", "pids", self._namespace(number)], capture_output=True, text=True, check=True
        )
        found = {int(line) for line in listed.stdout.split()}
        keeper = self._keepers.get(number)
        return found - {keeper.pid} if keeper else found

    def cut(self, number: int) -> None:
        """Take the cable of host `number` out: nobody is told."""
        _ip("-n", self._namespace(0), "link", "set", f"to-n{number}", "down")

    def mend(self, number: int) -> None:
        """Put the cable of host `number` in again."""
        _ip("-n", self._namespace(0), "link", "set", f"to-n{number}", "up")

    def limit(self, number: int, mbit_per_s: float) -> None:
        """From now on the cable of host `number` carries no more than that in either direction."""
        shape = ("root", "tbf", "rate", f"{mbit_per_s:g}mbit", "burst", "32kb", "latency", "400ms")
        for namespace, device in self._ends(number):
            _run("tc", "-n", namespace, "qdisc", "replace", "dev", device, *shape)

    def unlimit(self, number: int) -> None:
        for namespace, device in self._ends(number):
            _run("tc", "-n", namespace, "qdisc", "del", "dev", device, "root")

    def _ends(self, number: int) -> list[tuple[str, str]]:
        """Of a host's cable: namespace and device."""
        return [(self._namespace(0), f"to-n{number}"), (self._namespace(number), "eth0")]

    def _named(self, number: int, *more: str) -> list[str]:
        """`more`: options of unshare."""
        name = f"n{number}" if number else "controller"
        script = (
            'hostname "$1" && mount --bind "$2" /etc/hosts && mount -t tmpfs tmpfs /dev/shm && shift 2 && exec "$@"'
        )
        unshare = ["unshare", "--uts", "--mount", *more]
        return [*self.inside(number), *unshare, "bash", "-c", script, "host", name, str(self.names_file)]

    def _connect(self) -> None:
        switch = self._namespace(0)
        for number in (0, *self.numbers):
            _ip("netns", "add", self._namespace(number))
            _ip("-n", self._namespace(number), "link", "set", "lo", "up")
        _ip("-n", switch, "link", "add", "bridge0", "type", "bridge")
        _ip("-n", switch, "addr", "add", f"{self.address(0)}/24", "dev", "bridge0")
        _ip("-n", switch, "link", "set", "bridge0", "up")
        for number in self.numbers:
            own, end = self._namespace(number), f"to-n{number}"
            _ip("-n", switch, "link", "add", end, "type", "veth", "peer", "name", "eth0", "netns", own)
            _ip("-n", switch, "link", "set", end, "master", "bridge0", "up")
            _ip("-n", own, "addr", "add", f"{self.address(number)}/24", "dev", "eth0")
            _ip("-n", own, "link", "set", "eth0", "up")

    def _remove(self) -> None:
        for keeper in self._keepers.values():
            keeper.kill()
            keeper.communicate()
        for number in (0, *self.numbers):
            subprocess.run(["ip", "netns", "del", self._namespace(number)], capture_output=True, check=False)

    def _namespace(self, number: int) -> str:
        return f"{self._mark}-{number}"


def _ip(*arguments: str) -> None:
    _run("ip", *arguments)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
