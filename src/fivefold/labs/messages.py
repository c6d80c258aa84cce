"""What the ranks of a check sent, and who waits for whom where they hang: read in the parent from what they wrote."""

import json
from collections.abc import Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple, get_args

from fivefold.cost.collective_time import Kind, wire
from fivefold.support.text import plural

ANSWER = "FIVEFOLD_LAB_FILE"  # in the environment of ranks: the student's file
FOLDER = "FIVEFOLD_LAB_MESSAGES"  # and where each of them writes its messages
PROGRESS = "FIVEFOLD_LAB_PROGRESS"  # and where each of them writes what it is at:
IMPORTS, BUILDS, STEPS = "imports", "builds", "steps"
DIRECT = ("send", "receive")
BARRIER = "barrier"
APART = "apart"
# The end; all gradients are there; elements of an optimizer's state, as payload; a stage's forward and its backward; a
# wait for a collective; weights that differ from rank to rank after an update.
MARKS = ("end", "backward", "state", "F", "B", "wait", APART)


class LabMessage(NamedTuple):
    kind: str  # "all-reduce", "send", "receive", ...; "end" closes the list of a rank that is through, and others mark
    # a place in it: MARKS
    payload: int = 0  # bytes
    ranks: tuple[int, ...] = ()  # of the group
    peer: int | None = None  # of a send or receive

    def to_dict(self) -> dict[str, Any]:
        return {key: value for key, value in self._asdict().items() if value is not None}

    @property
    def wire(self) -> Fraction:
        """Bytes that this rank sends."""
        if self.kind == "receive" or len(self.ranks) < 2:
            return Fraction(0)
        kind: Any = self.kind if self.kind in get_args(Kind) else "broadcast"
        return wire(kind, self.payload, len(self.ranks))

    def __str__(self) -> str:
        if self.kind == BARRIER:
            return "a barrier"
        size = f"{self.payload:,} bytes"
        if self.kind == "send":
            return f"a send of {size} to rank {self.peer}"
        if self.kind == "receive":
            return f"a receive of {size} from rank {self.peer}"
        return f"{self.article} {self.kind} of {size}"

    @property
    def article(self) -> str:
        return "an" if self.kind[0] in "aeio" else "a"


def read(folder: Path, layout: str, world: int) -> list[list[LabMessage]]:
    """By rank; what a rank was writing when it was ended is left out."""
    files = [folder / f"{layout}-{rank}.jsonl" for rank in range(world)]
    texts = [file.read_text(errors="replace") if file.exists() else "" for file in files]
    return [[message for line in text.splitlines() for message in _read(line)] for text in texts]


def _read(line: str) -> list[LabMessage]:
    """The message in a line; an answer can write other lines into the file."""
    try:
        row = json.loads(line)
        return [LabMessage(str(row["kind"]), int(row["payload"]), tuple(row.get("ranks", ())), row.get("peer"))]
    except (ValueError, TypeError, KeyError, AttributeError):
        return []


def unwritten(ranks: Sequence[Sequence[LabMessage]]) -> str:
    """A rank of which it is not known what it sent, though it is through."""
    rank = next((rank for rank, messages in enumerate(ranks) if not any(one.kind == "end" for one in messages)), None)
    if rank is None:
        return ""
    return (
        f"what rank {rank} sends is not known: its messages are written into a file, which the answer must leave alone"
    )


def busiest(ranks: Sequence[Sequence[LabMessage]]) -> list[LabMessage]:
    """What the rank that sends most sends: receives are the other side of sends."""
    by_rank = [[one for one in messages if one.kind not in (*MARKS, "receive")] for messages in ranks]
    return max(by_rank, key=wire_of, default=[])


def wire_of(messages: Sequence[LabMessage]) -> Fraction:
    """Bytes that a rank sends."""
    return sum((message.wire for message in messages), Fraction(0))


def sums(messages: Sequence[LabMessage]) -> dict[str, tuple[int, int]]:
    """By kind, calls and the bytes that they send: on the wire, as two kinds with one payload send unlike much."""
    by_kind: dict[str, list[LabMessage]] = {}
    for message in messages:
        by_kind.setdefault(message.kind, []).append(message)
    return {kind: (len(calls), round(wire_of(calls))) for kind, calls in sorted(by_kind.items())}


def stuck(ranks: Sequence[Sequence[LabMessage]]) -> str:
    """Why ranks that hang do not go on; empty if their messages do not say."""
    ranks = [[one for one in messages if one.kind not in MARKS[1:]] for messages in ranks]
    last = {rank: messages[-1] for rank, messages in enumerate(ranks) if messages}
    waiting = {rank: message for rank, message in last.items() if message.kind != "end"}
    for rank, message in waiting.items():
        if message.kind not in DIRECT or message.peer is None:
            continue
        peer = message.peer
        if not 0 <= peer < len(ranks):
            return f"rank {rank} waits in {message}, and there are ranks 0 to {len(ranks) - 1}"
        other = last.get(peer)
        if other is None:
            return f"rank {rank} waits in {message}, and rank {peer} has sent and received nothing"
        back = other.kind in DIRECT and other.peer == rank
        if back and other.kind == message.kind == "receive":
            return (
                f"ranks {rank} and {peer} both wait in a receive from each other: rank {rank} waits for a message that "
                f"rank {peer} sends later"
            )
        if back and other.kind == message.kind == "send":
            return (
                f"ranks {rank} and {peer} both wait in a send to each other: a send may wait until it is received, so "
                "one of them has to receive first"
            )
        if other.kind == "end":
            count = _matching(ranks[peer], message.kind, rank)
            own = sum(one.kind == message.kind and one.peer == peer for one in ranks[rank])
            verb = "sent" if message.kind == "receive" else "received"
            return f"rank {rank} waits in {message}, its number {own}; rank {peer} is through and has {verb} {count}"
        return f"rank {rank} waits in {message}, and rank {peer} in {other}"
    return _unlike_collectives(ranks, last)


def _unlike_collectives(ranks: Sequence[Sequence[LabMessage]], last: Mapping[int, LabMessage]) -> str:
    numbers = [sum(message.kind not in (*DIRECT, "end") for message in messages) for messages in ranks]
    for rank, message in last.items():
        if message.kind in (*DIRECT, "end"):
            continue
        waits = f"rank {rank} waits in {message}, its collective number {numbers[rank]}"
        for member in (other for other in message.ranks if other != rank):
            theirs = last.get(member)
            if theirs is None:
                return f"{waits}; rank {member} has called none"
            if theirs.kind == "end":
                return f"{waits}; rank {member} is through after {numbers[member]}"
            if (theirs.kind, theirs.ranks, theirs.payload) != (message.kind, message.ranks, message.payload):
                return f"{waits}, and rank {member} in {theirs}: ranks of a group call the same ones in the same order"
    return ""


def unlike(ranks: Sequence[Sequence[LabMessage]]) -> str:
    """The first collective of a group that is not the same one on each of its ranks; empty if there is none."""
    groups = dict.fromkeys(one.ranks for messages in ranks for one in messages if one.ranks and one.kind not in DIRECT)
    for group in groups:
        calls = [[one for one in ranks[rank] if one.ranks == group and one.kind not in DIRECT] for rank in group]
        for number, row in enumerate(zip(*calls, strict=False), 1):
            if row[0].kind == row[-1].kind == "all-to-all":  # in which ranks send what they have
                continue
            if (odd := next((place for place, one in enumerate(row) if one != row[0]), 0)) != 0:
                first = f"collective number {number} is {row[0]} on rank {group[0]}"
                differ = f"{first}, and {row[odd]} on rank {group[odd]}"
                return f"{differ}: ranks of a group call the same ones in the same order"
    return ""


def _matching(messages: Sequence[LabMessage], kind: str, peer: int) -> str:
    wanted = "send" if kind == "receive" else "receive"
    return f"{sum(one.kind == wanted and one.peer == peer for one in messages)}"


def told(messages: Sequence[LabMessage]) -> str:
    """`2 all-reduces with 3,072 bytes`, which are those on the wire"""
    parts = [
        plural(calls, kind) + (f" with {size:,} bytes" if kind != BARRIER else "")
        for kind, (calls, size) in sums(messages).items()
    ]
    return " and ".join(filter(None, [", ".join(parts[:-1]), *parts[-1:]])) or "nothing"
