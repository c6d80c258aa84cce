"""Actions: a kind, a stage and a microbatch. A schedule is a list of them for each rank, which runs it in order:

  F, B, I, W      compute, in this order, one at a time. B is the whole backward; I (gradient of the input) and W
                  (gradient of the weights) are its two halves.
  RECV_A, RECV_G  post the receive of an activation or of a gradient, and go on; the consumer waits for it.
  SEND_A, SEND_G  start to send the result, and go on; see `Schedule.buffers` for when it must wait. On NCCL either may
                  block its rank until the peer has also reached it (`deadlock.rendezvous`).
  GATHER, REDUCE  the parameter and gradient collectives of a stage; they run beside compute.
  STEP            the optimizer, on one stage.

A stage is always the rank's own: RECV_A3.5 receives the *input* of stage 3, SEND_G3.5 sends the gradient of that input
back. Written as text, an action is its kind, stage and microbatch: `F3.5`; an action for all microbatches at once has
no second number: `STEP3`.
"""

import re
from enum import StrEnum
from typing import NamedTuple

ALL_MICROBATCHES = -1  # the microbatch of an action that serves every microbatch


class Kind(StrEnum):
    """What an action does. The value is the word in the text form."""

    FORWARD = "F"
    BACKWARD = "B"
    INPUT_GRAD = "I"
    WEIGHT_GRAD = "W"
    SEND_ACTIVATION = "SEND_A"
    RECV_ACTIVATION = "RECV_A"
    SEND_GRADIENT = "SEND_G"
    RECV_GRADIENT = "RECV_G"
    GATHER = "GATHER"
    REDUCE = "REDUCE"
    STEP = "STEP"


# The kinds by their bare names: shorter to read, and an attribute of an Enum costs a third of a microsecond each time.
FORWARD, BACKWARD, INPUT_GRAD, WEIGHT_GRAD = Kind.FORWARD, Kind.BACKWARD, Kind.INPUT_GRAD, Kind.WEIGHT_GRAD
SEND_ACTIVATION, RECV_ACTIVATION = Kind.SEND_ACTIVATION, Kind.RECV_ACTIVATION
SEND_GRADIENT, RECV_GRADIENT = Kind.SEND_GRADIENT, Kind.RECV_GRADIENT
GATHER, REDUCE, STEP = Kind.GATHER, Kind.REDUCE, Kind.STEP

COMPUTE_KINDS = frozenset({FORWARD, BACKWARD, INPUT_GRAD, WEIGHT_GRAD})
SEND_KINDS = frozenset({SEND_ACTIVATION, SEND_GRADIENT})
RECEIVE_KINDS = frozenset({RECV_ACTIVATION, RECV_GRADIENT})
MESSAGE_KINDS = (RECV_ACTIVATION, SEND_ACTIVATION, RECV_GRADIENT, SEND_GRADIENT)
BACKWARD_HALVES = (INPUT_GRAD, WEIGHT_GRAD)  # of a backward
COLLECTIVES = (GATHER, REDUCE, STEP)  # what belongs to the parameters of a stage, not to its data
LAST_READERS = frozenset({BACKWARD, WEIGHT_GRAD})  # after these a microbatch's activations are free
GRADIENT_MAKERS = frozenset({BACKWARD, INPUT_GRAD})  # these make the gradient that the stage before needs


class Action(NamedTuple):
    """One thing a rank does. `joined`: this F runs overlapped with the B after it, as one (DualPipe's F&B)."""

    kind: Kind
    stage: int
    microbatch: int = ALL_MICROBATCHES
    joined: bool = False

    def __str__(self) -> str:
        place = f"{self.kind}{self.stage}"
        return place if self.microbatch == ALL_MICROBATCHES else f"{place}.{self.microbatch}"


class Channel(NamedTuple):
    """One FIFO between two ranks: what crosses the boundary between stages `boundary` and `boundary + 1`, one way."""

    boundary: int
    gradients: bool

    @property
    def source(self) -> int:
        """The stage that sends."""
        return self.boundary + self.gradients

    @property
    def target(self) -> int:
        """The stage that receives."""
        return self.boundary + (not self.gradients)

    @property
    def send(self) -> Kind:
        return SEND_GRADIENT if self.gradients else SEND_ACTIVATION

    @property
    def receive(self) -> Kind:
        return RECV_GRADIENT if self.gradients else RECV_ACTIVATION

    @property
    def compute(self) -> frozenset[Kind]:
        """What makes the messages at their source, and needs them at their target."""
        return GRADIENT_MAKERS if self.gradients else frozenset({FORWARD})

    def __str__(self) -> str:
        what = "gradients" if self.gradients else "activations"
        return f"{what} of stage {self.source} to stage {self.target}"


_TOKEN = re.compile(r"([A-Z_]+)([0-9]{1,9})(?:\.([0-9]{1,9}))?")


def parse_token(token: str) -> list[Action]:
    """'F3.5' -> one action, 'F3.5&B4.2' -> the two of a joined pair, the F first. Raises ValueError with the reason."""
    parts = token.split("&")
    if len(parts) > 2:
        raise ValueError(f"{token!r} joins {len(parts)} actions; two can be joined")
    actions = [_parse_action(part) for part in parts]
    if len(actions) == 2:
        first, second = (action.kind for action in actions)
        if {first, second} != {FORWARD, BACKWARD}:
            raise ValueError(f"{token!r} joins {first} with {second}; only an F and a B can be joined")
        actions.sort(key=lambda action: action.kind is BACKWARD)
        actions[0] = actions[0]._replace(joined=True)
    return actions


def _parse_action(text: str) -> Action:
    match = _TOKEN.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not an action; an action reads like F3.5: kind, stage, microbatch")
    word, stage, microbatch = match.groups()
    if word not in Kind.__members__.values():
        raise ValueError(f"{text!r} has the unknown kind {word!r}; known: {', '.join(Kind)}")
    return Action(Kind(word), int(stage), ALL_MICROBATCHES if microbatch is None else int(microbatch))


def tokens(order: tuple[Action, ...]) -> list[str]:
    """The text of a rank's actions, joined pairs as one token."""
    words: list[str] = []
    glued = False
    for action in order:
        if glued:
            words[-1] += f"&{action}"
        else:
            words.append(str(action))
        glued = action.joined
    return words
