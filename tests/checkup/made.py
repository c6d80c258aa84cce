"""A team whose commands only pretend: what they print has the form of what `doctor` and the others print."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fivefold.checkup.command import CommandEnd
from fivefold.checkup.devices import Devices
from fivefold.checkup.parts import Budget
from fivefold.checkup.run import Done, run_checkup
from fivefold.checkup.tasks import CALIBRATED, LOST_STEPS, Task, TypedJob
from fivefold.checkup.team import Ends
from fivefold.hardware.accelerators import ACCELERATORS
from fivefold.hardware.cluster import Cluster, Group
from fivefold.job.reading import read_job
from fivefold.machines.result import speeds_to_toml

CPU = Devices("cpu", "a CPU", 2, 16 << 30, {"torch": "2.13.0"})
H200 = Devices("cuda", "NVIDIA H200", 8, 141 << 30, {"torch": "2.11.0", "CUDA": "12.8", "NCCL": "2.27.3"})
HOST = "frontier-node-17"


def doctor_figures(ranks: int, findings: list[str]) -> dict[str, Any]:
    ring = {"axis": "dp", "ranks": list(range(ranks)), "latency": 2e-5, "reduce": 3e11, "gather": 2.5e11, "seconds": []}
    rows = [
        {"rank": rank, "node": HOST, "device": "a device", "precision": "fp32", "rate": 1e11 + rank, "versions": {},
         "rings": [ring] if rank == 0 and ranks > 1 else [], "ahead": 0.0, "gpu_id": "GPU-0123",
         "sends": [{"axis": "dp", "ranks": [0, 1], "bandwidth": 2e11}] if rank == 0 and ranks > 1 else []}
        for rank in range(ranks)
    ]  # fmt: skip
    expected = {"matmul": [None] * ranks, "links": {"dp": None}}
    return {"ok": not findings, "findings": findings, "layout": f"dp={ranks}", "expected": expected, "ranks": rows}


def proof(layout: str, passed: bool = True) -> dict[str, Any]:
    why = [] if passed else ["the gradient of norm.weight is twice as large"]
    worst = {"name": "norm.weight", "error": 1e-15 if passed else 1.0}
    return {"layout": layout, "model": "tiny", "variant": "", "dtype": "float64", "passed": passed, "problems": why,
            "worst_gradient": worst, "bound": 1e-10, "seconds": 1.0}  # fmt: skip


def write_run(folder: Path, losses: list[float], seconds: float = 0.5) -> None:
    """A run's metrics and trace."""
    folder.mkdir(parents=True, exist_ok=True)
    step = {
        "kind": "step",
        "grad_norm": 1.0,
        "lr": 1e-3,
        "tokens": 512,
        "loss_tokens": 512,
        "mfu": None,
        "memory": 1 << 30,
    }
    lines = [
        json.dumps(step | {"step": n, "loss": loss, "seconds": seconds, "tokens_per_second": 512 / seconds})
        for n, loss in enumerate(losses, 1)
    ]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    mean = {"exposed": {"dp": 0.1 * seconds}, "bubble": 0.2 * seconds}
    summary = {"layout": "dp=2", "schedule": "1f1b", "ranks": [{}, {}], "mean": mean}
    (folder / "trace.json").write_text(json.dumps({"otherData": {"summary": summary}}))


class Pretending:
    """A team; `instead` answers a task before the usual answer is given."""

    launched = False

    def __init__(self, folder: Path, ranks: int = 2, instead: Callable[[Task], CommandEnd | None] = lambda task: None):
        self.base = TypedJob(read_job(None, [f"run.dir={folder}", "train.device=cpu"]), (), False)
        self.size = self.per_node = ranks
        self.instead, self.tasks, self.closed = instead, list[Task](), False
        self.findings: list[str] = []
        self.proofs = [proof("dp=2"), proof("tp=2")]

    def run(self, task: Task, limit: float) -> Ends:
        self.tasks.append(task)
        return {0: self.instead(task) or self.usual(task)}

    def usual(self, task: Task) -> CommandEnd:
        folder = self.base.folder(task.token)
        match task.kind:
            case "doctor":
                figures = doctor_figures(self.size, self.findings)
                return CommandEnd(int(bool(self.findings)), 1.0, f"noise\n{json.dumps(figures)}\n")
            case "verify":
                passed = all(one["passed"] for one in self.proofs)
                return CommandEnd(int(not passed), 1.0, json.dumps({"passed": passed, "layouts": self.proofs}) + "\n")
            case "lose":
                write_run(folder / task.name, [5.0 - 0.1 * n for n in range(LOST_STEPS)])
                said = "rank 1 (dp 1) was ended by SIGKILL in step 5\n" if task.lost >= 0 else ""
                return CommandEnd(0, 1.0, "", said)
            case "calibrate":
                cluster = Cluster((Group(1, self.size, ACCELERATORS["CPU"]),))
                (folder / CALIBRATED).write_text(speeds_to_toml(cluster, []))
                return CommandEnd(0, 1.0, '{"ranks": [], "classes": []}\n')
            case "train":
                write_run(folder / task.name, [5.0] * (3 + task.steps + 2))
                return CommandEnd(0, 1.0)

    def close(self) -> None:
        self.closed = True


def checked(team: Pretending, minutes: float = 10.0, **settings: Any) -> Done:
    said: list[str] = []
    budget = settings.pop("budget", None) or Budget(minutes)
    return run_checkup(team, team.base, CPU, budget, "fivefold checkup", said.append, **settings)
