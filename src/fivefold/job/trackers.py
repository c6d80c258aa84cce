"""W&B and MLflow as listeners: `run.listeners=wandb,mlflow`, each an extra of its name.

    WANDB_MODE=offline fivefold train job.toml run.listeners=wandb         # RUN/wandb, for `wandb sync`
    MLFLOW_TRACKING_URI=http://host:5000 fivefold train job.toml run.listeners=mlflow

Where they send, and to which project, their own variables say. A tracker has a thread of its own, so that no rank waits
for a network; what goes wrong there is said once, and training goes on. The tracker's name of a run is kept in the
run's directory, and a resumed run goes on under it.
"""

import os
import queue
import re
import secrets
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

import msgspec

from fivefold.job.listeners import ListenerLost, RunListener, figures_of
from fivefold.support.files import put
from fivefold.support.text import plural

PROJECT = "fivefold"  # of W&B, and the experiment of MLflow, unless their variables name another
_START_WAIT, _END_WAIT = 15.0, 30.0  # seconds for a tracker to begin, before training does, and to take what is left
_MOST_WAITING = 100_000  # records
_MAX_VALUE, _MAX_BATCH = 500, 100  # of MLflow: characters of a parameter on every server, parameters of a request

Figures = dict[str, float]


class Tracker(RunListener):
    """Passes figures to `log`, in a thread of its own."""

    title: ClassVar[str]
    name: ClassVar[str]

    def open(self, job: Any, directory: Path, step: int) -> None:
        """Begin or continue the tracker's run, with the settings of the job."""
        raise NotImplementedError

    def log(self, step: int, figures: Figures) -> None:
        raise NotImplementedError

    def finish(self, *, complete: bool) -> None:
        """`complete`: all steps of the job are done."""
        raise NotImplementedError

    # ---- in the run's thread -----------------------------------------------------------------------------------------

    def start(self, job: Any, directory: Path, step: int) -> None:
        self.waiting: queue.SimpleQueue[tuple[int, Figures] | int] = queue.SimpleQueue()
        self.failure: BaseException | None = None
        self.steps, begun = job.train.steps, threading.Event()
        self.thread = threading.Thread(target=self._work, args=(job, directory, step, begun), daemon=True)
        self.thread.start()
        begun.wait(_START_WAIT)  # a slower one begins beside the first steps
        self._check()

    def step(self, record: Any) -> None:
        self._put(record.step, figures_of(record))

    def evaluation(self, record: Any) -> None:
        self._put(record.step, {"held_out/loss": record.held_out_loss})

    def decision(self, record: Any) -> None:
        """1 where a step was a spike or no number. Steps that a rollback undoes are shown twice."""
        self._put(record.place, {f"watch/{record.action}": 1.0})

    def end(self, step: int) -> None:
        self.waiting.put(step)
        self.thread.join(_END_WAIT)
        if self.thread.is_alive():
            left = plural(self.waiting.qsize(), "record")
            raise ListenerLost(f"{self.title} has not taken the last {left} within {_END_WAIT:.0f} s")
        self._check()

    def _put(self, step: int, figures: Figures) -> None:
        self._check()
        if self.waiting.qsize() >= _MOST_WAITING:
            raise ListenerLost(f"{self.title} is {plural(_MOST_WAITING, 'record')} behind")
        self.waiting.put((step, figures))

    def _check(self) -> None:
        if self.failure is not None:
            why = next(iter(str(self.failure).strip().splitlines()), "") or type(self.failure).__name__
            raise ListenerLost(f"{self.title} takes no figures: {why.rstrip(' .')}")

    # ---- in the tracker's ------------------------------------------------------------------------------------------

    def _work(self, job: Any, directory: Path, step: int, begun: threading.Event) -> None:
        try:
            self.open(job, directory, step)
            begun.set()
            while not isinstance(item := self.waiting.get(), int):
                self.log(*item)
            self.finish(complete=item >= self.steps)
        except BaseException as error:  # also SystemExit, by which some packages end
            self.failure = error
        finally:
            begun.set()

    def kept(self, directory: Path) -> str | None:
        """The tracker's name of this run, of an earlier start."""
        with suppress(OSError, UnicodeDecodeError):
            text = (directory / f"{self.name}.id").read_text().strip()
            return text if re.fullmatch(r"[\w-]{1,64}", text) else None
        return None

    def keep(self, directory: Path, run: str) -> None:
        put(directory / f"{self.name}.id", f"{run}\n")


class WandB(Tracker):
    title, name = "W&B", "wandb"

    def open(self, job: Any, directory: Path, step: int) -> None:
        import wandb

        quiet = wandb.Settings(console="off", silent=True)
        online = wandb.setup(settings=quiet).settings.mode in ("online", "shared")
        if online and not wandb.login(prompt=False, verify=False):
            raise ListenerLost("no API key; `wandb login` asks for one, and WANDB_MODE=offline needs none")
        run = self.kept(directory) or os.environ.get("WANDB_RUN_ID") or secrets.token_hex(4)
        self.run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=os.environ.get("WANDB_NAME", directory.name),
            dir=str(directory),
            id=run,
            resume="allow",
            settings=quiet,
        )
        self.keep(directory, run)
        self.run.config.update(msgspec.to_builtins(job), allow_val_change=True)
        # W&B's own count only rises; after a rollback, and after a restart, steps come again.
        self.run.define_metric("step")
        self.run.define_metric("*", step_metric="step")

    def log(self, step: int, figures: Figures) -> None:
        self.run.log({"step": step, **figures})

    def finish(self, *, complete: bool) -> None:
        self.run.finish()


class MLflow(Tracker):
    title, name = "MLflow", "mlflow"

    def open(self, job: Any, directory: Path, step: int) -> None:
        if not os.environ.get("MLFLOW_TRACKING_URI"):
            # Files in the run's directory need no server and no database; newer releases ask for this word.
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        from mlflow import MlflowClient

        place = os.environ.get("MLFLOW_TRACKING_URI") or (directory.absolute() / "mlflow").as_uri()
        self.client = MlflowClient(tracking_uri=place)
        known = self._known(self.kept(directory))
        if known is None:
            name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
            experiment = self.client.get_experiment_by_name(name)
            number = experiment.experiment_id if experiment else self.client.create_experiment(name)
            known = self.client.create_run(number, run_name=directory.name)
        self.run = known.info.run_id
        self.keep(directory, self.run)
        self.client.update_run(self.run, status="RUNNING")
        self._write_settings(job, known.data.params, step)

    def _known(self, run: str | None) -> Any:
        """The run of an earlier start, unless this place has none of that name."""
        from mlflow.exceptions import MlflowException

        if run is None:
            return None
        try:
            return self.client.get_run(run)
        except MlflowException as error:
            if error.error_code in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
                return None
            raise

    def _write_settings(self, job: Any, before: dict[str, str], step: int) -> None:
        """The job's settings as parameters. These cannot change: what a later start changes becomes a tag."""
        from mlflow.entities import Param, RunTag

        settings = {name: str(value)[:_MAX_VALUE] for name, value in _flat(msgspec.to_builtins(job)).items()}
        new = [Param(name, value) for name, value in settings.items() if name not in before]
        for start in range(0, len(new), _MAX_BATCH):
            self.client.log_batch(self.run, params=new[start : start + _MAX_BATCH])
        changed = {name: value for name, value in settings.items() if before.get(name, value) != value}
        tags = [RunTag(f"changed after step {step}: {name}", value) for name, value in changed.items()]
        for start in range(0, len(tags), _MAX_BATCH):
            self.client.log_batch(self.run, tags=tags[start : start + _MAX_BATCH])

    def log(self, step: int, figures: Figures) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        self.client.log_batch(self.run, metrics=[Metric(name, value, now, step) for name, value in figures.items()])

    def finish(self, *, complete: bool) -> None:
        self.client.set_terminated(self.run, "FINISHED" if complete else "KILLED")


def _flat(table: dict[str, Any], before: str = "") -> dict[str, Any]:
    """Settings by their names: train.steps, model.experts.top_k."""
    flat: dict[str, Any] = {}
    for key, value in table.items():
        flat |= _flat(value, f"{before}{key}.") if isinstance(value, dict) else {f"{before}{key}": value}
    return flat
