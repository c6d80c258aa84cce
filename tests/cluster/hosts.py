"""Hosts made of namespaces: each has its own name, network and mounts, and all of them share this machine's files.

    with Hosts("n1", "n2") as (n1, n2):
        n1.rate("100mbit")                              # of its link, by tc's token bucket
        with n2.start("fivefold", "train", "layout=dp=2", env={"MASTER_ADDR": "n1", ...}) as rank:
            n2.cut()                                    # its link goes down
            assert rank.wait() == 3

They need root, util-linux and iproute2. All of their processes are in one process namespace, whose first one ends when
this process does, however it ends: nothing of them outlives it, and nothing outside of them is changed.
"""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Self

_TOOLS = ("unshare", "nsenter", "ip", "tc", "mount")
_NET = "10.77.0"


def missing(*tools: str) -> str:
    """Why there can be no hosts here; empty if there can."""
    if os.geteuid():
        return "needs root"
    absent = [tool for tool in (*_TOOLS, *tools) if not shutil.which(tool, path=path())]
    return f"not installed: {', '.join(absent)}" if absent else ""


def path() -> str:
    """Where commands are looked for: those of this Python first."""
    return f"{Path(sys.executable).parent}:{os.environ['PATH']}:/usr/sbin:/sbin"


class Task:
    """A command on a host. `output` is what it has printed up to now, on both streams."""

    def __init__(self, words: list[str], cwd: Path | None, env: Mapping[str, str] | None):
        self.file: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - open as long as it is asked for
        self.words = words
        whole = {**os.environ, "COLUMNS": "200", "OMP_NUM_THREADS": "1", "PATH": path(), **(env or {})}
        self.process = subprocess.Popen(
            words, cwd=cwd, env=whole, stdin=subprocess.DEVNULL, stdout=self.file, stderr=subprocess.STDOUT
        )

    @property
    def output(self) -> str:
        return os.pread(self.file.fileno(), os.fstat(self.file.fileno()).st_size, 0).decode()

    def wait(self, timeout: float = 400.0) -> int:
        """The exit code."""
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self.words} still runs after {timeout:.0f} s\n{self.output}") from None

    def until(self, sign: str | Callable[[], object], timeout: float = 120.0) -> None:
        """Wait until it has printed `sign`, or until `sign()` is true."""
        seen = (lambda: sign in self.output) if isinstance(sign, str) else sign
        deadline = time.monotonic() + timeout
        while not seen():
            over = self.process.poll() is not None or time.monotonic() > deadline
            assert not over or seen(), f"no {sign!r}\n{self.output}"
            time.sleep(0.02)

    @property
    def pids(self) -> list[int]:
        """Of nsenter's child, and of its children, and so on."""
        found = [self.process.pid]
        for pid in found:
            with suppress(FileNotFoundError, ProcessLookupError):
                found += map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
        return found[1:]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for pid in self.pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.kill()
        self.process.wait()


class Host:
    """`pid`: of a process that is on it."""

    def __init__(self, name: str, address: str, pid: int):
        self.name, self.address, self.pid = name, address, pid
        self.enter = "nsenter", "--net", "--mount", "--pid", "--uts", "--target", str(pid)

    def start(self, *words: object, cwd: Path | None = None, env: Mapping[str, str] | None = None) -> Task:
        wd = (f"--wdns={cwd}",) if cwd else ()
        return Task([*self.enter, *wd, *map(str, words)], None, env)

    def run(self, *words: object, cwd: Path | None = None, env: Mapping[str, str] | None = None) -> str:
        """What it printed; one that fails fails the test."""
        with self.start(*words, cwd=cwd, env=env) as task:
            code = task.wait()
            assert code == 0, f"{words} ended with {code}\n{task.output}"
            return task.output

    def kill(self, words: str) -> None:
        """SIGKILL to all of its processes that were started with these words."""
        name = self._uts(self.pid)
        for entry in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if self._uts(entry.name) == name and words in entry.joinpath("cmdline").read_text().replace("\0", " "):
                    os.kill(int(entry.name), signal.SIGKILL)

    @staticmethod
    def _uts(pid: int | str) -> str:
        return os.readlink(f"/proc/{pid}/ns/uts")

    def hide(self, folder: Path) -> None:
        """A file system of its own there, which the other hosts do not see, nor it theirs."""
        self.run("mount", "-t", "tmpfs", "none", folder)

    def rate(self, rate: str) -> None:
        self.run("tc", "qdisc", "replace", "dev", "eth0", "root", "tbf", "rate", rate, "burst", "64kb", "latency", "2s")

    def cut(self) -> None:
        self.run("ip", "link", "set", "eth0", "down")


class Hosts:
    """Hosts of these names, at 10.77.0.1 and so on; each knows all names. `itself`: the address at which each knows its
    own name, if that is another."""

    def __init__(self, *names: str, itself: str = ""):
        self.names, self.itself = names, itself
        self.holders: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> list[Host]:
        self.folder = Path(tempfile.mkdtemp(prefix="fivefold-hosts-"))
        try:
            self.switch = self._hold("unshare", "--net", "--mount", "--pid", "--fork", "--mount-proc", "cat")
            self._in_switch("ip", "link", "add", "switch", "type", "bridge")
            self._in_switch("ip", "link", "set", "switch", "up")
            return [self._host(name, number) for number, name in enumerate(self.names, 1)]
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *_: object) -> None:
        """The end of the first process of a namespace is the end of all."""
        for holder in self.holders:
            holder.kill()
        for holder in self.holders:
            holder.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _hold(self, *words: str) -> int:
        """The pid of a process that keeps namespaces; it reads from this one, and so ends with it."""
        holder = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={"PATH": path()})
        self.holders.append(holder)
        assert holder.stdin
        assert holder.stdout
        holder.stdin.write(b"here\n")
        holder.stdin.flush()
        assert holder.stdout.readline() == b"here\n", f"{words} ended with {holder.wait()}"
        pid = holder.pid
        while children := Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            pid = int(children[0])
        return pid

    def _in_switch(self, *words: str) -> None:
        subprocess.run(["nsenter", f"--net=/proc/{self.switch}/ns/net", *words], check=True, env={"PATH": path()})

    def _host(self, name: str, number: int) -> Host:
        inner = ["nsenter", "--net", "--mount", "--pid", "--target", str(self.switch)]
        pid = self._hold(*inner, "unshare", "--net", "--mount", "--uts", "cat")
        self._in_switch("ip", "link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", str(pid))
        self._in_switch("ip", "link", "set", name, "master", "switch", "up")
        host, etc = Host(name, f"{_NET}.{number}", pid), self.folder / name
        places = {other: f"{_NET}.{n}" for n, other in enumerate(self.names, 1)} | {"localhost": "127.0.0.1"}
        if self.itself:
            places[name] = self.itself
        # Not a mount over the file alone: it would vanish when another process replaces /etc/hosts.
        subprocess.run(["cp", "-a", "/etc", str(etc)], check=True)
        (etc / "hosts").write_text("".join(f"{place} {other}\n" for other, place in places.items()))
        for line in (
            f"hostname {name}",
            f"mount --bind {etc} /etc",
            "mount -t sysfs none /sys",
            "ip link set lo up",
            f"ip addr add {host.address}/24 dev eth0",
            "ip link set eth0 up",
        ):
            host.run(*line.split())
        return host
