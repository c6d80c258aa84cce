"""Two of eight ranks are lost at step 20 and back at step 40, and the loss curve is one: python tools/elastic_proof.py

Under --nproc and under torchrun with four agents of two ranks, of which one is killed with its ranks and started again.
Beside them stand two runs that nothing happens to: the same job, and the same job in the layout of six ranks. How far
those two are apart is the control; a run that lost ranks may be three times as far from the first. The picture is
docs/pictures/elastic.svg.
"""

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fivefold.render.chart import Plot, legend, sheet
from fivefold.render.paint import to_svg
from fivefold.render.scene import BLUE, ORANGE, Curve, Line, TextMark

ROOT = Path(__file__).parent.parent
STEPS, LOST, BACK = 90, 20, 40
OWN = "dp=2,tp=2,pp=2,microbatches=2"
JOB = f"""
[model]
preset = "tiny"
[data]
seq = 64
[train]
steps = {STEPS}
batch = 24
device = "cpu"
eval_samples = 0
[checkpoint]
every = 5
[elastic]
probe = 1.0
"""
PATIENCE = 600  # seconds for a run


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("home", type=Path, help="a directory for the runs")
    home = parser.parse_args().home.absolute()
    home.mkdir(parents=True, exist_ok=True)
    (home / "elastic.toml").write_text(JOB)
    whole = _plain(home, "whole", OWN, 8)
    runs = {"--nproc": _nproc(home), "torchrun": _torchrun(home)}
    six = next(one["layout"] for one in runs["--nproc"][1] if one["ranks"] == 6)
    control = _apart(_plain(home, "control", six, 6), whole)
    print(f"control: without faults, {six} and {OWN} are within {control:.1e} of each other over {STEPS} steps")
    good = True
    for name, (losses, recovered) in runs.items():
        apart = _apart(losses, whole)
        good &= apart <= 3 * control
        print(f"{name}: {len(losses)} steps, each once; within {apart:.1e} of the run without faults")
        for one in recovered:
            parts = {part: one[part] for part in ("notice", "replan", "start", "load", "repeat")}
            said = ", ".join(f"{part} {seconds:.1f}" for part, seconds in parts.items())
            again = one["step"] - one["resumed"]
            print(f"  after step {one['step']}, to {one['ranks']} ranks ({one['layout']}): "
                  f"{sum(parts.values()):.1f} s = {said} ({again} steps again)")  # fmt: skip
    _draw(whole, runs["--nproc"], six)
    return 0 if good else 1


def _env(**more: str) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", **more}


def _plain(home: Path, name: str, layout: str, ranks: int) -> list[float]:
    words = ["train", "elastic.toml", f"layout={layout}", "--nproc", str(ranks), f"run.name={name}", "--fresh"]
    with (home / f"{name}.log").open("wb") as log:
        subprocess.run([sys.executable, "-m", "fivefold", *words], cwd=home, env=_env(), stdout=log, stderr=log,
                       check=True, timeout=PATIENCE)  # fmt: skip
    return _losses(home / "runs" / name)


def _nproc(home: Path) -> tuple[list[float], list[dict[str, Any]]]:
    faults = ";".join(f"lose@rank={rank},step={LOST},until={BACK}" for rank in (6, 7))
    words = ["train", "elastic.toml", f"layout={OWN}", "--nproc", "8", "--elastic", "run.name=nproc"]
    with (home / "nproc.log").open("wb") as log:
        subprocess.run([sys.executable, "-m", "fivefold", *words], cwd=home, env=_env(FIVEFOLD_FAULT=faults),
                       stdout=log, stderr=log, check=True, timeout=PATIENCE)  # fmt: skip
    return _losses(home / "runs/nproc"), _recovered(home / "runs/nproc")


def _torchrun(home: Path) -> tuple[list[float], list[dict[str, Any]]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # Without the variable an agent that joins later is never told where the store is (torch 2.11 to 2.13).
    env = _env(TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")
    words = ["--nnodes=3:4", "--nproc-per-node=2", "--max-restarts=3", "--rdzv-backend=c10d", "--rdzv-id=proof",
             f"--rdzv-endpoint=localhost:{port}", "--rdzv-conf=last_call_timeout=3", "--module", "fivefold", "train",
             "elastic.toml", f"layout={OWN}", "--elastic", "run.name=torchrun"]  # fmt: skip

    def agent(number: int) -> "subprocess.Popen[bytes]":
        log = (home / f"agent-{number}.log").open("wb")
        return subprocess.Popen([sys.executable, "-m", "torch.distributed.run", *words], cwd=home, env=env, stdout=log,
                                stderr=log, start_new_session=True)  # fmt: skip

    agents = [agent(0)]
    time.sleep(2)  # the first one has the store
    agents += [agent(number) for number in (1, 2, 3)]
    metrics = home / "runs/torchrun"
    _until(lambda: _step(metrics) >= LOST)
    _kill(agents[3])
    _until(lambda: _step(metrics) >= BACK)
    agents[3] = agent(4)
    for one in agents:
        if one.wait(PATIENCE):
            raise SystemExit(f"an agent of torchrun ended with exit code {one.returncode}: see {home}/agent-*.log")
    return _losses(metrics), _recovered(metrics)


def _kill(agent: "subprocess.Popen[bytes]") -> None:
    """With its ranks, which have sessions of their own: what happens to a node that is gone."""
    children = Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text().split()
    for pid in (agent.pid, *map(int, children)):
        os.kill(pid, signal.SIGKILL)
    agent.wait()


def _until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not true():
        if time.monotonic() > deadline:
            raise SystemExit(f"nothing has happened for {PATIENCE} s")
        time.sleep(0.05)


def _step(run: Path) -> int:
    try:
        return json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])["step"]
    except (OSError, IndexError, ValueError):
        return 0


def _losses(run: Path) -> list[float]:
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [(record["step"], record["loss"]) for record in records if record["kind"] == "step"]
    if [step for step, _ in steps] != list(range(1, STEPS + 1)):
        raise SystemExit(f"{run} has not every step once")
    return [loss for _, loss in steps]


def _recovered(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "recoveries.jsonl").read_text().splitlines()]


def _apart(one: list[float], other: list[float]) -> float:
    return max(abs(a / b - 1) for a, b in zip(one, other, strict=True))


def _draw(whole: list[float], elastic: tuple[list[float], list[dict[str, Any]]], six: str) -> None:
    losses, recovered = elastic
    drawn = sheet("Two of eight ranks are lost, and come back", f"--nproc 8 --elastic: {OWN}, then {six}", height=480)
    plot = Plot(drawn, left=90, top=110, width=1080, height=270, low=(0, 0), high=(STEPS, max(whole)))
    plot.axis_x("step")
    plot.axis_y("nats per token")
    for colour, values, width in ((BLUE, whole, 6.0), (ORANGE, losses, 2.0)):
        points = tuple((plot.x(step), plot.y(loss)) for step, loss in enumerate(values, start=1))
        drawn.shapes.append(Curve(points, stroke=colour, width=width))
    for one in recovered:
        x = plot.x(one["step"])
        drawn.shapes.append(Line(x, plot.y(0), x, plot.y(max(whole)), dashed=True))
        drawn.shapes.append(TextMark(x + 6, plot.y(max(whole)) + 14, f"{one['ranks']} ranks", 13))
    legend(drawn, 450, [("nothing happens", BLUE), ("ranks are lost after step 19 and return", ORANGE)])
    (ROOT / "docs/pictures/elastic.svg").write_text(to_svg(drawn))


if __name__ == "__main__":
    sys.exit(main())
