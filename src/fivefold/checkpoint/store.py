"""A run's checkpoints, on disk or on object storage (`storage.py`). No torch: listing and hashing them needs none.

checkpoints/step-00000012/       one save, in a directory of its own
    manifest.json                written last and renamed into place: without it the save is incomplete
    tensors.json                 the place of every tensor in the files (`tensors.py`)
    rank-0.tensors ...           the values, one file or more of each rank
checkpoints/step-00000012.2/     the same step saved once more
checkpoints/latest               a link to the newest complete one
checkpoints/*.incomplete, *.damaged, *.suspect    set aside, and never read again. All but the newest incomplete one are
                                 deleted; the damaged, and those that a corruption check suspects, are kept
"""

import re
from functools import partial
from typing import Any

from fivefold.checkpoint.manifest import MANIFEST, STEP_NAME, Checkpoint, Manifest, step_and_number, step_name
from fivefold.checkpoint.storage import Storage, storage_of
from fivefold.launch import faults
from fivefold.support.storage_place import Place

_SET_ASIDE_NAME = re.compile(r"\.(incomplete|damaged|suspect)(-\d+)?$")


class Store:
    """The checkpoints of a run. Only the run's first rank changes them."""

    def __init__(self, directory: Place):
        self.directory = directory

    @property
    def storage(self) -> Storage[Any]:
        return storage_of(self.directory)

    def complete(self) -> list[Checkpoint]:
        """The checkpoints that have their manifest, newest first; their files are not checked."""
        paths = [path for path in self._named() if self._has_manifest(path)]
        return [Checkpoint(path) for path in sorted(paths, key=step_and_number, reverse=True)]

    def incomplete(self) -> list[Place]:
        return [path for path in self._named() if not self._has_manifest(path)]

    def set_aside_folders(self) -> list[Place]:
        """The directories that were set aside."""
        paths = (path for path in self.storage.folders(self.directory) if _SET_ASIDE_NAME.search(path.name))
        return sorted(paths, key=lambda path: path.name)

    def _named(self) -> list[Place]:
        return [path for path in self.storage.folders(self.directory) if STEP_NAME.fullmatch(path.name)]

    def _has_manifest(self, path: Place) -> bool:
        return self.storage.file_exists(path / MANIFEST)

    def new(self, step: int) -> Place:
        """Makes a new directory for a save of this step."""
        number = 1
        while True:
            path = self.directory / step_name(step, number)
            try:
                self.storage.make_folder(path)
                return path
            except FileExistsError:
                number += 1

    def commit(self, path: Place, manifest: Manifest) -> Checkpoint:
        """Writes the manifest, which makes the save a checkpoint."""
        files = [file.name for file in manifest.files]
        before_rename = partial(faults.strike, "commit", step=manifest.step)
        self.storage.commit(path / MANIFEST, manifest.text(), files, before_rename)
        self.storage.link_latest(self.directory, path.name)
        return Checkpoint(path)

    def discard(self, path: Place) -> None:
        """Deletes an incomplete save; one that has its manifest is complete, and stays."""
        if not self._has_manifest(path):
            self.storage.delete(path)

    def set_aside(self, path: Place, how: str) -> Place:
        """Renames a checkpoint, such as to 'step-00000012.damaged', and returns its new path."""
        names, number = {folder.name for folder in self.storage.folders(self.directory)}, 1
        while (name := f"{path.name}.{how}" + (f"-{number}" if number > 1 else "")) in names:
            number += 1
        to = path.with_name(name)
        self.storage.rename(path, to)
        self.link_latest()
        return to

    def link_latest(self) -> None:
        """Points the link `latest` at the newest complete checkpoint, if there is one."""
        self.storage.link_latest(self.directory, next((checkpoint.path.name for checkpoint in self.complete()), None))
