"""How many steps Muon takes to AdamW's loss, each at the best learning rate of a small grid.

    python benchmarks/muon.py curve.json                    # 200 steps of a narrow `small` on a CPU, at each rate
    python benchmarks/muon.py proofs/muon-small.json --gpu  # of the whole `small`, in bfloat16 on a GPU
    python benchmarks/muon.py proofs/muon-small.json --show # what was measured

Both see the same batches in the same order, from the same weights, with the same schedule, decay and clipping. A loss
is the mean over ten steps, since batches differ. AdamW's is that of its last ten steps, at its best rate.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

STEPS, MEAN = 200, 10
RATES = {"adamw": (2.5e-4, 5e-4, 1e-3, 2e-3, 4e-3, 8e-3), "muon": (2e-3, 4e-3, 8e-3, 1.6e-2, 3.2e-2, 6.4e-2)}
NARROW = ["model=small", "model.layers=4", "model.hidden=128", "model.heads=4", "model.kv_heads=2", "model.ffn=384"]
ON_CPU = [*NARROW, "data.seq=128", "train.batch=8", "train.dtype=float32", "train.device=cpu"]
_CUDA = ["train.dtype=bfloat16", "train.device=cuda", "train.compile=off"]
ON_GPU = ["model=small", "data.seq=512", "train.batch=16", *_CUDA]


def losses(words: list[str], name: str, rate: float) -> list[float]:
    """Of every step of a run."""
    import torch

    from fivefold.job.preflight import preflight
    from fivefold.job.reading import read_job
    from fivefold.parallel.mesh import Mesh
    from fivefold.trainer.loop import Trainer

    job = read_job(None, [*words, f"train.steps={STEPS}", f"optimizer.name={name}", f"optimizer.lr={rate}"])
    trainer = Trainer(job, preflight(job, 1), Mesh.of_job(job, torch.device(job.train.device)))
    steps = (trainer.step(step, read()) for step, read in enumerate(trainer.reads(), 1))
    return [step.loss for step in steps if step.loss is not None]


def means(curve: list[float]) -> list[float]:
    """Of the ten steps that end with each one, from the tenth on."""
    return [sum(curve[end - MEAN : end]) / MEAN for end in range(MEAN, len(curve) + 1)]


def show(words: list[str], runs: dict[str, dict[str, list[float]]]) -> str:
    lines = [" ".join(words), f"loss, mean of the last {MEAN} of {STEPS} steps:"]
    best: dict[str, str] = {}
    for name, by_rate in runs.items():
        ends = {rate: means(curve)[-1] for rate, curve in by_rate.items()}
        best[name] = min(ends, key=ends.__getitem__)
        lines.append(f"  {name:6} " + "  ".join(f"lr {rate}: {end:.3f}" for rate, end in ends.items()))
    target = means(runs["adamw"][best["adamw"]])[-1]
    curve = means(runs["muon"][best["muon"]])
    reached = next((step for step, loss in enumerate(curve, MEAN) if loss <= target), None)
    took = f"after {reached} steps" if reached is not None else f"not within {STEPS} steps"
    lines.append(f"AdamW at its best rate, {best['adamw']}, ends at {target:.3f}")
    lines.append(f"Muon at its best rate, {best['muon']}, is there {took}, and ends at {curve[-1]:.3f}")
    return "\n".join(lines)


def main() -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    path = Path(sys.argv[1])
    fresh: dict[str, Any] = {"job": ON_GPU if "--gpu" in sys.argv else ON_CPU, "losses": {}}
    found = json.loads(path.read_text()) if path.exists() else fresh
    words, runs = found["job"], found["losses"]
    for name, rates in RATES.items() if "--show" not in sys.argv else ():
        for rate in rates:
            if str(rate) not in runs.setdefault(name, {}):
                begin = time.perf_counter()
                runs[name][str(rate)] = [round(loss, 4) for loss in losses(words, name, rate)]
                path.write_text(json.dumps(found) + "\n")
                print(f"{name} {rate}: {time.perf_counter() - begin:.0f} s", flush=True)
    print(show(words, runs))


if __name__ == "__main__":
    main()
