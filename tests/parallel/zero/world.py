"""What the tests of data parallelism share: a small model, its data, one process as the reference, and ranks."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fivefold.layout.layout import Layout
from fivefold.model.decoder import Decoder
from fivefold.model.init import initialise
from fivefold.model.layers import TokenPositions
from fivefold.model.linear_cross_entropy import Targets, loss_sum
from fivefold.model.ops import LocalOps
from fivefold.optim.adamw import AdamW
from fivefold.parallel.collectives import full_tensor
from fivefold.parallel.fsdp import FullySharded
from fivefold.parallel.mesh import Mesh
from fivefold.parallel.optimizer import Optimizer
from fivefold.parallel.tensor import TensorParallel
from fivefold.parallel.weights import Weights
from fivefold.parallel.zero import ZeroBuckets
from fivefold.spec.model import ModelSpec
from fivefold.spec.presets import preset

SEED, S, STEPS = 7, 6, 2
BOUND = 1e-10  # float64, max|a-b| / max|b|
CONFIG = AdamW(lr=1e-2, clip=0.5, weight_decay=0.1)
SMALL = preset("tiny", layers=2, hidden=16, heads=4, kv_heads=2, head_dim=4, ffn=24, vocab=37)
EVEN = preset("tiny", layers=2, hidden=16, heads=4, kv_heads=4, head_dim=4, ffn=32, vocab=48)


@dataclass(frozen=True)
class Run:
    """What a rank saw: losses are this rank's sums, everything else is of the whole model."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: dict[str, Tensor] = field(default_factory=dict)  # of the first step
    masters: dict[str, Tensor] = field(default_factory=dict)  # after the last
    moments: dict[str, Tensor] = field(default_factory=dict)
    model: dict[str, Tensor] = field(default_factory=dict)  # this rank's own weights, after the last step


def samples(spec: ModelSpec, step: int, count: int, empty: tuple[int, ...] = ()) -> tuple[Tensor, Tensor, Tensor]:
    """`count` sequences of tokens, targets and masks; those numbered in `empty` carry no loss at all."""
    random = torch.Generator().manual_seed(100 + step)
    tokens, targets = torch.randint(spec.vocab, (2, count, S), generator=random)
    mask = torch.rand(count, S, generator=random) < 0.7
    mask[list(empty)] = False
    return tokens, targets, mask


def reference(spec: ModelSpec, count: int, empty: tuple[int, ...] = (), dtype: torch.dtype = torch.float64) -> Run:
    """One process, the whole batch at once, stock AdamW."""
    model = Decoder(spec).to(dtype)
    initialise(model, spec, SEED)
    kinds = {p.name: p.kind for p in spec.parameters()}
    groups = [
        {"params": [p], "weight_decay": CONFIG.weight_decay if kinds[name] == "linear" else 0.0}
        for name, p in model.named_parameters()
    ]
    adam = torch.optim.AdamW(groups, lr=CONFIG.lr, betas=CONFIG.betas, eps=CONFIG.eps)
    run = Run()
    for step in range(STEPS):
        tokens, targets, mask = samples(spec, step, count, empty)
        # In bfloat16 the roundings are part of the comparison; wider, the loss is as it is defined.
        rounds = dtype == torch.bfloat16
        total = model(tokens, targets=Targets(targets, mask)) if rounds else loss_sum(model(tokens), targets, mask)
        loss = total / mask.sum()
        loss.backward()
        run.losses.append(loss.item())
        if step == 0:
            run.gradients.update({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
        run.norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), CONFIG.clip).item())
        adam.step()
        adam.zero_grad()
    run.masters.update({name: p.detach() for name, p in model.named_parameters()})
    run.moments.update({name: adam.state[p]["exp_avg_sq"] for name, p in model.named_parameters()})
    return run


def make(
    spec: ModelSpec, layout: Layout, dtype: torch.dtype, min_bucket_elements: int = 1000, device: str = "cpu"
) -> tuple[Decoder, LocalOps, Weights, Mesh]:
    """A model on this rank. Buckets are small here, so that there are several."""
    mesh = Mesh.of(layout, torch.device(device))
    ops = TensorParallel(spec, mesh) if layout.tp > 1 else LocalOps()
    with torch.device("meta"):
        model = Decoder(spec, layout.recompute, ops=ops)
    if isinstance(ops, TensorParallel):
        ops.shard_parameters(model)
    weights: Weights
    if layout.zero == 3:
        weights = FullySharded([model], spec, mesh, dtype, SEED)
    else:
        weights = ZeroBuckets([model], spec, mesh, dtype, SEED, min_bucket_elements=min_bucket_elements)
    return model, ops, weights, mesh


def microbatches(
    spec: ModelSpec, mesh: Mesh, step: int, count: int, empty: tuple[int, ...]
) -> tuple[list[tuple[Tensor, Tensor, Tensor]], int]:
    """This dp rank's part of the batch, cut up; and the global count of targets."""
    batch = [part.to(mesh.device) for part in samples(spec, step, count, empty)]
    mine = [part.chunk(mesh.dp.size)[mesh.dp.rank].chunk(mesh.layout.microbatches) for part in batch]
    return list(zip(*mine, strict=True)), int(batch[2].sum())


def forward_backward(model: Decoder, ops: LocalOps, weights: Weights, parts: list, count: int) -> float:
    total = 0.0
    for number, (tokens, targets, mask) in enumerate(parts, start=1):
        with weights.microbatch(last=number == len(parts)):
            loss = model(tokens, TokenPositions.of(tokens), Targets(targets, mask)) / count
            loss.backward()
        total += loss.item()
    weights.finish_grad_sync()
    return total


def train(
    rank: int,
    world: int,
    spec: ModelSpec,
    layout: Layout,
    count: int,
    empty: tuple[int, ...] = (),
    dtype: torch.dtype = torch.float64,
    device: str = "cpu",
) -> Run:
    """The same training as `reference`, in a layout."""
    model, ops, weights, mesh = make(spec, layout, dtype, device=device)
    optimizer = Optimizer(weights, spec, CONFIG, mesh)
    run = Run()
    for step in range(STEPS):
        parts, targets = microbatches(spec, mesh, step, count, empty)
        run.losses.append(forward_backward(model, ops, weights, parts, targets))
        if step == 0:
            grads = {
                name: weights.as_dtensor(name, p.grad) for name, p in weights.masters.items() if p.grad is not None
            }
            run.gradients.update({name: full_tensor(gradient).clone() for name, gradient in grads.items()})
        norm = optimizer.gradient_norm()
        run.norms.append(norm.item())
        optimizer.step(CONFIG.lr, norm)
    state = optimizer.state()
    run.masters.update({name: full_tensor(one["master"]) for name, one in state.items()})
    run.moments.update({name: full_tensor(one["exp_avg_sq"]) for name, one in state.items()})
    weights.wait_params()
    run.model.update({name: full_tensor(p.detach()) for name, p in model.named_parameters()})
    return run


def each(rank: int, world: int, function: Callable[..., Any], cases: list[tuple[Any, ...]]) -> list[Any]:
    """Several calls of a function in one start of the ranks, which costs more than most of them."""
    return [function(rank, world, *case) for case in cases]


def apart(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """The largest relative error over the tensors of b; one that is absent or of another shape is infinitely far."""
    # Without rotation a key's bias shifts all scores of a query alike, which softmax ignores: its gradient is rounding.
    a, b = ({name: x for name, x in one.items() if not name.endswith(".k.bias")} for one in (a, b))
    if not b or a.keys() != b.keys() or any(a[name].shape != b[name].shape for name in b):
        return float("inf")
    return max(((a[name] - b[name]).abs().max() / b[name].abs().max()).item() for name in b)
