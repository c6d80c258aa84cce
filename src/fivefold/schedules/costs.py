"""What actions cost: durations per stage and kind, the size of an activation, and the link between two ranks."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from operator import mul
from statistics import median
from typing import Any, Literal, NamedTuple, Self

from fivefold.schedules.actions import BACKWARD, FORWARD, INPUT_GRAD, WEIGHT_GRAD, Kind
from fivefold.schedules.schedule import Placement
from fivefold.support.errors import UserError
from fivefold.support.text import did_you_mean, figure, whole_number

# ---- pairs ----------------------------------------------------------------------------------------------------------
# How long a joined pair takes when each half computes during the other's messages, by the rule that executes it.
#
#     forward = [Segment(2.0, message=1.0, beside=0.5), Segment(1.0, message=1.0), Segment(0.5)]
#     play_pair(forward, backward).pair
#
# A pass is a list of segments. In each it computes, then issues a message (the dispatch of tokens to experts, or the
# combine of their outputs), computes what it can `beside` it, and waits until the message is there. The two halves of a
# pair take turns, and only one computes at a time. The forward pass goes first; a half yields its turn before each
# wait, and takes up its wait when it is its turn again; when one half ends, the other runs on. So the order of all
# messages follows from the two lists, never from which rank is quicker. Both halves' messages share one link: two at a
# time take twice as long each.


class Segment(NamedTuple):
    """Part of a pass: `compute`, then a `message`, with so much compute `beside` it; seconds, or any unit of time."""

    compute: float
    message: float = 0.0
    beside: float = 0.0


Segments = tuple[Segment, ...]


class PairTimes(NamedTuple):
    """How long each half takes by itself, and both as a pair."""

    forward: float
    backward: float
    pair: float

    @property
    def hidden(self) -> float:
        """The time that the pair saves against one half after the other."""
        return self.forward + self.backward - self.pair


def scaled(segments: Segments, factor: float) -> Segments:
    """The same pass on a rank that takes `factor` times as long."""
    return tuple(Segment(*(factor * part for part in segment)) for segment in segments)


def segments_of_one_block(forward: float, backward: float, messages: float) -> tuple[Segments, Segments]:
    """The segments of a stage's F and B where only the time of each pass is known, and that of the messages in it.

    The stage counts as one block: half of its forward compute comes before the dispatch, and half is the experts';
    backward is the mirror of it.
    """
    half_forward, half_backward, message = (forward - messages) / 2, (backward - messages) / 2, messages / 2
    return (
        (Segment(half_forward, message), Segment(half_forward, message)),
        (Segment(0.0, message), Segment(half_backward, message), Segment(half_backward)),
    )


def seconds_alone(segments: Iterable[Segment]) -> float:
    """How long a pass takes by itself: only what it computes beside a message hides any of it."""
    return sum(compute + max(message, beside) for compute, message, beside in segments)


def play_pair(forward: Iterable[Segment], backward: Iterable[Segment]) -> PairTimes:
    """Returns how long the two halves of a pair take, each by itself and as a pair."""
    return _pair_times(tuple(forward), tuple(backward))


@lru_cache(maxsize=4096)
def _pair_times(forward: Segments, backward: Segments) -> PairTimes:
    forward_time, backward_time = seconds_alone(forward), seconds_alone(backward)
    pair = _PairClock((forward, backward)).run()
    # A half only waits while the link carries something, so a pair takes no longer than both in turn, but for rounding.
    return PairTimes(forward_time, backward_time, min(pair, forward_time + backward_time))


class _PairClock:
    """A pair as it runs: the time, the next segment of each half, and how much of its message is left."""

    def __init__(self, halves: tuple[Segments, Segments]) -> None:
        self.halves, self.next_segment = halves, [0, 0]
        self.message_left = [0.0, 0.0]
        self.now = 0.0

    def run(self) -> float:
        """Let the halves take turns until both have ended; returns the time."""
        half = 0
        while True:
            ended = self.take_turn(half)
            if not self.ended(1 - half):
                half = 1 - half
            elif ended:
                return self.now

    def ended(self, half: int) -> bool:
        return self.next_segment[half] == len(self.halves[half]) and not self.message_left[half]

    def take_turn(self, half: int) -> bool:
        """Run this half to its next wait or its end; return whether it has ended."""
        while self.message_left[half]:
            self.advance(self.next_arrival)
        while self.next_segment[half] < len(self.halves[half]):
            compute, message, beside = self.halves[half][self.next_segment[half]]
            self.next_segment[half] += 1
            self.advance(compute)
            self.message_left[half] = message
            self.advance(beside)
            if message:
                return False
        return True

    @property
    def next_arrival(self) -> float:
        """How long until the next message in flight arrives."""
        in_flight = [message for message in self.message_left if message]
        return min(in_flight) * len(in_flight) if in_flight else math.inf

    def advance(self, seconds: float) -> None:
        """Let time pass: messages travel, two of them at half the pace."""
        self.now += seconds
        while seconds and any(self.message_left):
            shortest, in_flight = min(filter(None, self.message_left)), sum(map(bool, self.message_left))
            until = self.next_arrival
            if seconds < until:
                self.message_left = [max(0.0, message - seconds / in_flight) for message in self.message_left]
                return
            self.message_left = [message - shortest if message > shortest else 0.0 for message in self.message_left]
            seconds -= until


# ---- costs ----------------------------------------------------------------------------------------------------------


Duration = float | Sequence[float]
"""One number: the time of a whole rank, shared evenly among its chunks. A sequence: one time per stage."""

MAX_DURATION = 1e30  # of any one duration, in any unit: sums of millions of them are still numbers


def _is_duration(value: float) -> bool:
    return 0 <= value <= MAX_DURATION  # false for nan


@dataclass(frozen=True)
class MessageLink:
    """How a message travels: `latency` after it has left, and leaving takes `message / bandwidth`.

    Messages of one channel leave one after the other; channels do not slow each other. `sends`: "eager" lets the
    sender compute on while the message travels, "blocking" holds it until delivery. `overlap=False` starts a transfer
    only when the consumer's turn has come, so that the receiver stands still meanwhile.
    """

    latency: float = 0.0
    bandwidth: float = math.inf  # bytes per unit of time
    message: float = 0.0  # bytes
    sends: Literal["eager", "blocking"] = "eager"
    overlap: bool = True

    def __post_init__(self) -> None:
        if self.sends not in ("eager", "blocking"):
            raise UserError(f"a link's sends are 'eager' or 'blocking', not {self.sends!r}", "schedule.times")
        if not self.bandwidth > 0 or not 0 <= self.message < math.inf:
            raise UserError(
                f"a link with bandwidth={self.bandwidth:g} and messages of {self.message:g} bytes cannot be: the "
                "bandwidth must be above zero (infinite by default), the message zero or more",
                "schedule.times",
            )
        if not (_is_duration(self.latency) and _is_duration(self.occupancy)):
            raise UserError(
                f"a message takes a latency of {self.latency:g} and {self.message:g} bytes / {self.bandwidth:g} = "
                f"{self.occupancy:g} on the link; both must be between 0 and {MAX_DURATION:g}",
                "schedule.times",
            )

    @property
    def occupancy(self) -> float:
        """How long a message keeps its channel busy."""
        return self.message / self.bandwidth


@dataclass(frozen=True)
class Costs:
    """Durations per stage. A joined F&B takes `pair[stage of its F]`, or else what `play_pair` finds for the `segments`
    of its F and its B. `activation` is the size of one microbatch's activations of the stage, in units of a whole
    rank's (A)."""

    f: tuple[float, ...]
    i: tuple[float, ...]
    w: tuple[float, ...]
    b: tuple[float, ...]
    activation: tuple[float, ...]
    pair: tuple[float, ...] | None = None
    segments: tuple[tuple[Segments, Segments], ...] = ()  # of each stage's F and B; none: a pair takes F + B
    gather: float = 0.0
    reduce: float = 0.0
    step: float = 0.0
    link: MessageLink = MessageLink()

    def __post_init__(self) -> None:
        per_stage = {"f": self.f, "i": self.i, "w": self.w, "b": self.b, "activation": self.activation}
        if self.pair is not None:
            per_stage["fb"] = self.pair
        if self.segments and len(self.segments) != len(self.f):
            raise UserError(
                f"f has times for {len(self.f)} stages, and there are segments of {len(self.segments)}",
                "schedule.times",
            )
        for name, values in per_stage.items():
            if len(values) != len(self.f):
                raise UserError(
                    f"f has times for {len(self.f)} stages, and {name} for {len(values)}; they must agree",
                    "schedule.times",
                )
        single = {"gather": (self.gather,), "reduce": (self.reduce,), "step": (self.step,)}
        for name, values in (per_stage | single).items():
            invalid = next((value for value in values if not _is_duration(value)), None)
            if invalid is not None:
                raise UserError(
                    f"{name}={invalid:g} is not a duration; give a number from zero to {MAX_DURATION:g}",
                    "schedule.times",
                )

    @classmethod
    def even(
        cls,
        placement: Placement,
        f: Duration = 1.0,
        i: Duration = 1.0,
        w: Duration = 1.0,
        *,
        b: Duration | None = None,
        fb: Duration | None = None,
        ep: Duration | None = None,
        link: MessageLink | None = None,
    ) -> Self:
        """Costs from times per rank: with v chunks on a rank, each takes 1/v. B takes I + W unless it is given. `ep` is
        the part of F, and of B, that experts' messages take; the other half of a joined pair hides it."""
        i_times, w_times = _per_stage("i", i, placement), _per_stage("w", w, placement)
        b_times = tuple(map(sum, zip(i_times, w_times, strict=True)))
        f_times = _per_stage("f", f, placement)
        b_times = b_times if b is None else _per_stage("b", b, placement)
        return cls(
            f=f_times,
            i=i_times,
            w=w_times,
            b=b_times,
            segments=() if ep is None else _segments(f_times, i_times, b_times, _per_stage("ep", ep, placement)),
            pair=None if fb is None else _per_stage("fb", fb, placement),
            activation=_per_stage("activation", 1.0, placement),
            link=link or MessageLink(),
        )

    @classmethod
    def measured(cls, seconds: Mapping[tuple[Kind, int], Sequence[float]], stages: int) -> Self:
        """Costs from the median seconds of each kind and stage; messages take no time, all stages weigh the same."""
        f, i, w, b = (
            tuple(median(seconds.get((kind, stage), [0.0])) for stage in range(stages))
            for kind in (FORWARD, INPUT_GRAD, WEIGHT_GRAD, BACKWARD)
        )
        return cls(f, i, w, b, activation=(1.0,) * stages)

    @classmethod
    def slots(cls, placement: Placement) -> Self:
        """One slot for every F, I and W of a stage, two for a B, none for a message: the clock of `Promise.slots`."""
        ones = (1.0,) * placement.stages
        return cls(f=ones, i=ones, w=ones, b=(2.0,) * placement.stages, activation=ones)

    def slowed(self, placement: Placement, factors: Mapping[int, float]) -> Self:
        """The same work on mixed machines: `factors[rank]` times as long on that rank."""
        invalid = [rank for rank in factors if not 0 <= rank < placement.ranks]
        if invalid:
            raise UserError(
                f"rank {invalid[0]} cannot be slowed: ranks are 0 to {placement.ranks - 1}", "schedule.slow"
            )
        of_stage = [factors.get(rank, 1.0) for rank in placement.owner]
        times = {"f": self.f, "i": self.i, "w": self.w, "b": self.b} | ({"pair": self.pair} if self.pair else {})
        slower: dict[str, Any] = {name: tuple(map(mul, stages, of_stage)) for name, stages in times.items()}
        segments_and_factors = zip(self.segments, of_stage[: len(self.segments)], strict=True)
        segments = tuple((scaled(f, factor), scaled(b, factor)) for (f, b), factor in segments_and_factors)
        return replace(self, **slower, segments=segments)

    def of(self, kind: Kind) -> tuple[float, ...]:
        """The durations per stage of one kind of compute."""
        return {FORWARD: self.f, BACKWARD: self.b, INPUT_GRAD: self.i, WEIGHT_GRAD: self.w}[kind]

    def joined(self, forward_stage: int, backward_stage: int) -> float:
        """How long an F&B takes."""
        if self.pair is not None:
            return self.pair[forward_stage]
        if self.segments:
            (forward, _), (_, backward) = self.segments[forward_stage], self.segments[backward_stage]
            return play_pair(forward, backward).pair
        return self.f[forward_stage] + self.b[backward_stage]


def _segments(
    f: tuple[float, ...], i: tuple[float, ...], b: tuple[float, ...], ep: tuple[float, ...]
) -> tuple[tuple[Segments, Segments], ...]:
    """The segments of each stage's F and B, whose messages take `ep`."""
    for stage, (messages, *passes) in enumerate(zip(ep, f, i, b, strict=True)):
        if messages > min(passes):
            raise UserError(
                f"ep={messages:g} of stage {stage} is a part of its passes, the shortest of which takes "
                f"{min(passes):g}; give at most that",
                "schedule.times",
            )
    return tuple(map(segments_of_one_block, f, b, ep))


def _per_stage(name: str, times: Duration, placement: Placement) -> tuple[float, ...]:
    """One time per stage: a rank's time is shared evenly among its stages."""
    if isinstance(times, int | float):
        return tuple(times / len(placement.of_rank[rank]) for rank in placement.owner)
    values = tuple(times)
    if len(values) != placement.stages:
        raise UserError(
            f"{name} has {len(values)} times, and there are {placement.stages} stages; give one time, or one per stage",
            "schedule.times",
        )
    return values


# ---- times ----------------------------------------------------------------------------------------------------------
# Times as people write them: `f=1,i=1,w=1,comm=0.1`.
#
#     f, i, w    forward, input gradient, weight gradient of a whole rank; with v chunks, each chunk takes 1/v
#     b, fb      the whole backward (i+w if left out), and a forward overlapped with a backward (f+b if left out)
#     ep         the part of f, and of b, that experts' messages take: joined pairs hide it, as far as they can
#     comm       latency of one message
#     bytes, bandwidth    size of a message, and what a link carries per unit of time
#     gather, reduce, step    the collectives and the optimizer of one stage
#
# A value may be one number per stage, separated by colons: `f=1:1:1.5:1`.


PER_STAGE = ("f", "i", "w", "b", "fb", "ep")
SINGLE_VALUED = ("comm", "bytes", "bandwidth", "gather", "reduce", "step")
DURATION_KEYS = (*PER_STAGE, *SINGLE_VALUED)


@dataclass(frozen=True)
class Durations:
    """Durations before they are spread over the stages of a schedule."""

    values: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    slow: Mapping[int, float] = field(default_factory=dict)  # rank -> how many times as long it takes
    sends: Literal["eager", "blocking"] = "eager"
    overlap: bool = True

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read `f=1,i=1,w=0.5,comm=0.1`; every part that cannot be read is named."""
        values: dict[str, tuple[float, ...]] = {}
        problems: list[str] = []
        for part in filter(None, (piece.strip() for piece in text.split(","))):
            key, _, value = (piece.strip() for piece in part.partition("="))
            if key not in DURATION_KEYS:
                problems.append(f"times: {key!r} is not a time; {did_you_mean(key, DURATION_KEYS)}")
                continue
            if key in values:
                problems.append(f"times: {key} is given for the second time, as {value}")
                continue
            numbers = [_duration(piece) for piece in value.split(":")]
            if None in numbers or (key in SINGLE_VALUED and len(numbers) > 1):
                wanted = "a number of zero or more" + (", or one per stage as 1:1:1.5:1" if key in PER_STAGE else "")
                problems.append(f"times: {key}={value} is not a time; write {key}= and {wanted}")
            else:
                values[key] = tuple(number for number in numbers if number is not None)
        if values.get("bandwidth") == (0.0,):
            problems.append("times: bandwidth=0 carries nothing; leave it out for a link that takes no time")
        if "fb" in values and "ep" in values:
            problems.append("times: fb and ep both say how long a joined pair takes; leave one of them out")
        spent = {key: sum(values.get(key, (1.0,))) for key in ("f", "i", "w", "b")}
        if not spent["f"] and not (spent["b"] and spent["i"] + spent["w"]):
            problems.append(f"times: with {text} neither a forward nor a backward pass takes time; give f more than 0")
        if problems:
            raise UserError(problems, "schedule.times")
        return cls(values)

    def __str__(self) -> str:
        """The text that `parse` reads, with the defaults of what was left out; then the settings of other options."""
        values = {"f": (1.0,), "i": (1.0,), "w": (1.0,)} | dict(self.values)
        text = ",".join(
            f"{key}={':'.join(figure(value) for value in values[key])}" for key in DURATION_KEYS if key in values
        )
        text += "".join(f", rank {rank} takes {factor:g} times as long" for rank, factor in self.slow.items())
        return text + ", blocking sends" * (self.sends == "blocking") + ", no overlap" * (not self.overlap)

    def costs(self, placement: Placement) -> Costs:
        """The costs of the stages of one placement."""
        single = {key: self.values[key][0] for key in SINGLE_VALUED if key in self.values}
        latency, bandwidth, size = single.get("comm", 0.0), single.get("bandwidth", math.inf), single.get("bytes", 0.0)
        link = MessageLink(latency, bandwidth, size, self.sends, self.overlap)
        per_stage = {key: values for key, values in self.values.items() if key in PER_STAGE}
        durations = {key: values[0] if len(values) == 1 else values for key, values in per_stage.items()}
        collectives: dict[str, Any] = {key: single.get(key, 0.0) for key in ("gather", "reduce", "step")}
        return replace(Costs.even(placement, **durations, link=link), **collectives).slowed(placement, self.slow)


def parse_slow(text: str) -> dict[int, float]:
    """Read `2=1.5,3=2`: rank 2 takes one and a half times as long, rank 3 twice."""
    factors: dict[int, float] = {}
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        left, _, right = (piece.strip() for piece in part.partition("="))
        rank, factor = whole_number(left), _duration(right)
        if rank is None or not factor:
            raise UserError(f"slow: {part!r} should be a rank and a factor above zero, like 2=1.5", "schedule.slow")
        if rank in factors:
            raise UserError(f"slow: rank {rank} is given for the second time, as {part}", "schedule.slow")
        factors[rank] = factor
    return factors


def _duration(text: str) -> float | None:
    """The number, zero or more, that the text is; None if it is none."""
    try:
        number = float(text)
    except ValueError:
        return None
    return number if 0 <= number < float("inf") else None
