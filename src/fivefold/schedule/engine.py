"""Run a schedule on a clock: every rank walks its list, and stands still only where the real one would.

The walk is confluent: what a rank waits for never un-happens, so the order in which ranks are advanced changes neither
the times nor whether all of them finish. That is why one run decides about deadlock, and why a plain work list is
enough where one would expect an event queue. Each action is visited once, plus once per wake-up: the cost is linear.

What makes a rank stand still:
  a consumer  until its message is there;
  a SEND      until the message `buffers` before it on the channel is delivered (with blocking sends: its own);
  F, STEP     until the stage's GATHER or REDUCE is through.
A transfer starts when it is sent *and* its receive is posted: that is gloo always, and NCCL at any size that matters.
Data that stays on a rank needs no waiting: whoever makes it stands earlier in the same list.
"""

from typing import NamedTuple

from fivefold.schedule.actions import (
    COMPUTE,
    FORWARD,
    GATHER,
    GRADIENT_MAKERS,
    RECEIVES,
    REDUCE,
    SENDS,
    STEP,
    Action,
    Channel,
    Kind,
    channel_of,
)
from fivefold.schedule.costs import Costs
from fivefold.schedule.schedule import Schedule


class Span(NamedTuple):
    """An action that keeps its rank busy, and when it ran."""

    action: Action
    start: float
    end: float


class Block(NamedTuple):
    """Where a rank stands still for good: at this action, because the peer never gets to its side of the message."""

    rank: int
    action: Action
    channel: Channel
    message: int  # its place in the channel's FIFO
    peer: int


class Run(NamedTuple):
    """What happened: the spans of every rank, and the ranks that never finished."""

    spans: list[list[Span]]
    blocks: list[Block]


def run(schedule: Schedule, costs: Costs) -> Run:
    """Walk the schedule to its end, or to where nobody can move."""
    return _Engine(schedule, costs).run()


class _Queue:
    """One channel's FIFO: when message n was sent, when its receive was posted, when it arrived."""

    __slots__ = ("arrived", "channel", "free", "numbers", "posted", "receiver", "sender", "sent", "waiting")

    def __init__(self, channel: Channel, sender: int, receiver: int) -> None:
        self.channel, self.sender, self.receiver = channel, sender, receiver
        self.sent: list[float] = []
        self.posted: list[float] = []
        self.arrived: list[float] = []
        self.numbers: dict[int, int] = {}  # microbatch -> its place in the FIFO, as the receiver counts
        self.free = 0.0  # when the channel can take the next message
        self.waiting: list[int] = []  # ranks to wake at the next arrival


class _Engine:
    def __init__(self, schedule: Schedule, costs: Costs) -> None:
        self.schedule, self.costs = schedule, costs
        self.latency, self.occupancy, self.overlap = (
            costs.link.latency,
            costs.link.occupancy,
            costs.link.overlap,
        )
        self.durations = {kind: costs.of(kind) for kind in COMPUTE}
        self.queues = _queues(schedule)
        self.handlers = dict.fromkeys(COMPUTE, self.compute)
        self.handlers |= dict.fromkeys(RECEIVES, self.receive)
        self.handlers |= dict.fromkeys(SENDS, self.send if costs.link.sends == "eager" else self.blocking_send)
        self.handlers |= {GATHER: self.gather, REDUCE: self.reduce, STEP: self.step}

        ranks, stages = schedule.p, schedule.placement.stages
        self.now = [0.0] * ranks  # when the rank is free again
        self.spans: list[list[Span]] = [[] for _ in range(ranks)]
        self.partner: list[tuple[Action, float] | None] = [None] * ranks  # first half of a joined pair, and its input
        self.blocks: list[Block | None] = [None] * ranks
        self.sending = [False] * ranks  # a blocking send is under way
        self.collectives = [0.0] * ranks  # when the rank's collective stream is free
        self.gathered = [0.0] * stages
        self.reduced = [0.0] * stages
        self.ready = list(reversed(range(ranks)))

    def run(self) -> Run:
        orders, handlers = self.schedule.ranks, self.handlers
        places = [0] * len(orders)
        while self.ready:
            rank = self.ready.pop()
            order, place = orders[rank], places[rank]
            while place < len(order) and handlers[order[place].kind](rank, order[place]):
                place += 1
            places[rank] = place
        stuck = [rank for rank, order in enumerate(orders) if places[rank] < len(order)]
        return Run(self.spans, [block for rank in stuck if (block := self.blocks[rank]) is not None])

    # Each handler returns whether the rank could go on; one that could not is visited again after a wake-up.

    def compute(self, rank: int, action: Action) -> bool:
        kind, stage, microbatch, joined = action
        start = self.now[rank]
        queue = self.queues.get((kind, stage))
        if queue is not None:
            number = queue.numbers.get(microbatch, len(queue.numbers))
            if not self.overlap and number == len(queue.posted):
                queue.posted.append(start)
                self.match(queue)
            if number >= len(queue.arrived):
                return self.wait(rank, action, queue, number, queue.sender)
            start = max(start, queue.arrived[number])
        if kind is FORWARD:
            start = max(start, self.gathered[stage])
        if joined:
            self.partner[rank] = action, start
            return True
        self.spend(rank, action, start)
        return True

    def spend(self, rank: int, action: Action, start: float) -> None:
        partner = self.partner[rank]
        if partner is None:
            end = start + self.durations[action.kind][action.stage]
        else:
            first, first_start = partner
            start = max(start, first_start)
            forward, backward = (first, action) if first.kind is FORWARD else (action, first)
            end = start + self.costs.joined(forward.stage, backward.stage)
            self.spans[rank].append(Span(first, start, end))
            self.partner[rank] = None
        self.spans[rank].append(Span(action, start, end))
        self.now[rank] = end

    def receive(self, rank: int, action: Action) -> bool:
        queue = self.queues[action[:2]]
        queue.numbers[action.microbatch] = len(queue.numbers)
        if self.overlap:
            queue.posted.append(self.now[rank])
            self.match(queue)
        return True

    def send(self, rank: int, action: Action) -> bool:
        queue = self.queues[action[:2]]
        oldest = len(queue.sent) - self.schedule.buffers
        if oldest >= len(queue.arrived):
            return self.wait(rank, action, queue, oldest, queue.receiver)
        if oldest >= 0 and queue.arrived[oldest] > self.now[rank]:
            self.now[rank] = queue.arrived[oldest]
        queue.sent.append(self.now[rank])
        self.match(queue)
        return True

    def blocking_send(self, rank: int, action: Action) -> bool:
        queue = self.queues[action[:2]]
        if not self.sending[rank]:
            self.sending[rank] = True
            queue.sent.append(self.now[rank])
            self.match(queue)
        number = len(queue.sent) - 1
        if number >= len(queue.arrived):
            return self.wait(rank, action, queue, number, queue.receiver)
        self.sending[rank] = False
        self.now[rank] = queue.arrived[number]
        return True

    def match(self, queue: _Queue) -> None:
        """Start the next transfer of a channel once both sides are there."""
        number = len(queue.arrived)
        if number < len(queue.sent) and number < len(queue.posted):
            start = max(queue.sent[number], queue.posted[number], queue.free)
            queue.free = start + self.occupancy
            queue.arrived.append(queue.free + self.latency)
            if queue.waiting:
                self.ready += queue.waiting
                queue.waiting.clear()

    def wait(self, rank: int, action: Action, queue: _Queue, number: int, peer: int) -> bool:
        self.blocks[rank] = Block(rank, action, queue.channel, number, peer)
        queue.waiting.append(rank)
        return False

    def gather(self, rank: int, action: Action) -> bool:
        self.gathered[action.stage] = self.collective(rank, self.costs.gather)
        return True

    def reduce(self, rank: int, action: Action) -> bool:
        self.reduced[action.stage] = self.collective(rank, self.costs.reduce)
        return True

    def collective(self, rank: int, duration: float) -> float:
        self.collectives[rank] = max(self.collectives[rank], self.now[rank]) + duration
        return self.collectives[rank]

    def step(self, rank: int, action: Action) -> bool:
        start = max(self.now[rank], self.reduced[action.stage])
        self.now[rank] = start + self.costs.step
        self.spans[rank].append(Span(action, start, self.now[rank]))
        return True


def _queues(schedule: Schedule) -> dict[tuple[Kind, int], _Queue]:
    """The FIFO that each (kind, stage) sends on, receives from, or computes out of."""
    placement = schedule.placement
    queues: dict[tuple[Kind, int], _Queue] = {}
    for boundary in filter(placement.crosses, range(placement.stages - 1)):
        for gradients in (False, True):
            channel = Channel(boundary, gradients)
            queue = _Queue(channel, placement.owner[channel.source], placement.owner[channel.target])
            for kind in SENDS:
                if channel_of(Action(kind, channel.source)) == channel:
                    queues[kind, channel.source] = queue
            for kind in RECEIVES:
                if channel_of(Action(kind, channel.target)) == channel:
                    queues[kind, channel.target] = queue
            for kind in GRADIENT_MAKERS if gradients else {FORWARD}:
                queues[kind, channel.target] = queue
    return queues
