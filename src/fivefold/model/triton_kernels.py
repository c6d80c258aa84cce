"""Kernels for a GPU where the compiler's own read or write memory more than once.

    permute, combine      the rows of tokens to their experts and back, and the backward passes of both
    log_sum_exp           of logits: one pass over them, where the compiler's takes two
    zero_empty_groups     gradients of experts without tokens: the host does not know which they are

All are deterministic: a program writes what no other one does, and adds in a fixed order. They are operators, so that
graphs of compiled blocks contain them. Shapes: n tokens, E hidden, K experts of each token.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_WIDTH = 16384  # of a row that one program holds
_ZERO_BLOCK, _LOGITS_BLOCK = 4096, 8192


# ---- rows of experts -------------------------------------------------------------------------------------------------
# One program for each token: its own row, [E], and those of its K assignments, wherever the order by expert has them.


@triton.jit
def _permute(x, row_of, rows, width, K: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < width
    value = tl.load(x + token * width + columns, mask=mask)
    for k in tl.static_range(K):
        row = tl.load(row_of + token * K + k).to(tl.int64)
        tl.store(rows + row * width + columns, value, mask=mask)


@triton.jit
def _combine(
    rows, row_of, weights, out, width, K: tl.constexpr, BLOCK: tl.constexpr, SUM: tl.constexpr, WEIGHTED: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < width
    total = tl.zeros((BLOCK,), dtype=SUM)
    for k in tl.static_range(K):
        row = tl.load(row_of + token * K + k).to(tl.int64)
        value = tl.load(rows + row * width + columns, mask=mask, other=0.0).to(SUM)
        if WEIGHTED:
            value = value * tl.load(weights + token * K + k).to(SUM)
        total += value
    tl.store(out + token * width + columns, total.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _combine_backward(
    gradient, outputs, weights, row_of, for_outputs, for_weights, width,
    K: tl.constexpr, BLOCK: tl.constexpr, SUM: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < width
    dy = tl.load(gradient + token * width + columns, mask=mask, other=0.0).to(SUM)
    for k in tl.static_range(K):
        row = tl.load(row_of + token * K + k).to(tl.int64)
        weight = tl.load(weights + token * K + k).to(SUM)
        output = tl.load(outputs + row * width + columns, mask=mask, other=0.0).to(SUM)
        tl.store(for_weights + token * K + k, tl.sum(dy * output))
        tl.store(for_outputs + row * width + columns, (dy * weight).to(for_outputs.dtype.element_ty), mask=mask)


@torch.library.custom_op("fivefold::permute", mutates_args=())
def permute(x: Tensor, row_of: Tensor) -> Tensor:
    """x [n, E] -> [n * K, E]: assignment a, of token a // K, becomes row `row_of`[a]."""
    x = x.contiguous()
    rows = x.new_empty(len(row_of), x.shape[1])
    if len(row_of):
        _permute[(len(x),)](x, row_of, rows, x.shape[1], K=len(row_of) // len(x), **_sizes(x.shape[1]))
    return rows


@permute.register_fake
def _(x: Tensor, row_of: Tensor) -> Tensor:
    return x.new_empty(row_of.shape[0], x.shape[1])


@torch.library.custom_op("fivefold::combine", mutates_args=())
def combine(rows: Tensor, row_of: Tensor, weights: Tensor | None, tokens: int) -> Tensor:
    """rows [n * K, E] -> [n, E]: the sum of each token's rows, the first assignment's first, times its weights."""
    rows = rows.contiguous()
    out = rows.new_empty(tokens, rows.shape[1])
    if len(row_of):
        _combine[(tokens,)](
            rows, row_of, rows if weights is None else weights.contiguous(), out, rows.shape[1],
            K=len(row_of) // tokens, SUM=_sum_type(rows), WEIGHTED=weights is not None, **_sizes(rows.shape[1]),
        )  # fmt: skip
    return out


@combine.register_fake
def _(rows: Tensor, row_of: Tensor, weights: Tensor | None, tokens: int) -> Tensor:
    return rows.new_empty(tokens, rows.shape[1])


@torch.library.custom_op("fivefold::combine_backward", mutates_args=())
def combine_backward(gradient: Tensor, outputs: Tensor, weights: Tensor, row_of: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of a weighted `combine`: of its rows, and of the weights [n, K]."""
    gradient, outputs, weights = gradient.contiguous(), outputs.contiguous(), weights.contiguous()
    for_outputs, for_weights = torch.empty_like(outputs), torch.empty_like(weights)
    if len(row_of):
        _combine_backward[(len(gradient),)](
            gradient, outputs, weights, row_of, for_outputs, for_weights, outputs.shape[1],
            K=weights.shape[1], SUM=_sum_type(outputs), **_sizes(outputs.shape[1]),
        )  # fmt: skip
    return for_outputs, for_weights


@combine_backward.register_fake
def _(gradient: Tensor, outputs: Tensor, weights: Tensor, row_of: Tensor) -> tuple[Tensor, Tensor]:
    return outputs.new_empty(outputs.shape), weights.new_empty(weights.shape)


def _sum_type(x: Tensor) -> tl.dtype:
    return tl.float64 if x.dtype == torch.float64 else tl.float32


def _sizes(width: int) -> dict[str, int]:
    block = triton.next_power_of_2(width)
    return {"BLOCK": block, "num_warps": max(1, min(16, block // 512))}


# ---- logits ----------------------------------------------------------------------------------------------------------


@triton.jit
def _log_sum_exp(logits, out, width, stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    largest, total = float("-inf"), 0.0
    for first in range(0, width, BLOCK):
        columns = first + tl.arange(0, BLOCK)
        value = tl.load(logits + row * stride + columns, mask=columns < width, other=float("-inf")).to(tl.float32)
        now = tl.maximum(largest, tl.max(value))
        total = total * tl.exp(largest - now) + tl.sum(tl.exp(value - now))
        largest = now
    tl.store(out + row, largest + tl.log(total))


@torch.library.custom_op("fivefold::log_sum_exp", mutates_args=())
def log_sum_exp(logits: Tensor) -> Tensor:
    """logits [N, V] in 16 bits -> [N] in float32."""
    out = logits.new_empty(len(logits), dtype=torch.float32)
    if len(logits):
        rows = logits if logits.stride(1) == 1 else logits.contiguous()
        _log_sum_exp[(len(rows),)](rows, out, rows.shape[1], rows.stride(0), BLOCK=_LOGITS_BLOCK, num_warps=8)
    return out


@log_sum_exp.register_fake
def _(logits: Tensor) -> Tensor:
    return logits.new_empty(logits.shape[0], dtype=torch.float32)


# ---- empty groups ----------------------------------------------------------------------------------------------------
# A masked fill would read and write the gradients of all experts, which are the largest of a model.


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
    _zero[(groups, min(64, triton.cdiv(size, _ZERO_BLOCK)))](gradients, ends, size, BLOCK=_ZERO_BLOCK)
    return gradients
