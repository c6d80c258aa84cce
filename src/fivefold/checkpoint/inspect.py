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
    checkpoints: list[dict[str, Any]]  # the newest last
    incomplete: list[str]
    aside: list[str]  # set aside
    memory: list[dict[str, Any]]  # snapshots on this node
    home: str  # their directory

    def to_dict(self) -> dict[str, Any]:
        on_disk = {"checkpoints": self.checkpoints, "incomplete": self.incomplete, "aside": self.aside}
        return {**on_disk, "memory": self.memory, "home": self.home}

    def blocks(self) -> Iterator[Block]:
        rows: list[list[str | Cell]] = []
        for row in self.checkpoints:
            size = bytes_text(row["bytes"]) if "bytes" in row else ""
            cells = (row["name"], row["step"], row.get("layout", ""), row.get("files", ""), size)
            rows.append([*map(str, cells), "" if row["complete"] else Cell("damaged", "bad")])
        rows += [[name, "", "", "", "", Cell("never finished", "bold")] for name in self.incomplete]
        rows += [[name, "", "", "", "", Cell("set aside", "dim")] for name in self.aside]
        for row in self.memory:
            cells = (row["name"], row["step"], row["layout"], row["files"], bytes_text(row["bytes"]))
            rows.append([*map(str, cells), Cell("in memory", "bold")])
        if not rows:
            yield Text(f"{self.run} has no checkpoints yet")
            return
        yield Table(["checkpoint", ">step", "~layout", ">files", ">size", ""], rows)
        for row in self.checkpoints:
            yield from (Text(f"{row['name']}: {problem}", "bad") for problem in row["problems"])
        if self.memory:
            yield Text(
                f"snapshots in this machine's memory are in {self.home}; the run's next start resumes from them, its "
                f"end removes them, and so does 'rm -r {self.home}'"
            )


def list_checkpoints(run: str | Place) -> CheckpointList:
    """The checkpoints of a run. The sizes of their files are checked, and no file is read."""
    memory, home = _in_memory(run)
    store = Store(place_of(run) / "checkpoints") if memory and not _on_disk(run) else store_of(run)
    rows: list[dict[str, Any]] = []
    with reachable(run):
        complete, incomplete, aside = store.complete(), store.incomplete(), store.set_aside_folders()
    for checkpoint in reversed(complete):
        misfits = checkpoint.misfits()
        row: dict[str, Any] = {"name": checkpoint.path.name, "step": checkpoint.step}
        row |= {"complete": not misfits, "problems": misfits}
        if not misfits:
            row |= {
                "layout": _layout_text(checkpoint),
                "files": len(checkpoint.manifest.files),
                "bytes": checkpoint.bytes,
            }
        rows.append(row)
    return CheckpointList(run, rows, [path.name for path in incomplete], [path.name for path in aside], memory, home)


def _on_disk(run: str | Place) -> bool:
    """Whether the run has a directory of checkpoints; it has none before the first one."""
    with reachable(run):
        return storage_of(place_of(run)).folder_exists(place_of(run) / "checkpoints")


def _in_memory(run: str | Place) -> tuple[list[dict[str, Any]], str]:
    """(rows of the run's snapshots on this node, the newest last; their directory)."""
    place = place_of(run)
    place = place.parent if place.name == "checkpoints" else place
    snapshots = [snapshot for snapshot in reversed(local_snapshots(place)) if not _manifest_problems(snapshot)]
    rows = []
    for snapshot in snapshots:
        files = len(snapshot.manifest.files)
        row = {"name": snapshot.path.name, "step": snapshot.step, "layout": _layout_text(snapshot), "files": files}
        rows.append(row | {"bytes": local_bytes(snapshot)})
    return rows, str(snapshots[0].path.parent) if snapshots else ""


def _manifest_problems(checkpoint: Checkpoint) -> list[str]:
    try:
        _ = checkpoint.manifest
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
    problems: dict[str, list[str]]  # by name of the checkpoint; an empty list where it is undamaged

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
    """Hashes the files of all complete checkpoints, or of the checkpoint of `step`, and compares with the manifest.

    Calls `progress` with the bytes read and the bytes in all.
    """
    single = find(run, step) if step is not None else checkpoint_at(run)
    with reachable(run):
        checkpoints = [single] if single else store_of(run).complete()
    if not checkpoints:
        raise UserError(f"{run} has no complete checkpoint", "checkpoint.none")
    total = sum(checkpoint.bytes for checkpoint in checkpoints if not checkpoint.misfits())

    def problems(checkpoint: Checkpoint) -> list[str]:
        try:
            return checkpoint.misfits() or checkpoint.damage(progress=lambda done: progress(done, total))
        except UserError as error:
            return error.problems

    return CheckpointCheck({checkpoint.path.name: problems(checkpoint) for checkpoint in checkpoints})
