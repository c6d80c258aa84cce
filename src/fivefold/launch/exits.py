"""How ranks end, and which end explains the others: one rule for every launcher."""

import re
import signal
import sys
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from fivefold.launch.waits import waits_there
from fivefold.support.errors import PeerLost

# torch has no exception of its own for these: gloo and NCCL raise RuntimeErrors for any kind of trouble.
_PEER_GONE_ERROR = re.compile(
    r"onnection (closed|reset|refused)|roken pipe|ocket closed|Read error|ncclRemoteError|pair closure|DistNetworkError"
)
_TIMEOUT_ERROR = re.compile(r"[Tt]imed? ?out")
_INNERMOST = re.compile(r'most recent call first.*\n +File "(.+)", line (\d+)')
_PEER_LOST_REPR = re.compile(PeerLost.__name__ + r"""\((['"])(.*)\1\)""", re.DOTALL)  # its repr
_NUMBER = re.compile(r"0x[0-9a-fA-F]+|\d+(\.\d+)?(e[+-]?\d+)?")
_COMMAND_LINE = re.compile(r' +File ".*/(typer|click)/')
# Signals that ask a run to stop: from a scheduler, from Slurm's --signal, from a closed terminal, from Ctrl-C.
STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGINT)
INTERRUPTED, TERMINATED = 130, 143  # exit codes after Ctrl-C, and after another signal to stop and a checkpoint
ENDED_AT_ONCE = "ended at once; metrics and checkpoints up to here are kept"
_END_KINDS = ("died", "raised", "hung", "stopped", "returned")  # the likeliest cause first


def lost_peer(error: BaseException | str) -> str | None:
    """Why this rank cannot reach a peer, if that is what the error is about; else None."""
    text = str(error)
    if _TIMEOUT_ERROR.search(text):
        return "it gave no sign"
    return "the connection is closed" if _PEER_GONE_ERROR.search(text) else None


def signal_name(number: int) -> str:
    """The name of a signal, 'SIGKILL', or its number: most real-time signals have no name."""
    if number == signal.SIGINT:
        return "Ctrl-C"
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def say(line: str) -> None:
    """Print a line to standard error."""
    with suppress(OSError):  # the reader of the pipe may be gone
        print(line, file=sys.stderr, flush=True)


def say_ended() -> None:
    """Print what follows a second Ctrl-C, and show the terminal's cursor, which a live display hides."""
    say(("\033[?25h\n" if sys.stderr.isatty() else "") + ENDED_AT_ONCE)


@dataclass(frozen=True)
class End:
    """How one rank ended."""

    rank: int
    kind: str  # returned | raised | died (signal or exit code) | hung (time limit) | stopped (after a peer's failure)
    error: str = ""  # "ValueError: boom" | "SIGKILL" | "exit code 3"
    stack: str = ""  # the traceback, or what faulthandler wrote
    when: float = 0.0  # time.monotonic() at an exception: the processes of a machine share that clock
    value: Any = None
    code: int = 0  # of a process that died; negative for a signal
    output: str = ""
    last: str = ""  # when and where it last moved: "it last moved 601 s ago, in step 4"
    place: str = ""  # where it died: "step 4"
    cause: str = ""  # the exception that an exit code stands for, or what the rank said of its silence
    paused: bool = False  # held by SIGSTOP or a debugger when it gave no sign

    @property
    def signature(self) -> tuple[int, str, str, str]:
        """Equal for two ends by one cause in one place. Numbers in the error are left out: addresses and times vary."""
        return self.rank, self.kind, self.place, _NUMBER.sub("#", f"{self.error} {self.cause}")

    @property
    def doubt(self) -> int:
        """How likely another rank explains this end: 0 not at all, 3 certainly."""
        if self.paused:
            return 0  # it was stopped from outside, and no peer did that
        if self.kind in ("hung", "stopped"):
            file, line = self._innermost
            return 3 if waits_there(file, line) else 2
        if self.code == PeerLost.code or self.error.startswith(PeerLost.__name__) or lost_peer(self.error):
            return 3
        return 1 if self.error == "SIGABRT" else 0  # gloo and NCCL abort in a thread of their own when a peer is gone

    @property
    def accused(self) -> bool:
        """Whether the rank's machine or GPU may be to blame: the rank failed, and no peer's end explains that."""
        expected = self.kind == "returned" or self.code in (2, INTERRUPTED, TERMINATED)
        return not expected and self.doubt < 3

    @property
    def blame(self) -> tuple[bool, int, int, bool, float, int]:
        """Sorts the rank that explains the others first.

        A peer may raise because of a death before the launcher has seen the death, so deaths come before exceptions.
        """
        returned = self.kind == "returned"
        return returned, self.doubt, _END_KINDS.index(self.kind), self.code > 0, self.when, self.rank

    @property
    def _innermost(self) -> tuple[str, int]:
        """File and line of the main thread's innermost frame. faulthandler lists that thread last."""
        file, line = (_INNERMOST.findall(self.stack) or [("", 0)])[-1]
        return file, int(line)

    @property
    def crash(self) -> str:
        """The Python stack of the thread in which the process died, from the innermost frame to the command line."""
        threads = self.stack.split("\n\n") if self.kind == "died" else []
        current = (thread for thread in threads if thread.startswith("Current thread"))
        return _COMMAND_LINE.split(next(current, ""))[0].rstrip()

    @property
    def waited(self) -> str:
        """What a rank did that only waited, in its own words, to follow its name: 'waited: step 4: rank 0 ...'."""
        lost = _PEER_LOST_REPR.fullmatch(self.cause)
        said = lost[2] if lost else self.cause
        return f"waited: {said}" if said else self.how

    @property
    def how(self) -> str:
        """What the rank did, to follow its name in a sentence: 'was ended by SIGKILL in step 4'."""
        if self.kind in ("hung", "stopped"):
            file, line = self._innermost
            silence = "gave no answer" if self.kind == "hung" else "did not end with the others"
            where = f"it is in {file}, line {line}" if file else ""
            paused = "SIGSTOP or a debugger held it" if self.paused else ""
            return "; ".join(filter(None, [silence, self.last, where, paused]))
        if self.kind == "returned":
            return self.kind
        where = f" in {self.place}" if self.place else ""
        return (f"was ended by {self.error}" if self.code < 0 else f"failed with {self.error}") + where
