"""The proof obligations of a schedule. What passes here can be run; what does not is refused with a sentence.

  complete    every forward has its backward, on the rank that owns the stage, and every message its two ends
  order       within a rank, nothing runs before what it needs
  channels    both ends of every FIFO list their messages in the same order
  deadlock    with bounded buffers and nothing but waiting, every rank gets to the end of its list
  rendezvous  so it does if a message holds up both its ranks until they have met, as NCCL's may
  accumulate  weight gradients are summed in the order of a single device, so that they are the same to the bit
  bounds      activations, posted receives and slots stay within what is promised

The checker reads the action lists and nothing else: it knows no builder and no schedule by name.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from itertools import chain, pairwise
from operator import gt, lt
from typing import NamedTuple

from fivefold.schedules.actions import (
    ALL,
    BACKWARD,
    COLLECTIVES,
    FORWARD,
    GATHER,
    HALVES,
    INPUT_GRAD,
    MESSAGES,
    RECV_ACTIVATION,
    RECV_GRADIENT,
    REDUCE,
    SEND_ACTIVATION,
    SEND_GRADIENT,
    SENDS,
    STEP,
    WEIGHT_GRAD,
    Action,
    Channel,
    Kind,
)
from fivefold.schedules.clock import Blocked, ClockRun, run
from fivefold.schedules.costs import Costs
from fivefold.schedules.schedule import Schedule, live_counts
from fivefold.support.errors import UserError

# ---- index ----------------------------------------------------------------------------------------------------------
# What proofs read and what they find: where every action of a schedule stands, and `ScheduleProblem`.


ABSENT = -1
Row = list[int]  # by microbatch


class ScheduleProblem(NamedTuple):
    """A broken obligation: a sentence with rank, action and cause, and where to look."""

    sentence: str
    rank: int | None = None
    place: int | None = None  # in the rank's list, counted from 0
    obligation: str = ""

    def __str__(self) -> str:
        return f"{self.obligation}: {self.sentence}" if self.obligation else self.sentence


class ActionIndex:
    """The places of a schedule's actions.

    `places[kind, stage][microbatch]` is the place in the list of the rank that runs it; `sequence[kind, stage]` has the
    microbatches in the order they come in. Actions that cannot be placed (a foreign stage, a second copy) are put aside
    in `strays` as (rank, place, action), for `complete` to name.
    """

    def __init__(self, schedule: Schedule, numbers: Sequence[Sequence[int]] | None = None) -> None:
        self.schedule = schedule
        self.numbers = numbers  # by rank and place: how sentences count the action; None: as the list does
        self.strays: list[tuple[int, int, Action]] = []
        self.sequence: defaultdict[tuple[Kind, int], list[int]] = defaultdict(list)
        self.whole: defaultdict[tuple[Kind, int], list[int]] = defaultdict(list)  # places of GATHER3, REDUCE3, STEP3
        self._places: dict[tuple[Kind, int], Row] = {}
        for rank in range(schedule.p):
            self._read(rank)

    def _read(self, rank: int) -> None:
        m, places, sequence, of_rank = self.schedule.m, self._places, self.sequence, self.schedule.placement.of_rank
        own = set(of_rank[rank] if rank < len(of_rank) else ())
        for place, action in enumerate(self.schedule.ranks[rank]):
            kind, stage, microbatch, _ = action
            if microbatch == ALL and kind in COLLECTIVES and stage in own:
                self.whole[kind, stage].append(place)
                continue
            row = places.get((kind, stage))
            if row is None:
                row = places[kind, stage] = [ABSENT] * m
            if stage not in own or not 0 <= microbatch < m or row[microbatch] != ABSENT:
                self.strays.append((rank, place, action))
                continue
            row[microbatch] = place
            sequence[kind, stage].append(microbatch)

    def action(self, rank: int, place: int) -> str:
        """What sentences call a place: 'action 7'."""
        return f"action {place if self.numbers is None else self.numbers[rank][place]}"

    def named(self, rank: int, place: int) -> str:
        """What stands there, and the place: 'F0.1 (action 7)'."""
        return f"{self.schedule.ranks[rank][place]} ({self.action(rank, place)})"

    def places(self, kind: Kind, stage: int) -> Row:
        """By microbatch, the place of an action in its rank's list, or ABSENT."""
        return self._places.get((kind, stage)) or [ABSENT] * self.schedule.m

    def input_gradients(self, stage: int) -> Row:
        """By microbatch, where the gradient of the stage's input is made: its B or its I."""
        return _either(self.places(BACKWARD, stage), self.places(INPUT_GRAD, stage))

    def weight_gradients(self, stage: int) -> Row:
        """By microbatch, where the stage's weight gradient is made: its B or its W."""
        return _either(self.places(BACKWARD, stage), self.places(WEIGHT_GRAD, stage))

    @cached_property
    def run(self) -> ClockRun:
        """The schedule on the clock of `Promise.slots`. Only for those that are complete and in order."""
        return run(self.schedule, Costs.slots(self.schedule.placement))


def _either(first: Row, second: Row) -> Row:
    return [a if a != ABSENT else b for a, b in zip(first, second, strict=True)]


# ---- bounds ---------------------------------------------------------------------------------------------------------
# Bounds: live activations within the promised peak, posted receives within the buffers, slots within the promise.


def bounds(index: ActionIndex) -> Iterator[ScheduleProblem]:
    for rank in range(index.schedule.p):
        yield from _activations(index, rank)
        yield from _receives(index, rank)
    yield from _slots(index)


def _activations(index: ActionIndex, rank: int) -> Iterator[ScheduleProblem]:
    promised = index.schedule.promise.peak
    if promised is None:
        return
    stages = index.schedule.placement.of_rank[rank]
    taken = [index.places(FORWARD, stage) for stage in stages]
    freed = [index.weight_gradients(stage) for stage in stages]
    if _overflows(taken, freed, promised[rank]):
        counts = live_counts(index.schedule.ranks[rank])
        place = next(place for place, live in enumerate(counts) if live > promised[rank])
        held = f"{counts[place]} stage activations from {index.named(rank, place)} on, {max(counts)} at most"
        yield ScheduleProblem(f"rank {rank} holds {held}, and {promised[rank]} are promised", rank, place)


def _receives(index: ActionIndex, rank: int) -> Iterator[ScheduleProblem]:
    buffers = index.schedule.buffers
    for stage in index.schedule.placement.of_rank[rank]:
        consumers = {RECV_ACTIVATION: index.places(FORWARD, stage), RECV_GRADIENT: index.input_gradients(stage)}
        for kind, consumed in consumers.items():
            posted = index.places(kind, stage)
            if ABSENT not in posted and _overflows([posted], [consumed], buffers):
                posts = f"posts more than {buffers} receives {kind}{stage} before their messages are consumed"
                yield ScheduleProblem(f"rank {rank} {posts}, and the schedule has {buffers} buffers per channel", rank)


def _overflows(taken: list[Row], freed: list[Row], most: int) -> bool:
    """Whether more than `most` are ever held: the n-th is taken before the one `most` earlier is freed."""
    takes, frees = sorted(chain(*taken)), sorted(chain(*freed))
    return any(map(lt, takes[most:], frees))


def _slots(index: ActionIndex) -> Iterator[ScheduleProblem]:
    promised = index.schedule.promise.slots
    if promised is None or index.run.blocks:
        return
    slots = index.run.makespan
    if slots > promised:
        last = max(range(index.schedule.p), key=lambda rank: index.run.lanes[rank].last)
        action = index.run.lanes[last].actions[-1]
        yield ScheduleProblem(
            f"rank {last} ends with {action} after {slots:g} slots, and {promised} are promised: the bubble is "
            f"{slots - promised:g} slots larger than it should be",
            last,
            len(index.schedule.ranks[last]) - 1,
        )


# ---- complete -------------------------------------------------------------------------------------------------------
# Complete: each (stage, microbatch) has one F and one B, or one I and one W, where the stage lives; and each message
# that crosses ranks has one SEND and one RECV. Where a schedule also takes care of parameters, every stage is reduced
# and stepped once, and gathered if any is.


def complete(index: ActionIndex) -> Iterator[ScheduleProblem]:
    yield from _shape(index)
    yield from _strays(index)
    for stage in range(index.schedule.placement.stages):
        yield from _compute(index, stage)
    yield from _messages(index)
    yield from _parameters(index)


def _shape(index: ActionIndex) -> Iterator[ScheduleProblem]:
    schedule = index.schedule
    peak = schedule.promise.peak
    if schedule.p != schedule.placement.ranks:
        yield ScheduleProblem(
            f"there are action lists for {schedule.p} ranks, and stages on {schedule.placement.ranks}"
        )
    if schedule.m < 1 or schedule.buffers < 1:
        yield ScheduleProblem(f"{schedule.m} microbatches and {schedule.buffers} buffers: both must be at least 1")
    if peak is not None and len(peak) != schedule.p:
        yield ScheduleProblem(f"a peak is promised for {len(peak)} ranks, and there are {schedule.p}")
    for rank, stages in enumerate(schedule.placement.of_rank):
        if not stages:
            yield ScheduleProblem(f"rank {rank} owns no stage", rank)


def _strays(index: ActionIndex) -> Iterator[ScheduleProblem]:
    """Actions on the wrong rank, of stages or microbatches that do not exist, or for a second time."""
    schedule = index.schedule
    owner = schedule.placement.owner
    for rank, place, action in index.strays:
        name = f"rank {rank} has {index.named(rank, place)}"
        if not 0 <= action.stage < len(owner):
            yield ScheduleProblem(f"{name}, and there are {len(owner)} stages, 0 to {len(owner) - 1}", rank, place)
        elif owner[action.stage] != rank:
            yield ScheduleProblem(f"{name}, and stage {action.stage} lives on rank {owner[action.stage]}", rank, place)
        elif action.microbatch == ALL:
            yield ScheduleProblem(f"{name} without a microbatch, and {action.kind} needs one: {action}.0", rank, place)
        elif not 0 <= action.microbatch < schedule.m:
            yield ScheduleProblem(
                f"{name}, and there are {schedule.m} microbatches, 0 to {schedule.m - 1}", rank, place
            )
        else:
            first = index.places(action.kind, action.stage)[action.microbatch]
            yield ScheduleProblem(f"{name} for the second time; the first is {index.action(rank, first)}", rank, place)


def _compute(index: ActionIndex, stage: int) -> Iterator[ScheduleProblem]:
    rank = index.schedule.placement.owner[stage]
    forward, backward = index.places(FORWARD, stage), index.places(BACKWARD, stage)
    halves = {kind: index.places(kind, stage) for kind in HALVES}
    for k in range(index.schedule.m):
        if forward[k] == ABSENT:
            yield ScheduleProblem(f"rank {rank} never runs {Action(FORWARD, stage, k)}", rank)
        present = [kind for kind, row in halves.items() if row[k] != ABSENT]
        if backward[k] != ABSENT:
            why = "a backward is whole or in two halves, not both"
            for kind in present:
                both = f"{Action(BACKWARD, stage, k)} and also {Action(kind, stage, k)}"
                yield ScheduleProblem(f"rank {rank} runs {both}: {why}", rank, halves[kind][k])
        elif not present:
            why = f"never runs a backward of {Action(FORWARD, stage, k)}: neither B nor I and W"
            yield ScheduleProblem(f"rank {rank} {why}", rank, forward[k])
        elif len(present) == 1:
            missing = next(kind for kind in HALVES if kind not in present)
            why = f"runs {Action(present[0], stage, k)} but never {Action(missing, stage, k)}"
            yield ScheduleProblem(f"rank {rank} {why}", rank, halves[present[0]][k])


def _messages(index: ActionIndex) -> Iterator[ScheduleProblem]:
    """One of each message per microbatch where the neighbouring stage is on another rank, none where it is not."""
    owner, channel_of = index.schedule.placement.owner, index.schedule.placement.channel_of
    for stage, rank in enumerate(owner):
        for kind in MESSAGES:
            places = index.places(kind, stage)
            if channel := channel_of.get((kind, stage)):
                other, does = (channel.target, "waits for") if kind is channel.send else (channel.source, "sends")
                why = f"stage {other} on rank {owner[other]} {does} it"
                for k in range(index.schedule.m):
                    if places[k] == ABSENT:
                        yield ScheduleProblem(f"rank {rank} never has {Action(kind, stage, k)}, and {why}", rank)
            else:
                why = f"there is no other rank at that end of stage {stage}"
                for k in index.sequence.get((kind, stage), ()):
                    yield ScheduleProblem(f"rank {rank} has {Action(kind, stage, k)}, and {why}", rank, places[k])


def _parameters(index: ActionIndex) -> Iterator[ScheduleProblem]:
    """Where any stage has one of GATHER, REDUCE and STEP, each is reduced and stepped; and gathered, if any is."""
    present = {kind for kind, _ in (*index.whole, *index.sequence) if kind in COLLECTIVES}
    due = [kind for kind in COLLECTIVES if kind is not GATHER or kind in present]
    for stage in range(index.schedule.placement.stages if present else 0):
        for kind in due:
            yield from _once(index, kind, stage)


def _once(index: ActionIndex, kind: Kind, stage: int) -> Iterator[ScheduleProblem]:
    """One for all microbatches, or (but not for STEP) one for each."""
    rank, action = index.schedule.placement.owner[stage], Action(kind, stage)
    whole, single = index.whole.get((kind, stage), []), index.sequence.get((kind, stage), [])
    if len(whole) > 1:
        first, second = whole[:2]
        again = f"rank {rank} has {index.named(rank, second)} a second time"
        yield ScheduleProblem(f"{again}; the first is {index.action(rank, first)}", rank, second)
    elif single and (whole or kind is STEP):
        place = index.places(kind, stage)[single[0]]
        why = f"also {action} for all microbatches" if whole else f"{kind} is for all microbatches: {action}"
        yield ScheduleProblem(f"rank {rank} has {index.named(rank, place)}, and {why}", rank, place)
    elif not whole and not single:
        yield ScheduleProblem(
            f"rank {rank} never has {action}, and the schedule takes care of parameters elsewhere", rank
        )
    elif single and len(single) < index.schedule.m:
        missing = index.places(kind, stage).index(ABSENT)
        yield ScheduleProblem(f"rank {rank} has {action}.{single[0]}, but never {action}.{missing}", rank)


# ---- deadlock -------------------------------------------------------------------------------------------------------
# Deadlock: run the lists and see who is left. Twice: as gloo runs them, and as NCCL may.
#
# `deadlock` posts receives where they stand, and holds sends back by the buffers: so the runtime executes on CPUs.
# `rendezvous` lets every message hold up both its ranks until they have met. NCCL's messages are kernels on the
# device: an action that waits for all of it, to load a kernel, to allocate, to compile, waits for every message that
# its rank has posted before. With receives posted only when their consumer's turn has come, `simulate` may find a
# deadlock all the same.
#
# Waiting is all that ranks do to each other, and what they wait for never un-happens; so if one run gets through,
# every run does, at any speed of ranks and links.


def deadlock(index: ActionIndex) -> Iterator[ScheduleProblem]:
    if index.run.blocks:
        first = _circle(index.run.blocks)[0]
        yield ScheduleProblem(deadlock_sentence(index.run.blocks), first.rank, first.place)


def rendezvous(index: ActionIndex) -> Iterator[ScheduleProblem]:
    if blocks := _meet(index):
        first, why = _circle(blocks)[0], "on NCCL a posted message may hold up all that its rank does after it"
        cure = "leave out SEND and RECV, and write the line 'messages implied': then they are put where no circle is"
        yield ScheduleProblem(f"{deadlock_sentence(blocks)}; {why}; {cure}", first.rank, first.place)


def _meet(index: ActionIndex) -> list[Blocked]:
    """Who is left, if both ranks of a message stand at it until the other has come."""
    schedule, m = index.schedule, index.schedule.m
    channels = list(schedule.placement.channels)
    # By kind and stage, the number of a channel's first message; the others are counted on by microbatches.
    first = {(channel.send, channel.source): n * m for n, channel in enumerate(channels)}
    first |= {(channel.receive, channel.target): n * m for n, channel in enumerate(channels)}
    ways = [
        iter([n + k for kind, stage, k, _ in order if (n := first.get((kind, stage))) is not None])
        for order in schedule.ranks
    ]
    standing: dict[int, int] = {}  # by message, the rank that has come to it first
    ready = list(range(schedule.p))
    while ready:
        rank = ready.pop()
        for message in ways[rank]:
            if message not in standing:
                standing[message] = rank
                break
            ready.append(standing.pop(message))
    return sorted(_block(index, rank, channels[message // m], message % m) for message, rank in standing.items())


def _block(index: ActionIndex, rank: int, channel: Channel, microbatch: int) -> Blocked:
    owner = index.schedule.placement.owner
    ends = [(channel.send, channel.source), (channel.receive, channel.target)]
    (kind, stage), (_, other) = ends if owner[channel.source] == rank else reversed(ends)
    place, number = index.places(kind, stage)[microbatch], index.sequence[kind, stage].index(microbatch)
    return Blocked(rank, Action(kind, stage, microbatch), channel, number, owner[other], place)


def deadlock_sentence(blocks: list[Blocked]) -> str:
    """Who waits for whom."""
    circle = _circle(blocks)
    verdict = f"and rank {circle[-1].peer} has nothing more to send or receive"
    if circle[-1].peer == circle[0].rank:
        verdict = f"that is a circle of {len(circle)}, and nobody in it can move"
    return f"{'; '.join(map(_waits, circle))}; {verdict}"


def _circle(blocks: list[Blocked]) -> list[Blocked]:
    """The ranks that wait for each other in a circle; or the chain to one that is done and will never answer."""
    by_rank = {block.rank: block for block in blocks}
    path = [blocks[0]]
    while path[-1].peer in by_rank:
        following = by_rank[path[-1].peer]
        if following in path:
            return path[path.index(following) :]
        path.append(following)
    return path


def _waits(block: Blocked) -> str:
    waits, message = f"rank {block.rank} waits at {block.action}", f"message {block.message} of the {block.channel}"
    if block.action.kind in SENDS:
        return f"{waits} until rank {block.peer} posts the receive of {message}"
    return f"{waits} for {message} from rank {block.peer}"


# ---- order ----------------------------------------------------------------------------------------------------------
# Order: within a rank, nothing runs before what it needs. RECV < F < SEND, F < I < W, RECV < I < SEND; and where two
# neighbouring stages share a rank, one before the other. A joined pair runs as one: neither half may need the other.
# And the orders that two readers must agree on: of weight gradients in a sum, of messages in a channel.


def order(index: ActionIndex) -> Iterator[ScheduleProblem]:
    for stage in range(index.schedule.placement.stages):
        yield from _stage(index, stage)
        yield from _neighbours(index, stage)
        yield from _collectives(index, stage)
    yield from _pairs(index)


def _stage(index: ActionIndex, stage: int) -> Iterator[ScheduleProblem]:
    forward, gradient = index.places(FORWARD, stage), index.input_gradients(stage)
    received, sent = index.places(RECV_ACTIVATION, stage), index.places(SEND_ACTIVATION, stage)
    received_back, sent_back = index.places(RECV_GRADIENT, stage), index.places(SEND_GRADIENT, stage)
    halves = index.places(INPUT_GRAD, stage), index.places(WEIGHT_GRAD, stage)
    yield from _before(index, stage, received, forward, "its input is received")
    yield from _before(index, stage, forward, sent, "there is an output to send")
    yield from _before(index, stage, forward, gradient, "the forward has run")
    yield from _before(index, stage, received_back, gradient, "its gradient is received")
    yield from _before(index, stage, gradient, sent_back, "there is a gradient to send")
    yield from _before(index, stage, *halves, "the input gradient is there")


def _neighbours(index: ActionIndex, stage: int) -> Iterator[ScheduleProblem]:
    """Data that stays on a rank: the next stage's forward comes after this one's, its gradient before."""
    placement = index.schedule.placement
    if stage + 1 == placement.stages or placement.crosses(stage):
        return
    forwards = index.places(FORWARD, stage), index.places(FORWARD, stage + 1)
    gradients = index.input_gradients(stage + 1), index.input_gradients(stage)
    yield from _before(index, stage, *forwards, f"stage {stage} has made its input")
    yield from _before(index, stage, *gradients, f"stage {stage + 1} has made its gradient")


def _before(index: ActionIndex, stage: int, first: Row, then: Row, cause: str) -> Iterator[ScheduleProblem]:
    """A sentence for every microbatch where `then` stands before `first`; both are places in the stage's rank."""
    if not any(map(gt, first, then)):
        return
    rank = index.schedule.placement.owner[stage]
    actions = index.schedule.ranks[rank]
    for early, late in zip(then, first, strict=True):
        if early < late and early != ABSENT:
            late_place = f"{actions[late]} is {index.action(rank, late)}"
            yield ScheduleProblem(
                f"rank {rank} has {index.named(rank, early)} before {cause}: {late_place}", rank, early
            )


def _collectives(index: ActionIndex, stage: int) -> Iterator[ScheduleProblem]:
    """GATHER before the forwards it serves, REDUCE after the weight gradients it sums, STEP after all of them."""
    rank = index.schedule.placement.owner[stage]
    forward, weight = index.places(FORWARD, stage), index.weight_gradients(stage)
    for place in index.whole.get((GATHER, stage), []):
        if place > min(forward):
            yield ScheduleProblem(f"rank {rank} has {index.named(rank, place)} after its first forward", rank, place)
    for place in index.whole.get((REDUCE, stage), []):
        if place < max(weight):
            yield ScheduleProblem(
                f"rank {rank} has {index.named(rank, place)} before its last weight gradient", rank, place
            )
    yield from _before(index, stage, index.places(GATHER, stage), forward, "its parameters are gathered")
    yield from _before(index, stage, weight, index.places(REDUCE, stage), "there is a weight gradient to reduce")
    reduced = [*index.whole.get((REDUCE, stage), []), *index.places(REDUCE, stage)]
    for place in index.whole.get((STEP, stage), []):
        if place < max(*weight, *reduced):
            yield ScheduleProblem(
                f"rank {rank} has {index.named(rank, place)} before the gradients of the stage are final", rank, place
            )


def _pairs(index: ActionIndex) -> Iterator[ScheduleProblem]:
    for rank, actions in enumerate(index.schedule.ranks):
        for place, action in enumerate(actions):
            if not action.joined:
                continue
            name = f"rank {rank} joins {index.named(rank, place)} with"
            partner = actions[place + 1] if place + 1 < len(actions) else None
            if partner is None:
                yield ScheduleProblem(f"{name} nothing: it is the last action", rank, place)
            elif (action.kind, partner.kind) != (FORWARD, BACKWARD):
                # The F comes first, because a pair holds its new activation before it gives the old one back.
                yield ScheduleProblem(f"{name} {partner}; only an F and the B after it can be joined", rank, place)
            elif action[1:3] == partner[1:3]:
                yield ScheduleProblem(f"{name} {partner}, which needs its result", rank, place)


def accumulate(index: ActionIndex) -> Iterator[ScheduleProblem]:
    """A stage's weight gradients are added up in ascending order of microbatches, as a single device does it.

    Floating-point sums depend on their order; this is what makes a pipeline's gradients equal to the last bit.
    """
    for stage, rank in enumerate(index.schedule.placement.owner):
        for before, after in pairwise(index.weight_gradients(stage)):
            if after < before:
                yield ScheduleProblem(
                    f"rank {rank} has {index.named(rank, after)} before {index.named(rank, before)}: "
                    f"the weight gradients of stage {stage} would be summed in another order than on a single device",
                    rank,
                    after,
                )


def channels(index: ActionIndex) -> Iterator[ScheduleProblem]:
    """Both ends of a FIFO list the same order. NCCL pairs messages by order alone."""
    owner = index.schedule.placement.owner
    for channel in index.schedule.placement.channels:
        send, source, receive, target = channel.send, channel.source, channel.receive, channel.target
        sent, received = index.sequence[send, source], index.sequence[receive, target]
        if sent == received:
            continue
        number = next(n for n, pair in enumerate(zip(sent, received, strict=True)) if pair[0] != pair[1])
        yield ScheduleProblem(
            f"message {number} of the {channel} is {Action(send, source, sent[number])} on rank {owner[source]} and "
            f"{Action(receive, target, received[number])} on rank {owner[target]}: the two ends do not list the same "
            "order",
            owner[target],
            index.places(receive, target)[received[number]],
        )


# ---- check ----------------------------------------------------------------------------------------------------------


Proof = Callable[[ActionIndex], Iterator[ScheduleProblem]]

# Each step takes for granted what the steps before it have shown.
STEPS: tuple[tuple[Proof, ...], ...] = ((complete,), (order, channels, accumulate), (deadlock, bounds), (rendezvous,))


def check(schedule: Schedule, numbers: Sequence[Sequence[int]] | None = None) -> list[ScheduleProblem]:
    """Everything that is wrong with a schedule; an empty list is the proof that nothing is.

    `numbers[rank][place]` is how sentences count an action, where the user knows another list than the schedule's.
    """
    index = ActionIndex(schedule, numbers)
    for step in STEPS:
        problems = [found._replace(obligation=proof.__name__) for proof in step for found in proof(index)]
        if problems:
            return problems
    return []


def prove(schedule: Schedule) -> Schedule:
    """The schedule itself when it passes, a UserError with the reasons when it does not."""
    problems = check(schedule)
    if problems:
        about = f"schedule {schedule.name}"
        raise UserError(f"{about}: {problem}" for problem in problems)
    return schedule
