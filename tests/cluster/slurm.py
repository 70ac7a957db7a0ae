"""A Slurm of two nodes on this machine: its own daemons, key, network and folder, all of which end with it.

Each node is a host of netlab with a host name, an address and a process table of its own. So nothing of it can be
reached from outside, and when a node's first process is killed, Linux ends every process that the node has started.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from thinwire import netlab
from thinwire.netlab import Lab

NODES = 2
CPUS = 4  # of each node, whatever this machine has
NEEDED = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "scontrol", "scancel", "unshare")
NODE = ("unshare", "--mount", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc")
ROOT = Path(__file__).parent.parent.parent
CONFIG = """
ClusterName=thinwire
SlurmctldHost=n1({master})
SlurmUser=root
AuthInfo=socket={folder}/munge/socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
MpiDefault=none
ReturnToService=2
KillWait=5
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=1
"""


class Slurm:
    """A running Slurm. Commands are run on its first node's network."""

    def __init__(self, lab: Lab, folder: Path) -> None:
        self.lab = lab
        self.folder = folder
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"], "/usr/sbin", "/sbin"])
        python_path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        self.env = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf"), "PATH": path, "PYTHONPATH": python_path}
        self.daemons: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        """Start the daemons, and wait until both nodes can be used."""
        for name in ("munge", "state", *(f"spool-n{node + 1}" for node in range(NODES))):
            (self.folder / name).mkdir()
        nodes = [f"NodeName=n{at + 1} NodeAddr={host.address} CPUs={CPUS}\n" for at, host in enumerate(self.lab)]
        head = CONFIG.format(master=self.lab[0].address, folder=self.folder)
        (self.folder / "slurm.conf").write_text(head + "".join(nodes) + "PartitionName=all Nodes=ALL Default=YES\n")
        names = [f"{host.address} n{at + 1}\n" for at, host in enumerate(self.lab)]
        (self.folder / "hosts").write_text("127.0.0.1 localhost\n" + "".join(names))
        key = self.folder / "munge" / "key"
        key.touch(0o400)
        key.write_bytes(os.urandom(128))
        munge = {"key-file": "key", "socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
        where = " ".join(f"--{option}={self.folder}/munge/{name}" for option, name in munge.items())
        self._start(0, f"munged --foreground --force {where}")
        self.wait_for((self.folder / "munge" / "socket").exists, "munged")
        self._start(0, "slurmctld -D")
        for node in range(NODES):
            self._start(node, "slurmd -D")
        self.wait_for(lambda: self.run("sinfo", "-h", "-o", "%T %D").stdout.split() == ["idle", str(NODES)], "nodes")

    def _start(self, node: int, command: str) -> None:
        setup = f"mount --bind {self.folder}/hosts /etc/hosts && hostname n{node + 1}"
        shell = f"{setup} && {{ {command} & wait $!; }}"  # the shell stays: it collects processes that have ended
        with (self.folder / "daemons.log").open("ab") as log:
            host = self.lab[node]
            daemon = host.start([*NODE, "bash", "-c", shell], env=self.env, stdout=log, stderr=log, cwd=self.folder)
        self.daemons.append(daemon)

    def run(self, *command: str, seconds: float = 180, **env: str) -> subprocess.CompletedProcess[str]:
        """Run a command of Slurm to its end."""
        pipe = subprocess.PIPE
        process = self.lab[0].start(
            command, env={**self.env, **env}, cwd=self.folder, stdout=pipe, stderr=pipe, text=True
        )
        try:
            out, err = process.communicate(timeout=seconds)
        finally:
            process.kill()
            process.wait()
        return subprocess.CompletedProcess(command, process.returncode, out, err)

    def submit(self, script: Path, *arguments: str, **env: str) -> str:
        """Submit a batch script; returns the number of the job."""
        done = self.run("sbatch", "--parsable", *arguments[: arguments.index("--")], str(script),
                        *arguments[arguments.index("--") + 1 :], **env)  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def job(self, number: str) -> dict[str, str]:
        """What Slurm knows of a job, as JobState, Restarts and ExitCode."""
        words = self.run("scontrol", "show", "job", "-o", number).stdout.split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait_for(self, holds: Callable[[], bool], what: str, seconds: float = 180) -> None:
        """Wait until something holds; with the end of the logs if it never does."""
        deadline = time.monotonic() + seconds
        while not holds():
            assert time.monotonic() < deadline, f"{what}: not within {seconds} s\n{self._logs()}"
            time.sleep(0.1)

    def wait_for_end(self, number: str, seconds: float = 180) -> dict[str, str]:
        """Wait until a job has ended for good; returns what Slurm knows of it."""
        ended = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
        self.wait_for(lambda: self.job(number)["JobState"] in ended, f"the end of job {number}", seconds)
        return self.job(number)

    def rank_of(self, job: str, rank: int) -> int | None:
        """The process of a rank of a job, if there is one."""
        marks = [f"SLURM_CONF={self.env['SLURM_CONF']}", f"SLURM_JOB_ID={job}", f"SLURM_PROCID={rank}"]
        for path in sorted(Path("/proc").glob("[0-9]*"), key=lambda path: int(path.name)):
            with suppress(OSError):
                words = (path / "cmdline").read_bytes().split(b"\0")
                env = (path / "environ").read_bytes().split(b"\0")
                is_step = b"SLURM_STEP_NUM_TASKS" in {one.partition(b"=")[0] for one in env}
                if is_step and b"train" in words and all(mark.encode() in env for mark in marks):
                    return int(path.name)
        return None

    def processes(self) -> list[int]:
        """All processes that this Slurm has started, directly or not, besides this one's own."""
        mark = f"SLURM_CONF={self.env['SLURM_CONF']}".encode()
        found = []
        for path in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if mark in (path / "environ").read_bytes().split(b"\0"):
                    found.append(int(path.name))
        return found

    def stop(self) -> None:
        """End everything: each daemon's first process ends all others of its process table."""
        for daemon in self.daemons:
            daemon.kill()
            daemon.wait()
        self.wait_for(lambda: not self.processes(), "the end of all processes", 20)

    def _logs(self) -> str:
        logs = [*self.folder.glob("*.log"), self.folder / "munge" / "log"]
        return "\n".join(f"{log.name}: {log.read_text(errors='replace')[-1500:]}" for log in logs if log.exists())


def why_not() -> str | None:
    """Why no Slurm can be started here, if so."""
    path = os.pathsep.join([os.environ["PATH"], "/usr/sbin", "/sbin"])
    missing = [name for name in NEEDED if shutil.which(name, path=path) is None]
    if missing:
        return f"{', '.join(missing)}: not installed; as root, make cluster installs Debian's packages"
    if os.getuid() != 0:
        return "Slurm's daemons need root here: each node has a host name and a process table of its own"
    tried = subprocess.run([*NODE, "true"], capture_output=True, text=True, check=False)
    return f"namespaces are not allowed here: {tried.stderr.strip()}" if tried.returncode else None


@contextmanager
def slurm() -> Iterator[Slurm]:
    """Start a Slurm of two nodes, and remove all of it afterwards; netlab.NotAllowed if there can be no hosts."""
    with tempfile.TemporaryDirectory(prefix="tw-slurm-", dir="/tmp") as folder, netlab.hosts(NODES) as lab:
        cluster = Slurm(lab, Path(folder))
        try:
            cluster.start()
            yield cluster
        finally:
            cluster.stop()
