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

from functools import cache
from typing import NamedTuple

from fivefold.schedules.actions import (
    COMPUTE_KINDS,
    FORWARD,
    GATHER,
    RECEIVE_KINDS,
    REDUCE,
    SEND_KINDS,
    STEP,
    Action,
    Channel,
    Kind,
)
from fivefold.schedules.costs import Costs, MessageLink
from fivefold.schedules.schedule import Placement, Schedule


class BusySpan(NamedTuple):
    """An action that keeps its rank busy, and when it ran."""

    action: Action
    start: float
    end: float


class Lane:
    """The actions that kept one rank busy, in order. Parallel lists: an object per action costs a third more time."""

    def __init__(self) -> None:
        self.actions: list[Action] = []
        self.starts: list[float] = []
        self.ends: list[float] = []

    def add(self, action: Action, start: float, end: float) -> None:
        self.actions.append(action)
        self.starts.append(start)
        self.ends.append(end)

    @property
    def first(self) -> float:
        return self.starts[0] if self.starts else 0.0

    @property
    def last(self) -> float:
        return self.ends[-1] if self.ends else 0.0

    @property
    def busy(self) -> float:
        """The time at work. The two halves of a joined pair cover the same time, and count once."""
        entries = zip(self.actions, self.starts, self.ends, strict=True)
        return sum(end - start for action, start, end in entries if not action.joined)

    def spans(self) -> list[BusySpan]:
        return list(map(BusySpan, self.actions, self.starts, self.ends))


class Blocked(NamedTuple):
    """A rank that is stuck for good at `action`, because the peer never gets to its end of the message."""

    rank: int
    action: Action
    channel: Channel
    message: int  # its place in the channel's FIFO
    peer: int
    place: int  # of the action, in the rank's list


class ClockRun(NamedTuple):
    """The timeline of every rank, and the ranks that never finished."""

    lanes: list[Lane]
    blocks: list[Blocked]

    @property
    def makespan(self) -> float:
        return max((lane.last for lane in self.lanes), default=0.0)


def run(schedule: Schedule, costs: Costs) -> ClockRun:
    """Walk the schedule to its end, or to where nobody can move."""
    world = _World(schedule, costs)
    ranks = [_Rank(number, world) for number in range(schedule.p)]
    while world.ready:
        ranks[world.ready.pop()].walk()
    blocks = [rank.block._replace(place=rank.place) for rank in ranks if rank.block and rank.place < len(rank.order)]
    return ClockRun([rank.lane for rank in ranks], blocks)


class _Queue:
    """One channel's FIFO: when message n was sent, when its receive was posted, when it arrived."""

    def __init__(self, channel: Channel, placement: Placement, link: MessageLink, ready: list[int]) -> None:
        self.channel = channel
        self.sender, self.receiver = placement.owner[channel.source], placement.owner[channel.target]
        self.latency, self.occupancy = link.latency, link.occupancy
        self.sent: list[float] = []
        self.posted: list[float] = []
        self.arrived: list[float] = []
        self.numbers: dict[int, int] = {}  # microbatch -> its place in the FIFO, as the receiver counts
        self.free = 0.0  # when the channel can take the next message
        self.waiting: list[int] = []  # ranks that become ready at the next arrival
        self.ready = ready  # the list that `_World` pops, shared by all queues

    def match(self) -> None:
        """Start the next transfer once both sides are there."""
        number = len(self.arrived)
        if number < len(self.sent) and number < len(self.posted):
            start = max(self.sent[number], self.posted[number], self.free)
            self.free = start + self.occupancy
            self.arrived.append(self.free + self.latency)
            if self.waiting:
                self.ready += self.waiting
                self.waiting.clear()


class _World:
    """What the ranks share: the channels, the costs, and who can go on."""

    def __init__(self, schedule: Schedule, costs: Costs) -> None:
        self.schedule, self.costs = schedule, costs
        self.joined = cache(costs.joined)  # called for the same few stages again and again
        self.ready = list(reversed(range(schedule.p)))  # ranks that may go on
        self.durations = {kind: costs.of(kind) for kind in COMPUTE_KINDS}
        # By kind and stage: when the stage's last GATHER or REDUCE ends.
        self.collective_end = {kind: [0.0] * schedule.placement.stages for kind in (GATHER, REDUCE)}
        # By kind and stage: the queue of `Placement.channel_of`.
        self.queues: dict[Kind, list[_Queue | None]] = {kind: [None] * schedule.placement.stages for kind in Kind}
        placement = schedule.placement
        queues = {channel: _Queue(channel, placement, costs.link, self.ready) for channel in placement.channels}
        for (kind, stage), channel in placement.channel_of.items():
            self.queues[kind][stage] = queues[channel]


class _Rank:
    """One rank on its way through its list."""

    def __init__(self, number: int, world: _World) -> None:
        self.number, self.world = number, world
        self.order = world.schedule.ranks[number]
        self.place = 0
        self.now = 0.0  # when the rank is free again
        self.lane = Lane()
        self.block: Blocked | None = None  # where it last had to wait
        self.first_half: tuple[Action, float] | None = None  # the F of a joined pair, and when its input is there
        self.sending = False  # a blocking send is under way
        self.stream_free = 0.0  # when the stream of collectives has nothing left to run
        self.queues, self.buffers = world.queues, world.schedule.buffers
        link = world.costs.link
        self.overlap = link.overlap
        self.handlers = {
            **dict.fromkeys(COMPUTE_KINDS, self.compute),
            **dict.fromkeys(RECEIVE_KINDS, self.receive),
            **dict.fromkeys(SEND_KINDS, self.send if link.sends == "eager" else self.blocking_send),
            **dict.fromkeys((GATHER, REDUCE), self.collective),
            STEP: self.step,
        }

    def walk(self) -> None:
        """Go on as far as possible. A handler returns whether the rank may pass its action."""
        order, place, handlers = self.order, self.place, self.handlers
        while place < len(order) and handlers[order[place][0]](order[place]):
            place += 1
        self.place = place

    def compute(self, action: Action) -> bool:
        kind, stage, microbatch, joined = action
        start = self.now
        queue = self.queues[kind][stage]
        if queue is not None:
            number = queue.numbers.get(microbatch, len(queue.numbers))
            if not self.overlap and number == len(queue.posted):
                queue.posted.append(start)
                queue.match()
            if number >= len(queue.arrived):
                return self.wait(action, queue, number, queue.sender)
            start = max(start, queue.arrived[number])
        if kind is FORWARD:
            start = max(start, self.world.collective_end[GATHER][stage])
        if joined:
            self.first_half = action, start
        elif self.first_half is not None:
            first, first_start = self.first_half
            start = max(start, first_start)
            self.now = start + self.world.joined(first.stage, stage)
            self.lane.add(first, start, self.now)
            self.lane.add(action, start, self.now)
            self.first_half = None
        else:
            self.now = start + self.world.durations[kind][stage]
            self.lane.add(action, start, self.now)
        return True

    def receive(self, action: Action) -> bool:
        queue = self.queue(action)
        queue.numbers[action.microbatch] = len(queue.numbers)
        if self.overlap:
            queue.posted.append(self.now)
            queue.match()
        return True

    def send(self, action: Action) -> bool:
        queue = self.queue(action)
        oldest = len(queue.sent) - self.buffers
        if oldest >= 0:
            if oldest >= len(queue.arrived):
                return self.wait(action, queue, oldest, queue.receiver)
            self.now = max(self.now, queue.arrived[oldest])
        queue.sent.append(self.now)
        queue.match()
        return True

    def blocking_send(self, action: Action) -> bool:
        queue = self.queue(action)
        if not self.sending:
            self.sending = True
            queue.sent.append(self.now)
            queue.match()
        number = len(queue.sent) - 1
        if number >= len(queue.arrived):
            return self.wait(action, queue, number, queue.receiver)
        self.sending = False
        self.now = queue.arrived[number]
        return True

    def wait(self, action: Action, queue: _Queue, number: int, peer: int) -> bool:
        """Wait at an action for message `number` of the queue; returns False, as the handler then does."""
        self.block = Blocked(self.number, action, queue.channel, number, peer, self.place)
        queue.waiting.append(self.number)
        return False

    def queue(self, action: Action) -> _Queue:
        """The queue of a SEND or a RECV."""
        queue = self.queues[action[0]][action[1]]
        if queue is None:
            raise ValueError(f"{action} on rank {self.number} has no other rank to talk to; `check` says more")
        return queue

    def collective(self, action: Action) -> bool:
        """Collectives of a rank run one after the other, beside its compute."""
        costs = self.world.costs
        duration = costs.gather if action.kind is GATHER else costs.reduce
        self.stream_free = max(self.stream_free, self.now) + duration
        self.world.collective_end[action.kind][action.stage] = self.stream_free
        return True

    def step(self, action: Action) -> bool:
        start = max(self.now, self.world.collective_end[REDUCE][action.stage])
        self.now = start + self.world.costs.step
        self.lane.add(action, start, self.now)
        return True
