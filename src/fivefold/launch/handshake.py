"""Before any process group exists, the ranks of a world make sure of each other, through the store at which they meet.

Rank 0 calls, every rank answers with a statement, rank 0 judges them together and tells each one. So ranks of two jobs
never train together, a process without the run's secret is not let in, and ranks that do not come are named. The work
of rank 0 grows with the number of ranks, that of the others does not.

    now                          which call is the last: a store may outlive the ranks that met there before
    world N/call                 rank 0's Call
    world N/arrived              a counter; who raises it to i + 1 writes
    world N/statement i          its Statement, and is told
    world N/answer i             in an Answer
    world N/heard                how many have read theirs
    world N/begun                there if the world has begun
"""

import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from fivefold.launch.meeting import Meeting, within
from fivefold.launch.statement import Answer, Call, Claim, Statement, odd_ones, ranks_text, seal, two_secrets, unseal
from fivefold.support.errors import PeerLost, UserError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_SILENCE = 30.0  # seconds in which a store that is there has answered
_GATHER = 3.0  # seconds that others have to come when one is found to be odd: all odd ones are to be named
_HEAR = 5.0  # seconds for all to read a refusal: the store may end with rank 0
_NOTE = 30.0  # seconds between notes of who is missing


def meet(meeting: Meeting, rank: int, claim: Claim, timeout: float) -> "Store":
    """The store for the process group of a world whose ranks have all come within `timeout` seconds, and are alike.

    Otherwise an error on every rank: PeerLost where ranks are absent, UserError where one is odd.
    """
    from torch.distributed import DistNetworkError

    deadline = time.monotonic() + timeout
    while True:
        room = _Room(meeting.store(rank, claim.facts.world, deadline), str(meeting), claim, timeout)
        try:
            return within(_SILENCE, partial(room.answer, rank) if rank else room.call)
        except TimeoutError:
            why = "rank 0 is stopped or cut off" if rank else "its file system hangs"
            raise PeerLost(f"the store at {meeting} has given no answer for {_SILENCE:.0f} s: {why}") from None
        except ValueError as error:  # numbers that no rank has written
            raise UserError(f"another program writes into the store at {meeting}: {error}; set MASTER_PORT") from None
        except DistNetworkError:  # the store was that of earlier ranks, which have ended now
            if rank == 0 or time.monotonic() > deadline:
                raise PeerLost(f"the store at {meeting} has ended before all ranks had joined") from None
            time.sleep(0.5)


class Roll:
    """The statements that rank 0 has received, and what it makes of them."""

    def __init__(self, mine: Statement, claim: Claim):
        self.statements = [mine]
        self.places: list[int | None] = [None]  # of the statements, in the store
        self.refused: dict[int | None, str] = {}
        self.ranks = {0}
        self.strange = False  # not all of them are alike, so that waiting for more leads nowhere
        self._mine, self._claim = mine, claim
        self._pending: dict[int, None] = {}
        self._seen = 0

    def pending(self, arrived: int) -> list[int]:
        """Places whose statement has not been read, of so many that were taken; a stranger may have counted, too."""
        arrived = min(arrived, 4 * self._mine.facts.world + 100)
        self._pending |= dict.fromkeys(range(self._seen, arrived))
        self._seen = max(self._seen, arrived)
        return list(self._pending)

    def take(self, place: int, data: bytes) -> None:
        del self._pending[place]
        statement, proven = unseal(data, Statement, self._claim.secret)
        if statement is None:
            self.refused[place] = (
                f"a process has sent {len(data)} bytes that are no statement of a rank, and is refused"
            )
        elif not proven:
            self.refused[place] = (
                f"a process that says it is {statement.who} does not know this run's secret, and is refused: "
                + two_secrets(statement, "rank 0's", self._mine)
            )
        elif statement.call != self._mine.call:
            self.refused[place] = f"an old statement of {statement.who} was sent once more, and is refused"
        else:
            mine = statement.facts == self._mine.facts and statement.rank not in self.ranks
            self.strange |= not mine
            self.statements.append(statement)
            self.places.append(place)
            self.ranks.add(statement.rank)
        self.strange |= place in self.refused

    @property
    def complete(self) -> bool:
        return len(self.ranks) >= self._mine.facts.world

    def absent(self, seconds: float) -> str:
        size = self._mine.facts.world
        missing = [rank for rank in range(size) if rank not in self.ranks]
        have = "has" if len(missing) == 1 else "have"
        here = f"{size - len(missing)} of {size} {'is' if size - len(missing) == 1 else 'are'} here"
        return f"{ranks_text(missing)} {have} not joined within {seconds:g} s; {here}"

    def problems(self) -> dict[int | None, str]:
        """By the place of the statement that is wrong."""
        odd = odd_ones(self.statements)
        return {self.places[number]: problem for number, problem in odd.items()} | self.refused


class _Room:
    """The store, as one rank uses it."""

    def __init__(self, store: "Store", place: str, claim: Claim, timeout: float):
        self.store, self.place, self.claim, self.timeout = store, place, claim, timeout

    def _part(self, number: int, name: str = "") -> "Store":
        from torch._C._distributed_c10d import PrefixStore

        return PrefixStore(f"world {number}{name}", self.store)

    def _put(self, part: "Store", key: str, message: msgspec.Struct) -> None:
        part.set(key, seal(message, self.claim.secret))  # type: ignore[arg-type]  # bytes are taken, too

    def call(self, alive: Callable[[], None]) -> "Store":
        """As rank 0: the roll call."""
        number = self.store.add("calls", 1)
        call, part = Call(self.claim.facts.job, self.claim.kept), self._part(number)
        self._put(part, "call", call)
        part.add("arrived", 0)
        self.store.set("now", str(number))
        roll = Roll(self._statement(call, 0, dict(self.claim.settings)), self.claim)
        limit, note = self.timeout, _NOTE
        for waited in _polls(self.timeout, alive):
            for place in roll.pending(int(part.get("arrived"))):
                if part.check([f"statement {place}"]):
                    roll.take(place, part.get(f"statement {place}"))
                    alive()
            limit = min(limit, waited + _GATHER) if roll.strange else limit
            if roll.complete or waited > limit:
                break
            if int(self.store.get("now")) != number:
                raise UserError(f"rank 0 is claimed twice: another process calls the ranks at {self.place}, too")
            if waited > note:
                print(f"rank 0 waits: {roll.absent(round(waited))}", file=sys.stderr, flush=True)
                note += _NOTE
        problems = roll.problems()
        absent = "" if problems or roll.complete else f"{roll.absent(self.timeout)} ({self.place})"
        self._tell(part, roll, problems, absent)
        if not problems and not absent:
            return self._part(number, " group")
        for _ in _polls(_HEAR, alive):
            if int(part.get("heard")) == len(roll.places) - 1:
                break
        raise PeerLost(absent) if absent else UserError(_shortened(problems))

    def _tell(self, part: "Store", roll: Roll, problems: dict[int | None, str], absent: str) -> None:
        part.add("heard", 0)
        for place, statement in zip(roll.places[1:], roll.statements[1:], strict=True):
            said = [absent] if absent else [problems[place]] if place in problems else []
            answer = Answer(statement.nonce, not problems and not absent, bool(absent), said)
            self._put(part, f"answer {place}", answer)
        for place in roll.refused:
            part.set(f"answer {place}", "")  # not sealed: it would be a proof in the hands of a stranger
        if not problems and not absent:
            part.set("begun", "")

    def answer(self, rank: int, alive: Callable[[], None]) -> "Store":
        """As any other rank: until rank 0 has decided about the call that was answered, or calls again."""
        number = 0
        while True:
            for _ in _polls(self.timeout, alive):
                if self.store.check(["now"]) and int(self.store.get("now")) > number:
                    break
            else:
                raise PeerLost(f"rank 0 has not joined within {self.timeout:g} s ({self.place})")
            number = int(self.store.get("now"))
            part = self._part(number)
            place, nonce = self._state(part, rank)
            for _ in _polls(self.timeout + _GATHER + _HEAR, alive):
                if part.check([f"answer {place}"]):
                    self._heed(part, place, nonce)
                    return self._part(number, " group")
                if int(self.store.get("now")) != number:
                    break
            else:
                begun = "; the ranks that meet there have begun without this one" if part.check(["begun"]) else ""
                raise PeerLost(f"rank 0 has not answered rank {rank} within {self.timeout:g} s ({self.place}){begun}")

    def _statement(self, call: Call | None, rank: int, settings: dict[str, str]) -> Statement:
        return Statement(call.nonce if call else b"", rank, self.claim.facts, settings, self.claim.kept)

    def _state(self, part: "Store", rank: int) -> tuple[int, bytes]:
        """This rank's statement, and its place and nonce."""
        call, proven = unseal(part.get("call"), Call, self.claim.secret)
        differs = call is not None and proven and call.job != self.claim.facts.job
        statement = self._statement(call, rank, dict(self.claim.settings) if differs else {})
        place = part.add("arrived", 1) - 1
        self._put(part, f"statement {place}", statement)
        if not proven:
            why = ": " + two_secrets(call, "this rank's", statement) if call else ""
            raise UserError(self._stranger + why)
        return place, statement.nonce

    def _heed(self, part: "Store", place: int, nonce: bytes) -> None:
        answer, proven = unseal(part.get(f"answer {place}"), Answer, self.claim.secret)
        part.add("heard", 1)
        if answer is None or not proven or answer.statement != nonce:
            raise UserError(self._stranger)
        if not answer.begins:
            raise PeerLost(*answer.problems) if answer.lost else UserError(answer.problems)

    @property
    def _stranger(self) -> str:
        return f"who answers as rank 0 at {self.place} does not know this run's secret"


def _polls(limit: float, alive: Callable[[], None]) -> Iterator[float]:
    """The seconds waited, again and again until the limit: often at first, each second later.

    A store's own wait could not be interrupted, and prints a page when it ends without success.
    """
    start = time.monotonic()
    while True:
        alive()
        waited = time.monotonic() - start
        yield waited
        if waited > limit:
            return
        time.sleep(min(max(0.001, waited / 20), 1.0, limit - waited + 0.001))


def _shortened(problems: dict[int | None, str]) -> list[str]:
    said = list(dict.fromkeys(problems.values()))
    return said if len(said) <= 8 else [*said[:8], f"{len(said) - 8} more ranks are odd"]
