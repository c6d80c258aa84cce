"""How ranks end, and which end explains the others: one rule for every launcher."""

import linecache
import re
from dataclasses import dataclass
from typing import Any

from fivefold.support.errors import PeerLost

# torch has no exception of its own for these: gloo and NCCL raise RuntimeErrors for any kind of trouble.
_GONE = re.compile(
    r"onnection (closed|reset|refused)|roken pipe|ocket closed|Read error|ncclRemoteError|pair closure|DistNetworkError"
)
_SILENT = re.compile(r"[Tt]imed? ?out")
_INNERMOST = re.compile(r'most recent call first.*\n +File "(.+)", line (\d+)')
_KINDS = ("died", "raised", "hung", "stopped", "returned")


def lost_peer(error: BaseException | str) -> str | None:
    """Why this rank cannot reach a peer, if that is what the error is about."""
    text = str(error)
    if _SILENT.search(text):
        return "it gave no sign"
    return "the connection is closed" if _GONE.search(text) else None


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

    @property
    def doubt(self) -> int:
        """How likely another rank explains this end: 0 not at all, 3 certainly."""
        if self.kind in ("hung", "stopped"):
            file, line = self._innermost
            return 3 if "/torch/" in file or "wait(" in linecache.getline(file, line) else 2
        if self.code == PeerLost.code or self.error.startswith(PeerLost.__name__) or lost_peer(self.error):
            return 3
        return 1 if self.error == "SIGABRT" else 0  # gloo and NCCL abort in a thread of theirs when a peer is gone

    @property
    def blame(self) -> tuple[bool, int, int, bool, float, int]:
        """Sorts the rank that explains the others first.

        A peer may raise because of a death before the launcher has seen the death, so deaths come before exceptions.
        """
        returned = self.kind == "returned"
        return returned, self.doubt, _KINDS.index(self.kind), self.code > 0, self.when, self.rank

    @property
    def _innermost(self) -> tuple[str, int]:
        """File and line of the main thread's innermost frame. faulthandler lists that thread last."""
        file, line = (_INNERMOST.findall(self.stack) or [("", 0)])[-1]
        return file, int(line)

    @property
    def how(self) -> str:
        """A predicate for the rank: 'was ended by SIGKILL'."""
        if self.kind in ("hung", "stopped"):
            file, line = self._innermost
            silent = "gave no answer" if self.kind == "hung" else "did not end with the others"
            return f"{silent}; it is in {file}, line {line}" if file else silent
        if self.kind == "returned":
            return self.kind
        return f"was ended by {self.error}" if self.code < 0 else f"failed with {self.error}"
