"""Rows of measured runs: CSV files with one row per run, and the columns that a prediction needs.

Empty means not published. `status` is ok, oom (ran out of memory), theory, or error.
"""

import csv
import math
from dataclasses import dataclass
from pathlib import Path

from fivefold.support.errors import UserError

DATA = Path(__file__).parent / "data"
NEEDED = ("source", "model", "layers", "hidden", "heads", "seq_len", "gpu", "gpus", "status")


@dataclass(frozen=True)
class Row:
    file: str  # without its ending
    line: int
    values: dict[str, str]

    def text(self, column: str) -> str:
        return (self.values.get(column) or "").strip()

    def number(self, column: str) -> float | None:
        try:
            value = float(self.text(column))
        except ValueError:
            return None
        return value if math.isfinite(value) else None

    def whole(self, column: str) -> int | None:
        value = self.number(column)
        return None if value is None else round(value)

    @property
    def status(self) -> str:
        return self.text("status").lower() or "ok"

    @property
    def where(self) -> str:
        return f"{self.file}.csv line {self.line}"


def read_rows(directory: Path = DATA) -> list[Row]:
    """Every row of every CSV file of a directory."""
    files = sorted(path for path in directory.glob("*.csv") if path.is_file()) if directory.is_dir() else []
    if not files:
        raise UserError(f"{directory} has no .csv files; give a directory of measured runs, as {DATA} is one")
    rows = []
    for path in files:
        with path.open(newline="", encoding="utf-8", errors="replace") as handle:
            reader = csv.DictReader(handle)
            missing = [column for column in NEEDED if column not in (reader.fieldnames or ())]
            if missing:
                raise UserError(f"{path} lacks the columns {', '.join(missing)}; its first line must name them")
            try:
                rows += [Row(path.stem, reader.line_num, values) for values in reader]
            except csv.Error as error:
                raise UserError(f"{path} line {reader.line_num} cannot be read: {error}") from None
    return rows
