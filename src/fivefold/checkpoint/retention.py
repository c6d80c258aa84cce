"""Deletes a run's old checkpoints."""

import re

from fivefold.checkpoint.store import Store
from fivefold.launch import faults
from fivefold.support.storage_place import Place

_INCOMPLETE_NAME = re.compile(r"step-(\d{8,})(?:\.(\d+))?\.incomplete(?:-(\d+))?")
_DELETING_SUFFIX = ".deleting"


def retain(store: Store, keep: int, every: int) -> list[Place]:
    """Deletes old checkpoints, and returns their paths.

    Keeps the newest `keep` good ones, those whose step is a multiple of `every`, and step 0, which may be imported
    weights. Also deletes incomplete saves, except the newest that was set aside. No save may be under way.
    """
    prune(store)
    good = [checkpoint for checkpoint in store.complete() if not checkpoint.misfits()]
    old = [
        checkpoint.path
        for checkpoint in good[keep:]
        if checkpoint.step and not (every and checkpoint.step % every == 0)
    ]
    _delete(store, [*store.incomplete(), *old])
    return old


def delete_later_than(store: Store, step: int) -> None:
    """Deletes the checkpoints of later steps, after the run has rolled back to this one."""
    _delete(store, [checkpoint.path for checkpoint in store.complete() if checkpoint.step > step])
    store.link_latest()


def _delete(store: Store, paths: list[Place]) -> None:
    for path in paths:
        hidden = path.with_name(path.name + _DELETING_SUFFIX)  # a rename is atomic, and a deletion is not
        store.storage.rename(path, hidden)
        faults.strike("retain")
        store.storage.delete(hidden)  # `prune` deletes what is left of it


def prune(store: Store) -> None:
    """Deletes partly deleted checkpoints, and incomplete ones that were set aside, except the newest of these."""
    folders = store.storage.folders(store.directory)
    incomplete = [(path, match) for path in folders if (match := _INCOMPLETE_NAME.fullmatch(path.name))]
    incomplete.sort(key=lambda item: [int(number or 1) for number in item[1].groups()])
    deleting = [path for path in folders if path.name.startswith("step-") and path.name.endswith(_DELETING_SUFFIX)]
    for path in [*deleting, *(path for path, _ in incomplete[:-1])]:
        store.storage.delete(path)
