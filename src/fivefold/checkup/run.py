"""The course of a checkup: part after part, each in its time, and whatever happens a report in the end.

report = run_checkup(team, base, devices, budget, shown_command="fivefold checkup", tell=print)
"""

import os
import secrets
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import date
from typing import Any, NamedTuple

import msgspec

from fivefold.checkup.advice import corrections
from fivefold.checkup.anonymous import anonymous, host_names, user_names
from fivefold.checkup.calibration import calibrate_machines
from fivefold.checkup.course import Course, PartEnded
from fivefold.checkup.devices import Devices, chosen_model
from fivefold.checkup.layouts import train_layouts
from fivefold.checkup.lost_rank import lose_a_rank
from fivefold.checkup.machines import examine_machines
from fivefold.checkup.parts import PARTS, Budget, CheckupPart
from fivefold.checkup.proofs import prove_layouts
from fivefold.checkup.report import CheckupReport, PartReport
from fivefold.checkup.tasks import TypedJob
from fivefold.checkup.team import Team
from fivefold.hardware.cluster import Cluster
from fivefold.launch.exits import INTERRUPTED, TERMINATED
from fivefold.support.errors import TrainingError, UserError
from fivefold.version import __version__

DOES: dict[str, Callable[[Course, PartReport], None]] = {
    "machines": examine_machines,
    "proofs": prove_layouts,
    "lost-rank": lose_a_rank,
    "calibration": calibrate_machines,
    "layouts": train_layouts,
}
_LEAST_S = 3.0  # seconds without which a part is not begun
Tell = Callable[[str], None]


class Stopping(BaseException):
    """A signal to stop came: the part under way is ended, and what there is is written."""

    def __init__(self, code: int):
        super().__init__()
        self.code = code


class Done(NamedTuple):
    """A report, the cluster as it was calibrated, and the exit code of a checkup that was interrupted (else 0)."""

    report: CheckupReport
    cluster: Cluster | None
    code: int


def run_checkup(
    team: Team, base: TypedJob, devices: Devices, budget: Budget, command: str, tell: Tell, *, names: bool = False,
    cluster_file: str = "calibrated.toml",
) -> Done:  # fmt: skip
    """Run the budget's parts. `tell` gets a line at each begin and end; `names` keeps those of hosts and users."""
    report = CheckupReport(fivefold=__version__, day=date.today().isoformat(), command=command, minutes=budget.minutes)
    model = None if base.own_model else chosen_model(devices, team.per_node)
    course = Course(team, base, devices, model, secrets.token_hex(4), report)
    report.setup = setup_of(course)
    report.parts = [
        PartReport(name=part.name, title=part.title, status="not run" if part in budget.parts else "left out")
        for part in PARTS
    ]
    code = 0
    folder = base.folder(course.token)
    with _folder(folder):
        try:
            with stopping_signals():
                for number, part in enumerate(budget.parts, 1):
                    of_part = report.part(part.name)
                    assert of_part is not None
                    course.tell = _prefixed(tell, f"[{number}/{len(budget.parts)}] {part.title.lower()}")
                    run_part(course, part, of_part, budget)
        except Stopping as stop:
            code = stop.code
        with suppress(KeyboardInterrupt, Stopping):
            team.close()
    report.seconds = budget.spent
    report.corrections = corrections(report, cluster_file)
    if not names:
        report = without_names(report, course.hosts)
    return Done(report, course.cluster, code)


def run_part(course: Course, part: CheckupPart, report: PartReport, budget: Budget) -> None:
    """Run one part within its limit; its end is part of the report, whatever it is."""
    report.limit, course.share = budget.limit(part), budget.share(part)
    start = time.monotonic()
    course.deadline = start + report.limit
    if report.limit < _LEAST_S:
        report.status = "out of time"
        report.says.append("the parts before it have used all of the time")
        course.tell("out of time")
        return
    course.tell(f"about {course.share:.0f} s, at most {report.limit:.0f} s")
    try:
        DOES[part.name](course, report)
        report.status = "found" if report.findings else "passed"
    except PartEnded as ended:
        report.status = ended.status
        report.says.append(ended.sentence)
    except Stopping:
        report.status = "interrupted"
        raise
    except (UserError, TrainingError, OSError, LookupError, ValueError, TypeError) as error:
        report.status = "failed"
        report.says.append(f"{type(error).__name__}: {error}" if not isinstance(error, UserError) else str(error))
    finally:
        report.seconds = time.monotonic() - start
        course.tell(f"{report.status}; {report.seconds:.0f} s")


def setup_of(course: Course) -> dict[str, Any]:
    """How many ranks compute on what, and how they were started."""
    devices, team = course.devices, course.team
    shared = devices.on_gpu and team.per_node > devices.count
    backend = "one rank, no backend" if team.size == 1 else "gloo"
    if devices.on_gpu and team.size > 1 and (not shared or course.base.job.train.share_gpu == "nccl"):
        backend = "NCCL"
    return {
        "ranks": team.size,
        "nodes": course.nodes,
        "ranks_per_node": team.per_node,
        "device": devices.name,
        "devices_per_node": devices.count,
        "memory": devices.memory,
        "shared": shared,
        "backend": backend,
        "launcher": "srun or torchrun" if team.launched else "this command",
        "versions": devices.versions,
        "model": msgspec.to_builtins(course.model._asdict()) if course.model else None,
    }


def without_names(report: CheckupReport, hosts: list[str]) -> CheckupReport:
    """The report as a person can send it."""
    return msgspec.convert(anonymous(msgspec.to_builtins(report), host_names(hosts), user_names()), CheckupReport)


def _prefixed(tell: Tell, prefix: str) -> Tell:
    return lambda what: tell(f"{prefix}: {what}")


@contextmanager
def _folder(folder: Any) -> Iterator[None]:
    """The folder of the checkup's runs, which is removed in the end, with those above it that it needed."""
    missing = [one for one in (folder, *folder.parents) if not one.exists()]
    folder.mkdir(parents=True)
    try:
        yield
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        for one in missing[1:]:
            with suppress(OSError):  # others use it by now; or the secret of the launched ranks lies in it
                one.rmdir()


@contextmanager
def stopping_signals() -> Iterator[None]:
    """Ctrl-C and a scheduler's signals end the part under way; further ones wait until the report is written."""
    owner = os.getpid()

    def stop(number: int, _: object) -> None:
        if os.getpid() != owner:
            os._exit(1)
        for again in handled:
            signal.signal(again, signal.SIG_IGN)
        raise Stopping(INTERRUPTED if number == signal.SIGINT else TERMINATED)

    handled = [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP]
    handled = [number for number in handled if signal.getsignal(number) is not signal.SIG_IGN]
    previous = {number: signal.signal(number, stop) for number in handled}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
