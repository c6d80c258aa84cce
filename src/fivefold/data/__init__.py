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

from fivefold.data.base import DataSource, UnknownSource
from fivefold.data.packing import PackedDocuments
from fivefold.data.shards import TokenShards
from fivefold.support.plugins import Sections

SOURCE_BY_NAME: dict[str, type[DataSource]] = {"tokens": TokenShards, "packed": PackedDocuments}
SOURCES = Sections("data.source", DataSource, SOURCE_BY_NAME, UnknownSource)
