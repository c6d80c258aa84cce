"""What happens to one run of the soak: a script of faults, drawn from a seed.

script = script_of(17)
script.segments[0].layout, script.segments[0].faults      # 'dp=2,tp=2', ['kill@rank=1,step=5,start=0', ...]

A segment is one command. It ends by SIGTERM or with the last step, and the next one goes on in another layout. Faults
come one after the other, each in a start of its own and at a later step than the one before, now and then two at once.
"""

import random
from dataclasses import dataclass, field

STEPS = 36
EVERY = 3  # steps between checkpoints
LAYOUTS = (
    "dp=2,zero=1", "dp=2,zero=3", "tp=2,sp", "pp=2,microbatches=2", "cp=2", "dp=3,zero=2", "dp=2,tp=2", "dp=4,zero=1",
    "tp=2,pp=2,microbatches=4", "dp=2,pp=2,zero=1,microbatches=2,schedule=zb-v", "dp=2,cp=2,zero=3", "dp=4,zero=2",
)  # fmt: skip
# Of each kind: how often it is drawn, and whether the start ends with it. `write` and `commit` are parts of a save.
KINDS = {
    "kill": (5, True), "segv": (1, True), "raise": (2, True), "stop": (2, True), "nan": (2, True), "cut": (3, True),
    "lose": (4, True), "kill at=write": (2, True), "kill at=commit": (2, True), "full at=write": (2, False),
    "slow": (2, False), "flip at=weight": (2, True), "flip at=shard": (2, True), "flip at=read": (2, False),
}  # fmt: skip
TOGETHER = ("kill", "segv", "raise", "cut", "slow")  # what a second fault may be


@dataclass
class Segment:
    layout: str
    ranks: int
    faults: list[str] = field(default_factory=list)
    last: bool = False


@dataclass
class Script:
    seed: int
    segments: list[Segment]

    @property
    def faults(self) -> list[str]:
        return [fault for segment in self.segments for fault in segment.faults]


def script_of(seed: int) -> Script:
    draw = random.Random(seed)
    step, segments = 1, list[Segment]()
    for last in [False] * draw.randint(0, 2) + [True]:
        layout = draw.choice(LAYOUTS)
        segment = Segment(layout, ranks_of(layout), last=last)
        step = _disturbed(segment, draw, step)
        if not last:
            step = min(STEPS - 4, step + draw.randint(2, 4))
            segment.faults.append(f"term@rank=0,step={step},starts=99")  # which is there whatever was lost
        segments.append(segment)
    return Script(seed, segments)


def _disturbed(segment: Segment, draw: random.Random, step: int) -> int:
    """Give a segment its faults, later than `step`; the step of the last of them."""
    start = 0
    for _ in range(draw.randint(1, 3)):
        kind = draw.choices(list(KINDS), [often for often, _ in KINDS.values()])[0]
        step = min(STEPS - 3, step + draw.randint(2, 5))
        rank = draw.randrange(segment.ranks)
        word, _, at = kind.partition(" ")
        if at in ("at=write", "at=commit"):
            step += -step % EVERY
            rank = 0 if at == "at=commit" else rank  # which rank 0 does for all
        where = f"rank={rank},step={step},start={start}" + (f",{at}" if at else "")
        if word == "lose":
            segment.faults.append(f"lose@rank={rank},step={step},start={start},until={step + draw.randint(3, 8)}")
            return step  # starts are not counted from here on: one more comes when the rank is back
        if word == "slow":
            where += f",until={step + 2}"
        if at == "at=read":  # of the next start, which something has to make
            segment.faults.append(f"kill@rank={rank},step={step},start={start}")
            where, start = f"rank=0,start={start + 1},at=read", start + 1
        segment.faults.append(f"{word}@{where}")
        if draw.random() < 0.2 and segment.ranks > 1 and not at:
            other = (rank + draw.randrange(1, segment.ranks)) % segment.ranks
            segment.faults.append(f"{draw.choice(TOGETHER)}@rank={other},step={step},start={start}")
            start += not KINDS[kind][1] and not segment.faults[-1].startswith("slow")
        start += KINDS[kind][1]
    return step


def ranks_of(layout: str) -> int:
    ranks = 1
    for word in layout.split(","):
        name, _, value = word.partition("=")
        ranks *= int(value) if name in ("dp", "tp", "pp", "cp") else 1
    return ranks
