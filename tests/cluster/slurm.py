"""Slurm on this machine, of the real programs: munge and slurmctld on a host `head`, a slurmd on each of the others.

    with Slurm("n1", "n2") as slurm:
        print(slurm.head.run("srun", "-N2", "hostname"))

    python -m tests.cluster.slurm srun -N2 -l hostname       # or: bash, to look around

The hosts are namespaces (`hosts.py`), so each node has its own name and address. Daemons, files and accounts are those
of a temporary directory: Slurm as it may be installed here is not touched. It is up in about two seconds.
"""

import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Self

from tests.cluster.hosts import Host, Hosts, Task, path

TOOLS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "scontrol", "sinfo", "squeue")
# cred_expire is also what a requeued job waits before it starts again: two minutes, unless it says otherwise.
_CONF = """
ClusterName=test
SlurmctldHost=head
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=batch_sched_delay=0,sched_min_interval=200000,bf_interval=1
ReturnToService=2
KillWait=5
MpiDefault=none
JobRequeue=1
{nodes}
PartitionName=all Nodes={names} Default=YES MaxTime=1-0 State=UP
"""


class Slurm:
    """A cluster of nodes with these names."""

    def __init__(self, *names: str, cpus: int = 2):
        self.names, self.cpus = names, cpus
        self.stack = ExitStack()

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self.stack.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stack.close()

    def _start(self) -> None:
        self.folder = folder = Path(tempfile.mkdtemp(prefix="fivefold-slurm-"))
        self.stack.callback(shutil.rmtree, folder, ignore_errors=True)
        self.head, *nodes = self.stack.enter_context(Hosts("head", *self.names))
        self.nodes = dict(zip(self.names, nodes, strict=True))
        (folder / "state").mkdir()
        key = folder / "munge.key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o600)
        lines = [
            f"NodeName={node.name} NodeAddr={node.address} CPUs={self.cpus} RealMemory=1000 State=UNKNOWN"
            for node in nodes
        ]
        conf = folder / "slurm.conf"
        conf.write_text(_CONF.format(folder=folder, nodes="\n".join(lines), names=",".join(self.names)).lstrip())
        (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        os.chmod(folder, 0o755)
        files = {"socket": "socket", "pid-file": "pid", "log-file": "munge.log", "seed-file": "seed"}
        options = [f"--{option}={folder}/munge.{name}" for option, name in files.items()]
        self._daemon(self.head, "munged", "--foreground", "--force", f"--key-file={key}", *options)
        self._until(lambda: (folder / "munge.socket").exists(), "munged")
        self._daemon(self.head, "slurmctld", "-D", "-f", conf)
        for node in nodes:
            (folder / f"spool-{node.name}").mkdir()
            self._slurmd(node)
        self._until(lambda: self._states() == {"idle"}, "the nodes")

    @property
    def env(self) -> dict[str, str]:
        return {"SLURM_CONF": str(self.folder / "slurm.conf")}

    def lose(self, name: str) -> None:
        """A node's everything ends, and Slurm is told, as it would find out by itself after SlurmdTimeout."""
        for words in ("slurmd -D", "slurmstepd", "fivefold"):
            self.nodes[name].kill(words)
        self.run("scontrol", "update", f"nodename={name}", "state=down", "reason=lost")

    def regain(self, name: str) -> None:
        self._slurmd(self.nodes[name])  # which returns to service by itself

    def _slurmd(self, node: Host) -> None:
        self._daemon(node, "slurmd", "-D", "-f", self.folder / "slurm.conf", "-N", node.name)

    def _daemon(self, host: Host, *words: object) -> None:
        self.stack.enter_context(host.start(*words, env=self.env))

    def _states(self) -> set[str]:
        with self.head.start("sinfo", "--noheader", "--Node", "--format=%t", env=self.env) as asked:
            return set(asked.output.split()) if asked.wait() == 0 else set()

    def _until(self, seen, what: str, seconds: float = 30.0) -> None:
        deadline = time.monotonic() + seconds
        while not seen():
            logs = "".join(f"\n{file.name}\n{file.read_text()[-3000:]}" for file in self.folder.glob("*.log"))
            assert time.monotonic() < deadline, f"{what} did not come up within {seconds:.0f} s{logs}"
            time.sleep(0.1)

    def run(self, *words: object, cwd: Path | None = None, env: dict[str, str] | None = None) -> str:
        """On the head node, as a user would."""
        return self.head.run(*words, cwd=cwd, env={**self.env, **(env or {})})

    def start(self, *words: object, cwd: Path | None = None, env: dict[str, str] | None = None) -> Task:
        return self.head.start(*words, cwd=cwd, env={**self.env, **(env or {})})


def main() -> int:
    with Slurm("n1", "n2") as slurm:
        env = {**os.environ, **slurm.env, "PATH": path()}
        return subprocess.run([*slurm.head.enter, *sys.argv[1:]], env=env).returncode


if __name__ == "__main__":
    sys.exit(main())
