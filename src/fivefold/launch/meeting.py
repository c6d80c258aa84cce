"""Where ranks meet: the store through which they find each other, and who can reach it.

Ranks of one machine meet at a file, or on its loopback interface. Ranks of several machines meet at the address of rank
0, and at no other address of its machine. torch's own way in would listen on all of them, wait without a limit for a
listener that never answers, and spend minutes on a name that does not resolve.
"""

import errno
import ipaddress
import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from fivefold.launch import heartbeat
from fivefold.support.errors import PeerLost, UserError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

T = TypeVar("T")
_ANSWER = 20.0  # seconds in which a store that listens has answered
_TRIES = 5.0  # seconds in which torch tries again to speak with one
_LOOPBACK, _UP = 0x8, 0x1  # flags of an interface


@dataclass(frozen=True)
class Meeting:
    file: str = ""  # of a FileStore
    address: str = ""  # else of a TCPStore
    port: int = 0
    agent: bool = False  # torchrun's own store listens there; else rank 0's
    alone: bool = False  # all ranks are on this machine

    def __str__(self) -> str:
        return self.file or f"{self.address}:{self.port}"

    def store(self, rank: int, size: int, deadline: float) -> "Store":
        """Open it. Rank 0 is the one that listens; the others wait for it until `deadline` (of time.monotonic)."""
        from torch._C._distributed_c10d import FileStore

        if self.file:
            return FileStore(self.file, size)
        return self._connected(deadline) if rank or self.agent else self._served()

    def _served(self) -> "Store":
        for family, address in self.resolved():
            # A machine may know its own name as loopback (Debian's 127.0.1.1), or be told "localhost" (Kubernetes)
            # while the others are told a name: then no address is known to be the one that they use.
            everywhere = not self.alone and not self.literal and ipaddress.ip_address(address).is_loopback
            try:
                if everywhere and socket.has_dualstack_ipv6():
                    listener = socket.create_server(("", self.port), family=socket.AF_INET6, dualstack_ipv6=True)
                else:
                    listener = socket.create_server(("" if everywhere else address, self.port), family=family)
            except OSError as error:
                if error.errno == errno.EADDRNOTAVAIL:
                    continue
                if error.errno != errno.EADDRINUSE:
                    raise UserError(f"rank 0 cannot listen at {self}: {error.strerror}; set MASTER_PORT") from None
                raise UserError(
                    f"rank 0 cannot listen at {self}: another process listens there; set MASTER_PORT to a free port, "
                    "the same on all ranks"
                ) from None
            return _tcp_store(address, self.port, listener.detach())
        raise UserError(
            f"rank 0 runs on {socket.gethostname()}, and {self.address} is no address of that machine; set MASTER_ADDR "
            "to one of its addresses, the same on all ranks"
        )

    def _connected(self, deadline: float) -> "Store":
        self.resolved()
        start, pause = time.monotonic(), 0.01
        while True:
            if self._listens(deadline):
                try:
                    return within(_ANSWER, lambda alive: _tcp_store(self.address, self.port))
                except (TimeoutError, RuntimeError):
                    if self._listens(deadline):  # else it has just ended, and its place may be taken
                        raise UserError(
                            f"a process listens at {self}, and does not answer as a store does: end it, or set "
                            "MASTER_PORT to a free port, the same on all ranks"
                        ) from None
            if time.monotonic() > deadline:
                waited = f"within {time.monotonic() - start:.0f} s"
                raise PeerLost(f"rank 0 has not joined {waited}: nothing listens at {self}")
            time.sleep(min(pause, max(0.0, deadline - time.monotonic())))
            pause = min(2 * pause, 1.0)
            heartbeat.beat()

    def _listens(self, deadline: float) -> bool:
        try:
            socket.create_connection((self.address, self.port), min(5.0, max(0.1, deadline - time.monotonic()))).close()
        except OSError:
            return False
        return True

    @property
    def literal(self) -> bool:
        try:
            ipaddress.ip_address(self.address)
        except ValueError:
            return False
        return True

    def resolved(self) -> list[tuple[socket.AddressFamily, str]]:
        try:
            found = socket.getaddrinfo(self.address, self.port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            raise UserError(
                f"the address of rank 0, {self.address!r}, cannot be resolved on {socket.gethostname()} "
                f"({getattr(error, 'strerror', None) or error}); set MASTER_ADDR to one that can, the same on all ranks"
            ) from None
        return [(family, str(where[0])) for family, _, _, _, where in found]


def _tcp_store(address: str, port: int, listener: int | None = None) -> "Store":
    from torch._C._distributed_c10d import TCPStore

    more: dict[str, Any] = {} if listener is None else {"master_listen_fd": listener}
    patience = timedelta(seconds=_TRIES)
    return TCPStore(address, port, None, listener is not None, patience, wait_for_workers=False, **more)


def within(seconds: float, act: Callable[[Callable[[], None]], T]) -> T:
    """What `act(alive)` returns, or TimeoutError once `alive` has not been called for so long.

    A call into torch may wait without a limit; it is left behind then.
    """
    done = threading.Event()
    seen = time.monotonic()
    results: list[T] = []
    errors: list[BaseException] = []

    def alive() -> None:
        nonlocal seen
        seen = time.monotonic()
        heartbeat.beat()  # the wait has a limit of its own

    def run() -> None:
        try:
            results.append(act(alive))
        except BaseException as error:
            errors.append(error)
        done.set()

    threading.Thread(target=run, name="meeting", daemon=True).start()
    while not done.wait(max(0.01, seen + seconds - time.monotonic())):
        if time.monotonic() > seen + seconds:
            raise TimeoutError
    if errors:
        raise errors[0]
    return results[0]


def stay_on_this_machine() -> None:
    """gloo and NCCL listen on the loopback interface alone, for ranks that are all here."""
    names = [name for _, name in socket.if_nameindex()]
    loopback = next((name for name in names if is_loopback(name)), None)
    if loopback:
        os.environ["GLOO_SOCKET_IFNAME"] = loopback
        os.environ["NCCL_SOCKET_IFNAME"] = f"={loopback}"


def is_loopback(interface: str) -> bool:
    flags = Path("/sys/class/net", interface, "flags")
    if not flags.exists():  # not Linux
        return interface.startswith("lo")
    return int(flags.read_text(), 16) & (_LOOPBACK | _UP) == _LOOPBACK | _UP
