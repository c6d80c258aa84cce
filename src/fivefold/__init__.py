"""Fivefold: one model, one data order, one loss curve, whatever the layout.

    import fivefold as ff

    ff.plan("llama3-70b", "8x8xH100").chosen.layout
    ff.draw("zb-v", pp=4, microbatches=8)         # a picture in a notebook; print() shows it in a terminal

Every name of `__all__` is loaded when it is first used, so importing the package takes no time and needs no torch.
Functions take descriptions as objects or as text ("llama3-70b", "8x8xH100", "dp=2,tp=2"), print nothing, raise
UserError for bad input, and return results that print as tables, show themselves in a notebook and have `to_dict()`.
`ui` alone has no result: it prints the address of its page, and serves it until it is interrupted.
"""

import importlib
from typing import TYPE_CHECKING, Any

from fivefold.version import __version__ as __version__

if TYPE_CHECKING:  # what type checkers and editors see; _HOMES says the same to Python
    from fivefold.accuracy.result import planner_accuracy
    from fivefold.dry.run import dryrun
    from fivefold.hardware.cluster import Cluster
    from fivefold.job.config import Job, read_job
    from fivefold.layout.layout import Layout
    from fivefold.machines.doctor import doctor
    from fivefold.planner.goodput_result import goodput
    from fivefold.planner.pictures import mesh
    from fivefold.planner.plan import plan, simulate
    from fivefold.planner.serve import serve
    from fivefold.render.blocks import Result
    from fivefold.schedules.result import draw, schedule
    from fivefold.schedules.schedule import Schedule
    from fivefold.spec.model import ModelSpec
    from fivefold.spec.presets import models, preset
    from fivefold.support.errors import UserError
    from fivefold.trainer.result import experts
    from fivefold.trainer.start import trace, train
    from fivefold.verifier.verify import curve, verify
    from fivefold.web.app import ui
    from fivefold.web.report import report

__all__ = [
    "Cluster",
    "Job",
    "Layout",
    "ModelSpec",
    "Result",
    "Schedule",
    "UserError",
    "curve",
    "doctor",
    "draw",
    "dryrun",
    "experts",
    "goodput",
    "mesh",
    "models",
    "plan",
    "planner_accuracy",
    "preset",
    "read_job",
    "report",
    "schedule",
    "serve",
    "simulate",
    "trace",
    "train",
    "ui",
    "verify",
]

_HOMES = {
    "Cluster": "fivefold.hardware.cluster",
    "Job": "fivefold.job.config",
    "Layout": "fivefold.layout.layout",
    "ModelSpec": "fivefold.spec.model",
    "Result": "fivefold.render.blocks",
    "Schedule": "fivefold.schedules.schedule",
    "UserError": "fivefold.support.errors",
    "curve": "fivefold.verifier.verify",
    "doctor": "fivefold.machines.doctor",
    "draw": "fivefold.schedules.result",
    "dryrun": "fivefold.dry.run",
    "experts": "fivefold.trainer.result",
    "goodput": "fivefold.planner.goodput_result",
    "mesh": "fivefold.planner.pictures",
    "models": "fivefold.spec.presets",
    "plan": "fivefold.planner.plan",
    "planner_accuracy": "fivefold.accuracy.result",
    "preset": "fivefold.spec.presets",
    "read_job": "fivefold.job.config",
    "report": "fivefold.web.report",
    "schedule": "fivefold.schedules.result",
    "serve": "fivefold.planner.serve",
    "simulate": "fivefold.planner.plan",
    "trace": "fivefold.trainer.start",
    "train": "fivefold.trainer.start",
    "ui": "fivefold.web.app",
    "verify": "fivefold.verifier.verify",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        renamed = "; it is now planner_accuracy" if name == "truth" else ""
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{renamed}")
    found = getattr(importlib.import_module(_HOMES[name]), name)
    return globals().setdefault(name, found)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
