"""`plan -o decision.md`: the question, the layout, its math with numbers filled in, its neighbours, its turning points.

decide(plan("llama3-70b", "8x8xH100")).markdown()

Every figure is one of the plan's own; only what would change the decision is planned again.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from msgspec import structs

from fivefold.cost.peak_memory import USABLE_FRACTION
from fivefold.cost.step import Workload
from fivefold.hardware.accelerators import Accelerator
from fivefold.hardware.cluster import Cluster
from fivefold.layout.layout import Layout
from fivefold.planner.error_range import IN_WORDS
from fivefold.planner.explain import CAUSE_NAMES, EQUAL_TIME, RANKS_BY, Neighbour, difference, simplest
from fivefold.planner.option import Option, evaluate
from fivefold.planner.pictures import fastest_first
from fivefold.planner.result import PlanResult, figures
from fivefold.planner.search import SURVIVORS, By, search
from fivefold.planner.textbook_formulas import Shortcut, shortcuts
from fivefold.planner.training import DAY
from fivefold.render.blocks import Block, Result, Table, Text
from fivefold.render.html import Section, to_markdown, to_page
from fivefold.support.errors import UserError
from fivefold.support.text import plural, si

# ---- turning --------------------------------------------------------------------------------------------------------
# What would change a decision: memory, batch and links at which another layout is chosen, found by planning again.


QUANTITY_FACTORS = (0.5, 2.0)
BISECTION_STEPS = 2  # of the interval in which the choice changes
Progress = Callable[[int, int, str], None]


class Quantity(NamedTuple):
    """A number of the question that is varied: `change` multiplies it in a workload, and `read` returns it."""

    name: str
    unit: str
    read: Callable[[Workload], float]
    change: Callable[[Workload, float], Workload]


@dataclass(frozen=True)
class TurningPoint:
    """The choice stays the same up to `holds`, and is another at `turns`; None: it never changed."""

    name: str
    unit: str
    value: float  # as it was asked
    holds: float
    turns: float | None
    choice: str = ""  # the layout there; empty: nothing fits
    why: str = ""

    def to_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("name", "unit", "value", "holds", "turns", "choice", "why")}


def quantities(workload: Workload) -> list[Quantity]:
    """For mixed nodes only the memory, since they have no common link."""
    quantities = [
        Quantity("memory of a device", "GB", lambda workload: _accelerator(workload).memory / 1e9, _scale_memory)
    ]
    if not workload.cluster.groups[1:]:
        where = "between nodes" if workload.cluster.nodes > 1 else "within the node"
        if workload.cluster.world > 1:
            quantities.append(Quantity(f"link {where}", "GB/s", _link_gb_per_s, _scale_link))
        quantities.append(Quantity("batch", "sequences", lambda workload: workload.batch, _scale_batch))
    return quantities


def _accelerator(workload: Workload) -> Accelerator:
    return workload.cluster.groups[0].accelerator


def _link_gb_per_s(workload: Workload) -> float:
    return float(getattr(_accelerator(workload), _narrowest_link(workload)).bandwidth / 1e9)


def _narrowest_link(workload: Workload) -> str:
    """The link that is the narrowest."""
    return "across" if workload.cluster.nodes > 1 else "inside"


class OpenWorkload(NamedTuple):
    """The question behind a choice: a workload whose layout is open, the ranking, and the fixed fields."""

    workload: Workload
    by: By
    fixed: dict[str, Any]

    def choice(self, workload: Workload) -> Option | None:
        """What `plan` chooses; None if nothing fits."""
        try:
            result = search(workload, self.by, SURVIVORS if self.by == "throughput" else 1, **self.fixed)
        except UserError:
            return None
        return simplest(result.options) if self.by == "throughput" else result.best


def turning_points(chosen: Option, question: OpenWorkload, progress: Progress | None = None) -> Iterator[TurningPoint]:
    """Halves and doubles each quantity; if the choice changes, bisects to about where."""
    workload = question.workload
    changes = [(quantity, factor) for quantity in quantities(workload) for factor in QUANTITY_FACTORS]
    for done, (quantity, factor) in enumerate(changes):
        if progress:
            progress(done, len(changes), f"{quantity.name} x {factor:g}")
        yield _turning_point(chosen, question, quantity, factor)


def _turning_point(chosen: Option, question: OpenWorkload, quantity: Quantity, factor: float) -> TurningPoint:
    def at(factor: float) -> float:
        return quantity.read(quantity.change(question.workload, factor))

    changed = question.choice(quantity.change(question.workload, factor))
    if not _differs(chosen.layout, changed):
        return TurningPoint(quantity.name, quantity.unit, at(1.0), at(factor), None)
    holds, turned = 1.0, factor
    for _ in range(BISECTION_STEPS):
        middle = math.sqrt(holds * turned)
        choice_at_middle = question.choice(quantity.change(question.workload, middle))
        if _differs(chosen.layout, choice_at_middle):
            turned, changed = middle, choice_at_middle
        else:
            holds = middle
    why = "" if changed is None else _compare_with_staying(chosen, changed)
    choice = str(changed.layout) if changed else ""
    return TurningPoint(quantity.name, quantity.unit, at(1.0), at(holds), at(turned), choice, why)


def _differs(layout: Layout, other: Option | None) -> bool:
    """Whether it differs in more than its microbatches."""
    if other is None:
        return True
    return structs.replace(layout, microbatches=1) != structs.replace(other.layout, microbatches=1)


def _compare_with_staying(chosen: Option, other: Option) -> str:
    """How the present choice would do at the turning point."""
    workload, layout = other.workload, chosen.layout
    rows = workload.batch // layout.dp // chosen.workload.samples  # microbatches of the size of now
    if rows and workload.batch == rows * layout.dp * chosen.workload.samples:
        layout = structs.replace(layout, microbatches=rows)
    if layout.problems(
        workload.spec, world=workload.cluster.world, seq=workload.seq, batch=workload.batch, ranks_by=RANKS_BY
    ):
        return f"{layout} does not divide it"
    if chosen.workload.groups:
        return ""
    stays = evaluate(replace(workload, layout=layout))
    if not stays.fits:
        return f"{layout} does not fit there: it needs {stays.footprint.total / 1e9:.1f} GB"
    little = abs(other.seconds / stays.seconds - 1) < EQUAL_TIME
    noise = ", and so little is within the noise of measured runs" if little else ""
    return f"against staying it {difference(stays, other)}{noise}"


def _scale_memory(workload: Workload, factor: float) -> Workload:
    def changed(card: Accelerator) -> Accelerator:
        return structs.replace(card, memory=int(card.memory * factor))

    return _with_accelerators(workload, changed)


def _scale_link(workload: Workload, factor: float) -> Workload:
    which = _narrowest_link(workload)

    def changed(card: Accelerator) -> Accelerator:
        link = getattr(card, which)
        return structs.replace(card, **{which: structs.replace(link, bandwidth=link.bandwidth * factor)})

    return _with_accelerators(workload, changed)


def _scale_batch(workload: Workload, factor: float) -> Workload:
    """Keeps the batch a multiple of the devices, if it was one."""
    unit = math.gcd(workload.batch, workload.cluster.world)
    return replace(workload, batch=max(unit, round(workload.batch * factor / unit) * unit))


def _with_accelerators(workload: Workload, changed: Callable[[Accelerator], Accelerator]) -> Workload:
    groups = tuple(structs.replace(group, accelerator=changed(group.accelerator)) for group in workload.cluster.groups)
    return replace(workload, cluster=Cluster(groups))


# ---- decision -------------------------------------------------------------------------------------------------------


GB = 1e9
MIN_SHOWN_BYTES = 4096  # a smaller payload has no row
NEGLIGIBLE_ERROR = 0.01  # between a shortcut and the exact figure
NEGLIGIBLE_TIME = 5e-4  # of a step: a shorter cause has no row


@dataclass(frozen=True)
class Decision(Result):
    plan: PlanResult
    shortcuts: tuple[Shortcut, ...]
    turns: tuple[TurningPoint, ...]
    command: str = ""  # that made it

    @property
    def title(self) -> str:
        return f"The layout of {self.plan.workload.spec.name} on {self.plan.workload.cluster}"

    @property
    def figures(self) -> dict[str, Any]:
        """What `plan --json` says of the layout."""
        return figures(self.plan.explained, self.plan.price)

    def to_dict(self) -> dict[str, Any]:
        return self.plan.to_dict() | {
            "shortcuts": [shortcut.to_dict() for shortcut in self.shortcuts],
            "turns": [turn.to_dict() for turn in self.turns],
        }

    def blocks(self) -> Iterator[Block]:
        for section in self.sections():
            yield Text(f"\n{section.title}", "bold")
            yield from section.blocks

    def markdown(self) -> str:
        return to_markdown(self.title, self.sections())

    def html(self) -> str:
        """The same as a self-contained page, with pictures."""
        plan = self.plan
        pictures = {"Memory": plan.drawn("memory"), "Traffic": plan.drawn("traffic"), "Time": plan.scene()}
        return to_page(self.title, self.sections(), pictures)

    def sections(self) -> list[Section]:
        return [
            Section("The question", [*self._question()]),
            Section("The decision", [*self._decision()]),
            Section("Memory", [*self._memory()]),
            Section("Traffic", [*self._traffic()]),
            Section("Time", [*self._time()]),
            Section("Beside the textbook", [*self._textbook()]),
            Section("Layouts one change away", [*self._neighbours()]),
            Section("What would change the decision", [*self._turning()]),
        ]

    # ---- sections ----------------------------------------------------------------------------------------------------

    def _question(self) -> Iterator[Block]:
        workload = self.plan.workload
        spec, group = workload.spec, workload.cluster.groups[0]
        card = group.accelerator
        experts = f", {si(spec.active_parameters, 4)} of them active for a token" if spec.experts else ""
        sizes = f"{workload.batch:,} sequences of {workload.seq:,} tokens"
        yield Text(
            f"Which layout trains {spec.name} ({si(spec.parameter_count, 4)} parameters{experts}; {spec.layers} layers,"
            f" hidden {spec.hidden:,}) on {workload.cluster} with {sizes} a step "
            f"({si(workload.batch * workload.seq)} tokens), in {workload.precision}, with the kernels and the overlap "
            f"of {workload.software.name}?"
        )
        rows = [
            ("devices", f"{workload.cluster.world:,} on {plural(workload.cluster.nodes, 'node')}"),
            ("memory of a device", f"{card.memory / GB:.1f} GB; a plan fills {USABLE_FRACTION:.0%}"),
            ("link within a node", f"{card.inside.name}, {card.inside.bandwidth / GB:.4g} GB/s each way"),
            ("link between nodes", f"{card.across.name}, {card.across.bandwidth / GB:.4g} GB/s each way"),
            (f"peak in {workload.precision}", f"{_rate(card.rate(workload.precision) / 1e12)} TFLOP/s"),
        ]
        yield Table(["", f"{card.name}, {'nominal' if card.is_cpu else 'by its maker'}"], rows)
        if self.command:
            yield Text(f"This page is made by `{self.command}`.")

    def _decision(self) -> Iterator[Block]:
        plan, option, numbers = self.plan, self.plan.explained, self.figures
        yield Text(f"`{option.layout}`")
        whose = "It was given" if plan.given else "It is the planner's choice"
        yield Text(f"{whose}; {plan.evaluated:,} layouts were evaluated, and {plan.fitting:,} of them fit.")
        if not option.fits:
            yield Text(f"It does not fit: {option.footprint.total / GB:.1f} GB of {option.limit / GB:.1f}.")
        ranges = {key: numbers[f"{key}_range"] for key in ("step_seconds", "tokens_per_second", "mfu", "memory_bytes")}

        def row(name: str, key: str, text: Any) -> tuple[str, str, str]:
            low_high = ranges[key]
            return name, text(numbers[key]), " to ".join(map(text, low_high)) if low_high else "not known"

        rows = [
            row("time of a step", "step_seconds", _seconds),
            row("tokens per second", "tokens_per_second", si),
            row("MFU", "mfu", "{:.1%}".format),
            row("memory of the fullest rank", "memory_bytes", _gigabytes),
        ]
        yield Table(["", ">predicted", f">{IN_WORDS}"], rows)
        cost = f", and costs ${numbers['cost_per_day']:,.0f}" if plan.price is not None else ""
        yield Text(f"At this rate a day has {si(option.tokens_per_second * DAY)} tokens{cost}.")
        if plan.given:
            yield Text(f"The planner's choice, `{plan.chosen.layout}`, {difference(plan.given, plan.chosen)}.")
        elif plan.chosen is not plan.options[0]:
            fastest = plan.options[0]
            faster = 1 - fastest.seconds / plan.chosen.seconds
            yield Text(f"`{fastest.layout}` is {faster:.1%} faster, and the choice is simpler.")

    def _memory(self) -> Iterator[Block]:
        numbers, option = self.figures, self.plan.explained
        parts, total = numbers["memory_by_component"], numbers["memory_bytes"]
        rows = [(name, _gigabytes(size), f"{size / total:.1%}") for name, size in parts.items() if size > 0]
        left = option.limit - total
        totals = [("total", _gigabytes(total), ""), ("a plan's limit", _gigabytes(option.limit), "")]
        yield Table(["component", ">of a rank", ">share"], rows, totals=totals)
        room = f"{left / GB:.1f} GB are left below the limit" if left >= 0 else f"{-left / GB:.1f} GB too many"
        yield Text(f"The fullest is pipeline rank {numbers['memory_rank']}; {room}.")

    def _traffic(self) -> Iterator[Block]:
        rows = [
            (
                row["axis"], row["kind"], f"{row['calls']:,}", _size(row["payload"]), _size(row["inside"]),
                _size(row["across"]), "" if row["seconds"] is None else _seconds(row["seconds"]),
            )
            for row in self.figures["traffic"]
            if row["payload"] > MIN_SHOWN_BYTES
        ]  # fmt: skip
        if not rows:
            yield Text("A rank sends nothing that counts.")
            return
        rank = self.figures["traffic_rank"]
        who = f"a rank of pipeline rank {rank}" if rank else "the first rank"
        heads = ["axis", "collective", ">calls", ">payload", ">in node", ">between", ">alone"]
        yield Table(
            heads,
            rows,
            caption=f"What {who} sends in a step. Payload: bytes handed to the collectives. In node, between "
            "(nodes): bytes on the wire. Alone: seconds, one call after the other, if no compute hid them.",
        )

    def _time(self) -> Iterator[Block]:
        numbers = self.figures
        step = numbers["step_seconds"]
        rows = [
            (CAUSE_NAMES[cause], _seconds(length), f"{length / step:.1%}")
            for cause, length in numbers["time_by_cause"].items()
            if abs(length) >= NEGLIGIBLE_TIME * step
        ]
        yield Table(
            ["cause", ">time", ">share"], rows, totals=[("step", _seconds(step), "")],
            caption="Collectives and communication: what compute does not hide.",
        )  # fmt: skip

    def _textbook(self) -> Iterator[Block]:
        rows = [
            (
                shortcut.name,
                shortcut.said(shortcut.textbook),
                shortcut.said(shortcut.exact),
                _times(shortcut.exact, shortcut.textbook),
            )
            for shortcut in self.shortcuts
        ]
        yield Table(["", ">shortcut", ">exact", ">exact / shortcut"], rows)
        yield Text("\n".join(map(_shortcut_text, self.shortcuts)))
        yield Text(
            "P parameters, B sequences of a microbatch and S of its tokens on a rank, H hidden, L layers, m "
            "microbatches, N ranks that ZeRO shards over, t, p and e the degrees of tp, pp and ep, v stages of a rank, "
            "K experts of a token, a attention heads; 2 bytes a number. Sources: arXiv 1910.02054 (state, 2M, 3M), "
            "2205.05198 (activations), 1909.08053 (tp)."
        )

    def _neighbours(self) -> Iterator[Block]:
        ordered = fastest_first(self.plan.neighbours)
        rows = [
            (one.change, _change_text(one), "" if one.memory is None else _gigabytes(one.memory))
            for one in ordered
        ]  # fmt: skip
        yield Table(["change", ">time", ">memory"], rows)
        yield Text("\n".join(f"- {neighbour.sentence}" for neighbour in ordered))

    def _turning(self) -> Iterator[Block]:
        plan = self.plan
        if plan.explained.fits:
            least = plan.explained.footprint.total / USABLE_FRACTION / GB
            yield Text(
                f"`{plan.layout}` needs devices of {least:.1f} GB; with less memory it takes more microbatches, or "
                "does not fit at all."
            )
        yield Text(
            "Planned again with half and with twice as much of each, the choice "
            f"(`{plan.chosen.layout}`, microbatches apart):"
        )
        rows = [
            (
                turn.name,
                f"{turn.value:.4g} {turn.unit}",
                f"{turn.holds:.4g}",
                f"{turn.turns:.4g}" if turn.turns else "no other",
            )
            for turn in self.turns
        ]
        yield Table(["", ">now", ">holds up to", ">is another at"], rows)
        changes = [turn for turn in self.turns if turn.turns is not None]
        lines = [f"- {turn.name} {turn.turns:.4g} {turn.unit}: {_turning_text(turn)}" for turn in changes]
        yield Text("\n".join(lines) or "Nothing of this changes it.")


def decide(plan: PlanResult, command: str = "", progress: Progress | None = None) -> Decision:
    """The decision for a plan's layout. Planning again takes a dozen searches; `progress` hears of them."""
    question = OpenWorkload(plan.workload, plan.by, plan.fixed)
    changed = tuple(turning_points(plan.chosen, question, progress))
    return Decision(plan, tuple(shortcuts(plan.explained)), changed, command)


def _shortcut_text(shortcut: Shortcut) -> str:
    near = shortcut.textbook and abs(shortcut.exact / shortcut.textbook - 1) < NEGLIGIBLE_ERROR
    return f"- {shortcut.name}: {shortcut.formula}. {'Alike' if near else 'Why they differ'}: {shortcut.why}."


def _turning_text(turn: TurningPoint) -> str:
    if not turn.choice:
        return "nothing fits"
    return f"`{turn.choice}`" + (f"; {turn.why}" if turn.why else "")


def _change_text(neighbour: Neighbour) -> str:
    if neighbour.slower is not None:
        return f"{neighbour.slower:+.1%}"
    return "cannot run" if neighbour.memory is None else "does not fit"


def _rate(tera: float) -> str:
    return f"{tera:,.0f}" if tera >= 10 else f"{tera:.3g}"


def _times(exact: float, textbook: float) -> str:
    return f"{exact / textbook:.2f}" if textbook else ""


def _size(size: float) -> str:
    """Four digits."""
    for unit, name in ((1e12, "TB"), (GB, "GB"), (1e6, "MB"), (1e3, "KB")):
        if size >= 0.99995 * unit:
            return f"{size / unit:.4g} {name}"
    return f"{size:.4g} B"


def _gigabytes(size: float) -> str:
    """Two decimals; of what would be 0.00 GB the megabytes."""
    return f"{size / GB:,.2f} GB" if size >= GB / 200 or not size else f"{size / 1e6:.3g} MB"


def _seconds(length: float) -> str:
    return f"{length:.2f} s" if length >= 1 else f"{1e3 * length:.3g} ms"
