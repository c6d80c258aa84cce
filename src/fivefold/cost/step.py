"""How long one training step takes under a layout: the stages' costs, on the clock of the schedule itself.

workload = Workload(spec, layout, cluster, seq=8192, batch=2048)
estimate(workload).seconds
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache
from typing import NamedTuple

from msgspec import structs

from fivefold.cost.block import NO_PASSES, BlockCost, PassTimes, Seconds
from fivefold.cost.closed_forms import PipelineForm, ZeroCost
from fivefold.cost.collective_time import Topology
from fivefold.cost.kernels import Device
from fivefold.cost.matrices import NO_MATRICES, MatrixCost
from fivefold.cost.moe import ParamShare, Travel, moe_matmuls, stage_share
from fivefold.cost.routing import Rows, even_rows
from fivefold.cost.software import FIVEFOLD, SoftwareProfile
from fivefold.hardware.cluster import Cluster
from fivefold.layout.layout import Layout
from fivefold.layout.rank_part import RANK0, RankCoords
from fivefold.layout.sharding import chunk
from fivefold.layout.stages import Stage, activation_weight, schedule_of, stages_of
from fivefold.schedules.actions import BACKWARD
from fivefold.schedules.clock import Lane
from fivefold.schedules.costs import Costs, MessageLink, Segment, Segments, seconds_alone
from fivefold.schedules.info import ScheduleInfo
from fivefold.schedules.registry import build
from fivefold.schedules.schedule import Schedule
from fivefold.schedules.simulate import Simulation
from fivefold.schedules.steady_state import time_steps
from fivefold.spec.model import AttentionFlopCounting, ModelSpec
from fivefold.spec.operations import BlockOperations, Matmul, block
from fivefold.support.dtypes import dtype_of_bytes
from fivefold.support.tuple_arithmetic import plus, scaled

# ---- halves ---------------------------------------------------------------------------------------------------------
# A stage's passes as the halves of joined pairs, and how much of the experts' messages compute hides in a step.
#
# stage_halves(stage, block_cost, exposed_send=0.0)   # segments of its F and of its B, for schedules/costs.py


class ExpertMessages(NamedTuple):
    """Seconds of a rank's step in which experts' messages are in flight, and how many of these compute hides."""

    in_flight: float = 0.0
    hidden_by_shared: float = 0.0  # by the shared expert
    hidden_by_pair: float = 0.0  # by the other half of a joined pair


NO_MESSAGES = ExpertMessages()


def stage_halves(stage: Stage, block_cost: BlockCost, exposed_send: float) -> tuple[Segments, Segments]:
    """A stage's forward and backward pass. The part of a send that nothing hides (`exposed_send`) ends either."""
    spec = block_cost.spec
    blocks = [block_halves(block_cost.of(spec.kinds(layer))) for layer in stage.layers]
    below = [_plain(block_cost.embedding)] if stage.first else []
    above = [_plain(block_cost.head_and_loss)] if stage.last and spec.vocab > 1 else []
    parts = [*below, *blocks, *above]
    end = (Segment(exposed_send),)
    forward = sum((ahead for ahead, _ in parts), ()) + end
    return forward, sum((back for _, back in reversed(parts)), ()) + end


def block_halves(block_cost: BlockCost) -> tuple[Segments, Segments]:
    """A block's forward and whole backward pass."""
    if block_cost.moe is None:
        return _plain(block_cost.block)
    travel, (forward, dgrad, wgrad) = Travel(block_cost.moe), block_cost.block
    # As long as they take without any overlap.
    hidden, hidden_back = travel.hidden
    ahead, back = forward.total + hidden, dgrad.total + wgrad.total + hidden_back
    if block_cost.layout.recompute != "full":
        return travel.forward(ahead), travel.backward(back)
    # Backward runs the forward pass again first, messages and all.
    again = dgrad.recompute + forward.ep
    return travel.forward(ahead), travel.forward(again + hidden) + travel.backward(back - again)


def _plain(passes: PassTimes) -> tuple[Segments, Segments]:
    forward, dgrad, wgrad = (part.total for part in passes)
    return (Segment(forward),), (Segment(dgrad + wgrad),)


def block_messages(block_cost: BlockCost) -> ExpertMessages:
    """The experts' messages of one microbatch in one block."""
    if block_cost.moe is None:
        return NO_MESSAGES
    travel = Travel(block_cost.moe)
    forwards = 2 if block_cost.layout.recompute == "full" else 1
    (sent, sent_back), (hidden, hidden_back) = block_cost.moe.ep_seconds, travel.hidden
    return ExpertMessages(forwards * sent + sent_back, forwards * hidden + hidden_back)


def overlap_savings(lane: Lane, costs: Costs) -> float:
    """Seconds that overlap saves a rank against F, I and W one after the other: messages that compute hides."""
    seconds, first, joined = 0.0, None, cache(costs.joined)
    for action in lane.actions:
        if action.kind is BACKWARD:
            seconds += costs.i[action.stage] + costs.w[action.stage] - costs.b[action.stage]
            if first is not None:
                seconds += costs.f[first] + costs.b[action.stage] - joined(first, action.stage)
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
    def first_device(self) -> Device:
        """The device of the first pipeline rank."""
        return self.block_cost.device

    @property
    def topology(self) -> Topology:
        return self.block_cost.topology

    @property
    def block_cost(self) -> BlockCost:
        return self.block_cost_of(0)

    def block_cost_of(self, rank: int) -> BlockCost:
        """What a microbatch costs on a pipeline rank's device."""
        return self.block_costs[self.groups[rank] if self.groups else 0]

    def device_memory_of(self, rank: int) -> int:
        """Memory of a pipeline rank's device in bytes; of the smallest, if ranks of one stage are on several kinds."""
        if self.groups:
            return self.cluster.groups[self.groups[rank]].accelerator.memory
        return min(group.accelerator.memory for group in self.cluster.groups)

    @cached_property
    def durations(self) -> Costs:
        """How long the stages' passes and messages take, as the simulator reads it."""
        return costs(self, stage_passes(self))

    def schedule(self, microbatches: int = 0) -> Schedule:
        """The schedule of the pipeline ranks. On unlike nodes `auto` is built for the seconds of their stages."""
        layout, m = self.layout, microbatches or self.layout.microbatches
        if self.groups and layout.record.uses_stage_times and layout.pp > 1:
            return _built_for(layout.record, layout.pp, m, self.durations)
        return schedule_of(self.spec, layout, self.seq, m)

    @property
    def splits_backward(self) -> bool:
        """Whether backward is split into I and W. `auto` may have found that full backward passes are faster."""
        if self.groups and self.layout.record.uses_stage_times:
            return self.schedule().splits
        return self.layout.splits_backward

    @cached_property
    def block_costs(self) -> list[BlockCost]:
        """A microbatch's cost on each group's devices. Unlike groups are joined by the slower of their networks."""
        across = min((group.accelerator.across for group in self.cluster.groups), key=lambda link: link.bandwidth)
        blocks = []
        for group in self.cluster.groups:
            card = structs.replace(group.accelerator, across=across) if self.groups else group.accelerator
            device = self.device or Device.of(card)
            topology = Topology(device, group.gpus, self.layout, self.software.order)
            cost = BlockCost(
                spec=self.spec,
                layer=self.spec.kinds(self.spec.layers - 1),
                layout=self.layout,
                device=device,
                topology=topology,
                software=self.software,
                samples=self.samples,
                seq=self.seq,
                precision=self.precision,
                imbalance=self.imbalance,
            )
            blocks.append(cost)
        return blocks

    @cached_property
    def stages(self) -> tuple[Stage, ...]:
        return stages_of(self.spec, self.layout, self.seq)

    def flops(self, counting: AttentionFlopCounting = "full") -> float:
        """Model FLOPs of a step."""
        return float(self.spec.flops_per_token(self.seq, counting)) * self.batch * self.seq

    def mfu(self, seconds: float, counting: AttentionFlopCounting = "full") -> float:
        """Model FLOPs utilization, by the makers' rates of the devices that the layout uses."""
        peak = sum(group.world * group.accelerator.rate(self.precision) for group in self.cluster.groups)
        return self.flops(counting) / seconds / (peak * self.layout.world / self.cluster.world)


@dataclass(frozen=True)
class Estimate:
    """A step, from its first forward pass to its new weights."""

    workload: Workload
    pipeline: float  # seconds of the schedule
    busy: Seconds  # of the busiest pipeline rank, by cause
    dp: float  # exposed collectives of gradients and weights
    optimizer: float
    simulation: Simulation | None = None  # of a long step, without the repeating microbatches in its middle
    bubble: float = 0.0  # share of the whole step in which pipeline ranks idle, over all of them
    expert_messages: ExpertMessages = NO_MESSAGES  # of the busiest rank

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


def estimate(workload: Workload, *, exact: bool = True) -> Estimate:
    """One step. `exact` simulates the schedule; otherwise a closed form stands in, for pruning."""
    passes, m = stage_passes(workload), workload.layout.microbatches
    if exact and workload.layout.splits_backward and not workload.splits_backward:
        passes = stage_passes(with_full_backward(workload))
    loads = [
        scaled(plus(*(part for stage in stages for part in passes[stage])), m)
        for stages in workload.layout.placement.of_rank
    ]
    simulation, savings, bubble = None, [0.0] * len(loads), 0.0
    if exact and (workload.layout.pp > 1 or pairs_overlap(workload)):
        simulation, length, savings, bubble = _simulated(workload, workload.durations)
    rank = max(range(len(loads)), key=lambda rank: loads[rank].total - savings[rank])
    busiest = _without_hidden(loads[rank], savings[rank])
    if simulation is None and workload.layout.pp == 1:
        length = busiest.total
    elif simulation is None:
        length = closed_form(workload, [load.total / m for load in loads])
    optimizer, exposed = _optimizer_and_sync(workload, passes)
    expert_messages = _expert_messages(workload, rank, savings[rank])
    return Estimate(workload, length, busiest, exposed, optimizer, simulation, bubble, expert_messages)


def _simulated(workload: Workload, durations: Costs) -> tuple[Simulation, float, list[float], float]:
    """The simulated schedule, its makespan, what overlap saves on each rank, and its bubble. A long schedule repeats
    itself: its steady state is simulated once, and extrapolated."""
    layout, m = workload.layout, workload.layout.microbatches
    period = layout.record.period(layout.pp, m)
    step = time_steps(workload.schedule, durations, m, simulated_microbatches(layout), period)
    length, busy, *savings = step.total(
        lambda run: [run.makespan, sum(rank.busy for rank in run.ranks), *_overlap_savings(run)]
    )
    return step.simulation, length, savings, 1 - busy / (layout.pp * length) if length else 0.0


def _overlap_savings(simulation: Simulation) -> list[float]:
    costs, lanes = simulation.costs, simulation.run.lanes
    return [overlap_savings(lane, costs) if costs.segments else 0.0 for lane in lanes]


def _without_hidden(load: Seconds, seconds: float) -> Seconds:
    """A rank's load without the seconds of experts' messages that joined pairs hide."""
    return load._replace(ep=load.ep - seconds)


def _expert_messages(workload: Workload, rank: int, hidden_by_pair: float) -> ExpertMessages:
    """The experts' messages of a pipeline rank in a step."""
    if workload.spec.experts is None:
        return NO_MESSAGES
    layers = [layer for stage in workload.layout.placement.of_rank[rank] for layer in workload.stages[stage].layers]
    routed = [(kind, count) for kind, count in workload.spec.counted(layers).items() if kind.routed]
    cost, microbatches = workload.block_cost_of(rank), workload.layout.microbatches
    parts = (scaled(block_messages(cost.of(kind)), count * microbatches) for kind, count in routed)
    return plus(NO_MESSAGES, *parts)._replace(hidden_by_pair=hidden_by_pair)


@lru_cache(maxsize=64)
def _built_for(record: ScheduleInfo, p: int, m: int, durations: Costs) -> Schedule:
    return build(record, p, m, costs=durations)


def simulated_microbatches(layout: Layout) -> int:
    """How many microbatches to simulate at first: beyond these its schedule only repeats itself, as `time_steps` sees
    to. As many rounds as any warm-up needs."""
    rounds, m = 3, layout.microbatches
    if not layout.record.repeats:
        return m
    period = layout.record.period(layout.pp, m)
    long = 64  # microbatches that are simulated whole, whatever p is
    return m if m <= rounds * period + long else rounds * period + m % period


def stage_passes(workload: Workload) -> list[PassTimes]:
    """How long each stage takes for a microbatch, pass by pass."""
    passes = []
    for stage in workload.stages:
        cost = workload.block_cost_of(workload.layout.placement.owner[stage.index])
        ends = [cost.embedding] * stage.first + [cost.head_and_loss] * (stage.last and workload.spec.vocab > 1)
        kinds = workload.spec.counted(stage.layers).items()
        passes.append(plus(NO_PASSES, *(scaled(cost.of(kind).block, count) for kind, count in kinds), *ends))
    return passes


def with_full_backward(workload: Workload) -> Workload:
    """The same stages with full backward passes, not split into I and W."""
    return replace(workload, layout=structs.replace(workload.layout, schedule="1f1b"))


def p2p_bytes(workload: Workload) -> float:
    """Bytes that one rank sends between two stages: its residual stream."""
    full = float(workload.block_cost.activation_bytes * workload.block_cost.tokens * workload.spec.hidden)
    return full / workload.layout.tp if workload.layout.sp or workload.software.scattered_sends else full


def costs(workload: Workload, passes: list[PassTimes]) -> Costs:
    """The simulator's costs of each stage. What is sent without overlap stands in the stage that sends it."""
    send = max(work.topology.time("send", "pp", p2p_bytes(workload)) for work in workload.block_costs)
    if workload.software.scattered_sends and not workload.layout.sp:
        send += workload.topology.time("all-gather", "tp", 2.0 * workload.block_cost.tokens * workload.spec.hidden)
    # An eager message travels while sender and receiver compute; what is not overlapped delays both.
    exposed_send = (1 - workload.software.hides("pp")) * send
    f, i = (tuple(stage[at].total + exposed_send for stage in passes) for at in (0, 1))
    w = tuple(stage.wgrad.total for stage in passes)
    b = tuple(x + y for x, y in zip(i, w, strict=True))
    if workload.layout.record.uses_stage_times:
        # In a full backward pass tp hides behind the weight gradients.
        full = stage_passes(with_full_backward(workload))
        b = tuple(stage.dgrad.total + stage.wgrad.total + exposed_send for stage in full)
    shares = _activation_shares(workload)
    halves = _halves(workload, exposed_send) if pairs_overlap(workload) else ()
    if halves:
        b = tuple(seconds_alone(backward) for _, backward in halves)
    link = MessageLink(latency=workload.software.hides("pp") * send)
    return Costs(f=f, i=i, w=w, b=b, activation=shares, segments=halves, link=link)


def _activation_shares(workload: Workload) -> tuple[float, ...]:
    """Of each stage, in whole ranks' mean activations. Layers that are alike make it one for each chunk."""
    spec, chunks = workload.spec, workload.layout.chunks
    if len(spec.counted()) == 1:
        return (1.0 / chunks,) * len(workload.stages)
    held = [sum(activation_weight(spec, layer) for layer in stage.layers) for stage in workload.stages]
    return tuple(own * workload.layout.pp / max(1, sum(held)) for own in held)


def pairs_overlap(workload: Workload) -> bool:
    """Whether the halves of joined pairs overlap each other's messages: there are some, and no block's weights are
    resharded while the other half may need them, as ZeRO 3 does."""
    layout = workload.layout
    if workload.spec.experts is None or layout.fully_shards(workload.spec):
        return False
    return layout.ep > 1 and layout.record.joins and workload.software.hides_experts > 0


def _halves(workload: Workload, exposed_send: float) -> tuple[tuple[Segments, Segments], ...]:
    works = [workload.block_cost_of(rank) for rank in workload.layout.placement.owner]
    return tuple(stage_halves(stage, work, exposed_send) for stage, work in zip(workload.stages, works, strict=True))


def closed_form(workload: Workload, ranks: list[float]) -> float:
    """The schedule's approximate makespan; `ranks` are the seconds of a microbatch on each."""
    layout, record = workload.layout, workload.layout.record
    form = PipelineForm(layout.pp, layout.microbatches, layout.chunks, record.fill, record.waits, record.refills)
    send = workload.topology.time("send", "pp", p2p_bytes(workload))
    return float(form.seconds(max(ranks), sum(ranks), send, workload.software.hides("pp")))


def _optimizer_and_sync(workload: Workload, passes: list[PassTimes]) -> tuple[float, float]:
    """Seconds of the optimizer, and of exposed gradient and weight collectives, on the rank with the most parameters;
    with unlike nodes, on the slowest of those ranks, one for each kind of node."""
    ranks, stages = workload.layout.placement.of_rank, workload.stages
    counts = [param_share(workload, [stages[number] for number in numbers]) for numbers in ranks]
    by_size = sorted(range(len(ranks)), key=lambda rank: counts[rank].total)
    # By kind of node; the last of each kind, which has the most, stays.
    largest = {workload.groups[rank] if workload.groups else 0: rank for rank in by_size}
    return max((_optimizer_and_sync_on(workload, passes, rank, counts[rank]) for rank in largest.values()), key=sum)


def _optimizer_and_sync_on(
    workload: Workload, passes: list[PassTimes], rank: int, count: ParamShare
) -> tuple[float, float]:
    layout, block_cost = workload.layout, workload.block_cost_of(rank)
    zero = ZeroCost(workload.spec, workload.software, block_cost.topology)
    has_head = workload.spec.vocab > 1
    optimizer = zero.optimizer(count, layout.zero) * has_head + _whole_matrices(workload, rank)
    if layout.zero == 3:
        copied = layout.size("dp_cp") > 1 or (count.experts and layout.size("expert_dp") > 1)
        forward = passes[-1].forward.total
        if not copied:
            return optimizer, 0.0
        return optimizer, zero.exposed_zero3_outside_blocks(count, layout.tp, layout.microbatches, forward)
    own_stages = [workload.stages[number] for number in layout.placement.of_rank[rank]]
    largest = max(
        own_stages if workload.groups else workload.stages, key=lambda stage: param_share(workload, [stage]).total
    )
    forward, *backward = (part.total * layout.chunks for part in passes[largest.index])
    # Axes that leave the node share its ports: while tp or cp holds them, gradients wait.
    kinds = workload.spec.counted(largest.layers).items()
    busy = sum(layout.chunks * count * block_cost.of(kind).inter_node_backward_seconds for kind, count in kinds)
    free = max(0.0, sum(backward) - busy)
    return optimizer, zero.exposed_sync(count, layout.zero, layout.microbatches, forward, free)


def _whole_matrices(workload: Workload, rank: int) -> float:
    """Seconds of an optimizer's rule that reads whole matrices, and of bringing their parts together; the first of the
    ranks that have a pipeline rank's layers. The closed forms leave it out: all layouts of a world share out the same
    work."""
    software = workload.software
    if software.matrices is None:
        return 0.0
    cost = matrix_cost(workload, rank)
    block_cost = workload.block_cost_of(rank)
    ranks = workload.layout.size("stage")
    # The topology's payloads include what a rank keeps for itself; `MatrixCost` leaves that out of all-to-alls.
    with_kept = {"all-to-all": ranks / max(1, ranks - 1), "all-gather": 1.0}
    sent = sum(block_cost.topology.time(call.kind, "stage", call.payload * with_kept[call.kind]) for call in cost.calls)
    return sent + cost.most / block_cost.device.rate("bf16" if software.weight_bytes == 2 else workload.precision)


def matrix_cost(workload: Workload, rank: int) -> MatrixCost:
    """Of a pipeline rank."""
    software = workload.software
    if software.matrices is None:
        return NO_MATRICES
    sizes = (workload.spec, workload.layout, workload.seq, dtype_of_bytes(software.weight_bytes), software.matrices)
    return MatrixCost.of(*sizes, RankCoords(pp=rank))


def param_share(workload: Workload, stages: Sequence[Stage]) -> ParamShare:
    """Parameters of a rank that has these stages."""
    return plus(*(stage_share(workload.spec, workload.layout.tp, workload.layout.ep, stage) for stage in stages))


# ---- executed -------------------------------------------------------------------------------------------------------
# FLOPs that a rank executes in a step, with recomputation, padding, and what every tp rank repeats.


def rank_flops(
    spec: ModelSpec, layout: Layout, seq: int, batch: int, *, at: RankCoords = RANK0, rows: Rows | None = None
) -> float:
    """FLOPs of the rank at these coordinates; ranks along dp and cp do the same. `rows` are those sent to experts and
    received for this rank's, per layer and microbatch; None: evenly routed."""
    tokens = batch // layout.size("batch") * (seq // layout.cp)
    stages = stages_of(spec, layout, seq)
    own_stages = [stages[number] for number in layout.placement.of_rank[at.pp]]
    layers = [layer for stage in own_stages for layer in stage.layers]
    flops = (
        3
        * 2.0
        * spec.hidden
        * len(chunk(spec.vocab, layout.tp, at.tp))
        * any(stage.last for stage in own_stages)
        * tokens
    )
    for kind, count in spec.counted(layers).items():
        flops += count * tokens * _token_flops(spec, layout, seq, block(spec, layout.tp, kind))
    if spec.experts is None:
        return flops
    sparse = [layer for layer in layers if spec.kinds(layer).routed]
    rows = even_rows(spec, layout, tokens // layout.microbatches, sparse, at) if rows is None else rows
    passes = 4 if layout.recompute == "full" else 3
    slice_ = len(chunk(tokens // layout.microbatches, layout.tp, at.tp))
    received = [sum(row.received for row in rows[number :: len(sparse)]) for number in range(len(sparse))]
    for layer, visits in zip(sparse, received, strict=True):
        for matmul in moe_matmuls(spec, spec.kinds(layer)):
            # Of the router every tp rank has a slice of the tokens.
            routed = layout.microbatches * slice_ if matmul.tp == "replicated_partial" else 0
            flops += passes * 2.0 * matmul.inputs * matmul.outputs * (visits if matmul.experts else routed)
    return flops


_NO_MATMUL = Matmul("", "", "", 0, 0, "replicated")


def _token_flops(spec: ModelSpec, layout: Layout, seq: int, operations: BlockOperations) -> float:
    """FLOPs of a token in a block, without the router and the experts that it chooses."""

    def flops(matmul: Matmul) -> float:
        ranks = layout.sp_degree if matmul.tp == "replicated" else 1
        return 2.0 * matmul.inputs * matmul.outputs / ranks

    dense = [matmul for matmul in operations.matmuls if matmul.dense]
    matmuls = sum(map(flops, dense))
    last = operations.matmuls[-1] if operations.matmuls else _NO_MATMUL
    attention = (
        4 * operations.attention.keys(seq / 2) * operations.attention.width
    )  # values are padded to the keys' width
    each = 3 * matmuls + 3.5 * attention  # backward: two matmuls for each, and attention's five for two
    if layout.recompute == "full":
        # The block's last matmul is not recomputed, since nothing in backward needs its output; unless it is one step
        # with what follows it, a collective or a deferred weight gradient. An expert's is needed: it is weighted; and a
        # shared one's comes before it, while tokens are in flight.
        needed = last.experts or (layout.ep > 1 and any(matmul.experts for matmul in operations.matmuls))
        stops = layout.tp == 1 and not layout.splits_backward and not needed
        each += matmuls - (flops(last) if stops else 0.0) + attention
    return each
