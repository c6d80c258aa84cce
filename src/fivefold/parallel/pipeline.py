"""The pipeline: runs a Schedule, action by action, on this rank's stages.

The Schedule is the very object that is checked, simulated and drawn. Receives are posted where it says and waited for
by their consumers; sends are handed over and drained at the end. What a stage computes is the same in every schedule,
and gradients of a stage come in ascending microbatches, so that their sums are those of a single device.

Where experts send tokens to other ranks, the F and the B of a joined pair run in turns: each waits for its messages
while the other computes (`baton`). What they compute is the same to the bit. Otherwise the F runs, and then the B: a
dense model has nothing to hide, and FSDP2 takes a block's weights away after each of its passes, which may be those
that the other half has just asked for.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from fivefold.launch.heartbeat import beat
from fivefold.model.decoder import Decoder
from fivefold.model.head import Targets
from fivefold.model.positions import TokenPositions
from fivefold.parallel.baton import Baton
from fivefold.parallel.channels import Channels, Message, NoChannels, Silence
from fivefold.parallel.deferred_wgrad import WeightGradQueue, Work
from fivefold.parallel.peer_errors import waiting, who
from fivefold.parallel.zero import Weights
from fivefold.schedule.actions import COLLECTIVES, GRADIENT_MAKERS, LAST_READERS, Action, Kind
from fivefold.schedule.schedule import Schedule
from fivefold.support.errors import PeerLost, UserError

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
        later: WeightGradQueue,
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
        self.first = [action._replace(joined=False) for action in self.order if action.microbatch == 0]
        self.weights, self.later, self.channels = weights, later, channels
        self.watch: Watch = watch or (lambda action: nullcontext())
        self.chunk = {stage: number for number, stage in enumerate(stages)}
        # The last of each stage to make gradients in I and in W; B is both, and a schedule may use all three.
        self.final = {
            action
            for kinds in (GRADIENT_MAKERS, LAST_READERS)
            for action in {action.stage: action for action in self.order if action.kind in kinds}.values()
        }
        self.baton = self._baton()
        self.in_turns = True  # off: one half of a pair after the other
        self.peak = 0  # the most (stage, microbatch) pairs whose graph or deferred work was held at once, so far

    def _baton(self) -> Baton | None:
        """Where pairs run in turns: there is something to wait for, and weights stay where they are."""
        if not any(action.joined for action in self.order) or self.weights.takes_away:
            return None
        dispatch = next(iter(self.stages.values())).ops.dispatch
        if not dispatch.travels:
            return None
        baton = Baton()
        dispatch.hand_over = baton.hand_over
        return baton

    def run(self, microbatches: Sequence[Microbatch], loss_of: Callable[[Tensor], Tensor], first: bool = False) -> None:
        """All forward and backward passes; `loss_of` makes of a microbatch's loss sum what is differentiated.

        `first`: those of one microbatch, in the schedule's order for the first."""
        self.microbatches, self.loss_of = microbatches, loss_of
        self.arriving: dict[tuple[Kind, int, int], Message | Tensor] = {}
        self.inputs: dict[tuple[int, int], Tensor] = {}
        self.outputs: dict[tuple[int, int], Tensor] = {}
        self.deferred: dict[tuple[int, int], list[Work]] = {}
        order = iter(self.first if first else self.order)
        watch: Watch = (lambda action: nullcontext()) if first else self.watch
        for action in order:
            if action.joined and self.baton is not None and self.in_turns:
                self.peak = max(self.peak, len(self.outputs) + len(self.deferred) + 1)  # the F's, while the B's is held
                self.baton.run(partial(self._half, action), partial(self._half, next(order)))
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
        self.channels = NoChannels(channels)
        try:
            yield
        finally:
            self.channels = channels

    def forward_only(self, microbatch: Microbatch) -> Tensor | None:
        """Run one microbatch forward through all stages; the rank of the last stage returns its output."""
        beat()
        left: Tensor | None = None  # by the stage before, where it is on this rank too
        last = None
        for stage, model in self.stages.items():
            with self._named(f"{Action(Kind.FORWARD, stage, 0)} without gradients"):
                x = microbatch.tokens
                if not model.stage.first:
                    received = Action(Kind.RECV_ACTIVATION, stage, 0)
                    x = left if left is not None else self.channels.receive(received, self._shape(microbatch)).wait()
                y = model(x, microbatch.positions, microbatch.targets)
                left = None
                if model.stage.last:
                    last = y
                elif stage + 1 in self.stages:
                    left = y
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
            with waiting(what, mesh, mesh.tp, mesh.cp, mesh.data, *mesh.of_experts()):  # of collectives in an action
                yield
        except Silence as error:
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
            self.weights.number = number
        match kind:
            case Kind.FORWARD:
                self._forward(action)
            case Kind.BACKWARD if self.weights.halves:
                self._input_half(action)
                self._weight_half(action)
            case Kind.BACKWARD:
                with self.weights.microbatch(action in self.final, self.chunk[stage]):
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
        """Of a joined pair."""
        assert self.baton is not None
        with self._named(str(action)), self.baton.watched(lambda: self.watch(action)):
            self._do(action)

    def _input_half(self, action: Action) -> None:
        stage, last = action.stage, action in self.final
        with self.weights.microbatch(last, self.chunk[stage], "inputs"), self.later.collecting() as works:
            self._backward(action)
        self.deferred[stage, action.microbatch] = works

    def _weight_half(self, action: Action) -> None:
        with self.weights.microbatch(action in self.final, self.chunk[action.stage], "weights"):
            for work in self.deferred.pop((action.stage, action.microbatch)):
                work()

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
        here = self.arriving.pop((kind, action.stage, action.microbatch))
        return here if isinstance(here, Tensor) else here.wait()
