"""Network namespaces as hosts: each has its own address and name, and a cable that can be cut."""

import os
import shutil
import subprocess
from pathlib import Path
from types import TracebackType
from typing import Self

NETWORK = "10.77.0"


def obstacle() -> str | None:
    """Returns why network namespaces cannot be created here, or None if they can."""
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
    """Hosts 1 to `num_hosts`, named n1, n2, ..., at a switch. The switch is host 0, named controller."""

    def __init__(self, folder: Path, num_hosts: int) -> None:
        """Writes the file of host names to `folder`."""
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
        """Returns the beginning of a command that runs in the network of host `number`."""
        return ["ip", "netns", "exec", self._namespace(number)]

    def on(self, number: int) -> list[str]:
        """Returns the beginning of a command that runs on host `number`, with its host name and its own /dev/shm.

        If its first process is killed, all others are killed too.
        """
        return self._named(number, "--pid", "--fork", "--kill-child", "--mount-proc")

    def namespaces(self, number: int) -> str:
        """Returns the value of the variable NAMESPACES of tests/forked, for forked processes on host `number`.

        Process ids are those of this machine.
        """
        if number not in self._keepers:
            command = [*self._named(number), "sh", "-c", "echo; exec sleep infinity"]
            keeper = self._keepers[number] = subprocess.Popen(command, stdout=subprocess.PIPE)
            assert keeper.stdout and keeper.stdout.readline(), f"no host {number}: its message is above"
        return f"/proc/{self._keepers[number].pid}/ns"

    def processes(self, number: int) -> set[int]:
        """Returns the ids of the processes that run on host `number`."""
        listed = subprocess.run(
            ["ip", "netns", "pids", self._namespace(number)], capture_output=True, text=True, check=True
        )
        found = {int(line) for line in listed.stdout.split()}
        keeper = self._keepers.get(number)
        return found - {keeper.pid} if keeper else found

    def cut(self, number: int) -> None:
        """Disconnects the cable of host `number`. The connections get no notice of it."""
        _ip("-n", self._namespace(0), "link", "set", f"to-n{number}", "down")

    def mend(self, number: int) -> None:
        """Connects the cable of host `number` again."""
        _ip("-n", self._namespace(0), "link", "set", f"to-n{number}", "up")

    def limit(self, number: int, mbit_per_s: float) -> None:
        """Limits the cable of host `number` to so many Mbit/s in each direction."""
        shape = ("root", "tbf", "rate", f"{mbit_per_s:g}mbit", "burst", "32kb", "latency", "400ms")
        for namespace, device in self._ends(number):
            _run("tc", "-n", namespace, "qdisc", "replace", "dev", device, *shape)

    def unlimit(self, number: int) -> None:
        for namespace, device in self._ends(number):
            _run("tc", "-n", namespace, "qdisc", "del", "dev", device, "root")

    def _ends(self, number: int) -> list[tuple[str, str]]:
        """Returns (namespace, device) of both ends of a host's cable."""
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
