"""Whole documents in windows, as a data source: no conversation is cut at a window's end, or reads another.

    fivefold train data.source=packed data.path=chats/ data.seq=4096

Each document that `data prepare` wrote, a conversation above all, lies within one window of `data.seq` tokens, beside
others that fit (`data/packed_row.py`). What is left of a window is filled with end-of-document tokens without loss. A
document longer than a window keeps its first tokens (`long = "cut"`), or is left out (`long = "drop"`); the run says
of how many.
"""

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from fivefold.data.base import DataSource
from fivefold.support.errors import Problem, UserError
from fivefold.support.parsing import path_of

if TYPE_CHECKING:
    from fivefold.data.rows import Splits


class PackedDocuments(DataSource, frozen=True, kw_only=True, tag="packed"):
    path: str = ""  # a directory made by `fivefold data prepare`, with --chat or without
    long: Literal["cut", "drop"] = "cut"  # documents of more than seq tokens: their first ones are kept, or none
    document_mask: bool = True  # attention stays within a document

    def problems(self) -> Iterator[Problem]:
        if not self.path:
            yield Problem("data.packed.path", "data.source=packed needs data.path=DIR, made by `fivefold data prepare`")
        if not self.document_mask:
            apart = "data.source=packed puts unrelated documents into one window, and data.document_mask=false would"
            yield Problem("data.packed.mask", f"{apart} let each read those before it; nearest: data.source=tokens")

    def prepared(self) -> tuple[Path, ...]:
        return (path_of(self.path),) if self.path else ()

    def open(self) -> "Splits":
        from fivefold.data.packed_row import PackedRow
        from fivefold.data.rows import Splits
        from fivefold.data.tokens import TokenStore

        if problems := [*self.problems()]:
            raise UserError(problems)
        store = TokenStore.open(*self.prepared())
        whole = store.splits()
        rows = {name: PackedRow(store.split(name), self.seq, cut=self.long == "cut") for name in whole.rows}
        # The arrangement is a function of these, and of the tokens; its version changes with it.
        made_of = f"{whole.fingerprint} packed 1 {self.seq} {self.long}"
        notes = tuple(row.note for row in rows.values() if row.note)
        return Splits(
            rows["train"], rows.get("valid"), hashlib.sha256(made_of.encode()).hexdigest(), whole.where, notes
        )
