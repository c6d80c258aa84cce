"""V-Half and V-Min: half or a third of 1F1B's memory, from a building block repeated every six slots (Qi et al. 2024).

Stages lie in a V. One microbatch's F0, F1, I1, I0 stand at fixed offsets on each rank, the next microbatch's six
slots later, and so on; the offsets decide how long an activation lives, and with it the peak. The two free slots of
each six take the W. That is the repeated pattern. It is loose at both ends, so it is then played slot by slot: a
rank whose next action is not ready pulls a later one forward, as long as that does not raise the peak.

p is the number of ranks, m of microbatches; rank r owns stages r and 2p-1-r.
"""

from collections import defaultdict, deque
from itertools import accumulate

from fivefold.schedules.actions import FORWARD, INPUT_GRAD, WEIGHT_GRAD, Action, Kind
from fivefold.schedules.communication import Order, wire
from fivefold.schedules.info import ScheduleInfo, vee
from fivefold.schedules.schedule import Bounds, Placement, Schedule, peak_live

PERIOD_SLOTS = 6  # slots
Offsets = tuple[int, int, int, int]  # of F0, F1, I1, I0
_CHANGE = {FORWARD: 1, INPUT_GRAD: 0, WEIGHT_GRAD: -1}  # of the number of live activations, by an action


def v_half(p: int, m: int) -> Schedule:
    """About half of 1F1B's activations, p/2 + 1, and less than half of its bubble."""
    delta = 0 if p % 2 else 3
    offsets = [(2 * r, 3 * p - r - 2, 3 * p + delta + 2 * r - 1, 6 * p + delta - r - 2) for r in range(p)]
    return _repeat_pattern("v-half", p, m, offsets)


def v_min(p: int, m: int) -> Schedule:
    """About a third of 1F1B's activations, for two thirds of its bubble."""
    delta = 0 if p % 3 else 2
    offsets = [(r, 2 * p - r - 1, 2 * p + delta + r, 4 * p + delta - r - 1) for r in range(p)]
    return _repeat_pattern("v-min", p, m, offsets)


V_HALF = ScheduleInfo(
    "v-half",
    lambda r: v_half(r.p, r.m),
    vee,
    chunks=2,
    splits=True,
    fill=0.8,
    live=lambda p, m, v: p / 2 + 1.0,
    planned=(2,),
)
V_MIN = ScheduleInfo("v-min", lambda r: v_min(r.p, r.m), vee, chunks=2, splits=True, live=lambda p, m, v: p / 3 + 2.0)


def _repeat_pattern(name: str, p: int, m: int, offsets: list[Offsets]) -> Schedule:
    """The schedule of a building block, given the offsets of each rank."""
    patterns = [_pattern(offsets[rank], (rank, 2 * p - 1 - rank), m) for rank in range(p)]
    peak = max(map(peak_live, patterns))
    orders, slots = _play(patterns, 2 * p, peak)
    return wire(name, Placement.vee(p), m, orders, promise=Bounds((peak,) * p, slots))


def _pattern(offsets: Offsets, stages: tuple[int, int], m: int) -> Order:
    """One rank's actions as the building block has them, each W in the first free slot after its I."""
    down, up = stages
    block = ((FORWARD, down), (FORWARD, up), (INPUT_GRAD, up), (INPUT_GRAD, down))
    fixed = {
        offset + PERIOD_SLOTS * k: Action(kind, stage, k)
        for offset, (kind, stage) in zip(offsets, block, strict=True)
        for k in range(m)
    }
    order: Order = []
    waiting: deque[Action] = deque()
    for slot in range(max(fixed) + 1):
        if slot in fixed:
            action = fixed[slot]
            order.append(action)
            if action.kind is INPUT_GRAD:
                waiting.append(Action(WEIGHT_GRAD, action.stage, action.microbatch))
        elif waiting:
            order.append(waiting.popleft())
    return order + list(waiting)


def _play(patterns: list[Order], stages: int, peak: int) -> tuple[list[Order], int]:
    """Run the patterns slot by slot, pulling actions forward into empty slots; returns the orders and their slots."""
    done: defaultdict[tuple[Kind, int], int] = defaultdict(int)  # (kind, stage) -> microbatches through
    players = [_Player(pattern, stages, peak, done) for pattern in patterns]
    slots = 0
    while any(player.left for player in players):
        chosen = [player.choose() for player in players]  # all of them, before any result of this slot is known
        for player, place in zip(players, chosen, strict=True):
            if place is not None:
                player.take(place)
        slots += 1
    return [player.played for player in players], slots


class _Player:
    """One rank: its pattern, which of its actions are played already, and how many activations it holds."""

    def __init__(self, pattern: Order, stages: int, peak: int, done: defaultdict[tuple[Kind, int], int]) -> None:
        self.pattern, self.stages, self.peak, self.done = pattern, stages, peak, done
        self.places: dict[tuple[Kind, int], list[int]] = {}
        for place, action in enumerate(pattern):
            self.places.setdefault(action[:2], []).append(place)
        self.first_stage = min(action.stage for action in pattern)
        self.taken = [False] * len(pattern)
        self.front = 0  # nothing before this place is left
        self.live = 0
        self.left = len(pattern)
        self.played: Order = []

    def choose(self) -> int | None:
        """The place of the first action in the pattern that can run now; None when none can."""
        for place in self.candidates():
            action = self.pattern[place]
            if self.ready(action) and (action.kind is not FORWARD or self.fits(place)):
                return place
        return None

    def candidates(self) -> list[int]:
        """The next place of each kind and stage, in the order of the pattern."""
        heads = [places[self.done[key]] for key, places in self.places.items() if self.done[key] < len(places)]
        if self.done[FORWARD, self.first_stage] == len(self.places[FORWARD, self.first_stage]):
            # Cool-down: no new activation can come, so weight gradients wait until nothing else can run.
            return sorted(heads, key=lambda place: (self.pattern[place].kind is WEIGHT_GRAD, place))
        return sorted(heads)

    def ready(self, action: Action) -> bool:
        """Whether what an action needs is done, on this rank and on its neighbours."""
        kind, stage, k, _ = action
        if kind is FORWARD:
            return stage == 0 or self.done[FORWARD, stage - 1] > k
        if kind is WEIGHT_GRAD:
            return self.done[INPUT_GRAD, stage] > k
        comes_back = stage == self.stages - 1 or self.done[INPUT_GRAD, stage + 1] > k
        return comes_back and self.done[FORWARD, stage] > k

    def fits(self, place: int) -> bool:
        """Whether a forward may run now: the actions left before it in the pattern must not pass the peak after it."""
        left = [self.pattern[n] for n in range(self.front, place) if not self.taken[n]]
        live = accumulate((_CHANGE[action.kind] for action in left), initial=self.live + 1)
        return all(count <= self.peak for count in live)

    def take(self, place: int) -> None:
        """Play the action at a place of the pattern."""
        action = self.pattern[place]
        self.played.append(action)
        self.done[action[:2]] += 1
        self.live += _CHANGE[action.kind]
        self.left -= 1
        self.taken[place] = True
        while self.front < len(self.taken) and self.taken[self.front]:
            self.front += 1
