"""The kernels against the definition, the merge, and spans against masks."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fivefold.model import kernels
from fivefold.model.layers import TokenPositions, accum_dtype
from fivefold.model.masks import Attended, DocumentMask, causal_spans, check_runs, full_spans
from fivefold.model.ops import LocalOps

CPU = torch.device("cpu")
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA"))]
# What flash attention computes in bf16 is off by a few roundings of its output and of the probabilities.
BOUND = {torch.float64: 1e-10, torch.float32: 64 * 2**-24, torch.bfloat16: 8 * 2**-8}


def worst(a: Tensor, b: Tensor) -> float:
    return ((a.double().cpu() - b.cpu()).abs().max() / b.abs().max()).item()


def inputs(queries: int, keys: int, dtype: torch.dtype, device: str, heads: int = 4, kv_heads: int = 2, dim: int = 12):
    torch.manual_seed(0)
    shapes = [(2, heads, queries, dim), (2, kv_heads, keys, dim), (2, kv_heads, keys, dim), (2, heads, queries, dim)]
    return [torch.randn(shape, dtype=torch.float64).to(device, dtype) for shape in shapes]


def reference(q: Tensor, k: Tensor, v: Tensor, grad: Tensor, seen: Tensor) -> list[Tensor]:
    """Output, LSE and gradients by the definition, in float64; rows that see nothing get 0 and -inf."""
    q, k, v, grad = (x.detach().double().cpu() for x in (q, k, v, grad))
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    group = q.shape[1] // k.shape[1]
    scores = q @ k.repeat_interleave(group, 1).mT / math.sqrt(q.shape[-1])
    scores = scores.masked_fill(~seen, -math.inf)
    lse = scores.logsumexp(-1)
    p = torch.exp(scores - lse.masked_fill(lse == -math.inf, 0.0)[..., None])
    out = p @ v.repeat_interleave(group, 1)
    return [x.detach() for x in (out, lse, *torch.autograd.grad(out, (q, k, v), grad))]


def compare(
    q: Tensor, k: Tensor, v: Tensor, grad: Tensor, seen: Tensor, causal: bool, spans: DocumentMask | None
) -> None:
    out, lse, *gradients = reference(q, k, v, grad, seen)
    got, got_lse = kernels.forward(q, k, v, causal, spans)
    blank = lse == -math.inf
    assert torch.equal(got_lse.cpu() == -math.inf, blank)
    assert worst(got, out) <= BOUND[q.dtype]
    assert worst(got_lse.masked_fill(blank.to(q.device), 0.0), lse.masked_fill(blank, 0.0)) <= BOUND[q.dtype]
    # As a part of a longer row: out and lse come from elsewhere. Here they are the exact ones.
    exact = (out.to(q), lse.masked_fill(blank, 0.0).to(q.device, accum_dtype(q.dtype)))
    for ours, theirs in zip(kernels.backward(grad, Attended(q, k, v, *exact), causal, spans), gradients, strict=True):
        assert ours.shape == theirs.shape
        assert worst(ours, theirs) <= BOUND[q.dtype]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kv_heads", [1, 4])
def test_whole_tiles(dtype: torch.dtype, device: str, kv_heads: int) -> None:
    for queries, keys, causal in ((5, 5, True), (3, 7, False), (1, 4, False)):
        seen = torch.ones(queries, keys, dtype=torch.bool)
        compare(*inputs(queries, keys, dtype, device, kv_heads=kv_heads), seen.tril() if causal else seen, causal, None)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_spans_are_the_mask_of_the_documents(dtype: torch.dtype, device: str) -> None:
    own = np.array([[0, 0, 1, 2, 2, 2], [0, 0, 0, 0, 0, 0]])
    seen = torch.from_numpy(own[:, None, :, None] == own[:, None, None, :]).tril()
    compare(*inputs(6, 6, dtype, device), seen, True, causal_spans(own, torch.device(device)))

    asking, asked = np.array([[3, 3, 4, 4], [7, 7, 7, 7]]), np.array([[1, 2, 3, 3, 3], [5, 5, 6, 6, 6]])
    seen = torch.from_numpy(asking[:, None, :, None] == asked[:, None, None, :])
    assert not seen[1].any()
    compare(*inputs(4, 5, dtype, device), seen, False, full_spans(asking, asked, torch.device(device)))


def test_one_token_documents_are_packed_for_more_than_one_query() -> None:
    packed = causal_spans(np.array([[0, 1, 2]]), CPU).packed
    assert packed.cu_seqlens_q.tolist() == packed.cu_seqlens_k.tolist() == [0, 1, 2, 3, 3]
    assert (packed.max_seqlen_q, packed.max_seqlen_k, packed.query_index, packed.key_index) == (2, 1, None, None)


def test_packed_rows_are_those_of_the_spans() -> None:
    spans = full_spans(np.array([[1, 2], [4, 4], [9, 9]]), np.array([[0, 0, 1], [4, 4, 4], [5, 6, 7]]), CPU)
    queries, keys, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k = spans.packed
    assert queries is not None
    assert queries.tolist() == [0, 2, 3]
    assert keys is not None
    assert keys.tolist() == [2, 3, 4, 5]
    assert (cu_seqlens_q.tolist(), cu_seqlens_k.tolist()) == ([0, 1, 3], [0, 1, 4])
    assert (max_seqlen_q, max_seqlen_k) == (2, 4)


def test_documents_that_return_are_refused() -> None:
    check_runs(np.array([[0, 0, 1], [3, 3, 3]]))
    with pytest.raises(ValueError, match="row 1 fall"):
        check_runs(np.array([[0, 0, 1], [0, 1, 0]]))


def test_matrix_products_are_the_kernel() -> None:
    for causal in (False, True):
        q, k, v, grad = inputs(6, 6, torch.float64, "cpu")
        out, lse = kernels.forward(q, k, v, causal)
        for ours, theirs in zip(kernels.products(q, k, v, causal), (out, lse), strict=True):
            assert worst(ours, theirs) <= 1e-12
        of = Attended(q, k, v, out, lse)
        ours = kernels.products_backward(grad, of, causal)
        for a, b in zip(ours, kernels.backward(grad, of, causal), strict=True):
            assert worst(a, b) <= 1e-12


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_parts_merge_to_the_whole_and_blank_rows_survive(dtype: torch.dtype) -> None:
    q, k, v, _ = inputs(4, 9, dtype, "cpu")
    whole, whole_lse = kernels.forward(q, k, v, False)
    out, lse = torch.zeros_like(whole), torch.full_like(whole_lse, -math.inf)
    blank, blank_lse = out.clone(), lse.clone()
    kernels.merge_(out, lse, blank, blank_lse)
    assert torch.equal(out, blank)
    assert torch.equal(lse, blank_lse)
    for keys in (slice(0, 2), slice(2, 3), slice(3, 9)):
        kernels.merge_(out, lse, *kernels.forward(q, k[:, :, keys], v[:, :, keys], False))
        before = out.clone()
        kernels.merge_(out, lse, blank, blank_lse)
        assert torch.equal(out, before)
    assert worst(out, whole.double()) <= BOUND[dtype]
    assert worst(lse, whole_lse.double()) <= BOUND[dtype]


def test_a_part_with_far_larger_scores_takes_over_without_overflow() -> None:
    out, lse = torch.ones(1, 1, 2, 3), torch.tensor([[[-1e4, 1e4]]])
    kernels.merge_(out, lse, torch.full_like(out, 5.0), -lse)
    assert out[0, 0].tolist() == [[5.0] * 3, [1.0] * 3]
    assert lse.tolist() == [[[1e4, 1e4]]]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_documents_on_a_gpu_look_at_the_same_as_on_a_cpu(dtype: torch.dtype) -> None:
    documents = torch.tensor([[0, 0, 1, 2, 2, 2], [0, 0, 0, 0, 0, 0]])
    place = TokenPositions(torch.arange(6).expand(2, 6), torch.zeros(2, dtype=torch.int64), 6, documents)
    there = TokenPositions(place.position_ids.cuda(), place.samples.cuda(), 6, documents.cuda())
    q, k, v, grad = inputs(6, 6, dtype, "cuda")
    expected = reference(q, k, v, grad, place.mask())
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    out = LocalOps().attend(q, k, v, LocalOps().attention_mask(there, dtype=dtype))
    gradients = torch.autograd.grad(out, (q, k, v), grad)
    for ours, theirs in zip((out, *gradients), (expected[0], *expected[2:]), strict=True):
        assert worst(ours, theirs) <= BOUND[dtype]


class Flash(TorchDispatchMode):
    """Flash attention's operators by the definition, on any device: their arguments, layouts and demands."""

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, unused = op.overloadpacket.__name__, torch.empty(0)
        kwargs = kwargs or {}
        if "flash_attention" not in name or name.endswith("cpu"):
            return op(*args, **kwargs)
        given = {a.name: value for a, value in zip(op._schema.arguments, args, strict=False)}
        assert given.get("dropout_p", 0.0) == 0.0  # the dispatcher leaves defaults out
        assert kwargs["scale"] == pytest.approx(12**-0.5)
        backward, dense = name.endswith("backward"), name.startswith("_scaled")
        first = {"grad_out": given["grad_out"], "out": given["out"]} if backward else {}
        tensors = first | {n: given[n] for n in ("query", "key", "value")}
        assert all(x.shape[-1] == 16 and x.stride(-1) == 1 for x in tensors.values())
        results = self.tile(given, tensors, given.get("logsumexp")) if dense else self.varlen(given, tensors)
        return results if backward else (*results, *([None, None, 0, 0] * dense), unused, unused, unused)

    def tile(self, given: Any, x: dict[str, Tensor], lse: Tensor | None) -> tuple[Tensor, ...]:
        causal = given.get("is_causal", False)
        q = x["query"] * math.sqrt(16 / 12)  # the definition takes the scale from the padded width
        assert not causal or q.shape[2] == x["key"].shape[2]
        if lse is None:
            return kernels.products(q, x["key"], x["value"], causal)
        assert lse.is_contiguous()
        dq, dk, dv = kernels.products_backward(x["grad_out"], Attended(q, x["key"], x["value"], x["out"], lse), causal)
        return dq * math.sqrt(16 / 12), dk, dv

    def varlen(self, given: Any, x: dict[str, Tensor]) -> tuple[Tensor, ...]:
        starts = {"query": given["cum_seq_q"], "key": given["cum_seq_k"]}
        assert all(cuts.dtype == torch.int32 and cuts.is_contiguous() for cuts in starts.values())
        assert given["max_q"] > 1
        parts = []
        for segment in range(len(starts["query"]) - 1):
            cut = {n: slice(*starts["key" if n in ("key", "value") else "query"][segment : segment + 2]) for n in x}
            assert all(c.stop - c.start > 0 for c in cut.values())
            assert cut["query"].stop - cut["query"].start <= given["max_q"]
            assert cut["key"].stop - cut["key"].start <= given["max_k"]
            piece = {n: value[cut[n]].transpose(0, 1)[None] for n, value in x.items()}  # [1, heads, rows, D]
            lse = given["logsumexp"][None, :, cut["query"]].contiguous() if "logsumexp" in given else None
            parts.append(self.tile(given, piece, lse))
        assert cut["query"].stop == len(x["query"])
        assert cut["key"].stop == len(x["key"])
        back = [torch.cat([part[i][0] for part in parts], dim=1) for i in range(len(parts[0]))]  # [heads, rows, ...]
        return tuple(part.transpose(0, 1) if part.ndim == 3 else part for part in back)


def test_flash_attention_is_called_as_it_asks_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """What runs on a GPU, here with its operators played by the definition in float64."""
    monkeypatch.setattr(kernels, "takes_flash", lambda q: True)
    with Flash():
        whole = torch.ones(5, 5, dtype=torch.bool)
        compare(*inputs(5, 5, torch.float64, "cpu"), whole.tril(), True, None)
        compare(*inputs(3, 5, torch.float64, "cpu"), whole[:3], False, None)
        test_spans_are_the_mask_of_the_documents(torch.float64, "cpu")
        documents = np.array([[0, 0, 1, 2, 2, 2], [0, 0, 0, 0, 0, 0]])
        q, k, v, grad = inputs(6, 6, torch.float64, "cpu")
        seen = torch.from_numpy(documents[:, None, :, None] == documents[:, None, None, :]).tril()
        packed = kernels.packed_attention(q, k, v, causal_spans(documents, CPU).packed)
        assert worst(packed, reference(q, k, v, grad, seen)[0]) <= 1e-10
