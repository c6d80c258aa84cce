"""Which of a machine's network interfaces gloo uses: the one over which ranks have met.

gloo would take the address that a machine's own name resolves to. On many machines that is loopback (Debian's
127.0.1.1), which ranks of other machines cannot reach, and gloo's ranks wait for each other until a time limit.
"""

import fcntl
import ipaddress
import os
import socket
import struct
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from fivefold.launch.meeting import Meeting, is_loopback
from fivefold.support.errors import UserError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

GLOO = "GLOO_SOCKET_IFNAME"
_ADDRESS = 0x8915  # SIOCGIFADDR, Linux's question for an interface's address


def check_given(meeting: Meeting) -> None:
    """Refuse an interface that the user has chosen for gloo, and that cannot work."""
    found = _interface_to(meeting.resolved()[0][1], meeting.port)
    names = [name for _, name in socket.if_nameindex()]
    known = f", or {GLOO}={found}: {meeting.address} is reached over it" if found and not is_loopback(found) else ""
    for name in _given():
        if name not in names:
            why = f"{socket.gethostname()} has no such interface, only {', '.join(names)}"
        elif known and is_loopback(name):
            why = "no other machine can reach a loopback interface"
        else:
            continue
        raise UserError(f"{GLOO}={name}: {why}; nearest: unset {GLOO}{known}")


def choose(meeting: Meeting, store: "Store", size: int, timeout: float) -> str:
    """Collective, of ranks that have met at `store`: tell gloo its interface, unless the user has.

    Returns what to say if ranks then cannot reach each other: which interface is used, and which might be right.
    """
    found, given = _interface_to(_of_rank_0(meeting, store, size, timeout), meeting.port), _given()
    if found and not given:
        os.environ[GLOO] = found
    if found and given and found not in given:
        says = f"this rank uses {', '.join(given)}, as {GLOO} says, but {meeting.address} is reached over {found}"
        return f"{says}: unset {GLOO} on all ranks"
    used = ", ".join(given) or found
    return f"this rank uses {used}" if used else f"set {GLOO} to the interface that ranks share"


def _given() -> list[str]:
    return [name for name in os.environ.get(GLOO, "").split(",") if name]


def _of_rank_0(meeting: Meeting, store: "Store", size: int, timeout: float) -> str:
    """Its address as other machines know it. On its own machine the name may stand for loopback."""
    addresses = [address for _, address in meeting.resolved()]
    if meeting.literal:
        return addresses[0]
    outside = [address for address in addresses if not ipaddress.ip_address(address).is_loopback]
    if outside:
        store.set("address of rank 0", outside[0])
    told = store.add("know rank 0", 1)
    deadline = time.monotonic() + timeout
    while not outside and told < size and not store.check(["address of rank 0"]) and time.monotonic() < deadline:
        time.sleep(0.02)
        told = store.add("know rank 0", 0)
    if not outside and store.check(["address of rank 0"]):
        outside = [store.get("address of rank 0").decode()]
    return (outside or addresses)[0]


def _interface_to(address: str, port: int) -> str:
    """The one that has this machine's own address on the way there; nothing is sent."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((address, port))
        return interface_of(str(probe.getsockname()[0]))
    return ""


def interface_of(address: str) -> str:
    """The interface that has this address; empty if none is known to."""
    if ":" in address:
        wanted = ipaddress.IPv6Address(address.partition("%")[0]).packed.hex()
        with suppress(OSError):
            lines = [line.split() for line in Path("/proc/net/if_inet6").read_text().splitlines()]
            return next((line[-1] for line in lines if line[0] == wanted), "")
        return ""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # it has no address
                answer = fcntl.ioctl(asked, _ADDRESS, struct.pack("256s", name.encode()[:15]))
                if socket.inet_ntoa(answer[20:24]) == address:
                    return name
    return ""
