"""A run's second tier of checkpoints: snapshots in memory, from whoever wrote them to whoever goes on.

memory = Memory.of(control, mesh, run, wanted=True, say)      # None where there is nothing to keep or to find
for one in memory.find(): ...                                 # the newest first
memory.keeper.start(pieces, manifest)
memory.close()
"""

import time
from collections.abc import Callable

from fivefold.checkpoint.memory import Candidate, clear, known, made
from fivefold.checkpoint.memory_load import Harm, Wanted, fetch, find, load
from fivefold.checkpoint.memory_nodes import Nodes
from fivefold.checkpoint.memory_save import Keeper
from fivefold.checkpoint.save import NotSaved
from fivefold.checkpoint.store import MANIFEST, Checkpoint
from fivefold.parallel.control import Control
from fivefold.parallel.mesh import Mesh
from fivefold.support.places import Place

Say = Callable[[str], None]


class Memory:
    def __init__(self, nodes: Nodes, mesh: Mesh, say: Say):
        self.nodes, self.say = nodes, say
        self.keeper = Keeper(nodes, mesh.device)

    @classmethod
    def of(cls, control: Control, mesh: Mesh, run: Place, wanted: bool, say: Say) -> "Memory | None":
        """Collective. `wanted`: snapshots are to be taken; else only those that are there count."""
        name, problem = "", ""
        if control.rank == 0:
            try:
                name = made(run) if wanted else known(run)
            except OSError as error:
                problem = f"{run} cannot be written to: {error.strerror or error}"
        told = name, problem, int(1000 * time.time())
        name, problem, start = control.from_first(told, tuple[str, str, int])
        if name:
            nodes = Nodes(Control(mesh, control.timeout), name, start, wanted)
            if nodes.first and not nodes.problem:
                clear(nodes.home)
            problem = nodes.problem
            if not problem:
                return cls(nodes, mesh, say)
            nodes.control.close()
        if problem and wanted and control.rank == 0:
            say(f"no snapshots are kept in memory: {problem}; training goes on without, and disk is still there")
        return None

    def find(self, usable: Callable[[Candidate], bool] = lambda _: True) -> list[Candidate]:
        """Collective: snapshots that are whole, the newest first."""
        return find(self.nodes, self.say, usable)

    def open(self, one: Candidate) -> Checkpoint:
        """Collective: a snapshot whose tables are on every node."""
        fetch(self.nodes, one)
        return Checkpoint(self.nodes.home / one.name)

    def load(self, one: Candidate, checkpoint: Checkpoint, pieces: Wanted, whole: bool = False) -> list[str]:
        """Collective: fill the pieces, or say why they are not to be used. Where a copy of a file is damaged, and
        another node has one that is not, that one is read. `whole`: also what no piece needs is hashed."""
        said: list[str] = []
        while True:
            try:
                harm = load(self.nodes, one, checkpoint, pieces, whole)
            except NotSaved as error:
                harm = [Harm(-1, MANIFEST, str(error))]
            if not harm:
                for sentence in said if self.nodes.rank == 0 else ():
                    self.say(f"{sentence}; another node's copy is read")
                return []
            said = list(dict.fromkeys([*said, *(bad.why for bad in harm)]))
            rest = one.without([(bad.node, bad.file) for bad in harm])
            if rest.missing or rest.files == one.files:
                return said
            one = rest

    def close(self) -> None:
        self.nodes.control.close()
