"""Lists a run's checkpoints, shows the contents of one, and verifies the hashes of their files."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

from fivefold.checkpoint.find import checkpoint_at, find, reachable, store_of
from fivefold.checkpoint.manifest import Checkpoint
from fivefold.checkpoint.memory_snapshots import local_bytes, local_snapshots
from fivefold.checkpoint.storage import storage_of
from fivefold.checkpoint.store import Store
from fivefold.layout.layout import Layout
from fivefold.render.blocks import Block, Cell, Result, Table, Text
from fivefold.support.errors import UserError
from fivefold.support.storage_place import Place, place_of
from fivefold.support.text import bytes_text


@dataclass(frozen=True)
class CheckpointList(Result):
    run: str | Place
    checkpoints: list[dict[str, Any]]  # rows of `_checkpoint_row`, the newest last
    incomplete: list[str]  # names of those that were never finished
    set_aside: list[str]  # names of those that a run has set aside
    snapshots: list[dict[str, Any]]  # in this node's memory: rows of `_snapshot_row`, the newest last
    snapshot_directory: str  # empty without snapshots

    def to_dict(self) -> dict[str, Any]:
        on_disk = {"checkpoints": self.checkpoints, "incomplete": self.incomplete, "aside": self.set_aside}
        return {**on_disk, "memory": self.snapshots, "home": self.snapshot_directory}

    def blocks(self) -> Iterator[Block]:
        rows: list[list[str | Cell]] = []
        for row in self.checkpoints:
            size = bytes_text(row["bytes"]) if "bytes" in row else ""
            cells = (row["name"], row["step"], row.get("layout", ""), row.get("files", ""), size)
            rows.append([*map(str, cells), "" if row["complete"] else Cell("damaged", "bad")])
        rows += [[name, "", "", "", "", Cell("never finished", "bold")] for name in self.incomplete]
        rows += [[name, "", "", "", "", Cell("set aside", "dim")] for name in self.set_aside]
        for row in self.snapshots:
            cells = (row["name"], row["step"], row["layout"], row["files"], bytes_text(row["bytes"]))
            rows.append([*map(str, cells), Cell("in memory", "bold")])
        if not rows:
            yield Text(f"{self.run} has no checkpoints yet")
            return
        yield Table(["checkpoint", ">step", "~layout", ">files", ">size", ""], rows)
        for row in self.checkpoints:
            yield from (Text(f"{row['name']}: {problem}", "bad") for problem in row["problems"])
        if self.snapshots:
            yield Text(
                f"snapshots in this machine's memory are in {self.snapshot_directory}; the run's next start resumes "
                f"from them, its end removes them, and so does 'rm -r {self.snapshot_directory}'"
            )


def list_checkpoints(run: str | Place) -> CheckpointList:
    """The checkpoints of a run. Of its files only the sizes are checked."""
    place = place_of(run)
    snapshots = _readable_snapshots(place)
    # A run that has snapshots may have no directory of checkpoints yet, which `store_of` would take for an error.
    store = Store(place / "checkpoints") if snapshots and not _has_store(run) else store_of(run)
    with reachable(run):
        complete, incomplete, set_aside = store.complete(), store.incomplete(), store.set_aside_folders()
    return CheckpointList(
        run,
        [_checkpoint_row(checkpoint) for checkpoint in reversed(complete)],
        [path.name for path in incomplete],
        [path.name for path in set_aside],
        [_snapshot_row(snapshot) for snapshot in snapshots],
        str(snapshots[0].path.parent) if snapshots else "",
    )


def _checkpoint_row(checkpoint: Checkpoint) -> dict[str, Any]:
    """Name, step, complete, problems; layout, files and bytes too, if no file is missing or of another size."""
    misfits = checkpoint.misfits()
    row: dict[str, Any] = {"name": checkpoint.path.name, "step": checkpoint.step}
    row |= {"complete": not misfits, "problems": misfits}
    if misfits:
        return row
    files = len(checkpoint.manifest.files)
    return row | {"layout": _layout_text(checkpoint), "files": files, "bytes": checkpoint.bytes}


def _snapshot_row(snapshot: Checkpoint) -> dict[str, Any]:
    """Name, step, layout, files, and the bytes that this node holds."""
    row = {"name": snapshot.path.name, "step": snapshot.step, "layout": _layout_text(snapshot)}
    return row | {"files": len(snapshot.manifest.files), "bytes": local_bytes(snapshot)}


def _readable_snapshots(place: Place) -> list[Checkpoint]:
    """The run's snapshots on this node whose manifests can be read, the newest last."""
    run = place.parent if place.name == "checkpoints" else place
    return [snapshot for snapshot in reversed(local_snapshots(run)) if not _manifest_problems(snapshot)]


def _has_store(run: str | Place) -> bool:
    """Whether the run has a directory of checkpoints; it has none before the first one."""
    place = place_of(run)
    with reachable(run):
        return storage_of(place).folder_exists(place / "checkpoints")


def _manifest_problems(checkpoint: Checkpoint) -> list[str]:
    try:
        _ = checkpoint.manifest  # reads it
    except UserError as error:
        return error.problems
    return []


def _layout_text(checkpoint: Checkpoint) -> str:
    """The layout of the job that wrote the checkpoint, if this release can read it."""
    try:
        return str(Layout.from_dict(checkpoint.manifest.job.get("layout", {})))
    except UserError:
        return "a layout of its own"


@dataclass(frozen=True)
class CheckpointContents(Result):
    checkpoint: Checkpoint
    tensors: list[dict[str, Any]]

    def to_dict(self) -> dict[str, Any]:
        manifest = msgspec.to_builtins(self.checkpoint.manifest)
        return {**manifest, "path": str(self.checkpoint.path), "tensors": self.tensors}

    def blocks(self) -> Iterator[Block]:
        manifest = self.checkpoint.manifest
        model = manifest.job.get("model", {}).get("name")
        yield Text(f"{self.checkpoint.path}  {model} after step {manifest.step}", "bold")
        facts = {
            "samples": f"{manifest.samples} of the data order are done, in {manifest.updates} updates",
            "layout": f"written under {_layout_text(self.checkpoint)}; any other reads it",
            "holds": f"weights and {manifest.states_of}'s states" if manifest.optimizer else "weights",
            "made by": f"fivefold {manifest.fivefold}, torch {manifest.torch}",
        }
        yield Table(["", "~"], list(facts.items()))
        files = [[file.name, bytes_text(file.bytes), f"{file.sha256[:16]}..."] for file in manifest.files]
        yield Table(["file", ">size", "sha256"], files)
        pieces = sum(row["pieces"] for row in self.tensors)
        yield Text(f"{len(self.tensors)} tensors, {pieces} pieces; --json lists them")


def show_checkpoint(run: str | Place, step: int | None = None) -> CheckpointContents:
    """The contents of the newest complete checkpoint, or of the checkpoint of `step`."""
    checkpoint = find(run, step)
    if misfits := checkpoint.misfits():
        raise UserError(misfits, "checkpoint.damaged")
    tensors = [
        {"name": name, "shape": list(stored.shape), "dtype": stored.dtype, "pieces": len(stored.chunks)}
        for name, stored in sorted(checkpoint.tensors.items())
    ]
    return CheckpointContents(checkpoint, tensors)


@dataclass(frozen=True)
class CheckpointCheck(Result):
    problems: dict[str, list[str]]  # by name of the checkpoint; an empty list if it is sound

    @property
    def ok(self) -> bool:  # type: ignore[override]
        return not any(self.problems.values())

    def to_dict(self) -> dict[str, Any]:
        return {"sound": self.ok, "checkpoints": self.problems}

    def blocks(self) -> Iterator[Block]:
        for name, problems in self.problems.items():
            yield Text(f"{name}  {'damaged' if problems else 'sound'}", "bad" if problems else "good")
            yield from (Text(f"  {problem}") for problem in problems)


def verify_checkpoints(
    run: str | Place, step: int | None = None, progress: Callable[[int, int], None] = lambda done, total: None
) -> CheckpointCheck:
    """Compares the files' hashes with the manifest, of all complete checkpoints or of the one of `step`.

    Calls `progress` with the bytes read so far and the bytes to read.
    """
    single = find(run, step) if step is not None else checkpoint_at(run)
    with reachable(run):
        checkpoints = [single] if single else store_of(run).complete()
    if not checkpoints:
        raise UserError(f"{run} has no complete checkpoint", "checkpoint.none")
    total = sum(checkpoint.bytes for checkpoint in checkpoints if not checkpoint.misfits())

    def check(checkpoint: Checkpoint) -> list[str]:
        try:
            return checkpoint.misfits() or checkpoint.damage(progress=lambda done: progress(done, total))
        except UserError as error:
            return error.problems

    return CheckpointCheck({checkpoint.path.name: check(checkpoint) for checkpoint in checkpoints})
