"""No cross-talk: in packed windows, under every axis, each conversation has the loss that it has alone."""

from pathlib import Path

import numpy as np
import pytest
import torch

from fivefold.data.base import DataSource
from fivefold.data.batch import Batch, read_batch
from fivefold.data.packing import PackedDocuments
from fivefold.data.prepare import prepare
from fivefold.data.rows import TokenRow
from fivefold.data.shards import TokenShards
from fivefold.data.tokens import TokenStore
from fivefold.job.config import Job, TrainConfig
from fivefold.layout.layout import Layout
from fivefold.parallel.mesh import Mesh
from fivefold.spec.presets import preset
from fivefold.trainer.engine import Engine
from tests.data.chat_model import chat_model, some_chats, write_chats
from tests.ranks import run_ranks

CPU = torch.device("cpu")
SEQ, CHATS = 256, 12
Losses = dict[int, float]  # by the conversation's number


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("chats")
    lines = write_chats(folder / "chats.jsonl", some_chats(CHATS))
    prepare([lines], folder / "chats", tokenizer=chat_model(folder / "model"), chat=True)
    return folder / "chats"


def job(path: Path, layout: str, data: DataSource | None = None) -> Job:
    spec = preset("tiny", layers=2, hidden=32, heads=4, kv_heads=2, ffn=48, vocab=TokenStore.open(path).vocab)
    parsed = Layout.parse(layout)
    data = data or PackedDocuments(path=str(path), seq=SEQ)
    return Job(model=spec, layout=parsed, data=data, train=TrainConfig(batch=1, dtype="float64", device="cpu"))


def masked(batch: Batch, mask: np.ndarray) -> Batch:
    return Batch(batch.samples, batch.tokens, batch.targets, batch.loss_mask & mask, batch.documents)


def packed(rank: int, world: int, path: Path, layouts: list[str]) -> list[Losses]:
    """The sum of losses of each conversation, all windows together, in each layout: of a mask that leaves it alone."""
    found = []
    for layout in layouts:
        case = job(path, layout)
        engine = Engine(case, Mesh.of(case.layout, CPU))
        row = case.data.open().train
        losses: Losses = {}
        for window in range(row.tokens // SEQ):
            batch = whole_window(row, window)
            for number in np.unique(batch.documents[batch.loss_mask]):
                losses[conversation_at(batch, number)] = engine.evaluate(masked(batch, batch.documents == number))
        found.append(losses)
    return found


def whole_window(row: TokenRow, window: int) -> Batch:
    """The window of a sample: the first samples read each window once."""
    return read_batch(row, SEQ, 0, [window])


def conversation_at(batch: Batch, number: int) -> int:
    """A name for a conversation: what it says."""
    return hash(tuple(batch.tokens[batch.documents == number].tolist()))


def alone(path: Path) -> Losses:
    """The same of one process that sees one conversation at a time, as `prepare` wrote it, and nothing else."""
    split = TokenStore.open(path).split("train")
    starts = split.document_starts()
    losses: Losses = {}
    case = job(path, "", TokenShards(path=str(path), seq=SEQ))  # without a mask of documents
    engine = Engine(case, Mesh.of(case.layout, CPU))
    for begin, end in zip(starts.tolist(), [*starts[1:].tolist(), split.tokens], strict=True):
        tokens, loss, _ = split.read(begin, end)
        inputs, targets = tokens[None, :-1], tokens[None, 1:]
        documents = np.zeros(inputs.shape, np.int32)
        losses[hash(tuple(tokens.tolist()))] = engine.evaluate(
            Batch(np.zeros(1, np.int64), inputs, targets, loss[None, 1:], documents)
        )
    return losses


def check(path: Path, world: int, layouts: list[str]) -> None:
    expected = alone(path)
    assert len(expected) == CHATS
    row = job(path, "").data.open().train
    assert 2 <= row.tokens // SEQ <= CHATS // 2  # several share a window
    for rank in run_ranks(world, packed, path, layouts):
        for layout, losses in zip(layouts, rank, strict=True):
            assert losses.keys() == expected.keys(), layout
            worst = max(abs(losses[chat] - expected[chat]) / expected[chat] for chat in expected)
            assert worst <= 1e-10, (layout, worst)


def test_a_packed_conversation_has_the_loss_that_it_has_alone(chats: Path) -> None:
    check(chats, 2, ["tp=2,sp", "cp=2", "pp=2"])


@pytest.mark.slow  # the same of every kind of context parallelism, and of axes together
def test_under_every_kind_of_cp_and_several_axes(chats: Path) -> None:
    check(chats, 2, ["tp=2", "cp=2,cp_kind=allgather", "cp=2,cp_kind=ulysses"])
    check(chats, 4, ["tp=2,sp,cp=2", "tp=2,pp=2", "cp=2,pp=2"])


def test_without_the_documents_mask_they_would_read_each_other(chats: Path) -> None:
    """What the comparison sees: the same windows, with attention over all of them."""
    expected = alone(chats)
    case = job(chats, "", TokenShards(path=str(chats), seq=SEQ))
    blind = Engine(case, Mesh.of(case.layout, CPU))
    row, off = job(chats, "").data.open().train, 0
    for window in range(row.tokens // SEQ):
        batch = whole_window(row, window)
        for number in np.unique(batch.documents[batch.loss_mask]):
            found = blind.evaluate(masked(batch, batch.documents == number))
            off += abs(found / expected[conversation_at(batch, number)] - 1) > 1e-6
    assert off >= CHATS - row.tokens // SEQ  # all but the first of each window
