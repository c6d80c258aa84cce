"""Where ranks meet: the store through which they find each other, its network interface and the run's secret.

Ranks of one machine meet at a file, or on its loopback interface. Ranks of several machines meet at the address of rank
0, and at no other address of its machine. torch's own rendezvous would listen on all addresses, wait without a limit
for a listener that never answers, and spend minutes on a name that does not resolve.
"""

import errno
import fcntl
import ipaddress
import os
import secrets
import socket
import stat
import struct
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from fivefold.launch import heartbeat
from fivefold.support.errors import PeerLost, UserError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

T = TypeVar("T")
_ANSWER_TIMEOUT = 20.0  # seconds within which a store that listens answers
_CONNECT_TIMEOUT = 5.0  # seconds for which torch tries to connect to one
_LOOPBACK, _UP = 0x8, 0x1  # flags of an interface


@dataclass(frozen=True)
class Rendezvous:
    """The store at which ranks meet: a file, or the address of a TCPStore."""

    file: str = ""  # of a FileStore
    address: str = ""  # of a TCPStore, if there is no file
    port: int = 0
    agent: bool = False  # torchrun's own store listens at the address; else rank 0's
    alone: bool = False  # all ranks are on this machine

    def __str__(self) -> str:
        return self.file or f"{self.address}:{self.port}"

    def store(self, rank: int, size: int, deadline: float) -> "Store":
        """Open the store. Rank 0 listens; the other ranks wait for it until `deadline` (of time.monotonic)."""
        from torch._C._distributed_c10d import FileStore

        if self.file:
            return FileStore(self.file, size)
        return self._connect(deadline) if rank or self.agent else self._serve()

    def _serve(self) -> "Store":
        """The store that listens in this process."""
        for family, address in self.resolved():
            # A machine may resolve its own name to loopback (Debian's 127.0.1.1), or have "localhost" as the address
            # (Kubernetes) where the others have a name: then the address that they use is not known.
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
                    why = f"rank 0 cannot listen at {self}: {error.strerror}; set MASTER_PORT"
                    raise UserError(why, "meeting.listen") from None
                raise UserError(
                    f"rank 0 cannot listen at {self}: another process listens there; set MASTER_PORT to a free port, "
                    "the same on all ranks",
                    "meeting.taken",
                ) from None
            return _tcp_store(address, self.port, listener.detach())
        raise UserError(
            f"rank 0 runs on {socket.gethostname()}, and {self.address} is not an address of it; set MASTER_ADDR "
            "to one of its addresses, the same on all ranks",
            "meeting.address",
        )

    def _connect(self, deadline: float) -> "Store":
        """The store that listens in another process."""
        self.resolved()
        start, pause = time.monotonic(), 0.01
        while True:
            if self._listens(deadline):
                try:
                    return within(_ANSWER_TIMEOUT, lambda alive: _tcp_store(self.address, self.port))
                except (TimeoutError, RuntimeError):
                    if self._listens(deadline):  # else it has just ended, and another store may follow
                        raise UserError(
                            f"a process listens at {self}, and does not answer as a store does: end it, or set "
                            "MASTER_PORT to a free port, the same on all ranks",
                            "meeting.taken",
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
        """Whether the address is an IP address, not a name."""
        try:
            ipaddress.ip_address(self.address)
        except ValueError:
            return False
        return True

    def resolved(self) -> list[tuple[socket.AddressFamily, str]]:
        """The IP addresses that `address` resolves to, each with its family."""
        try:
            addresses = socket.getaddrinfo(self.address, self.port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            raise UserError(
                f"the address of rank 0, {self.address!r}, cannot be resolved on {socket.gethostname()} "
                f"({getattr(error, 'strerror', None) or error}); set MASTER_ADDR to one that can, the same on all "
                "ranks",
                "meeting.address",
            ) from None
        return [(family, str(socket_address[0])) for family, _, _, _, socket_address in addresses]


def _tcp_store(address: str, port: int, listener: int | None = None) -> "Store":
    from torch._C._distributed_c10d import TCPStore

    options: dict[str, Any] = {} if listener is None else {"master_listen_fd": listener}
    timeout = timedelta(seconds=_CONNECT_TIMEOUT)
    return TCPStore(address, port, None, listener is not None, timeout, wait_for_workers=False, **options)


def within(seconds: float, act: Callable[[Callable[[], None]], T]) -> T:
    """Returns `act(alive)`; raises TimeoutError once `act` has not called `alive` for so many seconds.

    `act` runs in a thread, which is left behind then: a call into torch may wait without a limit.
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
    """Have gloo and NCCL use the loopback interface alone, for ranks that are all on this machine."""
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


# ---- interfaces -----------------------------------------------------------------------------------------------------
# Which of a machine's network interfaces gloo uses: the one over which ranks have met.
#
# gloo would take the address that a machine's own name resolves to. On many machines that is loopback (Debian's
# 127.0.1.1), which ranks of other machines cannot reach, and gloo's ranks wait for each other until a time limit.


GLOO_INTERFACE_ENV = "GLOO_SOCKET_IFNAME"
_SIOCGIFADDR = 0x8915  # SIOCGIFADDR, Linux's question for an interface's address


def check_interfaces(meeting: Rendezvous) -> None:
    """Refuse an interface that the user has set for gloo and that cannot work."""
    _, address = meeting.resolved()[0]
    used = _interface_to(address, meeting.port)
    names = [name for _, name in socket.if_nameindex()]
    hint = (
        f", or {GLOO_INTERFACE_ENV}={used}: {meeting.address} is reached over it"
        if used and not is_loopback(used)
        else ""
    )
    for name in _user_interfaces():
        if name not in names:
            why = f"{socket.gethostname()} has no such interface, only {', '.join(names)}"
        elif hint and is_loopback(name):
            why = "no other machine can reach a loopback interface"
        else:
            continue
        raise UserError(
            f"{GLOO_INTERFACE_ENV}={name}: {why}; nearest: unset {GLOO_INTERFACE_ENV}{hint}", "environment.interface"
        )


def choose_interface(meeting: Rendezvous, store: "Store", size: int, timeout: float) -> str:
    """Collective, of ranks that have met at `store`: set gloo's interface, unless the user has.

    Returns a sentence for the error if ranks then cannot reach each other: which interface this rank uses, and which
    might be right.
    """
    found, chosen = _interface_to(_address_of_rank_0(meeting, store, size, timeout), meeting.port), _user_interfaces()
    if found and not chosen:
        os.environ[GLOO_INTERFACE_ENV] = found
    if found and chosen and found not in chosen:
        conflict = f"as {GLOO_INTERFACE_ENV} says, but {meeting.address} is reached over {found}"
        return f"this rank uses {', '.join(chosen)}, {conflict}: unset {GLOO_INTERFACE_ENV} on all ranks"
    used = ", ".join(chosen) or found
    return f"this rank uses {used}" if used else f"set {GLOO_INTERFACE_ENV} to the interface that ranks share"


def _user_interfaces() -> list[str]:
    """The interfaces that the user has set for gloo."""
    return [name for name in os.environ.get(GLOO_INTERFACE_ENV, "").split(",") if name]


def _address_of_rank_0(meeting: Rendezvous, store: "Store", size: int, timeout: float) -> str:
    """The address of rank 0 as other machines resolve it; on its own machine the name may stand for loopback.

    Each rank that resolves it writes it into the store; one that does not waits until it is there, or all have asked.
    """
    addresses = [address for _, address in meeting.resolved()]
    if meeting.literal:
        return addresses[0]
    outside = [address for address in addresses if not ipaddress.ip_address(address).is_loopback]
    if outside:
        store.set("address of rank 0", outside[0])
    asked = store.add("know rank 0", 1)  # ranks that have come this far
    deadline = time.monotonic() + timeout
    while not outside and asked < size and not store.check(["address of rank 0"]) and time.monotonic() < deadline:
        time.sleep(0.02)
        asked = store.add("know rank 0", 0)
    if not outside and store.check(["address of rank 0"]):
        outside = [store.get("address of rank 0").decode()]
    return (outside or addresses)[0]


def _interface_to(address: str, port: int) -> str:
    """The interface over which this machine reaches an address; empty if it is not known. Nothing is sent."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((address, port))
        return interface_of(str(probe.getsockname()[0]))
    return ""


def interface_of(address: str) -> str:
    """The interface that has this address; empty if none is known to have it."""
    if ":" in address:
        hexadecimal = ipaddress.IPv6Address(address.partition("%")[0]).packed.hex()
        with suppress(OSError):
            lines = [line.split() for line in Path("/proc/net/if_inet6").read_text().splitlines()]
            return next((line[-1] for line in lines if line[0] == hexadecimal), "")
        return ""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # the interface has no address
                answer = fcntl.ioctl(any_socket, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                if socket.inet_ntoa(answer[20:24]) == address:
                    return name
    return ""


# ---- secret ---------------------------------------------------------------------------------------------------------
# The secret of a run, which a process must know to be one of its ranks.
#
# It is the value of FIVEFOLD_SECRET, which our launcher sets. Else it is in a file of run.dir, which the machines of a
# run share, that only the user can read. A file that others may have read or written is refused, never ignored.


SECRET_ENV = "FIVEFOLD_SECRET"
_SECRET_FILE = ".secret"
_MIN_SECRET_LENGTH = 16  # characters
_WAY_OUT = f"or set {SECRET_ENV} to {_MIN_SECRET_LENGTH} random characters or more, the same on all machines"


def secret_location(directory: Path, env: Mapping[str, str] = os.environ) -> str:
    """Where the secret is, for error messages: ranks with different secrets look for them in different places."""
    return SECRET_ENV if SECRET_ENV in env else str((directory / _SECRET_FILE).absolute())


def run_secret(directory: Path, env: Mapping[str, str] = os.environ) -> bytes:
    """The secret by which the ranks of a run below `directory` (its run.dir) know each other; the first rank to come
    creates it."""
    if (value := env.get(SECRET_ENV)) is not None:
        if len(value) < _MIN_SECRET_LENGTH:
            raise UserError(
                f"{SECRET_ENV} has {len(value)} characters, and a secret has {_MIN_SECRET_LENGTH} or more",
                "secret.short",
            )
        return os.fsencode(value)
    path = directory / _SECRET_FILE
    try:
        if not os.path.lexists(path):
            _write_secret(path)
        stream = open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb")  # noqa: SIM115
    except OSError as error:
        raise UserError(
            f"{path}, by which the ranks of a run know each other, cannot be read or made ({error.strerror}): make "
            f"run.dir a directory that all machines share, {_WAY_OUT}",
            "secret.file",
        ) from None
    with stream:
        status = os.fstat(stream.fileno())
        requirements = [
            (stat.S_ISREG(status.st_mode), "is not a regular file"),
            (status.st_uid == os.geteuid(), f"belongs to user {status.st_uid}, and this process to {os.geteuid()}"),
            (not status.st_mode & 0o077, f"is open to other users: its mode is {status.st_mode & 0o777:o}, not 600"),
        ]
        problem = next((sentence for met, sentence in requirements if not met), "")
        secret = b"" if problem else stream.read(4096).strip()
    if problem or len(secret) < _MIN_SECRET_LENGTH:
        problem = problem or f"holds {len(secret)} characters, and a secret has {_MIN_SECRET_LENGTH} or more"
        raise UserError(
            f"{path} cannot be trusted to keep a secret: it {problem}; delete it, {_WAY_OUT}", "secret.file"
        )
    return secret


def _write_secret(path: Path) -> None:
    """Write a new secret, whole or not at all: a rank that comes later must not read half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, draft = tempfile.mkstemp(dir=path.parent, prefix=_SECRET_FILE)  # with mode 600
    try:
        with open(handle, "w") as stream:
            stream.write(secrets.token_hex(32))
            stream.flush()
            os.fsync(handle)
        with suppress(FileExistsError):  # another rank was quicker
            os.link(draft, path)
    finally:
        os.unlink(draft)
