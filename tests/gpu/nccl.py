"""Runs of `fivefold train` whose ranks share one GPU over real NCCL, and what is left of them."""

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

needs_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
SHARED = ("train.device=cuda", "train.share_gpu=nccl")
EAGER = "train.compile=off"  # kernels as they are: to compile takes longer than most tests
SMALL = ("model=tiny", "data.seq=64", "train.batch=8", "train.eval_samples=8", "train.log_every=1")


@dataclass(frozen=True)
class Done:
    code: int
    output: str
    seconds: float
    after: float  # seconds from the fault to the end; 0 where there was none
    folder: Path

    @property
    def losses(self) -> dict[int, float]:
        """By step."""
        return {row["step"]: row["loss"] for row in self.rows("step")}

    @property
    def held_out(self) -> dict[int, float]:
        return {row["step"]: row["held_out_loss"] for row in self.rows("evaluation")}

    def rows(self, kind: str) -> list[dict[str, float]]:
        lines = (self.folder / "run/metrics.jsonl").read_text().splitlines()
        return [row for row in map(json.loads, lines) if row["kind"] == kind]

    @property
    def said(self) -> str:
        """What it printed, in one line."""
        return " ".join(self.output.split())


def train(folder: Path, layout: str, nproc: int, *words: str, fault: str = "", shared: bool = True) -> Done:
    """`fivefold train` in `folder`; `shared` over NCCL, else over gloo on the same GPU."""
    seen = folder / "fault"
    how = SHARED if shared else ("train.device=cuda",)
    env = {**os.environ, "OMP_NUM_THREADS": "1", "FIVEFOLD_FAULT": fault, "FIVEFOLD_FAULTS_SEEN": str(seen)}
    options, settings = [word for word in words if word.startswith("-")], [word for word in words if "=" in word]
    command = [sys.executable, "-m", "fivefold", "train", "--nproc", str(nproc), *options, *SMALL, f"layout={layout}"]
    start = time.time()
    done = subprocess.run(
        [*command, *how, EAGER, f"run.dir={folder}", *settings],
        env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=240, check=False,
    )  # fmt: skip
    end = time.time()
    return Done(done.returncode, done.stdout, end - start, end - seen.stat().st_mtime if seen.exists() else 0.0, folder)
