"""Messages between pipeline stages: what crosses a boundary, one way, in order.

Shapes are known beforehand, so nothing but the tensors travels. On gloo a message has a tag, its channel's and its
microbatch's; NCCL ignores tags and matches in order, so each direction and chunk has a communicator of its own there.
"""

from collections import deque

import torch
import torch.distributed as dist
from torch import Tensor

from fivefold.parallel.mesh import Mesh
from fivefold.schedule.actions import RECV_ACTIVATION, SEND_ACTIVATION, Action, Channel
from fivefold.schedule.schedule import Schedule


class Message:
    """One tensor on its way here."""

    def __init__(self, work: dist.Work, buffer: Tensor, device: torch.device, from_rank: int):
        self.work, self.buffer, self.device, self.from_rank = work, buffer, device, from_rank

    def wait(self) -> Tensor:
        self.work.wait()
        return self.buffer.to(self.device)


class Channels:
    def __init__(self, schedule: Schedule, mesh: Mesh, dtype: torch.dtype):
        self.placement, self.buffers, self.mesh = schedule.placement, schedule.buffers, mesh
        self.dtype, self.microbatches = dtype, schedule.microbatches
        self.place = torch.device("cpu") if mesh.pp.staged else mesh.device
        chunk = self.placement.chunk
        self.groups = {c: mesh.lane(2 * chunk[c.boundary] + c.gradients) for c in self.placement.channels}
        self.sent: dict[Channel, deque[tuple[dist.Work, Tensor]]] = {c: deque() for c in self.placement.channels}

    def receive(self, action: Action, shape: tuple[int, ...]) -> Message:
        """Post the receive of a RECV action."""
        gradients = action.kind is not RECV_ACTIVATION
        channel = Channel(action.stage - (not gradients), gradients)
        source = self.placement.owner[channel.source]
        buffer = torch.empty(shape, dtype=self.dtype, device=self.place)
        work = dist.irecv(buffer, group=self.groups[channel], group_src=source, tag=self._tag(channel, action))
        assert work is not None
        return Message(work, buffer, self.mesh.device, source)

    def send(self, action: Action, x: Tensor) -> None:
        """Hand x over, when fewer than `buffers` messages of its channel are under way."""
        gradients = action.kind is not SEND_ACTIVATION
        channel = Channel(action.stage - gradients, gradients)
        under_way = self.sent[channel]
        while len(under_way) >= self.buffers:
            under_way.popleft()[0].wait()
        x = x.to(self.place).contiguous()
        target = self.placement.owner[channel.target]
        work = dist.isend(x, group=self.groups[channel], group_dst=target, tag=self._tag(channel, action))
        assert work is not None
        under_way.append((work, x))  # x must stay as it is until it is gone

    def _tag(self, channel: Channel, action: Action) -> int:
        return self.placement.channels.index(channel) * self.microbatches + action.microbatch

    def drain(self) -> None:
        for under_way in self.sent.values():
            while under_way:
                under_way.popleft()[0].wait()
