"""A line chart in braille, for terminals: two points a column, four a row."""

from collections.abc import Sequence

_DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))  # of a braille cell, by column and row


def chart(values: Sequence[float], marks: dict[str, float], width: int = 64, height: int = 10) -> list[str]:
    """The curve of `values`, with a dashed line and a label at each mark; rows of text, top first."""
    top, bottom = max(*values, *marks.values()), min(*values, *marks.values())
    span = (top - bottom) or 1.0

    def row_of(value: float, rows: int) -> int:
        return round((top - value) / span * (rows - 1))

    cells = [[0] * width for _ in range(height)]
    points = [_mean_between(values, i, 2 * width) for i in range(2 * width)]
    for x, value in enumerate(points):
        y = row_of(value, 4 * height)
        before = row_of(points[x - 1], 4 * height) if x else y
        for dot in range(min(y, before), max(y, before) + 1):  # join the points, so that a steep fall is a line
            cells[dot // 4][x // 2] |= _DOTS[x % 2][dot % 4]
    labels = {0: f"{top:.2f}", height - 1: f"{bottom:.2f}"}
    dashed: dict[int, str] = {}
    for name, value in marks.items():
        row = row_of(value, height)
        labels[row], dashed[row] = f"{value:.2f}", name
    return [_row(cells[y], labels.get(y, ""), dashed.get(y)) for y in range(height)]


def _mean_between(values: Sequence[float], point: int, points: int) -> float:
    """The mean of the share of `values` that falls on one of `points` places; its nearest where none does."""
    start, stop = point * len(values) // points, (point + 1) * len(values) // points
    share = values[start : max(stop, start + 1)]
    return sum(share) / len(share)


def _row(cells: list[int], label: str, mark: str | None) -> str:
    empty = "╌" if mark else " "
    line = "".join(chr(0x2800 + cell) if cell else empty for cell in cells)
    return f"{label:>6} {'┼' if label else '│'}{line}{' ' + mark if mark else ''}"
