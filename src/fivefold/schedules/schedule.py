"""`Schedule`: the object that is checked, timed, drawn and executed; and `Placement`: the rank of each stage."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

from fivefold.schedules.actions import (
    COMPUTE_KINDS,
    FORWARD,
    LAST_READERS,
    RECEIVE_KINDS,
    WEIGHT_GRAD,
    Action,
    Channel,
    Kind,
)
from fivefold.support.errors import UserError


@dataclass(frozen=True)
class Placement:
    """Which rank owns each stage: `owner[stage]` is a rank. Stages are numbered in the order data flows forward."""

    owner: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.owner or min(self.owner) < 0:
            raise UserError(
                f"stages on ranks {self.owner} cannot be: there must be a stage, and ranks count from 0",
                "schedule.stages",
            )

    @classmethod
    def single(cls, ranks: int) -> Self:
        """One stage per rank: 0 1 2 3."""
        return cls(tuple(range(ranks)))

    @classmethod
    def looped(cls, ranks: int, chunks: int) -> Self:
        """Several stages per rank, round and round: 0 1 2 3 0 1 2 3."""
        return cls(tuple(range(ranks)) * chunks)

    @classmethod
    def vee(cls, ranks: int) -> Self:
        """Down the ranks and up again: 0 1 2 3 3 2 1 0, so that the first rank also holds the last stage."""
        return cls((*range(ranks), *reversed(range(ranks))))

    @property
    def ranks(self) -> int:
        return max(self.owner) + 1

    @property
    def stages(self) -> int:
        return len(self.owner)

    @cached_property
    def of_rank(self) -> tuple[tuple[int, ...], ...]:
        """The stages of each rank, in forward order; a stage's place in that list is its chunk."""
        lists: list[list[int]] = [[] for _ in range(self.ranks)]
        for stage, rank in enumerate(self.owner):
            lists[rank].append(stage)
        return tuple(map(tuple, lists))

    @cached_property
    def chunk(self) -> tuple[int, ...]:
        """The chunk number of each stage on its rank."""
        return tuple(self.of_rank[rank].index(stage) for stage, rank in enumerate(self.owner))

    @property
    def chunks(self) -> int:
        """The most stages that one rank holds (v)."""
        return max(map(len, self.of_rank))

    def crosses(self, boundary: int) -> bool:
        """Whether stages `boundary` and `boundary + 1` live on different ranks, so that data must be sent."""
        return self.owner[boundary] != self.owner[boundary + 1]

    @cached_property
    def channels(self) -> tuple[Channel, ...]:
        """Every FIFO between two ranks; the sender is `owner[channel.source]`, the receiver `owner[channel.target]`."""
        boundaries = filter(self.crosses, range(self.stages - 1))
        return tuple(Channel(boundary, gradients) for boundary in boundaries for gradients in (False, True))

    @cached_property
    def channel_of(self) -> dict[tuple[Kind, int], Channel]:
        """By kind and stage: the FIFO that an action sends on, receives from, or computes out of."""
        channels = {(channel.send, channel.source): channel for channel in self.channels}
        for channel in self.channels:
            channels |= {(kind, channel.target): channel for kind in (channel.receive, *channel.compute)}
        return channels


@dataclass(frozen=True)
class Bounds:
    """Bounds that a builder promises, and the checker verifies. None: no promise.

    `peak`: the most stage activations each rank ever holds. `slots`: the makespan when every F, I and W of a stage
    takes one slot, a B two, and messages no time at all.
    """

    peak: tuple[int, ...] | None = None
    slots: int | None = None


NO_BOUNDS = Bounds()


@dataclass(frozen=True)
class Schedule:
    """For each pipeline rank, the ordered list of what it does.

    `buffers` limits the messages in flight per channel: a rank has at most this many receives posted whose messages
    are not consumed yet, and before it sends message n it waits until message n - buffers has been delivered. So
    neither side needs more buffers per channel. `wire` sets it to the most that the receives need.
    """

    name: str
    placement: Placement
    microbatches: int
    ranks: tuple[tuple[Action, ...], ...]
    buffers: int = 2
    promise: Bounds = NO_BOUNDS

    def __post_init__(self) -> None:
        problem = name_problem(self.name)
        if problem is not None:
            raise UserError(problem, "schedule.name")

    @property
    def p(self) -> int:
        return len(self.ranks)

    @property
    def m(self) -> int:
        return self.microbatches

    def _repr_html_(self) -> str:
        """How a notebook shows it: drawn, where each F, I and W of a whole rank takes 1."""
        from fivefold.schedules.result import draw

        return draw(self)._repr_html_()

    def _repr_mimebundle_(self, **wanted: Any) -> dict[str, str]:
        from fivefold.schedules.result import draw

        return draw(self)._repr_mimebundle_()

    def compute(self, rank: int) -> tuple[Action, ...]:
        """The rank's F, B, I and W in order."""
        return self._compute[rank]

    @cached_property
    def _compute(self) -> tuple[tuple[Action, ...], ...]:
        return tuple(tuple([action for action in order if action[0] in COMPUTE_KINDS]) for order in self.ranks)

    @cached_property
    def splits(self) -> bool:
        """Whether any weight gradient is computed apart from its input gradient."""
        return self.count(WEIGHT_GRAD) > 0

    @cached_property
    def in_flight(self) -> tuple[dict[int, int], ...]:
        """By rank and stage: microbatches whose activations are held when the rank holds the most of all stages."""
        peaks: list[dict[int, int]] = []
        for rank, stages in enumerate(self.placement.of_rank):
            live = dict.fromkeys(stages, 0)
            at_peak = dict(live)
            for action in self.compute(rank):
                if action.kind is FORWARD:
                    live[action.stage] += 1
                    if sum(live.values()) > sum(at_peak.values()):
                        at_peak = dict(live)
                elif action.kind in LAST_READERS:
                    live[action.stage] -= 1
            peaks.append(at_peak)
        return tuple(peaks)

    @cached_property
    def p2p_in_flight(self) -> tuple[int, ...]:
        """By rank: the most messages held in addition to the activations of `in_flight`: receives posted and not
        consumed, and one sent gradient on each channel. (A sent activation is held for its backward pass anyway.)

        More receives may be posted while fewer microbatches are held. A microbatch holds at least as much as a message,
        so the count is the peak of both in sum, less the microbatches of `in_flight`.
        """
        channels, owner = self.placement.channels, self.placement.owner
        consumers = {(kind, channel.target) for channel in channels for kind in channel.compute}
        counts = []
        for rank, order in enumerate(self.ranks):
            posted = live = most = 0
            for action in order:
                if action.kind in RECEIVE_KINDS:
                    posted += 1
                elif (action.kind, action.stage) in consumers:
                    posted -= 1
                live += action.kind is FORWARD
                most = max(most, posted + live)
                live -= action.kind in LAST_READERS
            receives = most - sum(self.in_flight[rank].values())
            sent_gradients = sum(channel.gradients and owner[channel.source] == rank for channel in channels)
            counts.append(receives + sent_gradients)
        return tuple(counts)

    def count(self, *kinds: Kind) -> int:
        """How many actions of these kinds there are, over all ranks."""
        return sum(action.kind in kinds for order in self.ranks for action in order)


def name_problem(name: str) -> str | None:
    """Why a name cannot be written in a line of text and read back; None when it can."""
    if name and name.isprintable() and name == " ".join(name.split()) and "#" not in name:
        return None
    return f"{name!r} cannot name a schedule: a name is words with one space between them, and has no '#'"


def live_counts(order: Iterable[Action]) -> list[int]:
    """How many stage activations a rank holds after each of its actions: F takes one, B or W gives it back.

    In a joined pair the F stands first, so the pair holds both activations, as it does when it runs.
    """
    live, counts = 0, []
    for action in order:
        if action.kind is FORWARD:
            live += 1
        elif action.kind in LAST_READERS:
            live -= 1
        counts.append(live)
    return counts


def peak_live(order: Iterable[Action]) -> int:
    """The most stage activations a rank holds at once."""
    return max(live_counts(order), default=0)
