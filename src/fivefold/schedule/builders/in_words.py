"""A rank's order written in words, for stages in a V: rank r owns stages r and 2p-1-r, its chunks 0 and 1."""

from collections import Counter

from fivefold.schedule.actions import BACKWARD, FORWARD, INPUT_GRAD, WEIGHT_GRAD, Action, Kind
from fivefold.schedule.wiring import Order


class InWords:
    """`do("F0", "I1", "F1&B0")`: the next forward of chunk 0, the next input gradient of chunk 1, and a joined pair."""

    def __init__(self, p: int, rank: int) -> None:
        self.stages = rank, 2 * p - 1 - rank
        self.done: Counter[tuple[Kind, int]] = Counter()  # kind and chunk -> microbatches begun
        self.written: Order = []

    def do(self, *words: str, times: int = 1) -> None:
        for word in words * times:
            first, *partner = word.split("&")
            self.write(first, joined=bool(partner))
            for second in partner:
                self.write(second)

    def write(self, word: str, joined: bool = False) -> None:
        kind, chunk = Kind(word[0]), int(word[1])
        counted = (INPUT_GRAD, WEIGHT_GRAD) if kind is BACKWARD else (kind,)  # a backward is both halves
        self.written.append(Action(kind, self.stages[chunk], self.done[counted[0], chunk], joined))
        self.done.update((half, chunk) for half in counted)

    def forwards(self, chunk: int) -> int:
        return self.done[FORWARD, chunk]

    def weight_grads(self, chunk: int) -> int:
        return self.done[WEIGHT_GRAD, chunk]
