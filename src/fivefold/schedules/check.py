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

from collections.abc import Callable, Iterator, Sequence
from itertools import chain, pairwise
from operator import gt, lt

from fivefold.schedules.action_index import NO_PLACE, ActionIndex, Row, ScheduleProblem
from fivefold.schedules.actions import (
    ALL_MICROBATCHES,
    BACKWARD,
    BACKWARD_HALVES,
    COLLECTIVES,
    FORWARD,
    GATHER,
    INPUT_GRAD,
    MESSAGE_KINDS,
    RECV_ACTIVATION,
    RECV_GRADIENT,
    REDUCE,
    SEND_ACTIVATION,
    SEND_GRADIENT,
    STEP,
    WEIGHT_GRAD,
    Action,
    Kind,
)
from fivefold.schedules.deadlock import deadlock, rendezvous
from fivefold.schedules.schedule import Schedule, live_counts
from fivefold.support.errors import UserError

# ---- complete -------------------------------------------------------------------------------------------------------
# Complete: each (stage, microbatch) has one F and one B, or one I and one W, where the stage lives; and each message
# that crosses ranks has one SEND and one RECV. Where a schedule also takes care of parameters, every stage is reduced
# and stepped once, and gathered if any is.


def complete(index: ActionIndex) -> Iterator[ScheduleProblem]:
    yield from _shape(index)
    yield from _unplaced(index)
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


def _unplaced(index: ActionIndex) -> Iterator[ScheduleProblem]:
    """Actions on the wrong rank, of stages or microbatches that do not exist, or for a second time."""
    schedule = index.schedule
    owner = schedule.placement.owner
    for rank, place, action in index.unplaced:
        name = f"rank {rank} has {index.action_text(rank, place)}"
        if not 0 <= action.stage < len(owner):
            yield ScheduleProblem(f"{name}, and there are {len(owner)} stages, 0 to {len(owner) - 1}", rank, place)
        elif owner[action.stage] != rank:
            yield ScheduleProblem(f"{name}, and stage {action.stage} lives on rank {owner[action.stage]}", rank, place)
        elif action.microbatch == ALL_MICROBATCHES:
            yield ScheduleProblem(f"{name} without a microbatch, and {action.kind} needs one: {action}.0", rank, place)
        elif not 0 <= action.microbatch < schedule.m:
            yield ScheduleProblem(
                f"{name}, and there are {schedule.m} microbatches, 0 to {schedule.m - 1}", rank, place
            )
        else:
            first = index.place_text(rank, index.places(action.kind, action.stage)[action.microbatch])
            yield ScheduleProblem(f"{name} for the second time; the first is {first}", rank, place)


def _compute(index: ActionIndex, stage: int) -> Iterator[ScheduleProblem]:
    rank = index.schedule.placement.owner[stage]
    forward, backward = index.places(FORWARD, stage), index.places(BACKWARD, stage)
    halves = {kind: index.places(kind, stage) for kind in BACKWARD_HALVES}
    for k in range(index.schedule.m):
        if forward[k] == NO_PLACE:
            yield ScheduleProblem(f"rank {rank} never runs {Action(FORWARD, stage, k)}", rank)
        present = [kind for kind, row in halves.items() if row[k] != NO_PLACE]
        if backward[k] != NO_PLACE:
            why = "a backward is whole or in two halves, not both"
            for kind in present:
                both = f"{Action(BACKWARD, stage, k)} and also {Action(kind, stage, k)}"
                yield ScheduleProblem(f"rank {rank} runs {both}: {why}", rank, halves[kind][k])
        elif not present:
            why = f"never runs a backward of {Action(FORWARD, stage, k)}: neither B nor I and W"
            yield ScheduleProblem(f"rank {rank} {why}", rank, forward[k])
        elif len(present) == 1:
            missing = next(kind for kind in BACKWARD_HALVES if kind not in present)
            why = f"runs {Action(present[0], stage, k)} but never {Action(missing, stage, k)}"
            yield ScheduleProblem(f"rank {rank} {why}", rank, halves[present[0]][k])


def _messages(index: ActionIndex) -> Iterator[ScheduleProblem]:
    """Each microbatch has one of each message where the neighbouring stage is on another rank, none where it is not."""
    owner, channel_of = index.schedule.placement.owner, index.schedule.placement.channel_of
    for stage, rank in enumerate(owner):
        for kind in MESSAGE_KINDS:
            places = index.places(kind, stage)
            if channel := channel_of.get((kind, stage)):
                other, does = (channel.target, "waits for") if kind is channel.send else (channel.source, "sends")
                why = f"stage {other} on rank {owner[other]} {does} it"
                for k in range(index.schedule.m):
                    if places[k] == NO_PLACE:
                        yield ScheduleProblem(f"rank {rank} never has {Action(kind, stage, k)}, and {why}", rank)
            else:
                why = f"there is no other rank at that end of stage {stage}"
                for k in index.sequence.get((kind, stage), ()):
                    yield ScheduleProblem(f"rank {rank} has {Action(kind, stage, k)}, and {why}", rank, places[k])


def _parameters(index: ActionIndex) -> Iterator[ScheduleProblem]:
    """Where any stage has one of GATHER, REDUCE and STEP, each is reduced and stepped; and gathered, if any is."""
    present = {kind for kind, _ in (*index.for_all, *index.sequence) if kind in COLLECTIVES}
    due = [kind for kind in COLLECTIVES if kind is not GATHER or kind in present]
    for stage in range(index.schedule.placement.stages if present else 0):
        for kind in due:
            yield from _once(index, kind, stage)


def _once(index: ActionIndex, kind: Kind, stage: int) -> Iterator[ScheduleProblem]:
    """A stage has one action of this kind for all microbatches, or (but not a STEP) one for each."""
    rank, action = index.schedule.placement.owner[stage], Action(kind, stage)
    for_all, single = index.for_all.get((kind, stage), []), index.sequence.get((kind, stage), [])
    if len(for_all) > 1:
        first, second = for_all[:2]
        again = f"rank {rank} has {index.action_text(rank, second)} a second time"
        yield ScheduleProblem(f"{again}; the first is {index.place_text(rank, first)}", rank, second)
    elif single and (for_all or kind is STEP):
        place = index.places(kind, stage)[single[0]]
        why = f"also {action} for all microbatches" if for_all else f"{kind} is for all microbatches: {action}"
        yield ScheduleProblem(f"rank {rank} has {index.action_text(rank, place)}, and {why}", rank, place)
    elif not for_all and not single:
        yield ScheduleProblem(
            f"rank {rank} never has {action}, and the schedule takes care of parameters elsewhere", rank
        )
    elif single and len(single) < index.schedule.m:
        missing = index.places(kind, stage).index(NO_PLACE)
        yield ScheduleProblem(f"rank {rank} has {action}.{single[0]}, but never {action}.{missing}", rank)


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
    """RECV < F < SEND, F < I < W and RECV < I < SEND for every microbatch of a stage."""
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
    """Where the next stage is on the same rank, its forward comes after this stage's, and its gradient before."""
    placement = index.schedule.placement
    if stage + 1 == placement.stages or placement.crosses(stage):
        return
    forwards = index.places(FORWARD, stage), index.places(FORWARD, stage + 1)
    gradients = index.input_gradients(stage + 1), index.input_gradients(stage)
    yield from _before(index, stage, *forwards, f"stage {stage} has made its input")
    yield from _before(index, stage, *gradients, f"stage {stage + 1} has made its gradient")


def _before(index: ActionIndex, stage: int, needed: Row, dependent: Row, cause: str) -> Iterator[ScheduleProblem]:
    """A problem for every microbatch whose `dependent` action stands before the `needed` one; both are places in the
    list of the stage's rank."""
    if not any(map(gt, needed, dependent)):
        return
    rank = index.schedule.placement.owner[stage]
    actions = index.schedule.ranks[rank]
    for early, late in zip(dependent, needed, strict=True):
        if early < late and early != NO_PLACE:
            late_place = f"{actions[late]} is {index.place_text(rank, late)}"
            yield ScheduleProblem(
                f"rank {rank} has {index.action_text(rank, early)} before {cause}: {late_place}", rank, early
            )


def _collectives(index: ActionIndex, stage: int) -> Iterator[ScheduleProblem]:
    """GATHER before the forwards it serves, REDUCE after the weight gradients it sums, STEP after all of them."""
    rank = index.schedule.placement.owner[stage]
    forward, weight = index.places(FORWARD, stage), index.weight_gradients(stage)
    for place in index.for_all.get((GATHER, stage), []):
        if place > min(forward):
            gather = index.action_text(rank, place)
            yield ScheduleProblem(f"rank {rank} has {gather} after its first forward", rank, place)
    for place in index.for_all.get((REDUCE, stage), []):
        if place < max(weight):
            yield ScheduleProblem(
                f"rank {rank} has {index.action_text(rank, place)} before its last weight gradient", rank, place
            )
    yield from _before(index, stage, index.places(GATHER, stage), forward, "its parameters are gathered")
    yield from _before(index, stage, weight, index.places(REDUCE, stage), "there is a weight gradient to reduce")
    reduced = [*index.for_all.get((REDUCE, stage), []), *index.places(REDUCE, stage)]
    for place in index.for_all.get((STEP, stage), []):
        if place < max(*weight, *reduced):
            step = index.action_text(rank, place)
            yield ScheduleProblem(f"rank {rank} has {step} before the gradients of the stage are final", rank, place)


def _pairs(index: ActionIndex) -> Iterator[ScheduleProblem]:
    """A joined pair is an F and the B right after it, and neither needs the other."""
    for rank, actions in enumerate(index.schedule.ranks):
        for place, action in enumerate(actions):
            if not action.joined:
                continue
            name = f"rank {rank} joins {index.action_text(rank, place)} with"
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
                    f"rank {rank} has {index.action_text(rank, after)} before {index.action_text(rank, before)}: "
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
        held = f"{counts[place]} stage activations from {index.action_text(rank, place)} on, {max(counts)} at most"
        yield ScheduleProblem(f"rank {rank} holds {held}, and {promised[rank]} are promised", rank, place)


def _receives(index: ActionIndex, rank: int) -> Iterator[ScheduleProblem]:
    buffers = index.schedule.buffers
    for stage in index.schedule.placement.of_rank[rank]:
        consumers = {RECV_ACTIVATION: index.places(FORWARD, stage), RECV_GRADIENT: index.input_gradients(stage)}
        for kind, consumed in consumers.items():
            posted = index.places(kind, stage)
            if NO_PLACE not in posted and _overflows([posted], [consumed], buffers):
                posts = f"posts more than {buffers} receives {kind}{stage} before their messages are consumed"
                yield ScheduleProblem(f"rank {rank} {posts}, and the schedule has {buffers} buffers per channel", rank)


def _overflows(taken: list[Row], freed: list[Row], most: int) -> bool:
    """Whether more than `most` are held at once: some n-th take comes before the (n - most)-th release."""
    takes, releases = sorted(chain(*taken)), sorted(chain(*freed))
    return any(map(lt, takes[most:], releases))


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


# ---- check ----------------------------------------------------------------------------------------------------------


Proof = Callable[[ActionIndex], Iterator[ScheduleProblem]]

# Each step takes for granted what the steps before it have shown.
PROOF_ROUNDS: tuple[tuple[Proof, ...], ...] = (
    (complete,),
    (order, channels, accumulate),
    (deadlock, bounds),
    (rendezvous,),
)


def check(schedule: Schedule, numbers: Sequence[Sequence[int]] | None = None) -> list[ScheduleProblem]:
    """All problems of a schedule; an empty list is the proof that it has none.

    `numbers[rank][place]` is the number of an action in sentences, if the user's list differs from the schedule's.
    """
    index = ActionIndex(schedule, numbers)
    for step in PROOF_ROUNDS:
        problems = [problem._replace(obligation=proof.__name__) for proof in step for problem in proof(index)]
        if problems:
            return problems
    return []


def prove(schedule: Schedule) -> Schedule:
    """Returns the schedule if it passes; raises a UserError with its problems if it does not."""
    if problems := check(schedule):
        raise UserError((f"schedule {schedule.name}: {problem}" for problem in problems), "schedule.proof")
    return schedule
