"""Times as people write them: `f=1,i=1,w=1,comm=0.1`.

    f, i, w    forward, input gradient, weight gradient of a whole rank; with v chunks, each chunk takes 1/v
    b, fb      the whole backward (i+w if left out), and a forward overlapped with a backward (f+b if left out)
    ep         of f, and of i, the messages of experts: joined pairs hide them, as far as they can, if fb is left out
    comm       latency of one message
    bytes, bandwidth    size of a message, and what a link carries per unit of time
    gather, reduce, step    the collectives and the optimizer of one stage

A value may be one number per stage, separated by colons: `f=1:1:1.5:1`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Self

from fivefold.schedule.costs import Costs, Link
from fivefold.schedule.schedule import Placement
from fivefold.support.errors import UserError
from fivefold.support.formatting import did_you_mean, figure, whole_number

PER_STAGE = ("f", "i", "w", "b", "fb", "ep")
SINGLE = ("comm", "bytes", "bandwidth", "gather", "reduce", "step")
KEYS = (*PER_STAGE, *SINGLE)


@dataclass(frozen=True)
class Times:
    """Durations before they are spread over the stages of a schedule."""

    values: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    slow: Mapping[int, float] = field(default_factory=dict)  # rank -> how many times as long it takes
    sends: Literal["eager", "blocking"] = "eager"
    overlap: bool = True

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read `f=1,i=1,w=0.5,comm=0.1`; every part that cannot be read is named."""
        values: dict[str, tuple[float, ...]] = {}
        problems: list[str] = []
        for part in filter(None, (piece.strip() for piece in text.split(","))):
            key, _, value = (piece.strip() for piece in part.partition("="))
            if key not in KEYS:
                problems.append(f"times: {key!r} is not a time; {did_you_mean(key, KEYS)}")
                continue
            if key in values:
                problems.append(f"times: {key} is given for the second time, as {value}")
                continue
            numbers = [_duration(piece) for piece in value.split(":")]
            if None in numbers or (key in SINGLE and len(numbers) > 1):
                wanted = "a number of zero or more" + (", or one per stage as 1:1:1.5:1" if key in PER_STAGE else "")
                problems.append(f"times: {key}={value} is not a time; write {key}= and {wanted}")
            else:
                values[key] = tuple(number for number in numbers if number is not None)
        if values.get("bandwidth") == (0.0,):
            problems.append("times: bandwidth=0 carries nothing; leave it out for a link that takes no time")
        if "fb" in values and "ep" in values:
            problems.append("times: fb and ep both say how long a joined pair takes; leave one of them out")
        spent = {key: sum(values.get(key, (1.0,))) for key in ("f", "i", "w", "b")}
        if not spent["f"] and not (spent["b"] and spent["i"] + spent["w"]):
            problems.append(f"times: with {text} neither a forward nor a backward pass takes time; give f more than 0")
        if problems:
            raise UserError(problems)
        return cls(values)

    def __str__(self) -> str:
        """As it would be written, with what is left out."""
        values = {"f": (1.0,), "i": (1.0,), "w": (1.0,)} | dict(self.values)
        text = ",".join(f"{key}={':'.join(figure(value) for value in values[key])}" for key in KEYS if key in values)
        text += "".join(f", rank {rank} takes {factor:g} times as long" for rank, factor in self.slow.items())
        return text + ", blocking sends" * (self.sends == "blocking") + ", no overlap" * (not self.overlap)

    def costs(self, placement: Placement) -> Costs:
        """The costs of the stages of one placement."""
        single = {key: self.values[key][0] for key in SINGLE if key in self.values}
        travel = single.get("comm", 0.0), single.get("bandwidth", float("inf")), single.get("bytes", 0.0)
        link = Link(*travel, self.sends, self.overlap)
        per_stage = {key: values for key, values in self.values.items() if key in PER_STAGE}
        spread = {key: values[0] if len(values) == 1 else values for key, values in per_stage.items()}
        once: dict[str, Any] = {key: single.get(key, 0.0) for key in ("gather", "reduce", "step")}
        return replace(Costs.even(placement, **spread, link=link), **once).slowed(placement, self.slow)


def parse_slow(text: str) -> dict[int, float]:
    """Read `2=1.5,3=2`: rank 2 takes one and a half times as long, rank 3 twice."""
    factors: dict[int, float] = {}
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        rank, _, factor = (piece.strip() for piece in part.partition("="))
        number = _duration(factor)
        which = whole_number(rank)
        if which is None or not number:
            raise UserError(f"slow: {part!r} should be a rank and a factor above zero, like 2=1.5")
        if which in factors:
            raise UserError(f"slow: rank {which} is given for the second time, as {part}")
        factors[which] = number
    return factors


def _duration(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if 0 <= number < float("inf") else None
