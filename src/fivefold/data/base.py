"""What a data source is: its settings, and the rows of tokens that they open.

A source is a subclass of `DataSource` in a file of its own, and a line in the table of `data/__init__.py`; or in a
module of yours, which a job names as data.source=package.module:Name. The trainer, the verifier, the checks before a
start, checkpoints and generation read everything they need from the class and from what it opens (`data/rows.py`).
Which windows a step reads, and in which order, is the same for all sources: `data/order.py` has it.

Jobs and plans read this without numpy: a source imports it where it opens.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import msgspec

from fivefold.data.index import read_index
from fivefold.support.errors import Problem, UserError
from fivefold.support.plugin_calls import ask, each, instance, value_text
from fivefold.support.plugin_settings import class_shortcomings
from fivefold.support.plugins import untrusted_problem
from fivefold.support.ranges import MAX_TOKENS, within

if TYPE_CHECKING:
    from fivefold.data.rows import Splits


def is_place(setting: str) -> bool:
    """Whether a setting of a source says where something lies: that may differ between machines and starts."""
    return setting.endswith("path")


class DataSource(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="source", tag=str.lower
):
    """The settings that all sources have. One whose name ends in `path` is a place of the file system."""

    seq: Annotated[int, within(1, MAX_TOKENS)] = 128  # tokens of a sample
    seed: int = 0  # of the data order
    document_mask: bool = False  # attention stays within a document

    @property
    def source(self) -> str:
        """What a job calls it: a name of the table, or "package.module:Name"."""
        return str(self.__struct_config__.tag)

    @property
    def usual(self) -> bool:
        """Whether a job that says nothing of data has it."""
        return False

    @property
    def places(self) -> dict[str, str]:
        """The settings that say where something lies, as far as they are given."""
        given = {name: getattr(self, name) for name in self.__struct_fields__ if is_place(name)}
        return {f"data.{name}": str(value) for name, value in given.items() if value}

    def __str__(self) -> str:
        return " and ".join(self.places.values()) or self.source

    @staticmethod
    def shortcomings(kind: "type[DataSource]", name: str) -> Iterator[str]:
        """What a class lacks that a job calls `name`."""
        yield from class_shortcomings(kind, DataSource, name)
        if kind.open is DataSource.open:
            yield "has no method open(self), which returns fivefold.data.rows:Splits"

    def problems(self) -> Iterator[Problem]:
        """What is wrong with the settings, beyond their types and ranges."""
        yield from ()

    def open(self) -> "Splits":
        """The tokens; UserError says why they cannot be read."""
        raise NotImplementedError

    def prepared(self) -> tuple[Path, ...]:
        """The directories of prepared tokens that it reads, if it does: they have the vocabulary and the tokenizer."""
        return ()

    def vocab(self) -> int | None:
        """The number of ids, where it can be told without a token being read: a toy model gets it."""
        try:
            return max((read_index(path).vocab for path in prepared_by(self)), default=None)
        except UserError as error:
            if any(code.startswith("plugin.") for code in error.codes):
                raise
            return None  # opening the data says it


WANTED_PATHS = each("paths (pathlib.Path), in a tuple", lambda one: "" if isinstance(one, Path) else value_text(one))
WANTED_VOCAB = instance("a number of ids or None", int, type(None))


def prepared_by(source: DataSource) -> tuple[Path, ...]:
    """The directories of prepared tokens that a source reads."""
    return tuple(ask(source, "prepared", wanted=WANTED_PATHS))


def vocab_of(source: DataSource) -> int | None:
    """The number of a source's ids, where it can be told without a token being read."""
    return cast(int | None, ask(source, "vocab", wanted=WANTED_VOCAB))


class UnknownSource(DataSource, frozen=True, kw_only=True):
    """One that a stored job names, and whose module nobody has imported here: its settings, and no tokens."""

    def problems(self) -> Iterator[Problem]:
        yield untrusted_problem("data.source", self.source)

    def open(self) -> "Splits":
        raise UserError([*self.problems()])
