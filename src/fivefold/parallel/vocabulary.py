"""A vocabulary that is dealt out over tp: every rank has the logits of its words, and they are never gathered."""

import torch
from torch import Tensor

from fivefold.layout.sharding import chunk
from fivefold.model.head import Vocabulary
from fivefold.parallel.collectives import all_reduce, gather_sequence, scatter_sequence, wait
from fivefold.parallel.mesh import Axis


class SharedVocabulary(Vocabulary):
    def __init__(self, size: int, axis: Axis, sp: bool):
        super().__init__(size)
        self.axis, self.sp = axis, sp
        self.mine, self.most = chunk(size, axis.size, axis.rank), len(chunk(size, axis.size, 0))

    def gather(self, x: Tensor) -> Tensor:
        return gather_sequence(x, self.axis) if self.sp else x

    def agree(self, lse: Tensor, sums: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        largest = wait(all_reduce(lse, self.axis, "max"), self.axis)
        every, *others = wait(all_reduce(torch.stack([(lse - largest).exp(), *sums]), self.axis), self.axis)
        return largest + every.log(), others

    def give_back(self, dx: Tensor) -> Tensor:
        return scatter_sequence(dx, self.axis) if self.sp else all_reduce(dx, self.axis)

    def arrived(self, dx: Tensor) -> Tensor:
        return wait(dx, self.axis)
