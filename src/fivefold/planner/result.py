"""What `plan` and `simulate` found: tables and sentences for people, the same figures as JSON."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from fivefold.cost.moe import IMBALANCE, IMBALANCE_SOURCE, imbalance_caveat
from fivefold.cost.peak_memory import USABLE_FRACTION
from fivefold.cost.step import Workload
from fivefold.job.config import Job
from fivefold.layout.layout import Layout
from fivefold.planner.error_range import COVERAGE, IN_WORDS, bands, memory_range, step_range
from fivefold.planner.explain import CAUSE_NAMES, EQUAL_TIME, Neighbour, difference, traffic, traffic_rank
from fivefold.planner.goodput import days_text
from fivefold.planner.mesh_picture import MeshResult
from fivefold.planner.option import Option
from fivefold.planner.pictures import fastest_first, memory, overview, sent
from fivefold.planner.search import By
from fivefold.planner.training import DAY, GB, Training
from fivefold.render.blocks import Block, Cell, Drawing, Result, Table, Text
from fivefold.render.scene import Scene
from fivefold.schedules.draw import picture
from fivefold.schedules.simulate import Simulation, simulate
from fivefold.schedules.terminal import LEFT_OUT, legend, timeline
from fivefold.support.errors import UserError
from fivefold.support.text import si

MAX_DRAWN_PASSES = 1024  # passes of a pipeline that a terminal can show
NEGLIGIBLE = 5e-4  # of a step: a shorter cause has no row
MIN_SHOWN_BYTES = 4096  # a smaller payload has no row


@dataclass(frozen=True)
class PlanResult(Result):
    """The best layouts, the one to take, and the reasons. `explained` is the given layout, or else the chosen one."""

    workload: Workload  # what was asked; its layout is open
    options: tuple[Option, ...]  # the best first
    chosen: Option  # the simplest of those that are about as fast
    given: Option | None
    evaluated: int  # combinations of choices
    fitting: int  # of them
    neighbours: tuple[Neighbour, ...]  # of the explained layout
    hint: str  # about a better batch, if there is one
    price: float | None  # dollars per device and hour
    training: Training
    by: By = "throughput"
    fixed: dict[str, Any] = field(default_factory=dict)  # choices that were not free
    batch_from: str = ""  # where the batch is from that nobody gave
    unsearched: str = ""  # why there is no choice beside the given layout, which then stands in its place
    nearest: Neighbour | None = None  # where the given layout does not fit: what does, if anything

    @property
    def ok(self) -> bool:  # type: ignore[override]
        return self.given is None or self.given.fits

    @property
    def step(self) -> "SimulateResult":
        """One step of the explained layout."""
        return SimulateResult(self.explained, self.nearest)

    @property
    def explained(self) -> Option:
        return self.given or self.chosen

    @property
    def layout(self) -> Layout:
        return self.explained.layout

    @property
    def job(self) -> Job:
        """The explained layout as a job that `fivefold train` runs: a recipe's, or the job file's own settings."""
        return self.training.job(self.explained)

    def to_dict(self) -> dict[str, Any]:
        shown = {
            "model": self.workload.spec.name,
            "cluster": str(self.workload.cluster),
            "batch": self.workload.batch,
            "seq": self.workload.seq,
            "software": self.workload.software.name,
            "weighed": self.evaluated,
            "fitting": self.fitting,
            "training": self.training.figures(self.explained, self.price),
            "best": figures(self.chosen, self.price),
            "options": [figures(option, self.price) for option in self.options],
            "neighbours": [neighbour.to_dict() for neighbour in self.neighbours],
        }
        if self.given is None:
            return shown
        return shown | {"layout": simulation_figures(self.given, self.price) | {"advice": self.step.advice or None}}

    def scene(self) -> Scene:
        return overview(self.explained)

    def drawn(self, name: str) -> Scene:
        """The picture that a file's name asks for: memory, traffic, the mesh, the step's timeline; else an overview."""
        for word, scene in PICTURES.items():
            if word in name.lower():
                return scene(self)
        return self.scene()

    def blocks(self) -> Iterator[Block]:
        workload, options, option = self.workload, self.options, self.explained
        yield Text(
            f"{workload.spec.name} ({si(workload.spec.parameter_count, 4)} parameters) on {workload.cluster}: "
            f"{workload.batch} sequences of {workload.seq:,} tokens per step, {workload.precision}, "
            f"{workload.software.name}; "
            + ("one layout" if self.unsearched else f"{self.evaluated:,} layouts evaluated, {self.fitting:,} fit")
        )
        if self.batch_from:
            yield Text(self.batch_from)
        if advice := self.given and self.step.advice:
            yield Text(f"{advice}; what follows is the step of a device with more memory", "bad")
        if not self.unsearched:
            yield _ranking(options if self.chosen in options else (*options, self.chosen), self.chosen)
        if self.chosen is not options[0] and self.given is None:
            faster = 1 - options[0].seconds / self.chosen.seconds
            over = options[0].workload.topology.across("tp") and not self.chosen.workload.topology.across("tp")
            why = "but has tp over the network, which no measured run has" if over and faster > EQUAL_TIME else ""
            yield Text(
                f"{options[0].layout} is {faster:.1%} faster, "
                f"{why or 'which is within the noise of measured runs'}; {self.chosen.layout} is simpler"
            )
        yield Text(f"\n{_summary(option, self.price)}", "bold")
        yield from _experts(option)
        yield Text(self.training.sentence(option, self.price))
        yield Text(_range_sentence(option, self.training.steps))
        if self.training.said:
            yield Text(self.training.failing(option))
        if option.workload.groups:
            yield Text(f"{_stages(option)}; hosts are numbered as in {self.training.hosts(option)}")
        yield from (_times(option), _memory(option), _traffic(option))
        if self.given:
            yield from self.step.timeline()
            if self.unsearched:
                yield Text(f"\nno layout to compare it with: {self.unsearched}")
            else:
                yield Text(f"\nthe planner's choice, {self.chosen.layout}, {difference(self.given, self.chosen)}")
        if self.hint:
            yield Text(self.hint)
        ordered = fastest_first(self.neighbours)
        rows = [(neighbour.change, neighbour.sentence.removeprefix(neighbour.change).lstrip()) for neighbour in ordered]
        yield Table(["change", "~what it does"], rows, title="Layouts one change away")
        if self.training.said:
            yield self.training.table(option)


@dataclass(frozen=True)
class SimulateResult(Result):
    """One step of a layout, with its timeline where there are several pipeline stages."""

    option: Option
    nearest: Neighbour | None = None  # where it does not fit: what does, if anything

    @property
    def ok(self) -> bool:  # type: ignore[override]
        return self.option.fits

    @property
    def advice(self) -> str:
        """Where it does not fit: by how much, and what would; else empty."""
        if self.option.fits:
            return ""
        near = self.nearest
        way_out = f"nearest: --layout {near.layout} ({near.slower:+.1%} time)" if near else "nor does any other layout"
        return f"{too_large(self.option)}; {way_out}"

    @property
    def simulation(self) -> Simulation | None:
        return self.option.estimate.simulation

    def to_dict(self) -> dict[str, Any]:
        return simulation_figures(self.option) | {"advice": self.advice or None}

    def scene(self) -> Scene | None:
        """Of the whole step: its simulation may leave out what repeats itself."""
        if self.simulation is None:
            return None
        full_step = self.simulation
        if self._left_out:
            full_step = simulate(self.option.workload.schedule(self.option.layout.microbatches), full_step.costs)
        return picture([full_step], clock="seconds")

    @property
    def _left_out(self) -> int:
        """Microbatches of the step that its simulation goes without."""
        return self.option.layout.microbatches - self.simulation.schedule.m if self.simulation else 0

    def blocks(self) -> Iterator[Block]:
        if advice := self.advice:
            yield Text(f"{advice}; what follows is the step of a device with more memory\n", "bad")
        yield Text(_summary(self.option), "bold")
        yield from _experts(self.option)
        yield Text(_range_sentence(self.option))
        if self.option.workload.groups:
            yield Text(_stages(self.option))
        yield from (_times(self.option), _memory(self.option))
        yield from self.timeline()

    def timeline(self) -> Iterator[Block]:
        """Who computes what when, where the pipeline has several stages."""
        if simulation := self.simulation:
            estimate, microbatches = self.option.estimate, f"{self.option.layout.microbatches} microbatches"
            if simulation.schedule.m * simulation.schedule.p <= MAX_DRAWN_PASSES:
                yield Drawing(
                    lambda columns, colour: timeline(simulation, columns, colour=colour, left_out=self._left_out)
                )
                yield Drawing(lambda _, colour: legend([simulation], colour=colour))
                if self._left_out:
                    yield Text(
                        f"{LEFT_OUT}: {self._left_out} of {microbatches} are left out; they repeat what is beside them"
                    )
            bubble = f"bubble {estimate.bubble:.1%} of the {estimate.pipeline:.3g} s"
            yield Text(f"{bubble} in which the pipeline does {microbatches}")


def simulation_figures(option: Option, price: float | None = None) -> dict[str, Any]:
    """The figures of a given layout, without advice."""
    return figures(option, price) | {"memory_limit_bytes": option.limit}


def _mesh(plan: PlanResult) -> Scene:
    return MeshResult(plan.layout, plan.workload.cluster).scene() or plan.scene()


def _step(plan: PlanResult) -> Scene:
    if (scene := plan.step.scene()) is None:
        raise UserError(
            f"{plan.layout} has one pipeline stage, and so no timeline to draw; give pp=2 or more", "picture.empty"
        )
    return scene


# By a word in the file's name.
PICTURES: dict[str, Callable[[PlanResult], Scene]] = {
    "memory": lambda plan: memory(plan.explained, plan.neighbours),
    "traffic": lambda plan: sent(plan.explained),
    "mesh": _mesh,
    "step": _step,
}


def figures(option: Option, price: float | None = None) -> dict[str, Any]:
    """Everything that the tables show, as plain data."""
    workload, footprint = option.workload, option.footprint
    row: dict[str, Any] = {
        "layout": str(option.layout),
        "microbatch": workload.samples,
        "step_seconds": option.seconds,
        "tokens_per_second": option.tokens_per_second,
        "tokens_per_second_per_gpu": option.tokens_per_second / option.layout.world,
        "tokens_per_day": option.tokens_per_second * DAY,
        "mfu": workload.mfu(option.seconds),
        **_ranges(option),
        "memory_bytes": footprint.total,
        "memory_by_component": footprint.parts,
        "memory_rank": footprint.rank,
        "fits": option.fits,
        "time_by_cause": option.estimate.causes,
        "traffic_rank": traffic_rank(option),
        "traffic": [moved._asdict() for moved in traffic(option)],
    }
    if workload.spec.experts is not None:
        row["imbalance"] = workload.imbalance
        total, shared, paired = option.estimate.expert_messages
        row["experts_messages"] = {"seconds": total, "hidden_by_shared": shared, "hidden_by_pairs": paired}
    if workload.groups:
        row["groups"] = list(workload.groups)
        row["order"] = str(workload.cluster)
    if price is not None:
        row["cost_per_trillion_tokens"] = price * option.layout.world * 1e12 / option.tokens_per_second / 3600
        row["cost_per_day"] = price * 24 * option.layout.world
    return row


def _ranges(option: Option) -> dict[str, Any]:
    """Where the numbers should lie in `range_share` of all cases; null where nothing is known of the device."""
    workload, interval = option.workload, step_range(option.workload)
    allocated = option.footprint.allocated
    return {
        "range_share": COVERAGE,
        "step_seconds_range": interval and interval.around(option.seconds),
        "tokens_per_second_range": interval and interval.inverse(option.tokens_per_second),
        "mfu_range": interval and interval.inverse(workload.mfu(option.seconds)),
        "memory_bytes_range": [option.footprint.total - allocated + size for size in memory_range().around(allocated)],
    }


def _range_sentence(option: Option, steps: int | None = None) -> str:
    """What the step, its rates and a run of so many steps may be."""
    interval = step_range(option.workload)
    if interval is None:
        return "no range: what this CPU reaches is assumed; `fivefold calibrate --device cpu -o mine.toml` measures it"
    low, high = interval.around(option.seconds)
    unit, size = ("s", 1.0) if low >= 1 else ("ms", 1e-3)
    times = interval.text(option.seconds / size)
    rates = " to ".join(map(si, interval.inverse(option.tokens_per_second)))
    shares = " to ".join(f"{share:.1%}" for share in interval.inverse(option.workload.mfu(option.seconds)))
    text = f"{IN_WORDS}: {times} {unit} per step, {rates} tokens/s, MFU {shares}"
    if steps is not None:
        text += f", {' to '.join(days_text(steps * seconds / DAY) for seconds in (low, high))}"
    return f"{text} (`fivefold accuracy --coverage`)"


def _device(option: Option) -> str:
    """What a rank runs on: a CPU plan does not speak of GPUs."""
    return "CPU rank" if option.workload.first_device.accelerator.is_cpu else "GPU"


def _stages(option: Option) -> str:
    """Where the stages of a pipeline over mixed nodes are."""
    workload, names = option.workload, [group.accelerator.name for group in option.workload.cluster.groups]
    ranks = ", then ".join(f"{workload.groups.count(at)} on {name}" for at, name in enumerate(names))
    layers = ",".join(str(len(stage.layers)) for stage in workload.stages)
    made_for_them = f"; {option.layout.schedule} is made for them" if workload.layout.record.uses_stage_times else ""
    return f"pipeline ranks in order: {ranks}; layers of the stages: {layers}{made_for_them}"


def _ranking(options: tuple[Option, ...], chosen: Option) -> Table:
    rows: list[list[str | Cell]] = []
    for option in options:
        causes, seconds = option.estimate.causes, option.seconds
        exposed = sum(causes[cause] for cause in ("tp", "cp", "zero", "ep", "dp"))
        cells = (
            str(option.layout),
            str(option.workload.samples),
            _seconds(seconds),
            f"{option.tokens_per_second / option.layout.world:,.0f}",
            f"{option.workload.mfu(seconds):.1%}",
            f"{option.footprint.total / GB:.1f}",
            f"{max(0.0, causes['bubble']) / seconds:.1%}",
            f"{exposed / seconds:.1%}",
        )
        rows.append([Cell("→", "bold"), *(Cell(cell, "bold") for cell in cells)] if option is chosen else ["", *cells])
    per_device = f">tok/s per {_device(chosen)}"
    return Table(
        ["", "~layout", ">micro batch", ">step", per_device, ">MFU", ">memory GB", ">bubble", ">exposed comm."],
        rows,
        title="Layouts",
        caption=f"→ the choice; memory: the fullest rank, at most {USABLE_FRACTION:.0%} of a device; exposed "
        "communication: what compute does not hide",
    )


def _times(option: Option) -> Table:
    rows = [
        (CAUSE_NAMES[cause], _seconds(length), f"{length / option.seconds:.1%}")
        for cause, length in option.estimate.causes.items()
        if abs(length) >= NEGLIGIBLE * option.seconds
    ]
    caption = "collectives and communication: what compute does not hide"
    return Table(
        ["cause", ">time", ">share"], rows, "Time of a step", caption, totals=[("total", _seconds(option.seconds))]
    )


def _memory(option: Option) -> Table:
    needs = option.footprint
    rows = [(name, f"{size / GB:.2f}", f"{size / needs.total:.0%}") for name, size in needs.parts.items() if size > 0]
    total = ("total", f"{needs.total / GB:.2f}", f"{needs.total / option.device_memory:.0%} of the device")
    low, high = (size / GB for size in _ranges(option)["memory_bytes_range"])
    known = bands().memory
    title, caption = (
        f"Memory of a {_device(option)}",
        f"on pipeline rank {needs.rank}, the fullest; {IN_WORDS} {low:.3g} to {high:.3g} GB, by {known.rows} runs of "
        f"{known.sources} sources that published it",
    )
    return Table(["component", ">GB", ">share"], rows, title, caption, totals=[total])


def _traffic(option: Option) -> Table:
    shown = [moved for moved in traffic(option) if moved.payload > MIN_SHOWN_BYTES]
    unit, name = (GB, "GB") if any(moved.payload >= GB / 10 for moved in shown) else (1e6, "MB")
    rows = [
        (moved.axis, moved.kind, f"{moved.calls:,}", *(f"{size / unit:,.2f} {name}" for size in moved[3:6]))
        for moved in shown
    ]
    return Table(
        ["axis", "collective", ">calls", ">payload", ">wire, in the node", ">wire, between nodes"],
        rows,
        title="What a rank sends in a step",
        caption=f"{_sender(option)}; payload: bytes handed to the collectives; wire: bytes that leave a "
        f"{_device(option)}",
    )


def _sender(option: Option) -> str:
    """Whose traffic it is."""
    rank, layout = traffic_rank(option), option.layout
    which = "the fullest" if rank == option.footprint.rank else "the first with experts"
    mean = "; experts get the mean of the tokens" if layout.ep > 1 else ""
    return (f"on pipeline rank {rank}, {which}" if layout.pp > 1 else "of any rank") + mean


def _summary(option: Option, price: float | None = None) -> str:
    workload, rate = option.workload, option.tokens_per_second
    text = (
        f"{option.layout}: {_seconds(option.seconds)} per step of {si(workload.batch * workload.seq)} tokens, "
        f"{si(rate)} tokens/s, {si(rate * DAY)} tokens per day, "
        f"MFU {workload.mfu(option.seconds):.1%} (full attention; {workload.mfu(option.seconds, 'causal'):.1%} causal)"
    )
    if price is None:
        return text
    cost = figures(option, price)
    return f"{text}; ${cost['cost_per_day']:,.0f} per day, ${cost['cost_per_trillion_tokens']:,.0f} per 1T tokens"


def _experts(option: Option) -> Iterator[Text]:
    """What is assumed of a model's experts."""
    workload = option.workload
    if workload.spec.experts is None:
        return
    active = si(workload.spec.matmul_parameters, 4)
    why = f", {IMBALANCE_SOURCE}" if workload.imbalance == IMBALANCE else ""
    uneven = f"the fullest rank has {workload.imbalance:g} times the mean of the tokens{why} (--imbalance)"
    less = imbalance_caveat(workload.spec, option.layout.ep, workload.imbalance)
    uneven += f"; {less}" if less else ""
    yield Text(
        f"MFU counts the {active} parameters that a token is multiplied with; "
        + (uneven if option.layout.ep > 1 else "every rank has all experts, so that none is fuller than another")
    )
    total, shared, paired = option.estimate.expert_messages
    if not total:
        return
    hidden = {"the other half of a joined pair": paired, "the shared expert": shared}
    hides = " and ".join(f"{what} {_seconds(length)}" for what, length in hidden.items() if length)
    yield Text(
        f"tokens travel to experts and back for {_seconds(total)} of a step; "
        + (f"compute hides {_seconds(shared + paired)} of it: {hides}" if hides else "no compute hides any of it")
    )


def too_large(option: Option) -> str:
    needs = option.footprint
    name, size = max(needs.parts.items(), key=lambda part: part[1])
    return (
        f"it does not fit: needs {needs.total / GB:.1f} GB on pipeline rank {needs.rank} (largest part: {name}, "
        f"{size / GB:.1f} GB), limit {option.limit / GB:.1f} of {option.device_memory / GB:.1f} GB"
    )


def _seconds(length: float) -> str:
    return f"{length:.2f} s" if length >= 1 else f"{1e3 * length:.1f} ms"
