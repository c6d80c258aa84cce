"""Protects the weights from damaged data.

Every rank reads its batches through the guard. Where the data is too large to be hashed before the start, the ranks of
each node divide its files and hash them during training. What one rank finds reaches all by the step's sum of stop
flags: that step changes no weights, and all ranks end with the same error.
"""

import platform
from collections.abc import Callable, Sequence
from contextlib import suppress

import msgspec
import numpy as np

from fivefold.data.batch import Batch, DpShare, read_share
from fivefold.data.index import CHUNK_BYTES, REMEDY
from fivefold.data.integrity import CheckedData, Checker, Finding
from fivefold.data.order import samples_of, window_of, windows
from fivefold.data.rows import Splits, TokenRow
from fivefold.job.config import Job
from fivefold.job.preflight import HASHED_FIRST
from fivefold.launch import heartbeat
from fivefold.parallel.control import Control
from fivefold.support.errors import TrainingError, UserError
from fivefold.support.text import bytes_text

STOP_FOR_DATA = float(1 << 20)  # added to the step's sum of stop flags; larger than all ranks' other flags together
_MAX_LISTED = 6  # steps in a sentence
_BLOCK_SAMPLES = 1 << 16  # samples that are processed at a time


class BadData(TrainingError):
    """Data is damaged or cannot be read."""

    code = 2  # bad input: a restart would find it again


class DataGuard:
    def __init__(self, job: Job, sources: Splits):
        self.job, self.sources = job, sources
        self.unread: list[Finding] = []  # data that this rank could not read
        self.control: Control | None = None
        self.say: Callable[[str], None] = lambda _: None
        self.checkers: dict[int, Checker] = {}  # by the number of the store
        self.done = self.samples = 0  # at this start

    def watch(self, control: Control, say: Callable[[str], None]) -> None:
        """Divides the files over the ranks of each node. Collective.

        `control`, by which ranks exchange what they find, must be the guard's own.
        """
        self.control, self.say = control, say
        hosts = control.all_gather_values(platform.node(), str)
        here = [rank for rank, host in enumerate(hosts) if host == hosts[control.rank]]
        share = here.index(control.rank), len(here)
        self.checkers = {
            number: Checker(store, CheckedData(store.path), *share)
            for number, store in enumerate(self.sources.stores)
            if store.index.bytes > HASHED_FIRST  # else preflight has hashed all of it
        }

    def begin(self, done: int, samples: int) -> None:
        """Starts to hash; earlier starts have made `done` steps and read `samples` samples."""
        self.done, self.samples = done, samples
        for checker in self.checkers.values():
            checker.start()

    def moved(self, done: int, samples: int) -> None:
        """Notes the steps and samples after a rollback, with which steps no longer follow from samples."""
        self.done, self.samples = done, samples

    def close(self) -> None:
        for checker in self.checkers.values():
            checker.close()

    def read(self, row: TokenRow, samples: Sequence[int], parts: int = 1, number: int = 0) -> DpShare:
        """Share `number` of a global batch. If it cannot be read, a batch without loss, so that this rank takes part in
        all collectives of the step."""
        data = self.job.data
        try:
            return read_share(row, data.seq, data.seed, samples, self.job.model.vocab, parts, number)
        except UserError as error:
            self.unread.append(Finding("", str(error)))
            empty = np.zeros((len(samples), data.seq), np.int64)
            none = Batch(np.asarray(samples), empty, empty, empty.astype(bool), empty.astype(np.int32))
            return none.share(parts, number)

    @property
    def findings(self) -> list[Finding]:
        hashed = ((number, finding) for number, checker in self.checkers.items() for finding in checker.findings)
        return self.unread + [msgspec.structs.replace(finding, store=number) for number, finding in hashed]

    @property
    def stop_flag(self) -> float:
        return STOP_FOR_DATA if self.findings else 0.0

    def finish(self) -> None:
        """Hashes the data that steps of this and earlier starts have read, where it is not hashed yet."""
        checkers = self.checkers.values()
        self.close()
        if not all(checker.done for checker in checkers):
            self._touch_earlier()
        size = CHUNK_BYTES * sum(len(chunks) for checker in checkers for _, chunks in checker.left())
        if size > HASHED_FIRST:
            self.say(f"hashes {bytes_text(size)} of data that steps have read and nobody has hashed yet")
        for checker in checkers:
            checker.finish(heartbeat.beat)

    def _touch_earlier(self) -> None:
        split, seq = self.sources.train, self.job.data.seq
        count = windows(split.tokens, seq)
        for sample in range(0, min(self.samples, count), _BLOCK_SAMPLES):
            samples = np.arange(sample, min(sample + _BLOCK_SAMPLES, self.samples, count))
            for start in (window_of(samples, count, self.job.data.seed) * seq).tolist():
                split.touch(start, start + seq + 1)
            heartbeat.beat()

    def agree(self, done: int, samples: int, save: Callable[[int], object] | None = None, sure: bool = False) -> None:
        """Raises BadData on all ranks if one of them has found damage, after `done` steps and `samples` samples.

        If no step has read the damaged data, `save` saves the state before. `sure`: one is known to have. Collective.
        """
        size = self.control.size if self.control else 1
        by_rank = self.control.all_gather_values(self.findings, list[Finding]) if self.control else [self.findings]
        if not any(by_rank) and not sure:
            return
        sentences, clean = dict[str, int](), True
        for rank, finding in ((rank, finding) for rank, of_rank in enumerate(by_rank) for finding in of_rank):
            used = self._used(finding, done, samples)
            clean = clean and not used
            sentences.setdefault(finding.sentence + self._consequence(finding, used, samples), rank)
        if clean and done and save is not None:
            with suppress(TrainingError):  # the error of the data matters more
                save(done)
        messages = [text + (f" (rank {rank} found it)" if size > 1 else "") for text, rank in sentences.items()]
        message = "; ".join(messages) or "another rank cannot read its data"
        raise BadData(f"after step {done}: {message}; {REMEDY}")

    def _used(self, finding: Finding, done: int, samples: int) -> list[int]:
        """The steps that have read the damaged bytes."""
        return sorted({self._step(sample) for sample in self._readers(finding, samples) if sample < samples})

    def _consequence(self, finding: Finding, used: list[int], samples: int) -> str:
        if used:
            more = f" and {len(used) - _MAX_LISTED} more" if len(used) > _MAX_LISTED else ""
            steps = f"step{'s' if len(used) > 1 else ''} {', '.join(map(str, used[:_MAX_LISTED]))}{more}"
            return f"; {steps} read it: go back to a checkpoint before step {used[0]}"
        later = [sample for sample in self._readers(finding, samples) if sample >= samples]
        return f"; no step has read it, and step {self._step(min(later))} would be the first" if later else ""

    def _readers(self, finding: Finding, samples: int) -> list[int]:
        """The samples that read the bytes of a finding, up to the end of the epoch after sample `samples`."""
        split, seq, seed = self.sources.train, self.job.data.seq, self.job.data.seed
        count, readers = windows(split.tokens, seq), []
        for begin, end in finding.ranges:
            for tokens in split.tokens_in(self.sources.stores[finding.store], finding.file, begin, end):
                # Window w reads the tokens w * seq to w * seq + seq: one more than its own.
                last = min((tokens[1] - 1) // seq, count - 1)
                inside = np.arange(max(-(-tokens[0] // seq) - 1, 0), last + 1)
                for epoch in range(samples // count + 2):
                    readers += samples_of(inside, count, seed, epoch).tolist()
        return readers

    def _step(self, sample: int) -> int:
        if sample >= self.samples:
            return self.done + 1 + (sample - self.samples) // self.job.train.batch
        return sample * self.done // self.samples + 1  # of an earlier start: exact if its batches had one size
