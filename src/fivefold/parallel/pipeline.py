"""The pipeline: runs a Schedule, action by action, on this rank's stages.

The Schedule is the very object that is checked, simulated and drawn. Receives are posted where it says and waited for
by their consumers; sends are handed over and drained at the end. What a stage computes is the same in every schedule,
and gradients of a stage come in ascending microbatches, so that their sums are those of a single device.

Where experts send tokens to other ranks, the F and the B of an overlapped pair run in turns: each waits for its
messages while the other computes (`overlap.py`). What they compute is the same to the bit. Otherwise the F runs, and
then the B: a dense model has nothing to hide, and FSDP2 takes a block's weights away after each of its passes, which
may be those that the other half has just asked for.
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
    RECEIVES,
    RECV_ACTIVATION,
    SEND_ACTIVATION,
    Action,
    Channel,
    Kind,
)
from fivefold.schedules.schedule import Schedule
from fivefold.support.errors import PeerLost, UserError

# ---- channels -------------------------------------------------------------------------------------------------------
# Messages between pipeline stages. A channel crosses one boundary, one way, in order.
#
# Shapes are known beforehand, so nothing but the tensors travels. On gloo a message has a tag, its channel's and its
# microbatch's. NCCL ignores tags and matches in order: there all messages from one rank to another share a group
# (`Mesh.p2p_group`), and both ranks start them in the schedule's order, which `schedules/check.py` proves to be one.


class PeerTimeout(Exception):
    """A peer did not send, or did not take, a message; the text says how long who was waited for, and with what end."""


@dataclass(frozen=True)
class Message:
    """One tensor on its way, by the RECV or SEND that started it."""

    action: Action
    work: dist.Work
    buffer: Tensor  # it must stay as it is until it is gone, or has come
    device: torch.device  # where it is wanted
    peer: str
    timeout: timedelta

    def wait(self) -> Tensor:
        """Until it has come, or has been taken."""
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
        if self.action.kind in RECEIVES:
            return f"its {what} from {self.peer}"
        return f"{self.peer} to take the {what} of {self.action}"


class Channels:
    def __init__(self, schedule: Schedule, mesh: Mesh, dtype: torch.dtype):
        self.placement, self.buffers, self.mesh = schedule.placement, schedule.buffers, mesh
        self.dtype, self.microbatches = dtype, schedule.microbatches
        self.place = torch.device("cpu") if mesh.pp.staged else mesh.device
        owner = self.placement.owner
        channels = self.placement.channels
        self.groups = {channel: mesh.p2p_group(owner[channel.source], owner[channel.target]) for channel in channels}
        self.sent: dict[Channel, deque[Message]] = {channel: deque() for channel in channels}
        self.peers = [f"pipeline rank {peer} (rank {rank})" for peer, rank in enumerate(mesh.pp.ranks)]

    def receive(self, action: Action, shape: tuple[int, ...]) -> Message:
        """Post the receive of a RECV action."""
        gradients = action.kind is not RECV_ACTIVATION
        channel = Channel(action.stage - (not gradients), gradients)
        source = self.placement.owner[channel.source]
        buffer = torch.empty(shape, dtype=self.dtype, device=self.place)
        with self._reaching(source):
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
        with self._reaching(target):
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
        return Message(action, work, buffer, device, self.peers[peer], self.mesh.pp.timeout)

    @contextmanager
    def _reaching(self, peer: int) -> Iterator[None]:
        """Around the start of a message: gloo refuses those of a connection that is known to be closed."""
        try:
            yield
        except RuntimeError as error:
            if (why := lost_peer(error)) is None:
                raise
            raise PeerTimeout(f"found {self.peers[peer]} gone: {why}") from error

    def _tag(self, channel: Channel, action: Action) -> int:
        return self.placement.channels.index(channel) * self.microbatches + action.microbatch


class FakeChannels(Channels):
    """Channels that send nothing, and make up what is to be received: for a rank that runs its stages by itself."""

    def __init__(self, like: Channels):
        self.mesh, self.dtype = like.mesh, like.dtype
        self.numbers = torch.Generator(self.mesh.device).manual_seed(0)

    def receive(self, action: Action, shape: tuple[int, ...]) -> Tensor:  # type: ignore[override]
        """Numbers that are unlike each other: of equal ones a router would send all to the same experts."""
        return torch.randn(shape, dtype=self.dtype, device=self.mesh.device, generator=self.numbers)

    def send(self, action: Action, x: Tensor) -> None: ...

    def drain(self) -> None: ...


# ---- pipeline -------------------------------------------------------------------------------------------------------


Watch = Callable[[Action], AbstractContextManager[None]]


@dataclass(frozen=True)
class Microbatch:
    """What every stage may need of some samples: they are read on all ranks, and only the residual stream travels."""

    tokens: Tensor  # [B, S]
    positions: TokenPositions
    targets: Targets | None = None  # none: nothing is learned, and the last stage gives logits


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
        """`rank` is this one's place along pp, `stages` those it owns by number.

        `watch` surrounds every action; of a half of a pair that runs in turns, each stretch."""
        if schedule.count(*COLLECTIVES):
            raise UserError(
                f"schedule {schedule.name} has GATHER, REDUCE or STEP, which are layout.zero's; leave them out"
            )
        self.order, self.stages = schedule.ranks[rank], stages
        self.first_microbatch = [action._replace(joined=False) for action in self.order if action.microbatch == 0]
        self.weights, self.wgrad_queue, self.channels = weights, wgrad_queue, channels
        self.watch: Watch = watch or (lambda action: nullcontext())
        self.chunk = {stage: number for number, stage in enumerate(stages)}
        # The last of each stage to make gradients in I and in W; B is both, and a schedule may use all three.
        self.last_of_stage = {
            action
            for kinds in (GRADIENT_MAKERS, LAST_READERS)
            for action in {action.stage: action for action in self.order if action.kind in kinds}.values()
        }
        self.pair_runner = self._pair_runner()
        self.in_turns = True  # off: one half of a pair after the other
        self.peak = 0  # the most (stage, microbatch) pairs whose graph or deferred work was held at once, so far

    def _pair_runner(self) -> PairRunner | None:
        """Where pairs run in turns: there is something to wait for, and weights stay where they are."""
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
        """All forward and backward passes; `loss_of` makes of a microbatch's loss sum what is differentiated.

        `only_first`: those of one microbatch, in the schedule's order for the first."""
        self.microbatches, self.loss_of = microbatches, loss_of
        self.arriving: dict[tuple[Kind, int, int], Message | Tensor] = {}
        self.inputs: dict[tuple[int, int], Tensor] = {}
        self.outputs: dict[tuple[int, int], Tensor] = {}
        self.deferred: dict[tuple[int, int], list[WgradTask]] = {}
        order = iter(self.first_microbatch if only_first else self.order)
        watch: Watch = (lambda action: nullcontext()) if only_first else self.watch
        for action in order:
            if action.joined and self.pair_runner is not None and self.in_turns:
                self.peak = max(self.peak, len(self.outputs) + len(self.deferred) + 1)  # the F's, while the B's is held
                self.pair_runner.run(partial(self._half, action), partial(self._half, next(order)))
            else:
                with self._named(str(action)), watch(action):
                    self._do(action)
            beat()
            self.peak = max(self.peak, len(self.outputs) + len(self.deferred))
        with self._named("the end of the step"):
            self.channels.drain()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Around passes in which this rank neither waits for its neighbours' messages nor sends them any."""
        channels = self.channels
        self.channels = FakeChannels(channels)
        try:
            yield
        finally:
            self.channels = channels

    def forward_only(self, microbatch: Microbatch) -> Tensor | None:
        """Run one microbatch forward through all stages; the rank of the last stage returns its output."""
        beat()
        previous: Tensor | None = None  # output of the stage before, where that is on this rank too
        last = None
        for stage, model in self.stages.items():
            with self._named(f"{Action(Kind.FORWARD, stage, 0)} without gradients"):
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
        with self._named("the end of the forward pass"):
            self.channels.drain()
        return last

    @contextmanager
    def _named(self, what: str) -> Iterator[None]:
        """Errors inside say what this rank was doing; an error for want of a peer becomes one sentence."""
        mesh = self.channels.mesh
        try:
            with waiting(what, mesh, mesh.tp, mesh.cp, mesh.dp_cp, *mesh.expert_axes()):  # of collectives in an action
                yield
        except PeerTimeout as error:
            raise PeerLost(f"{who(mesh)}: {what} {error}") from error.__cause__
        except PeerLost:
            raise
        except Exception as error:
            error.add_note(f"{who(mesh)} was at {what}")
            raise

    def _shape(self, microbatch: Microbatch) -> tuple[int, ...]:
        """Of the residual stream that travels."""
        model = next(iter(self.stages.values()))
        return (*model.ops.residual(microbatch.positions).position_ids.shape, model.spec.hidden)

    def _do(self, action: Action) -> None:
        kind, stage, number, _ = action
        place = stage, number
        if kind in GRADIENT_MAKERS or kind in LAST_READERS:
            self.weights.microbatch_number = number
        match kind:
            case Kind.FORWARD:
                self._forward(action)
            case Kind.BACKWARD if self.weights.always_split:
                self._input_half(action)
                self._weight_half(action)
            case Kind.BACKWARD:
                with self.weights.microbatch(action in self.last_of_stage, self.chunk[stage]):
                    self._backward(action)
            case Kind.INPUT_GRAD:
                self._input_half(action)
            case Kind.WEIGHT_GRAD:
                self._weight_half(action)
            case Kind.RECV_ACTIVATION | Kind.RECV_GRADIENT:
                self.arriving[kind, stage, number] = self.channels.receive(
                    action, self._shape(self.microbatches[number])
                )
            case Kind.SEND_ACTIVATION:
                self.channels.send(action, self.outputs[place].detach())
            case Kind.SEND_GRADIENT:
                self.channels.send(action, self._input_gradient(place))
            case _:
                raise ValueError(f"{action}: the pipeline does not run actions of the kind {kind}")

    def _half(self, action: Action) -> None:
        """Of an overlapped pair."""
        assert self.pair_runner is not None
        with self._named(str(action)), self.pair_runner.watched(lambda: self.watch(action)):
            self._do(action)

    def _input_half(self, action: Action) -> None:
        stage, last = action.stage, action in self.last_of_stage
        with self.weights.microbatch(last, self.chunk[stage], "inputs"), self.wgrad_queue.collecting() as tasks:
            self._backward(action)
        self.deferred[stage, action.microbatch] = tasks

    def _weight_half(self, action: Action) -> None:
        with self.weights.microbatch(action in self.last_of_stage, self.chunk[action.stage], "weights"):
            for task in self.deferred.pop((action.stage, action.microbatch)):
                task()

    def _forward(self, action: Action) -> None:
        stage, number = action.stage, action.microbatch
        model, microbatch = self.stages[stage], self.microbatches[number]
        x = microbatch.tokens
        if not model.stage.first:
            x = self._take(action, Kind.RECV_ACTIVATION).requires_grad_()
            self.inputs[stage, number] = x
        y = model(x, microbatch.positions, microbatch.targets)
        self.outputs[stage, number] = y if not model.stage.last else self.loss_of(y)
        if stage + 1 in self.stages:  # a neighbour on this very rank
            self.arriving[Kind.RECV_ACTIVATION, stage + 1, number] = y.detach()

    def _backward(self, action: Action) -> None:
        stage, number = action.stage, action.microbatch
        model, y = self.stages[stage], self.outputs.pop((stage, number))
        output_grad = None if model.stage.last else self._take(action, Kind.RECV_GRADIENT)
        torch.autograd.backward(y, output_grad)
        if stage - 1 in self.stages:
            self.arriving[Kind.RECV_GRADIENT, stage - 1, number] = self._input_gradient((stage, number))

    def _input_gradient(self, place: tuple[int, int]) -> Tensor:
        gradient = self.inputs.pop(place).grad
        assert gradient is not None
        return gradient

    def _take(self, action: Action, kind: Kind) -> Tensor:
        """What an action consumes: a message that has been asked for, or what a neighbour on this rank left."""
        arriving = self.arriving.pop((kind, action.stage, action.microbatch))
        return arriving if isinstance(arriving, Tensor) else arriving.wait()
