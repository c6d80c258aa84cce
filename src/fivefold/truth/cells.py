"""Cells of measured runs that must be numbers: one that cannot be read is named, and never taken as not published."""

import math
from typing import Protocol

from fivefold.support.formatting import either
from fivefold.truth.spelling import Refused

WHOLE = (
    "layers", "hidden", "ffn", "heads", "kv_heads", "vocab", "seq_len", "gpus", "gpus_per_node", "dp", "tp", "pp", "vp",
    "cp", "ep", "micro_batch", "global_batch",
)  # fmt: skip
NUMBERS = (
    "step_time_s", "derived_step_time_s", "tokens_per_s_per_gpu", "tflops_per_gpu", "mfu", "peak_mem_gb",
)  # fmt: skip


class Values(Protocol):
    """A row, as far as it matters here."""

    def text(self, column: str) -> str: ...


def number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def check_cells(row: Values) -> None:
    """Every number is one, above zero, and whole where halves make no sense."""
    wrong = [sentence for column in (*WHOLE, *NUMBERS) if (sentence := _wrong(column, row.text(column)))]
    if wrong:
        raise Refused("; ".join(wrong))


def _wrong(column: str, text: str) -> str:
    kind = "whole number" if column in WHOLE else "number"
    if not text:
        return ""
    value = number(text)
    if value is None:
        return f"{column} is {text!r}, and must be a {kind} (no commas, no units), or empty where it is not known"
    if value <= 0:
        return f"{column} is {text}, and must be above zero, or empty where it is not known"
    if column in WHOLE and value != int(value):
        return f"{column} is {text}, and must be a whole number; nearest: {either(_around(value, 1))}"
    return ""


def check_world(gpus: int, dp: int | None, inner: dict[str, int]) -> None:
    """The degrees, of which dp may be unknown, make as many ranks as there are GPUs."""
    ranks = math.prod(inner.values())
    said = " x ".join(f"{axis}={degree}" for axis, degree in inner.items())
    if dp is None and gpus % ranks:
        raise Refused(f"{said} = {ranks} does not divide gpus={gpus}")
    if dp is not None and dp * ranks != gpus:
        raise Refused(f"dp={dp} x {said} makes {dp * ranks} GPUs, and gpus is {gpus}")


def check_batch(batch: int, dp: int, samples: int) -> None:
    if batch % (dp * samples):
        near = either(_around(batch, dp * samples))
        raise Refused(f"global_batch={batch} does not divide over dp={dp} x micro_batch={samples}; nearest: {near}")


def _around(value: float, step: int) -> list[int]:
    """The multiples of a step on either side."""
    below = int(value // step) * step
    return [near for near in (below, below + step) if near]
