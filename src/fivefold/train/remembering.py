"""A trainer's snapshots in memory: when they are taken, and which one it goes on from."""

from collections.abc import Callable

import torch

from fivefold.checkpoint.load import Say
from fivefold.checkpoint.memory import Candidate
from fivefold.checkpoint.memory_load import Wanted
from fivefold.checkpoint.memory_tier import Memory
from fivefold.checkpoint.pieces import Pieces
from fivefold.checkpoint.store import Checkpoint, Manifest
from fivefold.parallel.control import Control
from fivefold.parallel.mesh import Mesh
from fivefold.support.errors import TrainingError
from fivefold.support.places import Place


class Remembering:
    """All ranks call the same of it; where nothing is kept in memory it does nothing."""

    def __init__(self, control: Control, say: Say):
        self.control, self.say = control, say
        self.memory: Memory | None = None
        self.told = False  # that one was not taken
        self.opened: dict[Place, Candidate] = {}

    def enter(self, mesh: Mesh, run: Place, wanted: bool) -> None:
        """Before anything else. `wanted`: snapshots are to be taken; else those that are there still count."""
        self.memory = Memory.of(self.control, mesh, run, wanted, self.say)

    def find(self, usable: Callable[[Candidate], bool]) -> list[Candidate]:
        """The newest first."""
        return self.memory.find(usable) if self.memory is not None else []

    def load(self, found: list[Candidate], wanted: Wanted, whole: bool = False) -> tuple[Candidate, Checkpoint] | None:
        """The first of them that is what its manifest says, loaded; of those before it, what is wrong is said. `whole`:
        what nobody wants must be so, too."""
        for number, one in enumerate(found):
            assert self.memory is not None
            checkpoint = self.memory.open(one)
            harm = self.memory.load(one, checkpoint, wanted, whole)
            if not harm:
                return one, checkpoint
            following = f"step {found[number + 1].step} in memory" if number + 1 < len(found) else "disk"
            if self.control.rank == 0:
                for problem in harm:
                    self.say(problem)
                self.say(f"step {one.step} in memory is not used; {following} is tried")
        return None

    def sound(self, found: list[Candidate]) -> Checkpoint | None:
        """The first of them that is what its manifest says, every byte of it; it is not loaded yet."""
        kept = self.load(found, lambda _: {}, whole=True)
        if kept is None:
            return None
        one, checkpoint = kept
        self.opened[checkpoint.path] = one
        return checkpoint

    def take(self, checkpoint: Checkpoint, pieces: Pieces) -> bool:
        """Whether it is one of `sound`, and is loaded."""
        one = self.opened.pop(checkpoint.path, None)
        if one is None or self.memory is None:
            return False
        if harm := self.memory.load(one, checkpoint, lambda _: pieces):
            raise TrainingError(f"step {one.step} in memory was whole, and is no more: {harm[0]}")
        return True

    def start(self, pieces: Pieces, manifest: Manifest, after: torch.cuda.Event | None) -> torch.cuda.Event | None:
        """Take a snapshot; returns when it is taken, or under way: on a GPU, behind this event."""
        if self.memory is None:
            return after
        self.finish()
        return self.memory.keeper.start(pieces, manifest, after)

    def finish(self) -> None:
        """Wait for the snapshot under way, if there is one. The first that was not taken is told of."""
        problem = self.memory.keeper.finish() if self.memory is not None else None
        if problem and not self.told:
            self.told = True
            self.say(f"{problem}; training goes on without, and disk is still there")

    def forget(self, after: int | None = None) -> None:
        """No snapshot of a step after this one counts any more; without one, all memory is given back."""
        if self.memory is not None:
            self.finish()
            self.memory.keeper.forget(after)

    def close(self) -> None:
        if self.memory is not None:
            self.memory.close()
