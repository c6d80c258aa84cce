"""The contents of a run's directory: its steps, the load of its experts, and its newest checkpoint.

inspect("runs/moe").run.losses
inspect("s3://bucket/runs/moe").checkpoint     # the only part of a URL, or of a checkpoint's own directory
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fivefold.checkpoint.find import checkpoint_at, reachable, store_of
from fivefold.checkpoint.inspect import CheckpointContents, show_checkpoint
from fivefold.checkpoint.storage import storage_of
from fivefold.render.blocks import Block, Result, Text
from fivefold.render.scene import Scene
from fivefold.support.errors import UserError
from fivefold.support.storage_place import Place, place_of
from fivefold.trainer.records import METRICS_FILE
from fivefold.trainer.result import ExpertsResult, TrainResult
from fivefold.trainer.resuming import model_with_experts


@dataclass(frozen=True)
class InspectResult(Result):
    run: TrainResult | None
    experts: ExpertsResult | None
    checkpoint: CheckpointContents | None
    notes: tuple[str, ...] = ()  # why a part is missing

    def to_dict(self) -> dict[str, Any]:
        parts = {"run": self.run, "experts": self.experts, "checkpoint": self.checkpoint}
        return {name: part and part.to_dict() for name, part in parts.items()} | {"notes": list(self.notes)}

    def blocks(self) -> Iterator[Block]:
        for number, part in enumerate(part for part in (self.run, self.experts, self.checkpoint) if part):
            if number:
                yield Text("")
            yield from part.blocks()
        yield from map(Text, self.notes)

    def scene(self) -> Scene | None:
        return self.run.scene() if self.run else None

    def drawn(self, name: str) -> Scene | None:
        """The load of the experts, if the file's name has the word "load"; else the loss by step."""
        if "load" not in name.lower():
            return self.scene()
        if self.experts is None:
            raise UserError(
                f"there is no expert load to draw; {'; '.join(self.notes) or 'the model has none'}", "picture.empty"
            )
        return self.experts.scene()


def inspect(run: str | Place, step: int | None = None) -> InspectResult:
    """The contents of a run, by directory or URL, with its newest checkpoint or that of `step`; or a checkpoint's."""
    place = place_of(run)
    if checkpoint_at(place) or not isinstance(place, Path) or not (place / METRICS_FILE).is_file():
        return InspectResult(None, None, show_checkpoint(place, step))
    try:
        trained, notes = TrainResult.read(place), list[str]()
        experts = _experts(place, notes)
    except OSError as error:
        raise UserError(f"{error.filename or place} cannot be read: {error.strerror}", "file.read") from None
    saved = step is not None or _has_checkpoints(place)
    if not saved:
        notes.append(f"{place} has no complete checkpoint")
    return InspectResult(trained, experts, show_checkpoint(place, step) if saved else None, tuple(notes))


def _has_checkpoints(place: Path) -> bool:
    with reachable(place):
        return storage_of(place).folder_exists(place / "checkpoints") and bool(store_of(place).complete())


def _experts(place: Path, notes: list[str]) -> ExpertsResult | None:
    """The load of the experts, if the model has any; adds to `notes` why it cannot be read."""
    try:
        model = model_with_experts(place)
        return None if model is None else ExpertsResult.read(place, model)
    except UserError as error:
        notes += error.problems
        return None
