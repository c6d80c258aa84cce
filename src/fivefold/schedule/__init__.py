"""Pipeline schedules as data: built, proven, timed, drawn and executed as one and the same object.

    from fivefold.schedule import build, prove, simulate
    schedule = prove(build("zb-v", p=4, m=8))
    simulate(schedule).bubble_makespan

`actions` has the words, `schedule` the object, `catalogue` every builder by name, `check` the proofs, `costs` and
`simulate` the clock, `text` and `files` the written form, `draw` the pictures. Nothing here needs torch.
"""

from fivefold.schedule.actions import ALL, Action, Channel, Kind
from fivefold.schedule.catalogue import CATALOGUE, build, record_of
from fivefold.schedule.check import Problem, check, prove
from fivefold.schedule.clock import Span
from fivefold.schedule.costs import Costs, Link
from fivefold.schedule.files import load, save
from fivefold.schedule.schedule import Placement, Promise, Schedule, live_counts, peak_live
from fivefold.schedule.simulate import RankTime, Simulation, simulate
from fivefold.schedule.text import from_json, from_text, to_json, to_text
from fivefold.schedule.wiring import wire
from fivefold.schedule.zero import with_zero

__all__ = [
    "ALL",
    "CATALOGUE",
    "Action",
    "Channel",
    "Costs",
    "Kind",
    "Link",
    "Placement",
    "Problem",
    "Promise",
    "RankTime",
    "Schedule",
    "Simulation",
    "Span",
    "build",
    "check",
    "from_json",
    "from_text",
    "live_counts",
    "load",
    "peak_live",
    "prove",
    "record_of",
    "save",
    "simulate",
    "to_json",
    "to_text",
    "wire",
    "with_zero",
]
