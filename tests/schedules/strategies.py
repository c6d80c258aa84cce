"""Random schedules for hypothesis: any of the catalogue, for any numbers it accepts."""

from hypothesis import strategies as st

from fivefold.schedules.classic import legal_groups
from fivefold.schedules.communication import with_zero
from fivefold.schedules.registry import CATALOGUE, build
from fivefold.schedules.schedule import Schedule

NAMES = list(CATALOGUE)


@st.composite
def schedules(
    draw: st.DrawFn, names: list[str] = NAMES, most_ranks: int = 6, most_rounds: int = 3, zeros: bool = False
) -> Schedule:
    """With `zeros`, also those that gather, reduce and step."""
    name = draw(st.sampled_from(names))
    p = draw(st.integers(1, most_ranks))
    least = max(1, CATALOGUE[name].least * p)
    m = draw(st.integers(least, max(least, most_rounds * p)))
    options: dict[str, int] = {}
    if CATALOGUE[name].any_chunks:
        options["chunks"] = draw(st.integers(1, 3))
    if name == "interleaved":
        options["group"] = draw(st.sampled_from(legal_groups(p, m)))
    if name == "auto":
        options["memory"] = draw(st.integers(1, 2 * p))
    schedule = build(name, p, m, **options)
    zero = draw(st.sampled_from([None, None, 0, 1, 2])) if zeros else None
    return schedule if zero is None else with_zero(schedule, zero)
