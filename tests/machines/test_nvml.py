"""What the driver says of a GPU, asked of a library that answers as NVML would; there is no GPU here."""

from typing import Any

from fivefold.machines import node
from fivefold.machines.judge import Gpu

ANSWERS = {
    ("nvmlDeviceGetClockInfo", 1): 1755,
    ("nvmlDeviceGetMaxClockInfo", 1): 1980,
    ("nvmlDeviceGetTemperature", 0): 61,
    ("nvmlDeviceGetPowerUsage",): 690_400,
    ("nvmlDeviceGetCurrentClocksThrottleReasons",): 0x1 | 0x4 | 0x40,
    ("nvmlDeviceGetTotalEccErrors", 1, 0): 2,
}


class Library:
    def __init__(self, refuses: str = "") -> None:
        self.refuses, self.asked = refuses, b""

    def __getattr__(self, name: str) -> Any:
        def answer(*words: Any) -> int:
            if name == self.refuses:
                return 3  # NVML_ERROR_NOT_SUPPORTED
            if name == "nvmlDeviceGetHandleByPciBusId_v2":
                self.asked, words[1]._obj.value = words[0], 42
            elif name != "nvmlInit_v2":
                assert words[0].value == 42
                words[-1]._obj.value = ANSWERS[name, *words[1:-1]]
            return 0

        if name == "nvmlDeviceGetEnforcedPowerLimit":
            raise AttributeError(name)  # as ctypes says of a function that the library does not have
        return answer


def test_a_gpu_is_asked_by_its_address() -> None:
    library = Library()
    seen = node.gpu_state("0000:17:00.0", lambda: library)
    assert seen == Gpu(1755, 1980, 61, 690.4, 0.0, ["the power limit", "heat, by the hardware"], 2)
    assert library.asked == b"0000:17:00.0"


def test_where_nobody_answers_there_is_nothing() -> None:
    def missing() -> Any:
        raise OSError("libnvidia-ml.so.1: cannot open shared object file")

    assert node.gpu_state("0000:17:00.0", missing) is None
    assert node.gpu_state("0000:17:00.0", lambda: Library("nvmlInit_v2")) is None
    without_ecc = node.gpu_state("0000:17:00.0", lambda: Library("nvmlDeviceGetTotalEccErrors"))
    assert without_ecc is not None
    assert without_ecc.errors == 0
