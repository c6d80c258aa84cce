"""Draw the loss curves of benchmarks/*-curve.csv for docs/:  python tools/curves.py

Each file has its command in the first line, then `step` and a column for each run; its last line is the held-out loss.
"""

import csv
from pathlib import Path

from fivefold.render.chart import Plot, legend, sheet
from fivefold.render.paint import to_svg
from fivefold.render.scene import BLUE, ORANGE, Curve, Scene

ROOT = Path(__file__).parent.parent
CURVES = {
    "fp8-curve": ("Loss with 8-bit matmuls", "llama3.2-1b's width, 8 layers, one H200"),
    "fp8-experts-curve": ("Loss with 8-bit experts", "olmoe-1b-7b's width, 4 layers, one H200"),
}


def scene(name: str) -> Scene:
    title, subtitle = CURVES[name]
    with (ROOT / f"benchmarks/{name}.csv").open() as file:
        rows = list(csv.reader(line for line in file if not line.startswith("#")))
    (_, *runs), *steps, held_out = rows
    losses = {run: [float(row[at]) for row in steps] for at, run in enumerate(runs, start=1)}
    drawn = sheet(title, subtitle, height=480)
    highest = max(max(values) for values in losses.values())
    plot = Plot(drawn, left=90, top=110, width=1080, height=270, low=(0, 0), high=(len(steps), highest))
    plot.axis_x("step")
    plot.axis_y("nats per token")
    for colour, values in zip((BLUE, ORANGE), losses.values(), strict=True):
        points = [(plot.x(step), plot.y(loss)) for step, loss in enumerate(values, start=1)]
        drawn.shapes.append(Curve(tuple(points), stroke=colour, width=2.0))
    said = [f"{run}, held out {value}" for run, value in zip(runs, held_out[1:], strict=True)]
    legend(drawn, 450, list(zip(said, (BLUE, ORANGE), strict=True)))
    return drawn


if __name__ == "__main__":
    for name in CURVES:
        (ROOT / f"docs/{name}.svg").write_text(to_svg(scene(name)))
        print(f"docs/{name}.svg")
