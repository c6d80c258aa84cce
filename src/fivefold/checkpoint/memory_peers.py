"""The nodes of a run's ranks, and the messages by which they exchange snapshots in memory.

Copies are sent over a gloo group of their own. The step's collectives have other groups, so that neither waits for the
other; the store of the rendezvous would carry all of it through one process. Where all ranks are on one node there is
no such group, and nothing is sent.
"""

from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fivefold.checkpoint.memory_snapshots import copy_targets, memory_dir, node_id, ranks_by_node, snapshot_dir
from fivefold.launch.heartbeat import beat
from fivefold.parallel.control import Control

_MESSAGE_BYTES = 1 << 26


class Nodes:
    """The nodes of a run's ranks. Its construction is collective."""

    def __init__(self, control: Control, run_id: str, start: int, *, make: bool):
        """`start`: when this start began, in ms since the epoch, on all ranks alike. `make`: its directory."""
        self.control, self.rank, self.start = control, control.rank, start
        problem = ""
        try:
            self.snapshot_dir = snapshot_dir(run_id, make=make)
        except FileNotFoundError:  # there is no snapshot on this node
            self.snapshot_dir = memory_dir() / run_id
            problem = f"{self.snapshot_dir.parent} cannot be made" if make else ""
        except OSError as error:
            problem = error.strerror or str(error)
        by_rank = control.all_gather_values((*node_id(), problem), tuple[str, str, str])
        self.nodes = ranks_by_node([(host, directory) for host, directory, _ in by_rank])  # the ranks of each node
        self.node = next(number for number, ranks in enumerate(self.nodes) if self.rank in ranks)
        self.first = self.rank == self.nodes[self.node][0]  # whether this is the first rank of its node
        self.problem = next((f"rank {rank}: {why}" for rank, (*_, why) in enumerate(by_rank) if why), "")
        self.copy_to = copy_targets(self.nodes)
        self.group: Any = None
        if len(self.nodes) > 1 and not self.problem:
            self.problem = self._join()

    def _join(self) -> str:
        """Makes the group of all ranks; returns why that failed, else an empty text. Collective."""
        why = ""
        try:
            self.group = dist.new_group(backend="gloo", timeout=timedelta(seconds=self.control.timeout))
        except RuntimeError as error:
            why = f"rank {self.rank} cannot reach the others over gloo: {str(error).splitlines()[0][:200]}"
        return next(filter(None, self.control.all_gather_values(why, str)), "")

    def broadcast(self, parts: list[bytes], source: int) -> list[bytes]:
        """The parts that `source` has, on every rank. Collective."""
        if self.group is None:
            return parts
        sizes = torch.tensor([len(part) for part in parts])
        dist.broadcast(sizes, source, group=self.group)
        data = _bytes(parts) if self.rank == source else torch.empty(int(sizes.sum()), dtype=torch.uint8)
        dist.broadcast(data, source, group=self.group)
        return [bytes(part.numpy()) for part in data.split(sizes.tolist())]

    def all_to_all(self, parts: list[bytes]) -> list[bytes]:
        """Sends a part to each rank; returns the parts that the ranks sent to this one. Collective."""
        sent = torch.tensor([len(part) for part in parts])
        sizes = torch.empty_like(sent)
        dist.all_to_all_single(sizes, sent, group=self.group)
        received = torch.empty(int(sizes.sum()), dtype=torch.uint8)
        dist.all_to_all_single(received, _bytes(parts), sizes.tolist(), sent.tolist(), group=self.group)
        return [bytes(part.numpy()) for part in received.split(sizes.tolist())]

    def send(self, data: Tensor, to: int) -> list[Any]:
        """Starts to send; messages between a pair of ranks arrive in order."""
        return [dist.isend(piece, to, group=self.group) for piece in data.split(_MESSAGE_BYTES)]

    def receive(self, into: Tensor, source: int) -> list[Any]:
        return [dist.irecv(piece, source, group=self.group) for piece in into.split(_MESSAGE_BYTES)]


def _bytes(parts: list[bytes]) -> Tensor:
    joined = bytearray(b"".join(parts))
    return torch.frombuffer(joined or bytearray(1), dtype=torch.uint8)[: len(joined)]


def wait(works: Iterable[Any]) -> None:
    for work in works:
        work.wait()
        beat()
