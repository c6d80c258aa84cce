"""Before any process group exists, the ranks of a world check each other, through the store at which they meet.

Rank 0 writes a roll call, every rank answers with a statement, rank 0 compares the statements and answers each rank. So
ranks of two jobs never train together, a process without the run's secret is not let in, and ranks that do not come are
named. Only rank 0's work grows with the number of ranks.

    calls                        a counter of roll calls: a store may outlive the ranks that met there before
    now                          the number N of the latest roll call
    world N/call                 rank 0's RollCall
    world N/arrived              a counter; the rank that raises it to i + 1 gets the place i
    world N/statement i          the Statement of the rank with place i
    world N/answer i             rank 0's Welcome to it
    world N/heard                how many ranks have read their answer
    world N/begun                exists if the world has begun
"""

import hashlib
import hmac
import importlib.metadata
import json
import os
import secrets
import socket
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from msgspec import field

from fivefold.data.base import is_place
from fivefold.job.config import Job
from fivefold.launch.rendezvous import Rendezvous, run_secret, secret_location, within
from fivefold.launch.world import World
from fivefold.schedules.text import to_text
from fivefold.support import plugins
from fivefold.support.errors import PeerLost, UserError
from fivefold.support.text import printable

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store


# ---- statement ------------------------------------------------------------------------------------------------------
# The facts that a rank states about itself before it may take part, how it proves them, and which ranks are odd.
#
# Messages are typed data with a proof, an HMAC-SHA256 with the run's secret. Nothing from another process is unpickled,
# and its text is printed only if it is short and printable.


M = TypeVar("M", bound=msgspec.Struct)
_MAX_SHOWN = 4  # settings that differ
_MAX_PATH = 200  # characters of another process's path
TRAINING_ACTIVITY = "training"


class Facts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What must be equal on all ranks of a world."""

    world: int
    run: str  # the launcher's name for it
    start: int | None
    torch: str
    code: str  # digest of our source files
    data: str  # digest of the data's fingerprint
    job: str  # digest of the settings
    purpose: str = TRAINING_ACTIVITY
    plugins: str = ""  # digest of the files of what users have brought; empty where they have brought nothing


_SENTENCES = {
    "world": "is one of {own} ranks, and the others are of a world of {usual}",
    "run": "belongs to another run, {own}, and the others to {usual}",
    "start": "is of start {own} of the run, and the others are of start {usual}",
    "torch": "has torch {own}, and the others {usual}",
    "code": "runs another version of fivefold: its source files have digest {own}, and the others' {usual}",
    "data": "reads other data: its fingerprint is {own}, and the others' {usual}",
    "job": "runs another job",
    "plugins": "has other plugins: their files have digest {own}, and the others' {usual}",
    "purpose": "is here for {own}, and the others for {usual}",
}


@dataclass(frozen=True)
class Hello:
    """What one rank claims about itself, and the secret with which it proves that."""

    facts: Facts
    settings: Mapping[str, str]  # of the job, by `settings_of`
    secret: bytes
    kept: str = ""  # where the secret is kept


class RollCall(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Rank 0's question to all ranks: who is here?"""

    job: str
    kept: str = ""
    host: str = field(default_factory=socket.gethostname)
    nonce: bytes = field(default_factory=lambda: secrets.token_bytes(16))


class Statement(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A rank's answer to a call; rank 0 also has one."""

    call: bytes  # its nonce: a statement that answers an earlier call is a replay
    rank: int
    facts: Facts
    settings: dict[str, str] = {}  # of the job, where they differ from rank 0's
    kept: str = ""
    host: str = field(default_factory=socket.gethostname)
    pid: int = field(default_factory=os.getpid)
    nonce: bytes = field(default_factory=lambda: secrets.token_bytes(16))

    @property
    def sender(self) -> str:
        return f"rank {self.rank} on {short(self.host)} (pid {self.pid})"


class Welcome(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Rank 0's answer to one rank: whether the world begins."""

    statement: bytes  # the nonce of the statement that is answered
    begins: bool = True
    lost: bool = False  # why it does not begin: ranks are absent; else some are odd
    problems: list[str] = []  # for this rank to print


class _Sealed(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    body: bytes
    proof: bytes


def seal(message: msgspec.Struct, secret: bytes) -> bytes:
    body = msgspec.msgpack.encode(message)
    return msgspec.msgpack.encode(_Sealed(body, _proof(type(message), body, secret)))


def unseal(data: bytes, kind: type[M], secret: bytes) -> tuple[M | None, bool]:
    """The message, None if it cannot be read, and whether its sender knows the secret."""
    try:
        sealed = msgspec.msgpack.decode(data, type=_Sealed)
        proven = hmac.compare_digest(sealed.proof, _proof(kind, sealed.body, secret))
        return msgspec.msgpack.decode(sealed.body, type=kind), proven
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None, False


def _proof(kind: type, body: bytes, secret: bytes) -> bytes:
    """The HMAC of a message. It covers the kind, so that a statement sent back does not pass as an answer."""
    return hmac.digest(secret, kind.__name__.encode() + b"\0" + body, "sha256")


def settings_of(job: Job) -> dict[str, str]:
    """The settings of a job that all ranks must have alike, by their names in a job file."""
    tables: dict[str, dict[str, Any]] = msgspec.to_builtins(job)
    for place in filter(is_place, [*tables["data"]]):  # which differ; the fingerprint of the data must be the same
        tables["data"].pop(place)
    if schedule := job.layout.record.schedule:  # read from a file, wherever that is
        tables["layout"]["schedule"] = _digest(to_text(schedule).encode())
    return {f"{name}.{key}": json.dumps(value) for name, table in tables.items() for key, value in table.items()}


def claim(job: Job, data: str, world: World, purpose: str = TRAINING_ACTIVITY) -> Hello:
    """The claim of a rank that runs `job` on the data of that fingerprint. Ranks with another purpose than training
    read no data, and may differ in their versions, which they may be there to compare."""
    settings, trains = settings_of(job), purpose == TRAINING_ACTIVITY
    facts = Facts(
        world=world.size,
        run=world.run,
        start=world.start,
        torch=importlib.metadata.version("torch") if trains else "",
        code=code_digest() if trains else "",
        data=_digest(data.encode()) if trains else "",
        job=_digest(json.dumps(settings, sort_keys=True).encode()),
        purpose=purpose,
        plugins=plugins.digest() if trains else "",
    )
    if world.size == 1:  # a rank that is alone has nobody to prove itself to
        return Hello(facts, settings, secrets.token_bytes(32))
    directory = Path(job.run.dir).expanduser()
    return Hello(facts, settings, run_secret(directory), secret_location(directory))


@cache
def code_digest() -> str:
    """The digest of our source files and their paths in the package."""
    root = Path(__file__).parent.parent
    sha256 = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        text = path.read_bytes()
        sha256.update(f"{path.relative_to(root).as_posix()} {len(text)}\n".encode() + text)
    return sha256.hexdigest()[:32]


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:32]


def odd_ones(statements: Sequence[Statement]) -> dict[int, str]:
    """Returns {index of a statement: what is wrong with it} for those that are odd. The first statement is rank 0's.

    A statement is odd if it differs from most of them; of two that differ, it is the one that is not rank 0's.
    """
    usual: dict[str, Any] = {}
    for name in _SENTENCES:
        usual[name] = Counter(getattr(statement.facts, name) for statement in statements).most_common(1)[0][0]
    usual_settings = next(statement.settings for statement in statements if statement.facts.job == usual["job"])
    by_rank = defaultdict(list)
    for statement in statements:
        by_rank[statement.rank].append(statement)
    problems: dict[int, str] = {}
    for index, statement in enumerate(statements):
        rivals = by_rank[statement.rank]
        different = [name for name in _SENTENCES if getattr(statement.facts, name) != usual[name]]
        if different:
            parts = [_difference(name, statement, usual[name], usual_settings) for name in different]
            problems[index] = f"{statement.sender} {'; it '.join(parts)}"
        elif len(rivals) > 1:
            processes = " and ".join(f"pid {rival.pid} on {short(rival.host)}" for rival in rivals)
            problems[index] = f"{len(rivals)} processes claim rank {statement.rank}: {processes}"
        elif not 0 <= statement.rank < usual["world"]:
            problems[index] = f"{statement.sender} is not one of {usual['world']} ranks"
    return problems


def _difference(name: str, statement: Statement, usual: Any, usual_settings: Mapping[str, str]) -> str:
    """How a statement differs from the usual value of one fact, to follow its sender in a sentence."""
    own = getattr(statement.facts, name)
    if name in ("code", "data", "plugins"):
        own, usual = own[:8] or "none", usual[:8] or "none"
    sentence = _SENTENCES[name].format(own=short(own), usual=short(usual))
    if name != "job":
        return sentence
    settings, keys = statement.settings, statement.settings.keys() | usual_settings.keys()
    different = sorted(key for key in keys if settings.get(key) != usual_settings.get(key))
    parts = [
        f"{short(key)} is {short(settings.get(key, 'absent'))} there and "
        f"{short(usual_settings.get(key, 'absent'))} elsewhere"
        for key in different[:_MAX_SHOWN]
    ]
    more = [f"and {len(different) - _MAX_SHOWN} more settings differ"] if len(different) > _MAX_SHOWN else []
    return f"{sentence}: {', '.join(parts + more)}"


def short(value: object, most: int = 40) -> str:
    """A value from another process as text that is safe to print: at most `most` characters, all printable."""
    text = printable(str(value)[: most + 1])
    return text if len(text) <= most else f"{text[: most - 3]}..."


def two_secrets(its: RollCall | Statement, whose: str, own: RollCall | Statement) -> str:
    """Why one process does not know the secret of another: where each of them looks for it."""
    its_place, own_place = (f"{short(message.kept, _MAX_PATH)} on {short(message.host)}" for message in (its, own))
    return (
        f"its secret is from {its_place}, and {whose} from {own_place}; make run.dir one directory that their machines "
        "share, or set FIVEFOLD_SECRET to the same for all ranks"
    )


def ranks_text(ranks: Sequence[int]) -> str:
    """Sorted ranks as text: 'rank 3', 'ranks 1, 5', 'ranks 0, 8-15, 17'."""
    ranges: list[list[int]] = []  # [first, last] of consecutive ranks
    for rank in ranks:
        if ranges and rank == ranges[-1][1] + 1:
            ranges[-1][1] = rank
        else:
            ranges.append([rank, rank])
    parts = [
        f"{first}-{last}" if last > first + 1 else ", ".join(map(str, sorted({first, last}))) for first, last in ranges
    ]
    shown = ", ".join(parts[:16]) + (f" and {len(parts) - 16} more" if len(parts) > 16 else "")
    return f"rank{'s' * (len(ranks) != 1)} {shown}"


# ---- handshake ------------------------------------------------------------------------------------------------------


_STORE_TIMEOUT = 30.0  # seconds within which a working store answers
_ODD_RANKS_WAIT = 3.0  # seconds that rank 0 still waits once a rank is odd, so that it can name all odd ones
_REFUSAL_WAIT = 5.0  # seconds for all ranks to read a refusal: the store may end with rank 0
_NOTE_INTERVAL = 30.0  # seconds between notes about missing ranks


def meet(meeting: Rendezvous, rank: int, claim: Hello, timeout: float) -> "Store":
    """Returns the store for the process group once all ranks have come and stated equal facts.

    Raises an error on every rank otherwise: PeerLost if ranks have not come within `timeout` seconds, UserError if one
    is odd.
    """
    from torch.distributed import DistNetworkError

    deadline = time.monotonic() + timeout
    while True:
        session = _Handshake(meeting.store(rank, claim.facts.world, deadline), str(meeting), claim, timeout)
        try:
            return within(_STORE_TIMEOUT, partial(session.answer, rank) if rank else session.call)
        except TimeoutError:
            why = "rank 0 is stopped or cut off" if rank else "its file system hangs"
            raise PeerLost(f"the store at {meeting} has given no answer for {_STORE_TIMEOUT:.0f} s: {why}") from None
        except ValueError as error:  # a counter that no rank has written
            problem = f"another program writes into the store at {meeting}: {error}; set MASTER_PORT"
            raise UserError(problem, "meeting.taken") from None
        except DistNetworkError:  # the store belonged to earlier ranks, which have ended now
            if rank == 0 or time.monotonic() > deadline:
                raise PeerLost(f"the store at {meeting} has ended before all ranks had joined") from None
            time.sleep(0.5)


class Roll:
    """The statements that rank 0 has received, and what is wrong with them."""

    def __init__(self, own: Statement, claim: Hello):
        self.statements = [own]
        self.places: list[int | None] = [None]  # of the statements in the store; None: rank 0's own
        self.refused: dict[int | None, str] = {}  # place -> why its statement is refused
        self.ranks = {0}  # that have stated themselves
        self.any_odd = False  # then the world cannot begin, and waiting for all ranks is of no use
        self._own, self._claim = own, claim
        self._pending: dict[int, None] = {}  # an ordered set of places
        self._seen = 0

    def pending(self, arrived: int) -> list[int]:
        """The places whose statement has not been read yet, of `arrived` in total. The count is limited, since any
        process that reaches the store can raise it."""
        arrived = min(arrived, 4 * self._own.facts.world + 100)
        self._pending |= dict.fromkeys(range(self._seen, arrived))
        self._seen = max(self._seen, arrived)
        return list(self._pending)

    def take(self, place: int, data: bytes) -> None:
        """Read the statement of a place."""
        del self._pending[place]
        statement, proven = unseal(data, Statement, self._claim.secret)
        if statement is None:
            self.refused[place] = (
                f"a process has sent {len(data)} bytes that are not a valid statement of a rank, and is refused"
            )
        elif not proven:
            self.refused[place] = (
                f"a process that says it is {statement.sender} does not know this run's secret, and is refused: "
                + two_secrets(statement, "rank 0's", self._own)
            )
        elif statement.call != self._own.call:
            self.refused[place] = f"an old statement of {statement.sender} was sent once more, and is refused"
        else:
            self.any_odd |= statement.facts != self._own.facts or statement.rank in self.ranks
            self.statements.append(statement)
            self.places.append(place)
            self.ranks.add(statement.rank)
        self.any_odd |= place in self.refused

    @property
    def complete(self) -> bool:
        return len(self.ranks) >= self._own.facts.world

    def absent(self, seconds: float) -> str:
        """A sentence that names the ranks that have not joined."""
        size = self._own.facts.world
        missing = [rank for rank in range(size) if rank not in self.ranks]
        have = "has" if len(missing) == 1 else "have"
        here = f"{size - len(missing)} of {size} {'is' if size - len(missing) == 1 else 'are'} here"
        return f"{ranks_text(missing)} {have} not joined within {seconds:g} s; {here}"

    def problems(self) -> dict[int | None, str]:
        """What is wrong with statements, by their place."""
        odd = odd_ones(self.statements)
        return {self.places[index]: problem for index, problem in odd.items()} | self.refused


class _Handshake:
    """One rank's part of the handshake, on a store at `address`."""

    def __init__(self, store: "Store", address: str, claim: Hello, timeout: float):
        self.store, self.address, self.claim, self.timeout = store, address, claim, timeout

    def _part(self, number: int, name: str = "") -> "Store":
        from torch._C._distributed_c10d import PrefixStore

        return PrefixStore(f"world {number}{name}", self.store)

    def _put(self, part: "Store", key: str, message: msgspec.Struct) -> None:
        part.set(key, seal(message, self.claim.secret))  # type: ignore[arg-type]  # it also takes bytes

    def call(self, alive: Callable[[], None]) -> "Store":
        """Rank 0's part: write the roll call, read the statements and answer them."""
        number = self.store.add("calls", 1)
        call, part = RollCall(self.claim.facts.job, self.claim.kept), self._part(number)
        self._put(part, "call", call)
        part.add("arrived", 0)
        self.store.set("now", str(number))
        roll = Roll(self._statement(call, 0, dict(self.claim.settings)), self.claim)
        limit, note = self.timeout, _NOTE_INTERVAL
        for waited in _polls(self.timeout, alive):
            for place in roll.pending(int(part.get("arrived"))):
                if part.check([f"statement {place}"]):
                    roll.take(place, part.get(f"statement {place}"))
                    alive()
            limit = min(limit, waited + _ODD_RANKS_WAIT) if roll.any_odd else limit
            if roll.complete or waited > limit:
                break
            if int(self.store.get("now")) != number:
                twice = f"two processes claim rank 0: another one calls the ranks at {self.address}"
                raise UserError(twice, "ranks.twice")
            if waited > note:
                print(f"rank 0 waits: {roll.absent(round(waited))}", file=sys.stderr, flush=True)
                note += _NOTE_INTERVAL
        problems = roll.problems()
        absent = "" if problems or roll.complete else f"{roll.absent(self.timeout)} ({self.address})"
        self._answer_all(part, roll, problems, absent)
        if not problems and not absent:
            return self._part(number, " group")
        for _ in _polls(_REFUSAL_WAIT, alive):
            if int(part.get("heard")) == len(roll.places) - 1:
                break
        raise PeerLost(absent) if absent else UserError(_shorten(problems), "ranks.differ")

    def _answer_all(self, part: "Store", roll: Roll, problems: dict[int | None, str], absent: str) -> None:
        """Write the answer to each statement: its problem, or `absent`, the sentence about missing ranks."""
        part.add("heard", 0)
        for place, statement in zip(roll.places[1:], roll.statements[1:], strict=True):
            sentences = [problems[place]] if place in problems else []
            if absent:
                sentences = [absent]
            answer = Welcome(statement.nonce, not problems and not absent, bool(absent), sentences)
            self._put(part, f"answer {place}", answer)
        for place in roll.refused:
            part.set(f"answer {place}", "")  # not sealed, so that a stranger does not get a proof to replay
        if not problems and not absent:
            part.set("begun", "")

    def answer(self, rank: int, alive: Callable[[], None]) -> "Store":
        """Any other rank's part: answer the roll call and wait for rank 0's answer; again if rank 0 calls again."""
        number = 0
        while True:
            for _ in _polls(self.timeout, alive):
                if self.store.check(["now"]) and int(self.store.get("now")) > number:
                    break
            else:
                raise PeerLost(f"rank 0 has not joined within {self.timeout:g} s ({self.address})")
            number = int(self.store.get("now"))
            part = self._part(number)
            place, nonce = self._write_statement(part, rank)
            for _ in _polls(self.timeout + _ODD_RANKS_WAIT + _REFUSAL_WAIT, alive):
                if part.check([f"answer {place}"]):
                    self._read_answer(part, place, nonce)
                    return self._part(number, " group")
                if int(self.store.get("now")) != number:
                    break
            else:
                begun = "; the ranks that meet there have begun without this one" if part.check(["begun"]) else ""
                raise PeerLost(f"rank 0 has not answered rank {rank} within {self.timeout:g} s ({self.address}){begun}")

    def _statement(self, call: RollCall | None, rank: int, settings: dict[str, str]) -> Statement:
        return Statement(call.nonce if call else b"", rank, self.claim.facts, settings, self.claim.kept)

    def _write_statement(self, part: "Store", rank: int) -> tuple[int, bytes]:
        """Write this rank's statement; returns its place and nonce."""
        call, proven = unseal(part.get("call"), RollCall, self.claim.secret)
        differs = call is not None and proven and call.job != self.claim.facts.job
        statement = self._statement(call, rank, dict(self.claim.settings) if differs else {})
        place = part.add("arrived", 1) - 1
        self._put(part, f"statement {place}", statement)
        if not proven:
            why = ": " + two_secrets(call, "this rank's", statement) if call else ""
            raise UserError(self._stranger + why, "ranks.secret")
        return place, statement.nonce

    def _read_answer(self, part: "Store", place: int, nonce: bytes) -> None:
        """Read rank 0's answer; raises an error unless the world begins."""
        answer, proven = unseal(part.get(f"answer {place}"), Welcome, self.claim.secret)
        part.add("heard", 1)
        if answer is None or not proven or answer.statement != nonce:
            raise UserError(self._stranger, "ranks.secret")
        if not answer.begins:
            raise PeerLost(*answer.problems) if answer.lost else UserError(answer.problems, "ranks.differ")

    @property
    def _stranger(self) -> str:
        return f"who answers as rank 0 at {self.address} does not know this run's secret"


def _polls(limit: float, alive: Callable[[], None]) -> Iterator[float]:
    """Yields the seconds waited so far until they pass the limit: often at first, each second later.

    A store's own wait cannot be interrupted, and prints a page when it times out.
    """
    start = time.monotonic()
    while True:
        alive()
        waited = time.monotonic() - start
        yield waited
        if waited > limit:
            return
        time.sleep(min(max(0.001, waited / 20), 1.0, limit - waited + 0.001))


def _shorten(problems: dict[int | None, str]) -> list[str]:
    """At most eight different problems, and how many more there are."""
    sentences = list(dict.fromkeys(problems.values()))
    return sentences if len(sentences) <= 8 else [*sentences[:8], f"{len(sentences) - 8} more ranks differ"]
