"""Which ranks of this machine can be started: those that are lost are looked for again and again.

A rank has a place in which a process is started: a GPU, or a share of the CPU. After a failure the places of the ranks
that died are tried. One that answers had a passing failure; one that does not is lost until it answers.
"""

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from fivefold.job.config import TrainConfig
from fivefold.launch import faults

_PATIENCE = 60.0  # seconds for a place to answer
_GPUS = Path("/proc/driver/nvidia/gpus")
SHARING = "fivefold-rank-"  # of the NCCL_HOSTID that ranks have which share a GPU
# Does a GPU compute? In a process of its own: a driver that hangs holds whoever asks.
_TRIAL = "import torch; x = torch.ones(256, 256, device='cuda'); assert float((x @ x).sum()) == 256**3"


class Roster:
    def __init__(self, ranks: int, gpus: int, step: Callable[[], int] = lambda: 0):
        """`gpus` of this machine, which ranks share if they are more; none: ranks compute on the CPU. `step` says how
        far the run is, for faults that are planted."""
        self.ranks, self.gpus, self.step = ranks, gpus, step
        self.lost: set[int] = set()
        self.looked = time.monotonic()
        self.trials: dict[int, subprocess.Popen[bytes]] = {}

    @property
    def here(self) -> list[int]:
        return [place for place in range(self.ranks) if place not in self.lost]

    def __str__(self) -> str:
        return f"{len(self.here)} of {self.ranks} are here"

    def lose(self, places: Sequence[int], stopping: Callable[[], bool] = lambda: False) -> list[int]:
        """Try some places, and return those that do not answer; if it is `stopping`, none is waited for."""
        trials = {place: self._trial(place) for place in places}
        deadline = time.monotonic() + _PATIENCE
        while any(trial.poll() is None for trial in trials.values()) and time.monotonic() < deadline and not stopping():
            time.sleep(0.01)
        deadline = 0.0 if stopping() else deadline
        gone = [place for place, trial in trials.items() if not self._answers(place, trial, deadline)]
        self.lost.update(gone)
        self.looked = time.monotonic()
        return gone

    def look(self, every: float) -> list[int]:
        """Called again and again while others work: the lost places that answer by now, tried `every` so many seconds
        and without waiting."""
        if self.lost and not self.trials and time.monotonic() - self.looked >= every:
            self.looked = time.monotonic()
            self.trials = {place: self._trial(place) for place in self.lost}
        if not self.trials:
            return []
        if any(trial.poll() is None for trial in self.trials.values()) and time.monotonic() - self.looked < _PATIENCE:
            return []
        trials, self.trials = self.trials, {}
        back = [place for place, trial in trials.items() if self._answers(place, trial, 0.0)]
        self.lost.difference_update(back)
        return back

    def environment(self, env: Mapping[str, str]) -> dict[str, str]:
        """For ranks that are to leave the lost places alone."""
        if not self.gpus or not self.lost:
            return {}
        return {"CUDA_VISIBLE_DEVICES": ",".join(dict.fromkeys(self._device(place, env) for place in self.here))}

    def _device(self, place: int, env: Mapping[str, str] = os.environ) -> str:
        visible = [word for word in env.get("CUDA_VISIBLE_DEVICES", "").split(",") if word]
        return visible[place % len(visible)] if visible else str(place % self.gpus)

    def _trial(self, place: int) -> "subprocess.Popen[bytes]":
        env = {**os.environ, **({"CUDA_VISIBLE_DEVICES": self._device(place)} if self.gpus else {})}
        command = [sys.executable, "-c", _TRIAL if self.gpus else "pass"]
        return subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def _answers(self, place: int, trial: "subprocess.Popen[bytes]", deadline: float) -> bool:
        try:
            code = trial.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            trial.kill()
            with suppress(subprocess.TimeoutExpired):  # a process that waits for a driver cannot be ended
                trial.wait(1)
            return False
        return code == 0 and not faults.lost(place, self.step())


def gpus_here() -> list[str]:
    """The GPUs of this machine that its driver lists, by name: 'NVIDIA H200'. No torch, and no CUDA, is needed."""
    found = []
    for file in sorted(_GPUS.glob("*/information")):
        with suppress(OSError):
            model = re.search(r"^Model:\s*(.+?)\s*$", file.read_text(errors="replace"), re.MULTILINE)
            found.append(model[1] if model else "")
    return found


def visible_gpus(env: Mapping[str, str] = os.environ, gpus: int | None = None) -> int:
    """How many of this machine's `gpus` CUDA will show to a process."""
    here, visible = len(gpus_here()) if gpus is None else gpus, env.get("CUDA_VISIBLE_DEVICES")
    return here if visible is None else min(here, len(list(filter(None, visible.split(",")))))


def sharing_problem(config: TrainConfig, gpus: int, local_ranks: int, apart: bool = False) -> str | None:
    """Why `train.share_gpu=nccl` cannot be, with so many GPUs for the ranks of a node; None when it can."""
    if config.share_gpu != "nccl" or local_ranks == 1:
        return None
    what = "train.share_gpu=nccl lets ranks of one machine share its GPUs"
    if not gpus:
        return f"{what}, and these compute on the CPU; nearest: train.share_gpu=gloo"
    if apart:
        return f"{what}, and these may be on several machines, between which it would slow NCCL down; leave it out"
    if local_ranks <= gpus:
        why = "it makes each rank a host of its own for NCCL, without NVLink and shared memory"
        return f"{what}, and each of these {local_ranks} has one of its own ({gpus} here): {why}; leave it out"
    return None
