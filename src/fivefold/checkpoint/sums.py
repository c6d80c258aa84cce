"""Sums of files in memory: CRC-32 of every MiB, and sha256 of those.

    sums = [crc(memory, number) for number in range(blocks(len(memory)))]     # in any order, by any thread
    total(sums)                                                               # 'crc32:3af1...'

Nobody else can write such files, so what they are checked for is accidents. CRC-32 finds one or two flipped bits of a
block wherever they are, and any burst of up to 32 bits; of other damage it misses one case in four billion in each
block that is hit. It takes a fifth to two thirds of sha256's time, depending on the processor, and a block can be
hashed while it is in the cache. No torch.
"""

import hashlib
import zlib
from collections.abc import Iterable

from fivefold.support.files import Progress, Readable, digest_of

BLOCK = 1 << 20
PREFIX = "crc32:"


def blocks(size: int) -> int:
    return -(-size // BLOCK)


def crc(memory: memoryview, number: int) -> int:
    """Of one block."""
    return zlib.crc32(memory[number * BLOCK : (number + 1) * BLOCK])


def total(sums: Iterable[int]) -> str:
    """Of all blocks, in their order."""
    return PREFIX + hashlib.sha256(b"".join(one.to_bytes(4, "little") for one in sums)).hexdigest()


def sum_like(promised: str, stream: Readable, progress: Progress | None = None) -> str:
    """Of what is left of an open file, of the kind that a manifest promises."""
    if not promised.startswith(PREFIX):
        return digest_of(stream, progress)
    sums = []
    while block := stream.read(BLOCK):
        sums.append(zlib.crc32(block))
        if progress:
            progress(len(block))
    return total(sums)


def short(found: str) -> str:
    """For people: which kind, and how it begins."""
    kind, _, digits = found.rpartition(":")
    return f"{kind or 'sha256'} is {digits[:16]}..."
