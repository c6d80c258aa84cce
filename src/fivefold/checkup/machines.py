"""The first part: `fivefold doctor` on all ranks."""

from typing import Any

from fivefold.checkup.course import Course, failure, figures_of
from fivefold.checkup.report import PartReport
from fivefold.machines.judge import flops_text, rate_text
from fivefold.support.text import plural


def examine_machines(course: Course, part: PartReport) -> None:
    """Examine ranks, nodes and links. On several nodes cp lies within a node and dp across, so that both are timed."""
    inside = course.team.per_node if course.nodes > 1 else 1
    layout = f"cp={inside},dp={course.team.size // inside}" if inside > 1 else f"dp={course.team.size}"
    ends = course.run(course.task(kind="doctor", layout=layout))
    if ended := failure("doctor", {0: ends[0]}, fine=(0, 1)) or failure("doctor", ends, fine=(0, 1)):
        raise ended
    figures = figures_of("doctor", ends[0])
    course.hosts = list(dict.fromkeys(rank["node"] for rank in figures["ranks"]))
    part.data, part.findings = _kept(figures), list(figures["findings"])
    rates = [rank["rate"] for rank in figures["ranks"]]
    names = sorted({rank["device"] for rank in figures["ranks"]})
    part.says.append(
        f"{plural(len(rates), 'rank')} on {plural(len(course.hosts), 'node')}: {', '.join(names)}; matmuls reach "
        f"{flops_text(min(rates))} to {flops_text(max(rates))} in {figures['ranks'][0]['precision']}"
    )
    for axis, link in part.data["links"].items():
        where = "within a node" if axis == "cp" or course.nodes == 1 else "between nodes"
        part.says.append(
            f"links {where}: all-reduce at {rate_text(link['reduce'])}, a message at "
            f"{rate_text(link['send']) if link['send'] else '-'}, "
            f"latency {1e6 * link['latency']:.0f} us (slowest group)"
        )


def _kept(figures: dict[str, Any]) -> dict[str, Any]:
    """The figures without names of hosts and devices' serial numbers: ranks by number, nodes by number."""
    numbers: dict[str, int] = {}
    ranks = []
    for rank in figures["ranks"]:
        node = numbers.setdefault(rank["node"], len(numbers) + 1)
        kept = {name: rank.get(name) for name in ("rank", "device", "rate", "precision", "versions", "ahead")}
        ranks.append(kept | {"node": node, "disk": rank.get("disk"), "gpu": rank.get("gpu")})
    links: dict[str, dict[str, float]] = {}
    for rank in figures["ranks"]:
        for ring in rank.get("rings", ()):
            of_axis = links.setdefault(
                ring["axis"], {"latency": 0.0, "reduce": ring["reduce"], "gather": ring["gather"], "send": 0.0}
            )
            of_axis["latency"] = max(of_axis["latency"], ring["latency"])
            of_axis["reduce"] = min(of_axis["reduce"], ring["reduce"])
            of_axis["gather"] = min(of_axis["gather"], ring["gather"])
    for rank in figures["ranks"]:
        for send in rank.get("sends", ()):
            of_axis = links[send["axis"]]
            of_axis["send"] = min(of_axis["send"] or send["bandwidth"], send["bandwidth"])
    return {"ranks": ranks, "links": links, "expected": figures["expected"], "layout": figures["layout"]}
