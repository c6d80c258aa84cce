"""What a job needs so that the trainer runs the very schedule that was planned.

`auto` is made for the seconds of stages on unlike devices, of which a trainer knows nothing. So the schedule itself is
written beside the job, and the job's layout names the file.
"""

from pathlib import Path

from msgspec import structs

from fivefold.layout.layout import Layout
from fivefold.plan.search.option import Option
from fivefold.schedule.text import rewired, to_text
from fivefold.support.files import write


def schedule_text(option: Option) -> str:
    """The schedule as a file, where a name and a layout do not give it; else empty."""
    case = option.case
    if not (case.groups and case.layout.pp > 1 and case.layout.record.weighs):
        return ""
    schedule = case.schedule()
    return to_text(schedule, implied=rewired(schedule) == schedule)


def write_schedule(option: Option, path: str | Path) -> str:
    """Writes the schedule of an option that has one of its own, and returns the file's name; else an empty one."""
    if text := schedule_text(option):
        write(Path(path), text)
    return str(path) if text else ""


def trained(option: Option, path: str | Path) -> Layout:
    """The layout of a job that trains as planned; where it needs a schedule of its own, that is written to `path`."""
    named = write_schedule(option, path)
    return structs.replace(option.layout, schedule=named) if named else option.layout
