"""The zero-bubble schedules: ZB-H1, ZB-H2, ZB-V, V-Half, V-Min and DualPipeV.

ZB-H1 and ZB-H2: split the backward, and fill the bubbles of 1F1B with weight gradients (Qi et al. 2023).

I keeps the pipeline going, W can wait. Rank r defers its W by r (H1) or 2r (H2) microbatches, so that each rank has
just enough of them left to fill its own tail. H1 lives in 1F1B's memory; H2 warms up twice as deep and, where F, I and
W take the same time, leaves no gap between its first and last action.
"""

from collections import Counter, defaultdict, deque
from itertools import accumulate

from fivefold.schedules.actions import BACKWARD, FORWARD, INPUT_GRAD, WEIGHT_GRAD, Action, Kind
from fivefold.schedules.build import Order, ScheduleInfo, vee, wire
from fivefold.schedules.schedule import Bounds, Placement, Schedule, peak_live
from fivefold.support.errors import UserError


def zb_h1(p: int, m: int) -> Schedule:
    """Every rank holds p activations; the bubble is (p - 1)(F + I - W)."""
    slots = max(3 * m + p - 1, 2 * (m + p) - 1)
    return _handcrafted("zb-h1", p, m, depth=1, promise=Bounds((min(m, p),) * p, slots))


def zb_h2(p: int, m: int) -> Schedule:
    """Every rank holds 2p - 1 activations; the bubble of its span is (p - 1)(F + I - 2W)."""
    slots = 3 * m + p - 1 if m >= 2 * p - 1 else None
    return _handcrafted("zb-h2", p, m, depth=2, promise=Bounds((min(m, 2 * p - 1),) * p, slots))


def _handcrafted(name: str, p: int, m: int, depth: int, promise: Bounds) -> Schedule:
    orders = [_order(p, m, rank, depth) for rank in range(p)]
    return wire(name, Placement.single(p), m, orders, promise=promise)


def _order(p: int, m: int, rank: int, depth: int) -> Order:
    warm_up = min(m, depth * (p - 1 - rank))
    delay = depth * rank

    order = [Action(FORWARD, rank, k) for k in range(warm_up)]
    # Steady state: F I W, with W `delay` microbatches behind; without F once all of them have run.
    for k in range(m):
        if warm_up + k < m:
            order.append(Action(FORWARD, rank, warm_up + k))
        order.append(Action(INPUT_GRAD, rank, k))
        if k >= delay:
            order.append(Action(WEIGHT_GRAD, rank, k - delay))
    # Cool-down: the delayed weight gradients fill the tail.
    return order + [Action(WEIGHT_GRAD, rank, k) for k in range(max(0, m - delay), m)]


ZB_H1 = ScheduleInfo(
    "zb-h1", lambda r: zb_h1(r.p, r.m), splits=True, bubble="(p-1)(F+I-W)", fill=0.4, waits=True, planned=(1,)
)
ZB_H2 = ScheduleInfo(
    "zb-h2",
    lambda r: zb_h2(r.p, r.m),
    splits=True,
    bubble="span (p-1)(F+I-2W)",
    fill=0.3,
    live=lambda p, m, v: 2 * p - 1,
)


# ---- order by words -------------------------------------------------------------------------------------------------
# A rank's order written in words, for stages in a V: rank r owns stages r and 2p-1-r, its chunks 0 and 1.


class OrderWriter:
    """`do("F0", "I1", "F1&B0")`: the next forward of chunk 0, the next input gradient of chunk 1, and a joined pair."""

    def __init__(self, p: int, rank: int) -> None:
        self.stages = rank, 2 * p - 1 - rank
        self.done: Counter[tuple[Kind, int]] = Counter()  # kind and chunk -> microbatches written
        self.written: Order = []

    def do(self, *words: str, times: int = 1) -> None:
        for word in words * times:
            first, *partner = word.split("&")
            self.write(first, joined=bool(partner))
            for second in partner:
                self.write(second)

    def write(self, word: str, joined: bool = False) -> None:
        kind, chunk = Kind(word[0]), int(word[1])
        kinds = (INPUT_GRAD, WEIGHT_GRAD) if kind is BACKWARD else (kind,)  # a backward counts as both halves
        self.written.append(Action(kind, self.stages[chunk], self.done[kinds[0], chunk], joined))
        self.done.update((half, chunk) for half in kinds)

    def forwards(self, chunk: int) -> int:
        return self.done[FORWARD, chunk]

    def weight_grads(self, chunk: int) -> int:
        return self.done[WEIGHT_GRAD, chunk]


# ---- zero bubble v --------------------------------------------------------------------------------------------------
# ZB-V: zero bubble in 1F1B's memory, by placing stages in a V (Qi et al. 2023).
#
# Rank r owns stages r and 2p-1-r, so that the last rank of the way down is the first of the way up, and rank 0 sees
# the loss of a microbatch as soon as it is there.


def zb_v(p: int, m: int) -> Schedule:
    """Every rank holds p whole activations; no bubble in any rank's span when F = I = W and m >= 2p - 1."""
    orders = [_zb_v_order(p, m, rank) for rank in range(p)]
    promise = Bounds((min(2 * m, 2 * p),) * p, slots=6 * m + p - 1 if m >= 2 * p - 1 else None)
    return wire("zb-v", Placement.vee(p), m, orders, promise=promise)


def _zb_v_order(p: int, m: int, r: int) -> Order:
    """The paper's phases: warm-up, steady state, cool-down."""
    rank = OrderWriter(p, r)
    n = max(m, 2 * p - 1)  # the pattern needs this many microbatches; those beyond m are left out again
    # Warm-up: down the V, then down and up in turn, then the first gradients.
    rank.do("F0", times=2 * (p - r) - 1)
    rank.do("F1", "F0", times=r)
    rank.do("F1", "I1", "W1", times=p - r)
    # Steady state: every gradient makes room for a forward.
    while rank.forwards(1) < rank.forwards(0) or rank.forwards(0) < n:
        if rank.forwards(0) < n:
            rank.do("F0")
        rank.do("I0", "W0", "F1", "I1", "W1")
    # Cool-down: input gradients first, because other ranks wait for them; then the weight gradients that are left.
    rank.do("I0", "I1", times=r)
    rank.do("I0", "W0", times=p - r)
    rank.do("W1", times=n - rank.weight_grads(1))
    rank.do("W0", times=n - rank.weight_grads(0))
    return [action for action in rank.written if action.microbatch < m]


ZB_V = ScheduleInfo(
    "zb-v",
    lambda r: zb_v(r.p, r.m),
    vee,
    chunks=2,
    splits=True,
    bubble="span 0 if F=I=W",
    fill=0.3,
    waits=True,
    planned=(2,),
)


# ---- v half min -----------------------------------------------------------------------------------------------------
# V-Half and V-Min: half or a third of 1F1B's memory, from a building block repeated every six slots (Qi et al. 2024).
#
# Stages lie in a V. One microbatch's F0, F1, I1, I0 stand at fixed offsets on each rank, the next microbatch's six
# slots later, and so on; the offsets decide how long an activation lives, and with it the peak. The two free slots of
# each six take the W. That is the repeated pattern. It is loose at both ends, so it is then played slot by slot: a
# rank whose next action is not ready pulls a later one forward, as long as that does not raise the peak.


PERIOD = 6
Offsets = tuple[int, int, int, int]  # of F0, F1, I1, I0


def v_half(p: int, m: int) -> Schedule:
    """About half of 1F1B's activations, p/2 + 1, and less than half of its bubble."""
    delta = 0 if p % 2 else 3
    offsets = [(2 * r, 3 * p - r - 2, 3 * p + delta + 2 * r - 1, 6 * p + delta - r - 2) for r in range(p)]
    return _repeated("v-half", p, m, offsets)


def v_min(p: int, m: int) -> Schedule:
    """About a third of 1F1B's activations, for two thirds of its bubble."""
    delta = 0 if p % 3 else 2
    offsets = [(r, 2 * p - r - 1, 2 * p + delta + r, 4 * p + delta - r - 1) for r in range(p)]
    return _repeated("v-min", p, m, offsets)


def _repeated(name: str, p: int, m: int, offsets: list[Offsets]) -> Schedule:
    patterns = [_pattern(offsets[rank], (rank, 2 * p - 1 - rank), m) for rank in range(p)]
    peak = max(map(peak_live, patterns))
    orders, slots = _play(patterns, 2 * p, peak)
    return wire(name, Placement.vee(p), m, orders, promise=Bounds((peak,) * p, slots))


def _pattern(offsets: Offsets, stages: tuple[int, int], m: int) -> Order:
    """One rank's actions as the building block has them, each W in the first free slot after its I."""
    down, up = stages
    block = ((FORWARD, down), (FORWARD, up), (INPUT_GRAD, up), (INPUT_GRAD, down))
    fixed = {
        offset + PERIOD * k: Action(kind, stage, k)
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
        action = self.pattern[place]
        self.played.append(action)
        self.done[action[:2]] += 1
        self.live += _CHANGE[action.kind]
        self.left -= 1
        self.taken[place] = True
        while self.front < len(self.taken) and self.taken[self.front]:
            self.front += 1


_CHANGE = {FORWARD: 1, INPUT_GRAD: 0, WEIGHT_GRAD: -1}  # of the number of live activations


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


# ---- dualpipe v -----------------------------------------------------------------------------------------------------
# DualPipeV: DeepSeek's DualPipe cut in half; forwards and backwards of different microbatches run overlapped.
#
# V placement. In the steady state every forward is joined with a whole backward of the other chunk (F&B), so that the
# messages of experts inside one hide under the compute of the other (`costs.py` has the rule); `--times fb=` says how
# long an overlapped pair takes. Deferred weight gradients wait in a FIFO queue.


def dualpipe_v(p: int, m: int) -> Schedule:
    """A rank holds 2p + 1 chunk activations; the bubble is (p - 1)(F&B + B - 3W) in chunk times."""
    least = DUALPIPE_V.least * p
    if m < least:
        raise UserError(
            f"dualpipe-v needs at least 2p={least} microbatches to have forwards and backwards to pair, and there are "
            f"{m}; use zb-v, or at least {least} microbatches"
        )
    orders = [_dualpipe_v_order(p, m, rank) for rank in range(p)]
    promise = Bounds((min(2 * m, 2 * p + 1),) * p, slots=6 * m + 2 * (p - 1))
    return wire("dualpipe-v", Placement.vee(p), m, orders, promise=promise)


def _dualpipe_v_order(p: int, m: int, r: int) -> Order:
    """DeepSeek's eight phases."""
    rank, below = OrderWriter(p, r), p - r - 1
    # 1: F0 until the first activation has reached the last rank.
    rank.do("F0", times=2 * below)
    # 2: F0 F1, as the first microbatches come up again.
    rank.do("F0", "F1", times=r + 1)
    # 3: I1 W1 F1: the first gradients, split, so that the rank above has its own soon.
    rank.do("I1", "W1", "F1", times=below)
    # 4, the steady state: F0&B1 F1&B0. The last rank feeds itself: its first backward needs the forward right before
    # it, so they cannot overlap.
    first = ("F0&B1",) if below else ("F0", "B1")
    rank.do(*first, "F1&B0")
    rank.do("F0&B1", "F1&B0", times=m - 2 * p + r)
    # 5: B1 F1&B0, as no new microbatch comes in.
    rank.do("B1", "F1&B0", times=below)
    # 6: B1 B0; after the first half only their I, with the W deferred to fill the tail.
    gradients = [f"{'B' if step <= r else 'I'}{1 - step % 2}" for step in range(2 * (r + 1))]
    rank.do(*gradients)
    # 7: W I0: deferred weight gradients fill the gaps, the one that has waited longest first.
    deferred = [f"W{word[1]}" for word in gradients if word[0] == "I"] + ["W0"] * below
    for word in deferred[:below]:
        rank.do(word, "I0")
    # 8: the weight gradients that are left.
    rank.do(*deferred[below:])
    return rank.written


DUALPIPE_V = ScheduleInfo(
    "dualpipe-v",
    lambda r: dualpipe_v(r.p, r.m),
    vee,
    chunks=2,
    splits=True,
    least=2,
    bubble="(p-1)(F&B+B-3W)/2",
    joins=True,
    fill=0.7,
    live=lambda p, m, v: p + 1.0,
    planned=(2,),
)
