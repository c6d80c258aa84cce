"""Losses that need no model: those of the best guess from no context, and from one token of context.

A model that reaches the first has learnt how frequent tokens are; below the second it must look further back than one
token. Both are estimates from the split's own counts (which, given few tokens, flatter the guess), over all tokens,
with or without loss, and count the first token after an end of document, as the training loss does.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fivefold.data.tokens import Split

# The pairs of 4096 tokens already take a table of 128 MiB. Above, the table would be the lesser problem: with most
# pairs seen once or never, the estimate says more about the size of the split than about the text.
MOST_VOCAB = 4096


class Entropy(NamedTuple):
    """In nats per token."""

    unigram: float
    bigram: float | None  # H(next | previous); None for a vocabulary above MOST_VOCAB


def entropy(split: Split, chunk: int = 1 << 20) -> Entropy:
    """Count a split's tokens and its pairs of neighbours, `chunk` tokens at a time."""
    vocab = split.store.vocab
    paired = vocab <= MOST_VOCAB
    single = np.zeros(vocab, np.int64)
    pairs = np.zeros(vocab * vocab if paired else 0, np.int64)
    if len(pairs) > 1 << 20:
        chunk = max(chunk, len(pairs))  # each bincount fills a whole table; a chunk as long makes that bearable
    for start in range(0, split.tokens, chunk):
        # One token more than the chunk, to pair its last one; the token itself is counted in the next.
        ids = split.ids(start, min(start + chunk + 1, split.tokens)).astype(np.int64)
        single += np.bincount(ids[:chunk], minlength=vocab)
        if paired:
            pairs += np.bincount(ids[:-1] * vocab + ids[1:], minlength=len(pairs))
    if not paired:
        return Entropy(_nats(single), None)
    previous = pairs.reshape(vocab, vocab).sum(1)
    return Entropy(_nats(single), _nats(pairs) - _nats(previous))


def _nats(counts: NDArray[np.int64]) -> float:
    shares = counts[counts > 0] / max(int(counts.sum()), 1)
    return float(-(shares * np.log(shares)).sum())
