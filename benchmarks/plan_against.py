"""`python -m benchmarks.plan --against CHECKOUT`: commands of two checkouts in turn, and whether they answer alike.

Whole processes are timed, imports and output included. The answers to QUESTIONS are compared number by number.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter
from typing import Any

from fivefold.bench.harness import RoundTimes, RowsResult, turns
from fivefold.support.errors import UserError

HERE = Path(__file__).resolve().parents[1]
THIS, OTHER = "this", "other"
TIMED = (
    "--version",
    "plan llama3-8b --cluster 8xH100",
    "plan llama3-405b --cluster 2048x8xH100 --batch 2048",
    "plan llama3-405b --cluster 2048x8xH100",
    "plan deepseek-v3 --cluster 256x8xH100",
)
QUESTIONS = (
    "llama3-8b --cluster 8xH100",
    "llama3-8b --cluster 8xH100 --seq 131072 --batch 8",
    "llama3-8b --cluster 1xH100",
    "llama3-8b --cluster 4x8xH100 --batch 512",
    "llama3-8b --cluster 8xA100 --batch 128",
    "llama3-8b --cluster 8xH100 --batch 512 --fix pp=8",
    "llama3-8b --cluster 8xH100 --batch 1024 --fix pp=4,schedule=zb-v",
    "llama3-8b --cluster 8xH100 --batch 256 "
    "--layout pp=8,schedule=interleaved,chunks=4,microbatches=256,recompute=full",
    "llama3-8b --cluster 8xH100 --batch 16 --layout pp=8,schedule=auto,microbatches=16,recompute=full",
    "llama3-8b --cluster 8xH100 --batch 200 --layout pp=8,schedule=v-half,microbatches=200,recompute=full",
    "llama3-70b --cluster 8x8xH100",
    "llama3-70b --cluster 8x8xH100 --batch 500",
    "llama3-70b --cluster 2x8xH100+2x8xA100 --batch 512",
    "llama3-70b --cluster 16x8xH100 --seq 131072 --batch 64",
    "llama3-70b --cluster 32x8xH100 --by memory",
    "llama3-70b --cluster 32x8xH100 --by pareto --batch 1024",
    "llama3-70b --cluster 8x8xH200 --fix tp=8",
    "llama3-70b --cluster 8x8xH100 --precision fp8",
    "llama3-70b --cluster 16x8xA100 --software megatron --batch 1024",
    "llama3-70b --cluster 16x8xH100 --software torchtitan --batch 512",
    "llama3-405b --cluster 2048x8xH100 --batch 2048",
    "llama3-405b --cluster 2048x8xH100",
    "llama3-405b --cluster 2048x8xH100 --seq 131072 --batch 128",
    "llama3-405b --cluster 128x8xH100 --batch 2048",
    "llama3-405b --cluster 512x8xH100 --batch 4096 --software nemo",
    "llama3-405b --cluster 64x8xH100 --fix pp=16 --batch 4096",
    "llama2-70b --cluster 4x8xH100+4x8xA100 --batch 256",
    "deepseek-v3 --cluster 256x8xH100",
    "deepseek-v3 --cluster 256x8xH100 --seq 4096 --batch 8192",
    "deepseek-v3 --cluster 128x8xH100 --seq 4096 --batch 15360 --fix pp=16",
    "deepseek-v3 --cluster 256x8xH100 --seq 4096 --batch 15360 "
    "--layout dp=128,pp=16,ep=64,zero=1,microbatches=120,recompute=full,schedule=dualpipe-v",
    "mixtral-8x7b --cluster 8x8xH100 --batch 512",
    "mixtral-8x7b --cluster 2x8xH100 --imbalance 1.2",
    "qwen3-30b-a3b --cluster 2x8xH100",
    "qwen3-235b-a22b --cluster 32x8xH100 --batch 1024",
    "gpt-oss-120b --cluster 8x8xH100",
    "mistral-7b --cluster 8xH100 --seq 32768 --batch 32",
    "gpt3-175b --cluster 64x8xA100 --batch 1536 --seq 2048",
    "tiny --cluster 2xCPU --batch 16 --seq 128",
    "qwen3-8b --cluster 8xH100 --fix pp=2,schedule=dualpipe-v --batch 256",
)
ALIKE = 1e-9  # of two numbers, relative

COLUMNS = {"fivefold": "command", ">other": "other:.2f", ">this": "this:.2f", ">this / other": "ratio:.2f"}
DIFFERENCES = {"question": "question", "where": "where", "other": "other", "this": "this"}


def times(other: Path, rounds: int) -> RowsResult:
    """Median seconds of each command."""
    checkouts = {OTHER: _source(other), THIS: _source(HERE)}
    rows = []
    for words in TIMED:
        for source in checkouts.values():
            _fivefold(source, words)  # leaves bytecode and the disk's cache behind
        taken = RoundTimes({name: [] for name in checkouts})
        for _, name in turns(checkouts, rounds):
            begin = perf_counter()
            _fivefold(checkouts[name], words)
            taken[name].append(perf_counter() - begin)
        medians = {name: taken.median(name) for name in checkouts}
        rows.append({"command": words, **medians, "ratio": taken.ratio(THIS, OTHER)})
    return RowsResult(rows, COLUMNS, f"seconds of whole processes that take turns: medians of {rounds}")


def answers(other: Path) -> RowsResult:
    """Where answers of the two checkouts differ."""
    rows = []
    for question in QUESTIONS:
        before, now = (json.loads(_fivefold(_source(top), f"plan {question} --json")) for top in (other, HERE))
        rows += [
            {"question": question, "where": where, OTHER: str(one), THIS: str(two)}
            for where, one, two in differences(before, now)
        ]
    return RowsResult(rows, DIFFERENCES, f"{len(QUESTIONS)} answers compared; these numbers and words differ")


def differences(before: Any, now: Any, where: str = "") -> Iterator[tuple[str, Any, Any]]:
    """The leaves in which two JSON values differ, numbers by more than a rounding error."""
    if isinstance(before, dict) and isinstance(now, dict) and before.keys() == now.keys():
        for key in before:
            yield from differences(before[key], now[key], f"{where}.{key}".lstrip("."))
    elif isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        for place, (one, two) in enumerate(zip(before, now, strict=True)):
            yield from differences(one, two, f"{where}[{place}]")
    elif isinstance(before, float) and isinstance(now, float):
        if abs(before - now) > ALIKE * max(abs(before), abs(now), 1.0):
            yield where, before, now
    elif before != now:
        yield where, before, now


def _source(checkout: Path) -> Path:
    source = checkout / "src"
    if not (source / "fivefold" / "cli").is_dir():
        raise UserError(f"{checkout} has no src/fivefold; give a checkout of this repository", "option.path")
    return source


def _fivefold(source: Path, words: str) -> str:
    """What a command prints; a refusal is an answer too."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    environment |= {"PYTHONPATH": str(source), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "fivefold", *words.split()]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode not in (0, 1, 2) or not done.stdout:
        raise UserError(f"fivefold {words} of {source} ended with {done.returncode}: {done.stderr[-500:]}", "bench.run")
    return done.stdout
