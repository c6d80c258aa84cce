"""A limited wire between two ranks of ep, for each pipeline rank one: network namespaces and the kernel's token bucket.

    with limited(2, 100.0) as wires:        # Mbit/s each way
        ranks.run(4, ...)                   # rank r: enter(wires, r) before it opens a connection

Ranks of one ep place share a namespace, so that stages reach each other over its loopback, and only what goes to the
other ep place passes a wire. Where namespaces cannot be made, `wires.places` is empty and a rank makes up the delay.
"""

import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

_NETWORK = 0x40000000  # CLONE_NEWNET
_TICKS = 100  # a second


@dataclass(frozen=True)
class Wires:
    link: float  # Mbit/s
    places: tuple[tuple[str, str], ...] = ()  # of each rank, its namespace and interface

    def __str__(self) -> str:
        if self.places:
            return f"a wire of {self.link:g} Mbit/s each way between the two ranks of ep: two namespaces, tc tbf"
        return f"each rank waits as long as its messages take at {self.link:g} Mbit/s: an injected delay, no real wire"


@contextmanager
def limited(pp: int, link: float, injected: bool = False) -> Iterator[Wires]:
    """`injected`: no wire, though there could be one."""
    names = [f"fivefold-{os.getpid()}-{side}" for side in "ab"]
    made: list[str] = []
    try:
        try:
            if injected or os.geteuid() != 0 or not (shutil.which("ip") and shutil.which("tc")):
                raise PermissionError
            for name in names:
                _run("ip", "netns", "add", name)
                made.append(name)
                _run("ip", "-n", name, "link", "set", "lo", "up")
            for place in range(pp):
                _wire(names, place, link)
        except (OSError, subprocess.CalledProcessError):
            yield Wires(link)
        else:
            # dp is the slowest axis, and ep here is all of it.
            yield Wires(link, tuple((name, f"ep{place}") for name in names for place in range(pp)))
    finally:
        for name in made:
            with suppress(OSError, subprocess.CalledProcessError):
                _run("ip", "netns", "del", name)


def _wire(names: list[str], place: int, link: float) -> None:
    first, second = names
    interface = f"ep{place}"
    _run("ip", "-n", first, "link", "add", interface, "type", "veth", "peer", "name", interface, "netns", second)
    for number, name in enumerate(names, start=1):
        _run("ip", "-n", name, "addr", "add", f"10.77.{place}.{number}/24", "dev", interface)
        _run("ip", "-n", name, "link", "set", interface, "up")
        # A rank may answer over another wire than it was asked on.
        for one in ("all", interface):
            _run("ip", "netns", "exec", name, "sh", "-c", f"echo 0 > /proc/sys/net/ipv4/conf/{one}/rp_filter")
        bucket = ("rate", f"{link * 1e6:.0f}bit", "burst", f"{_burst(link)}b", "latency", "2s")
        _run("tc", "-n", name, "qdisc", "add", "dev", interface, "root", "tbf", *bucket)


def _burst(link: float) -> int:
    """Bytes that pass at once: what the rate gives between two ticks of the slowest kernel's clock, or a few packets.
    It is short beside a message, which would otherwise pass for nothing."""
    return max(8192, round(link * 1e6 / 8 / _TICKS))


def _run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True)


def enter(wires: Wires, rank: int) -> bool:
    """Move this thread, and those it starts, to the rank's place; whether it has one."""
    if not wires.places:
        return False
    name, interface = wires.places[rank]
    place = os.open(f"/run/netns/{name}", os.O_RDONLY)
    try:
        if ctypes.CDLL(None, use_errno=True).setns(place, _NETWORK):
            raise OSError(ctypes.get_errno(), f"cannot enter the namespace {name}")
    finally:
        os.close(place)
    os.environ["GLOO_SOCKET_IFNAME"] = interface
    return True
