"""The public names, each from its home: `import fivefold as ff` has them all, and loads one when it is first used.

Type checkers and editors read these imports, and so does `fivefold/__init__.py`, which runs only the one that it needs:
all of them together take a second.
"""

from fivefold.accuracy.result import planner_accuracy as planner_accuracy
from fivefold.dry.run import dryrun as dryrun
from fivefold.foreign.verify import check_certificate as check_certificate
from fivefold.foreign.verify import verify_adapter as verify_adapter
from fivefold.hardware.cluster import Cluster as Cluster
from fivefold.job.config import Job as Job
from fivefold.job.reading import read_job as read_job
from fivefold.layout.layout import Layout as Layout
from fivefold.machines.doctor import doctor as doctor
from fivefold.planner.goodput_result import goodput as goodput
from fivefold.planner.mesh_picture import mesh as mesh
from fivefold.planner.plan import plan as plan
from fivefold.planner.plan import simulate as simulate
from fivefold.planner.serve import serve as serve
from fivefold.render.blocks import Result as Result
from fivefold.schedules.result import draw as draw
from fivefold.schedules.result import schedule as schedule
from fivefold.schedules.schedule import Schedule as Schedule
from fivefold.spec.model import ModelSpec as ModelSpec
from fivefold.spec.presets import models as models
from fivefold.spec.presets import preset as preset
from fivefold.support.errors import UserError as UserError
from fivefold.trainer.compare_runs import compare_runs as compare_runs
from fivefold.trainer.result import experts as experts
from fivefold.trainer.start import trace as trace
from fivefold.trainer.start import train as train
from fivefold.verifier.verify import curve as curve
from fivefold.verifier.verify import verify as verify
from fivefold.web.app import ui as ui
from fivefold.web.report import report as report
