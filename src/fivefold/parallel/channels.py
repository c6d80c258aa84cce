"""Messages between pipeline stages. A channel crosses one boundary, one way, in order.

Shapes are known beforehand, so nothing but the tensors travels. On gloo a message has a tag, its channel's and its
microbatch's. NCCL ignores tags and matches in order: there all messages from one rank to another share a lane
(`Mesh.lane`), and both ranks start them in the schedule's order, which `schedule.check` has proven to be one.
"""

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from fivefold.launch.ends import lost_peer
from fivefold.launch.waits import stood
from fivefold.parallel.mesh import Mesh
from fivefold.schedule.actions import RECEIVES, RECV_ACTIVATION, SEND_ACTIVATION, Action, Channel
from fivefold.schedule.schedule import Schedule


class Silence(Exception):
    """A peer did not send, or did not take, a message; the text says how long who was waited for, and with what end."""


@dataclass(frozen=True)
class Message:
    """One tensor on its way, by the RECV or SEND that started it."""

    action: Action
    work: dist.Work
    buffer: Tensor  # it must stay as it is until it is gone, or has come
    device: torch.device  # where it is wanted
    peer: str
    patience: timedelta

    def wait(self) -> Tensor:
        """Until it has come, or has been taken."""
        start = time.monotonic()
        try:
            stood(self.work.wait, self.patience)
        except RuntimeError as error:
            why = lost_peer(error)
            if why is None:
                raise
            raise Silence(f"waited {time.monotonic() - start:.1f} s for {self}: {why}") from error
        return self.buffer.to(self.device)

    def __str__(self) -> str:
        what = "activation" if self.action.kind in (RECV_ACTIVATION, SEND_ACTIVATION) else "gradient"
        if self.action.kind in RECEIVES:
            return f"its {what} from {self.peer}"
        return f"{self.peer} to take the {what} of {self.action}"


class Channels:
    def __init__(self, schedule: Schedule, mesh: Mesh, dtype: torch.dtype):
        self.placement, self.buffers, self.mesh = schedule.placement, schedule.buffers, mesh
        self.dtype, self.microbatches = dtype, schedule.microbatches
        self.place = torch.device("cpu") if mesh.pp.staged else mesh.device
        owner = self.placement.owner
        self.groups = {one: mesh.lane(owner[one.source], owner[one.target]) for one in self.placement.channels}
        self.sent: dict[Channel, deque[Message]] = {c: deque() for c in self.placement.channels}
        self.peers = [f"pipeline rank {peer} (rank {rank})" for peer, rank in enumerate(mesh.pp.ranks)]

    def receive(self, action: Action, shape: tuple[int, ...]) -> Message:
        """Post the receive of a RECV action."""
        gradients = action.kind is not RECV_ACTIVATION
        channel = Channel(action.stage - (not gradients), gradients)
        source = self.placement.owner[channel.source]
        buffer = torch.empty(shape, dtype=self.dtype, device=self.place)
        with self._heard(source):
            work = dist.irecv(buffer, group=self.groups[channel], group_src=source, tag=self._tag(channel, action))
        return self._message(action, work, buffer, source)

    def send(self, action: Action, x: Tensor) -> None:
        """Hand x over, when fewer than `buffers` messages of its channel are under way."""
        gradients = action.kind is not SEND_ACTIVATION
        channel = Channel(action.stage - gradients, gradients)
        under_way = self.sent[channel]
        # What the device has sent by now is let go of; gloo says so only to whoever waits.
        while len(under_way) >= self.buffers or (under_way and under_way[0].work.is_completed()):
            under_way.popleft().wait()
        x = x.to(self.place).contiguous()
        target = self.placement.owner[channel.target]
        with self._heard(target):
            work = dist.isend(x, group=self.groups[channel], group_dst=target, tag=self._tag(channel, action))
        under_way.append(self._message(action, work, x, target))

    def drain(self) -> None:
        """Wait until everything sent has been taken."""
        for under_way in self.sent.values():
            while under_way:
                under_way.popleft().wait()

    def _message(self, action: Action, work: dist.Work | None, buffer: Tensor, peer: int) -> Message:
        assert work is not None
        device = self.mesh.device if action.kind in RECEIVES else self.place
        return Message(action, work, buffer, device, self.peers[peer], self.mesh.pp.patience)

    @contextmanager
    def _heard(self, peer: int) -> Iterator[None]:
        """Around the start of a message: gloo refuses those of a connection that is known to be closed."""
        try:
            yield
        except RuntimeError as error:
            if (why := lost_peer(error)) is None:
                raise
            raise Silence(f"found {self.peers[peer]} gone: {why}") from error

    def _tag(self, channel: Channel, action: Action) -> int:
        return self.placement.channels.index(channel) * self.microbatches + action.microbatch


class NoChannels(Channels):
    """Channels that send nothing, and make up what is to be received: for a rank that runs its stages by itself."""

    def __init__(self, like: Channels):
        self.mesh, self.dtype = like.mesh, like.dtype
        self.numbers = torch.Generator(self.mesh.device).manual_seed(0)

    def receive(self, action: Action, shape: tuple[int, ...]) -> Tensor:  # type: ignore[override]
        """Numbers that are unlike each other: of equal ones a router would send all to the same experts."""
        return torch.randn(shape, dtype=self.dtype, device=self.mesh.device, generator=self.numbers)

    def send(self, action: Action, x: Tensor) -> None: ...

    def drain(self) -> None: ...
