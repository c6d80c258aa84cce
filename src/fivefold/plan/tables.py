"""A plan for people and for scripts: tables of rich, and plain dictionaries with the same figures."""

from typing import Any

from rich.table import Table

from fivefold.plan.cost.footprint import HEADROOM
from fivefold.plan.search.explain import CAUSES, Neighbour, traffic
from fivefold.plan.search.search import Option
from fivefold.support.formatting import si

DAY = 86_400
GB = 1e9


def to_dict(option: Option, price: float | None = None) -> dict[str, Any]:
    """Everything that the tables show."""
    case, step = option.case, option.estimate
    row: dict[str, Any] = {
        "layout": str(option.layout),
        "microbatch": case.samples,
        "step_seconds": option.seconds,
        "tokens_per_second": option.tokens_per_second,
        "tokens_per_second_per_gpu": option.tokens_per_second / option.layout.world,
        "tokens_per_day": option.tokens_per_second * DAY,
        "mfu": case.mfu(option.seconds),
        "memory_bytes": option.footprint.total,
        "memory_by_component": option.footprint.parts,
        "memory_rank": option.footprint.rank,
        "fits": option.fits,
        "time_by_cause": step.causes,
        "traffic": [moved.__dict__ for moved in traffic(option)],
    }
    if option.case.groups:
        row["groups"] = list(option.case.groups)
    if price is not None:
        row["cost_per_trillion_tokens"] = cost(option, price, 1e12)
        row["cost_per_day"] = price * 24 * option.layout.world
    return row


def cost(option: Option, price: float, tokens: float) -> float:
    """Of so many tokens, at a price per GPU and hour."""
    return price * option.layout.world * tokens / option.tokens_per_second / 3600


def ranking(options: tuple[Option, ...], chosen: Option) -> Table:
    table = Table(title="Layouts", caption=f"memory: of the fullest rank; a plan fills {HEADROOM:.0%} of a device")
    columns = ("", "layout", "microbatch", "step", "tokens/s/GPU", "MFU", "memory", "bubble", "collectives")
    for name in columns:
        table.add_column(name, justify="left" if name in ("", "layout") else "right", no_wrap=name != "layout")
    for option in options:
        causes = option.estimate.causes
        moved = sum(causes[cause] for cause in ("tp", "cp", "zero", "dp"))
        table.add_row(
            "→" if option is chosen else "",
            str(option.layout),
            str(option.case.samples),
            seconds(option.seconds),
            f"{option.tokens_per_second / option.layout.world:,.0f}",
            f"{option.case.mfu(option.seconds):.1%}",
            f"{option.footprint.total / GB:.1f} GB",
            f"{max(0.0, causes['bubble']) / option.seconds:.1%}",
            f"{moved / option.seconds:.1%}",
        )
    return table


def memory(option: Option) -> Table:
    room = option.footprint
    table = Table(title="Memory of a GPU", caption=f"on pipeline rank {room.rank}, the fullest")
    table.add_column("component")
    table.add_column("GB", justify="right")
    table.add_column("share", justify="right")
    for name, size in room.parts.items():
        if size > 0:
            table.add_row(name, f"{size / GB:.2f}", f"{size / room.total:.0%}")
    table.add_section()
    table.add_row("in all", f"{room.total / GB:.2f}", f"{room.total / option.memory:.0%} of the device")
    return table


def times(option: Option) -> Table:
    table = Table(title="Time of a step", caption="collectives: what nothing hides")
    table.add_column("cause")
    table.add_column("seconds", justify="right")
    table.add_column("share", justify="right")
    for cause, length in option.estimate.causes.items():
        if abs(length) >= 5e-4 * option.seconds:
            table.add_row(CAUSES[cause], seconds(length), f"{length / option.seconds:.1%}")
    table.add_section()
    table.add_row("in all", seconds(option.seconds), "")
    return table


def links(option: Option) -> Table:
    table = Table(
        title="What a rank sends in a step", caption="payload: bytes handed over; wire: bytes that leave a GPU"
    )
    for name in ("axis", "collective", "calls", "payload", "wire, in the node", "wire, between nodes"):
        table.add_column(name, justify="left" if name in ("axis", "collective") else "right")
    for moved in traffic(option):
        if moved.payload > 4096:
            sizes = (moved.payload, moved.inside, moved.across)
            table.add_row(moved.axis, moved.kind, f"{moved.calls:,}", *(f"{size / GB:,.2f} GB" for size in sizes))
    return table


def summary(option: Option, price: float | None) -> str:
    case = option.case
    text = (
        f"{option.layout}: {seconds(option.seconds)} a step of {si(case.batch * case.seq)} tokens, "
        f"{si(option.tokens_per_second)} tokens/s, {si(option.tokens_per_second * DAY)} a day, "
        f"MFU {case.mfu(option.seconds):.1%} (attention counted full; {case.mfu(option.seconds, 'causal'):.1%} causal)"
    )
    if price is not None:
        text += f"; ${price * 24 * option.layout.world:,.0f} a day, ${cost(option, price, 1e12):,.0f} for 1T tokens"
    return text


def reasons(found: list[Neighbour]) -> list[str]:
    """The neighbours that lose, the nearest first; then those that do not fit or cannot run."""
    timed = sorted((one for one in found if one.slower is not None), key=lambda one: one.slower or 0.0)
    return [one.sentence for one in (*timed, *(one for one in found if one.slower is None))]


def seconds(length: float) -> str:
    return f"{length:.2f} s" if length >= 1 else f"{1e3 * length:.1f} ms"
