"""The corpus that is always there: the sources of Python's own standard library, as bytes; and their entropy.

A first run needs no download. The corpus is prepared once per Python release and kept in the user's cache.
"""

import hashlib
import os
import platform
import shutil
import sysconfig
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fivefold.data.index import is_prepared
from fivefold.data.integrity import CheckedData, user_cache, verify
from fivefold.data.prepare import prepare
from fivefold.data.rows import TokenRow
from fivefold.data.tokens import TokenStore
from fivefold.support.errors import UserError
from fivefold.support.progress import Report, quiet

VALID_SHARE = 0.05  # some 30 of 600 files: enough to tell learning from memorising

# Installed packages differ from machine to machine; tests and IDLE are long lists and tables rather than prose.
_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idlelib", "idle_test", "__pycache__"}
_BUILD_FILE = "_sysconfigdata"  # how this very Python was compiled, with the paths of whoever did it


def stdlib_corpus(cache: Path | None = None, progress: Report = quiet) -> Path:
    """The directory of the prepared standard library, made if it is not there yet.

    Processes may ask at the same time: each prepares next to the place, the first rename wins, the others use it.
    """
    root = Path(sysconfig.get_path("stdlib"))
    files = stdlib_files(root)
    if not files:
        raise UserError(
            f"the standard library in {root} has no .py sources (a stripped or zipped Python); "
            "prepare a text of your own with `fivefold data prepare`",
            "data.corpus.missing",
        )
    out = user_cache("corpus", cache) / f"stdlib-{platform.python_version()}-{_fingerprint(root, files)}"
    try:
        verify(TokenStore.open(out), CheckedData(out, cache))
    except UserError:  # not there, or damaged; a cache is repaired by making it again
        if out.exists() and not is_prepared(out):
            shutil.rmtree(out)  # ours by its name, and of no use
        try:
            prepare(files, out, valid=VALID_SHARE, overwrite=is_prepared(out), progress=progress)
        except UserError:
            if not is_prepared(out):  # else another process was faster, and its result is the same to the byte
                raise
    return out


def stdlib_files(root: Path) -> list[Path]:
    """The library's sources in the order of their relative paths."""
    files = []
    for place, folders, names in os.walk(root):
        folders[:] = [folder for folder in folders if folder not in _LEFT_OUT]
        files += [Path(place, name) for name in names if name.endswith(".py") and not name.startswith(_BUILD_FILE)]
    return sorted(files, key=lambda path: path.relative_to(root).as_posix())


def _fingerprint(root: Path, files: list[Path]) -> str:
    """Distributions patch the library: the same version with other files is another corpus."""
    lines = [f"{path.relative_to(root).as_posix()} {path.stat().st_size}" for path in files]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:10]


# ---- entropy --------------------------------------------------------------------------------------------------------
# Losses that need no model: of the best guess from no context, and from one token of context.
#
# A model that reaches the first has learnt how frequent tokens are; below the second it must look further back than
# one token. Both are estimates from the split's own counts (which, given few tokens, flatter the guess), over all
# tokens, with or without loss, and count the first token after an end of document, as the training loss does.


# The pairs of 4096 tokens already take a table of 128 MiB. Above, the table would be the lesser problem: with most
# pairs seen once or never, the estimate says more about the size of the split than about the text.
MAX_VOCAB = 4096


class Entropy(NamedTuple):
    """In nats per token."""

    unigram: float
    bigram: float | None  # H(next | previous); None for a vocabulary above MAX_VOCAB


def entropy(split: TokenRow, chunk: int = 1 << 20) -> Entropy:
    """Count a split's tokens and its pairs of neighbours, `chunk` tokens at a time."""
    vocab = split.vocab
    paired = vocab <= MAX_VOCAB
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
