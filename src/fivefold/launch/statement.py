"""What a rank states about itself before it may take part, how it proves it, and which of several is the odd one.

Messages are typed data with a proof, an HMAC-SHA256 by the run's secret. Nothing that comes from another process is
unpickled, and no text of it is printed unless it is short and printable.
"""

import hashlib
import hmac
import importlib.metadata
import json
import os
import secrets
import socket
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from msgspec import field

import fivefold
from fivefold.job.config import Job
from fivefold.launch.secret import kept, run_secret
from fivefold.schedule.text import to_text
from fivefold.support.formatting import printable

if TYPE_CHECKING:
    from fivefold.launch.world import World

M = TypeVar("M", bound=msgspec.Struct)
_SHOWN = 4  # settings that differ
_PATH = 200  # characters of another process's path
TRAINING = "training"


class Facts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What all ranks of a world have alike."""

    world: int
    run: str  # the launcher's name for it
    start: int | None
    torch: str
    code: str  # digest of our source files
    data: str  # digest of the data's index
    job: str  # digest of the settings
    purpose: str = TRAINING


_SENTENCES = {
    "world": "is one of {mine} ranks, and the others are of a world of {usual}",
    "run": "belongs to another run, {mine}, and the others to {usual}",
    "start": "is of start {mine} of the run, and the others are of start {usual}",
    "torch": "has torch {mine}, and the others {usual}",
    "code": "runs another version of fivefold: its source files have digest {mine}, and the others' {usual}",
    "data": "reads other data: its index has digest {mine}, and the others' {usual}",
    "job": "runs another job",
    "purpose": "is here for {mine}, and the others for {usual}",
}


@dataclass(frozen=True)
class Claim:
    """What one rank brings to the meeting."""

    facts: Facts
    settings: Mapping[str, str]
    secret: bytes
    kept: str = ""  # where the secret is


class Call(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Rank 0 to all: who is here?"""

    job: str
    kept: str = ""
    host: str = field(default_factory=socket.gethostname)
    nonce: bytes = field(default_factory=lambda: secrets.token_bytes(16))


class Statement(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A rank's answer to a call; rank 0 has one, too."""

    call: bytes  # its nonce: a statement that answers an earlier call is a replay
    rank: int
    facts: Facts
    settings: dict[str, str] = {}  # of the job, where it is not that of rank 0
    kept: str = ""
    host: str = field(default_factory=socket.gethostname)
    pid: int = field(default_factory=os.getpid)
    nonce: bytes = field(default_factory=lambda: secrets.token_bytes(16))

    @property
    def who(self) -> str:
        return f"rank {self.rank} on {short(self.host)} (pid {self.pid})"


class Answer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Rank 0 to one rank: whether the world begins."""

    statement: bytes  # the nonce of what is answered
    begins: bool = True
    lost: bool = False  # ranks are absent; else some are odd
    problems: list[str] = []  # for this rank to say


class _Sealed(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    body: bytes
    proof: bytes


def seal(message: msgspec.Struct, secret: bytes) -> bytes:
    body = msgspec.msgpack.encode(message)
    return msgspec.msgpack.encode(_Sealed(body, _proof(type(message), body, secret)))


def unseal(data: bytes, kind: type[M], secret: bytes) -> tuple[M | None, bool]:
    """The message as far as it can be read, and whether its sender knows the secret."""
    try:
        sealed = msgspec.msgpack.decode(data, type=_Sealed)
        proven = hmac.compare_digest(sealed.proof, _proof(kind, sealed.body, secret))
        return msgspec.msgpack.decode(sealed.body, type=kind), proven
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None, False


def _proof(kind: type, body: bytes, secret: bytes) -> bytes:
    """The kind is part of it: a statement that is sent back is no answer."""
    return hmac.digest(secret, kind.__name__.encode() + b"\0" + body, "sha256")


def settings_of(job: Job) -> dict[str, str]:
    """The settings of a job that all ranks must have alike, by their names in a job file."""
    tables: dict[str, dict[str, Any]] = msgspec.to_builtins(job)
    tables["data"].pop("path")  # machines may keep it in different places; its index must be the same
    if schedule := job.layout.record.schedule:  # read from a file, wherever that is
        tables["layout"]["schedule"] = _digest(to_text(schedule).encode())
    return {f"{name}.{key}": json.dumps(value) for name, table in tables.items() for key, value in table.items()}


def claim(job: Job, index: Path, world: "World", purpose: str = TRAINING) -> Claim:
    """Of a rank that runs `job` on the data whose index is at `index`. Ranks with another purpose read no data, and may
    have come to learn which versions differ."""
    settings, trains = settings_of(job), purpose == TRAINING
    facts = Facts(
        world=world.size,
        run=world.run,
        start=world.start,
        torch=importlib.metadata.version("torch") if trains else "",
        code=code_digest() if trains else "",
        data=_digest(index.read_bytes()) if trains else "",
        job=_digest(json.dumps(settings, sort_keys=True).encode()),
        purpose=purpose,
    )
    if world.size == 1:  # a rank that is alone has nobody to prove itself to
        return Claim(facts, settings, secrets.token_bytes(32))
    directory = Path(job.run.dir).expanduser()
    return Claim(facts, settings, run_secret(directory), kept(directory))


@cache
def code_digest() -> str:
    """Of our source files, by their places in the package."""
    root = Path(fivefold.__file__).parent
    found = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        text = path.read_bytes()
        found.update(f"{path.relative_to(root).as_posix()} {len(text)}\n".encode() + text)
    return found.hexdigest()[:32]


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:32]


def odd_ones(statements: Sequence[Statement]) -> dict[int, str]:
    """What is wrong with some of the statements, by their place in the list. The first is that of rank 0.

    The odd ones are those that differ from most; of two that differ, it is not rank 0.
    """
    usual: dict[str, Any] = {}
    for name in _SENTENCES:
        usual[name] = Counter(getattr(statement.facts, name) for statement in statements).most_common(1)[0][0]
    settings = next(one.settings for one in statements if one.facts.job == usual["job"])
    claims = defaultdict(list)
    for place, statement in enumerate(statements):
        claims[statement.rank].append(place)
    problems: dict[int, str] = {}
    for place, statement in enumerate(statements):
        rivals = [statements[other] for other in claims[statement.rank]]
        odd = [name for name in _SENTENCES if getattr(statement.facts, name) != usual[name]]
        if odd:
            parts = [_difference(name, statement, usual[name], settings) for name in odd]
            problems[place] = f"{statement.who} {'; it '.join(parts)}"
        elif len(rivals) > 1:
            others = " and by ".join(f"pid {one.pid} on {short(one.host)}" for one in rivals)
            problems[place] = f"rank {statement.rank} is claimed {len(rivals)} times: by {others}"
        elif not 0 <= statement.rank < usual["world"]:
            problems[place] = f"{statement.who} is none of {usual['world']} ranks"
    return problems


def _difference(name: str, statement: Statement, usual: Any, settings: Mapping[str, str]) -> str:
    mine = getattr(statement.facts, name)
    if name in ("code", "data"):
        mine, usual = mine[:8], usual[:8]
    sentence = _SENTENCES[name].format(mine=short(mine), usual=short(usual))
    if name != "job":
        return sentence
    theirs = statement.settings
    differ = sorted(key for key in theirs.keys() | settings.keys() if theirs.get(key) != settings.get(key))
    parts = [
        f"{short(key)} is {short(theirs.get(key, 'absent'))} there and {short(settings.get(key, 'absent'))} elsewhere"
        for key in differ[:_SHOWN]
    ]
    more = [f"and {len(differ) - _SHOWN} more settings differ"] if len(differ) > _SHOWN else []
    return f"{sentence}: {', '.join(parts + more)}"


def short(value: object, most: int = 40) -> str:
    """Text of another process, as much of it as may be printed."""
    text = printable(str(value)[: most + 1])
    return text if len(text) <= most else f"{text[: most - 3]}..."


def two_secrets(its: Call | Statement, whose: str, mine: Call | Statement) -> str:
    """Why one process does not know the secret of another: where each of them looks for it."""
    place, other = (f"{short(one.kept, _PATH)} on {short(one.host)}" for one in (its, mine))
    return (
        f"its secret is from {place}, and {whose} from {other}; make run.dir one directory that their machines share, "
        "or set FIVEFOLD_SECRET to the same for all ranks"
    )


def ranks_text(ranks: Sequence[int]) -> str:
    """'rank 3', 'ranks 1, 5', 'ranks 0, 8-15, 17': of sorted numbers."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    parts = [
        f"{first}-{last}" if last > first + 1 else ", ".join(map(str, sorted({first, last}))) for first, last in runs
    ]
    shown = ", ".join(parts[:16]) + (f" and {len(parts) - 16} more" if len(parts) > 16 else "")
    return f"rank{'s' * (len(ranks) != 1)} {shown}"
