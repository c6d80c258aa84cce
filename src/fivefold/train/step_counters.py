"""Counting a step of a real run: `train.count=true`. The counters are those of the dry run, and must agree with it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.table import Table

from fivefold.parallel.mesh import Mesh
from fivefold.parallel.traffic import TrafficCounter
from fivefold.support.formatting import bytes_text
from fivefold.train.engine import Engine
from fivefold.train.memory_ledger import Ledger


class Counted:
    """One step, of rank 0 where it is shown: the second, for the first also makes what later ones find."""

    def __init__(self, engine: Engine, mesh: Mesh, wanted: bool, steps: int):
        self.engine, self.mesh = engine, mesh
        self.which = min(2, steps) if wanted else 0
        self.ledger: Ledger | None = None
        self.counter: TrafficCounter | None = None

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Around a step, from 1."""
        if number != self.which:
            yield
            return
        self.counter = TrafficCounter(self.mesh)
        self.ledger = Ledger(self.engine, self.counter)
        with self.ledger:
            yield

    def to_dict(self) -> dict[str, Any]:
        assert self.ledger is not None
        assert self.counter is not None
        return {
            "step": self.which,
            "rank": self.mesh.world.rank,
            "state_bytes": self.ledger.state,
            "peak_bytes": self.ledger.peak,
            "flops": self.ledger.flops,
            "live": self.engine.pipeline.peak,
            "traffic": [row.to_dict() for row in self.counter.rows()],
        }

    def show(self, say: Callable[[Any], None]) -> None:
        """What was counted, if anything was."""
        if self.ledger is None or self.counter is None:
            return
        say(
            f"step {self.which} of this rank: {bytes_text(self.ledger.state)} of state, {bytes_text(self.ledger.peak)} "
            f"at the peak, {self.ledger.flops / 1e9:,.1f} GFLOP"
        )
        table = Table()
        for name in ("axis", "collective", "calls", "payload", "wire"):
            table.add_column(name, justify="left" if name in ("axis", "collective") else "right")
        for row in self.counter.rows():
            sizes = (bytes_text(row.payload), bytes_text(float(row.wire)))
            table.add_row(row.axis, row.kind, f"{row.calls:,}", *sizes)
        if table.row_count:
            say(table)
