"""How long one training step takes under a layout: the stages' costs, on the clock of the schedule itself.

workload = Workload(spec, layout, cluster, seq=8192, batch=2048)
estimate(workload).seconds
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import NamedTuple

from msgspec import structs

from fivefold.cost.block import NO_PASSES, BlockCost, PassTimes, Seconds, layer_kind
from fivefold.cost.collective_time import Topology
from fivefold.cost.forms import PipelineForm, ZeroCost
from fivefold.cost.kernels import Device, plus, times
from fivefold.cost.moe import ParamShare, Travel, stage_share
from fivefold.cost.routing import Rows, even_rows
from fivefold.cost.software import FIVEFOLD, SoftwareProfile
from fivefold.hardware.cluster import Cluster
from fivefold.layout.layout import Layout
from fivefold.layout.sharding import chunk
from fivefold.layout.stages import Stage, schedule_of, stages_of
from fivefold.schedules.actions import BACKWARD
from fivefold.schedules.build import ScheduleInfo
from fivefold.schedules.clock import Lane
from fivefold.schedules.costs import Costs, MessageLink, Segment, Segments, alone
from fivefold.schedules.registry import build
from fivefold.schedules.schedule import Schedule
from fivefold.schedules.simulate import Simulation, simulate
from fivefold.spec.model import Attention as Counting
from fivefold.spec.model import ModelSpec
from fivefold.spec.operations import BlockOperations, Matmul, block

# ---- halves ---------------------------------------------------------------------------------------------------------
# A stage's passes as the halves of joined pairs, and what of the experts' messages compute hides in a step.
#
# stage_halves(spec, stage, work, held=0.0)       # segments of its F and of its B, for schedules/costs.py


class Travelled(NamedTuple):
    """Seconds of a rank's step in which experts' messages are in flight, and how many of them are hidden."""

    whole: float = 0.0
    shared: float = 0.0  # by the shared expert
    paired: float = 0.0  # by the other half of a joined pair


STAYED = Travelled()


def stage_halves(stage: Stage, work: BlockCost, held: float) -> tuple[Segments, Segments]:
    """What is sent without overlap (`held`) ends either pass."""
    spec = work.spec
    blocks = [block_halves(work.of(layer_kind(spec, layer))) for layer in stage.layers]
    below = [_plain(work.bottom)] if stage.first else []
    above = [_plain(work.top)] if stage.last and spec.vocab > 1 else []
    parts = [*below, *blocks, *above]
    end = (Segment(held),)
    forward = sum((ahead for ahead, _ in parts), ()) + end
    return forward, sum((back for _, back in reversed(parts)), ()) + end


def block_halves(work: BlockCost) -> tuple[Segments, Segments]:
    """A block's forward and whole backward pass."""
    if work.mixture is None:
        return _plain(work.block)
    travel, (forward, inputs, weights) = Travel(work.mixture), work.block
    # As long as they take without any overlap.
    less, less_back = travel.hidden
    ahead, back = forward.total + less, inputs.total + weights.total + less_back
    if work.layout.recompute != "full":
        return travel.forward(ahead), travel.backward(back)
    # It runs forward again before its own, messages and all.
    again = inputs.recompute + forward.ep
    return travel.forward(ahead), travel.forward(again + less) + travel.backward(back - again)


def _plain(passes: PassTimes) -> tuple[Segments, Segments]:
    forward, inputs, weights = (part.total for part in passes)
    return (Segment(forward),), (Segment(inputs + weights),)


def block_travelled(work: BlockCost) -> Travelled:
    """The experts' messages of one microbatch in one block."""
    if work.mixture is None:
        return STAYED
    travel, times = Travel(work.mixture), 2 if work.layout.recompute == "full" else 1
    (sent, back), (less, less_back) = work.mixture.sent, travel.hidden
    return Travelled(times * sent + back, times * less + less_back)


def saved(lane: Lane, costs: Costs) -> float:
    """Seconds that a rank's passes take less than F, I and W by themselves, because compute hides messages."""
    seconds, first = 0.0, None
    for action in lane.actions:
        if action.kind is BACKWARD:
            seconds += costs.i[action.stage] + costs.w[action.stage] - costs.b[action.stage]
            if first is not None:
                seconds += costs.f[first] + costs.b[action.stage] - costs.joined(first, action.stage)
        first = action.stage if action.joined else None
    return seconds


# ---- time -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Workload:
    """A model under a layout on a cluster: everything that decides how long a step takes."""

    spec: ModelSpec
    layout: Layout
    cluster: Cluster
    seq: int
    batch: int  # sequences of a step
    precision: str = "bf16"
    software: SoftwareProfile = FIVEFOLD
    device: Device | None = None  # None: the cluster's own
    imbalance: float = 1.0  # of experts: tokens of the most loaded rank over the mean
    groups: tuple[int, ...] = ()  # of unlike nodes: which group each pipeline rank is on; empty: all on the first

    @property
    def samples(self) -> int:
        """Sequences of a microbatch."""
        return max(1, self.batch // (self.layout.size("batch") * self.layout.microbatches))

    @property
    def on(self) -> Device:
        """The device of the first pipeline rank."""
        return self.work.device

    @property
    def wires(self) -> Topology:
        return self.work.wires

    @property
    def work(self) -> BlockCost:
        return self.work_of(0)

    def work_of(self, rank: int) -> BlockCost:
        """What a microbatch is on a pipeline rank's device."""
        return self.works[self.groups[rank] if self.groups else 0]

    def memory_of(self, rank: int) -> int:
        """Bytes of a pipeline rank's device; of the smallest, where ranks of one stage are on several kinds."""
        if self.groups:
            return self.cluster.groups[self.groups[rank]].accelerator.memory
        return min(group.accelerator.memory for group in self.cluster.groups)

    @cached_property
    def durations(self) -> Costs:
        """What the stages' passes and messages take, in the simulator's words."""
        return costs(self, stage_passes(self))

    def schedule(self, microbatches: int = 0) -> Schedule:
        """What the ranks do, in which order. On unlike nodes `auto` is made for the seconds of their stages."""
        layout, m = self.layout, microbatches or self.layout.microbatches
        if self.groups and layout.record.uses_stage_times and layout.pp > 1:
            return _made_for(layout.record, layout.pp, m, self.durations)
        return schedule_of(self.spec, layout, self.seq, m)

    @property
    def splits(self) -> bool:
        """Whether backward passes are in two halves. `auto` may have found that whole ones are quicker."""
        if self.groups and self.layout.record.uses_stage_times:
            return self.schedule().splits
        return self.layout.splits_backward

    @cached_property
    def works(self) -> list[BlockCost]:
        """The microbatch on each group's devices. Unlike groups meet over the slower of their networks."""
        across = min((group.accelerator.across for group in self.cluster.groups), key=lambda link: link.bandwidth)
        blocks = []
        for group in self.cluster.groups:
            card = structs.replace(group.accelerator, across=across) if self.groups else group.accelerator
            device = self.device or Device.of(card)
            wires = Topology(device, group.gpus, self.layout, self.software.order)
            sizes = (self.samples, self.seq, self.precision, self.imbalance)
            blocks.append(BlockCost(self.spec, self.layout, device, wires, self.software, *sizes))
        return blocks

    @cached_property
    def stages(self) -> tuple[Stage, ...]:
        return stages_of(self.spec, self.layout, self.seq)

    def flops(self, counting: Counting = "full") -> float:
        """Model FLOPs of a step."""
        return float(self.spec.flops_per_token(self.seq, counting)) * self.batch * self.seq

    def mfu(self, seconds: float, counting: Counting = "full") -> float:
        """Model FLOPs utilization, by the makers' rates of the devices that the layout uses."""
        peak = sum(group.world * group.accelerator.rate(self.precision) for group in self.cluster.groups)
        return self.flops(counting) / seconds / (peak * self.layout.world / self.cluster.world)


@dataclass(frozen=True)
class Estimate:
    """A step, from its first forward pass to its new weights."""

    workload: Workload
    pipeline: float  # seconds of the schedule
    busy: Seconds  # of the busiest pipeline rank, by cause
    dp: float  # gradients and weights that nothing hides
    optimizer: float
    simulation: Simulation | None = None  # of a long step, without microbatches in the middle that repeat others
    bubble: float = 0.0  # share of all pipeline ranks' time in which they do not compute; of the whole step
    travelled: Travelled = STAYED  # of the busiest rank

    @property
    def seconds(self) -> float:
        return self.pipeline + self.dp + self.optimizer + self.workload.software.host_step

    @property
    def causes(self) -> dict[str, float]:
        """Seconds of the step, adding up to it."""
        return {
            **self.busy._asdict(),
            "bubble": self.pipeline - self.busy.total,
            "dp": self.dp,
            "optimizer": self.optimizer,
            "other": self.workload.software.host_step,
        }


def estimate(workload: Workload, exact: bool = True) -> Estimate:
    """One step. `exact` runs the schedule on its clock; without it a closed form stands in, for pruning."""
    passes, m = stage_passes(workload), workload.layout.microbatches
    if exact and workload.layout.splits_backward and not workload.splits:
        passes = stage_passes(unsplit(workload))
    loads = [
        times(plus(*(part for stage in stages for part in passes[stage])), m)
        for stages in workload.layout.placement.of_rank
    ]
    simulation, less, bubble = None, [0.0] * len(loads), 0.0
    if exact and (workload.layout.pp > 1 or pairs_overlap(workload)):
        simulation, length, less, bubble = _simulated(workload, workload.durations)
    rank = max(range(len(loads)), key=lambda rank: loads[rank].total - less[rank])
    busiest = _without(loads[rank], less[rank])
    if simulation is None and workload.layout.pp == 1:
        length = busiest.total
    elif simulation is None:
        length = closed_form(workload, [load.total / m for load in loads])
    optimizer, exposed = _step_end(workload, passes)
    travelled = _travelled(workload, rank, less[rank])
    return Estimate(workload, length, busiest, exposed, optimizer, simulation, bubble, travelled)


def _simulated(workload: Workload, durations: Costs) -> tuple[Simulation, float, list[float], float]:
    """The schedule on its clock, how long it takes, what its pairs save on each rank, and its bubble. A long one
    repeats itself: its steady state is timed, and counted on."""
    layout, m = workload.layout, workload.layout.microbatches
    few = repeating(layout)
    simulation = simulate(workload.schedule(few), durations)
    less = _saved(simulation)
    if few == m:
        return simulation, simulation.makespan, less, simulation.bubble_makespan
    longer = simulate(workload.schedule(few + layout.pp), durations)
    more = (m - few) / layout.pp
    each = zip(less, _saved(longer), strict=True)
    length = simulation.makespan + more * (longer.makespan - simulation.makespan)
    short, long = (sum(rank.busy for rank in run.ranks) for run in (simulation, longer))
    bubble = 1 - (short + more * (long - short)) / (layout.pp * length) if length else 0.0
    return simulation, length, [short + more * (long - short) for short, long in each], bubble


def _saved(simulation: Simulation) -> list[float]:
    costs, lanes = simulation.costs, simulation.run.lanes
    return [saved(lane, costs) if costs.segments else 0.0 for lane in lanes]


def _without(load: Seconds, seconds: float) -> Seconds:
    """A rank's load without what joined pairs hide of the experts' messages."""
    return load._replace(ep=load.ep - seconds)


def _travelled(workload: Workload, rank: int, paired: float) -> Travelled:
    """The experts' messages of a pipeline rank in a step."""
    if workload.spec.experts is None:
        return STAYED
    layers = [layer for stage in workload.layout.placement.of_rank[rank] for layer in workload.stages[stage].layers]
    many = sum(not workload.spec.dense(layer) for layer in layers) * workload.layout.microbatches
    return times(block_travelled(workload.work_of(rank)), many)._replace(paired=paired)


@lru_cache(maxsize=64)
def _made_for(record: ScheduleInfo, p: int, m: int, durations: Costs) -> Schedule:
    return build(record, p, m, costs=durations)


def repeating(layout: Layout) -> int:
    """Microbatches after which its schedule only repeats itself: as many rounds of p as any warm-up needs."""
    rounds, p, m = 3, layout.pp, layout.microbatches
    long = 64  # microbatches that are simulated whole, whatever p is
    return m if m <= rounds * p + long or not layout.record.repeats else rounds * p + m % p


def stage_passes(workload: Workload) -> list[PassTimes]:
    """What each stage does with a microbatch."""
    passes = []
    for stage in workload.stages:
        work = workload.work_of(workload.layout.placement.owner[stage.index])
        ends = [work.bottom] * stage.first + [work.top] * (stage.last and workload.spec.vocab > 1)
        kinds = Counter(layer_kind(workload.spec, layer) for layer in stage.layers)
        passes.append(plus(NO_PASSES, *(times(work.of(kind).block, count) for kind, count in kinds.items()), *ends))
    return passes


def unsplit(workload: Workload) -> Workload:
    """The same stages with backward passes in one piece."""
    return replace(workload, layout=structs.replace(workload.layout, schedule="1f1b"))


def message(workload: Workload) -> float:
    """Bytes of the residual stream between two stages, of one rank."""
    full = float(workload.work.activation_bytes * workload.work.tokens * workload.spec.hidden)
    return full / workload.layout.tp if workload.layout.sp or workload.software.scattered_sends else full


def costs(workload: Workload, passes: list[PassTimes]) -> Costs:
    """The simulator's costs of each stage. What is sent without overlap stands in the stage that sends it."""
    send = max(work.wires.time("send", "pp", message(workload)) for work in workload.works)
    if workload.software.scattered_sends and not workload.layout.sp:
        send += workload.wires.time("all-gather", "tp", 2.0 * workload.work.tokens * workload.spec.hidden)
    # An eager message travels while sender and receiver compute; what is not overlapped holds them up.
    held = (1 - workload.software.hides("pp")) * send
    f, i = (tuple(stage[at].total + held for stage in passes) for at in (0, 1))
    w = tuple(stage.weights.total for stage in passes)
    b = tuple(x + y for x, y in zip(i, w, strict=True))
    if (
        workload.layout.record.uses_stage_times
    ):  # where no backward pass is split, tp has the weights' gradients to hide behind
        b = tuple(stage.inputs.total + stage.weights.total + held for stage in stage_passes(unsplit(workload)))
    ones = tuple(1.0 / workload.layout.chunks for _ in passes)
    halves = _halves(workload, held) if pairs_overlap(workload) else ()
    if halves:
        b = tuple(alone(backward) for _, backward in halves)
    link = MessageLink(latency=workload.software.hides("pp") * send)
    return Costs(f=f, i=i, w=w, b=b, activation=ones, segments=halves, link=link)


def pairs_overlap(workload: Workload) -> bool:
    """Whether the halves of joined pairs run beside each other's messages: there are some, and nobody takes a block's
    weights away while the other half may need them, as ZeRO 3 does."""
    layout = workload.layout
    if workload.spec.experts is None or layout.fully_shards(workload.spec):
        return False
    return layout.ep > 1 and layout.record.joins and workload.software.hides_experts > 0


def _halves(workload: Workload, held: float) -> tuple[tuple[Segments, Segments], ...]:
    works = [workload.work_of(rank) for rank in workload.layout.placement.owner]
    return tuple(stage_halves(stage, work, held) for stage, work in zip(workload.stages, works, strict=True))


def closed_form(workload: Workload, ranks: list[float]) -> float:
    """The schedule's makespan, nearly, where a microbatch takes so many seconds on each rank."""
    layout, record = workload.layout, workload.layout.record
    form = PipelineForm(layout.pp, layout.microbatches, layout.chunks, record.fill, record.waits, record.refills)
    send = workload.wires.time("send", "pp", message(workload))
    return float(form.seconds(max(ranks), sum(ranks), send, workload.software.hides("pp")))


def _step_end(workload: Workload, passes: list[PassTimes]) -> tuple[float, float]:
    """The optimizer's seconds, and those of gradients and weights that nothing hides, on the rank with the most
    parameters; of unlike nodes, on that rank of the kind of node that takes longer."""
    ranks, stages = workload.layout.placement.of_rank, workload.stages
    counts = [share_of(workload, [stages[number] for number in numbers]) for numbers in ranks]
    order = sorted(range(len(ranks)), key=lambda rank: counts[rank].total)
    fullest = {
        workload.groups[rank] if workload.groups else 0: rank for rank in order
    }  # of each kind the last, which has most
    return max((_end_on(workload, passes, rank, counts[rank]) for rank in fullest.values()), key=sum)


def _end_on(workload: Workload, passes: list[PassTimes], rank: int, count: ParamShare) -> tuple[float, float]:
    layout, work = workload.layout, workload.work_of(rank)
    zero = ZeroCost(workload.spec, workload.software, work.wires)
    learns = workload.spec.vocab > 1
    optimizer = zero.optimizer(count, layout.zero) * learns
    if layout.zero == 3:
        copied = layout.size("dp_cp") > 1 or (count.experts and layout.size("expert_dp") > 1)
        forward = passes[-1].forward.total
        return optimizer, zero.at_ends(count, layout.tp, layout.microbatches, forward) if copied else 0.0
    held = (
        [workload.stages[number] for number in layout.placement.of_rank[rank]] if workload.groups else workload.stages
    )
    fullest = max(held, key=lambda stage: share_of(workload, [stage]).total)
    forward, *backward = (part.total * layout.chunks for part in passes[fullest.index])
    # Axes that leave the node share its ports: while tp or cp holds them, gradients wait.
    free = max(0.0, sum(backward) - layout.chunks * len(fullest.layers) * work.port)
    return optimizer, zero.after(count, layout.zero, layout.microbatches, forward, free)


def share_of(workload: Workload, stages: Sequence[Stage]) -> ParamShare:
    """Parameters of a rank that has these stages."""
    return plus(*(stage_share(workload.spec, workload.layout.tp, workload.layout.ep, stage) for stage in stages))


# ---- executed -------------------------------------------------------------------------------------------------------
# FLOPs that a rank executes in a step: recomputation, padding and what every tp rank does alike are among them.


def rank_flops(
    spec: ModelSpec, layout: Layout, seq: int, batch: int, *, pp: int = 0, tp: int = 0, rows: Rows | None = None
) -> float:
    """FLOPs of the rank at those places; ranks along dp and cp do the same. `rows` are those that go to experts and
    come to this rank's, of each layer and microbatch; None: as many."""
    tokens = batch // layout.size("batch") * (seq // layout.cp)
    stages = stages_of(spec, layout, seq)
    own_stages = [stages[number] for number in layout.placement.of_rank[pp]]
    layers = [layer for stage in own_stages for layer in stage.layers]
    flops = (
        3 * 2.0 * spec.hidden * len(chunk(spec.vocab, layout.tp, tp)) * any(stage.last for stage in own_stages) * tokens
    )
    for kind, count in Counter((spec.dense(layer), spec.window_of(layer)) for layer in layers).items():
        flops += count * tokens * _each(spec, layout, seq, block(spec, layout.tp, *kind))
    if spec.experts is None:
        return flops
    sparse = [layer for layer in layers if not spec.dense(layer)]
    rows = even_rows(spec, layout, tokens // layout.microbatches, sparse, tp) if rows is None else rows
    passes = 4 if layout.recompute == "full" else 3
    for matmul in block(spec).matmuls:
        visits = sum(came for _, came in rows) if matmul.experts else 0
        if matmul.name == "router":  # every tp rank has a slice of the tokens
            visits = len(sparse) * layout.microbatches * len(chunk(tokens // layout.microbatches, layout.tp, tp))
        flops += passes * 2.0 * matmul.inputs * matmul.outputs * visits
    return flops


def _each(spec: ModelSpec, layout: Layout, seq: int, own: BlockOperations) -> float:
    """FLOPs of a token in a block, without the router and the experts that it chooses."""

    def flops(matmul: Matmul) -> float:
        part = layout.tp if matmul.tp == "replicated" and layout.sp else 1
        return 2.0 * matmul.inputs * matmul.outputs / part

    dense = [matmul for matmul in own.matmuls if not matmul.experts and matmul.name != "router"]
    matmuls, last = sum(map(flops, dense)), own.matmuls[-1]
    attention = 4 * own.attention.keys(seq / 2) * own.attention.width  # values are padded to the keys' width
    each = 3 * matmuls + 3.5 * attention  # backward: two matmuls for each, and attention's five for two
    if layout.recompute == "full":
        # The block's last matmul is not made again, since nothing in backward needs its output; unless it is one step
        # with what follows it, a collective or a put-off weight gradient. An expert's is needed: it is weighted; and a
        # shared one's comes before it, where tokens travel meanwhile.
        needed = last.experts or (layout.ep > 1 and any(matmul.experts for matmul in own.matmuls))
        stops = layout.tp == 1 and not layout.splits_backward and not needed
        each += matmuls - (flops(last) if stops else 0.0) + attention
    return each
