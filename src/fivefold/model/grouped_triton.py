"""Zero the gradients of empty groups on a GPU, where the host does not know which are empty.

A masked fill would read and write the gradients of all experts, which are the largest of a model.
"""

import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096


@triton.jit
def _zero(gradients, ends, size, BLOCK: tl.constexpr):
    group = tl.program_id(0)
    end = tl.load(ends + group)
    start = tl.load(ends + group - 1, mask=group > 0, other=0)
    if start == end:
        for first in range(tl.program_id(1) * BLOCK, size, tl.num_programs(1) * BLOCK):
            offsets = first + tl.arange(0, BLOCK)
            zeros = tl.zeros((BLOCK,), dtype=gradients.dtype.element_ty)
            tl.store(gradients + group.to(tl.int64) * size + offsets, zeros, mask=offsets < size)


def zero_empty_groups(gradients: Tensor, ends: Tensor) -> Tensor:
    """Zero `gradients` [G, O, I] in place; group g has the rows from `ends`[g - 1] to `ends`[g]."""
    assert gradients.is_contiguous()
    groups, size = gradients.shape[0], gradients.shape[1] * gradients.shape[2]
    _zero[(groups, min(64, triton.cdiv(size, _BLOCK)))](gradients, ends, size, BLOCK=_BLOCK)
    return gradients
