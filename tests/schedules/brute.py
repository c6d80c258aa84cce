"""An executor that shares no code with the engine: it moves one rank at a time, picked at random, and carries values.

Every message holds what it claims to be, so a schedule that pairs the wrong messages is caught by its data, as on real
ranks it would be by its loss. Nothing is timed, nothing is clever. Messages are eager, as gloo's are: posted or handed
over, and on goes the rank. Or they are meetings, as NCCL's may be: both ranks stand at a message until both are there.
"""

import random
from collections import defaultdict

from fivefold.schedules.actions import Action
from fivefold.schedules.schedule import Schedule


class Wrong(Exception):
    """A rank computed with data it should not have had, or without data it needs."""


def execute(schedule: Schedule, seed: int, *, meetings: bool = False) -> list[Action] | None:
    """Run to the end in a random order of ranks: the computed actions in that order, or None when nobody can move."""
    machine = _Meetings(schedule) if meetings else _Machine(schedule)
    chance = random.Random(seed)
    movable = list(range(schedule.p))
    while movable:
        rank = chance.choice(movable)
        if not machine.move(rank):
            movable.remove(rank)
        else:
            movable = list(range(schedule.p))
    return machine.done if machine.finished() else None


class _Machine:
    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.owner = schedule.placement.owner
        self.at = [0] * schedule.p
        self.sent: dict[tuple[str, int], list[tuple[str, int, int]]] = defaultdict(list)  # wire -> values
        self.receives: dict[tuple[str, int], list[int]] = defaultdict(list)  # wire -> microbatches, as posted
        self.memory: list[set[tuple[str, int, int]]] = [set() for _ in range(schedule.p)]
        self.done: list[Action] = []

    def finished(self) -> bool:
        return all(at == len(order) for at, order in zip(self.at, self.schedule.ranks, strict=True))

    def move(self, rank: int) -> bool:
        order = self.schedule.ranks[rank]
        if self.at[rank] == len(order):
            return False
        action = order[self.at[rank]]
        # A joined pair begins only when both halves can.
        ahead = [action, *order[self.at[rank] + 1 : self.at[rank] + 2]] if action.joined else [action]
        if action.joined and (sorted(one.kind for one in ahead) != ["B", "F"] or ahead[0][1:3] == ahead[1][1:3]):
            raise Wrong(f"rank {rank} cannot overlap {' with '.join(map(str, ahead))}")
        if not all(self.can(rank, one) for one in ahead):
            return False
        for one in ahead:
            self.do(rank, one)
        self.at[rank] += len(ahead)
        return True

    def wire(self, action: Action) -> tuple[str, int]:
        kind, stage = action.kind.value, action.stage
        if kind in ("SEND_A", "RECV_G"):
            return kind[-1], stage
        return kind[-1], stage - 1

    def can(self, rank: int, action: Action) -> bool:
        kind, stage, k = action.kind.value, action.stage, action.microbatch
        if kind.startswith("SEND"):
            wire = self.wire(action)
            delivered, number = min(len(self.sent[wire]), len(self.receives[wire])), len(self.sent[wire])
            return number < self.schedule.buffers or number - self.schedule.buffers < delivered
        if kind == "F" and stage > 0 and self.owner[stage - 1] != rank:
            return self.arrived(("A", stage - 1), k)
        if kind in "BI" and stage + 1 < len(self.owner) and self.owner[stage + 1] != rank:
            return self.arrived(("G", stage), k)
        return True

    def arrived(self, wire: tuple[str, int], k: int) -> bool:
        if k not in self.receives[wire]:
            return False
        return len(self.sent[wire]) > self.receives[wire].index(k)

    def do(self, rank: int, action: Action) -> None:
        kind, stage, k = action.kind.value, action.stage, action.microbatch
        here = self.memory[rank]
        if kind.startswith("RECV"):
            self.receives[self.wire(action)].append(k)
        elif kind.startswith("SEND"):
            value = ("out" if kind == "SEND_A" else "gradient", stage, k)
            self.need(rank, action, value)
            self.sent[self.wire(action)].append(value)
        elif kind == "F":
            if stage > 0:
                self.take(rank, action, ("A", stage - 1), ("out", stage - 1, k))
            here.update({("out", stage, k), ("saved", stage, k)})
            self.done.append(action)
        elif kind in ("B", "I"):
            self.need(rank, action, ("saved", stage, k))
            if stage + 1 < len(self.owner):
                self.take(rank, action, ("G", stage), ("gradient", stage + 1, k))
            here.add(("gradient", stage, k))
            here.add(("halfway", stage, k))
            if kind == "B":
                here.discard(("saved", stage, k))
            self.done.append(action)
        elif kind == "W":
            self.need(rank, action, ("halfway", stage, k))
            self.need(rank, action, ("saved", stage, k))
            here.discard(("saved", stage, k))
            self.done.append(action)

    def take(self, rank: int, action: Action, wire: tuple[str, int], value: tuple[str, int, int]) -> None:
        """The value must be here already, or arrive on the wire at the place where its receive was posted."""
        wire_end = wire[1] if wire[0] == "A" else wire[1] + 1
        if self.owner[wire_end] == rank:
            self.need(rank, action, value)
            return
        place = self.receives[wire].index(action.microbatch)
        if self.sent[wire][place] != value:
            raise Wrong(f"rank {rank} runs {action} on {self.sent[wire][place]}")

    def need(self, rank: int, action: Action, value: tuple[str, int, int]) -> None:
        if value not in self.memory[rank]:
            raise Wrong(f"rank {rank} runs {action} without {value}")


class _Meetings(_Machine):
    """A message passes when both its ranks stand at it: one at the SEND of a wire, the other at the RECV."""

    def move(self, rank: int) -> bool:
        mine = self.standing_at(rank)
        if mine is None or not mine.kind.value.startswith(("SEND", "RECV")):
            return super().move(rank)
        letter, boundary = self.wire(mine)
        peer = self.owner[boundary if mine.stage == boundary + 1 else boundary + 1]
        theirs = self.standing_at(peer)
        if theirs is None or self.wire(theirs) != (letter, boundary):
            return False
        for side, action in ((rank, mine), (peer, theirs)):
            self.do(side, action)
            self.at[side] += 1
        return True

    def standing_at(self, rank: int) -> Action | None:
        order = self.schedule.ranks[rank]
        return order[self.at[rank]] if self.at[rank] < len(order) else None


def trouble(schedule: Schedule, seeds: int = 3, *, meetings: bool = False) -> str | None:
    """What goes wrong when the schedule is executed in several random orders; None when nothing does."""
    for seed in range(seeds):
        try:
            if execute(schedule, seed, meetings=meetings) is None:
                return "deadlock"
        except (Wrong, IndexError, ValueError) as error:
            return str(error) or "wrong"
    return None
