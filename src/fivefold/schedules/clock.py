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
    COLLECTIVES,
    COMPUTE_KINDS,
    FORWARD,
    GATHER,
    RECEIVE_KINDS,
    REDUCE,
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
    return ClockRun([rank.lane for rank in ranks], [rank.block for rank in ranks if rank.block is not None])


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

    def post(self, now: float) -> None:
        """Post the next receive."""
        self.posted.append(now)
        if len(self.arrived) < len(self.sent):
            self.transfer(self.sent[len(self.arrived)], self.posted[len(self.arrived)])

    def send(self, now: float) -> None:
        """Send the next message."""
        self.sent.append(now)
        if len(self.arrived) < len(self.posted):
            self.transfer(self.sent[len(self.arrived)], self.posted[len(self.arrived)])

    def transfer(self, sent: float, posted: float) -> None:
        """The next transfer, whose two sides are there."""
        start = self.free
        if sent > start:
            start = sent
        if posted > start:
            start = posted
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
        self.block: Blocked | None = None  # where it has to wait
        self.first_half: tuple[Action, float] | None = None  # the F of a joined pair, and when its input is there
        self.sending = False  # a blocking send is under way
        self.stream_free = 0.0  # when the stream of collectives has nothing left to run

    def walk(self) -> None:
        """Go on as far as possible. One loop for all kinds, on local names: planning spends much of its time here."""
        queues, durations, buffers = self.world.queues, self.world.durations, self.world.schedule.buffers
        gathered, link = self.world.collective_end[GATHER], self.world.costs.link
        eager, overlap = link.sends == "eager", link.overlap
        now, self.block = self.now, None
        for place in range(self.place, len(self.order)):
            action = self.order[place]
            kind, stage, microbatch, joined = action
            queue = queues[kind][stage]
            if kind in COMPUTE_KINDS:
                start = now
                if queue is not None:
                    number = queue.numbers.get(microbatch)
                    if number is None:
                        number = len(queue.numbers)
                    if not overlap and number == len(queue.posted):
                        queue.post(now)
                    if number >= len(queue.arrived):
                        self.wait(place, queue, number, queue.sender)
                        break
                    if queue.arrived[number] > start:
                        start = queue.arrived[number]
                if kind is FORWARD and gathered[stage] > start:
                    start = gathered[stage]
                if joined:
                    self.first_half = action, start
                elif self.first_half is not None:
                    now = self.pair(action, start)
                else:
                    now = start + durations[kind][stage]
                    self.lane.add(action, start, now)
            elif kind in COLLECTIVES:
                now = self.collective(action, now)
            elif queue is None:
                raise ValueError(f"{action} on rank {self.number} has no other rank to talk to; `check` says more")
            elif kind in RECEIVE_KINDS:
                queue.numbers[microbatch] = len(queue.numbers)
                if overlap:
                    queue.post(now)
            elif eager:
                oldest = len(queue.sent) - buffers
                if oldest >= 0:
                    if oldest >= len(queue.arrived):
                        self.wait(place, queue, oldest, queue.receiver)
                        break
                    if queue.arrived[oldest] > now:
                        now = queue.arrived[oldest]
                queue.send(now)
            else:
                if not self.sending:
                    self.sending = True
                    queue.send(now)
                number = len(queue.sent) - 1
                if number >= len(queue.arrived):
                    self.wait(place, queue, number, queue.receiver)
                    break
                self.sending = False
                now = queue.arrived[number]
        else:
            self.place = len(self.order)
        self.now = now

    def wait(self, place: int, queue: _Queue, number: int, peer: int) -> None:
        """Wait at a place of the list for message `number` of the queue."""
        self.place = place
        self.block = Blocked(self.number, self.order[place], queue.channel, number, peer, place)
        queue.waiting.append(self.number)

    def pair(self, action: Action, start: float) -> float:
        """Run a joined pair, of which this is the B; returns its end."""
        assert self.first_half is not None
        first, first_start = self.first_half
        start = max(start, first_start)
        end = start + self.world.joined(first.stage, action.stage)
        self.lane.add(first, start, end)
        self.lane.add(action, start, end)
        self.first_half = None
        return end

    def collective(self, action: Action, now: float) -> float:
        """Collectives of a rank run one after the other, beside its compute; STEP waits for the stage's REDUCE. Returns
        when the rank is free."""
        world, stage = self.world, action.stage
        if action.kind is STEP:
            start = max(now, world.collective_end[REDUCE][stage])
            self.lane.add(action, start, start + world.costs.step)
            return start + world.costs.step
        self.stream_free = max(self.stream_free, now) + (
            world.costs.gather if action.kind is GATHER else world.costs.reduce
        )
        world.collective_end[action.kind][stage] = self.stream_free
        return now
