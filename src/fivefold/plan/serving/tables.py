"""A plan for serving, for a terminal."""

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from fivefold.plan.serving.sentences import BOUNDS, milliseconds, rate
from fivefold.plan.serving.serve import Option, Serving

MOST = 12  # rows of the frontier


def tables(plan: Serving) -> list[RenderableType]:
    """The choices, the way from low latency to high throughput, where a step's time goes, and why."""
    service = plan.service
    cache = {1: "fp8", 2: "bf16"}[service.cache_bytes]
    title = (
        f"{service.spec.name} on {service.cluster}: prompts of {service.prompt:,} tokens, answers of {service.output:,}"
        f", weights in {service.precision}, cache in {cache}"
    )
    rows = [("lowest latency", plan.latency), ("highest throughput", plan.throughput)]
    if plan.meeting:
        rows.insert(0, ("meets the targets", plan.meeting[0]))
    if plan.crossing:
        rows.append(("tp across nodes", plan.crossing))
    parts: list[RenderableType] = [Text(title, "bold"), _options(rows)]
    if len(plan.frontier) > 1:
        parts += ["", Text("From low latency to high throughput", "bold"), _options([("", one) for one in _thin(plan)])]
    parts += ["", Text("Where a step's time goes", "bold"), _parts(plan)]
    return [*parts, "", *(Text(sentence) for sentence in plan.explanation)]


def whole(plan: Serving) -> Group:
    """The same as one thing to print."""
    return Group(*tables(plan))


def _options(rows: list[tuple[str, Option]]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    named = any(name for name, _ in rows)
    heads = (
        "layout",
        "replicas",
        "sequences",
        "first token",
        "per token",
        "tokens/s",
        "per GPU",
        "cache GB",
        "GPU GB",
        "bound by",
    )
    for name in (*([""] if named else []), *heads):
        table.add_column(name, justify="left" if name in ("", "layout", "bound by") else "right", no_wrap=True)
    for name, one in rows:
        table.add_row(
            *([name] if named else []),
            one.layout,
            str(one.replicas),
            f"{one.replicas} x {one.batch:,}" if one.replicas > 1 else f"{one.batch:,}",
            milliseconds(one.ttft),
            milliseconds(one.token),
            rate(one.tokens_per_second),
            rate(one.per_gpu),
            f"{one.held.cache / 1e9:.1f}",
            f"{one.held.total / 1e9:.1f}",
            BOUNDS[one.bound],
        )
    return table


def _thin(plan: Serving) -> list[Option]:
    """The frontier without what lies close together."""
    every = plan.frontier
    if len(every) <= MOST:
        return list(every)
    return [every[round(at * (len(every) - 1) / (MOST - 1))] for at in range(MOST)]


def _parts(plan: Serving) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    chosen = {"lowest latency": plan.latency, "highest throughput": plan.throughput}
    table.add_column("")
    for name in chosen:
        table.add_column(name, justify="right")
        table.add_column("", justify="right")
    for field, words in BOUNDS.items():
        values = [(getattr(one.parts, field), one.step) for one in chosen.values()]
        if any(value > 0 for value, _ in values):
            table.add_row(
                words, *(cell for value, step in values for cell in (milliseconds(value), f"{value / step:.0%}"))
            )
    table.add_row("a step", *(cell for one in chosen.values() for cell in (milliseconds(one.step), "")))
    return table
