"""What NVIDIA's driver says of a GPU: clocks, heat, power and errors, through its library NVML.

The library comes with the driver, and its functions keep their names and arguments from release to release (NVML API
Reference Guide, docs.nvidia.com/deploy/nvml-api), so neither a package nor a parser of nvidia-smi's tables is needed.
"""

import ctypes
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from fivefold.doctor.reports import Gpu

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


def look(pci: str, library: Callable[[], Any] = lambda: ctypes.CDLL("libnvidia-ml.so.1")) -> Gpu | None:
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

    def ask(name: str, *words: int, kind: Any = ctypes.c_uint) -> int:
        value = kind()
        with suppress(AttributeError):  # a library without it
            if getattr(nvml, name)(device, *words, ctypes.byref(value)) == 0:
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
