"""Prepared tokens as a data source: a directory that `fivefold data prepare` wrote, or the built-in text."""

from pathlib import Path
from typing import TYPE_CHECKING

from fivefold.data.base import DataSource
from fivefold.support.parsing import path_of

if TYPE_CHECKING:
    from fivefold.data.rows import Splits


class TokenShards(DataSource, frozen=True, kw_only=True, tag="tokens"):
    path: str = ""  # a directory made by `fivefold data prepare`; empty: the Python standard library's own source

    @property
    def usual(self) -> bool:
        return not self.path

    def __str__(self) -> str:
        return self.path or "the standard library"

    def open(self) -> "Splits":
        from fivefold.data.tokens import TokenStore

        return TokenStore.open(*self.prepared()).splits()

    def prepared(self) -> tuple[Path, ...]:
        if self.path:
            return (path_of(self.path),)
        from fivefold.data.corpus import stdlib_corpus

        return (stdlib_corpus(),)

    def vocab(self) -> int | None:
        return super().vocab() if self.path else None  # the built-in text is prepared by who reads it
