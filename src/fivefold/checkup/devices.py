"""What the ranks of a checkup compute on, and which model fits there: small for short steps, large enough to measure.

processes.run(1, "fivefold.checkup.devices:look_at_devices", "auto", timeout=60)
chosen_model(devices, ranks=4)
"""

from typing import NamedTuple

import msgspec

from fivefold.launch.host import cores
from fivefold.launch.processes import Rank
from fivefold.spec.presets import preset

MODELS = ("llama3.2-1b", "smollm2-135m")  # on a GPU: the first of which a few layers fit
CPU_MODEL, CPU_LAYERS, CPU_SEQ, CPU_SAMPLES = "small", 4, 128, 4
GPU_SEQ, GPU_SAMPLES = 2048, 4
_STATE_BYTES = 18.0  # of a parameter: weight, gradient, master and both moments
_SHARE = 0.35  # of a rank's memory for these; the rest is for activations and logits
_LEAST_LAYERS = 4
MOST_RANKS_HERE = 4  # processes of a CPU that are started where nobody says how many


class Devices(msgspec.Struct, frozen=True):
    """The devices of one node, as torch sees them."""

    kind: str  # "cuda" or "cpu"
    name: str
    count: int  # GPUs; of a CPU, cores
    memory: int  # bytes of one
    versions: dict[str, str]

    @property
    def on_gpu(self) -> bool:
        return self.kind == "cuda"


class ChosenModel(NamedTuple):
    """The model that the layouts train."""

    preset: str
    layers: int
    seq: int
    samples: int  # of a step, for each rank


def look_at_devices(rank: Rank, wanted: str) -> Devices:
    """What a process of its own runs, so that the one that asks has no CUDA context."""
    import torch

    from fivefold.cost.model_state import host_memory
    from fivefold.launch.device import choose_device

    device, versions = choose_device(wanted), {"torch": str(torch.__version__)}
    if device.type == "cpu":
        return Devices("cpu", "a CPU", cores(), host_memory(), versions)
    versions["CUDA"] = str(torch.version.cuda)
    if torch.distributed.is_nccl_available():
        versions["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
    memory = int(torch.cuda.get_device_properties(device).total_memory)
    return Devices("cuda", str(torch.cuda.get_device_name(device)), torch.cuda.device_count(), memory, versions)


def ranks_here(devices: Devices) -> int:
    """How many ranks are started on this machine where nobody says it: one for each GPU; on a CPU a few."""
    return max(1, devices.count) if devices.on_gpu else max(2, min(MOST_RANKS_HERE, devices.count))


def chosen_model(devices: Devices, ranks: int) -> ChosenModel:
    """The model for so many ranks of a node, which may share its GPUs."""
    if not devices.on_gpu:
        return ChosenModel(CPU_MODEL, CPU_LAYERS, CPU_SEQ, CPU_SAMPLES)
    share = devices.memory / -(-ranks // max(1, devices.count))
    room = _SHARE * share / _STATE_BYTES  # parameters
    for name in MODELS:
        spec = preset(name)
        fixed = preset(name, layers=1).parameter_count
        each = (spec.parameter_count - fixed) / (spec.layers - 1)
        layers = min(spec.layers, 1 + int((room - fixed) / each))
        if layers >= _LEAST_LAYERS:
            break
    return ChosenModel(name, max(_LEAST_LAYERS, layers), min(GPU_SEQ, spec.context), GPU_SAMPLES)
