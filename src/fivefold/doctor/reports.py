"""What one rank has found out about itself, its node and its links. Ranks send it to rank 0."""

import msgspec


class Disk(msgspec.Struct, frozen=True):
    """Of run.dir, by the first rank of a node while the others' first ranks do the same."""

    write: float = 0.0  # bytes/s, until they are on the disk
    read: float = 0.0  # bytes/s
    sync: float = 0.0  # seconds until a small file is on the disk
    free: int = 0  # bytes
    error: str = ""  # why it could not be written


class Gpu(msgspec.Struct, frozen=True):
    """As its driver sees it, right after the matmuls."""

    clock: int  # MHz
    most: int  # MHz: the highest it may have
    temperature: int  # Celsius
    power: float  # W
    limit: float  # W
    slowed: list[str]  # why the driver holds the clock back
    errors: int  # ECC errors that were not corrected, since the driver was loaded


class Ring(msgspec.Struct, frozen=True):
    """Collectives of one group of an axis, while all groups of the axis do the same."""

    axis: str
    ranks: list[int]
    latency: float  # seconds of the smallest all-reduce
    reduce: float  # bytes/s that a rank passes on in the largest all-reduce
    gather: float  # and in the largest all-gather
    seconds: list[tuple[str, int, float]]  # kind, payload in bytes, seconds: all that was measured


class Send(msgspec.Struct, frozen=True):
    """A large message from one rank of a group to the next, and back."""

    axis: str
    ranks: tuple[int, int]
    bandwidth: float  # bytes/s


class RankReport(msgspec.Struct, frozen=True):
    rank: int
    node: str
    cpu: bool  # the device is one
    device: str
    precision: str  # of the matmuls, in the planner's words
    rate: float  # FLOP/s
    versions: dict[str, str]
    amounts: dict[str, float]  # of memory, cores and limits; of the node, or of this rank's share of it
    ahead: float = 0.0  # seconds of its node's clock before that of rank 0
    unsure: float = 0.0  # seconds by which that may be wrong
    disk: Disk | None = None
    gpu: Gpu | None = None
    host_id: str = ""  # NCCL_HOSTID, where somebody else than a rank that shares a GPU has set it
    rings: list[Ring] = []  # those of which it is the first rank
    sends: list[Send] = []  # by it
