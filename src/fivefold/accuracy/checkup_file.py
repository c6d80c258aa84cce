"""Reads the runs of `fivefold checkup`: layouts that were trained, with the machines as they were measured there.

    checkup_rows(Path("checkup.json"))      # rows as those of a CSV file, which know their workload

Each run gives two rows: one is predicted with the catalogue's figures of the device, the other with those that the
checkup has calibrated. So the tables show what the calibration is worth.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from msgspec import structs

from fivefold.accuracy.sources import Source
from fivefold.cost.moe import imbalance_for
from fivefold.cost.step import Workload
from fivefold.hardware.cluster import Cluster
from fivefold.job.config import Job
from fivefold.job.reading import resolve
from fivefold.layout.layout import Layout
from fivefold.planner.plan import workload_of
from fivefold.schedules.registry import CATALOGUE
from fivefold.support.errors import UserError
from fivefold.support.parsing import read_json

FIGURES = ("catalogue", "calibrated")
MOST_RUNS = 1000  # of a file
_SECONDS = (0.0, 1e6)  # of a step


def is_checkup(value: Any) -> bool:
    """Whether this is what `fivefold checkup` has written."""
    return isinstance(value, dict) and isinstance(value.get("checkup"), int) and isinstance(value.get("runs"), list)


def checkup_runs(path: Path) -> Iterator[tuple[str, int, dict[str, str], Source, Workload]]:
    """(source, line, columns, software, workload) of each run and each kind of figures."""
    table = read_json(path)
    if not is_checkup(table):
        raise UserError(
            f"{path} is no report of `fivefold checkup`: it has no runs; give its JSON, or a directory of CSV files",
            "accuracy.data.checkup",
        )
    runs = [run for run in table["runs"][:MOST_RUNS] if isinstance(run, dict) and isinstance(run.get("measured"), dict)]
    if not runs:
        raise UserError(f"{path} has no run that was measured: its part `layouts` failed", "accuracy.data.checkup")
    job, clusters = _job(path, table), table.get("clusters")
    if not isinstance(clusters, dict) or not any(name in clusters for name in FIGURES):
        raise UserError(
            f"{path} has no figures of the machines: its part `calibration` failed", "accuracy.data.checkup"
        )
    for name in (name for name in FIGURES if name in clusters):
        cluster = _framed(path, f"clusters.{name}", lambda value=clusters[name]: Cluster.from_dict(value))
        for line, run in enumerate(runs, 1):
            yield _row(path, job, name, cluster, line, run)


def _row(
    path: Path, job: Job, figures: str, cluster: Cluster, line: int, run: dict[str, Any]
) -> tuple[str, int, dict[str, str], Source, Workload]:
    layout = _framed(path, f"runs[{line - 1}]", lambda: _layout(run.get("layout")))
    problems = structs.replace(job, layout=layout).problems(cluster.world)
    if problems:
        raise UserError(f"{path}: runs[{line - 1}]: {'; '.join(problems)}", "accuracy.data.checkup")
    workload = workload_of(structs.replace(job, layout=layout), cluster)
    workload = Workload(**{**vars(workload), "imbalance": imbalance_for(job.model)})
    device = cluster.groups[0].accelerator.name
    measured = run["measured"]
    columns = {
        "source": "fivefold checkup", "system": "", "model": job.model.name, "seq_len": str(job.data.seq),
        "gpu": device, "gpus": str(cluster.world), "status": "ok", "global_batch": str(job.train.batch),
        "step_time_s": str(_number(path, line, "seconds", measured)),
        "peak_mem_gb": "" if measured.get("memory") is None else str(_number(path, line, "memory", measured) / 1e9),
    }  # fmt: skip
    why = f"{path.name} was measured by fivefold checkup"
    source = Source(software=workload.software, why=why)
    return f"{path.stem} ({figures})", line, columns, source, workload


def _job(path: Path, table: dict[str, Any]) -> Job:
    """The job of the runs. What it names is not imported: the file may come from anybody."""
    job = table.get("job")
    if not isinstance(job, dict):
        raise UserError(f"{path} does not say which job was trained: `job` is missing", "accuracy.data.checkup")
    return _framed(path, "job", lambda: resolve(dict(job), stored=True))


def _layout(text: Any) -> Layout:
    if not isinstance(text, str):
        raise UserError(f"layout={text!r} is not text; write for example dp=2,tp=4", "accuracy.data.checkup")
    layout = Layout.parse(text)
    if layout.schedule not in CATALOGUE:
        raise UserError(f"schedule={layout.schedule} is not one of the package's own", "accuracy.data.checkup")
    return layout


def _number(path: Path, line: int, name: str, measured: dict[str, Any]) -> float:
    value, most = measured.get(name), 1e18 if name == "memory" else _SECONDS[1]
    if type(value) not in (int, float) or not 0 < float(value) <= most:  # type: ignore[arg-type]
        sentence = f"runs[{line - 1}].measured.{name}={value!r} is not a number above 0 and at most {most:g}"
        raise UserError(f"{path}: {sentence}", "accuracy.data.checkup")
    return float(value)  # type: ignore[arg-type]


def _framed(path: Path, where: str, read: Any) -> Any:
    """What a reader returns; its problems with the place in the file."""
    try:
        return read()
    except UserError as error:
        raise UserError(error.framed(f"{path}: {where}: ")) from None
