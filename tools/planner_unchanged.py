"""What a change of the planner changed: presets x layouts, at a commit and in this tree.

    python tools/planner_unchanged.py COMMIT               all presets
    python tools/planner_unchanged.py COMMIT llama3-8b     these

Of each preset a sample of legal layouts is timed in both: seconds, memory and bytes sent of a step, exactly; seconds
and memory by the closed forms that prune; and what the search chooses. The commit is checked out beside this tree, and
each runs its own code with this file's probe.
"""

import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

from fivefold.cost.peak_memory import footprint
from fivefold.cost.step import Workload, estimate
from fivefold.cost.traffic import expected_traffic
from fivefold.hardware.cluster import Cluster
from fivefold.layout.layout import Layout
from fivefold.planner.search import search
from fivefold.planner.space import SearchQuery, space
from fivefold.spec.presets import PRESETS, preset
from fivefold.support.errors import UserError

ROOT = Path(__file__).parent.parent
SAMPLE = 24  # layouts of a preset that are timed exactly
CLOSED = 200  # and by closed forms
FIGURES = ("seconds", "memory", "sent", "closed seconds", "closed memory", "chosen")
SIZES = {4e9: "8xH100", 1e11: "4x8xH100", float("inf"): "32x8xH100"}  # clusters, by the most parameters


# ---- the probe, which runs in either tree ---------------------------------------------------------------------------


def workload_of(name: str) -> Workload:
    spec = preset(name)
    cluster = Cluster.parse(next(text for most, text in SIZES.items() if spec.parameter_count <= most))
    return Workload(spec, Layout(), cluster, min(4096, spec.context), 4 * cluster.world)


def layouts(workload: Workload) -> Iterator[Layout]:
    """Legal ones, the same in either tree: a sample by the hash of their text."""
    spec, world, found = workload.spec, workload.cluster.world, {}
    degrees = product((1, 2, 8), (1, 2, 4), (1, 2), (1, 8) if spec.experts else (1,), (False, True))
    rest = list(product((0, 1, 3), ("none", "selective", "full"), ("1f1b", "interleaved", "zb-v"), ("ring", "ulysses")))
    for (tp, pp, cp, ep, sp), (zero, recompute, schedule, kind) in product(degrees, rest):
        numbers: dict[str, Any] = {"tp": tp, "pp": pp, "cp": cp, "ep": ep, "zero": zero, "microbatches": 2 * pp}
        words: dict[str, Any] = {"sp": sp, "recompute": recompute, "schedule": schedule, "cp_kind": kind}
        if (cp == 1 and kind != "ring") or (pp == 1 and schedule != "1f1b") or world % (tp * pp * cp):
            continue
        chunks = 1 if schedule == "1f1b" else 2
        layout = Layout(dp=world // (tp * pp * cp), chunks=chunks, **numbers, **words)
        if not layout.problems(spec, world=world, seq=workload.seq, batch=workload.batch):
            found[hashlib.sha256(str(layout).encode()).hexdigest()] = layout
    yield from (found[key] for key in sorted(found)[:SAMPLE])


def probe(name: str) -> dict[str, dict[str, float | str]]:
    """Figures by layout."""
    workload, rows = workload_of(name), dict[str, dict[str, float | str]]()
    for layout in layouts(workload):
        timed = replace(workload, layout=layout)
        traffic = expected_traffic(workload.spec, layout, workload.seq, workload.batch, "bfloat16")
        sent = float(sum(row.calls * row.payload for row in traffic))
        rows[str(layout)] = {"seconds": estimate(timed).seconds, "memory": footprint(timed).total, "sent": sent}
    every = space(SearchQuery(workload, {"samples": 1}))
    texts = {hashlib.sha256(str(every.layout(at)).encode()).hexdigest(): at for at in range(0, len(every), 7)}
    for key in sorted(texts)[:CLOSED]:
        at = texts[key]
        own = rows.setdefault(str(every.layout(at)), {})
        own |= {"closed seconds": float(every.seconds[at]), "closed memory": float(every.memory[at])}
    try:
        rows["search"] = {"chosen": str(search(workload, top=1).best.layout)}
    except UserError as error:
        rows["search"] = {"chosen": error.problems[0]}
    return rows


# ---- both trees -----------------------------------------------------------------------------------------------------


def probed(tree: Path, names: list[str]) -> dict[str, Any]:
    """What the code of a tree says."""
    program = f"import sys; sys.path[:0] = [{str(ROOT)!r}]; from tools import planner_unchanged as it; it.told()"
    words = [sys.executable, "-c", program, *names]
    environment = {**os.environ, "PYTHONPATH": str(tree / "src")}
    done = subprocess.run(words, cwd=tree, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    assert Path(found.pop("from")).is_relative_to(tree), "the other tree's code was imported"
    return found


def told() -> None:
    import fivefold

    print(json.dumps({"from": str(fivefold.__file__), **{name: probe(name) for name in sys.argv[1:]}}))


def differing(before: dict[str, Any], after: dict[str, Any], figure: str) -> tuple[int, float, float]:
    """How many layouts have a figure, and the least and the largest relative change among them."""
    both = [(before[at][figure], row[figure]) for at, row in after.items() if figure in row and at in before
            and figure in before[at]]  # fmt: skip
    if figure == "chosen":
        [(old, new)] = both
        return 1, 0.0, float(old != new)
    changes = [new / old - 1 if old else float(new != old) for old, new in both]
    return len(both), min(changes, default=0.0), max(changes, default=0.0)


def cell(count: int, least: float, most: float) -> str:
    if max(abs(least), abs(most)) < 1e-12:
        return "same" if count else "none"
    return f"{100 * least:+.2f}..{100 * most:+.2f}%"


def table(before: dict[str, Any], after: dict[str, Any]) -> Iterator[str]:
    yield f"{'preset':<18} {'kinds':>5} {'layouts':>7}  " + " ".join(f"{name:>17}" for name in FIGURES)
    for name, rows in after.items():
        cells = [differing(before[name], rows, figure) for figure in FIGURES]
        texts = [cell(*found) for found in cells[:-1]] + ["another" if cells[-1][2] else "same"]
        kinds = len(preset(name).counted())
        yield f"{name:<18} {kinds:>5} {cells[0][0]:>3}+{cells[3][0]:<3}  " + " ".join(f"{t:>17}" for t in texts)
        if cells[-1][2]:
            yield f"    was {before[name]['search']['chosen']}"
            yield f"    is  {rows['search']['chosen']}"


def main(commit: str, names: list[str]) -> None:
    names = names or list(PRESETS)
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder).resolve() / "before"
        subprocess.run(["git", "worktree", "add", "--detach", "-q", str(tree), commit], cwd=ROOT, check=True)
        try:
            before, after = probed(tree, names), probed(ROOT.resolve(), names)
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", str(tree)], cwd=ROOT, check=True)
    print(*table(before, after), sep="\n")


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(str(__doc__))
    main(sys.argv[1], sys.argv[2:])
