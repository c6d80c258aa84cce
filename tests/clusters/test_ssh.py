"""The script for ssh: its hosts file, how it ends all hosts together, and a run over a real sshd."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from fivefold.clusters.deployment import Deployment
from fivefold.clusters.machines import Machines
from fivefold.clusters.ssh import read_hosts, ssh_script
from fivefold.job.reading import read_job
from fivefold.support.errors import UserError
from tests.commands import fivefold
from tests.layers import SOURCE
from tests.refusals import refusal


def refused(folder: Path, content: bytes) -> UserError:
    (folder / "hosts").write_bytes(content)
    return refusal(lambda: read_hosts(folder / "hosts"))


def test_a_hosts_file(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("# nodes\nnode1\n\n  me@10.0.0.2 # second\r\nn-3.lab.org\n")
    assert read_hosts(tmp_path / "hosts") == ["node1", "me@10.0.0.2", "n-3.lab.org"]


def test_bad_hosts_files_are_refused_with_their_lines(tmp_path: Path) -> None:
    error = refused(tmp_path, b"a\n-oProxyCommand=x\nb c\na\n$(x)\n")
    assert error.codes == ["hosts.name", "hosts.name", "hosts.twice", "hosts.name"]
    assert [sentence.split("hosts, ")[1][:6] for sentence in error.problems] == [f"line {line}" for line in range(2, 6)]
    assert refused(tmp_path, b"# nobody\n").codes == ["hosts.empty"]
    assert refused(tmp_path, b"a\n\xff\n").codes == ["file.syntax"]
    os.mkfifo(tmp_path / "pipe")
    for name in ("none", "pipe"):
        assert refusal(lambda name=name: read_hosts(tmp_path / name)).codes == ["file.read"]


# ---- what the script does: ssh is a shell of this machine, and torchrun a script ------------------------------------

SSH = 'while [ "$1" != -- ]; do shift; done; echo "at $2" >> calls; exec bash -c "$3"'
# Runs until it is told to stop, or until the file `code` says how the first host ends; after 0 all do.
TORCHRUN = """
trap 'echo saved >> calls; exit 143' TERM
echo "$*" >> words; echo started >> calls
until code=$(cat code 2> /dev/null) && [ -n "$code" ] && { [ "$code" = 0 ] || [[ $* = *is_host=1* ]]; }; do
  sleep 0.05
done
exit "$code"
"""


def folder_of(tmp_path: Path, *hosts: str) -> Path:
    it = Deployment(read_job(None, [f"layout=dp={len(hosts)}"]), Machines(len(hosts), 1, False), "job.toml")
    (tmp_path / "run.sh").write_text(ssh_script(it, list(hosts), 3))
    (tmp_path / "bin").mkdir()
    for name, text in {"ssh": SSH, "torchrun": TORCHRUN}.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    return tmp_path


def start(folder: Path, **env: str) -> "subprocess.Popen[str]":
    path = f"{folder / 'bin'}:{os.environ['PATH']}"
    return subprocess.Popen(
        ["bash", "run.sh"], cwd=folder, env={**os.environ, "PATH": path, **env}, text=True, stdout=subprocess.PIPE
    )


def until(folder: Path, line: str, count: int) -> None:
    deadline = time.monotonic() + 60
    while (folder / "calls").read_text().splitlines().count(line) < count if (folder / "calls").exists() else True:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_every_host_is_called_and_the_first_is_where_they_meet(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, "a", "me@b")
    (folder / "code").write_text("0")
    with start(folder) as run:
        output, _ = run.communicate(timeout=60)
    assert run.returncode == 0, output
    calls = (folder / "calls").read_text().splitlines()
    assert sorted(calls) == ["at a", "at me@b", "started", "started"]
    words = (folder / "words").read_text().splitlines()
    assert sorted("is_host=1" in line for line in words) == [False, True]
    assert all("--rdzv-endpoint=a:29400" in line for line in words)
    assert len({line.partition("--rdzv-id=")[2].split()[0] for line in words}) == 1


def test_a_host_that_fails_ends_the_others_and_they_save(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, "a", "b", "c")
    with start(folder) as run:
        until(folder, "started", 3)
        (folder / "code").write_text("3")
        output, _ = run.communicate(timeout=60)  # of all processes that it has started, too
    assert run.returncode == 3
    assert "a ended with code 3" in output
    assert "a host has failed: all hosts save and stop" in output
    assert (folder / "calls").read_text().splitlines().count("saved") == 2


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_no_host_goes_on_without_the_script(tmp_path: Path, number: int) -> None:
    folder = folder_of(tmp_path, "a", "b")
    with start(folder) as run:
        until(folder, "started", 2)
        run.send_signal(number)
        until(folder, "saved", 2)
        run.communicate(timeout=60)


# ---- for real -------------------------------------------------------------------------------------------------------


@pytest.fixture
def sshd(tmp_path: Path) -> Iterator[Path]:
    """The configuration of an ssh that reaches this machine as 127.0.0.1 and 127.0.0.2."""
    if not shutil.which("sshd", path="/usr/sbin:/usr/local/sbin"):
        pytest.skip("there is no sshd on this machine")
    for name in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", tmp_path / name], check=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = {
        "Port": port, "HostKey": tmp_path / "host", "AuthorizedKeysFile": tmp_path / "user.pub", "UsePAM": "no",
        "PidFile": tmp_path / "pid", "StrictModes": "no", "PermitRootLogin": "yes", "PasswordAuthentication": "no",
    }  # fmt: skip
    lines = [
        *(f"{key} {value}" for key, value in options.items()),
        "ListenAddress 127.0.0.1",
        "ListenAddress 127.0.0.2",
    ]
    (tmp_path / "sshd_config").write_text("\n".join(lines) + "\n")
    (tmp_path / "ssh_config").write_text(
        f"Port {port}\nIdentityFile {tmp_path}/user\nIdentitiesOnly yes\nUserKnownHostsFile {tmp_path}/known\n"
        "StrictHostKeyChecking accept-new\n"
    )
    if os.getuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)
    server = subprocess.Popen(["/usr/sbin/sshd", "-D", "-e", "-f", tmp_path / "sshd_config"], stderr=subprocess.DEVNULL)
    yield tmp_path / "ssh_config"
    server.terminate()
    server.wait()


@pytest.mark.slow
def test_a_rank_that_is_killed_is_started_again_on_all_hosts(sshd: Path, tokens: Path, tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("127.0.0.1\n127.0.0.2\n")
    settings = (
        f"model.layers=1 layout=dp=2 data.path={tokens} data.seq=32 train.batch=4 train.steps=60 checkpoint.every=5"
    )
    (tmp_path / "bin").mkdir()
    for name, module in {"torchrun": "torch.distributed.run", "fivefold": "fivefold"}.items():
        (tmp_path / "bin" / name).write_text(f'#!/bin/sh\nPYTHONPATH={SOURCE} exec {sys.executable} -m {module} "$@"\n')
        (tmp_path / "bin" / name).chmod(0o755)
    words = ["train.device=cpu", "train.eval_samples=0", *settings.split(), "--ssh", "hosts", "-o", "run.sh"]
    assert fivefold("launch", *words, cwd=tmp_path).returncode == 0
    metrics = tmp_path / "runs/run/metrics.jsonl"
    with start(tmp_path, SSH=f"ssh -F {sshd}") as run:
        wait_for(lambda: metrics.exists() and len(metrics.read_text().splitlines()) > 8)
        (victim, *_) = ranks_in(tmp_path)
        os.kill(victim, signal.SIGKILL)
        output, _ = run.communicate(timeout=600)
    assert run.returncode == 0, output
    steps = [json.loads(line)["step"] for line in metrics.read_text().splitlines()]
    assert sorted(set(steps)) == list(range(1, 61))
    assert "resumes" in "".join(file.read_text() for file in (tmp_path / "runs").glob("ssh-*/*.log"))
    assert ranks_in(tmp_path) == []


def ranks_in(folder: Path) -> list[int]:
    """The ranks that train in a directory."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            words = (process / "cmdline").read_bytes().split(b"\0")
            if b"-u" in words and b"fivefold" in words and (process / "cwd").readlink() == folder:
                found.append(int(process.name))
    return sorted(found)


def wait_for(seen: Callable[[], object]) -> None:
    deadline = time.monotonic() + 300
    while not seen():
        assert time.monotonic() < deadline
        time.sleep(0.1)
