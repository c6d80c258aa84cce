"""The machine around a rank: versions, limits, memory, and the disk under run.dir."""

import ctypes
import importlib.metadata
import os
import platform
import resource
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any

from fivefold.launch import faults
from fivefold.launch.handshake import code_digest
from fivefold.launch.host import cores
from fivefold.launch.local import SHARED_GPU_HOST_PREFIX
from fivefold.machines.judge import Disk, Gpu
from fivefold.version import __version__

_PIECE_BYTES = 4 << 20  # bytes
_PIECES = 8
_MAX_WRITE_S = 3.0  # seconds of writing; a slower disk has written less then
_SYNCS = 5


def node_name(env: Mapping[str, str] = os.environ) -> str:
    """Slurm's name for this node, which may have several to a machine; else the machine's host name."""
    return env.get("SLURMD_NODENAME") or socket.gethostname()


def host_id(env: Mapping[str, str] = os.environ) -> str:
    """The NCCL_HOSTID that this rank has inherited; empty for the one that `choose_backend` sets for a shared GPU."""
    inherited = env.get("NCCL_HOSTID", "")
    return "" if inherited.startswith(SHARED_GPU_HOST_PREFIX) else inherited


def versions(cuda: bool) -> dict[str, str]:
    """The versions of what must be equal on all ranks, or should be."""
    import torch

    versions = {
        "fivefold": f"{__version__} ({code_digest()[:8]})",
        "python": platform.python_version(),
        "torch": importlib.metadata.version("torch"),
        "kernel": platform.release(),
    }
    if adapters := rdma_adapters():
        versions["RDMA adapters"] = str(adapters)
    if cuda:
        # "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15  ..."
        driver = Path("/proc/driver/nvidia/version")
        words = driver.read_text().split() if driver.exists() else []
        versions["driver"] = next((word for word in words if word[0].isdigit() and "." in word), "unknown")
        versions["CUDA"] = str(torch.version.cuda)
        versions["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
    return versions


def rdma_adapters(folder: Path = Path("/sys/class/infiniband")) -> int:
    """How many InfiniBand and RoCE adapters there are."""
    return len(list(folder.iterdir())) if folder.exists() else 0


def amounts() -> dict[str, float]:
    """What a rank may use of memory, cores, files and shared memory; infinity where there is no limit."""
    amounts: dict[str, float] = {"memory": _available(Path("/proc/meminfo")), "cores": cores()}
    for name, limit in (("open files", resource.RLIMIT_NOFILE), ("locked memory", resource.RLIMIT_MEMLOCK)):
        soft = resource.getrlimit(limit)[0]
        amounts[name] = float("inf") if soft == resource.RLIM_INFINITY else soft
    with suppress(OSError):
        shared = os.statvfs("/dev/shm")
        amounts["/dev/shm"] = shared.f_frsize * shared.f_blocks
    return amounts


def _available(meminfo: Path) -> float:
    lines = meminfo.read_text().splitlines() if meminfo.exists() else []
    return next((1024.0 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")), 0.0)


def try_disk(folder: Path) -> Disk:
    """Write, sync and read a file in a folder, and remove it."""
    file = folder / f".doctor-{node_name()}-{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return _try_disk(file)
    except OSError as error:
        return Disk(error=error.strerror or str(error))
    finally:
        with suppress(OSError):
            file.unlink(missing_ok=True)


def _try_disk(file: Path) -> Disk:
    piece, written = os.urandom(_PIECE_BYTES), 0
    with file.open("wb", buffering=0) as stream:
        start = time.perf_counter()
        faults.strike("disk")
        while written < _PIECES * _PIECE_BYTES and (not written or time.perf_counter() - start < _MAX_WRITE_S):
            written += stream.write(piece)
        os.fsync(stream.fileno())
        write_rate = written / (time.perf_counter() - start)
    with file.open("rb", buffering=0) as stream:
        if hasattr(os, "posix_fadvise"):  # else the reads come from the page cache
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        start, read = time.perf_counter(), 0
        while (size := len(stream.read(_PIECE_BYTES))) and time.perf_counter() - start < _MAX_WRITE_S:
            read += size
        read_rate = read / (time.perf_counter() - start)
    return Disk(write_rate, read_rate, median(_sync_seconds(file) for _ in range(_SYNCS)), _free_bytes(file.parent))


def _sync_seconds(file: Path) -> float:
    """The seconds until a small file is on the disk."""
    with file.open("wb", buffering=0) as stream:
        start = time.perf_counter()
        stream.write(b"0" * 4096)
        os.fsync(stream.fileno())
        return time.perf_counter() - start


def _free_bytes(folder: Path) -> int:
    disk = os.statvfs(folder)
    return disk.f_frsize * disk.f_bavail


# ---- nvml -----------------------------------------------------------------------------------------------------------
# A GPU's clocks, heat, power and errors, from NVIDIA's driver through its library NVML.
#
# The library comes with the driver, and its functions keep their names and arguments from release to release (NVML API
# Reference Guide, docs.nvidia.com/deploy/nvml-api), so neither a package nor a parser of nvidia-smi's tables is
# needed.


_SM = 1  # nvmlClockType_t: the multiprocessors'
_CORE = 0  # nvmlTemperatureSensors_t
_UNCORRECTED, _VOLATILE = 1, 0  # nvmlMemoryErrorType_t, nvmlEccCounterType_t
# nvmlClocksEventReasons, bit by bit. Idleness (0x1) and clocks that an administrator has set (0x2) are left out.
_REASONS = {
    0x4: "the power limit",
    0x8: "a hardware slowdown",
    0x20: "heat",
    0x40: "heat, by the hardware",
    0x80: "the power brake",
}


def gpu_state(pci: str, library: Callable[[], Any] = lambda: ctypes.CDLL("libnvidia-ml.so.1")) -> Gpu | None:
    """The GPU at a PCI address such as 0000:17:00.0; None where there is no such library, or it refuses to answer."""
    try:
        nvml = library()
        if nvml.nvmlInit_v2():
            return None
    except (OSError, AttributeError):
        return None
    device = ctypes.c_void_p()
    if nvml.nvmlDeviceGetHandleByPciBusId_v2(pci.encode(), ctypes.byref(device)):
        return None

    def ask(function: str, *arguments: int, kind: Any = ctypes.c_uint) -> int:
        """The value that an NVML function gives for the device; 0 if it fails."""
        value = kind()
        with suppress(AttributeError):  # the library does not have the function
            if getattr(nvml, function)(device, *arguments, ctypes.byref(value)) == 0:
                return int(value.value)
        return 0

    bits = ask("nvmlDeviceGetCurrentClocksThrottleReasons", kind=ctypes.c_ulonglong)
    return Gpu(
        clock=ask("nvmlDeviceGetClockInfo", _SM),
        most=ask("nvmlDeviceGetMaxClockInfo", _SM),
        temperature=ask("nvmlDeviceGetTemperature", _CORE),
        power=ask("nvmlDeviceGetPowerUsage") / 1000,
        limit=ask("nvmlDeviceGetEnforcedPowerLimit") / 1000,
        slowed=[reason for bit, reason in _REASONS.items() if bits & bit],
        errors=ask("nvmlDeviceGetTotalEccErrors", _UNCORRECTED, _VOLATILE, kind=ctypes.c_ulonglong),
    )
