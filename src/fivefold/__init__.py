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
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # what type checkers and editors see; _HOMES says the same to Python
    from fivefold.doctor.doctor import doctor
    from fivefold.dryrun.dryrun import dryrun
    from fivefold.hardware.cluster import Cluster
    from fivefold.job.config import Job, read_job
    from fivefold.layout.layout import Layout
    from fivefold.plan.goodput.goodput import goodput
    from fivefold.plan.mesh import mesh
    from fivefold.plan.plan import plan, simulate
    from fivefold.plan.serving.serve import serve
    from fivefold.report import Result
    from fivefold.schedule.result import draw, schedule
    from fivefold.schedule.schedule import Schedule
    from fivefold.spec.listing import models
    from fivefold.spec.model import ModelSpec
    from fivefold.spec.presets import preset
    from fivefold.support.errors import UserError
    from fivefold.train.experts import experts
    from fivefold.train.trace import trace
    from fivefold.train.train import train
    from fivefold.truth.truth import truth
    from fivefold.ui.report import report
    from fivefold.ui.ui import ui
    from fivefold.verify.curve import curve
    from fivefold.verify.verify import verify

__version__ = "0.1.0"
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
    "preset",
    "read_job",
    "report",
    "schedule",
    "serve",
    "simulate",
    "trace",
    "train",
    "truth",
    "ui",
    "verify",
]

_HOMES = {
    "Cluster": "fivefold.hardware.cluster",
    "Job": "fivefold.job.config",
    "Layout": "fivefold.layout.layout",
    "ModelSpec": "fivefold.spec.model",
    "Result": "fivefold.report",
    "Schedule": "fivefold.schedule.schedule",
    "UserError": "fivefold.support.errors",
    "curve": "fivefold.verify.curve",
    "doctor": "fivefold.doctor.doctor",
    "draw": "fivefold.schedule.result",
    "dryrun": "fivefold.dryrun.dryrun",
    "experts": "fivefold.train.experts",
    "goodput": "fivefold.plan.goodput.goodput",
    "mesh": "fivefold.plan.mesh",
    "models": "fivefold.spec.listing",
    "plan": "fivefold.plan.plan",
    "preset": "fivefold.spec.presets",
    "read_job": "fivefold.job.config",
    "report": "fivefold.ui.report",
    "schedule": "fivefold.schedule.result",
    "serve": "fivefold.plan.serving.serve",
    "simulate": "fivefold.plan.plan",
    "trace": "fivefold.train.trace",
    "train": "fivefold.train.train",
    "truth": "fivefold.truth.truth",
    "ui": "fivefold.ui.ui",
    "verify": "fivefold.verify.verify",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(importlib.import_module(_HOMES[name]), name)
    if isinstance(room := sys.modules.get(f"{__name__}.{name}"), _Room):
        room.show_at(found)
    return globals().setdefault(name, found)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]


# `import fivefold.plan.search` would bind `fivefold.plan` to the subpackage, for every user of the package. The name
# stays the function's, and what the subpackage holds is found at the function, so that `fivefold.plan.search` works.
class _Room(ModuleType):
    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if function := globals().get(self.__name__.rpartition(".")[2]):
            self.show_at(function)

    def show_at(self, function: Any) -> None:
        vars(function).update({name: value for name, value in vars(self).items() if not name.startswith("_")})


class _Package(ModuleType):
    def __setattr__(self, name: str, value: Any) -> None:
        if name not in _HOMES or not isinstance(value, ModuleType):
            super().__setattr__(name, value)
            return
        value.__class__ = _Room
        if function := globals().get(name):
            value.show_at(function)


sys.modules[__name__].__class__ = _Package
