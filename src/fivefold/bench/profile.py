"""Where a step's time goes on the device: a profile of some steps, by kernel and by what kernels are for."""

import re
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from fivefold.train.records import Evaluation, Step

# By what their names have in them, first come first served; what the compiler fuses bears its name.
KINDS = {
    "attention": r"sdpa|fmha|flash|attention|dot_do_o|dq_to|convert_dq",
    "products": r"nvjet|gemm|cutlass|xmma|cublas|::(add)?mm\b|::bmm\b|scaled_mm",
    "AdamW": r"^_update|adam",
    "the gradient norm": r"LpNorm|lpnorm|foreach_norm",
    "gradients widened, weights rounded": r"multi_tensor_apply|foreach_copy",
    "fused by the compiler": r"^triton_",
    "embedding": r"embedding|indexing_backward|index_select|index_put",
    "copies": r"[Mm]emcpy|[Mm]emset|copy|CatArray",
}
REST = "others"


def kind_of(name: str) -> str:
    return next((kind for kind, pattern in KINDS.items() if re.search(pattern, name)), REST)


class Profile:
    """A listener that watches `steps` steps behind the first `after` of a run."""

    def __init__(self, after: int, steps: int, device: torch.device):
        self.after, self.steps, self.device = after, steps, device
        on_gpu = device.type == "cuda"
        self.profiler = profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU])
        self.kernels: list[dict[str, Any]] = []  # none where the device's counters may not be read
        self.over = False

    def on_step(self, record: Step) -> None:
        if record.step == self.after:
            self._settle()
            self.profiler.__enter__()
        if record.step == self.after + self.steps:
            self._settle()
            self.profiler.__exit__(None, None, None)
            self.kernels, self.over = self._read(), True

    def on_evaluation(self, record: Evaluation) -> None: ...

    def close(self) -> None: ...

    def done(self) -> bool:
        return self.over

    def _settle(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _read(self) -> list[dict[str, Any]]:
        found = []
        for row in self.profiler.key_averages():
            time = row.self_device_time_total if self.device.type == "cuda" else row.self_cpu_time_total
            if time > 0:
                numbers = {"seconds": time / 1e6 / self.steps, "calls": row.count / self.steps}
                found.append({"name": row.key, "kind": kind_of(row.key)} | numbers)
        return sorted(found, key=lambda kernel: -kernel["seconds"])
