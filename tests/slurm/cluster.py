"""A real Slurm on this machine: a controller and nodes in separate namespaces for network, host name, processes and
mounts.

Each node has its own address, /dev/shm and first process. The node ends with this process.
"""

import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from tests.support import hosts
from tests.support.hosts import Hosts

REPOSITORY = Path(__file__).resolve().parents[2]
NODE_PROGRAM = Path(__file__).with_name("node.sh")
NEEDED = ("slurmctld", "slurmd", "munged", "sbatch")
CPUS_PER_NODE = 4
POLL_S = 0.2
CONFIGURATION = """
ClusterName=tests
SlurmctldHost=controller({network}.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/filetxt
JobCompLoc={folder}/accounting
SchedulerParameters=batch_sched_delay=0,sched_interval=2,bf_interval=2
ReturnToService=2
SlurmdTimeout=10
SlurmctldTimeout=30
UnkillableStepTimeout=20
KillWait=30
MinJobAge=600
JobRequeue=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmdParameters=config_overrides
GresTypes=gpu
NodeName=n[1-{num_nodes}] NodeAddr={network}.1[1-{num_nodes}] CPUs={cpus} RealMemory=4000 Gres=gpu:8 State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=30
PartitionName=urgent Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
"""


def obstacle() -> str | None:
    """Returns why no Slurm can be set up here, or None if it can."""
    path = f"{os.environ['PATH']}:/usr/sbin:/sbin"
    if missing := [name for name in NEEDED if shutil.which(name, path=path) is None]:
        return f"{', '.join(missing)} not installed (Debian: slurm-wlm, munge)"
    return hosts.obstacle()


class Cluster:
    """A running Slurm with all its files in `folder`. `close` ends all of its processes."""

    def __init__(self, folder: Path, num_nodes: int = 2) -> None:
        self.folder, self.num_nodes = folder, num_nodes
        self.hosts = Hosts(folder, num_nodes)
        self.environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
        self._daemons: list[subprocess.Popen[bytes]] = []
        self._nodes: dict[int, subprocess.Popen[bytes]] = {}

    def start(self) -> None:
        for name in ("munge", "state"):
            (self.folder / name).mkdir(mode=0o755)
        self._configure()
        self.hosts.__enter__()
        munge = [f"--{what}={self.folder}/munge/{what}" for what in ("socket", "key-file", "pid-file", "log-file")]
        self._daemon("munged", "--foreground", "--force", *munge, f"--seed-file={self.folder}/munge/seed")
        self._until(lambda: (self.folder / "munge/socket").exists(), "munged to listen", 20)
        self._controller = self._daemon("slurmctld", "-D", "-c", "-i", inside=self.hosts.on(0))
        for node in range(1, self.num_nodes + 1):
            self.boot(node)
        self._until(lambda: self._idle() == self.num_nodes, "all nodes to be idle", 60)

    def close(self) -> None:
        for process in (*self._nodes.values(), *reversed(self._daemons)):
            process.kill()
            process.wait()
        self.hosts.__exit__(None, None, None)

    def boot(self, node: int) -> None:
        """Starts node `node`, counted from 1."""
        command = [*self.hosts.on(node), "bash", str(NODE_PROGRAM), f"n{node}"]
        with (self.folder / f"node-{node}.out").open("ab") as output:
            self._nodes[node] = subprocess.Popen(
                command, env=self.environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output
            )

    def power_off(self, node: int) -> None:
        """Kills every process of the node at once."""
        process = self._nodes.pop(node)
        process.kill()
        process.wait()

    def restart_controller(self) -> None:
        """Restarts the controller with its state, except for messages not answered by nodes.

        One of these messages ends a job that ran on a lost node. The controller would repeat it after a minute. By then
        the job runs again with the same number.
        """
        self.run("scontrol", "shutdown", "slurmctld")
        self._controller.wait(timeout=30)
        self._controller = self._daemon("slurmctld", "-D", "-i", inside=self.hosts.on(0))
        self._until(self._answers, "the controller to answer", 30)

    def submit(self, script: str, *arguments: str, options: tuple[str, ...] = (), **environment: str) -> int:
        """Submits a script and returns the number of the job."""
        given = ("--parsable", "--cpus-per-task=1", *options)
        return int(self.run("sbatch", *given, script, *arguments, **environment).split("_")[0])

    def run(self, *command: str, **environment: str) -> str:
        """Runs a command of Slurm on the controller, in the repository, and returns its output."""
        done = subprocess.run(
            [*self.hosts.inside(0), *command],
            env={**self.environment, **environment},
            cwd=REPOSITORY,
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout

    def facts(self, job: int | str) -> dict[str, str]:
        """Returns the controller's facts about a job."""
        return dict(re.findall(r"(\w+)=(\S*)", self.run("scontrol", "show", "job", str(job))))

    def await_state(self, job: int | str, *states: str, timeout_s: float = 100) -> dict[str, str]:
        return self.await_facts(job, lambda facts: facts["JobState"] in states, f"{' or '.join(states)}", timeout_s)

    def await_facts(
        self, job: int | str, holds: Callable[[dict[str, str]], bool], what: str, timeout_s: float = 100
    ) -> dict[str, str]:
        self._until(lambda: holds(self.facts(job)), f"job {job} to be {what}", timeout_s)
        return self.facts(job)

    def accounting(self, job: int | str) -> list[str]:
        """Returns the accounting lines of a job, one per finished run."""
        path = self.folder / "accounting"
        lines = path.read_text().splitlines() if path.exists() else []
        return [line for line in lines if line.startswith(f"JobId={job} ")]

    def _configure(self) -> None:
        (self.folder / "munge/key-file").write_bytes(os.urandom(128))
        (self.folder / "munge/key-file").chmod(0o600)
        values = {"network": hosts.NETWORK, "folder": self.folder, "num_nodes": self.num_nodes, "cpus": CPUS_PER_NODE}
        (self.folder / "slurm.conf").write_text(CONFIGURATION.format(**values))
        devices = [self.folder / f"gpu{number}" for number in range(8)]
        for device in devices:
            os.mknod(device, 0o666 | 0o020000, os.makedev(1, 3))
        (self.folder / "gres.conf").write_text("".join(f"Name=gpu File={device}\n" for device in devices))
        (self.folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")

    def _daemon(self, name: str, *arguments: str, inside: list[str] | None = None) -> subprocess.Popen[bytes]:
        with (self.folder / f"{name}.out").open("ab") as output:
            command = [*(inside or []), f"/usr/sbin/{name}", *arguments]
            started = subprocess.Popen(
                command, env=self.environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output
            )
        self._daemons.append(started)
        return started

    def _answers(self) -> bool:
        try:
            return bool(self.run("scontrol", "ping"))
        except AssertionError:  # it does not listen yet
            return False

    def _idle(self) -> int:
        if not self._answers():
            return 0
        return int(self.run("sinfo", "-h", "-p", "main", "-t", "idle", "-o", "%D").strip() or 0)

    def _until(self, holds: Callable[[], bool], what: str, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while not holds():
            assert time.monotonic() < deadline, f"waited {timeout_s:g} s for {what}\n{self.logs()}"
            time.sleep(POLL_S)

    def logs(self) -> str:
        """Returns the ends of all of Slurm's logs."""
        files = [path for pattern in ("*.log", "*.out", "munge/log-file") for path in self.folder.glob(pattern)]
        return "\n".join(f"== {path.name}\n{path.read_text(errors='replace')[-3000:]}" for path in sorted(files))
