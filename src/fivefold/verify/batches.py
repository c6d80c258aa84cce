"""Random data from a seed. The batches of proofs are as awkward as real data can be; those of benchmarks are plain.

Tokens are uniform, so that every row of the vocabulary occurs. Loss masks are unequal: samples keep between a tenth and
all of their targets, one keeps none, and in every second step one data-parallel rank has no target at all, a different
one each time. So a mean of means is detected. Documents have random lengths, so that they begin and end inside the
shares of context parallel ranks and reach across them.
"""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fivefold.data.batch import Batch
from fivefold.data.prepare import SHARD_TOKENS
from fivefold.data.writing.sink import Sink
from fivefold.data.writing.tokenizer import ByteTokenizer, Encoded
from fivefold.job.config import Job

_DOCUMENTS = 5  # per sequence, at most


def make_batch(job: Job, step: int) -> Batch:
    """The global batch of `step`, from 0. The only part of the layout that matters is dp, which the mask depends on."""
    size, seq = job.train.batch, job.data.seq
    rng = np.random.default_rng([job.data.seed, step])
    tokens = rng.integers(0, job.model.vocab, (size, seq + 1))
    return Batch(
        samples=np.arange(step * size, (step + 1) * size),
        tokens=tokens[:, :-1],
        targets=tokens[:, 1:],
        loss_mask=_mask(rng, size, seq, job.layout.size("batch"), step),
        documents=np.stack([_documents(rng, seq) for _ in range(size)]),
    )


def plain_batch(vocab: int, size: int, seq: int, seed: int = 0) -> Batch:
    """For timings: every target counts, every sequence is one document.

    Tokens come from the whole vocabulary: the gradient of an embedding is slower if few rows get all of it.
    """
    tokens, shape = np.random.default_rng(seed).integers(0, vocab, (size, seq + 1)), (size, seq)
    return Batch(np.arange(size), tokens[:, :-1], tokens[:, 1:], np.ones(shape, bool), np.zeros(shape, np.int32))


def write_tokens(directory: Path, vocab: int, count: int) -> None:
    """Prepare a directory, as if from text, with one document of `count` tokens from the whole vocabulary."""
    tokens = np.random.default_rng(0).integers(0, vocab, count)
    everything = np.ones(1, bool)
    sink = Sink(directory, _MadeUp(vocab), SHARD_TOKENS, seed=0, valid=0.0)
    sink.write(Encoded(tokens, np.array([count]), everything, everything, read=0))
    sink.finish()


class _MadeUp(ByteTokenizer):
    """A tokenizer whose tokens stand for no text."""

    name = "made up"

    def __init__(self, vocab: int):
        self.vocab, self.end = vocab, vocab - 1


def _mask(rng: np.random.Generator, size: int, seq: int, dp: int, step: int) -> NDArray[np.bool_]:
    shares = rng.permutation(np.linspace(0.1, 1.0, size))
    mask = rng.random((size, seq)) < shares[:, None]
    if size > 1:
        mask[rng.integers(size)] = False
    share, empty = size // dp, step // 2 % dp
    if dp > 1 and step % 2:  # in the other steps every rank has targets
        mask[empty * share : (empty + 1) * share] = False
    if not mask.any():  # one or two samples: at least one target must count
        mask[empty * share - 1] = True
    return mask


def _documents(rng: np.random.Generator, seq: int) -> NDArray[np.int32]:
    """Document numbers of one sequence, from 0."""
    starts = np.zeros(seq, np.int32)
    cuts = rng.choice(seq, min(seq, int(rng.integers(1, _DOCUMENTS + 1))), replace=False)
    starts[cuts[cuts > 0]] = 1
    return starts.cumsum(dtype=np.int32)
