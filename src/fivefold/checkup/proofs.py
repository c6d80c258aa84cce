"""The second part: `fivefold verify` of a sample of layouts, on the devices and with the backend of these ranks."""

from typing import Any

from fivefold.checkup.course import Course, failure, figures_of
from fivefold.checkup.report import PartReport
from fivefold.support.text import plural

MOST_RANKS = 8  # of a layout that is proven
_START_S = {True: 25.0, False: 8.0}  # seconds until the first layout is proven, on a GPU and on a CPU
_LAYOUT_S = {True: 4.0, False: 2.5}  # seconds for a layout and a rank's share of a core
_FEWEST, _MOST = 2, 16  # layouts


def prove_layouts(course: Course, part: PartReport) -> None:
    """Prove a sample of layouts on each node at once, by its own ranks."""
    ranks = min(course.team.per_node, MOST_RANKS)
    sample = sample_size(course.share, ranks, course.devices.count, on_gpu=course.devices.on_gpu)
    course.tell(f"{plural(sample, 'layout')} of {plural(ranks, 'rank')}")
    ends = course.run(course.task(kind="verify", ranks=ranks, sample=sample))
    if ended := failure("verify", ends, fine=(0, 1)):
        raise ended
    layouts: list[dict[str, Any]] = []
    for node, rank in enumerate(sorted(ends), start=1):
        figures = figures_of("verify", ends[rank])
        proofs = figures.get("layouts", [figures])  # of a single layout it prints that one
        layouts += [_kept(proof) | {"node": node} for proof in proofs]
    passed = [layout for layout in layouts if layout["passed"]]
    part.data = {"ranks": ranks, "layouts": layouts}
    part.findings = [
        f"{layout['layout']} does not compute what one process computes: {layout['why']}"
        for layout in layouts
        if not layout["passed"]
    ]
    backend = "NCCL" if course.devices.on_gpu and ranks > 1 else "gloo" if ranks > 1 else "one rank"
    worst = max((layout["gradient_error"] for layout in passed if layout["gradient_error"] is not None), default=None)
    error = "" if worst is None else f"; gradients differ by {worst:.1e} at most, relative to their largest"
    part.says.append(
        f"{len(passed)} of {plural(len(layouts), 'layout')} of {plural(ranks, 'rank')} compute what one "
        f"process computes ({backend}, {layouts[0]['dtype'] if layouts else '-'}){error}"
    )
    if course.nodes > 1:
        part.says.append("each node proved them by its own ranks; over nodes, the lost rank's two runs are compared")


def sample_size(seconds: float, ranks: int, devices: int, *, on_gpu: bool) -> int:
    """How many layouts can be proven in so many seconds."""
    crowded = 1.0 if on_gpu else max(1.0, ranks / max(1, devices))
    return int(max(_FEWEST, min(_MOST, (0.7 * seconds - _START_S[on_gpu]) / (_LAYOUT_S[on_gpu] * crowded))))


def _kept(proof: dict[str, Any]) -> dict[str, Any]:
    worst = proof.get("worst_gradient") or {}
    return {
        "layout": ", ".join(filter(None, (proof["layout"], proof.get("variant", "")))),
        "model": proof.get("model", ""),
        "dtype": proof.get("dtype", ""),
        "passed": bool(proof["passed"]),
        "why": "; ".join(map(str, proof.get("problems", ())))[:400],
        "gradient_error": worst.get("error"),
        "bound": proof.get("bound"),
        "seconds": proof.get("seconds"),
    }
