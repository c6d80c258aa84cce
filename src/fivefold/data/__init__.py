"""Data: text prepared into tokens, an order that is a pure function, and batches.

    from fivefold.data.batch import read_batch
    from fivefold.data.prepare import prepare
    from fivefold.data.tokens import TokenStore

    prepare([Path("essays")], Path("tokens"), valid=0.05)
    train = TokenStore.open("tokens").split("train")
    batch = read_batch(train, seq=1024, seed=0, samples=range(8))

No torch here: a batch is numpy arrays.

`data.source` of a job chooses a source of the table below, or names a class of a module of yours:
data.source=my_package.mixture:Mixture.
"""

from typing import Any

from fivefold.data.base import DataSource, UnknownSource
from fivefold.data.shards import TokenShards
from fivefold.support.plugins import find, given_problems, stored

SOURCES: dict[str, type[DataSource]] = {"tokens": TokenShards}


def source_named(name: Any, *, trusted: bool) -> type[DataSource]:
    """The class; a plugin's module is imported if the name is `trusted`."""
    return find("data.source", name, SOURCES, DataSource, trusted=trusted)


def source_problems(data: DataSource) -> list[str]:
    """Of its settings; and of its class, where a program gives an object of one that is not in the table."""
    if not isinstance(data, UnknownSource) and (problems := given_problems("data", data, SOURCES, DataSource)):
        return problems
    return [*data.problems()]


def stored_source(table: dict[str, Any]) -> DataSource:
    """Of a job that was stored. The first releases knew one source, and did not name it."""
    return stored(table, source_named, TokenShards, UnknownSource)
