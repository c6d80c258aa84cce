"""Saves in the background: copies the shards at once, writes them in a thread, and reports the outcome on all ranks."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

import torch

from fivefold.checkpoint.manifest import Manifest
from fivefold.checkpoint.shards import Shards
from fivefold.checkpoint.staging import Snapshot
from fivefold.launch import heartbeat
from fivefold.parallel.control import Control
from fivefold.support.errors import TrainingError

T = TypeVar("T")


class NotSaved(Exception):
    """A checkpoint was not written, and all ranks know it. The run can go on."""


@dataclass
class Saving:
    """A save that is under way or has ended."""

    manifest: Manifest
    begun: float = field(default_factory=time.monotonic)
    error: BaseException | None = None
    last_good: str = ""  # after an error: a text on the last good checkpoint


class BackgroundSaver:
    """Saves in a thread, one at a time. It copies the shards first; they may change afterwards."""

    what, failed = "", ""  # the noun for a save, and the start of the sentence for a failed one, with "{step}"

    def __init__(self) -> None:
        self.saving: Saving | None = None
        self.thread = threading.Thread()

    def _begin(
        self, manifest: Manifest, snapshot: Snapshot, write: Callable[[Manifest, Shards], object]
    ) -> torch.cuda.Event | None:
        self.saving = Saving(manifest)
        arguments = (self.saving, snapshot, write)
        self.thread = threading.Thread(target=self._run, args=arguments, name=self.what, daemon=True)
        self.thread.start()
        return snapshot.copied

    def _run(self, saving: Saving, snapshot: Snapshot, write: Callable[[Manifest, Shards], object]) -> None:
        """Writes the snapshot; runs in the thread."""
        heartbeat.enter(f"the {self.what} of step {saving.manifest.step}")
        try:
            snapshot.wait()
            write(saving.manifest, snapshot.shards)
        except BaseException as error:
            saving.error = error
        finally:
            heartbeat.enter("")
        self._after(saving)

    def _after(self, saving: Saving) -> None:
        """Called in the thread when the save is written or has failed."""
        raise NotImplementedError

    @property
    def ended(self) -> bool:
        """Whether no save is under way on this rank: the last one was written or has failed."""
        return not self.thread.is_alive()

    def finish(self) -> str | None:
        """Waits for the save under way, if there is one; returns why it failed, the same on all ranks, else None.

        Raises TrainingError if a peer was lost in it.
        """
        if self.saving is None:
            return None
        self.thread.join()
        saving, self.saving = self.saving, None
        if saving.error is None:
            return None
        if isinstance(saving.error, TrainingError):
            raise saving.error
        message = f"{self.failed.format(step=saving.manifest.step)}: {saving.error}"
        message += f"; {saving.last_good}" if saving.last_good else ""
        if not isinstance(saving.error, NotSaved):
            raise TrainingError(message) from saving.error
        return message


def run_on_all_ranks(control: Control, do: Callable[[], T]) -> T:
    """Calls `do`, and returns this rank's result; if it failed on any rank, all raise NotSaved. Collective."""
    problem = ""
    try:
        result = do()
    except Exception as error:
        who = f"rank {control.rank}: " if control.size > 1 else ""
        why = error.strerror if isinstance(error, OSError) else None
        problem = f"{who}{why or str(error) or type(error).__name__}"
    if why := next(filter(None, control.all_gather_values(problem, str)), ""):
        raise NotSaved(why)
    return result
