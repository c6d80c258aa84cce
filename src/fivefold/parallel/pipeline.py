"""The pipeline: runs a Schedule, action by action, on this rank's stages.

The Schedule is the very object that is checked, simulated and drawn. Receives are posted where it lists them and waited
for by their consumers; sends are started and drained at the end. A stage computes the same in every schedule, and
accumulates gradients in ascending order of microbatches, so their sums are those of a single device.

If experts send tokens to other ranks, the F and the B of an overlapped pair run in turns: each waits for its messages
while the other computes (`overlap.py`). Results are the same to the bit. Otherwise the F runs first, and then the B: a
dense model has no communication to hide, and FSDP2 releases a block's weights after each pass, which the other half may
have just gathered.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from fivefold.launch.exits import lost_peer
from fivefold.launch.heartbeat import beat
from fivefold.launch.waits import timed_wait
from fivefold.model.decoder import Decoder
from fivefold.model.layers import TokenPositions
from fivefold.model.linear_cross_entropy import Targets
from fivefold.parallel.collectives import waiting, who
from fivefold.parallel.mesh import Mesh
from fivefold.parallel.overlap import PairRunner
from fivefold.parallel.weights import Weights
from fivefold.parallel.wgrad import WeightGradQueue, WgradTask
from fivefold.schedules.actions import (
    COLLECTIVES,
    GRADIENT_MAKERS,
    LAST_READERS,
    RECEIVE_KINDS,
    RECV_ACTIVATION,
    SEND_ACTIVATION,
    Action,
    Channel,
    Kind,
)
from fivefold.schedules.schedule import Schedule
from fivefold.support.errors import PeerLost, UserError

# ---- channels -------------------------------------------------------------------------------------------------------
# Messages between pipeline stages. A channel is a FIFO over one stage boundary in one direction.
#
# Shapes are known beforehand, so only the tensors are sent. On gloo a message's tag is made of its channel and its
# microbatch. NCCL ignores tags and matches in order: there all messages from one rank to another share a group
# (`Mesh.p2p_group`), and both ranks start them in the same order, as `schedules/check.py` proves.


class PeerTimeout(Exception):
    """A peer did not send, or did not receive, a message; the text says how long it was waited for, and the error."""


@dataclass(frozen=True)
class Message:
    """One message in flight, started by a RECV or SEND."""

    action: Action
    work: dist.Work
    buffer: Tensor  # must not be freed or changed until the message is sent or received
    device: torch.device  # of the tensor that `wait` returns
    peer: str
    timeout: timedelta

    def wait(self) -> Tensor:
        """Wait until the message is received, or until the peer has received it; return its tensor."""
        start = time.monotonic()
        try:
            timed_wait(self.work.wait, self.timeout)
        except RuntimeError as error:
            why = lost_peer(error)
            if why is None:
                raise
            raise PeerTimeout(f"waited {time.monotonic() - start:.1f} s for {self}: {why}") from error
        return self.buffer.to(self.device)

    def __str__(self) -> str:
        what = "activation" if self.action.kind in (RECV_ACTIVATION, SEND_ACTIVATION) else "gradient"
        if self.action.kind in RECEIVE_KINDS:
            return f"its {what} from {self.peer}"
        return f"{self.peer} to take the {what} of {self.action}"


class Channels:
    def __init__(self, schedule: Schedule, mesh: Mesh, dtype: torch.dtype):
        self.placement, self.buffers, self.mesh = schedule.placement, schedule.buffers, mesh
        self.dtype, self.microbatches = dtype, schedule.microbatches
        self.buffer_device = torch.device("cpu") if mesh.pp.staged else mesh.device
        owner = self.placement.owner
        channels = self.placement.channels
        self.groups = {channel: mesh.p2p_group(owner[channel.source], owner[channel.target]) for channel in channels}
        self.sends_in_flight: dict[Channel, deque[Message]] = {channel: deque() for channel in channels}
        self.peers = [f"pipeline rank {peer} (rank {rank})" for peer, rank in enumerate(mesh.pp.ranks)]

    def receive(self, action: Action, shape: tuple[int, ...]) -> Message:
        """Post the receive of a RECV action."""
        gradients = action.kind is not RECV_ACTIVATION
        channel = Channel(action.stage - (not gradients), gradients)
        source = self.placement.owner[channel.source]
        buffer = torch.empty(shape, dtype=self.dtype, device=self.buffer_device)
        with self._lost_peer_context(source):
            work = dist.irecv(buffer, group=self.groups[channel], group_src=source, tag=self._tag(channel, action))
        return self._message(action, work, buffer, source)

    def send(self, action: Action, x: Tensor) -> None:
        """Start to send x, once fewer than `buffers` messages of its channel are in flight."""
        gradients = action.kind is not SEND_ACTIVATION
        channel = Channel(action.stage - gradients, gradients)
        in_flight = self.sends_in_flight[channel]
        # Messages that the device has sent are released; gloo reports completion only to a wait.
        while len(in_flight) >= self.buffers or (in_flight and in_flight[0].work.is_completed()):
            in_flight.popleft().wait()
        x = x.to(self.buffer_device).contiguous()
        target = self.placement.owner[channel.target]
        with self._lost_peer_context(target):
            work = dist.isend(x, group=self.groups[channel], group_dst=target, tag=self._tag(channel, action))
        in_flight.append(self._message(action, work, x, target))

    def drain(self) -> None:
        """Wait until the peers have received all messages."""
        for in_flight in self.sends_in_flight.values():
            while in_flight:
                in_flight.popleft().wait()

    def _message(self, action: Action, work: dist.Work | None, buffer: Tensor, peer: int) -> Message:
        assert work is not None
        device = self.mesh.device if action.kind in RECEIVE_KINDS else self.buffer_device
        return Message(action, work, buffer, device, self.peers[peer], self.mesh.pp.timeout)

    @contextmanager
    def _lost_peer_context(self, peer: int) -> Iterator[None]:
        """A context around the start of a message: gloo raises at once if the connection is known to be closed."""
        try:
            yield
        except RuntimeError as error:
            if (why := lost_peer(error)) is None:
                raise
            raise PeerTimeout(f"found {self.peers[peer]} gone: {why}") from error

    def _tag(self, channel: Channel, action: Action) -> int:
        return self.placement.channels.index(channel) * self.microbatches + action.microbatch


class FakeChannels(Channels):
    """Channels that send nothing and receive random tensors: for a rank that runs its stages without the others."""

    def __init__(self, like: Channels):
        self.mesh, self.dtype = like.mesh, like.dtype
        self.generator = torch.Generator(self.mesh.device).manual_seed(0)

    def receive(self, action: Action, shape: tuple[int, ...]) -> Tensor:  # type: ignore[override]
        """Random values: a router would send equal ones to the same experts."""
        return torch.randn(shape, dtype=self.dtype, device=self.mesh.device, generator=self.generator)

    def send(self, action: Action, x: Tensor) -> None: ...

    def drain(self) -> None: ...


# ---- pipeline -------------------------------------------------------------------------------------------------------


Watch = Callable[[Action], AbstractContextManager[None]]


@dataclass(frozen=True)
class Microbatch:
    """The inputs of every stage for some samples: all ranks read them, and only the residual stream is sent."""

    tokens: Tensor  # [B, S]
    positions: TokenPositions
    targets: Targets | None = None  # None: no loss; the last stage returns logits


class Pipeline:
    def __init__(
        self,
        schedule: Schedule,
        rank: int,
        stages: dict[int, Decoder],
        weights: Weights,
        wgrad_queue: WeightGradQueue,
        channels: Channels,
        watch: Watch | None = None,
    ):
        """`rank` is this rank's position along pp, `stages` its stages by global index.

        `watch` makes a context around every action; if halves of a pair run in turns, around each stretch of one."""
        if schedule.count(*COLLECTIVES):
            raise UserError(
                f"schedule {schedule.name} has GATHER, REDUCE or STEP, which are layout.zero's; leave them out",
                "layout.schedule.collectives",
            )
        self.order, self.stages = schedule.ranks[rank], stages
        self.first_microbatch = [action._replace(joined=False) for action in self.order if action.microbatch == 0]
        self.weights, self.wgrad_queue, self.channels = weights, wgrad_queue, channels
        self.watch: Watch = watch or (lambda action: nullcontext())
        self.chunk_of_stage = {stage: index for index, stage in enumerate(stages)}
        # The last actions of each stage that compute gradients: its last I and its last W, or a B, which is both.
        self.last_of_stage = {
            action
            for kinds in (GRADIENT_MAKERS, LAST_READERS)
            for action in {action.stage: action for action in self.order if action.kind in kinds}.values()
        }
        self.pair_runner = self._pair_runner()
        self.overlap_pairs = True  # False: run one half of a pair after the other
        self.peak = 0  # most (stage, microbatch) pairs with a graph or deferred work at once

    def _pair_runner(self) -> PairRunner | None:
        """A runner for pairs in turns, if there is communication to hide and passes do not release weights."""
        if not any(action.joined for action in self.order) or self.weights.reshard_after_forward:
            return None
        dispatch = next(iter(self.stages.values())).ops.dispatch
        if not dispatch.sends_tokens:
            return None
        pair_runner = PairRunner()
        dispatch.yield_turn = pair_runner.yield_turn
        return pair_runner

    def run(
        self, microbatches: Sequence[Microbatch], loss_of: Callable[[Tensor], Tensor], *, only_first: bool = False
    ) -> None:
        """Run all forward and backward passes; `loss_of` turns a microbatch's loss sum into the loss to differentiate.

        `only_first`: one microbatch only, with the actions that the schedule has for the first."""
        self.microbatches, self.loss_of = microbatches, loss_of
        self.received: dict[tuple[Kind, int, int], Message | Tensor] = {}
        self.inputs: dict[tuple[int, int], Tensor] = {}
        self.outputs: dict[tuple[int, int], Tensor] = {}
        self.deferred: dict[tuple[int, int], list[WgradTask]] = {}
        order = iter(self.first_microbatch if only_first else self.order)
        watch: Watch = (lambda action: nullcontext()) if only_first else self.watch
        for action in order:
            if action.joined and self.pair_runner is not None and self.overlap_pairs:
                self.peak = max(self.peak, len(self.outputs) + len(self.deferred) + 1)  # F adds one first
                self.pair_runner.run(partial(self._run_half, action), partial(self._run_half, next(order)))
            else:
                with self._error_context(str(action)), watch(action):
                    self._execute(action)
            beat()
            self.peak = max(self.peak, len(self.outputs) + len(self.deferred))
        with self._error_context("the end of the step"):
            self.channels.drain()

    @contextmanager
    def without_messages(self) -> Iterator[None]:
        """A context around passes that exchange no pipeline messages with other ranks."""
        channels = self.channels
        self.channels = FakeChannels(channels)
        try:
            yield
        finally:
            self.channels = channels

    def forward_only(self, microbatch: Microbatch) -> Tensor | None:
        """Run one microbatch forward through all stages; the rank of the last stage returns its output."""
        beat()
        previous: Tensor | None = None  # output of the previous stage, if it is on this rank
        last = None
        for stage, model in self.stages.items():
            with self._error_context(f"{Action(Kind.FORWARD, stage, 0)} without gradients"):
                x = microbatch.tokens
                if not model.stage.first:
                    received = Action(Kind.RECV_ACTIVATION, stage, 0)
                    shape = self._shape(microbatch)
                    x = previous if previous is not None else self.channels.receive(received, shape).wait()
                y = model(x, microbatch.positions, microbatch.targets)
                previous = None
                if model.stage.last:
                    last = y
                elif stage + 1 in self.stages:
                    previous = y
                else:
                    self.channels.send(Action(Kind.SEND_ACTIVATION, stage, 0), y)
        with self._error_context("the end of the forward pass"):
            self.channels.drain()
        return last

    @contextmanager
    def _error_context(self, what: str) -> Iterator[None]:
        """A context in which errors say what this rank was doing; a lost peer's becomes one sentence."""
        mesh = self.channels.mesh
        try:
            with waiting(what, mesh, mesh.tp, mesh.cp, mesh.dp_cp, *mesh.expert_axes()):  # collectives inside an action
                yield
        except PeerTimeout as error:
            raise PeerLost(f"{who(mesh)}: {what} {error}") from error.__cause__
        except PeerLost:
            raise
        except Exception as error:
            error.add_note(f"{who(mesh)} was at {what}")
            raise

    def _shape(self, microbatch: Microbatch) -> tuple[int, ...]:
        """The shape of the residual stream on this rank, as it is sent."""
        model = next(iter(self.stages.values()))
        return (*model.ops.residual_positions(microbatch.positions).position_ids.shape, model.spec.hidden)

    def _execute(self, action: Action) -> None:
        kind, stage, microbatch, _ = action
        if kind in GRADIENT_MAKERS or kind in LAST_READERS:
            self.weights.microbatch_number = microbatch
        match kind:
            case Kind.FORWARD:
                self._forward(action)
            case Kind.BACKWARD if self.weights.always_split:
                self._input_half(action)
                self._weight_half(action)
            case Kind.BACKWARD:
                with self.weights.microbatch(last=action in self.last_of_stage, stage=self.chunk_of_stage[stage]):
                    self._backward(action)
            case Kind.INPUT_GRAD:
                self._input_half(action)
            case Kind.WEIGHT_GRAD:
                self._weight_half(action)
            case Kind.RECV_ACTIVATION | Kind.RECV_GRADIENT:
                self.received[kind, stage, microbatch] = self.channels.receive(
                    action, self._shape(self.microbatches[microbatch])
                )
            case Kind.SEND_ACTIVATION:
                self.channels.send(action, self.outputs[stage, microbatch].detach())
            case Kind.SEND_GRADIENT:
                self.channels.send(action, self._input_gradient(stage, microbatch))
            case _:
                raise ValueError(f"{action}: the pipeline does not run actions of the kind {kind}")

    def _run_half(self, action: Action) -> None:
        """Run one half of an overlapped pair."""
        assert self.pair_runner is not None
        with self._error_context(str(action)), self.pair_runner.watched(lambda: self.watch(action)):
            self._execute(action)

    def _input_half(self, action: Action) -> None:
        last, chunk = action in self.last_of_stage, self.chunk_of_stage[action.stage]
        with self.weights.microbatch(last=last, stage=chunk, part="inputs"), self.wgrad_queue.collecting() as tasks:
            self._backward(action)
        self.deferred[action.stage, action.microbatch] = tasks

    def _weight_half(self, action: Action) -> None:
        last, chunk = action in self.last_of_stage, self.chunk_of_stage[action.stage]
        with self.weights.microbatch(last=last, stage=chunk, part="weights"):
            for task in self.deferred.pop((action.stage, action.microbatch)):
                task()

    def _forward(self, action: Action) -> None:
        stage, index = action.stage, action.microbatch
        model, microbatch = self.stages[stage], self.microbatches[index]
        x = microbatch.tokens
        if not model.stage.first:
            x = self._pop_input(action, Kind.RECV_ACTIVATION).requires_grad_()
            self.inputs[stage, index] = x
        y = model(x, microbatch.positions, microbatch.targets)
        self.outputs[stage, index] = y if not model.stage.last else self.loss_of(y)
        if stage + 1 in self.stages:  # the next stage is on this rank
            self.received[Kind.RECV_ACTIVATION, stage + 1, index] = y.detach()

    def _backward(self, action: Action) -> None:
        stage, index = action.stage, action.microbatch
        model, y = self.stages[stage], self.outputs.pop((stage, index))
        output_grad = None if model.stage.last else self._pop_input(action, Kind.RECV_GRADIENT)
        torch.autograd.backward(y, output_grad)
        if stage - 1 in self.stages:
            self.received[Kind.RECV_GRADIENT, stage - 1, index] = self._input_gradient(stage, index)

    def _input_gradient(self, stage: int, microbatch: int) -> Tensor:
        gradient = self.inputs.pop((stage, microbatch)).grad
        assert gradient is not None
        return gradient

    def _pop_input(self, action: Action, kind: Kind) -> Tensor:
        """The input of an action: a posted message, which is waited for, or the tensor of a stage on this rank."""
        arriving = self.received.pop((kind, action.stage, action.microbatch))
        return arriving if isinstance(arriving, Tensor) else arriving.wait()
